"""Distributions of one number and their mixtures against scipy, scoringrules and brute force."""

from __future__ import annotations

import math
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import scipy.special
import scipy.stats
import torch
from torch import Tensor

from bayesify import likelihoods, metrics
from bayesify.maths.incomplete_beta import regularized_beta
from bayesify.predictive import base
from bayesify.predictive.base import Outputs
from bayesify.predictive.regression import RegressionPredictive

S, B = 3, 7
LEVELS = [0.05, 0.2, 0.5, 0.7, 0.9]
KINDS: dict[str, likelihoods.Likelihood] = {
    "student_t": likelihoods.StudentT(0.7, 4.5),
    "student_t_row_scale": likelihoods.StudentT(None, 2.6),
    "poisson": likelihoods.Poisson(),
    "negative_binomial": likelihoods.NegativeBinomial(0.8),
    "negative_binomial_row_dispersion": likelihoods.NegativeBinomial(None),
    "quantiles": likelihoods.Quantiles(LEVELS),
}
COUNTS = [name for name in KINDS if name.startswith(("poisson", "negative"))]
CONTINUOUS = [name for name in KINDS if name not in COUNTS]


def outputs(name: str, draws: int = S) -> Tensor:
    f = torch.randn(draws, B, KINDS[name].outputs_per_target, dtype=torch.float64)
    return 1.5 * f + 0.5


def predict(name: str, f: Tensor) -> RegressionPredictive:
    found = KINDS[name].double().predictive(Outputs(kept=f))
    assert isinstance(found, RegressionPredictive)
    return found


@pytest.mark.parametrize("name", [*KINDS, "default quantiles"])
def test_rounding_takes_no_probability_out_of_0_to_1(name):
    """A probability of 1 + 1e-7 has no normal score, so that a recalibrated mean would not be a number."""
    torch.manual_seed(0)
    likelihood = KINDS.get(name, likelihoods.Quantiles()).float()
    f = torch.randn(5, 40, likelihood.outputs_per_target)
    found = likelihood.predictive(Outputs(kept=f))
    for y in np.linspace(0, 30, 31).tolist():
        for p in (found.cdf(torch.full((40, 1), y)), found.below(torch.full((40, 1), y))):
            assert bool(((p >= 0) & (p <= 1)).all()), y


class PiecewiseLinear:
    """The distribution of `QuantileFunction`, written out again: pieces with their masses."""

    def __init__(self, knots: np.ndarray, levels: list[float]) -> None:
        self.knots, self.levels = knots, np.array(levels)
        self.left = (knots[1] - knots[0]) / math.log(levels[1] / levels[0])
        self.right = (knots[-1] - knots[-2]) / math.log((1 - levels[-2]) / (1 - levels[-1]))

    def cdf(self, y: Any) -> Any:
        low = self.levels[0] * np.exp(np.minimum(y - self.knots[0], 0) / self.left)
        high = 1 - (1 - self.levels[-1]) * np.exp(-np.maximum(y - self.knots[-1], 0) / self.right)
        middle = np.interp(y, self.knots, self.levels)
        return np.where(y < self.knots[0], low, np.where(y > self.knots[-1], high, middle))

    def logpdf(self, y: float) -> float:
        step = 1e-7
        return math.log((self.cdf(y + step) - self.cdf(y - step)) / (2 * step))


def components(name: str, f: np.ndarray) -> Any:
    """The distribution of one draw for one row, by scipy."""
    if name == "student_t":
        return scipy.stats.t(4.5, f[0], 0.7)
    if name == "student_t_row_scale":
        return scipy.stats.t(2.6, f[0], math.exp(f[1] / 2))
    if name == "poisson":
        return scipy.stats.poisson(math.exp(f[0]))
    if name == "quantiles":
        spacing = np.diff(scipy.stats.norm.ppf(LEVELS))
        distance = spacing * (np.logaddexp(0, f[[1, 2, 3, 4]]) / math.log(2) + 1e-4)
        low = f[0] - np.cumsum(distance[:2][::-1])[::-1]
        return PiecewiseLinear(np.concatenate((low, [f[0]], f[0] + np.cumsum(distance[2:]))), LEVELS)
    dispersion = 0.8 if name == "negative_binomial" else math.exp(f[1])
    return scipy.stats.nbinom(1 / dispersion, 1 / (1 + dispersion * math.exp(f[0])))


def mixtures(name: str, f: Tensor) -> list[list[Any]]:
    """By row, by draw."""
    return [[components(name, f[s, b].numpy()) for s in range(len(f))] for b in range(B)]


def targets(name: str) -> Tensor:
    return torch.tensor(
        [0.0, 1, 2, 3, 5, 9, 14] if name in COUNTS else [-6.0, -1, 0, 0.3, 1, 2.5, 9], dtype=torch.float64
    )


@pytest.mark.parametrize("name", KINDS)
def test_densities_and_probabilities(name: str) -> None:
    f, y = outputs(name), targets(name)
    prediction = predict(name, f)
    for row, draws in enumerate(mixtures(name, f)):
        at = float(y[row])
        cdf = np.mean([draw.cdf(at) for draw in draws])
        density = np.mean([np.exp(draw.logpmf(at) if name in COUNTS else draw.logpdf(at)) for draw in draws])
        tolerance = 1e-6 if name == "quantiles" else 1e-10  # a difference quotient
        assert float(prediction.cdf(y)[row, 0]) == pytest.approx(cdf, rel=1e-10, abs=1e-13)
        assert float(prediction.log_prob(y)[row]) == pytest.approx(math.log(density), rel=tolerance, abs=tolerance)


def integral(function: Callable[[np.ndarray], np.ndarray], kinks: np.ndarray, reach: float = 4e6) -> float:
    """Over the line, by 40 nodes between kinks and in ever longer pieces beyond them."""
    steps = np.geomspace(0.05, reach, 80)
    edges = np.concatenate((kinks.min() - steps[::-1], np.sort(kinks), kinks.max() + steps))
    nodes, weights = np.polynomial.legendre.leggauss(40)
    half = 0.5 * np.diff(edges)[:, None]
    return float((half * weights * function(edges[:-1, None] + half * (1 + nodes))).sum())


@pytest.mark.parametrize("name", KINDS)
def test_moments(name: str) -> None:
    f = outputs(name)
    prediction = predict(name, f)
    for row, draws in enumerate(mixtures(name, f)):
        if name == "quantiles":
            found = [by_integral(draw) for draw in draws]
            means, variances = [mean for mean, _ in found], [variance for _, variance in found]
        else:
            means, variances = [draw.mean() for draw in draws], [draw.var() for draw in draws]
        assert float(prediction.mean[row, 0]) == pytest.approx(np.mean(means))
        assert float(prediction.epistemic[row, 0]) == pytest.approx(np.var(means))
        assert float(prediction.aleatoric[row, 0]) == pytest.approx(np.mean(variances))
        assert float(prediction.variance[row, 0]) == pytest.approx(np.mean(variances) + np.var(means))


def by_integral(draw: PiecewiseLinear) -> tuple[float, float]:
    """Mean and variance from the distribution function: E[Y; Y > 0] and the like by parts."""
    kinks = np.append(draw.knots, 0.0)
    mean = integral(lambda x: (x > 0) - draw.cdf(x), kinks, 1e3)
    square = integral(lambda x: 2 * x * ((x > 0) - draw.cdf(x)), kinks, 1e3)
    return mean, square - mean**2


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("q", [1e-4, 0.05, 0.31, 0.5, 0.9, 0.9999])
def test_quantiles(name: str, q: float) -> None:
    prediction = predict(name, outputs(name))
    value = prediction.quantile(q)
    reached = prediction.cdf(value)
    if name in COUNTS:
        assert bool((reached >= q).all())
        assert bool((prediction.cdf(value - 1) < q).all())
    else:
        torch.testing.assert_close(reached, torch.full_like(reached, q), rtol=0, atol=1e-9)


@pytest.mark.parametrize("name", CONTINUOUS)
def test_quantiles_are_in_order(name: str) -> None:
    found = predict(name, 4 * outputs(name)).quantile([0.9, 0.1, 0.5, 0.501])
    assert bool((found[1] < found[2]).all() & (found[2] <= found[3]).all() & (found[3] < found[0]).all())


def crps_integral(draws: list[Any], kinks: np.ndarray, at: float) -> float:
    return integral(lambda x: (np.mean([draw.cdf(x) for draw in draws], 0) - (x >= at)) ** 2, kinks)


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("scale", [1.0, 4.0])
def test_crps_is_the_integral(name: str, scale: float) -> None:
    """Against the sum over counts, or an integral, of the squared distance of the distribution functions."""
    f, y = scale * outputs(name), targets(name)
    f = torch.cat((f[..., :1].clamp_max(5.5), f[..., 1:].clamp_max(0.5)), -1) if name in COUNTS else f
    found = predict(name, f).crps(y)
    for row, draws in enumerate(mixtures(name, f)):
        at = float(y[row])
        if name in COUNTS:
            k = np.arange(30_000.0)
            expected = ((np.mean([draw.cdf(k) for draw in draws], 0) - (k >= at)) ** 2).sum()
        else:
            kinks = np.append(
                np.array([draw.knots if name == "quantiles" else draw.mean() for draw in draws]).flatten(), at
            )
            expected = crps_integral(draws, kinks, at)
        assert float(found[row, 0]) == pytest.approx(expected, rel=1e-4 if name in COUNTS else 2e-5)


def test_crps_is_that_of_scoringrules() -> None:
    """One draw, for which there are closed forms."""
    scoringrules = pytest.importorskip("scoringrules")
    y = targets("poisson")
    f = outputs("poisson", 1)
    expected = [scoringrules.crps_poisson(float(at), float(rate)) for at, rate in zip(y, f[0, :, 0].exp(), strict=True)]
    np.testing.assert_allclose(predict("poisson", f).crps(y)[:, 0].numpy(), expected, rtol=1e-8)
    f = outputs("negative_binomial", 1)
    prob = 1 / (1 + 0.8 * f[0, :, 0].exp())
    expected = [scoringrules.crps_negbinom(float(at), 1 / 0.8, float(p)) for at, p in zip(y, prob, strict=True)]
    np.testing.assert_allclose(predict("negative_binomial", f).crps(y)[:, 0].numpy(), expected, rtol=1e-6)
    y, f = targets("student_t"), outputs("student_t", 1)
    expected = [scoringrules.crps_t(float(at), 4.5, float(loc), 0.7) for at, loc in zip(y, f[0, :, 0], strict=True)]
    np.testing.assert_allclose(predict("student_t", f).crps(y)[:, 0].numpy(), expected, rtol=1e-6)


def test_crps_of_large_counts() -> None:
    """A range of ten thousands of counts, summed in steps, against the closed form of one draw."""
    scoringrules = pytest.importorskip("scoringrules")
    f, y = torch.full((1, B, 1), math.log(2e4), dtype=torch.float64), 1e4 * torch.arange(B).double()
    p = 1 / (1 + 0.8 * 2e4)
    expected = [scoringrules.crps_negbinom(float(at), 1 / 0.8, p) for at in y]
    found = predict("negative_binomial", f).crps(y)
    np.testing.assert_allclose(found[:, 0].numpy(), expected, rtol=1e-4)


@pytest.mark.parametrize("name", KINDS)
def test_calibrated_predictions_are_found_calibrated(name: str) -> None:
    """Targets at 100 equally probable values: intervals hold them as often as they say, of counts at least as often."""
    f = outputs(name, 1).mean(1, keepdim=True)
    levels = (np.arange(100) + 0.5) / 100
    values = predict(name, f).quantile(levels.tolist()).flatten()
    scores = metrics.evaluate(predict(name, f.expand(1, 100, -1)), values)
    for level in (50, 90, 95):
        gap = scores[f"coverage_{level}"] - level / 100
        assert gap > -0.011
        assert name in COUNTS or gap < 0.011
    assert set(scores) == {"nll", "rmse", "crps", "coverage_50", "coverage_90", "coverage_95"}


def test_intervals_of_counts_are_those_whose_coverage_is_counted() -> None:
    prediction = predict("negative_binomial", outputs("negative_binomial"))
    for level in (0.5, 0.9):
        lower, upper = prediction.interval(level)
        for at in range(12):
            y = torch.full((B, 1), float(at), dtype=torch.float64)
            inside = (lower <= y) & (y <= upper)
            assert torch.equal(prediction.centrality(y) < level, inside)


def test_lists_of_counts_do_not_depend_on_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """P(Y <= k) against scipy; small and large counts in different chunks, of which the large ones cannot be listed."""
    f = torch.tensor([0.5, 2.0, 6.5], dtype=torch.float64).view(1, 3, 1).expand(S, 3, 1)
    for size in (base.MAX_ELEMENTS_PER_CHUNK, S):
        monkeypatch.setattr(base, "MAX_ELEMENTS_PER_CHUNK", size)
        found = predict("poisson", f[:, :2]).steps()
        assert found is not None
        expected = scipy.stats.poisson.cdf(np.arange(len(found))[:, None], np.exp(f[0, :2, 0].numpy()))
        np.testing.assert_allclose(found[..., 0].numpy(), expected, rtol=1e-12)
        assert predict("poisson", f).steps() is None
        assert predict("student_t", f).steps() is None


def test_zero_outputs_are_the_standard_normal_quantiles() -> None:
    prediction = likelihoods.Quantiles().double().predictive(Outputs(kept=torch.zeros(1, 1, 21, dtype=torch.float64)))
    for level in likelihoods.Quantiles().levels:
        assert float(prediction.quantile(level)) == pytest.approx(scipy.stats.norm.ppf(level), abs=1e-3)
    assert float(prediction.std) == pytest.approx(1, abs=0.03)


def test_pinball_loss_is_least_at_the_quantiles() -> None:
    """The objective over a sample against the sample's own quantiles."""
    y = torch.tensor(np.random.default_rng(0).gamma(2.0, size=(501, 1)))
    likelihood = likelihoods.Quantiles(LEVELS, learn=False).double()
    wanted = torch.tensor(np.quantile(y[:, 0], LEVELS))
    spacing = torch.tensor(np.diff(scipy.stats.norm.ppf(LEVELS)))
    raw = torch.log(torch.expm1((wanted.diff() / spacing - 1e-4) * math.log(2)))
    best = torch.cat((wanted[2:3], raw))
    (knots,) = likelihood.components(best)
    torch.testing.assert_close(knots[0], wanted)

    def total(outputs: Tensor) -> float:
        return float(likelihood.objective(outputs.expand(501, -1), y).sum())

    for shift in torch.eye(5, dtype=torch.float64):
        assert total(best) > max(total(best + 0.05 * shift), total(best - 0.05 * shift))


def test_information_of_the_pinball_loss_is_that_of_gaussian_noise() -> None:
    """With s the mean loss, the curvature by a shift is 1 / sigma^2 for Gaussian data: to the levels' coarseness."""
    levels = [(step + 0.5) / 200 for step in range(200)]
    sigma = 0.4
    likelihood = likelihoods.Quantiles(levels, scale=sigma / math.sqrt(math.pi), learn=False).double()
    y = sigma * torch.tensor(scipy.stats.norm.ppf((np.arange(20_000) + 0.5) / 20_000)).unsqueeze(-1)
    narrow = torch.log(torch.expm1(torch.tensor((sigma - 1e-4) * math.log(2), dtype=torch.float64)))
    base = torch.cat((torch.zeros(1), torch.full((199,), float(narrow)))).double()
    base[0] = sigma * scipy.stats.norm.ppf(min(levels, key=lambda level: abs(level - 0.5)))

    def total(shift: float) -> float:
        moved = base.clone()
        moved[0] += shift
        return float(likelihood.objective(moved.expand(20_000, -1), y).mean())

    step = 0.05 * sigma
    curvature = -(total(step) - 2 * total(0.0) + total(-step)) / step**2
    assert curvature == pytest.approx(1 / sigma**2, rel=0.02)


@pytest.mark.parametrize("name", KINDS)
def test_pickles(name: str) -> None:
    prediction, y = predict(name, outputs(name)), targets(name)
    again = pickle.loads(pickle.dumps(prediction))
    assert torch.equal(again.log_prob(y), prediction.log_prob(y))
    assert torch.equal(again.quantile(0.3), prediction.quantile(0.3))


def test_incomplete_beta() -> None:
    generator = np.random.default_rng(0)
    a, b = 10.0 ** generator.uniform(-2, 4, (2, 4000))
    x = scipy.special.betaincinv(a, b, generator.uniform(size=4000))
    found = regularized_beta(*(torch.tensor(part) for part in (a, b, x)))
    np.testing.assert_allclose(found.numpy(), scipy.special.betainc(a, b, x), rtol=0, atol=1e-10)
    ends = regularized_beta(torch.tensor([2.0, 2.0]), torch.tensor([3.0, 3.0]), torch.tensor([0.0, 1.0]))
    assert ends.tolist() == [0.0, 1.0]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: likelihoods.StudentT(degrees=2.0), "degrees=2.0; give a number above 2"),
        (lambda: likelihoods.StudentT(scale=-1.0), "scale=-1.0"),
        (lambda: likelihoods.NegativeBinomial(dispersion=0.0), "dispersion=0.0"),
        (lambda: likelihoods.Quantiles([0.5]), "at least two levels in increasing order"),
        (lambda: likelihoods.Quantiles([0.5, 0.2]), "at least two levels in increasing order"),
        (lambda: likelihoods.Quantiles([0.5, 1.0]), "at least two levels in increasing order"),
    ],
)
def test_bad_arguments(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()
