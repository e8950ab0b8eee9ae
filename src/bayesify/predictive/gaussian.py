"""Predictions from a Gaussian over the network's outputs, in closed form."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cached_property, partial

import torch
from torch import Tensor

from bayesify.maths.cholesky import stable_cholesky
from bayesify.maths.eigen import stable_eigh
from bayesify.maths.gamma import widened
from bayesify.predictive.base import Outputs
from bayesify.predictive.classification import ClassificationPredictive
from bayesify.predictive.regression import RegressionPredictive, match_targets, with_variance

NUM_DRAWS = 32
"""Draws from the Gaussian over outputs that `outputs` and `mutual_information` are made of."""


class OutputGaussian:
    r"""$\mathcal{N}(f(x_b), C_b)$ over the outputs of each example.

    Args:
        mean: The network's outputs at the point estimate, [B, ...].
        covariance: $C_b$ over an example's O outputs, [B, O, O], or only its diagonal [B, O] where the whole is too large.
        seed: Of the draws.
    """

    def __init__(self, mean: Tensor, covariance: Tensor, seed: int) -> None:
        self.mean = mean
        self.covariance = covariance
        self._seed = seed

    @property
    def variance(self) -> Tensor:
        """Variance of each output: [B, ...]."""
        diagonal = self.covariance.diagonal(dim1=-2, dim2=-1) if self.covariance.ndim == 3 else self.covariance
        return diagonal.clamp_min(0).reshape(self.mean.shape)

    @cached_property
    def draws(self) -> Tensor:
        """Draws of the outputs, the same whenever asked for: [S, B, ...]."""
        if self.covariance.ndim != 3:
            raise RuntimeError(
                "Predictive: the covariances of the outputs exceed the memory budget and were not kept; give fewer rows at a "
                "time, more memory=, or method='linearized_mc'"
            )
        generator = torch.Generator(device="cpu").manual_seed(self._seed)
        values, vectors = stable_eigh(self.covariance, "Predictive: the covariance of the outputs")
        root = vectors * values.clamp_min(0).sqrt().unsqueeze(-2)
        noise = torch.randn(NUM_DRAWS, *root.shape[:2], 1, generator=generator, dtype=root.dtype).to(root.device)
        return self.mean + (root @ noise).squeeze(-1).reshape(NUM_DRAWS, *self.mean.shape)


class GaussianRegressionPredictive(RegressionPredictive):
    r"""$\mathcal{N}(y; f, C + \text{noise})$: the exact predictive of the linearized model with Gaussian noise.

    Args:
        outputs: The Gaussian over outputs.
        mean: f, those outputs that are means, [B, O].
        variance: Of f, [B, O].
        noise: [B, O].
        correlated: Whether targets are scored jointly over outputs, by the covariance C; else each by its variance.
    """

    is_mixture = False

    def __init__(
        self, outputs: OutputGaussian, mean: Tensor, variance: Tensor, noise: Tensor, *, correlated: bool
    ) -> None:
        self._gaussian = outputs
        self._correlated = correlated and mean[0].numel() > 1 and outputs.covariance.ndim == 3
        self._parts = (mean, variance, noise)
        super().__init__(Outputs(kept=mean.unsqueeze(0)), partial(with_variance, variance=variance + noise))

    @property
    def outputs(self) -> Tensor:
        """Draws of the network's outputs from the Gaussian: [S, B, ...]."""
        return self._gaussian.draws

    @cached_property
    def _moments(self) -> tuple[Tensor, Tensor, Tensor]:
        return self._parts

    def log_prob(self, y: Tensor) -> Tensor:
        """Log-density of targets, jointly over correlated outputs: [B]."""
        if not self._correlated:
            return super().log_prob(y)
        mean, _, noise = self._parts
        residual = widened(match_targets(y, mean) - mean).reshape(len(mean), -1, 1)
        covariance = widened(self._gaussian.covariance) + torch.diag_embed(noise.reshape(len(mean), -1))
        factor = stable_cholesky(covariance, "Predictive: the covariance of the targets")
        white = torch.linalg.solve_triangular(factor, residual, upper=False).squeeze(-1)
        log_det = factor.diagonal(dim1=-2, dim2=-1).log().sum(-1)
        found = -0.5 * white.square().sum(-1) - log_det - 0.5 * white.shape[-1] * math.log(2 * math.pi)
        return found.to(mean.dtype)

    def _rowwise(self, function: Callable[..., Tensor], y: Tensor) -> Tensor:
        mean = self._parts[0].unsqueeze(0)
        return function(mean, match_targets(y, self.mean))

    def quantile(self, q: float | list[float]) -> Tensor:  # type: ignore[override]
        """The value that y stays below with probability q: [B, O], or [Q, B, O]."""
        levels = [q] if isinstance(q, (int, float)) else list(q)
        for level in levels:
            if not 0 < level < 1:
                raise ValueError(f"quantile: q={level}; give a probability strictly between 0 and 1")
        scores = torch.special.ndtri(torch.tensor(levels, dtype=torch.float64)).tolist()
        result = torch.stack([self.mean + z * self.std for z in scores])
        return result[0] if isinstance(q, (int, float)) else result


class ProbitPredictive(ClassificationPredictive):
    r"""Class probabilities $\operatorname{softmax}(f / \sqrt{1 + \tfrac{\pi}{8} v})$, v the variances of the outputs.

    The extended probit approximation (Gibbs 1998) of the softmax's expectation under the Gaussian over outputs; a sigmoid for
    yes-or-no outputs. Probabilities, confidence and entropy are in closed form; `outputs`, `aleatoric_entropy` and
    `mutual_information` come from draws.

    Args:
        outputs: The Gaussian over outputs.
        log_probs: Log-probabilities from outputs; see `ClassificationPredictive`, for the others too.
        binary: Whether each entry is a yes or no of its own.
        ignore_index: A label that stands for "no label here".
    """

    is_mixture = False

    def __init__(
        self,
        outputs: OutputGaussian,
        log_probs: Callable[[Tensor], Tensor],
        *,
        binary: bool = False,
        ignore_index: int | None = None,
    ) -> None:
        self._gaussian = outputs
        scaled = outputs.mean * (1 + math.pi / 8 * outputs.variance).rsqrt()
        super().__init__(Outputs(kept=scaled.unsqueeze(0)), log_probs, binary=binary, ignore_index=ignore_index)

    @property
    def outputs(self) -> Tensor:
        """Draws of the network's outputs from the Gaussian: [S, B, ...]."""
        return self._gaussian.draws

    @cached_property
    def _sampled(self) -> ClassificationPredictive:
        drawn = Outputs(kept=self._gaussian.draws)
        return ClassificationPredictive(drawn, self._log_probs, binary=self._binary, ignore_index=self._ignore_index)

    @property
    def aleatoric_entropy(self) -> Tensor:
        """Mean entropy of the draws: [B], or [B, O]."""
        return self._sampled.aleatoric_entropy

    @property
    def mutual_information(self) -> Tensor:
        """What the draws disagree about, in nats: [B], or [B, O]; never negative."""
        return self._sampled.mutual_information
