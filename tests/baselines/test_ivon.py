"""IVON: three steps against NumPy, its fixed point in linear regression, every kind of network, interrupted runs."""

import copy
import math

import cases
import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import bayesify
from bayesify import baselines, likelihoods, posteriors, priors
from bayesify.training.arguments import Steps

NOISE, PRIOR_STD = 0.4, 1.5


def regression(n=30):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(n, 3, dtype=torch.float64, generator=generator)
    y = x @ torch.tensor([[1.0], [-2.0], [0.5]], dtype=torch.float64)
    return x, y + 0.6 * torch.randn(n, 1, dtype=torch.float64, generator=generator)


def linear(std=0.1):
    return bayesify.bayesianize(
        nn.Linear(3, 1, bias=False).double(),
        posteriors.MeanField(init_std=std),
        likelihood=likelihoods.Gaussian(NOISE, learn=False),
        prior=priors.Gaussian(PRIOR_STD),
    )


@pytest.mark.parametrize(("num_draws", "clip", "curvature"), [(1, None, None), (3, 0.05, 2.0)])
def test_three_steps_are_the_formula(num_draws, clip, curvature):
    """Algorithm 1 as it is printed, with h of its own, in NumPy."""
    x, y = regression()
    bnn = linear()
    total, (b1, b2) = 90 / 2.0, (0.8, 0.7)
    delta = 1 / PRIOR_STD**2 / total
    m = bnn.posterior.mean()["weight"].detach().numpy().copy()
    h = np.full((1, 3), 1 / (total * 0.1**2) - delta if curvature is None else curvature)
    trainer = baselines.IVON(
        bnn, num_data=90, learning_rate=0.2, momentum=b1, decay=b2, clip=clip, init_curvature=curvature,
        num_draws=num_draws, kl_weight=2.0,
    )  # fmt: skip
    g = np.zeros((1, 3))
    for t in (1, 2, 3):
        std = 1 / np.sqrt(total * (h + delta))
        noise = linear(1.0)  # the standard normals that the same generator gives a draw
        noise.posterior.mean_value["weight"].data.zero_()
        normals = noise.draw(num_draws, generator=torch.Generator().manual_seed(t)).weights["weight"].detach().numpy()
        theta = m + std * normals  # [S, 1, 3]
        residual = y.numpy() - x.numpy() @ theta.transpose(0, 2, 1)  # [S, B, 1]
        g_hat = -(residual * x.numpy()).mean(1, keepdims=True) / NOISE
        h_hat = (g_hat * (theta - m) / std**2).mean(0)
        g = b1 * g + (1 - b1) * g_hat.mean(0)
        h = b2 * h + (1 - b2) * h_hat + 0.5 * (1 - b2) ** 2 * (h - h_hat) ** 2 / (h + delta)
        way = (g / (1 - b1**t) + delta * m) / (h + delta)
        m = m - 0.2 * (way if clip is None else way.clip(-clip, clip))
        nll = 0.5 * (residual**2 / NOISE + math.log(2 * math.pi * NOISE)).mean()
        found = trainer.step(x, y, generator=torch.Generator().manual_seed(t))
        assert found == pytest.approx(nll, rel=1e-10)
        np.testing.assert_allclose(bnn.posterior.mean()["weight"].detach(), m, rtol=1e-10)
        np.testing.assert_allclose(bnn.posterior.variance()["weight"].detach(), 1 / (total * (h + delta)), rtol=1e-10)


def test_fixed_point_of_linear_regression():
    """The mean-field optimum: the exact posterior mean, and the diagonal of the exact precision."""
    x, y = regression()
    bnn = linear()
    precision = x.T @ x / NOISE + torch.eye(3, dtype=torch.float64) / PRIOR_STD**2
    exact = torch.linalg.solve(precision, x.T @ y / NOISE).T
    trainer = baselines.IVON(bnn, num_data=30, learning_rate=0.05, decay=0.97, num_draws=24)
    generator = torch.Generator().manual_seed(0)
    means, precisions = [], []
    for step in range(500):
        trainer.step(x, y, generator=generator)
        if step >= 150:
            means.append(bnn.posterior.mean()["weight"].detach().clone())
            precisions.append(1 / bnn.posterior.variance()["weight"].detach())
    # Averages with decay 0.97 of n = 350 steps are as good as n / 66 independent ones; the mean, at a rate of 0.05, as n / 39.
    for found, wanted, independent in ((means, exact, 350 / 39), (precisions, precision.diagonal(), 350 / 66)):
        values = torch.stack(found)
        error = values.std(0) / math.sqrt(independent)
        assert ((values.mean(0) - wanted).abs() <= 5 * error).all()
        assert (5 * error <= 0.15 * wanted.abs()).all()


@pytest.mark.parametrize("kind", ["conv2d", "embedding", "batch_norm", "lstm", "attention", "tied", "custom"])
def test_every_kind_of_layer(kind):
    case = cases.CASES[kind]
    torch.manual_seed(0)
    bnn = cases.convert("mean_field", case).train()
    x = tuple(case.inputs(5))
    with torch.no_grad():
        y = torch.randn_like(bnn(*x))
    before = {name: value.detach().clone() for name, value in bnn.posterior.named_parameters()}
    trainer = baselines.IVON(bnn, num_data=50, decay=0.9)
    assert math.isfinite(trainer.step(x, y, generator=torch.Generator().manual_seed(1)))
    for name, value in bnn.posterior.named_parameters():
        assert torch.isfinite(value).all()
        assert not torch.equal(before[name], value), name


def small_conv():
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(16, 2))


def images(n=60):
    generator = torch.Generator().manual_seed(3)
    y = torch.randint(2, (n,), generator=generator)
    return torch.randn(n, 1, 4, 4, generator=generator) + 2.0 * y.view(-1, 1, 1, 1), y


def loader():
    return DataLoader(TensorDataset(*images()), batch_size=20, shuffle=True)


def trainer(**options):
    bnn = bayesify.bayesianize(small_conv(), posteriors.MeanField(), likelihood="categorical")
    return baselines.IVON(bnn, **options)


def test_conv_net_with_batch_norm_trains_predicts_and_stores(tmp_path):
    made = trainer(init_curvature=0.9, decay=0.999)
    scale = made.bnn.network[1].weight.detach().clone()
    made.fit(loader(), 15, seed=0, progress=False, precision="bf16", schedule=lambda share: 1 - share)
    assert made.num_data == 60
    assert made.history.column("nll")[-1] < made.history.column("nll")[0]
    assert made.history.column("learning_rate")[-1] == pytest.approx(0.0)
    assert not torch.equal(made.bnn.network[1].weight, scale)  # point estimates are trained along
    x, y = images()
    prediction = made.bnn.eval().predict(x, 8, generator=torch.Generator().manual_seed(0))
    assert float((prediction.labels == y).float().mean()) > 0.85
    bayesify.save(made.bnn, tmp_path / "ivon.safetensors")
    loaded = bayesify.load(tmp_path / "ivon.safetensors", small_conv()).eval()
    again = loaded.predict(x, 8, generator=torch.Generator().manual_seed(0))
    assert torch.equal(prediction.probs, again.probs)


@pytest.mark.parametrize("schedule", [None, lambda share: 1 - share])
def test_interrupted_training_continues_to_the_same_result(tmp_path, schedule):
    path, stops = tmp_path / "run.safetensors", [2]

    def interrupt(_, history):
        if len(history) in stops:
            raise KeyboardInterrupt

    whole = trainer(decay=0.99).fit(loader(), 4, seed=1, schedule=schedule, progress=False)
    options = {"seed": 1, "schedule": schedule, "checkpoint": path, "callbacks": [interrupt], "progress": False}
    with pytest.raises(KeyboardInterrupt):
        trainer(decay=0.99).fit(loader(), 4, **options)
    stops.clear()
    rest = trainer(decay=0.99).fit(loader(), 4, **options)
    for name, value in whole.bnn.state_dict().items():
        assert torch.equal(value, rest.bnn.state_dict()[name]), name
    assert [row["nll"] for row in rest.history] == [row["nll"] for row in whole.history]
    with pytest.raises(ValueError, match="decay"):
        trainer(decay=0.9).fit(loader(), 4, **options)


def test_state_of_a_loop_of_ones_own_continues():
    x, y = images()
    one, generator = trainer(num_data=60, decay=0.9), torch.Generator().manual_seed(0)
    one.step(x, y, generator=generator)
    other = trainer(num_data=60, decay=0.9)
    other.bnn.load_state_dict(one.bnn.state_dict())
    other.load_state_dict(copy.deepcopy(one.state_dict()))
    for made in (one, other):
        made.step(x, y, generator=torch.Generator().manual_seed(1), learning_rate=0.01)
    for name, value in one.bnn.state_dict().items():
        assert torch.equal(value, other.bnn.state_dict()[name]), name


def test_the_flag_of_the_guard_leaves_everything_as_it_is():
    """What stands in a captured step: gradients that are not finite, and a flag on the device that says so."""
    x, y = images()
    made = trainer(num_data=60, decay=0.9)
    for flagged in (False, True, False):
        before = [value.detach().clone() for value in made.bnn.parameters()]
        state = {key: value.clone() for key, value in _tensors(made.state_dict())}
        if flagged:
            for value in made.bnn.parameters():
                value.grad = torch.full_like(value, math.nan)
            made.optimizer.found_inf = torch.ones(())
            made.optimizer.step()
            del made.optimizer.found_inf
            assert all(torch.equal(*pair) for pair in zip(before, made.bnn.parameters(), strict=True))
            assert all(torch.equal(state[key], value) for key, value in _tensors(made.state_dict()))
            assert not hasattr(made.optimizer.points, "found_inf")  # else the points would never move again
        else:
            made.step(x, y, generator=torch.Generator().manual_seed(0))
            assert not any(torch.equal(*pair) for pair in zip(before, made.bnn.parameters(), strict=True))


def _tensors(state):
    return [((index, key), value) for index, entry in state["state"].items() for key, value in entry.items()]


def test_accumulated_batches_are_one_large_batch():
    x, y = images()
    x, y = x.double(), y
    found = []
    for size, accumulate in ((60, 1), (20, 3)):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(16, 2)).double()
        bnn = bayesify.bayesianize(net, posteriors.MeanField(), likelihood="categorical")
        made = baselines.IVON(bnn, decay=0.9)
        made.fit(DataLoader(TensorDataset(x, y), size), 3, seed=0, steps=Steps(accumulate=accumulate), progress=False)
        found.append(bnn.state_dict())
    for name, value in found[0].items():
        torch.testing.assert_close(value, found[1][name], rtol=1e-8, atol=1e-10, msg=name)


def test_bad_input():
    with pytest.raises(TypeError, match="has the posterior Point; make the network with MeanField"):
        baselines.IVON(bayesify.bayesianize(cases.mlp(), "point", likelihood="gaussian"))
    for options in ({"learning_rate": 0.0}, {"decay": 1.0}, {"clip": 0.0}, {"init_curvature": -1.0}, {"num_draws": 0}):
        name, value = next(iter(options.items()))
        with pytest.raises(ValueError, match=f"{name}={value}"):
            baselines.IVON(linear(), **options)
    with pytest.raises(ValueError, match="IVON: the number of training examples is unknown"):
        baselines.IVON(linear()).step(*regression())
    capped = bayesify.bayesianize(cases.mlp(), posteriors.MeanField(max_std=0.1), likelihood="gaussian")
    with pytest.raises(ValueError, match=r"IVON: MeanField\(max_std=0.1\)"):
        baselines.IVON(capped)
    with pytest.raises(TypeError, match=r"IVON.fit: optimizer is not an argument of this method's fit"):
        trainer().fit(loader(), 1, optimizer=None)
    endless = (batch for batch in loader())
    with pytest.raises(ValueError, match="schedule= needs the number of steps; give a loader with a length"):
        trainer(num_data=60).fit(endless, 1, schedule=lambda share: 1.0)
    made, (x, y) = trainer(num_data=60), images()
    before = {name: value.clone() for name, value in made.bnn.posterior.state_dict().items()}
    with pytest.raises(ValueError, match=r"not finite|NaN|nan"):
        made.step(x * math.nan, y)
    assert all(torch.equal(before[name], value) for name, value in made.bnn.posterior.state_dict().items())
