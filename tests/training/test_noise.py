"""The noise variance of `likelihoods.Gaussian()`, which `fit` finds from residuals."""

import copy
import functools
import math
import signal

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import bayesify
from bayesify import likelihoods, posteriors
from bayesify.jacobians.effective import LEARNED_SHARE, fixed_point_noise
from bayesify.training.batches import parse_batch
from bayesify.training.noise import MAX_START_LOSS, START_DRAWS, LearnedNoise, narrow_start, new_rows_ratio

STD = 0.3


def rows(count=2000, scale=1.0, outputs=1, seed=0):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, 4, generator=generator)
    y = x[:, :1].sin() + x[:, 1:2] + STD * torch.randn(count, outputs, generator=generator)
    return x, scale * y


def loader(x, y, *weights):
    return DataLoader(TensorDataset(x, y, *weights), batch_size=200, shuffle=True)


def trained(scale=1.0, outputs=1):
    """The network of `scale=1` with a last layer of another scale."""
    net = copy.deepcopy(trained_once(outputs))
    with torch.no_grad():
        net[2].weight.mul_(scale)
        net[2].bias.mul_(scale)
    return net


@functools.cache
def trained_once(outputs):
    torch.manual_seed(0)
    net, (x, y) = nn.Sequential(nn.Linear(4, 32), nn.Tanh(), nn.Linear(32, outputs)), rows(outputs=outputs)
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-2)
    for _ in range(15):
        for a, b in loader(x, y):
            optimizer.zero_grad()
            nn.functional.mse_loss(net(a), b).backward()
            optimizer.step()
    return net


def noise_of(bnn):
    return float(bnn.likelihood.noise.detach())


def fitted(net, data, posterior=None, likelihood=None, **options):
    bnn = bayesify.bayesianize(
        net, posterior or posteriors.MeanField(), likelihood=likelihood or likelihoods.Gaussian()
    )
    bayesify.fit(bnn, data, **{"epochs": 3, "seed": 0, "progress": False} | options)
    return bnn


@pytest.mark.parametrize("scale", [0.01, 1.0, 100.0])
def test_noise_is_found_whatever_the_scale_of_the_targets(scale):
    bnn = fitted(trained(scale), loader(*rows(scale=scale)), epochs=5)
    assert noise_of(bnn) == pytest.approx((STD * scale) ** 2, rel=0.2)
    x, y = rows(scale=scale, seed=1)
    assert 0.87 < bayesify.metrics.evaluate(bnn.predict(x, 16), y)["coverage_90"] < 0.93


def test_noise_of_a_network_from_scratch():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 32), nn.Tanh(), nn.Linear(32, 1))
    bnn = fitted(net, loader(*rows()), epochs=20, learning_rate=1e-2)
    assert noise_of(bnn) == pytest.approx(STD**2, rel=0.25)


@pytest.mark.parametrize("features", [3, 60])
def test_the_ratio_of_new_rows_is_that_of_the_dense_kernel(features):
    """K = J D J^T of a linear network with fewer or more weights than rows; D is the mean square of its weights."""
    x, net, residual = torch.randn(40, features), nn.Linear(features, 1), 0.1
    jacobian = torch.cat([x, torch.ones(40, 1)], 1).double()
    scale = torch.cat([value.detach().flatten() for value in net.parameters()]).double().square().mean()
    spectrum = torch.linalg.eigvalsh(scale * jacobian @ jacobian.T).clamp_min(0)
    sums = {"squared_norm": features + 1, "squared_error": 40 * residual, "count": 40}
    noise = fixed_point_noise(spectrum / residual, 1.0, residual, **sums)
    found = new_rows_ratio(net, [parse_batch((x, x[:, :1]))], residual, 40, None)
    assert found == pytest.approx(1 / (1 - LEARNED_SHARE * (1 - residual / noise)), rel=1e-5)


@pytest.mark.parametrize("outputs", [1, 3])
def test_the_step_is_the_mean_squared_residual(outputs):
    """A point estimate that stays where it is: the variance is that of its residuals, with weights too, times `new_rows_ratio`."""
    net, (x, y) = trained(outputs=outputs), rows(outputs=outputs)
    weights = torch.rand(len(x), generator=torch.Generator().manual_seed(0)) + 0.5
    options = {"posterior": posteriors.Point(), "optimizer": lambda parameters: torch.optim.SGD(parameters, lr=1e-12)}
    for data, share in ((loader(x, y), torch.ones(len(x))), (loader(x, y, weights), weights)):
        bnn = fitted(net, data, **options)
        with torch.no_grad():
            expected = float((share[:, None] * (net(x) - y).square()).sum() / (outputs * share.sum()))
        ratio = new_rows_ratio(net, [parse_batch((x, y))], expected, len(x), None)
        assert 1 < ratio < 1.1
        assert noise_of(bnn) == pytest.approx(ratio * expected, rel=0.02)  # by the first 1,024 rows


def test_it_only_falls_while_the_network_still_learns():
    bnn = bayesify.bayesianize(nn.Linear(4, 1), posteriors.Point(), likelihood="gaussian")
    noise = LearnedNoise(bnn, 9)

    def nll(variance):  # of residuals of a variance under the present one
        now = noise_of(bnn)
        return 0.5 * math.log(2 * math.pi * now) + variance / (2 * now)

    found = []
    for epoch, variance in ((1, 0.5), (2, 0.05), (3, 0.07), (7, 0.07)):
        noise.after_epoch(nll(variance), epoch, last=False)
        found.append(noise_of(bnn))
    noise.after_epoch(nll(0.2), 2, last=True)
    assert [*found, noise_of(bnn)] == pytest.approx([0.1, 0.05, 0.05, 0.07, 0.2], rel=1e-4)


def test_numbers_that_were_given_are_left_to_the_user():
    net, data = trained(), loader(*rows())
    fixed = fitted(net, data, likelihood=likelihoods.Gaussian(0.5, learn=False))
    assert noise_of(fixed) == pytest.approx(0.5)
    assert noise_of(fitted(net, data, likelihood=likelihoods.Gaussian(learn=False))) == pytest.approx(0.1)
    given = fitted(net, data, likelihood=likelihoods.Gaussian(0.5))
    assert 0.4 < noise_of(given) < 0.5  # by gradients, at the learning rate
    mine = likelihoods.Gaussian()
    bnn = fitted(net, data, likelihood=mine)
    assert float(mine.noise.detach()) == pytest.approx(0.1)
    assert bnn.likelihood.raw_noise.requires_grad


def test_stored_networks_keep_it_and_train_on(tmp_path):
    net, data = trained(), loader(*rows())
    bnn = fitted(net, data)
    bayesify.save(bnn, tmp_path / "model")
    again = bayesify.load(tmp_path / "model", net)
    x = rows(seed=1)[0]
    first, second = (part.predict(x, 4, generator=torch.Generator().manual_seed(0)) for part in (bnn, again))
    assert torch.equal(first.variance, second.variance)
    assert again.likelihood.is_settled
    assert not likelihoods.Gaussian().is_settled


def test_an_interrupted_run_finds_the_same(tmp_path):
    class Stop(Exception):
        pass

    def stop(model, history):
        if len(history) == 2:
            raise Stop

    net, data, path = trained(), loader(*rows()), tmp_path / "run"
    whole = fitted(net, data, epochs=4)
    with pytest.raises(Stop):
        fitted(net, data, epochs=4, checkpoint=path, callbacks=[stop])
    resumed = fitted(net, data, epochs=4, checkpoint=path)
    assert all(
        torch.equal(a, b) for a, b in zip(whole.state_dict().values(), resumed.state_dict().values(), strict=True)
    )


@pytest.mark.parametrize(
    "options", [{}, {"subset": "last_layer"}, {"covariance": "diagonal"}, {"covariance": "kronecker"}]
)
def test_laplace_finds_it_again_for_other_rows(options):
    """Of any scale, and for outputs without a column."""
    net = nn.Sequential(trained(), nn.Flatten(0))
    x, y = rows()
    laplace = bayesify.Laplace(net, likelihoods.Gaussian(), **options)
    for noise in (1.0, 10.0):
        y = net(x).detach() + noise * torch.randn(len(x))
        assert noise_of(laplace.fit(loader(x, y))) == pytest.approx(noise**2, rel=0.2)
    tiny = nn.Linear(2, 1)
    with torch.no_grad():
        tiny.weight.fill_(1e-8)
        tiny.bias.zero_()
        y = tiny(x[:, :2]) + 1e-8 * torch.randn(len(x), 1)
    options = {key: value for key, value in options.items() if key == "covariance"}
    assert noise_of(bayesify.Laplace(tiny, likelihoods.Gaussian(), **options).fit([(x[:, :2], y)])) == pytest.approx(
        1e-16, rel=0.2
    )


STOPS = {
    "callback": {"callbacks": [lambda model, history: len(history) >= 15]},
    "patience": {"patience": 2, "validation": [rows(300, seed=2)]},
    "to the end": {},
}


@pytest.mark.parametrize("how", STOPS)
def test_a_run_that_is_stopped_early_finds_it_too(how):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(300, 4, generator=generator)
    y = 0.5 * x[:, :1] + torch.randn(300, 1, generator=generator)
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    bnn = fitted(net, [(x, y)], epochs=60, learning_rate=3e-2, **STOPS[how])
    residual = float((bnn.predict(x, 32).mean - y).square().mean())
    assert noise_of(bnn) == pytest.approx(residual, rel=0.15)


@pytest.mark.parametrize("shape", [(), (1,), (2,)])
def test_targets_that_are_constant_and_outputs_of_any_shape(shape):
    outputs = shape[0] if shape else 1
    net = nn.Sequential(nn.Linear(4, outputs), *([] if shape else [nn.Flatten(0)]))
    x = torch.randn(200, 4)
    for y in (torch.full((200, *shape), 7.0), torch.randn(200, *shape)):
        assert 0 < noise_of(fitted(net, loader(x, y))) < 1e3


def test_weights_of_a_long_table():
    """Rows beyond those that are looked at may weigh more; rows of no weight come first."""
    x, y = rows(9000, scale=1e-3)
    weights = torch.cat([torch.zeros(8500), torch.linspace(0.1, 9, 500)])
    net = trained(1e-3)
    for given in (torch.exp(torch.randn(9000)).sort().values, weights):
        data = DataLoader(TensorDataset(x, y, given), batch_size=500)
        bnn = fitted(net, data, likelihood=likelihoods.Gaussian(), epochs=2, learning_rate=1e-6)
        assert noise_of(bnn) == pytest.approx(9e-8, rel=0.3)


@pytest.mark.thin(3)
@pytest.mark.parametrize("scale", [0.01, 1.0, 100.0])
@pytest.mark.parametrize(
    "options", [{}, {"subset": "last_layer"}, {"covariance": "diagonal"}, {"covariance": "kronecker"}]
)
def test_laplace_finds_it_whatever_the_scale_of_the_targets(options, scale):
    mine, net = likelihoods.Gaussian(), trained(scale)
    laplace = bayesify.Laplace(net, mine, **options).fit(loader(*rows(scale=scale)))
    assert noise_of(laplace) == pytest.approx((STD * scale) ** 2, rel=0.2)
    assert not mine.is_settled
    x, y = rows(scale=scale, seed=1)
    assert 0.85 < bayesify.metrics.evaluate(laplace.predict(x), y)["coverage_90"] < 0.95
    given = bayesify.Laplace(net, likelihoods.Gaussian(0.5), **options).fit(loader(*rows(scale=scale)))
    assert noise_of(given) == pytest.approx(0.5)


def test_dropout_does_not_count_as_noise():
    """Training batches are under dropout; the variance is that of predictions, which are not."""
    torch.manual_seed(0)
    net, (x, y) = nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Dropout(0.5), nn.Linear(64, 1)), rows(1000)
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-2)
    for _ in range(20):
        optimizer.zero_grad()
        for a, b in loader(x, y):
            optimizer.zero_grad()
            nn.functional.mse_loss(net(a), b).backward()
            optimizer.step()
    bnn = fitted(net, loader(x, y))
    residual = (bnn.predict(x, 16).mean - y).square().mean()
    assert noise_of(bnn) == pytest.approx(float(residual), rel=0.1)


@pytest.mark.parametrize("epoch", [1, 3])
@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_a_run_that_is_stopped_in_validation_finds_the_same_noise(tmp_path, epoch, dropout):
    """The variance follows an epoch before its validation; a checkpoint of that moment is one of before the variance followed."""
    x = torch.randn(40, 3, generator=torch.Generator().manual_seed(0))
    batches = list(zip(x.split(10), (x.sum(1, keepdim=True) + x[:, :1].sin()).split(10), strict=True))
    passes = []

    class Interrupting:
        def __iter__(self):
            passes.append(len(passes))
            if passes[-1] == epoch:  # pass 0 is that of the starting network
                signal.raise_signal(signal.SIGINT)
            yield from batches

    def run(validation, **options):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Dropout(dropout), nn.Linear(8, 1))
        bnn = bayesify.bayesianize(net, posteriors.MeanField(), likelihood=likelihoods.Gaussian())
        history = bayesify.fit(bnn, batches, epochs=3, validation=validation, seed=0, progress=False, **options)
        return bnn.state_dict(), history.column("validation_nll")

    path = tmp_path / "run.safetensors"
    with pytest.raises(KeyboardInterrupt, match=f"epoch {epoch}"):
        run(Interrupting(), checkpoint=path)
    resumed, whole = run(batches, checkpoint=path), run(batches)
    assert all(torch.equal(resumed[0][name], whole[0][name]) for name in whole[0])
    assert resumed[1] == whole[1]


def test_the_final_noise_does_not_count_the_epistemic_variance_twice():
    """Draws that stay as they are: noise plus epistemic variance is the error expected on new rows, not below the residual."""
    net, (x, y) = trained(), rows(count=800)
    still = {"optimizer": lambda parameters: torch.optim.SGD(parameters, lr=1e-12)}
    data = DataLoader(TensorDataset(x, y), batch_size=800)
    for std in (0.01, 0.05):
        bnn = fitted(net, data, posterior=posteriors.MeanField(init_std=std), **still)
        found = bnn.predict(x, 8, generator=torch.Generator().manual_seed(0))
        residual, spread = float((y - found.mean).square().mean()), float(found.epistemic.mean())
        ratio = new_rows_ratio(bnn.mean_network(), [parse_batch((x, y))], residual, 800, None)
        assert ratio > 1
        assert noise_of(bnn) == pytest.approx(max(ratio * residual - spread, residual), rel=1e-3)
        assert (ratio * residual - spread > residual) is (std == 0.01)


@pytest.mark.parametrize("option", ["sparse", "scale_grad_by_freq"])
def test_the_ratio_of_new_rows_does_not_depend_on_what_a_table_does_to_its_gradients(option):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Embedding(20, 4), nn.Flatten(), nn.Linear(8, 1))
    batches = [parse_batch((torch.randint(20, (100, 2)), torch.randn(100, 1)))]
    expected = new_rows_ratio(copy.deepcopy(net), batches, 0.1, 100, None)
    assert expected > 1.1
    setattr(net[0], option, True)
    assert new_rows_ratio(net, batches, 0.1, 100, None) == expected


@pytest.mark.parametrize("name", ["rank_one", "dropout"])
def test_draws_of_a_trained_classifier_start_only_a_little_worse(name):
    """The loss grows about as the square of the scales, by which they are chosen. A fresh network keeps its wide start."""
    x, y = rows(count=256)
    labels = (y[:, 0] > 0).long()
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 32), nn.Tanh(), nn.Linear(32, 2))

    def narrowed():
        bnn = bayesify.bayesianize(net, name, likelihood="categorical")
        first = {key: value.clone() for key, value in bnn.state_dict().items()}
        losses = [loss(bnn)]
        narrow_start(bnn, lambda count: [parse_batch((x, labels))], torch.device("cpu"))
        return first, bnn.state_dict(), [*losses, loss(bnn)]

    @torch.no_grad()
    def loss(bnn):
        found = bnn.predict(x, START_DRAWS, generator=torch.Generator().manual_seed(0))
        return float(-found.log_prob(labels).mean() - nn.functional.cross_entropy(net(x), labels))

    first, last, _ = narrowed()
    assert all(torch.equal(value, last[key]) for key, value in first.items())
    optimizer = torch.optim.Adam(net.parameters(), lr=3e-2)
    for _ in range(100):
        optimizer.zero_grad()
        nn.functional.cross_entropy(net(x), labels).backward()
        optimizer.step()
    before, after = narrowed()[2]
    assert before > 1.5 * MAX_START_LOSS
    assert after == pytest.approx(MAX_START_LOSS, rel=0.5)
