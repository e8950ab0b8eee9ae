"""Starting values of a deep Gaussian process: centers of the data, mean targets around the centers, and skip functions."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from bayesify.likelihoods import Likelihood
from bayesify.running.inputs_and_outputs import checked_inputs

MAX_KMEANS_ROUNDS = 20
"""Largest number of rounds of k-means. More rounds gain nothing, because the inducing inputs are trained afterwards."""
MAX_KMEANS_ROWS = 20_000
"""Largest number of rows for k-means; if there are more, a random choice of rows is used."""
MAX_DISTANCES_AT_ONCE = 2**24


def choose_centers(x: Tensor, count: int, seed: int) -> Tensor:
    """Centers [M, D] of k-means over the rows of x [N, D]; the rows themselves if N is at most `count`.

    The centers start at some of the rows. Each row is chosen with a probability proportional to its squared distance
    from the nearest row chosen before (Arthur & Vassilvitskii 2007). A center that loses all its rows does not move.
    """
    if len(x) <= count:
        return x.detach().clone()
    generator = torch.Generator().manual_seed(seed)
    rows = x.detach().double()
    if len(rows) > max(MAX_KMEANS_ROWS, count):
        rows = rows[torch.randperm(len(rows), generator=generator)[: max(MAX_KMEANS_ROWS, count)].to(x.device)]
    centers = _spread_out(rows, count, generator)
    for _ in range(MAX_KMEANS_ROUNDS):
        owner = nearest_center(rows, centers)
        sums = torch.zeros_like(centers).index_add_(0, owner, rows)
        counts = torch.bincount(owner, minlength=count)
        moved = torch.where(counts[:, None] > 0, sums / counts.clamp_min(1)[:, None], centers)
        if torch.equal(moved, centers):
            break
        centers = moved
    return centers.to(x.dtype)


def _spread_out(rows: Tensor, count: int, generator: torch.Generator) -> Tensor:
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
    rows = max(1, MAX_DISTANCES_AT_ONCE // max(1, len(centers)))
    return torch.cat([torch.cdist(part.detach().to(centers), centers).argmin(-1) for part in x.split(rows)])


def around_centers(x: Tensor, targets: Tensor, centers: Tensor) -> tuple[Tensor, Tensor]:
    """Mean target [M, O] of the rows nearest to each center, and the number [M] of these rows. A center without rows gets the
    mean 0."""
    owner = nearest_center(x, centers)
    sums = torch.zeros(len(centers), targets.shape[-1], dtype=torch.float64, device=x.device)
    sums.index_add_(0, owner, targets.double())
    counts = torch.bincount(owner, minlength=len(centers))
    return (sums / counts.clamp_min(1)[:, None]).to(x.dtype), counts.to(x.dtype)


def projection(x: Tensor, width: int) -> Tensor:
    """Matrix W [D, width] of a skip function: the identity padded with zeros, or the first principal axes of x [N, D]."""
    size = x.shape[-1]
    eye = torch.eye(size, width, dtype=x.dtype, device=x.device)
    if width >= size:
        return eye
    centered = (x - x.mean(0)).double()
    axes: Tensor = torch.linalg.svd(centered, full_matrices=False)[2][:width]
    if len(axes) < width:
        return eye
    largest = axes.gather(1, axes.abs().argmax(1, keepdim=True))
    return (axes * largest.sign()).T.contiguous().to(x.dtype)  # the same signs on every machine


def layer_widths(width: int | Sequence[int] | None, depth: int, num_inputs: int, num_outputs: int) -> tuple[int, ...]:
    """Number of inputs, then the number of outputs of each layer; see `DeepGP` for `width`."""
    if width is None:
        width = min(num_inputs, 30)
    hidden = [width] * (depth - 1) if isinstance(width, int) else list(width)
    if len(hidden) != depth - 1:
        raise ValueError(
            f"DeepGP: {len(hidden)} widths are given for depth={depth}; give {depth - 1} widths, one per hidden layer"
        )
    return (num_inputs, *hidden, num_outputs)


def count_outputs(likelihood: Likelihood, targets: Tensor | None, given: int | None) -> int:
    """Number of outputs O: the given number, or the number that the likelihood needs for the targets."""
    if given is not None:
        return given
    if targets is None:
        raise ValueError(
            "DeepGP: neither targets= nor num_outputs= is given; give one of them to set the size of the last layer"
        )
    if likelihood.name == "categorical":
        return int(targets.max()) + 1
    columns = targets.shape[-1] if targets.ndim > 1 else 1
    return 2 * columns if likelihood.name == "heteroscedastic_gaussian" else columns


def as_function_values(
    likelihood: Likelihood, targets: Tensor | None, inputs: Tensor, num_outputs: int
) -> Tensor | None:
    """Function values at which the last layer starts, computed from the targets: [N, O]. `None` if there are no targets."""
    if targets is None:
        return None
    if len(targets) != len(inputs):
        raise ValueError(
            f"DeepGP: there are {len(targets)} targets, but {len(inputs)} inputs; give one target per input"
        )
    checked_inputs(targets)
    if likelihood.name == "categorical":
        hot = nn.functional.one_hot(targets.reshape(-1).long(), num_outputs).to(inputs)
        return 4 * hot - 4 / num_outputs
    columns = targets.reshape(len(inputs), -1).to(inputs)
    if likelihood.name == "bernoulli":
        return 4 * columns - 2
    if likelihood.name == "heteroscedastic_gaussian":
        return torch.cat((columns, torch.full_like(columns, math.log(0.1))), dim=-1)
    return columns
