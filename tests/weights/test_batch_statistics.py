"""Batch statistics of a trained network: which are frozen, and that training and prediction are then one function."""

from __future__ import annotations

import copy
import math
import pickle

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import bayesify
from bayesify import likelihoods, posteriors, priors
from bayesify.predictor import Batch
from bayesify.running.runner import Runner
from bayesify.training import ModelStack
from bayesify.weights.batch_statistics import is_trained

X = torch.randn(96, 3, generator=torch.Generator().manual_seed(1)) * 2 + 1
Y = (X.sum(1) > 3).long()
LOADER = DataLoader(TensorDataset(X, Y), batch_size=16, shuffle=True)


def network(batches: int = 60) -> nn.Module:
    """A network whose BatchNorm layers have seen some batches."""
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Linear(3, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 2)
    )
    with torch.no_grad():
        for batch in range(batches):
            net(X[torch.randperm(96, generator=torch.Generator().manual_seed(batch))[:32]])
    return net


def bayesian(posterior=None, net=None, **options):
    posterior = posteriors.MeanField() if posterior is None else posterior
    return bayesify.bayesianize(
        network() if net is None else net, posterior, likelihood=likelihoods.Categorical(), **options
    )


def statistics(bnn) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in bnn.network.named_buffers()}


# -- which ---------------------------------------------------------------------------------------------------------


def test_statistics_of_a_few_batches_are_no_training():
    assert not is_trained(network(0)[1])
    assert not is_trained(network(28)[1])  # 0.9^28 = 0.052 of the start
    assert is_trained(network(29)[1])
    average = nn.BatchNorm1d(3, momentum=None)
    assert not is_trained(average)
    for count in range(20):
        assert not is_trained(average), count  # a look at one batch is no training
        average(X)
    assert is_trained(average)
    converted = nn.BatchNorm1d(3)  # values without a count
    converted.running_mean.fill_(0.5)
    assert is_trained(converted)
    assert not is_trained(nn.BatchNorm1d(3, momentum=0.0))


@pytest.mark.parametrize(
    ("posterior", "frozen"),
    [
        (posteriors.MeanField(), True),
        (posteriors.Dropout(), True),
        (posteriors.KTied(), True),
        (posteriors.InducingWeights(4, 4), True),
        (posteriors.InducingWeights(4, 4, init="random"), False),
        (posteriors.WalshHadamard(init="network"), True),
        (posteriors.WalshHadamard(), False),
        (posteriors.Ensemble(2), False),  # each member has its own
        (posteriors.Point(), False),  # one function, as a plain network
        ({"0": posteriors.Point(), "*": posteriors.MeanField()}, True),
        ({"0": posteriors.Ensemble(2), "*": posteriors.MeanField()}, False),
    ],
)
def test_statistics_are_frozen_where_they_belong_to_the_draws(posterior, frozen):
    bnn = bayesian(posterior)
    assert bnn.frozen_statistics == (("1", "4") if frozen else ())
    assert bayesian(posterior, network(3)).frozen_statistics == ()
    assert bayesian(posterior, batch_statistics="train").frozen_statistics == ()


def test_layers_that_were_not_trained_collect_statistics():
    net = network()
    net[4].reset_running_stats()  # a new head on a trained network
    bnn = bayesian(net=net)
    before = statistics(bnn)
    bnn.train().elbo(X, Y, num_data=96)
    after = statistics(bnn)
    assert bnn.config()["batch_statistics"] == ["1"]
    assert all(torch.equal(after[name], before[name]) for name in before if name.startswith("1."))
    assert after["4.num_batches_tracked"] == 1
    assert bayesian(net=net, batch_statistics="frozen").frozen_statistics == ("1", "4")
    assert bayesian(net=net, batch_statistics=["4"]).frozen_statistics == ("4",)


def test_what_cannot_be_frozen_is_said():
    with pytest.raises(ValueError, match=r"names 'two', which is not a layer with running statistics.* \(1, 4\)"):
        bayesian(batch_statistics=["two"])
    with pytest.raises(ValueError, match="batch_statistics='froze'; give 'auto', 'frozen' or 'train'"):
        bayesian(batch_statistics="froze")


@pytest.mark.parametrize(
    "posterior",
    [
        posteriors.Point(),
        posteriors.Ensemble(2),
        posteriors.GlobalInducing(X[:8], init="network"),
        posteriors.GlobalInducing(X[:8]),
    ],
    ids=["point", "ensemble", "global inducing, network", "global inducing, random"],
)
def test_any_posterior_can_train_with_statistics_as_they_are(posterior):
    bnn = bayesian(posterior, network().train(), batch_statistics="frozen")
    before = {name: value.clone() for name, value in bnn.named_buffers() if "running" in name}
    bayesify.fit(bnn, [(X, Y)], epochs=2, progress=False)
    after = dict(bnn.named_buffers())
    assert before
    assert all(torch.equal(after[name], value) for name, value in before.items())


# -- one function --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "posterior", [posteriors.MeanField(), posteriors.Dropout(0.2), posteriors.InducingWeights(4, 4)]
)
def test_training_and_prediction_are_one_function_after_fit(posterior):
    bnn = bayesian(posterior)
    before, scale = statistics(bnn), bnn.network[1].weight.detach().clone()
    bayesify.fit(bnn, LOADER, epochs=2, progress=False)
    after = statistics(bnn)
    assert all(torch.equal(after[name], before[name]) for name in before)
    assert not torch.equal(bnn.network[1].weight, scale)  # scale and shift train
    draws = bnn.draw(4).detach()
    training, evaluation = (bnn.train(mode) and draws(X) for mode in (True, False))
    assert bnn.train().training
    assert torch.equal(training, evaluation)
    torch.testing.assert_close(draws(X[:1]), training[:, :1])  # rows do not see each other
    assert Runner(bnn.network, bnn.weights).mode(4) == "vmap"


def test_expected_log_likelihood_in_closed_form():
    r"""Linear layer, frozen BatchNorm: f is Gaussian with mean $\gamma (m x + b - \mu) / \sqrt{v + \epsilon} + \beta$ and variance
    $\gamma^2 (s^2 x^2 + s_b^2) / (v + \epsilon)$; the data term in training mode is the mean of log N(y; f), n = 4,000 draws."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(1, 1), nn.BatchNorm1d(1)).double()
    with torch.no_grad():
        net[1].running_mean.fill_(0.7)
        net[1].running_var.fill_(2.5)
        net[1].weight.fill_(1.3)
        net[1].bias.fill_(-0.2)
    noise, std = 0.5, 0.4
    bnn = bayesify.bayesianize(
        net,
        posteriors.MeanField(init_std=std),
        likelihood=likelihoods.Gaussian(noise=noise),
        prior=priors.Gaussian(1.0),
    ).train()
    assert bnn.frozen_statistics == ("1",)
    x, y = torch.tensor([[0.5], [-1.0], [2.0]]).double(), torch.tensor([[0.1], [0.4], [-0.3]]).double()
    gain = 1.3 / math.sqrt(2.5 + net[1].eps)
    w, b = float(net[0].weight.detach()), float(net[0].bias.detach())
    mean = gain * (w * x + b - 0.7) - 0.2
    variance = gain**2 * std**2 * (x.square() + 1)
    wanted = float((torch.distributions.Normal(mean, noise**0.5).log_prob(y) - variance / (2 * noise)).sum())
    found, kl = bnn.elbo_terms(x, y, num_data=3, num_draws=4000, generator=torch.Generator().manual_seed(2))
    found, kl = found.detach(), kl.detach()
    error = float(found.std()) / math.sqrt(4000)
    assert abs(float(found.mean()) - wanted) < 5 * error < 0.3
    assert float(kl[0]) == pytest.approx(2 * (-math.log(std) + std**2 / 2 - 0.5) + (w**2 + b**2) / 2)


class Last(nn.Module):
    """The outputs of a recurrent layer."""

    def forward(self, x):
        return x[0]


def test_scales_start_smaller_where_draws_share_statistics():
    def share(net, place):
        size = torch.cat([net[place].weight.flatten(), net[place].bias]).square().mean().sqrt()
        return bayesian(net=net).posterior.log_std()[f"{place}.weight"].detach().exp().mean() / size.detach()

    plain = nn.Sequential(network()[0], nn.ReLU(), nn.Linear(8, 2))
    for net, place, wanted in ((network(0), 0, 0.03), (network(), 6, 0.1), (network(0), 6, 0.1), (plain, 0, 0.1)):
        assert float(share(net, place)) == pytest.approx(wanted, rel=1e-4)
    net, variance = network(), torch.tensor([1.0, 4.0, 1.0, 4.0, 1.0, 4.0, 1.0, 4.0])
    net[1].running_mean.fill_(2.0)
    net[1].running_var.copy_(variance)
    assert float(share(net, 0)) == pytest.approx(0.1 / math.sqrt(6.5 * 0.625), rel=1e-4)
    image = nn.Sequential(nn.Conv2d(2, 8, 3), net[1])
    std = bayesian(net=image).posterior.log_std()["0.weight"].detach().exp().mean()
    size = torch.cat([value.detach().flatten() for value in image[0].parameters()]).square().mean().sqrt()
    assert float(std / size) == pytest.approx(0.03, rel=1e-4)
    head = bayesian({"6": posteriors.MeanField(), "*": posteriors.Point()}, network()).posteriors[0]
    size = torch.cat([value.detach().flatten() for value in network()[6].parameters()]).square().mean().sqrt()
    assert float(head.log_std()["6.weight"].detach().exp().mean() / size) == pytest.approx(0.1, rel=1e-4)
    net[1].running_var[1] = 0.0  # a dead output
    assert float(share(net, 0)) == pytest.approx(0.1 / math.sqrt(6.0 * 1.0), rel=1e-3)
    apart = nn.Sequential(nn.Linear(3, 8), nn.Linear(8, 8), network()[1], network()[1])  # whose norm is which?
    assert float(share(apart, 1)) == pytest.approx(0.03, rel=1e-4)
    layers = bayesian(net=nn.Sequential(nn.LSTM(3, 8), Last(), network()[1])).posterior.relative_stds
    assert set(layers.values()) == {0.03}


def test_noise_at_the_start_is_a_tenth_of_the_signal_after_frozen_normalization():
    torch.manual_seed(0)
    x = 3 + torch.randn(4000, 20)
    net = nn.Sequential(nn.Linear(20, 50), nn.BatchNorm1d(50, affine=False, momentum=None))
    for _ in range(30):
        net(x)
    bnn = bayesian(net=net).train()
    draws = torch.stack([bnn(x) for _ in range(20)])
    noise = (draws - net.eval()(x)).detach().square().mean()
    assert 0.05 < float(noise.sqrt()) < 0.2


def test_dropout_is_after_the_last_batch_norm():
    bnn = bayesian(posteriors.Dropout(0.5))
    varied = {name for name, value in bnn.draw(8).weights.items() if not torch.equal(value[0], value[1])}
    assert varied == {"6.weight"}
    named = bayesian({"3": posteriors.Dropout(0.5), "*": posteriors.Point()})
    assert not torch.equal(*named.draw(2).weights["3.weight"])
    plain = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2))
    varied = bayesian(posteriors.Dropout(0.5), plain).draw(8).weights
    assert not torch.equal(varied["2.weight"][0], varied["2.weight"][1])


# -- everywhere ----------------------------------------------------------------------------------------------------


def in_training_mode(bnn) -> bool:
    bnn.train()
    modes = [bnn.network[0].training, not bnn.network[1].training, not bnn.network[4].training]
    return all(modes)


def test_the_choice_survives_copies_files_and_wrappers(tmp_path):
    bnn = bayesian().eval()
    assert in_training_mode(copy.deepcopy(bnn))
    assert in_training_mode(pickle.loads(pickle.dumps(bnn)))
    nn.ModuleDict({"model": bnn}).train()
    assert in_training_mode(bnn)
    bayesify.save(bnn, tmp_path / "model.safetensors")
    loaded = bayesify.load(tmp_path / "model.safetensors", network(0))  # a skeleton has no statistics
    assert in_training_mode(loaded)
    assert loaded.config() == bnn.config()
    assert torch.equal(loaded.network[1].running_mean, bnn.network[1].running_mean)
    again = bayesify.bayesianize(network(0), bnn.config())
    assert again.frozen_statistics == ("1", "4")


def test_a_continued_run_is_the_whole_one(tmp_path):
    whole, half = bayesian(), bayesian()
    options = {"progress": False, "seed": 0, "scheduler": "constant"}
    before = statistics(whole)
    bayesify.fit(whole, LOADER, epochs=4, **options)
    path = tmp_path / "run.safetensors"
    bayesify.fit(half, LOADER, epochs=2, checkpoint=path, **options)
    continued = bayesian()
    bayesify.fit(continued, LOADER, epochs=4, checkpoint=path, **options)
    for (name, value), other in zip(whole.state_dict().items(), continued.state_dict().values(), strict=True):
        assert torch.equal(value, other), name
    assert all(torch.equal(value, before[name]) for name, value in statistics(continued).items())


def test_a_stack_runs_together_and_gives_the_numbers_of_each_model():
    models = [bayesian().train(), bayesian(net=network(80)).train()]
    stack = ModelStack(models, seeds=[3, 4])
    assert stack.loop_reason is None
    data, kl = stack.terms(Batch(X, Y), num_data=96, num_draws=2)
    assert stack.loop_reason is None
    for index, (model, seed) in enumerate(zip(models, (3, 4), strict=True)):
        generator = torch.Generator().manual_seed(seed)
        alone = model.terms(Batch(X, Y), phase="variational", num_data=96, num_draws=2, generator=generator)
        torch.testing.assert_close((data[index], kl[index]), alone, rtol=1e-4, atol=1e-3)
    with pytest.raises(ValueError, match="differs from model 0"):
        ModelStack([bayesian(), bayesian(batch_statistics="train")])


def test_methods_that_need_single_examples_take_frozen_statistics():
    bnn = bayesian().train()
    model = bayesify.FunctionSpaceVI(bnn, context=bayesify.Box.around(X))
    assert math.isfinite(float(model.objective(X, Y, num_data=96).detach()))
