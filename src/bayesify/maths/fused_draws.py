"""Draws of many diagonal Gaussians on a GPU in one launch, whose noise is never stored."""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from bayesify.maths.gaussian import diagonal_gradients
from bayesify.maths.philox import ROUNDS, TILE
from bayesify.maths.signatures import known_signature

ALIGNED = 64
"""Numbers that a weight's draws start at a multiple of."""

FAST = True
"""Whether kernels take sines and cosines by the device's own instructions, which an emulation does not have."""

ENABLED = True
"""Whether normal numbers and draws on a GPU come from these kernels where they run."""

WARPS = 4
"""Groups of 32 threads that make a tile."""


class Plan:
    r"""Where many diagonal Gaussians lie in memory, as kernels read it: S draws of each, and their KL to zero-mean priors.

    A weight's entries are taken in the order of memory, in tiles; each draw of it takes its noise from tiles of the stream of its
    own, weight after weight, as `DrawRequest.normals(..., tile=TILE)` does. Columns of the table: where mean and log std are, in
    numbers from `base`, size, first tile of noise, tiles of a draw, first number of the draws, first number of a gradient,
    whether vector loads fit.

    Args:
        means: m of each, without gaps in memory.
        log_stds: log s of each, laid out alike.
        prior_stds: $\sigma$ of each.
        num_draws: S.
        antithetic: Whether each second draw has the noise of the one before with the opposite sign.
        dtype: Of the draws.
        members: Which of the Gaussians are drawn; the noise of the others is left out.
    """

    def __init__(
        self,
        means: Sequence[Tensor],
        log_stds: Sequence[Tensor],
        prior_stds: Sequence[float],
        num_draws: int,
        antithetic: bool,
        dtype: torch.dtype,
        members: list[int],
    ) -> None:
        tiles = [-(-mean.numel() // TILE) for mean in means]
        halves = (num_draws + 1) // 2 if antithetic else num_draws
        first = [0]
        for count in tiles:
            first.append(first[-1] + halves * count)
        self.members = members
        means, log_stds = [means[at] for at in members], [log_stds[at] for at in members]
        prior_stds = [prior_stds[at] for at in members]
        tiles, first = [tiles[at] for at in members], [first[at] for at in members]
        self.num_draws, self.antithetic, self.dtype = num_draws, antithetic, dtype
        self.prior_stds, self.device = list(prior_stds), means[0].device
        self.shapes, self.strides = [mean.shape for mean in means], [mean.stride() for mean in means]
        sizes = [mean.numel() for mean in means]
        self.starts, self.single = _starts([num_draws * size for size in sizes]), _starts(sizes)
        self.base = torch.zeros(4, device=self.device)
        rows = [
            (
                self._place(mean), self._place(log_std), size, first[at], tiles[at], self.starts[at], self.single[at],
                int(size % 8 == 0 and self._place(mean) % 4 == 0 and self._place(log_std) % 4 == 0),
            )
            for at, (mean, log_std, size) in enumerate(zip(means, log_stds, sizes, strict=True))
        ]  # fmt: skip
        owners = torch.repeat_interleave(torch.arange(len(tiles)), torch.tensor(tiles))
        within = torch.cat([torch.arange(count) for count in tiles])
        self.owners = torch.stack([owners, within], 1).int().to(self.device)
        self.table = torch.tensor(rows, dtype=torch.int64).to(self.device)
        self.precisions = torch.tensor([std**-2 for std in prior_stds], dtype=torch.float32).to(self.device)
        self.constant = sum(size * (math.log(std) - 0.5) for size, std in zip(sizes, prior_stds, strict=True))
        self.gaps = torch.zeros(ALIGNED, dtype=dtype, device=self.device)
        self.layouts = [
            ((num_draws, *shape), (size, *stride))
            for shape, size, stride in zip(self.shapes, sizes, self.strides, strict=True)
        ]

    def _place(self, value: Tensor) -> int:
        return (value.data_ptr() - self.base.data_ptr()) // value.element_size()

    def draw(self, seed: Tensor) -> tuple[list[Tensor], Tensor]:
        """Draws [S, *shape] of each, and the KL, a scalar; without gradients."""
        from bayesify.maths.philox_kernels import draw_kernel

        out = torch.empty(self.starts[-1], dtype=self.dtype, device=self.device)
        parts = torch.empty(len(self.owners), dtype=torch.float32, device=self.device)
        with on_device(self.device):
            draw_kernel[(len(self.owners),)](
                self.owners,
                self.table,
                self.precisions,
                self.base,
                seed,
                out,
                parts,
                self.num_draws,
                self.antithetic,
                ROUNDS,
                FAST,
                num_warps=WARPS,
            )
        kl = parts.sum().add_(self.constant)
        draws = [
            out.as_strided(size, stride, start)
            for (size, stride), start in zip(self.layouts, self.starts, strict=False)
        ]
        return draws, kl

    def gradients(self, seed: Tensor, grads: Sequence[Tensor | None], grad_kl: Tensor | None) -> list[Tensor]:
        """Gradients by all means, then by all log stds, from those of the draws and of the KL."""
        from bayesify.maths.philox_kernels import gradient_kernel

        pieces: list[Tensor] = []
        for at, (grad, (size, stride)) in enumerate(zip(grads, self.layouts, strict=True)):
            given = torch.zeros(size, dtype=self.dtype, device=self.device) if grad is None else grad
            order = sorted(range(1, len(size)), key=lambda axis: -stride[axis])
            pieces.append(given.permute(0, *order).reshape(-1))
            gap = self.starts[at + 1] - self.starts[at] - len(pieces[-1])
            if gap:
                pieces.append(self.gaps[:gap])
        joined = torch.cat(pieces)
        both = torch.empty(2, self.single[-1], dtype=torch.float32, device=self.device)
        weight = torch.zeros((), device=self.device) if grad_kl is None else grad_kl
        with on_device(self.device):
            gradient_kernel[(len(self.owners),)](
                self.owners, self.table, self.precisions, self.base, seed, joined, weight, both[0], both[1],
                self.num_draws, self.antithetic, ROUNDS, FAST, num_warps=WARPS,
            )  # fmt: skip
        return [
            part.as_strided(shape, stride, part.storage_offset() + start)
            for part in both
            for shape, stride, start in zip(self.shapes, self.strides, self.single, strict=False)
        ]


def _starts(counts: Sequence[int]) -> list[int]:
    starts = [0]
    for count in counts:
        starts.append(starts[-1] + -(-count // ALIGNED) * ALIGNED)
    return starts


def make_plans(
    means: Sequence[Tensor],
    log_stds: Sequence[Tensor],
    prior_stds: Sequence[float],
    num_draws: int,
    antithetic: bool,
    dtypes: Sequence[torch.dtype],
) -> list[Plan] | None:
    """A plan for the Gaussians of each type of draws; `None` where a kernel cannot read them."""
    if not all(_is_dense(mean, log_std) for mean, log_std in zip(means, log_stds, strict=True)):
        return None
    return [
        Plan(
            means,
            log_stds,
            prior_stds,
            num_draws,
            antithetic,
            dtype,
            [at for at, kind in enumerate(dtypes) if kind == dtype],
        )
        for dtype in dict.fromkeys(dtypes)
    ]


def _is_dense(mean: Tensor, log_std: Tensor) -> bool:
    """Whether two parameters lie in memory alike and without gaps."""
    dense = mean.is_contiguous() or (mean.dim() == 4 and mean.is_contiguous(memory_format=torch.channels_last))
    return dense and mean.stride() == log_std.stride() and mean.dtype == log_std.dtype and mean.numel() < 2**31 - TILE


@known_signature
class _FusedDraw(torch.autograd.Function):
    """Draws and KL of a plan; the backward pass makes the noise again."""

    @staticmethod
    def forward(ctx: Any, plan: Plan, noise: Any, seed: Tensor, *parameters: Tensor) -> Any:
        ctx.plan, ctx.noise = plan, noise
        ctx.save_for_backward(seed, *parameters)
        draws, kl = plan.draw(seed)
        return *draws, kl

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        seed, *parameters = ctx.saved_tensors
        if not torch.is_grad_enabled():
            return None, None, None, *ctx.plan.gradients(seed, grads[:-1], grads[-1])
        # To be differentiated again: in operations that torch knows.
        count = len(parameters) // 2
        noise = ctx.noise(seed)
        through = [torch.zeros_like(n) if g is None else g.float() for g, n in zip(grads[:-1], noise, strict=True)]
        found = diagonal_gradients(
            ctx.plan.prior_stds, parameters[:count], parameters[count:], noise, through, grads[-1]
        )
        return None, None, None, *found


def fused_draws(plan: Plan, noise: Any, seed: Tensor, parameters: Sequence[Tensor]) -> tuple[list[Tensor], Tensor]:
    """Draws [S, *shape] of each Gaussian of a plan, and their KL, a scalar in nats.

    Args:
        plan: Of the parameters.
        noise: Gives the noise of a seed, [S, *shape] for each Gaussian: for second derivatives.
        seed: Of the noise, [1].
        parameters: All means, then all log stds.
    """
    if not torch.is_grad_enabled():
        return plan.draw(seed)
    *draws, kl = _FusedDraw.apply(plan, noise, seed, *parameters)
    return draws, kl


def has_kernel(like: Tensor) -> bool:
    """Whether the kernels make numbers for a tensor: float32 on a CUDA device, where Triton is installed and can compile."""
    return ENABLED and like.is_cuda and like.dtype == torch.float32 and _kernels_run(like.device)


@lru_cache(maxsize=16)
def _kernels_run(device: torch.device) -> bool:
    if find_spec("triton") is None:
        return False
    try:
        kernel_normals(1, torch.zeros(1, dtype=torch.int64, device=device))
    except Exception as error:  # no C compiler, a GPU that Triton does not know
        reason = str(error).strip().splitlines()[:1]
        warnings.warn(f"Triton's kernels do not run here {reason}; draws take torch's own operations", stacklevel=2)
        return False
    return True


def kernel_normals(count: int, seed: Tensor) -> Tensor:
    """The numbers of `philox_normals` by a kernel, [count] in float32."""
    from bayesify.maths.philox_kernels import normal_kernel

    out = torch.empty(count, dtype=torch.float32, device=seed.device)
    with on_device(seed.device):
        normal_kernel[(-(-count // TILE),)](seed, out, count, ROUNDS, FAST, num_warps=WARPS)
    return out


def on_device(device: torch.device) -> AbstractContextManager[Any]:
    """The device as the current one, where it is not."""
    return (
        torch.cuda.device(device)
        if device.type == "cuda" and device.index != torch.cuda.current_device()
        else nullcontext()
    )
