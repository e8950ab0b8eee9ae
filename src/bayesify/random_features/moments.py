"""Mean and variance of a linear function of weights under a posterior, in closed form."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from bayesify.maths.walsh_hadamard import dyadic_sums
from bayesify.posteriors import FullCovariance, KTied, MeanField, Point, Posterior, WalshHadamard
from bayesify.posteriors.walsh_hadamard.families import Full
from bayesify.transforms import hadamard


def has_moments(posterior: Posterior) -> bool:
    """Whether `linear_moments` supports this posterior."""
    if isinstance(posterior, WalshHadamard):
        return posterior.covariance != "flow"
    return isinstance(posterior, (Point, MeanField, KTied, FullCovariance))


def linear_moments(posterior: Posterior, names: Sequence[str], features: Tensor) -> tuple[Tensor, Tensor]:
    r"""Mean and variance of $\phi^\top w_o$ for weights $w_o$ of single-output layers.

    For independent weights, the mean is $\phi^\top m$ and the variance is $(\phi^2)^\top s^2$. For a dense Gaussian, the variance
    is $\lVert L^\top \phi \rVert^2$. Walsh-Hadamard weights are linear in g. Let $\Phi$ be the features in the weights' shape.
    Then $\phi^\top w = a^\top g$ with $a = \operatorname{diag}(H S_1 \Phi S_2 H)$. A variance therefore costs O(n) for n
    features, not O(n^2).

    The weights are [1, n] each, one per output, and the features $\phi$ are [B, n]. Mean and variance are [B, O]. Raises
    `ValueError` for a posterior for which `has_moments` is false.
    """
    if not has_moments(posterior):
        raise ValueError(
            f"linear_moments: the moments of {type(posterior).__name__} have no closed form; use MeanField, "
            "FullCovariance, or WalshHadamard without a flow"
        )
    if isinstance(posterior, WalshHadamard):
        found = zip(*(_walsh_hadamard(posterior, name, features) for name in names), strict=True)
        mean, variance = (torch.stack(parts, -1) for parts in found)
        return mean, variance
    means = posterior.mean()
    mean = features @ torch.cat([means[name] for name in names]).T
    if isinstance(posterior, FullCovariance):
        layers = {weight.name: layer.name for layer in posterior.layers for weight in layer.weights}
        spread = [(features @ posterior.scale_tril(layers[name])).square().sum(-1) for name in names]
        return mean, torch.stack(spread, -1)
    if isinstance(posterior, Point):
        return mean, torch.zeros_like(mean)
    variances = posterior.variance()
    return mean, features.square() @ torch.cat([variances[name] for name in names]).T


def _walsh_hadamard(posterior: WalshHadamard, name: str, features: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and variance of one output, [B] each."""
    size, part = next(
        (size, part) for size, parts in posterior.groups.items() for part in parts if part.weight.name == name
    )
    left, right = posterior.left[str(size)][part.start], posterior.right[str(size)][part.start]
    family = posterior.family(size)
    entries = F.pad(features, (0, size * size - features.shape[-1])).unflatten(-1, (size, size))
    sums = dyadic_sums(entries * (left.unsqueeze(-1) * right))  # [B, D]
    slope = hadamard(sums) / math.sqrt(size)  # a
    mean = slope @ family.mean_value[part.start]
    if isinstance(family, Full):
        return mean, (slope @ family.factor()[part.start]).square().sum(-1)
    return mean, slope.square() @ family.variance()[part.start]
