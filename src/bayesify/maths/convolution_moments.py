r"""Matrices of Bayesian linear regression on patches, $A^\top \Lambda A$ and $A^\top \Lambda V$, with little memory.

Rows of A are the patches that a convolution multiplies: row (m, t) and column (c, a) hold $x_{mc}(s t + d a - p)$, with
stride s, dilation d and padding p. Hence

$$ (A^\top A)_{(c, a), (e, b)} = \sum_{m, t} x_{mc}(s t + d a - p)\, x_{me}(s t + d b - p). $$

At stride 1, this is the correlation of maps at lag $d (b - a)$. It covers all positions except a few at the borders,
which only one of the kernel positions a and b reaches. The correlations come from Fourier transforms (`correlate`), and
the border strips are subtracted. With a larger stride, patches are extracted and multiplied for a few examples at a
time. For the gradient, they are extracted again. In both cases, the computation needs the memory of a few maps (Ober &
Aitchison 2021, section 2.2).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from bayesify.maths.convolution_geometry import Geometry, windows
from bayesify.maths.convolution_lags import lag_moments

MAX_MAPS_OF_PATCHES = 2
"""Maximum size of the patches in memory at once, as a multiple of the size of all maps."""


def convolution_moments(
    x: Tensor, targets: Tensor, geometry: Geometry, ones: Tensor | None = None, scale: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    r"""$A^\top A$ and $A^\top V$ for each group.

    If $\Lambda$ is diagonal with one value per example, pass its square root as `scale` and `ones`. If $\Lambda$ is a
    full matrix over examples, multiply x, V and the ones by its square root first.

    The map x is [M, c_in, *n], and the targets V are [M, c_out, *o]. With a bias, `ones` is the entry of each example in
    the last column of A, [M]. `scale` multiplies x and V of each example, [M]. The two matrices are [G, D, D] and
    [G, D, c_out / G]. D is c_in / G times the number of kernel positions, plus 1 for a bias.
    """
    if any(size > 1 for size in geometry.stride) or math.prod(geometry.kernel) == 1:
        if scale is not None:
            shape = (-1, *[1] * (x.ndim - 1))
            x, targets = x * scale.view(shape), targets * scale.view(shape)
        gram, cross = patch_moments(x, targets, geometry)
        if ones is None:
            return gram, cross
        totals = (ones @ targets.reshape(*targets.shape[:2], -1).sum(-1)).view(geometry.groups, -1)
        sums = _patches(torch.tensordot(ones, x, 1).unsqueeze(0), geometry).sum(-1)  # weighted by `ones`
    else:
        gram, cross, sums, totals = lag_moments(x, targets, geometry, ones, scale)
        if ones is None:
            return gram, cross
    count = (ones.square().sum() * math.prod(targets.shape[2:])).expand(geometry.groups, 1, 1)
    gram = torch.cat((torch.cat((gram, sums.unsqueeze(-1)), -1), torch.cat((sums.unsqueeze(-2), count), -1)), -2)
    return gram, torch.cat((cross, totals.unsqueeze(-2)), -2)


def patch_moments(x: Tensor, targets: Tensor, geometry: Geometry) -> tuple[Tensor, Tensor]:
    r"""$A^\top A$ and $A^\top V$, computed from extracted patches, for any stride: [G, D, D] and [G, D, c_out / G]."""
    from torch.utils.checkpoint import checkpoint  # loads sympy in torch 2.6

    copies = math.prod(geometry.kernel) * math.prod(targets.shape[2:]) / math.prod(x.shape[2:])
    rows = max(1, int(len(x) * MAX_MAPS_OF_PATCHES / copies))
    parts = [
        checkpoint(_products, *part, geometry, use_reentrant=False, preserve_rng_state=False)
        for part in zip(x.split(rows), targets.split(rows), strict=True)
    ]
    gram, cross = (torch.stack(values).sum(0) for values in zip(*parts, strict=True))
    return gram, cross


def _products(x: Tensor, targets: Tensor, geometry: Geometry) -> tuple[Tensor, Tensor]:
    a = _patches(x, geometry)
    v = targets.unflatten(1, (geometry.groups, -1)).flatten(3).permute(1, 0, 3, 2).flatten(1, 2)  # [G, M o, R]
    return a @ a.mT, a @ v


def _patches(x: Tensor, geometry: Geometry) -> Tensor:
    """The transposed matrix A of each group: [G, D, M o]."""
    x, bare = geometry.padded(x)
    dims, x = len(bare.kernel), windows(x, bare.kernel, bare.stride, bare.dilation)
    order = (1, 2, *range(3 + dims, 3 + 2 * dims), 0, *range(3, 3 + dims))
    grouped: Tensor = x.unflatten(1, (geometry.groups, -1)).permute(order)  # [G, C, *k, M, *o]
    return grouped.reshape(geometry.groups, math.prod(grouped.shape[1 : 2 + dims]), -1)
