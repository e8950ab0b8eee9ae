"""Predictions from a Gaussian over the network's outputs, in closed form."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cached_property, lru_cache
from typing import Literal

import torch
from torch import Tensor

from bayesify.maths.cholesky import stable_cholesky
from bayesify.maths.eigen import stable_eigh
from bayesify.maths.gamma import widened
from bayesify.predictive.base import MAX_ELEMENTS_PER_CHUNK, Outputs
from bayesify.predictive.classification import ClassificationPredictive
from bayesify.predictive.regression import RegressionPredictive, halves, match_targets

Link = Literal["mc", "probit", "bridge"]
"""How class probabilities come from a Gaussian over logits; see `GaussianClassPredictive`."""

LINK_DRAWS = 256
"""Draws of the link `"mc"`, half of them the other half's opposites."""

NUM_OUTPUT_DRAWS = 32
"""Draws from the Gaussian over outputs that `outputs` is made of."""


class OutputGaussian:
    r"""$\mathcal{N}(f(x_b), C_b)$ over the outputs of each example.

    Args:
        mean: The network's outputs at the point estimate, [B, ...].
        covariance: $C_b$ over an example's O outputs, [B, O, O]; where the whole is too large only its diagonal, [B, O], or the
            part over the K classes at each of P positions, [B, P, K, K] (see `class_blocks`).
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

    def logits(self, axis: int | None) -> tuple[Tensor, Tensor]:
        """Means [B, ..., K] and covariances [B, P, K, K] over the classes at each of an example's positions.

        The axis of the classes is counted from the end; without one each output is the difference of two logits.
        """
        if axis is None:
            halves = 0.5 * torch.stack((-self.mean, self.mean), -1)
            signs = torch.tensor([[0.25, -0.25], [-0.25, 0.25]], dtype=halves.dtype, device=halves.device)
            return halves, self.variance.flatten(1)[..., None, None] * signs
        mean = self.mean.movedim(axis, -1)
        if self.covariance.ndim == 2:
            spread = torch.diag_embed(self.covariance.view(self.mean.shape).movedim(axis, -1))
            return mean, spread.reshape(len(mean), -1, *spread.shape[-2:])
        if self.covariance.ndim == 4:
            return mean, self.covariance
        return mean, class_blocks(self.covariance, self.mean.shape, axis)

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
        noise = torch.randn(NUM_OUTPUT_DRAWS, *root.shape[:2], 1, generator=generator, dtype=root.dtype).to(root.device)
        return self.mean + (root @ noise).squeeze(-1).reshape(NUM_OUTPUT_DRAWS, *self.mean.shape)


def marginals(covariance: Tensor, shape: Sequence[int], axis: int | None) -> Tensor:
    """What predictions need of covariances that are too large to keep: variances, [B, O], or `class_blocks`."""
    return covariance.diagonal(dim1=-2, dim2=-1) if axis is None else class_blocks(covariance, shape, axis)


def class_blocks(covariance: Tensor, shape: Sequence[int], axis: int) -> Tensor:
    """The covariances over classes, an axis counted from the end, at each position: [B, O, O] -> [B, P, K, K]."""
    index = torch.arange(covariance.shape[-1], device=covariance.device).view(1, *shape[1:]).movedim(axis, -1)
    index = index.reshape(-1, index.shape[-1])  # [P, K]
    return covariance[:, index.unsqueeze(-1), index.unsqueeze(-2)]


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
        super().__init__(Outputs(kept=torch.cat((mean, variance + noise), -1).unsqueeze(0)), halves)

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
        white: Tensor = torch.linalg.solve_triangular(factor, residual, upper=False).squeeze(-1)
        log_det = factor.diagonal(dim1=-2, dim2=-1).log().sum(-1)
        found = -0.5 * white.square().sum(-1) - log_det - 0.5 * white.shape[-1] * math.log(2 * math.pi)
        return found.to(mean.dtype)


class GaussianClassPredictive(ClassificationPredictive):
    r"""Class probabilities $\mathbb{E}\,\operatorname{softmax}(f)$ under a Gaussian $\mathcal{N}(m, C)$ over logits.

    No closed form is known; `link` says what stands for it. The softmax ignores what is added to all logits alike, which the data
    therefore do not constrain, so every link works on what is left, $m' = P m$ and $C' = P C P$ with $P = I - 1 1^\top / K$.

    - `"mc"`: the mean over `LINK_DRAWS` draws, by the same numbers for every example: a rule of integration, without noise between
      examples or calls.
    - `"probit"`: $\operatorname{softmax}(m' / \sqrt{1 + \tfrac{\pi}{8} v'})$, v' the diagonal of C' (Gibbs 1998); for two classes
      the variance of their difference.
    - `"bridge"`: the mean of the Dirichlet distribution that matches the Gaussian (Hobbhahn et al. 2022),
      $\alpha_k = \frac{1}{v'_k} (1 - \frac2K + \frac{e^{m'_k}}{K^2} \sum_j e^{-m'_j})$.

    `aleatoric_entropy` and `mutual_information` are by `"mc"` under all three, `outputs` are draws of their own.

    Args:
        outputs: The Gaussian over outputs.
        axis: Axis of an example's outputs that holds the classes, counted from the end; `None`: a yes or no in each output.
        link: See above.
        ignore_index: A label that stands for "no label here".
    """

    is_mixture = False

    def __init__(
        self, outputs: OutputGaussian, axis: int | None, link: Link = "mc", *, ignore_index: int | None = None
    ) -> None:
        self._gaussian = outputs
        self._logits = outputs.logits(axis)
        log_probs = self._integrals[0] if link == "mc" else {"probit": _probit, "bridge": _bridge}[link](*self._logits)
        super().__init__(Outputs(kept=log_probs.unsqueeze(0)), binary=axis is None, ignore_index=ignore_index)

    @property
    def outputs(self) -> Tensor:
        """Draws of the network's outputs from the Gaussian: [S, B, ...]."""
        return self._gaussian.draws

    @cached_property
    def _integrals(self) -> tuple[Tensor, Tensor]:
        """Log of the mean probabilities, [B, ..., K], and mean entropy, [B, ...]."""
        mean, covariance = self._logits
        noise = _link_noise(mean.shape[-1]).to(mean)  # [S, K]
        rows = max(1, MAX_ELEMENTS_PER_CHUNK // noise.numel())
        found = []
        for center, spread in zip(mean.flatten(0, -2).split(rows), covariance.flatten(0, -3).split(rows), strict=True):
            values, vectors = stable_eigh(spread, "Predictive: the covariance of the outputs")
            # Symmetric: the same on every machine.
            root = (vectors * values.clamp_min(0).sqrt().unsqueeze(-2)) @ vectors.mT
            log_probs = (center + (noise @ root).transpose(0, 1)).log_softmax(-1)  # [S, rows, K]
            entropy = -(log_probs.exp() * log_probs).sum(-1).mean(0)
            found.append((log_probs.logsumexp(0) - math.log(len(noise)), entropy))
        log_probs, entropy = (torch.cat(parts) for parts in zip(*found, strict=True))
        return log_probs.view(mean.shape), entropy.view(mean.shape[:-1])

    @property
    def aleatoric_entropy(self) -> Tensor:
        """Mean entropy of the classes given the outputs: [B], or [B, O]."""
        return self._integrals[1]

    @property
    def mutual_information(self) -> Tensor:
        """What the outputs' uncertainty adds to the entropy, in nats: [B], or [B, O]; never negative."""
        log_probs, entropy = self._integrals
        whole: Tensor = torch.special.entr(log_probs.exp()).sum(-1)
        return (whole - entropy).clamp_min(0.0)


@lru_cache(maxsize=16)
def _link_noise(size: int) -> Tensor:
    """Standard normal numbers in pairs of opposite sign, [S, size]."""
    half = torch.randn(LINK_DRAWS // 2, size, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return torch.cat((half, -half))


def _centered(mean: Tensor, covariance: Tensor) -> tuple[Tensor, Tensor]:
    r"""$P m$ and the diagonal of $P C P$, [..., K] each."""
    rows = covariance.mean(-1)
    variance = covariance.diagonal(dim1=-2, dim2=-1) - 2 * rows + rows.mean(-1, keepdim=True)
    return mean - mean.mean(-1, keepdim=True), variance.clamp_min(0).view(mean.shape)


def _probit(mean: Tensor, covariance: Tensor) -> Tensor:
    center, variance = _centered(mean, covariance)
    if mean.shape[-1] == 2:
        variance = 4 * variance  # of the difference
    return (center * (1 + math.pi / 8 * variance).rsqrt()).log_softmax(-1)


def _bridge(mean: Tensor, covariance: Tensor) -> Tensor:
    center, variance = _centered(mean, covariance)
    classes = mean.shape[-1]
    peak = center + (-center).logsumexp(-1, keepdim=True) - 2 * math.log(classes)
    flat = torch.full_like(peak, 1 - 2 / classes).log()
    least = torch.finfo(mean.dtype).tiny
    return (torch.logaddexp(flat, peak) - variance.clamp_min(least).log()).log_softmax(-1)
