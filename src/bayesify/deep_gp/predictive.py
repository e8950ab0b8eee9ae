"""Predictive distribution of a regression with a deep Gaussian process: each draw is a Gaussian over function values."""

from __future__ import annotations

from functools import cached_property

import torch
from torch import Tensor

from bayesify.predictive.base import Outputs
from bayesify.predictive.regression import RegressionPredictive, pair


class ProcessPredictive(RegressionPredictive):
    r"""$p(y) = \frac1S \sum_s \mathcal{N}(y; \mu_s, v_s + \text{noise})$ with $\mu$ and v [S, B, O], and the noise a scalar or [O].

    $\mu_s$ and $v_s$ are the mean and the variance of f given draw s of the previous layers. With one layer there is nothing to
    draw.
    """

    is_mixture = False

    def __init__(self, mean: Tensor, variance: Tensor, noise: Tensor, seed: int) -> None:
        self._mean, self._variance, self._seed = mean, variance, seed
        self._noise = noise.to(mean).expand(mean.shape[1:])
        super().__init__(Outputs(kept=torch.stack((mean, variance + self._noise), dim=-1)), pair)

    @cached_property
    def _moments(self) -> tuple[Tensor, Tensor, Tensor]:
        """Mean of f, variance of f (between draws plus within draws), and variance of the noise."""
        spread = self._mean.var(0, unbiased=False) + self._variance.mean(0)
        return self._mean.mean(0), spread, self._noise

    @property
    def outputs(self) -> Tensor:
        """One draw of f per draw of the previous layers: [S, B, O]. Given the previous layers, the values at different
        inputs are independent."""
        generator = torch.Generator().manual_seed(self._seed)
        noise = torch.randn(self._mean.shape, generator=generator, dtype=self._mean.dtype).to(self._mean.device)
        return self._mean + self._variance.sqrt() * noise
