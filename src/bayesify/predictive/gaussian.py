"""Closed-form predictions from a Gaussian over the network's outputs, and several forms of the Gaussian's covariances."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import cached_property, lru_cache
from typing import Literal, Self

import torch
from torch import Tensor

from bayesify.maths.gamma import widened
from bayesify.maths.positive_definite import stable_cholesky, stable_eigh
from bayesify.predictive.base import MAX_ELEMENTS_PER_CHUNK, Outputs
from bayesify.predictive.classification import ClassificationPredictive
from bayesify.predictive.regression import RegressionPredictive, match_targets, pair


class Spread(ABC):
    """A covariance over K outputs for each of N rows, stored as one tensor [N, ..., n]. Rows may be the positions of examples."""

    is_joint = False
    """Whether all positions of an example get their true joint distribution if they share the noise."""

    def __init__(self, rows: Tensor) -> None:
        self._rows = rows

    @property
    def num_noise(self) -> int:
        """Number n of standard normal numbers that one draw of a row needs."""
        return self._rows.shape[-1]

    def _like(self, rows: Tensor) -> Self:
        return type(self)(rows)

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, rows: slice) -> Self:
        return self._like(self._rows[rows])

    def scaled(self, factor: float) -> Self:
        """The spread with all covariances multiplied by a factor."""
        return self._like(factor * self._rows)

    @staticmethod
    def joined(parts: Sequence[Spread]) -> Spread:
        """Concatenate the rows of several spreads of one kind. Spreads with a basis must have the same basis."""
        return parts[0]._like(torch.cat([part._rows for part in parts]))

    @abstractmethod
    def variances(self) -> Tensor:
        """The diagonals of the covariances: [N, K]."""

    @abstractmethod
    def row_means(self) -> Tensor:
        r"""For each covariance matrix C, the means of the rows of C, $C 1 / K$: [N, K]."""

    @abstractmethod
    def move(self, noise: Tensor) -> Tensor:
        """Turn standard normal noise into deviations from the mean, [S, N, K]. The noise is [S, N, n], or [S, 1, n] if all rows
        share it."""

    @abstractmethod
    def dense(self) -> Tensor:
        """The covariances as matrices: [N, K, K]."""


class DenseSpread(Spread):
    """A matrix for each row, [N, K, K]."""

    def variances(self) -> Tensor:
        return self._rows.diagonal(dim1=-2, dim2=-1)

    def row_means(self) -> Tensor:
        return self._rows.mean(-1)

    def move(self, noise: Tensor) -> Tensor:
        """Deviations, computed with the symmetric root of the covariance. This root is the same on every machine."""
        values, vectors = stable_eigh(self._rows, "Predictive: the covariance of the outputs")
        root = (vectors * values.clamp_min(0).sqrt().unsqueeze(-2)) @ vectors.mT
        return (noise.transpose(0, 1) @ root).transpose(0, 1)

    def dense(self) -> Tensor:
        return self._rows


class SharedBasis(Spread):
    r"""Covariances $C_n = U \operatorname{diag}(v_n) U^\top$ with the same eigenvectors for all rows. No row needs its own
    decomposition.

    Args:
        variances: Variances v along the eigenvectors, [N, K].
        basis: Eigenvectors U, [K, K]; the identity by default.
    """

    def __init__(self, variances: Tensor, basis: Tensor | None = None) -> None:
        super().__init__(variances.clamp_min(0))
        self._basis = basis

    def _like(self, rows: Tensor) -> Self:
        return type(self)(rows, self._basis)

    def variances(self) -> Tensor:
        return self._rows if self._basis is None else self._rows @ self._basis.square().T

    def row_means(self) -> Tensor:
        if self._basis is None:
            return self._rows / self.num_noise
        return (self._rows * self._basis.mean(0)) @ self._basis.T

    def move(self, noise: Tensor) -> Tensor:
        """Deviations, computed with the symmetric root of the covariance. This root is the same on every machine."""
        root = self._rows.sqrt()
        return noise * root if self._basis is None else ((noise @ self._basis) * root) @ self._basis.T

    def dense(self) -> Tensor:
        if self._basis is None:
            return torch.diag_embed(self._rows)
        return (self._basis * self._rows.unsqueeze(-2)) @ self._basis.T


class LowRank(Spread):
    r"""Covariances $C_n = R_n R_n^\top$ that were estimated from draws; the roots R are [N, K, n].

    Column j of R belongs to the same draw at all positions of an example.
    """

    is_joint = True

    def scaled(self, factor: float) -> Self:
        return self._like(math.sqrt(factor) * self._rows)

    def variances(self) -> Tensor:
        return self._rows.square().sum(-1)

    def row_means(self) -> Tensor:
        return (self._rows @ self._rows.mean(-2).unsqueeze(-1)).squeeze(-1)

    def move(self, noise: Tensor) -> Tensor:
        return (noise.transpose(0, 1) @ self._rows.mT).transpose(0, 1)

    def dense(self) -> Tensor:
        return self._rows @ self._rows.mT


Link = Literal["mc", "probit", "bridge"]
"""The rule that computes class probabilities from a Gaussian over logits; see `GaussianClassPredictive`."""

LINK_DRAWS = 256
"""Number of draws that the link `"mc"` uses, in pairs of opposite sign."""

ORTHANT_NODES, HALF_LOG_TAU = 4096, 0.5 * math.log(2 * math.pi)
"""Number of nodes of the integral over several censored outputs, and the negative log of the standard normal density at 0."""

NUM_OUTPUT_DRAWS = 32
"""Number of draws from the Gaussian that `outputs` holds."""


class OutputGaussian:
    r"""$\mathcal{N}(f(x_b), C_b)$ over the outputs of each example.

    Args:
        mean: The network's outputs at the point estimate, [B, ...].
        covariance: Covariance $C_b$ of an example's O outputs, [B, O, O]. If the whole matrix is too large, give only its
            diagonal, [B, O], or its blocks over the K classes at each of P positions, [B, P, K, K] (see `class_blocks`). The
            covariance may also be a `Spread` over the K outputs at each position. With a `Spread`, the K outputs are on the axis
            `axis` of the mean.
        seed: Seed of the draws.
        axis: Axis of the K outputs of a `Spread`, counted from the end. If `axis` is `None`, all O outputs of an example form one
            row of the spread.
        same_noise: Whether all examples use the same noise, which comes from a Latin hypercube. If so, the draws of an example do
            not depend on the other examples. With the same noise, a row of weight 2 also gives the same result as two copies of
            the row.
    """

    def __init__(
        self, mean: Tensor, covariance: Tensor | Spread, seed: int, axis: int | None = None, *, same_noise: bool = False
    ) -> None:
        self.mean = mean
        self._given = covariance
        self._seed, self._axis, self._same_noise = seed, axis, same_noise

    @property
    def spread(self) -> Spread | None:
        """The covariance if it is a `Spread`, otherwise `None`."""
        return self._given if isinstance(self._given, Spread) else None

    @cached_property
    def covariance(self) -> Tensor:
        """The covariance as a tensor: [B, O, O], [B, O] or [B, P, K, K]."""
        if isinstance(self._given, Tensor):
            return self._given
        found = self._given.dense()
        return found if self.is_joint else found.unflatten(0, (len(self.mean), -1))

    @property
    def is_joint(self) -> bool:
        """Whether the full covariance of an example's outputs is known, and not only parts of it."""
        if isinstance(self._given, Tensor):
            return self._given.ndim == 3
        return len(self._given) == len(self.mean)

    @property
    def variance(self) -> Tensor:
        """Variance of each output: [B, ...]."""
        if isinstance(self._given, Spread):
            return self._in_shape(self._given.variances().unsqueeze(0))[0].clamp_min(0)
        diagonal = self._given.diagonal(dim1=-2, dim2=-1) if self._given.ndim == 3 else self._given
        return diagonal.clamp_min(0).reshape(self.mean.shape)

    def _in_shape(self, rows: Tensor) -> Tensor:
        """Reshape values that are arranged as a spread's rows, [S, N, K], to the shape of the outputs, [S, B, ...]."""
        if self._axis is None:
            return rows.reshape(len(rows), *self.mean.shape)
        last = self.mean.movedim(self._axis, -1).shape
        return rows.reshape(len(rows), *last).movedim(-1, self._axis)

    def logits(self, axis: int | None) -> tuple[Tensor, Spread]:
        """The means of the logits, [B, ..., K], and their covariances over the classes as a `Spread`. The spread has B P rows,
        one for each of the P positions of each example.

        `axis` is the axis of the classes, counted from the end. If `axis` is `None`, each output is the difference of two logits.
        """
        if axis is None:
            halves = 0.5 * torch.stack((-self.mean, self.mean), -1)
            signs = torch.tensor([[0.25, -0.25], [-0.25, 0.25]], dtype=halves.dtype, device=halves.device)
            return halves, DenseSpread(self.variance.flatten()[..., None, None] * signs)
        mean = self.mean.movedim(axis, -1)
        if isinstance(self._given, Spread):
            return mean, self._given
        if self._given.ndim == 2:
            return mean, SharedBasis(self._given.view(self.mean.shape).movedim(axis, -1).flatten(0, -2))
        blocks = self._given if self._given.ndim == 4 else class_blocks(self._given, self.mean.shape, axis)
        return mean, DenseSpread(blocks.flatten(0, 1))

    @cached_property
    def draws(self) -> Tensor:
        """Draws of the outputs, [S, B, ...]. Every access gives the same draws."""
        batch, spread = len(self.mean), self.spread
        if spread is not None and (self.is_joint or spread.is_joint):
            noise = self._noise(spread.num_noise, self.mean)
            return self.mean + self._in_shape(spread.move(noise.repeat_interleave(len(spread) // batch, 1)))
        if not self.is_joint:
            raise RuntimeError(
                "Predictive: the covariances of the outputs exceed the memory budget and were not kept; predict "
                "fewer rows at a time, raise memory=, or use method='linearized_mc'"
            )
        values, vectors = stable_eigh(self.covariance, "Predictive: the covariance of the outputs")
        root = vectors * values.clamp_min(0).sqrt().unsqueeze(-2)
        noise = self._noise(root.shape[1], root).unsqueeze(-1)
        return self.mean + (root @ noise).squeeze(-1).reshape(NUM_OUTPUT_DRAWS, *self.mean.shape)

    def _noise(self, count: int, like: Tensor) -> Tensor:
        """Standard normal numbers for each draw and example: [S, B, count]."""
        generator = torch.Generator(device="cpu").manual_seed(self._seed)
        if not self._same_noise:
            shape = (NUM_OUTPUT_DRAWS, len(self.mean), count)
            return torch.randn(*shape, generator=generator, dtype=like.dtype).to(like.device)
        strata = (torch.arange(NUM_OUTPUT_DRAWS, dtype=torch.float64) + 0.5) / NUM_OUTPUT_DRAWS
        normal: Tensor = torch.special.ndtri(strata)
        normal = normal / normal.square().mean().sqrt()
        orders = torch.rand(count, NUM_OUTPUT_DRAWS, generator=generator).argsort(1)
        return normal[orders].T.unsqueeze(1).expand(-1, len(self.mean), -1).to(like)


def marginals(covariance: Tensor, shape: Sequence[int], axis: int | None) -> Tensor:
    """The parts of the covariances that predictions use if the whole matrices are too large: variances, [B, O], or
    `class_blocks`."""
    return covariance.diagonal(dim1=-2, dim2=-1) if axis is None else class_blocks(covariance, shape, axis)


def class_blocks(covariance: Tensor, shape: Sequence[int], axis: int) -> Tensor:
    """The covariances over classes at each position: [B, O, O] -> [B, P, K, K]. The axis of classes is counted from the end."""
    index = torch.arange(covariance.shape[-1], device=covariance.device).view(1, *shape[1:]).movedim(axis, -1)
    index = index.reshape(-1, index.shape[-1])  # [P, K]
    return covariance[:, index.unsqueeze(-1), index.unsqueeze(-2)]


class GaussianRegressionPredictive(RegressionPredictive):
    r"""$\mathcal{N}(y; f, C + \text{noise})$: the exact predictive of the linearized model with Gaussian noise.

    `mean` and `variance` are the mean and the variance of the outputs f, and `noise` is the variance of the noise, [B, O] each.
    If `correlated` is true, the targets of an example are scored jointly, with the covariance C. Otherwise outputs are scored
    independently, each with its own variance.
    """

    is_mixture = False

    def __init__(
        self, outputs: OutputGaussian, mean: Tensor, variance: Tensor, noise: Tensor, *, correlated: bool
    ) -> None:
        self._gaussian = outputs
        sampled = isinstance(outputs.spread, LowRank)  # correlations estimated from few draws are mostly random
        self._correlated = correlated and mean[0].numel() > 1 and outputs.is_joint and not sampled
        self._parts = (mean, variance, noise)
        super().__init__(Outputs(kept=torch.stack((mean, variance + noise), -1).unsqueeze(0)), pair)

    @property
    def outputs(self) -> Tensor:
        return self._gaussian.draws

    @cached_property
    def _moments(self) -> tuple[Tensor, Tensor, Tensor]:
        return self._parts

    def censored_log_prob(self, y: Tensor, censored: Tensor | None = None) -> Tensor:
        """Log-density of the targets, with correlated outputs scored jointly: [B].

        The result is exact if at most one output is censored. The joint probability of several censored outputs is an integral
        over all these outputs except the last, computed by Genz's (1992) rule with `ORTHANT_NODES` nodes. The error is about
        0.001 nats for two censored outputs, 0.01 nats for five, and larger for more.
        """
        if not self._correlated:
            return super().censored_log_prob(y, censored)
        mean, _, noise = self._parts
        residual = widened(match_targets(y, mean) - mean).flatten(1)
        covariance = widened(self._gaussian.covariance) + torch.diag_embed(noise.flatten(1))
        mask = torch.zeros_like(residual, dtype=torch.bool) if censored is None else censored.reshape(residual.shape)
        if not bool(mask.any()):
            factor = stable_cholesky(covariance, "Predictive: the covariance of the targets")
            white: Tensor = torch.linalg.solve_triangular(factor, residual.unsqueeze(-1), upper=False).squeeze(-1)
            log_det = factor.diagonal(dim1=-2, dim2=-1).log().sum(-1)
            found = -0.5 * white.square().sum(-1) - log_det - 0.5 * white.shape[-1] * math.log(2 * math.pi)
        else:
            order = mask.int().argsort(dim=1, stable=True)  # censored outputs last, conditional on the others
            covariance = covariance.gather(1, order.unsqueeze(2).expand_as(covariance))
            covariance = covariance.gather(2, order.unsqueeze(1).expand_as(covariance))
            factor = stable_cholesky(covariance, "Predictive: the covariance of the targets")
            found = torch.empty_like(residual[:, 0])
            several = mask.sum(1) > 1
            for chosen, nodes in ((~several, 1), (several, ORTHANT_NODES)):
                most = max(1, MAX_ELEMENTS_PER_CHUNK // (nodes * mask.shape[1]))
                for rows in chosen.nonzero()[:, 0].split(most):
                    at, last = residual[rows].gather(1, order[rows]), mask[rows].gather(1, order[rows])
                    found[rows] = _one_by_one(at, last, factor[rows], nodes)
        return found.to(mean.dtype)


class GaussianClassPredictive(ClassificationPredictive):
    r"""Class probabilities $\mathbb{E}\,\operatorname{softmax}(f)$ for logits f with the distribution $\mathcal{N}(m, C)$.

    No closed form is known, so `link` chooses an approximation. The softmax does not change if a constant is added to all logits,
    so the data do not constrain this constant. Every link therefore works on $m' = P m$ and $C' = P C P$ with
    $P = I - 1 1^\top / K$.

    - `"mc"`: the mean over `LINK_DRAWS` draws. Every example and every call uses the same noise, as in a quadrature rule.
    - `"probit"`: $\operatorname{softmax}(m' / \sqrt{1 + \tfrac{\pi}{8} v'})$, where v' is the diagonal of C' (Gibbs 1998). For
      two classes, v' is the variance of the difference of the logits.
    - `"bridge"`: the mean of the Dirichlet distribution that matches the Gaussian (Hobbhahn et al. 2022),
      $\alpha_k = \frac{1}{v'_k} (1 - \frac2K + \frac{e^{m'_k}}{K^2} \sum_j e^{-m'_j})$.

    Whatever the link, `entropy` is the entropy of the probabilities. The draws of `"mc"` give the shares of `aleatoric_entropy`
    and `mutual_information` in this entropy. The draws in the property `outputs` use other noise than the draws of `"mc"`.

    Args:
        outputs: The Gaussian over outputs.
        axis: Axis of the classes in the outputs, counted from the end. If `axis` is `None`, each output is a yes-or-no decision.
        link: The approximation: `"mc"`, `"probit"` or `"bridge"`.
        ignore_index: A label that means "no label here".
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
        return self._gaussian.draws

    @cached_property
    def _integrals(self) -> tuple[Tensor, Tensor]:
        """The log of the mean probabilities, [B, ..., K], and the mean entropy, [B, ...]."""
        mean, spread = self._logits
        noise = _link_noise(spread.num_noise, mean.dtype, mean.device).unsqueeze(1)  # [S, 1, n]
        rows = max(1, MAX_ELEMENTS_PER_CHUNK // (len(noise) * mean.shape[-1]))
        found = []
        for start in range(0, len(spread), rows):
            part = slice(start, start + rows)
            log_probs = (mean.flatten(0, -2)[part] + spread[part].move(noise)).log_softmax(-1)  # [S, rows, K]
            entropy = -(log_probs.exp() * log_probs).sum(-1).mean(0)
            found.append((log_probs.logsumexp(0) - math.log(len(noise)), entropy))
        log_probs, entropy = (torch.cat(parts) for parts in zip(*found, strict=True))
        return log_probs.view(mean.shape), entropy.view(mean.shape[:-1])

    @property
    def mutual_information(self) -> Tensor:
        """The part of `entropy` that comes from the disagreement between draws, in nats: [B], or [B, O]. The part has the same
        share of the whole as in the draws of the link `"mc"`, so it is never negative and never above `entropy`."""
        log_probs, inside = self._integrals
        whole: Tensor = torch.special.entr(log_probs.exp()).sum(-1)
        share = (whole - inside).clamp_min(0.0) / whole.clamp_min(torch.finfo(whole.dtype).tiny)
        return share * self.entropy

    @property
    def aleatoric_entropy(self) -> Tensor:
        """Entropy minus mutual information in nats: [B], or [B, O]."""
        return self.entropy - self.mutual_information


def _one_by_one(residual: Tensor, censored: Tensor, factor: Tensor, nodes: int) -> Tensor:
    """Log of the joint density of Gaussian variables, [B]. For a censored variable, the probability that it is at most `residual`
    replaces its density.

    Each variable is conditioned on the variables before it. Every censored variable except the last is integrated over `nodes`
    quantiles of its tail. `residual` and `censored` are [B, O], and `factor` is the lower Cholesky factor of the covariances, [B,
    O, O].
    """
    step = torch.arange(1, nodes + 1, dtype=factor.dtype, device=factor.device).unsqueeze(1)
    # The ratio iterates to the root of x^(O + 1) = x + 1 (the golden ratio for O = 1), which Kronecker's sequence needs.
    ratio = 2.0
    for _ in range(50):
        ratio = (1 + ratio) ** (1 / (residual.shape[1] + 1))
    white, total = factor.new_zeros(nodes, *residual.shape), factor.new_zeros(nodes, len(residual))
    for place in range(residual.shape[1]):
        scale = factor[:, place, place]
        z = (residual[:, place] - (factor[:, place] * white).sum(-1)) / scale  # [S, B]
        tail = torch.special.log_ndtr(z)
        share = (0.5 + step * ratio ** -(place + 1)) % 1
        inside = torch.special.ndtri((tail.exp() * (1 - (2 * share - 1).abs())).clamp_min(1e-300))
        white[..., place] = torch.where(censored[:, place], torch.minimum(inside, z), z)
        total = total + torch.where(censored[:, place], tail, -0.5 * z.square() - scale.log() - HALF_LOG_TAU)
    return total.logsumexp(0) - math.log(nodes)


@lru_cache(maxsize=16)
def _link_noise(size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Standard normal numbers in pairs of opposite sign, [S, size]."""
    half = torch.randn(LINK_DRAWS // 2, size, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return torch.cat((half, -half)).to(device, dtype)


def _centered(mean: Tensor, spread: Spread) -> tuple[Tensor, Tensor]:
    r"""$P m$ and the diagonal of $P C P$, [..., K] each."""
    rows = spread.row_means()
    variance = spread.variances() - 2 * rows + rows.mean(-1, keepdim=True)
    return mean - mean.mean(-1, keepdim=True), variance.clamp_min(0).view(mean.shape)


def _probit(mean: Tensor, spread: Spread) -> Tensor:
    center, variance = _centered(mean, spread)
    if mean.shape[-1] == 2:
        variance = 4 * variance  # variance of the difference of two logits
    return (center * (1 + math.pi / 8 * variance).rsqrt()).log_softmax(-1)


def _bridge(mean: Tensor, spread: Spread) -> Tensor:
    center, variance = _centered(mean, spread)
    classes = mean.shape[-1]
    peak = center + (-center).logsumexp(-1, keepdim=True) - 2 * math.log(classes)
    flat = torch.full_like(peak, 1 - 2 / classes).log()
    least = torch.finfo(mean.dtype).tiny
    return (torch.logaddexp(flat, peak) - variance.clamp_min(least).log()).log_softmax(-1)
