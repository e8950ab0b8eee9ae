"""Choosing the prior precision of a fitted Laplace posterior, and the noise with it."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from bayesify.laplace.covariances import EIGEN_LIMIT, DiagonalCovariance, FullCovariance
from bayesify.likelihoods import Gaussian
from bayesify.maths.constraints import raw_positive
from bayesify.predictive.findings import Finding
from bayesify.predictive.gaussian import OutputGaussian
from bayesify.predictor import Batch
from bayesify.running.inputs import as_inputs, check_inputs
from bayesify.training.batches import BatchReader, parse_batch, total_count

if TYPE_CHECKING:
    from bayesify.laplace.laplace import Laplace

Method = Literal["closed_form", "linearized_mc", "network_mc"]
"""How predictions are made; see `Laplace.predict`."""

COARSE = tuple(10.0**power for power in range(-4, 5))
"""The paper's grid for images: a prior precision between 1e-4 and 1e4."""

MORE_STEPS = 4
"""Values that are added beyond an end of the grid while the best is there."""

NOISE_STEPS = 50
"""Of the fixed point for the noise."""

FINE_STEPS = 9
"""Values of the second grid, between the neighbors of the best value of the first."""


@torch.no_grad()
def tune_prior_precision(
    laplace: Laplace,
    loader: Iterable[Any] | None = None,
    method: Literal["validation", "evidence"] | None = None,
    *,
    grid: Sequence[float] = COARSE,
    fine: bool = True,
    noise: bool = False,
    prediction: Method = "closed_form",
    num_draws: int = 32,
    read_batch: BatchReader | None = None,
    generator: torch.Generator | None = None,
) -> float:
    r"""Choose the factor on the prior precisions that predicts validation data best, or has the largest evidence.

    First a logarithmic grid, which goes on beyond its ends while the best value is at one (a grid of your own is taken as it is),
    then a finer one between the neighbors of its best value (Daxberger et al. 2021, appendix C.3). If the best value is still at an
    end, a warning says so. The curvature is diagonalized once and serves every value; only a full covariance over more than
    `EIGEN_LIMIT` weights is factorized again for each. The posterior is left at the best value.

    Args:
        laplace: A fitted posterior.
        loader: Validation data, for `method="validation"`.
        method: `"validation"`: mean log predictive density of the loader's data; `"evidence"`: `log_evidence()`. By default the
            first where there is a loader, else the second.
        grid: Prior precisions to try; with a precision per layer, such as the default, factors on those.
        fine: Whether to search again around the best.
        noise: Whether to choose the variance of a Gaussian likelihood too, by the evidence (MacKay's fixed point).
        prediction: The predictive to judge by: `"closed_form"`, `"linearized_mc"` or `"network_mc"`.
        num_draws: Draws for the Monte Carlo ones.
        read_batch: A function from what the loader yields to inputs and targets.
        generator: Source of randomness; the same numbers for every value.

    Returns:
        The chosen prior precision (or the factor, with one per layer).

    Raises:
        ValueError: If an argument is not one of these, or the loader is missing.
    """
    if method is None:
        method = "evidence" if loader is None else "validation"
    if method not in ("validation", "evidence"):
        raise ValueError(f"tune_prior_precision: method={method!r}; give 'validation' or 'evidence'")
    grid = [float(value) for value in grid]
    if any(not (value > 0 and math.isfinite(value)) for value in grid) or not grid:
        raise ValueError(f"tune_prior_precision: grid={grid}; give positive numbers")
    laplace.fitted()
    base = 1.0 if isinstance(laplace.base_precision, dict) else laplace.base_precision
    if method == "evidence":
        if noise:
            _fit_noise(laplace)
        score = evidences(laplace, base)
    else:
        if noise:
            raise ValueError(
                "tune_prior_precision: noise=True is for method='evidence'; validation data choose the prior only"
            )
        if loader is None:
            raise ValueError("tune_prior_precision: method='validation' needs a loader of validation data")
        batches = [parse_batch(item, read_batch) for item in loader]
        if not batches:
            raise ValueError("tune_prior_precision: the loader has no examples; give validation data")
        score = scores_on(laplace, batches, base, prediction, num_draws, generator)
    candidates = sorted(set(grid))
    scores = score(candidates)
    best = max(range(len(scores)), key=scores.__getitem__)
    for _ in range(MORE_STEPS if tuple(grid) == COARSE else 0):
        if 0 < best < len(candidates) - 1:
            break
        place = 0 if best == 0 else len(candidates)
        candidates.insert(place, candidates[0] / 10 if best == 0 else 10 * candidates[-1])
        scores.insert(place, score([candidates[place]])[0])
        best = max(range(len(scores)), key=scores.__getitem__)
    chosen, value = candidates[best], scores[best]
    laplace.findings = ()
    if len(candidates) > 1 and best in (0, len(candidates) - 1):
        end, remedy = ("smallest", "more or other weights") if best == 0 else ("largest", "fewer weights")
        sentence = (
            f"the best prior precision, {chosen:.3g}, is the {end} that was tried, and a better one may lie beyond"
        )
        finding = Finding("search_at_edge", sentence, f"give a wider grid=, or {remedy}")
        laplace.findings = (finding,)
        if tuple(grid) == COARSE:
            warnings.warn(f"tune_prior_precision: {finding}", stacklevel=3)
    if fine and len(candidates) > 1:
        low, high = candidates[max(0, best - 1)], candidates[min(len(candidates) - 1, best + 1)]
        ratio = math.log(high / low)
        steps = FINE_STEPS if method == "validation" else 20 * FINE_STEPS  # the evidence of another value costs nothing
        finer = [low * math.exp(ratio * (step + 1) / (steps + 1)) for step in range(steps)]
        finer_scores = score(finer)
        place = max(range(steps), key=finer_scores.__getitem__)
        if finer_scores[place] > value:
            chosen = finer[place]
    laplace.set_prior_factor(chosen / base)
    return chosen


def evidences(laplace: Laplace, base: float) -> Callable[[list[float]], list[float]]:
    """A function from prior precisions to log evidences; base is the one for which the factor is 1."""
    posterior = laplace.fitted()[1]
    if isinstance(posterior, FullCovariance) and len(posterior.prior) <= EIGEN_LIMIT:
        posterior.spectrum()
    return lambda values: [float(laplace.evidence_of(posterior.rescaled(value / base))) for value in values]


def scores_on(
    laplace: Laplace,
    batches: Sequence[Batch],
    base: float,
    prediction: Method = "closed_form",
    num_draws: int = 32,
    generator: torch.Generator | None = None,
) -> Callable[[list[float]], list[float]]:
    """A function from prior precisions to weighted mean log predictive densities of some batches; base as in `evidences`."""
    posterior = laplace.fitted()[1]
    seed = int(torch.randint(2**31, (), generator=generator, device=generator.device if generator else None))
    batches = [batch.to(laplace.device) for batch in batches]

    def score(values: list[float]) -> list[float]:
        factors = [value / base for value in values]
        if prediction != "closed_form":
            return [one_by_one(factor) for factor in factors]
        if isinstance(posterior, FullCovariance) and len(posterior.prior) > EIGEN_LIMIT:
            return [by_outputs([factor], posterior.rescaled(factor))[0] for factor in factors]
        return by_outputs(factors, None)

    def by_outputs(factors: list[float], own: Any) -> list[float]:
        totals = torch.zeros(len(factors), dtype=torch.float64)
        for part in batches:
            args, kwargs = as_inputs(part.x)
            check_inputs(args, kwargs)
            start, counts = 0, part.counts
            for point in laplace.linearizations(args, kwargs, laplace.memory):
                gradients = point.pull(point.identity())
                mean = point.outputs.detach().to(laplace.dtype)
                rows = slice(start, start + len(mean))
                start += len(mean)
                found = (
                    own.outputs(gradients).unsqueeze(0) if own is not None else posterior.outputs(gradients, factors)
                )
                for place, covariance in enumerate(laplace.temperature * found):
                    made = laplace.likelihood.closed_form(OutputGaussian(mean, covariance, seed), laplace.link)
                    totals[place] += counts[rows] @ made.log_prob(part.y[rows]).cpu().double()
        return (totals / total_count(batches)).tolist()

    def one_by_one(factor: float) -> float:
        before = laplace.posterior
        laplace.posterior = posterior.rescaled(factor)
        try:
            total = 0.0
            for part in batches:
                made = laplace.predict(
                    part.x, num_draws, generator=torch.Generator(laplace.device).manual_seed(seed), method=prediction
                )
                total += float(part.counts @ made.log_prob(part.y).cpu().double())
            return total / total_count(batches)
        finally:
            laplace.posterior = before

    return score


def _fit_noise(laplace: Laplace) -> None:
    r"""MacKay's fixed point for the noise: $\sigma^2 = \mathrm{SSE} / (N O - \gamma)$, $\gamma$ the effective parameters."""
    likelihood = laplace.likelihood
    if not isinstance(likelihood, Gaussian) or likelihood.noise.ndim:
        raise ValueError("tune_prior_precision: noise=True needs a Gaussian likelihood with one shared variance")
    subset, posterior = laplace.fitted()
    if not isinstance(posterior, FullCovariance):
        raise ValueError("tune_prior_precision: noise=True needs covariance='full' without marginal=True")
    start = float(likelihood.noise.detach())
    spectrum: Tensor = posterior.spectrum().double() * start  # of the curvature for unit noise, whitened by the prior
    mean = subset.take(laplace.values).double()
    norm = float((posterior.prior.double() * mean.square()).sum())
    count, variance, factor = laplace.num_outputs, start, posterior.factor
    for _ in range(NOISE_STEPS):
        effective = float((spectrum / (spectrum + factor * variance)).sum())
        factor = effective / max(norm, 1e-12)
        variance = laplace.data.squared_error / max(count - effective, 1e-6)
    set_noise(laplace, variance)


@torch.no_grad()
def set_noise(laplace: Laplace, variance: float) -> None:
    """Use another variance of a shared Gaussian noise; curvature and data term follow without a pass over the data."""
    likelihood = laplace.likelihood
    if not isinstance(likelihood, Gaussian) or likelihood.noise.ndim:
        raise ValueError("Laplace: set_noise needs a Gaussian likelihood with one shared variance")
    _, posterior = laplace.fitted()
    if not isinstance(posterior, (FullCovariance, DiagonalCovariance)):
        raise ValueError("Laplace: set_noise needs covariance='full' or 'diagonal' without marginal=True")
    ratio = float(likelihood.noise.detach()) / variance
    likelihood.raw_noise.copy_(torch.tensor(raw_positive(variance), dtype=torch.float64))
    scaled = type(posterior)(posterior.subset, posterior.curvature * ratio, posterior.prior)
    laplace.posterior = scaled.rescaled(posterior.factor)
    count = laplace.num_outputs
    laplace.data.log_likelihood = -0.5 * (
        count * math.log(2 * math.pi * variance) + laplace.data.squared_error / variance
    )
