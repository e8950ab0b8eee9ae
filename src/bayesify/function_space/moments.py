"""Covariances of a linearized network's outputs under independent Gaussian weights, without forming the full Jacobian."""

from collections.abc import Callable, Iterator, Mapping
from functools import reduce
from typing import Any, Literal

import torch
from torch import Tensor

from bayesify.jacobians import Gradients, Jacobians
from bayesify.jacobians.rules import LookupRule, fold_product
from bayesify.maths.gamma import as_float

Covariance = Literal["diagonal", "full", "joint", "example"]

MAX_POSITIONS_PER_VECTOR = 2
"""Up to this many positions of a layer per vector, sums over pairs of positions are cheaper than products of the weight's size."""


def output_covariance(
    jacobians: Jacobians, gradients: Gradients, variances: Mapping[str, Tensor], kind: Covariance, memory: int
) -> Tensor:
    r"""Entries of $J \operatorname{diag}(\sigma^2) J^\top$, summed over layers. For K vectors and B examples, J has K B rows.
    The row for a vector and an example is the gradient, with respect to the weights, of the vector's product with the example's
    outputs.

    For a linear layer that is applied once per example, the diagonal is $(g^2)^\top \sigma^2 a^2$, where a are the layer's inputs
    and g are the gradients at its outputs. For a linear layer applied at several positions, and for convolutions, the diagonal is
    $\sum_{ij} \sigma^2_{ij} (\sum_t g_{ti} a_{tj})^2$, computed for a few of the layer's outputs at a time. For covariances other
    than the diagonal, the entries are products of the same sums. The result is differentiable with respect to all arguments. If
    the work is split into pieces, intermediate results are recomputed in the backward pass to save memory.

    `kind` selects the result. `"diagonal"` gives variances [K, B]. `"full"` gives covariances between examples, [K, B, B].
    `"example"` gives covariances between vectors, [B, K, K]. `"joint"` gives covariances between all pairs, ordered by example
    and then by vector, [B K, B K]. The memory budget limits how many products of gradients and inputs are in memory at the same
    time.
    """
    terms = (term for name in jacobians.names for term in _of_weight(gradients, name, variances[name], kind, memory))
    return reduce(torch.add, terms)


def _of_weight(gradients: Gradients, name: str, variance: Tensor, kind: Covariance, memory: int) -> Iterator[Tensor]:
    variance = as_float(variance)
    calls = gradients.calls(name)
    if len(calls) == 1 and calls[0][0].leaf == "weight":
        use, kept, g = calls[0]
        if use.rule.has_factors:
            factors = use.rule.factors(kept, g)
            assert factors is not None
            yield from _of_linear_map(*factors, variance.reshape(variance.shape[0], -1), kind, memory)
            return
        if isinstance(use.rule, LookupRule):
            yield from _of_table(use.rule, kept, g, variance, kind, memory)
            return
    yield from _of_dense(gradients, name, variance, kind, memory)


def _of_dense(gradients: Gradients, name: str, variance: Tensor, kind: Covariance, memory: int) -> Iterator[Tensor]:
    """Terms of the sum in `output_covariance`, computed from gradients with respect to every entry of a weight. This function is
    used for small weights, for weights that several layers use, and for layers that no faster function supports."""
    flat, calls = variance.flatten(), gradients.calls(name)
    if not calls:
        yield contribution(gradients.dense(name).reshape(*gradients.shape, -1), flat, kind)
        return
    rows, size = gradients.shape[0] * gradients.shape[1], flat.numel()
    pieces = _pieces(size, rows * flat.element_size(), memory)

    def dense() -> Tensor:
        return reduce(torch.add, [use.rule.dense(use.leaf, kept, g) for use, kept, g in calls]).flatten(2)

    if len(pieces) == 1:
        yield contribution(dense(), flat, kind)
        return
    for piece in pieces:
        index = torch.arange(piece.start, piece.stop, device=flat.device)

        def part(*tensors: Tensor, index: Tensor = index) -> Tensor:
            parts = [
                use.rule.columns(use.leaf, tensors[2 * place], tensors[2 * place + 1], index)
                for place, (use, _, _) in enumerate(calls)
            ]
            return contribution(reduce(torch.add, parts), tensors[-1], kind)

        given = [tensor for _, kept, g in calls for tensor in (kept, g)]
        yield _again(part, *given, flat[piece])


def _of_linear_map(a: Tensor, g: Tensor, variance: Tensor, kind: Covariance, memory: int) -> Iterator[Tensor]:
    """Terms of the sum in `output_covariance` for a linear map with inputs a [B, T, d_in], gradients g [K, B, T, d_out] and
    variances of the weights [d_out, d_in]."""
    once = a.shape[1] == 1
    if kind == "diagonal" and once:
        yield (g[:, :, 0].square() * (a[:, 0].square() @ variance.T)).sum(-1)
        return
    if kind == "diagonal" and a.shape[1] <= MAX_POSITIONS_PER_VECTOR * g.shape[0]:
        yield _by_pairs(g, a, variance)
        return
    rows, inputs = g.shape[0] * g.shape[1], a.shape[-1]
    pieces = _pieces(variance.shape[0], rows * inputs * a.element_size(), memory)
    if kind == "diagonal":
        yield squared_sums(g, a, variance, pieces)
        return
    for piece in pieces:

        def part(g: Tensor, a: Tensor, variance: Tensor) -> Tensor:
            return contribution(fold_product(g.movedim(2, -1), a).flatten(2), variance.flatten(), kind)

        given = (g[..., piece], a, variance[piece])
        yield part(*given) if len(pieces) == 1 else _again(part, *given)


def _by_pairs(g: Tensor, a: Tensor, variance: Tensor) -> Tensor:
    r"""The diagonal for a layer with few positions, as a sum over pairs of positions: $\sum_{tu} \sum_i g_{ti} g_{ui}
    \sum_j \sigma^2_{ij} a_{tj} a_{uj}$.

    The sum over j is the same for all vectors. No example needs an intermediate result as large as the weight.
    """
    positions = a.shape[1]
    pairs = a.unsqueeze(1) * a.unsqueeze(2)  # [B, T, T, d_in]
    inner = torch.unflatten(pairs.flatten(1, 2) @ variance.T, 1, (positions, positions))  # [B, T, T, d_out]
    slopes = g.permute(1, 3, 0, 2)  # [B, d_out, K, T]
    return ((slopes @ inner.permute(0, 3, 1, 2)) * slopes).sum((1, 3)).T


def _of_table(
    rule: LookupRule, kept: Tensor, g: Tensor, variance: Tensor, kind: Covariance, memory: int
) -> Iterator[Tensor]:
    """Terms of the sum in `output_covariance` for an embedding table. Rows that were not looked up contribute nothing."""
    words, place = kept.unique(return_inverse=True)
    g = rule.without_padding(kept, g)  # [K, B, T, D]
    rows, size = g.shape[0] * g.shape[1], g.shape[-1]
    pieces = _pieces(size, rows * len(words) * g.element_size(), memory)

    def part(g: Tensor, variance: Tensor) -> Tensor:
        table = g.new_zeros(*g.shape[:2], len(words), g.shape[-1])
        table = table.scatter_add(2, place.unsqueeze(-1).expand(g.shape), g)
        return contribution(table.flatten(2), variance.flatten(), kind)

    for piece in pieces:
        given = (g[..., piece], variance[words][:, piece])
        yield part(*given) if len(pieces) == 1 else _again(part, *given)


def contribution(rows: Tensor, variance: Tensor, kind: Covariance) -> Tensor:
    """Products of gradients [K, B, p], weighted by variances [p]; see `output_covariance` for the result."""
    if kind == "diagonal":
        return rows.square() @ variance
    if kind == "joint":
        rows = rows.movedim(1, 0).flatten(0, 1)
    elif kind == "example":
        rows = rows.movedim(1, 0)
    return (rows * variance) @ rows.transpose(-1, -2)


def _pieces(size: int, bytes_each: int, memory: int) -> list[slice]:
    """Slices that together cover `size` entries. Each slice is so small that a few copies of it, at `bytes_each` bytes
    per entry, fit in the memory budget."""
    step = max(1, memory // max(1, 6 * bytes_each))
    return [slice(start, min(start + step, size)) for start in range(0, size, step)]


def _again(function: Callable[..., Tensor], *tensors: Tensor) -> Tensor:
    """Compute a result, and recompute its intermediate results in the backward pass."""
    from torch.utils.checkpoint import checkpoint  # loads sympy in torch 2.6

    if not torch.is_grad_enabled():
        return function(*tensors)
    found: Tensor = checkpoint(function, *tensors, use_reentrant=False, preserve_rng_state=False)
    return found


class _SquaredSums(torch.autograd.Function):
    r"""$\sum_{ij} \sigma^2_{ij} (\sum_t g_{ti} a_{tj})^2$ for each vector and example, computed for a few outputs i at
    a time.

    With a single piece, the inner sums are kept for the backward pass; otherwise they are recomputed.
    """

    @staticmethod
    def forward(ctx: Any, g: Tensor, a: Tensor, variance: Tensor, pieces: list[slice]) -> Tensor:
        total = g.new_zeros(g.shape[1], g.shape[0])  # [B, K]
        sums = None
        for piece in pieces:
            sums = fold_product(g[..., piece].movedim(2, -1), a).movedim(1, 0)  # [B, K, i, j]
            total += torch.mv(sums.square().flatten(2).flatten(0, 1), variance[piece].flatten()).view_as(total)
        ctx.save_for_backward(g, a, variance, sums if len(pieces) == 1 else None)
        ctx.pieces = pieces
        return total.T

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, None]:
        g, a, variance, kept = ctx.saved_tensors
        weight = grad.T.contiguous()  # [B, K]
        by_g = torch.empty_like(g) if ctx.needs_input_grad[0] else None
        by_a = torch.zeros_like(a) if ctx.needs_input_grad[1] else None
        by_variance = torch.empty_like(variance) if ctx.needs_input_grad[2] else None
        for piece in ctx.pieces:
            sums = kept
            if kept is None:
                sums = fold_product(g[..., piece].movedim(2, -1), a).movedim(1, 0)
            if by_variance is not None:
                squares = sums.square().flatten(2).flatten(0, 1)  # [B K, i j]
                by_variance[piece] = torch.mv(squares.T, weight.flatten()).view_as(variance[piece])
            if by_g is None and by_a is None:
                continue
            slope = (sums * variance[piece]).mul_((2 * weight)[..., None, None]).flatten(1, 2)  # [B, K i, j]
            if by_g is not None:
                product = (slope @ a.transpose(1, 2)).unflatten(1, (weight.shape[1], -1))  # [B, K, i, T]
                by_g[..., piece] = product.permute(1, 0, 3, 2)
            if by_a is not None:
                by_a += g[..., piece].permute(1, 2, 0, 3).flatten(2) @ slope
        return by_g, by_a, by_variance, None


squared_sums: Callable[..., Tensor] = _SquaredSums.apply
