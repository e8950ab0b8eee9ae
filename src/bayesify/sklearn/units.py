"""A regression's predictive in the units of the targets, from one in standardized units."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from bayesify.predictive.regression import RegressionPredictive, match_targets


class ScaledPredictive(RegressionPredictive):
    r"""The distribution of $y = \text{shift} + \text{scale} \cdot z$ for z of a given predictive.

    Args:
        inner: The predictive of z, [B, O].
        shift: [O].
        scale: [O], positive.
    """

    is_mixture = False

    def __init__(self, inner: RegressionPredictive, shift: Tensor, scale: Tensor) -> None:
        self._inner, self._shift, self._scale = inner, shift, scale
        self.family = inner.family

    def __len__(self) -> int:
        return len(self._inner)

    def __repr__(self) -> str:
        return f"ScaledPredictive({self._inner!r})"

    @property
    def outputs(self) -> Tensor:
        """The network's outputs of each draw in the targets' units: [S, B, O]."""
        return self._shift + self._scale * self._inner.outputs

    @property
    def mean(self) -> Tensor:
        """E[y]: [B, O]."""
        return self._shift + self._scale * self._inner.mean

    @property
    def epistemic(self) -> Tensor:
        """That of z in y's unit squared: [B, O]."""
        return self._scale.square() * self._inner.epistemic

    @property
    def aleatoric(self) -> Tensor:
        """That of z in y's unit squared: [B, O]."""
        return self._scale.square() * self._inner.aleatoric

    def _standardized(self, y: Tensor) -> Tensor:
        return (match_targets(y, self.mean) - self._shift) / self._scale

    def log_prob(self, y: Tensor) -> Tensor:
        """Log-density of targets, one number per example: that of z less `sum log scale`, [B]."""
        return self._inner.log_prob(self._standardized(y)) - self._scale.log().sum()

    def cdf(self, y: Tensor) -> Tensor:
        """P(Y <= y) for each output: [B, O]."""
        return self._inner.cdf(self._standardized(y))

    def quantile(self, q: float | Sequence[float]) -> Tensor:
        """The value that y stays below with probability q: [B, O], or [Q, B, O]."""
        return self._shift + self._scale * self._inner.quantile(q)

    def crps(self, y: Tensor) -> Tensor:
        """Continuous ranked probability score in y's unit: [B, O]."""
        return self._scale * self._inner.crps(self._standardized(y))
