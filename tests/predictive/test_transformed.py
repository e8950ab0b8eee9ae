"""Predictions mapped back from another scale: exact against the lognormal distribution."""

from __future__ import annotations

import math

import numpy as np
import pytest
import scipy.stats
import torch
from scipy import integrate
from torch import Tensor

from bayesify import likelihoods, metrics
from bayesify.predictive import Outputs, RegressionPredictive, TargetTransform, TransformedPredictive

B = 5
NAMES = ["none", "log", "log1p", "sqrt", "box_cox", "yeo_johnson"]


def inner(draws: int = 1, noise: float = 0.3) -> tuple[RegressionPredictive, Tensor]:
    f = 0.8 * torch.randn(draws, B, 1, dtype=torch.float64)
    return likelihoods.Gaussian(noise).double().predictive(Outputs(kept=f)), f


def sample(name: str) -> Tensor:
    y = torch.tensor(np.random.default_rng(0).lognormal(1.0, 0.7, (400, 2)))
    return y - 2 if name == "yeo_johnson" else y


def lognormal(f: Tensor, transform: TargetTransform, noise: float = 0.3) -> scipy.stats.rv_continuous:
    scale, shift = float(transform.scale), float(transform.shift)
    return scipy.stats.lognorm(scale * math.sqrt(noise), scale=np.exp(shift + scale * f[..., 0].numpy()))


TRANSFORM = TargetTransform.fit("log", torch.tensor(np.random.default_rng(1).lognormal(2.0, 1.1, (100, 1))))


def test_one_draw_is_lognormal() -> None:
    base, f = inner()
    prediction, expected = TRANSFORM.predictive(base), lognormal(f[0], TRANSFORM)
    y = torch.tensor([0.5, 2.0, 5.0, 20.0, 100.0], dtype=torch.float64).unsqueeze(1)
    np.testing.assert_allclose(prediction.log_prob(y).numpy(), expected.logpdf(y[:, 0].numpy()), rtol=1e-10)
    np.testing.assert_allclose(prediction.cdf(y)[:, 0].numpy(), expected.cdf(y[:, 0].numpy()), rtol=1e-10, atol=1e-13)
    for q in (0.001, 0.3, 0.5, 0.99):
        np.testing.assert_allclose(prediction.quantile(q)[:, 0].numpy(), expected.ppf(q), rtol=1e-10)
    np.testing.assert_allclose(prediction.mean[:, 0].numpy(), expected.mean(), rtol=1e-6)
    np.testing.assert_allclose(prediction.variance[:, 0].numpy(), expected.var(), rtol=1e-4)
    assert bool((prediction.interval(0.999)[0] > 0).all())


def test_crps_is_that_of_the_lognormal() -> None:
    scoringrules = pytest.importorskip("scoringrules")
    base, f = inner()
    y = torch.tensor([0.5, 2.0, 5.0, 20.0, 100.0], dtype=torch.float64)
    scale, shift = float(TRANSFORM.scale), float(TRANSFORM.shift)
    expected = scoringrules.crps_lognormal(y.numpy(), shift + scale * f[0, :, 0].numpy(), scale * math.sqrt(0.3))
    np.testing.assert_allclose(TRANSFORM.predictive(base).crps(y)[:, 0].numpy(), expected, rtol=2e-4)


def test_mixture_of_lognormals() -> None:
    base, f = inner(4)
    prediction, parts = TRANSFORM.predictive(base), lognormal(f, TRANSFORM)
    y = torch.tensor([0.5, 2.0, 5.0, 20.0, 100.0], dtype=torch.float64)
    np.testing.assert_allclose(prediction.mean[:, 0].numpy(), parts.mean().mean(0), rtol=1e-3)
    second = (parts.var() + parts.mean() ** 2).mean(0)
    np.testing.assert_allclose(prediction.variance[:, 0].numpy(), second - parts.mean().mean(0) ** 2, rtol=1e-2)
    np.testing.assert_allclose(prediction.log_prob(y).exp().numpy(), parts.pdf(y.numpy()).mean(0), rtol=1e-10)
    torch.testing.assert_close(prediction.epistemic + prediction.aleatoric, prediction.variance)
    grid = np.geomspace(1e-4, 1e5, 400_001)
    scale, shift = float(TRANSFORM.scale), float(TRANSFORM.shift)
    for row in range(B):
        centers = np.exp(shift + scale * f[:, row].numpy())
        cdf = scipy.stats.lognorm(scale * math.sqrt(0.3), scale=centers).cdf(grid[None]).mean(0)
        expected = integrate.trapezoid((cdf - (grid >= float(y[row]))) ** 2, grid)
        assert float(prediction.crps(y)[row, 0]) == pytest.approx(expected, rel=2e-3)


@pytest.mark.parametrize("name", NAMES)
def test_there_and_back(name: str) -> None:
    y = sample(name)
    transform = TargetTransform.restore(TargetTransform.fit(name, y).config())  # type: ignore[arg-type]
    z = transform.forward(y)
    torch.testing.assert_close(transform.inverse(z), y)
    torch.testing.assert_close(z.mean(0), torch.zeros(2, dtype=torch.float64))
    torch.testing.assert_close(z.std(0, unbiased=False), torch.ones(2, dtype=torch.float64))
    step = 1e-6
    slope = (transform.forward(y + step) - transform.forward(y - step)) / (2 * step)
    torch.testing.assert_close(transform.log_slope(y), slope.log(), rtol=1e-5, atol=1e-5)


def test_powers_are_the_most_likely() -> None:
    """Against scipy's, which search without bounds; our grid has steps of 0.025 and 0.05."""
    y = torch.tensor(np.random.default_rng(0).normal(4.0, 0.8, (2000, 1))) ** 2
    assert float(TargetTransform.fit("box_cox", y).power) == pytest.approx(
        scipy.stats.boxcox(y[:, 0].numpy())[1], abs=0.02
    )
    found = TargetTransform.fit("yeo_johnson", y)
    expected = scipy.stats.yeojohnson(y[:, 0].numpy() / float(found.unit))[1]
    assert float(found.power) == pytest.approx(min(max(expected, 0), 2), abs=0.04)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    "likelihood", [likelihoods.Gaussian(0.2), likelihoods.StudentT(None), likelihoods.Quantiles([0.1, 0.5, 0.9])]
)
def test_every_family_on_every_scale(name: str, likelihood: likelihoods.Likelihood) -> None:
    f = torch.randn(3, B, 2 * likelihood.outputs_per_target)
    transform = TargetTransform.fit(name, sample(name))  # type: ignore[arg-type]
    prediction = transform.predictive(likelihood.predictive(Outputs(kept=f)))
    assert isinstance(prediction, TransformedPredictive)
    y = sample(name)[:B].float()
    scores = metrics.evaluate(prediction, y)
    assert all(math.isfinite(value) for value in scores.values())
    lower, upper = prediction.interval(0.9)
    assert bool((lower <= upper).all())
    if name in ("log", "log1p", "sqrt", "box_cox"):
        assert bool((lower >= 0).all())
        assert bool((prediction.cdf(torch.full((B, 2), -1.0)) == 0).all())
        assert bool((prediction.log_prob(torch.full((B, 2), -1.0)) == -math.inf).all())


def test_shift_and_scale_are_exact() -> None:
    base, _ = inner(3)
    y = torch.tensor(np.random.default_rng(1).normal(5.0, 3.0, (50, 1)))
    transform = TargetTransform.fit("none", y)
    prediction, at = transform.predictive(base), y[:B]
    scale = transform.scale
    torch.testing.assert_close(prediction.mean, transform.shift + scale * base.mean)
    torch.testing.assert_close(prediction.std, scale * base.std)
    torch.testing.assert_close(prediction.crps(at), scale * base.crps(transform.forward(at)))
    torch.testing.assert_close(prediction.log_prob(at), base.log_prob(transform.forward(at)) - scale.log())


@pytest.mark.parametrize(("name", "value"), [("log", 0.0), ("box_cox", -1.0), ("log1p", -0.5), ("sqrt", -0.5)])
def test_targets_without_a_transform(name: str, value: float) -> None:
    with pytest.raises(ValueError, match=rf"'{name}' needs targets .* the smallest is {value:g}; use 'yeo_johnson'"):
        TargetTransform.fit(name, torch.tensor([[1.0], [value]]))  # type: ignore[arg-type]


class Kinked(TransformedPredictive):
    """Quantiles that stop rising beyond the middle, as after a recalibration that cuts tails."""

    def _inner_quantiles(self, q):
        levels = torch.as_tensor(q, dtype=torch.float64).clamp(0.05, 0.95)
        return super()._inner_quantiles(levels.tolist())


def test_crps_where_quantiles_have_kinks() -> None:
    base, _ = inner(3)
    transform = TargetTransform.fit("sqrt", torch.tensor(np.random.default_rng(1).lognormal(3.0, 0.5, (100, 1))))
    prediction = Kinked(base, transform)
    y = torch.tensor([0.5, 10.0, 20.0, 40.0, 90.0], dtype=torch.float64)
    levels = (torch.arange(4000, dtype=torch.float64) + 0.5) / 4000
    errors = y - prediction.quantile(levels.tolist())[..., 0]
    pinball = torch.where(errors > 0, levels[:, None] * errors, (levels[:, None] - 1) * errors)
    np.testing.assert_allclose(prediction.crps(y)[:, 0].numpy(), 2 * pinball.mean(0).numpy(), rtol=5e-3)
