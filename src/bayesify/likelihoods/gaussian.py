"""Gaussian noise of one variance for all examples."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from bayesify.arguments.checks import Positive, checked
from bayesify.likelihoods.base import NumberLikelihood
from bayesify.maths.gamma import as_float
from bayesify.predictive.families.gaussian import GAUSSIAN
from bayesify.predictive.gaussian import GaussianRegressionPredictive, Link, OutputGaussian
from bayesify.predictive.regression import RegressionPredictive, with_variance


class Gaussian(NumberLikelihood):
    r"""Homoscedastic noise: $p(y | f) = \mathcal{N}(y; f, \text{noise})$, independent over outputs.

    Fisher: $I / \text{noise}$. Targets have the outputs' shape; a single output column may be missing on either side.
    Stored: `raw_noise` through softplus, a parameter if learned.

    Args:
        noise: Starting variance: a number is shared by all outputs, a sequence gives one per output.
        learn: Whether the variance is trained.

    Raises:
        ValueError: If a variance is not positive and finite.
    """

    name = "gaussian"
    family = GAUSSIAN
    integrates_gaussians = True
    raw_noise: Tensor

    @checked
    def __init__(self, noise: Positive | Sequence[Positive] | Tensor = 0.1, learn: bool = True) -> None:
        super().__init__()
        self._noise, self._learn = self._store("noise", noise, learn), learn

    @property
    def noise(self) -> Tensor:
        """Noise variance: a scalar, or [O]."""
        return self._stored("noise")

    def numbers(self) -> dict[str, Tensor]:
        """The variance."""
        return {"variance": self.noise}

    @staticmethod
    def split(outputs: Tensor, **numbers: Tensor) -> tuple[Tensor, ...]:
        """Means and the variance."""
        return with_variance(outputs, **numbers)

    def closed_form(self, outputs: OutputGaussian, link: Link = "mc") -> RegressionPredictive:
        """Exact: $\\mathcal{N}(y; f, C + \\text{noise})$."""
        noise = self.noise.detach().to(outputs.mean).expand(outputs.mean.shape).clone()
        return GaussianRegressionPredictive(outputs, outputs.mean, outputs.variance, noise, correlated=True)

    def fisher(self, outputs: Tensor) -> Tensor:
        """`I / noise`."""
        precision = (1 / self.noise).to(as_float(outputs)).expand(outputs.shape)
        return torch.diag_embed(precision)
