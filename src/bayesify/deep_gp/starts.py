"""Where a deep Gaussian process starts: centers of the data, targets around them, and the skip functions."""

from __future__ import annotations

import torch
from torch import Tensor

ROUNDS = 20
"""Rounds of k-means; inducing inputs are trained afterwards, so that more buys nothing."""
ROWS = 20_000
"""Rows that k-means looks at, chosen at random where there are more."""
ELEMENTS_AT_ONCE = 2**24


def choose_centers(x: Tensor, count: int, seed: int) -> Tensor:
    """Centers of k-means over the rows of x [N, D], or the rows themselves where there are at most `count`: [M, D].

    The centers start at rows, each chosen with a probability in proportion to its squared distance from those before it (Arthur &
    Vassilvitskii 2007). A center that loses its rows stays where it is.
    """
    if len(x) <= count:
        return x.detach().clone()
    generator = torch.Generator().manual_seed(seed)
    rows = x.detach().double()
    if len(rows) > max(ROWS, count):
        rows = rows[torch.randperm(len(rows), generator=generator)[: max(ROWS, count)].to(x.device)]
    centers = _spread_out(rows, count, generator)
    for _ in range(ROUNDS):
        owner = nearest_center(rows, centers)
        sums = torch.zeros_like(centers).index_add_(0, owner, rows)
        counts = torch.bincount(owner, minlength=count)
        moved = torch.where(counts[:, None] > 0, sums / counts.clamp_min(1)[:, None], centers)
        if torch.equal(moved, centers):
            break
        centers = moved
    return centers.to(x.dtype)


def _spread_out(rows: Tensor, count: int, generator: torch.Generator) -> Tensor:
    """Rows far from each other: [count, D]."""
    chosen = rows[torch.randint(len(rows), (1,), generator=generator).to(rows.device)]
    nearest = (rows - chosen).square().sum(-1)
    found = [chosen]
    for share in torch.rand(count - 1, generator=generator).tolist():
        sums = nearest.cumsum(0)
        place = torch.searchsorted(sums, share * sums[-1]).clamp_max(len(rows) - 1)
        found.append(rows[place].unsqueeze(0))
        nearest = torch.minimum(nearest, (rows - rows[place]).square().sum(-1))
    return torch.cat(found)


def nearest_center(x: Tensor, centers: Tensor) -> Tensor:
    """Index of the nearest center of each row: [N]."""
    rows = max(1, ELEMENTS_AT_ONCE // max(1, len(centers)))
    return torch.cat([torch.cdist(part.detach().to(centers), centers).argmin(-1) for part in x.split(rows)])


def around_centers(x: Tensor, targets: Tensor, centers: Tensor) -> tuple[Tensor, Tensor]:
    """Means of targets [N, O] over the rows nearest to each center, 0 where there are none, and their numbers: [M, O], [M]."""
    owner = nearest_center(x, centers)
    sums = torch.zeros(len(centers), targets.shape[-1], dtype=torch.float64, device=x.device)
    sums.index_add_(0, owner, targets.double())
    counts = torch.bincount(owner, minlength=len(centers))
    return (sums / counts.clamp_min(1)[:, None]).to(x.dtype), counts.to(x.dtype)


def projection(x: Tensor, width: int) -> Tensor:
    """W [D, width] of a skip function: the identity, the first principal axes of x [N, D], or zeros behind the identity."""
    size = x.shape[-1]
    eye = torch.eye(size, width, dtype=x.dtype, device=x.device)
    if width >= size:
        return eye
    centered = (x - x.mean(0)).double()
    _, _, axes = torch.linalg.svd(centered, full_matrices=False)
    if len(axes) < width:
        return eye
    axes = axes[:width]
    largest = axes.gather(1, axes.abs().argmax(1, keepdim=True))
    return (axes * largest.sign()).T.contiguous().to(x.dtype)  # signs that do not depend on the machine
