"""An ensemble on a network with BatchNorm: each member normalizes by its own statistics; predictions visit each member once."""

import copy
import math

import pytest
import torch
from torch import nn

import bayesify
from bayesify import likelihoods, posteriors


def problem(members: int = 3):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 36, 3))
    bnn = bayesify.bayesianize(net, posteriors.Ensemble(members), likelihood=likelihoods.Categorical())
    x = torch.randn(32, 1, 8, 8) + 3
    return net, bnn, x, torch.randint(0, 3, (32,))


def member_network(net: nn.Module, bnn: bayesify.BayesianNetwork, member: int) -> nn.Module:
    """A plain network with one member's weights."""
    plain = copy.deepcopy(net)
    state = plain.state_dict()
    for name, value in bnn.posterior.value.items():
        state[name] = value[member].detach()
    plain.load_state_dict(state)
    return plain


def test_each_member_keeps_the_statistics_it_would_have_alone():
    net, bnn, x, _ = problem()
    bnn.train()
    for batch in x.split(8):
        with torch.no_grad():
            bnn.draw(3)(batch)  # every member sees every batch once
    bnn.eval()
    expected = []
    for member in range(3):
        alone = member_network(net, bnn, member).train()
        for batch in x.split(8):
            with torch.no_grad():
                alone(batch)
        expected.append(alone.eval()(x).softmax(-1))
    prediction = bnn.predict(x)
    torch.testing.assert_close(prediction.probs, torch.stack(expected).mean(0), rtol=1e-4, atol=1e-5)


def test_a_prediction_takes_each_member_once_and_is_deterministic():
    _, bnn, x, _ = problem(5)
    prediction = bnn.predict(x)
    assert prediction.outputs.shape[0] == 5
    torch.testing.assert_close(bnn.predict(x).probs, prediction.probs)
    assert bnn.predict(x, num_draws=7).outputs.shape[0] == 7
    point = bayesify.bayesianize(nn.Linear(2, 3), "point", likelihood=likelihoods.Categorical())
    assert point.predict(torch.zeros(4, 2)).outputs.shape[0] == 1


def test_streamed_predictions_and_single_draws_use_the_members_statistics():
    _, bnn, x, y = problem()
    bnn.train()
    bnn.elbo(x, y, num_data=32, num_draws=3)
    kept = bnn.predict(x)
    streamed = bnn.predict(x, keep_outputs=False, memory=20_000)
    torch.testing.assert_close(streamed.probs, kept.probs, rtol=1e-4, atol=1e-5)
    bnn.eval()
    draws = bnn.draw(3)
    torch.testing.assert_close(torch.stack([draw(x) for draw in draws]), draws(x), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(draws[1:](x), draws(x)[1:], rtol=1e-4, atol=1e-5)


def test_detached_draws_and_the_mean_network_have_the_statistics_too():
    _, bnn, x, y = problem()
    bnn.train()
    bnn.elbo(x, y, num_data=32, num_draws=3)
    bnn.eval()
    draws = bnn.draw(3)
    torch.testing.assert_close(draws.detach()(x), draws(x))
    stacked = bnn.posterior._statistics()
    plain = dict(bnn.mean_network().named_buffers())
    assert not torch.equal(plain["1.running_mean"], torch.zeros(4))
    torch.testing.assert_close(plain["1.running_mean"], stacked["1.running_mean"].mean(0))


def test_statistics_are_saved_and_loaded(tmp_path):
    net, bnn, x, y = problem()
    bnn.train()
    bnn.elbo(x, y, num_data=32, num_draws=3)
    bayesify.save(bnn, tmp_path / "ensemble")
    torch.testing.assert_close(bayesify.load(tmp_path / "ensemble", net).predict(x).probs, bnn.predict(x).probs)


MIXTURES = {
    "ensemble": lambda: posteriors.Ensemble(3),
    "rank_one": lambda: posteriors.RankOne(components=3, init_std=1e-6),
    "inducing": lambda: posteriors.InducingWeights(q="ensemble", members=3, max_lambda=0),
    "inducing, other size": lambda: posteriors.InducingWeights(1, 2, q="ensemble", members=3, max_lambda=0),
}


@pytest.mark.parametrize("second", MIXTURES)
@pytest.mark.parametrize("first", MIXTURES)
def test_mixtures_of_one_network_take_the_same_members(first, second):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 2))
    bnn = bayesify.bayesianize(net, {"0": MIXTURES[first](), "1": MIXTURES[second]()})
    weights = bnn.draw(30).weights
    sums = zip(weights["0.weight"].sum((1, 2)).tolist(), weights["1.weight"].sum((1, 2)).tolist(), strict=True)
    assert len({(round(a, 3), round(b, 3)) for a, b in sums}) == 3
    assert not any(part.capturable for part in bnn.posteriors)  # a captured draw would not share its choice


@pytest.mark.parametrize("sizes", [(1, 1), (3, 3), (2, 3), (2, 4), (4, 2)])
def test_several_ensembles_are_networks_with_one_set_of_statistics_each(sizes):
    """Network n of lcm(K1, K2) has member n mod K of each ensemble, and the statistics it would have alone."""
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Linear(2, 4), nn.BatchNorm1d(4), nn.Linear(4, 3), nn.BatchNorm1d(3), nn.ReLU(), nn.Linear(3, 1)
    )
    chosen = {"0": posteriors.Ensemble(sizes[0]), "2": posteriors.Ensemble(sizes[1])}
    bnn = bayesify.bayesianize(net, chosen, likelihood=likelihoods.Gaussian(0.1))
    x, count = torch.randn(64, 2) * 3 + 5, math.lcm(*sizes)
    bnn.train()
    with torch.no_grad():
        for batch in x.split(16):
            bnn.draw(count)(batch)  # every network sees every batch once
    bnn.eval()
    alone = []
    for index in range(count):
        plain = copy.deepcopy(net)
        state = plain.state_dict()
        for part in bnn.posteriors:
            state |= {name: value[index % part.members].detach() for name, value in part.value.items()}
        plain.load_state_dict(state)
        for batch in x.split(16):
            plain.train()(batch)
        alone.append(plain.eval())
    with torch.no_grad():
        outputs = torch.stack([plain(x) for plain in alone])
        prediction = bnn.predict(x)
    assert prediction.outputs.shape[0] == count  # by default each network once
    torch.testing.assert_close(prediction.mean, outputs.mean(0), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(prediction.epistemic, outputs.var(0, unbiased=False), rtol=1e-3, atol=1e-5)
    plain = dict(bnn.mean_network().named_buffers())
    for name in ("1.running_mean", "1.running_var", "3.running_mean", "3.running_var"):
        expected = torch.stack([dict(each.named_buffers())[name] for each in alone]).mean(0)
        torch.testing.assert_close(plain[name], expected, rtol=1e-4, atol=1e-5)
    if count == 1:
        torch.testing.assert_close(bnn.mean_network().eval()(x), prediction.mean, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["mean_field", "ensemble", "matrix_normal", "dropout"])
def test_the_padding_row_of_an_embedding_stays_as_it_is(name):
    net = nn.Sequential(nn.Embedding(5, 3, padding_idx=0), nn.Linear(3, 2))
    bnn = bayesify.bayesianize(net, name)
    assert (bnn.draw(4).weights["0.weight"][:, 0] == 0).all()
    assert (bnn.mean_network()[0].weight[0] == 0).all()
    local = bayesify.bayesianize(
        net, posteriors.MeanField(init_std=0.5, local_reparameterization=True), likelihood=likelihoods.Categorical()
    )
    local.elbo(torch.tensor([0, 1]), torch.tensor([0, 1]), num_data=2).backward()
