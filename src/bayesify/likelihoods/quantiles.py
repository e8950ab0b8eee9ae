"""Quantiles of the target, trained by the pinball loss."""

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from bayesify.arguments.checks import Positive, checked, refuse
from bayesify.likelihoods.base import NumberLikelihood
from bayesify.maths.gamma import as_float
from bayesify.predictive.families.quantile_function import QuantileFunction

DEFAULT_LEVELS = (0.01, *(step / 20 for step in range(1, 20)), 0.99)
MIN_QUANTILE_GAP = 1e-4
"""Smallest distance between two neighboring quantiles, relative to the distance of the standard normal quantiles."""


class Quantiles(NumberLikelihood):
    r"""Quantiles of the target at given levels, which never cross; no shape of the distribution is assumed.

    The network's last axis contains O quantiles at the middle level m. After these quantiles, the last axis contains O values f
    for each other level, in increasing order of the levels. A value f determines the distance to the next quantile toward the
    middle: $(z_{k+1} - z_k)\,\operatorname{softplus}(f) / \log 2$, where z are the standard normal quantiles. If all values f are
    0, the quantiles are those of a normal distribution with standard deviation 1, shifted so that its quantile at level m is the
    network's.

    Quantiles do not define a density, so training does not maximize a likelihood in the strict sense. Training maximizes
    `objective`, a pseudo-likelihood that combines the pinball losses of all levels with a scale s:

    $$ -\frac1s \cdot \frac2K \sum_k \rho_{l_k}(y - q_k) - \log s, \qquad \rho_l(e) = \max(l e, (l - 1) e) $$

    The loss approximates the continuous ranked probability score, and s converges to the mean of this score. The data
    then have the same weight relative to the prior as with Gaussian noise. `log_prob` and the predictive describe a distribution
    that has these quantiles, a constant density between neighboring quantiles, and exponential tails; see `QuantileFunction`.
    There is no Fisher matrix, because the loss is piecewise linear. Targets are [B, O].

    Args:
        levels: At least two increasing levels, strictly between 0 and 1.
        scale: Initial s: a number for all outputs, or a sequence with one number per output.
        learn: Whether to train s.

    Raises:
        ValueError: If there are fewer than two levels, if the levels are not increasing or not strictly between 0 and
            1, or if a scale is not positive and finite.
    """

    name = "quantiles"
    family: QuantileFunction
    no_curvature = (
        "likelihoods.Quantiles: the pinball loss is piecewise linear and has no Hessian; use likelihoods.StudentT(None) or "
        "HeteroscedasticGaussian(), or a method without curvature, such as 'ensemble' or 'mean_field'"
    )

    @checked
    def __init__(
        self,
        levels: Sequence[Positive] | Tensor = DEFAULT_LEVELS,
        scale: Positive | Sequence[Positive] | Tensor = 0.3,
        learn: bool = True,
    ) -> None:
        super().__init__()
        if isinstance(levels, Tensor) and levels.ndim != 1:
            raise refuse("likelihoods.Quantiles", "levels", levels, "a list of probabilities")
        chosen = [float(level) for level in levels]
        if len(chosen) < 2 or any(a >= b for a, b in zip([0.0, *chosen], [*chosen, 1.0], strict=True)):
            raise ValueError(
                f"likelihoods.Quantiles: levels={levels}; give at least two levels in increasing order, strictly between 0 and 1"
            )
        self._levels = chosen
        self._scale, self._learn = self._store("scale", scale, learn), learn
        self.family = QuantileFunction(chosen)
        self.outputs_per_target, self.parts = len(chosen), f"{len(chosen)} quantiles"
        middle = min(range(len(chosen)), key=lambda index: abs(chosen[index] - 0.5))
        spacing = torch.special.ndtri(torch.tensor(chosen, dtype=torch.float64)).diff()
        self._above, self._below = spacing[middle:].clone(), spacing[:middle].clone()

    @property
    def levels(self) -> tuple[float, ...]:
        """Levels of the quantiles."""
        return self.family.levels

    @property
    def scale(self) -> Tensor:
        """The scale s, a scalar or [O]."""
        return self._stored("scale")

    def numbers(self) -> dict[str, Tensor]:
        """Distances between the standard normal quantiles, below and above the middle."""
        return {"below": self._below, "above": self._above}

    @staticmethod
    def split(outputs: Tensor, **numbers: Tensor) -> tuple[Tensor, ...]:
        """Quantiles in increasing order, [..., O, K]."""
        spacing, middle = torch.cat((numbers["below"], numbers["above"])).to(outputs), len(numbers["below"])
        blocks = as_float(outputs).unflatten(-1, (len(spacing) + 1, -1)).transpose(-1, -2)  # [..., O, K]
        center, raw = blocks.split((1, len(spacing)), dim=-1)
        distances = (F.softplus(raw) / math.log(2) + MIN_QUANTILE_GAP) * spacing
        from_lowest = F.pad(distances.cumsum(-1), (1, 0))
        return (from_lowest + (center - from_lowest[..., middle : middle + 1]),)

    def training_density(self, outputs: Tensor, y: Tensor) -> Tensor:
        """The pseudo-likelihood of each entry."""
        score = self.held_out_score(outputs, y)
        scale = self.scale.to(score)
        return score / scale - scale.log()

    def held_out_score(self, outputs: Tensor, y: Tensor) -> Tensor:
        """Minus the pinball loss."""
        (knots,) = self.components(outputs)
        error = y.unsqueeze(-1) - knots
        slope = torch.tensor(self._levels, dtype=error.dtype, device=error.device) - (error < 0).to(error)
        return (slope * error).mean(-1) * -2

    def fisher(self, outputs: Tensor) -> Tensor:
        """Not available, because the pinball loss has no Hessian.

        Raises:
            TypeError: Always.
        """
        raise TypeError(self.no_curvature)
