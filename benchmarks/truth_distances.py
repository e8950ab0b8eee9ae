"""Distances between two sets of function draws at the same inputs. Each is 0 for equal distributions and grows with the difference.

Functions are outputs [S, I, O] of a network. Some distances compare the predictive distributions of targets (`wasserstein`,
`total_variation`, `disagreement`, `log_density`), others the functions themselves (`epistemic_inside`, `epistemic_outside`,
`correlation`), which are network outputs or class probabilities.
"""

import math

import torch
from torch import Tensor

from benchmarks.truth_problems import Problem

GRID_POINTS = 128
"""Number of grid points for integrals of distribution functions."""
NUM_SPLITS = 8
"""Number of random splits of the truth into halves, for its noise floor."""
BLOCK_INPUTS, NUM_BLOCKS, MAX_JUDGED = 5, 24, 60
"""Number of inputs whose targets are judged jointly, number of such groups, and number of held-out draws."""


def distances(problem: Problem, found: Tensor, truth: Tensor, held_out: Tensor) -> dict[str, float]:
    """All distances of function draws from draws of the truth.

    Args:
        problem: The problem.
        found: Draws of a method, [S, I, O].
        truth: Draws of the truth, [S', I, O].
        held_out: Other draws of the truth, from which the judged targets are sampled, [S'', I, O].
    """
    inside = problem.inside
    values, wanted = functions_of(problem, found), functions_of(problem, truth)
    spread, exact = values.std(0, correction=0).mean(-1), wanted.std(0, correction=0).mean(-1)  # [I]
    off = (spread - exact).abs()
    result = {
        "wasserstein": _wasserstein_of_samples(values, wanted)
        if problem.is_classification
        else _wasserstein_of_targets(problem, found, truth),
        "epistemic_inside": float(off[inside].mean() / exact[inside].mean()),
        "epistemic_outside": float(off[~inside].mean() / exact[~inside].mean()),
        "correlation": float((correlations(values) - correlations(wanted)).abs().mean()),
        "log_density": _mean_density(problem, truth, held_out) - _mean_density(problem, found, held_out),
    }
    if problem.is_classification:
        ours, theirs = values.mean(0), wanted.mean(0)  # [I, K]
        result["total_variation"] = float(0.5 * (ours - theirs).abs().sum(-1).mean())
        result["disagreement"] = float((ours.argmax(-1) != theirs.argmax(-1)).double().mean())
    return result


def floors(problem: Problem, draws: Tensor) -> dict[str, float]:
    """Noise floors: the largest distance between two halves of the truth over `NUM_SPLITS` random splits."""
    generator = torch.Generator().manual_seed(0)
    splits = [draws[torch.randperm(len(draws), generator=generator)].chunk(2) for _ in range(NUM_SPLITS)]
    each = [distances(problem, first, second, first) for first, second in splits]
    densities = [
        abs(_mean_density(problem, quarter, first) - _mean_density(problem, other, first))
        for first, (quarter, other) in ((first, second.chunk(2)) for first, second in splits)
    ]
    found = {name: max(one[name] for one in each) for name in each[0]}
    return {**found, "log_density": max(densities)}


def spread_ratios(problem: Problem, found: Tensor, truth: Tensor) -> dict[str, float]:
    """Epistemic standard deviation of the method divided by the truth's, inside and outside the data."""
    ours, exact = (functions_of(problem, each).std(0, correction=0).mean(-1) for each in (found, truth))
    parts = {"inside": problem.inside, "outside": ~problem.inside}
    return {name: float(ours[part].mean() / exact[part].mean()) for name, part in parts.items()}


def functions_of(problem: Problem, outputs: Tensor) -> Tensor:
    """Functions to compare, in float64: outputs, or class probabilities for a classification."""
    return outputs.double().softmax(-1) if problem.is_classification else outputs.double()


def correlations(values: Tensor) -> Tensor:
    """Correlation of functions between inputs, [O, I, I]; 0 if a function does not vary."""
    centered = values - values.mean(0)
    covariance = torch.einsum("sio,sjo->oij", centered, centered)
    scale = covariance.diagonal(dim1=1, dim2=2).sqrt()
    floor = 1e-9 * scale.max().clamp_min(1e-300)
    inverse = torch.where(scale > floor, 1 / scale.clamp_min(floor), torch.zeros_like(scale))
    eye = torch.eye(values.shape[1], dtype=values.dtype)
    return (covariance * inverse[:, :, None] * inverse[:, None]) * (1 - eye)


def _wasserstein_of_samples(first: Tensor, second: Tensor) -> float:
    """Mean over numbers of the 1-Wasserstein distance between their draws in `first` [S, ...] and in `second` [S', ...]."""
    levels = (torch.arange(1000, dtype=torch.float64) + 0.5) / 1000

    def quantiles(values: Tensor) -> Tensor:
        index = (levels * len(values)).long().clamp(max=len(values) - 1)
        found: Tensor = values.flatten(1).sort(0).values[index]
        return found

    return float((quantiles(first) - quantiles(second)).abs().mean())


def _wasserstein_of_targets(problem: Problem, first: Tensor, second: Tensor) -> float:
    r"""Mean over inputs of $\int |F(y) - G(y)| dy$, where F and G are predictive distributions of targets, which are mixtures of
    Gaussians."""
    parts = [components_of(problem, outputs) for outputs in (first, second)]
    low = torch.stack([(mean - 5 * std).amin(0) for mean, std in parts]).amin(0)  # [I]
    high = torch.stack([(mean + 5 * std).amax(0) for mean, std in parts]).amax(0)
    share = torch.linspace(0, 1, GRID_POINTS, dtype=torch.float64)
    grid = low[:, None] + (high - low)[:, None] * share  # [I, G]
    curves = []
    for mean, std in parts:
        total = torch.zeros_like(grid)
        for center, width in zip(mean, std, strict=True):
            total += torch.special.ndtr((grid - center[:, None]) / width[:, None])
        curves.append(total / len(mean))
    return float(torch.trapezoid((curves[0] - curves[1]).abs(), grid, dim=1).mean())


def components_of(problem: Problem, outputs: Tensor) -> tuple[Tensor, Tensor]:
    """Means and standard deviations of the target in each draw, [S, I] each."""
    mean, variance = problem.likelihood.components(outputs.double())  # type: ignore[operator]
    return mean[..., 0], variance.expand_as(mean)[..., 0].sqrt()


def _mean_density(problem: Problem, draws: Tensor, held_out: Tensor) -> float:
    """Mean log density per input of targets in groups of inputs, sampled from held-out functions.

    Classes are judged under the mixture of the draws. Other targets are judged under the Gaussian with the mean and covariance of
    the draws, because a mixture of a few hundred draws in five dimensions would mostly measure their number.
    """
    generator = torch.Generator().manual_seed(0)
    num_inputs, held_out = draws.shape[1], held_out[:MAX_JUDGED]
    blocks = torch.stack([torch.randperm(num_inputs, generator=generator)[:BLOCK_INPUTS] for _ in range(NUM_BLOCKS)])
    if problem.is_classification:
        probs = held_out.double().softmax(-1)
        drawn = torch.multinomial(probs.flatten(0, 1), 1, generator=generator).view(probs.shape[:2])  # [T, I]
        each = draws.double().log_softmax(-1)  # [S, I, K]
        terms = each[:, torch.arange(num_inputs), drawn]  # [S, T, I]
        total = torch.stack([terms[..., block].sum(-1).logsumexp(0) for block in blocks]) - math.log(len(draws))
        return float(total.mean() / BLOCK_INPUTS)
    centers, widths = components_of(problem, held_out)
    drawn = centers + widths * torch.randn(centers.shape, generator=generator, dtype=torch.float64)
    mean, std = components_of(problem, draws)
    apart = mean - mean.mean(0)
    covariance = apart.T @ apart / len(mean) + std.square().mean(0).diag()  # [I, I]
    parts = covariance[blocks[:, :, None], blocks[:, None]]  # [blocks, 5, 5]
    density = torch.distributions.MultivariateNormal(mean.mean(0)[blocks], parts)
    return float(density.log_prob(drawn[:, blocks]).mean() / BLOCK_INPUTS)
