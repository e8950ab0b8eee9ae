"""Draws of many diagonal Gaussians on a GPU in one launch, without storing the noise."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache
from importlib.util import find_spec
from itertools import accumulate
from typing import Any, Protocol

import torch
from torch import Tensor

from bayesify.maths.autograd_functions import Function, gradients_again
from bayesify.maths.philox import ROUNDS, TILE

ALIGNMENT_NUMBERS = 64
"""Each weight's draws start at a multiple of this many numbers."""

HAS_FAST_SINES = True
"""Whether kernels use the device's own instructions for sines and cosines, which an emulation does not have."""

USES_KERNELS = True
"""Whether normal numbers and draws on a GPU come from these kernels, if the kernels run."""

WARPS_PER_TILE = 4
"""Number of groups of 32 threads that compute a tile."""

MIN_TENSORS_TO_CUT = 5
"""For at least this many tensors with equally shaped rows, one split is faster than separate views."""

Place = tuple[Tensor, tuple[int, ...], tuple[int, ...], int]
"""A tensor that can be created later: its memory, size, stride and first number."""


class Plan:
    r"""Memory layout of many diagonal Gaussians. Kernels use it to compute S draws of each Gaussian, and the KL of the
    Gaussians to zero-mean priors.

    The entries of a weight are processed in the order of memory, in tiles. Each draw of a weight takes its noise from
    its own tiles of the stream of random numbers. The weights follow one another in the stream, as in
    `DrawRequest.normals(..., tile=TILE)`. The kernels read a table with one row per weight. The table has these columns: the
    offsets of the mean and of the log std from `base`, in elements; the size of the weight; its first tile of noise; its number of
    tiles per draw; the offset of its draws; the offset of its gradient; and whether vector loads are possible.
    """

    def __init__(
        self,
        means: Sequence[Tensor],  # mean m of each Gaussian, without gaps in memory
        log_stds: Sequence[Tensor],  # log standard deviations log s, with the same layout
        prior_stds: Sequence[float],  # prior standard deviation of each Gaussian
        num_draws: int,
        antithetic: bool,  # whether every second draw uses the negative noise of the draw before it
        dtype: torch.dtype,  # data type of the draws
    ) -> None:
        sizes = [mean.numel() for mean in means]
        tiles, first = first_tiles(sizes, num_draws, antithetic)
        self.num_draws, self.antithetic, self.dtype = num_draws, antithetic, dtype
        self.device = means[0].device
        self.drawn = Joined([((num_draws, *mean.shape), (mean.numel(), *mean.stride())) for mean in means])
        self.single = Joined([(mean.shape, mean.stride()) for mean in means])
        self.base = torch.zeros(4, device=self.device)
        places = [[offset(part, self.base) for part in parts] for parts in (means, log_stds)]
        rows = [
            (
                mean, log_std, size, first[at], tiles[at], self.drawn.starts[at], self.single.starts[at],
                int(size % 8 == 0 and mean % 4 == 0 and log_std % 4 == 0),
            )
            for at, (mean, log_std, size) in enumerate(zip(*places, sizes, strict=True))
        ]  # fmt: skip
        self.owners = tile_owners(tiles, self.device)
        self.table = torch.tensor(rows, dtype=torch.int64).to(self.device)
        self.precisions = torch.tensor([std**-2 for std in prior_stds], dtype=torch.float32).to(self.device)
        self.constant = sum(size * (math.log(std) - 0.5) for size, std in zip(sizes, prior_stds, strict=True))
        self.gaps = torch.zeros(ALIGNMENT_NUMBERS, dtype=dtype, device=self.device)

    def draw(self, seed: Tensor) -> tuple[Sequence[Place], Tensor]:
        """Draws [S, *shape] of each Gaussian, and the KL, a scalar. Autograd does not track the results."""
        from bayesify.maths.philox_kernels import draw_kernel

        out = torch.empty(self.drawn.total, dtype=self.dtype, device=self.device)
        parts = torch.empty(len(self.owners), dtype=torch.float32, device=self.device)
        with on_device(self.device):
            draw_kernel[(len(self.owners),)](
                self.owners, self.table, self.precisions, self.base, seed, out, parts,
                self.num_draws, self.antithetic, ROUNDS, HAS_FAST_SINES, num_warps=WARPS_PER_TILE,
            )  # fmt: skip
        return self.drawn.places(out), parts.sum().add_(self.constant)

    def gradients(self, seed: Tensor, grads: Sequence[Tensor | None], grad_kl: Tensor | None) -> list[Tensor]:
        """Gradients with respect to all means and then all log stds, computed from the gradients with respect to the draws and
        the KL."""
        from bayesify.maths.philox_kernels import gradient_kernel

        joined = self.drawn.join(grads, self.gaps)
        both = [torch.empty(self.single.total, dtype=torch.float32, device=self.device) for _ in range(2)]
        weight = torch.zeros((), device=self.device) if grad_kl is None else grad_kl
        with on_device(self.device):
            gradient_kernel[(len(self.owners),)](
                self.owners, self.table, self.precisions, self.base, seed, joined, weight, both[0], both[1],
                self.num_draws, self.antithetic, ROUNDS, HAS_FAST_SINES, num_warps=WARPS_PER_TILE,
            )  # fmt: skip
        return [view for part in both for view in self.single.views(part)]


def offset(value: Tensor, base: Tensor) -> int:
    """Offset of a tensor in memory from a base tensor, in elements of the tensor's dtype."""
    return (value.data_ptr() - base.data_ptr()) // value.element_size()


def first_tiles(sizes: Sequence[int], num_draws: int, antithetic: bool) -> tuple[list[int], list[int]]:
    """Two lists with one entry per Gaussian: the number of noise tiles for one draw, and the index of the Gaussian's first noise
    tile."""
    tiles = [-(-size // TILE) for size in sizes]
    halves = (num_draws + 1) // 2 if antithetic else num_draws
    return tiles, list(accumulate([halves * count for count in tiles], initial=0))[:-1]


def tile_owners(tiles: Sequence[int], device: torch.device) -> Tensor:
    """For each tile, the index of its Gaussian and the tile's number within this Gaussian: [tiles, 2]."""
    owners = torch.repeat_interleave(torch.arange(len(tiles)), torch.tensor(tiles))
    within = torch.cat([torch.arange(count) for count in tiles])
    return torch.stack([owners, within], 1).int().to(device)


class Places(Sequence[Place]):
    """Positions of tensors in one piece of memory."""

    def __init__(self, joined: Joined, flat: Tensor) -> None:
        self.joined, self.flat = joined, flat

    def __getitem__(self, at: Any) -> Any:
        return (self.flat, *self.joined.layouts[at])

    def __len__(self) -> int:
        return len(self.joined.layouts)

    def at(self, index: int) -> list[Tensor]:
        """One draw of each tensor."""
        return self.joined.at(self.flat, index)


class Joined:
    """Tensors in one piece of memory, each aligned to `ALIGNMENT_NUMBERS`; tensors with equally shaped rows are adjacent.

    Splitting adjacent tensors in one call takes a third of the CPU time that a separate view of each tensor takes.

    Args:
        layouts: Size and stride of each tensor; a tensor must have no gaps in memory.
    """

    def __init__(self, layouts: Sequence[tuple[tuple[int, ...], tuple[int, ...]]]) -> None:
        counts = [math.prod(size) for size, _ in layouts]
        self.gaps = [-count % ALIGNMENT_NUMBERS for count in counts]
        groups: dict[Any, list[int]] = {}
        for at, (size, stride) in enumerate(layouts):
            rows = len(size) > 1 and stride[1] == math.prod(size[2:]) and counts[at] and not self.gaps[at]
            groups.setdefault((size[0], size[2:], stride[2:]) if rows else at, []).append(at)
        self.order = [at for group in groups.values() for at in group]
        *starts, self.total = accumulate([counts[at] + self.gaps[at] for at in self.order], initial=0)
        self.starts = [start for _, start in sorted(zip(self.order, starts, strict=True))]
        self.layouts = [(size, stride, start) for (size, stride), start in zip(layouts, self.starts, strict=True)]
        self.cuts = [group for group in groups.values() if len(group) >= MIN_TENSORS_TO_CUT]
        self.single = sorted({*self.order}.difference(*self.cuts))
        # Order of the axes of gradients [S, *shape] in memory, for `join`.
        self.orders = [(0, *sorted(range(1, len(size)), key=lambda axis: -stride[axis])) for size, stride in layouts]

    def places(self, flat: Tensor) -> Places:
        """Positions of all tensors. The first tensor begins at the start of `flat`."""
        return Places(self, flat)

    def at(self, flat: Tensor, index: int) -> list[Tensor]:
        """One draw of each tensor: [S, *shape] -> [*shape]."""
        found: list[Any] = [None] * len(self.layouts)
        for at in self.single:
            (count, *size), (step, *stride), start = self.layouts[at]
            found[at] = flat.as_strided(size, stride, start + index % count * step)
        for group in self.cuts:
            (count, _, *row), (_, *stride), start = self.layouts[group[0]]
            lengths = [self.layouts[at][0][1] for at in group]
            together = flat.as_strided((count * sum(lengths), *row), stride, start)
            if count > 1:  # rows of other draws lie in between
                others = (index % count, 1, count - 1 - index % count)
                lengths = [many * length for length in lengths for many in others]
            parts = together.split_with_sizes(lengths)
            for at, part in zip(group, parts if count == 1 else parts[1::3], strict=True):
                found[at] = part
        return found

    def views(self, flat: Tensor) -> list[Tensor]:
        """Views of all tensors. The first tensor begins at the start of `flat`."""
        return [flat.as_strided(*layout) for layout in self.layouts]

    def join(self, values: Sequence[Tensor | None], zeros: Tensor) -> Tensor:
        """Copies of tensors with the sizes in `layouts`, [S, *shape] each, in one piece of memory; absent tensors and gaps are 0.

        `zeros` are `ALIGNMENT_NUMBERS` zeros of the result's dtype.
        """
        pieces = []
        for at in self.order:
            value, gap = values[at], self.gaps[at]
            given = zeros.new_zeros(self.layouts[at][0]) if value is None else value
            pieces.append(given.permute(self.orders[at]).reshape(-1))
            if gap:
                pieces.append(zeros[:gap])
        return torch.cat(pieces)


def make_plan(
    means: Sequence[Tensor],
    log_stds: Sequence[Tensor],
    prior_stds: Sequence[float],
    num_draws: int,
    antithetic: bool,
    dtypes: Sequence[torch.dtype],
) -> DrawPlan | None:
    """A plan for Gaussians whose draws have the given dtypes; `None` if dtypes differ or a kernel cannot read the parameters."""
    if len(set(dtypes)) > 1 or not all(map(_is_dense, means, log_stds)):
        return None
    return Plan(means, log_stds, prior_stds, num_draws, antithetic, dtypes[0])


def _is_dense(mean: Tensor, log_std: Tensor) -> bool:
    """Whether two parameters have the same layout in memory, without gaps."""
    dense = mean.is_contiguous() or (mean.dim() == 4 and mean.is_contiguous(memory_format=torch.channels_last))
    return dense and mean.stride() == log_std.stride() and mean.dtype == log_std.dtype and mean.numel() < 2**31 - TILE


class DrawPlan(Protocol):
    """Plan of kernels that compute draws and their KL, and the gradients of both."""

    def draw(self, seed: Tensor) -> tuple[Sequence[Place], Tensor]:
        """Draws [S, *shape] of each weight, and the KL, a scalar; without gradients."""
        ...

    def gradients(self, seed: Tensor, grads: Sequence[Tensor | None], grad_kl: Tensor | None) -> list[Tensor]:
        """Gradients with respect to the parameters, computed from the gradients with respect to the draws and the KL."""
        ...


Reference = Callable[[Tensor], tuple[list[Tensor], Tensor]]
"""Function from a seed to draws and KL, in operations that torch differentiates."""


class _FusedDraw(Function):
    """Draws and KL of a plan. The backward pass generates the noise again."""

    @staticmethod
    def forward(ctx: Any, plan: DrawPlan, reference: Reference, seed: Tensor, *parameters: Tensor) -> Any:
        ctx.plan, ctx.reference = plan, reference
        ctx.save_for_backward(seed, *parameters)
        draws, kl = plan.draw(seed)
        return *(flat.as_strided(size, stride, start) for flat, size, stride, start in draws), kl

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        seed, *parameters = ctx.saved_tensors
        if not torch.is_grad_enabled():
            return None, None, None, *ctx.plan.gradients(seed, grads[:-1], grads[-1])
        # Gradients that will be differentiated again need operations that torch knows.
        draws, kl = ctx.reference(seed)
        return None, None, None, *gradients_again((*draws, kl), parameters, grads)


def fused_draws(
    plan: DrawPlan, reference: Reference, seed: Tensor, parameters: Sequence[Tensor]
) -> tuple[list[Tensor], Tensor]:
    """Draws [S, *shape] of each weight of a plan, and their KL (a scalar in nats); both are differentiable with respect to the
    parameters.

    `reference` is the same computation without kernels, for second derivatives. The seed of the noise has shape [1], and the
    parameters are in the same order as the plan's gradients.
    """
    *draws, kl = _FusedDraw.apply(plan, reference, seed, *parameters)
    return draws, kl


def has_kernel(like: Tensor) -> bool:
    """Whether the kernels can serve a tensor: float32 on a CUDA device, with Triton installed and able to compile."""
    return USES_KERNELS and like.is_cuda and like.dtype == torch.float32 and _kernels_run(like.device)


@lru_cache(maxsize=16)
def _kernels_run(device: torch.device) -> bool:
    if find_spec("triton") is None:
        return False
    try:
        kernel_normals(1, torch.zeros(1, dtype=torch.int64, device=device))
    except Exception as error:  # for example, there is no C compiler, or Triton does not know the GPU
        reason = str(error).strip().splitlines()[:1]
        warnings.warn(
            f"Triton kernels cannot run on this machine {reason}, so draws use torch operations, which are slower; "
            "to use the kernels, install a C compiler or another version of Triton",
            stacklevel=2,
        )
        return False
    return True


def kernel_normals(count: int, seed: Tensor) -> Tensor:
    """The first numbers of a stream (see `maths.philox`) in float32, [count]. The seed must be below $2^{63}$, and the result is
    on the seed's device. The seed has shape [1]."""
    from bayesify.maths.philox_kernels import normal_kernel

    out = torch.empty(count, dtype=torch.float32, device=seed.device)
    with on_device(seed.device):
        normal_kernel[(-(-count // TILE),)](seed, out, count, ROUNDS, HAS_FAST_SINES, num_warps=WARPS_PER_TILE)
    return out


def on_device(device: torch.device) -> AbstractContextManager[Any]:
    """Context manager that makes the device current, if necessary."""
    if device.type == "cuda" and device.index != torch.cuda.current_device():
        return torch.cuda.device(device)
    return nullcontext()
