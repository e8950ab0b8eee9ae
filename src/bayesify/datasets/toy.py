"""Small synthetic problems with their ground truth."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from bayesify.arguments.checks import Count, NonNegative, Positive, Seed, checked


@dataclass(frozen=True)
class Regression:
    """A regression with one input and one output, all float32.

    Args:
        x: Training inputs, [N, 1].
        y: Training targets, [N, 1].
        x_test: Test inputs from the same distribution, [T, 1].
        y_test: Test targets, [T, 1].
        grid: Evenly spaced inputs that extend beyond the data on both sides, for figures, [G, 1].
        truth: Noiseless function on the grid, [G, 1].
        noise: Variance of the noise in y.
        gap: Lower and upper end of the interval without data; `None` if there is no such gap.
    """

    x: Tensor
    y: Tensor
    x_test: Tensor
    y_test: Tensor
    grid: Tensor
    truth: Tensor
    noise: float
    gap: tuple[float, float] | None = None

    def standardized(self) -> "Regression":
        """The problem with training inputs and targets of mean 0 and variance 1."""
        x_mean, x_std = float(self.x.mean()), float(self.x.std(unbiased=False))
        y_mean, y_std = float(self.y.mean()), float(self.y.std(unbiased=False))
        x, x_test, grid = ((part - x_mean) / x_std for part in (self.x, self.x_test, self.grid))
        y, y_test, truth = ((part - y_mean) / y_std for part in (self.y, self.y_test, self.truth))
        gap = self.gap and ((self.gap[0] - x_mean) / x_std, (self.gap[1] - x_mean) / x_std)
        return Regression(x, y, x_test, y_test, grid, truth, self.noise / y_std**2, gap)


@dataclass(frozen=True)
class Classification:
    """A classification with two inputs.

    Args:
        x: Training inputs, [N, 2], float32.
        y: Training labels, [N], int64.
        x_test: Test inputs from the same distribution, [T, 2].
        y_test: Test labels, [T].
        box: Left, right, lower and upper end of a window around the data, for figures.
    """

    x: Tensor
    y: Tensor
    x_test: Tensor
    y_test: Tensor
    box: tuple[float, float, float, float]

    @checked
    def grid(self, side: Count = 60) -> Tensor:
        """Points [side^2, 2] of a regular lattice over the box, row by row from the bottom."""
        left, right, lower, upper = self.box
        points = torch.cartesian_prod(torch.linspace(lower, upper, side), torch.linspace(left, right, side))
        return points.flip(-1)


@dataclass(frozen=True)
class LinearPosterior:
    r"""The exact posterior of Bayesian linear regression, in float64.

    Args:
        mean: E[w | y], [D].
        covariance: Cov[w | y], [D, D].
        log_evidence: log p(y), in nats.
    """

    mean: Tensor
    covariance: Tensor
    log_evidence: float


@dataclass(frozen=True)
class Linear:
    """A linear model without a bias, its data and its exact posterior.

    Args:
        x: Inputs, [N, D], float32.
        y: Targets, [N, 1], float32.
        weight: True weights, [D], float32.
        prior_std: Prior standard deviation of every weight.
        noise: Variance of the noise in y.
        posterior: Exact posterior given x, y, `prior_std` and `noise`.
    """

    x: Tensor
    y: Tensor
    weight: Tensor
    prior_std: float
    noise: float
    posterior: LinearPosterior


@checked
def cosine(num_data: Count = 100, num_test: Count = 200, seed: Seed = 0) -> Regression:
    r"""Two clusters on a cosine with a gap between them (Foong et al. 2019; the inducing weights paper, figure 2).

    $y = \cos(4x + 0.8) + \varepsilon$ with $\varepsilon \sim \mathcal{N}(0, 0.1^2)$. Half of the inputs x are uniform
    in [-1, -0.7], the other half in [0.5, 1].

    Args:
        num_data: Number of training examples. If it is odd, the right cluster has one example more.
        num_test: Number of test examples, from the same two clusters.
        seed: Seed of the data.
    """

    def inputs(count: int, generator: torch.Generator) -> Tensor:
        left = _uniform(count // 2, -1.0, -0.7, generator)
        return torch.cat((left, _uniform(count - count // 2, 0.5, 1.0, generator)))

    made = _regression(inputs, lambda x: torch.cos(4 * x + 0.8), num_data, num_test, 0.1, (-1.6, 1.6), seed)
    return replace(made, gap=(-0.7, 0.5))


@checked
def cubic(num_data: Count = 40, num_test: Count = 200, seed: Seed = 0) -> Regression:
    r"""A cubic function with a gap between the data (Hernández-Lobato & Adams 2015; global inducing points paper, figure 1).

    $y = x^3 + \varepsilon$ with $\varepsilon \sim \mathcal{N}(0, 3^2)$; the inputs x are uniform in
    $[-4, -2] \cup [2, 4]$. The papers standardize both x and y: see `Regression.standardized`.

    Args:
        num_data: Number of training examples.
        num_test: Number of test examples, from the same two intervals.
        seed: Seed of the data.
    """

    def inputs(count: int, generator: torch.Generator) -> Tensor:
        x = _uniform(count, -2.0, 2.0, generator)
        return x + 2 * torch.where(x < 0, -1.0, 1.0)

    made = _regression(inputs, lambda x: x**3, num_data, num_test, 3.0, (-6.0, 6.0), seed)
    return replace(made, gap=(-2.0, 2.0))


@checked
def snelson(num_data: Count = 200, num_test: Count = 200, seed: Seed = 0) -> Regression:
    r"""A noisy wavy function on [0, 6], similar to the data of Snelson & Ghahramani (2006).

    $y = \sin(2.3 x) - 0.6 \cos(1.1 x + 0.4) + \varepsilon$ with $\varepsilon \sim \mathcal{N}(0, 0.28^2)$; the inputs x
    are uniform in [0, 6].

    Args:
        num_data: Number of training examples.
        num_test: Number of test examples.
        seed: Seed of the data.
    """

    def function(x: Tensor) -> Tensor:
        return torch.sin(2.3 * x) - 0.6 * torch.cos(1.1 * x + 0.4)

    return _regression(partial(_uniform, low=0.0, high=6.0), function, num_data, num_test, 0.28, (-2.0, 8.0), seed)


@checked
def two_moons(
    num_data: Count = 200, num_test: Count = 400, noise_std: NonNegative = 0.15, seed: Seed = 0
) -> Classification:
    r"""Two interleaved half circles.

    With $t$ uniform in $[0, \pi]$, class 0 lies at $(\cos t, \sin t)$ and class 1 at $(1 - \cos t, \frac12 - \sin t)$, each
    coordinate with Gaussian noise. Labels alternate.

    Args:
        num_data: Number of training examples.
        num_test: Number of test examples.
        noise_std: Standard deviation of the noise in x.
        seed: Seed of the data.
    """
    generator = torch.Generator().manual_seed(seed)

    def make(count: int) -> tuple[Tensor, Tensor]:
        labels = torch.arange(count) % 2
        angle = _uniform(count, 0.0, math.pi, generator)[:, 0]
        sign = 1.0 - 2.0 * labels
        moon = torch.stack((labels + sign * angle.cos(), 0.5 * labels + sign * angle.sin()), dim=1)
        return moon + noise_std * torch.randn(count, 2, generator=generator), labels

    (x, y), (x_test, y_test) = make(num_data), make(num_test)
    return Classification(x, y, x_test, y_test, box=(-2.5, 3.5, -2.25, 2.75))


@checked
def linear(
    num_data: Count = 50, num_features: Count = 3, prior_std: Positive = 1.0, noise: Positive = 0.1, seed: Seed = 0
) -> Linear:
    r"""A linear model with known posterior and evidence.

    $y = x^\top w + \varepsilon$ with $w \sim \mathcal{N}(0, \text{prior\_std}^2 I)$ and
    $\varepsilon \sim \mathcal{N}(0, \text{noise})$.

    Args:
        num_data: Number of examples N.
        num_features: Number of features D; inputs are standard normal.
        prior_std: Prior standard deviation of every weight.
        noise: Variance of $\varepsilon$.
        seed: Seed of the data.
    """
    generator = torch.Generator().manual_seed(seed)
    weight = prior_std * torch.randn(num_features, generator=generator)
    x = torch.randn(num_data, num_features, generator=generator)
    y = x @ weight[:, None] + math.sqrt(noise) * torch.randn(num_data, 1, generator=generator)
    return Linear(x, y, weight, prior_std, noise, linear_posterior(x, y, prior_std, noise))


@checked
def linear_posterior(x: Tensor, y: Tensor, prior_std: Positive | Tensor, noise: Positive) -> LinearPosterior:
    r"""Posterior and evidence of Bayesian linear regression.

    $y = X w + \varepsilon$ with $w \sim \mathcal{N}(0, S_0)$ and $\varepsilon \sim \mathcal{N}(0, \text{noise}\, I)$ gives

    $$ A = X^\top X / \text{noise} + S_0^{-1}, \quad m = A^{-1} X^\top y / \text{noise}, \quad
       \log p(y) = -\tfrac12 \bigl( N \log 2\pi\,\text{noise} + \log|A| + \log|S_0| + \lVert y - X m \rVert^2 / \text{noise}
       + m^\top S_0^{-1} m \bigr) $$

    Args:
        x: Inputs X, [N, D].
        y: Targets, [N] or [N, 1].
        prior_std: Square roots of the diagonal of $S_0$: a number, or [D].
        noise: Variance of $\varepsilon$.

    Returns:
        The posterior in float64, regardless of the types of x and y.

    Raises:
        ValueError: If the shapes do not match, or if `prior_std` or `noise` is not positive.
    """
    if x.ndim != 2 or y.numel() != x.shape[0]:
        raise ValueError(
            f"linear_posterior: x has shape {tuple(x.shape)} and y has shape {tuple(y.shape)}, which do not "
            "match; give x [N, D] and y [N]"
        )
    if not bool(torch.isfinite(x).all() & torch.isfinite(y).all()):
        raise ValueError("linear_posterior: x or y holds NaN or infinity; give finite numbers")
    if not bool((torch.as_tensor(prior_std) > 0).all()):
        raise ValueError(f"linear_posterior: prior_std={prior_std}; give positive numbers")
    x, y = x.double(), y.double().flatten()
    prior_var = torch.as_tensor(prior_std, dtype=torch.float64).square().expand(x.shape[1])
    precision = x.T @ x / noise + torch.diag(1 / prior_var)  # [D, D]
    factor = torch.linalg.cholesky(precision)
    mean = torch.cholesky_solve((x.T @ y / noise)[:, None], factor)[:, 0]
    log_det = 2 * factor.diagonal().log().sum() + prior_var.log().sum()
    misfit = (y - x @ mean).square().sum() / noise + (mean.square() / prior_var).sum()
    evidence = -0.5 * (len(y) * math.log(2 * math.pi * noise) + log_det + misfit)
    return LinearPosterior(mean, torch.cholesky_inverse(factor), float(evidence))


def _regression(
    inputs: Callable[..., Tensor],
    function: Callable[[Tensor], Tensor],
    num_data: int,
    num_test: int,
    noise_std: float,
    ends: tuple[float, float],
    seed: int,
) -> Regression:
    generator = torch.Generator().manual_seed(seed)

    def make(count: int) -> tuple[Tensor, Tensor]:
        x = inputs(count, generator=generator)
        return x, function(x) + noise_std * torch.randn(count, 1, generator=generator)

    (x, y), (x_test, y_test) = make(num_data), make(num_test)
    grid = torch.linspace(*ends, 200)[:, None]
    return Regression(x, y, x_test, y_test, grid, function(grid), noise_std**2)


def _uniform(count: int, low: float, high: float, generator: torch.Generator) -> Tensor:
    return low + (high - low) * torch.rand(count, 1, generator=generator)
