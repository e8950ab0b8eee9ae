"""Draws by the extended Matheron rule with their gradients written out, of several groups of matrices at once."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import cycle
from typing import Any, NamedTuple

import torch
from torch import Tensor

from bayesify.maths.signatures import gradients_again, known_signature
from bayesify.maths.value_checks import transforming

BRANCHES = 4
"""Groups that a captured draw makes at the same time."""


class Group(NamedTuple):
    """Where matrices of one size stand in a stack: matrices `first` to `last`, with U of `rows x cols`."""

    first: int
    last: int
    rows: int
    outputs: int
    cols: int
    inputs: int


def side_by_side(draw: Callable[..., Tensor], groups: Iterable[tuple[Tensor, ...]]) -> list[Tensor]:
    """What a function makes of each group; in a CUDA graph that is captured, in branches that run at the same time.

    A group alone leaves most of a GPU idle. Branches begin after all that came before and end before all that follows, and what
    they return is recorded as used outside of them, so that no memory is taken again too early.
    """
    if transforming() or not (torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()):
        return [draw(*group) for group in groups]
    main = torch.cuda.current_stream()
    branches = [torch.cuda.Stream(priority=-1) for _ in range(BRANCHES)]  # others take theirs from those of no priority
    found = []
    for branch, group in zip(cycle(branches), groups, strict=False):
        branch.wait_stream(main)
        with torch.cuda.stream(branch):
            found.append(draw(*group))
        found[-1].record_stream(main)
    for branch in branches[: len(found)]:
        main.wait_stream(branch)
    return found


def whole(row: Tensor, col: Tensor) -> Group:
    """A group that is a stack by itself."""
    return Group(0, row.shape[0], *row.shape[1:], *col.shape[1:])


def draw_group(
    row: Tensor, col: Tensor, start: Tensor, size: Tensor, rest: Tensor, wide: Tensor, thin: Tensor
) -> Tensor:
    """Draws of one group, see `conditional_draw`, in operations that torch differentiates."""
    keep = torch.is_grad_enabled()
    wide, thin = (wide * size, thin * size) if keep else (wide.mul_(size), thin.mul_(size))
    outer = torch.baddbmm(thin.flatten(1, 2) @ rest.mT, wide.flatten(1, 2), col.mT).view(thin.shape)
    inner = start - row.unsqueeze(1) @ outer  # [G, S, M_r, M_c]
    left = (row.mT.unsqueeze(1) @ inner).flatten(1, 2)  # [G, S d_out, M_c]
    flat = wide.flatten(1, 2)
    return (torch.baddbmm(flat, left, col) if keep else flat.baddbmm_(left, col)).view(wide.shape)


@known_signature
class StackDraw(torch.autograd.Function):
    r"""Draws of several groups, one draw of each, or of one group, with their gradients written out.

    With $E$ the noise of W's size, s that size, $o = E A_c^\top + E_3 B_c^\top$, $i = V - s A_r o$ for the start V and
    $l = A_r^\top i$, draws are $W = s E + l A_c$. From the gradient $\bar W$ follow $\bar l = \bar W A_c^\top$,
    $\bar i = A_r \bar l$, $\bar o = - A_r^\top s \bar i$, and
    $\bar A_c = l^\top \bar W + \bar o^\top E$, $\bar A_r = i \bar l^\top - s \bar i o^\top$, $\bar B_c = \bar o^\top E_3$,
    $\bar s = \langle \bar W, E \rangle - \langle \bar i, A_r o \rangle$: three products with matrices of the weights' size
    in place of four. Products of the rows' side are one for all groups. The noise E is kept for the backward pass, in the type of
    the products too where that is another: $\bar A_c$ and $\bar s$ are products with it.
    """

    @staticmethod
    def forward(
        ctx: Any,
        dtype: torch.dtype | None,
        groups: list[Group],
        row: Tensor,
        col: Tensor,
        start: Tensor,
        size: Tensor,
        rest: Tensor,
        *noise: Tensor,
    ) -> tuple[Tensor, ...]:
        """Draws [G, S, d_out, d_in] of each group; `noise`: $E$ of each group, then $E_3$ of each."""
        wides, thins = noise[: len(groups)], noise[len(groups) :]
        low = _rounded_all([wide.flatten(1, 2) for wide in wides], dtype or col.dtype)
        right = _rounded(col, dtype or col.dtype)
        outer = _space(groups, start, (*start.shape[:2], row.shape[-1], start.shape[-1]))
        for group, part, thin in zip(groups, low, thins, strict=True):
            side, end = _col_side(right, group), _square(rest, group)
            torch.baddbmm(_times(part, side.mT), thin.flatten(1, 2), end.mT, out=_row_side(outer, group))
        reached = row.unsqueeze(1) @ outer
        inner = torch.addcmul(start, reached, size, value=-1)
        left = _rounded(row.mT.unsqueeze(1) @ inner, right.dtype)
        drawn = tuple(
            _times(_row_side(left, group), _col_side(right, group))
            .view(wide.shape)
            .addcmul_(wide, size[group.first : group.last])
            for group, wide in zip(groups, wides, strict=True)
        )
        ctx.save_for_backward(row, col, start, size, rest, right, outer, reached, inner, left, *noise, *low)
        ctx.groups = groups
        return drawn

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        """See the class."""
        groups, saved = ctx.groups, ctx.saved_tensors  # read once: checkpointing gives them once
        row, col, start, size, rest, *_ = saved
        wides, thins, _ = _thirds(saved[10:])
        if torch.is_grad_enabled():  # to be differentiated again
            drawn = [
                draw_group(
                    _row_part(row, group),
                    _col_side(col, group),
                    start[group.first : group.last, :, : group.rows, : group.cols],
                    size[group.first : group.last],
                    _square(rest, group),
                    *pair,
                )
                for group, *pair in zip(groups, wides, thins, strict=True)
            ]
            again = gradients_again(drawn, (row, col, start, size, rest), grads)
            return None, None, *again, *(None for _ in (*wides, *thins))
        with torch.autocast(row.device.type, enabled=False):
            found = _gradients(groups, grads, saved)
        return None, None, *found, *(None for _ in (*wides, *thins))


def _gradients(groups: Sequence[Group], grads: Sequence[Tensor], saved: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """See `StackDraw`; by rows, columns, start, size and rest."""
    row, col, start, size, rest, right, outer, reached, inner, left, *others = saved
    wides, thins, low = _thirds(others)
    given = _rounded_all([grad.flatten(1, 2) for grad in grads], right.dtype)
    through_left = _space(groups, start, (*start.shape[:2], row.shape[-1], start.shape[-1]))
    for group, grad in zip(groups, given, strict=True):
        _row_side(through_left, group).copy_(_times(grad, _col_side(right, group).mT))
    through_inner = row.unsqueeze(1) @ through_left
    scaled = through_inner * -size
    through_outer = row.mT.unsqueeze(1) @ scaled
    narrow = _rounded(through_outer, right.dtype)
    by_row = inner @ through_left.mT  # [L, S, M_r, D_out]
    by_row.flatten(0, 1).baddbmm_(scaled.flatten(0, 1), outer.flatten(0, 1).mT)
    grad_row = by_row.sum(1) if by_row.shape[1] > 1 else by_row.squeeze(1)
    grad_col, grad_rest = (_space(groups, part, part.shape) for part in (col, rest))
    for group, grad, thin, part in zip(groups, given, thins, low, strict=True):
        torch.add(
            _times(_row_side(left, group).mT, grad),
            _times(_row_side(narrow, group).mT, part),
            out=_col_side(grad_col, group),
        )
        torch.bmm(_row_side(through_outer, group).mT, thin.flatten(1, 2), out=_square(grad_rest, group))
    sums = [part.sum((-2, -1), keepdim=True) for part in torch._foreach_mul(list(grads), list(wides))]
    by_size = torch.cat(sums) - (through_inner * reached).sum((-2, -1), keepdim=True)
    return grad_row, grad_col, through_inner, by_size.sum_to_size(size.shape), grad_rest


def _thirds(values: Sequence[Tensor]) -> list[Sequence[Tensor]]:
    """Three lists of one length out of one."""
    count = len(values) // 3
    return [values[at : at + count] for at in range(0, 3 * count, count)]


def _space(groups: Sequence[Group], like: Tensor, shape: Sequence[int]) -> Tensor:
    """Memory for all groups; zeros where they differ in size."""
    return like.new_zeros(shape) if len(groups) > 1 else like.new_empty(shape)


def _row_side(stacked: Tensor, group: Group) -> Tensor:
    """A group's part of [L, S, D_out, M_c], its draws below each other: [G, S d_out, m_c]."""
    return stacked[group.first : group.last].flatten(1, 2)[:, : stacked.shape[1] * group.outputs, : group.cols]


def _row_part(row: Tensor, group: Group) -> Tensor:
    """A group's part of [L, M, D_out]."""
    return row[group.first : group.last, : group.rows, : group.outputs]


def _col_side(col: Tensor, group: Group) -> Tensor:
    """A group's part of [L, M, D_in]."""
    return col[group.first : group.last, : group.cols, : group.inputs]


def _square(rest: Tensor, group: Group) -> Tensor:
    """A group's part of [L, M, M], of the columns' side."""
    return rest[group.first : group.last, : group.cols, : group.cols]


def _times(left: Tensor, right: Tensor) -> Tensor:
    """A product for each matrix, summed in float32 where the numbers have less: [G, a, b] @ [G, b, c]."""
    if left.dtype in (torch.float32, torch.float64):
        return left @ right
    return torch.bmm(left, right, out_dtype=torch.float32) if left.is_cuda else left.float() @ right.float()


def draw_low(
    dtype: torch.dtype, row: Tensor, col: Tensor, start: Tensor, size: Tensor, rest: Tensor, wide: Tensor, thin: Tensor
) -> Tensor:
    """Draws of one group in a type of low precision; see `conditional_draw`."""
    low = torch.mul(wide, size, out=_aligned(wide, dtype))
    flat, right = low.flatten(1, 2), _rounded(col, dtype)
    outer = torch.baddbmm(_times(flat, right.mT), thin.mul_(size).flatten(1, 2), rest.mT).view(thin.shape)
    left = (row.mT.unsqueeze(1) @ (start - row.unsqueeze(1) @ outer)).flatten(1, 2).to(dtype)
    return flat.baddbmm_(left, right).view(wide.shape)


def _aligned(like: Tensor, dtype: torch.dtype) -> Tensor:
    """Memory of a tensor's shape whose rows start at multiples of eight numbers: products of others take slow kernels."""
    *shape, size = like.shape
    return torch.empty(*shape, -(-size // 8) * 8, dtype=dtype, device=like.device)[..., :size]


def _rounded(value: Tensor, dtype: torch.dtype) -> Tensor:
    """A tensor in another type, its rows aligned."""
    return value if value.dtype == dtype else _aligned(value, dtype).copy_(value)


def _rounded_all(values: Sequence[Tensor], dtype: torch.dtype) -> list[Tensor]:
    """`_rounded` of several tensors, those without gaps in one launch."""
    if values[0].dtype == dtype:
        return list(values)
    pairs = [(_aligned(value, dtype), value) for value in values]
    if alike := [pair for pair in pairs if pair[0].stride() == pair[1].stride()]:
        torch._foreach_copy_([made for made, _ in alike], [value for _, value in alike])
    for made, value in pairs:
        if made.stride() != value.stride():
            made.copy_(value)
    return [made for made, _ in pairs]
