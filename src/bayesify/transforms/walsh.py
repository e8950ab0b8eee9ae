"""The Walsh-Hadamard transform in O(D log D), for every device and every function transform of torch."""

from __future__ import annotations

import inspect
import math
import platform
from functools import lru_cache
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from bayesify.arguments.checks import Count, checked
from bayesify.transforms.sign_matrices import sign_matrix

MAX_DENSE_SIZE = 128
"""Up to this size, one dense product is the fastest transform for every batch size."""
FACTOR_SIZE = 32
"""Size of the factor that a matrix product applies first, so that the butterflies work on long rows."""
NUMBERS_PER_PIECE = 2**21
"""Butterflies process this many numbers at a time, which fit in the cache."""
MIN_NUMBERS_FOR_HALF_FACTOR = 2**19 if platform.machine() in ("aarch64", "arm64") else math.inf
"""On ARM, for batches of at least this many numbers, half of `FACTOR_SIZE` with a transposed second matrix is faster."""
MAX_NUMBERS_FOR_FEW_CALLS = 2**13
"""For batches of at most this many numbers, calls cost more than arithmetic, so fewer calls are faster."""


@checked
def next_power_of_two(size: Count) -> int:
    """The smallest power of two that is at least `size`."""
    return 1 << (size - 1).bit_length()


@checked
def hadamard(x: Tensor, normalize: bool = True) -> Tensor:
    r"""Orthonormal Walsh-Hadamard transform of the last dimension, in Sylvester's order.

    $$ y = H x, \qquad H_{ij} = D^{-1/2} (-1)^{\text{popcount}(i \wedge j)}, \qquad H = H^\top = H^{-1} $$

    H is its own transpose and its own inverse, so the gradient is the transform of the incoming gradient. Because
    $H_{ab} = H_a \otimes H_b$, small matrix products do most of the work. Up to 128 entries, one product is enough. Beyond that,
    the CPU uses a product with $H_{32}$ (or $H_{16}$) and in-place butterflies over longer and longer rows. For up to 16384
    entries, CUDA uses one fused Triton kernel, which reads and writes each number once. The transform supports `vmap`, `grad`,
    `jvp` and `torch.compile`, and any floating-point type. Numbers of 16-bit types are summed in float32.

    Args:
        x: Vectors [..., D], with D a power of two.
        normalize: Whether H is orthonormal; otherwise its entries are 1 and -1.

    Returns:
        Transformed vectors [..., D], of the same type.

    Raises:
        TypeError: If x is not a tensor of real floating-point numbers.
        ValueError: If x has no dimension, or if its last dimension is not a power of two.
    """
    if not x.is_floating_point():
        raise TypeError(f"hadamard: x is {x.dtype}; give a tensor of real floating-point numbers, such as x.float()")
    if x.ndim == 0:
        raise ValueError("hadamard: x is a scalar; give at least one dimension")
    size = x.shape[-1]
    if size < 1 or size & (size - 1):
        raise ValueError(
            f"hadamard: the last dimension is {size}, not a power of two; pad x with zeros to "
            f"{next_power_of_two(max(size, 1))} (the posterior WalshHadamard pads automatically)"
        )
    if size == 1 or x.numel() == 0:
        return x.clone()
    scale = 1 / math.sqrt(size) if normalize else 1.0
    if torch.compiler.is_compiling():  # plain products, which the compiler can differentiate
        return plain_transform(x, scale)
    if _nobody_differentiates(x):
        return transform(x, scale)
    found: Tensor = _Hadamard.apply(x, scale)
    return found


def _nobody_differentiates(x: Tensor) -> bool:
    """Whether only the value of the transform is needed, and no gradient, tangent or function transform."""
    watched = x.requires_grad and torch.is_grad_enabled()
    return not watched and not torch._C._are_functorch_transforms_active() and forward_ad._current_level < 0


class _Hadamard(torch.autograd.Function):
    """The transform times a number. The transform is linear and symmetric, so its derivatives are the transform itself."""

    if TYPE_CHECKING:  # torch's `apply` has no annotations

        @classmethod
        def apply(cls, *args: Any, **kwargs: Any) -> Any: ...

    @staticmethod
    def forward(x: Tensor, scale: float) -> Tensor:
        return transform(x, scale)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, float], output: Tensor) -> None:
        ctx.scale = inputs[1]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return _Hadamard.apply(grads[0], ctx.scale), None

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        return _Hadamard.apply(tangents[0], ctx.scale)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], x: Tensor, scale: float) -> tuple[Tensor, int]:
        assert in_dims[0] is not None
        return _Hadamard.apply(x.movedim(in_dims[0], 0), scale), 0


# Store the signature: torch inspects it in each call, which costs more than a small transform.
_Hadamard.forward.__signature__ = inspect.signature(_Hadamard.forward)  # type: ignore[attr-defined]


def transform(x: Tensor, scale: float) -> Tensor:
    """`scale` times the transform with entries 1 and -1, without a gradient, on the fastest path for device, size and batch."""
    # The fused kernel does not support float64, and small sizes are faster without it.
    if x.is_cuda and x.dtype != torch.float64 and x.shape[-1] > MAX_DENSE_SIZE and _triton_is_there():
        from bayesify.transforms.triton_kernel import fused_transform

        return fused_transform(x, scale)
    return plain_transform(x, scale)


@lru_cache(maxsize=1)
def _triton_is_there() -> bool:
    return find_spec("triton") is not None


def plain_transform(x: Tensor, scale: float) -> Tensor:
    """`transform` in plain torch, which is the fallback and the reference for the fused kernel."""
    wide = x if x.dtype in (torch.float32, torch.float64) else x.float()
    size, rows = x.shape[-1], x.numel() // x.shape[-1]
    if size <= MAX_DENSE_SIZE or (size <= 2 * MAX_DENSE_SIZE and rows * size**2 <= 2**21):
        flat = wide.reshape(rows, size) @ sign_matrix(size, wide).mul(scale)
    elif x.is_cuda or torch.compiler.is_compiling() or rows * size <= MAX_NUMBERS_FOR_FEW_CALLS:
        flat = _by_factors(wide, scale)
    else:
        flat = _by_butterflies(wide, scale)
    return flat.reshape(x.shape).to(x.dtype)


def _by_factors(x: Tensor, scale: float) -> Tensor:
    """Multiply by two Kronecker factors (three for sizes above 2048), each on its own axis."""
    size = x.shape[-1]
    bits = size.bit_length() - 1
    count = 2 if size <= 2048 else -(-bits // 7) if bits > 21 else 3
    sizes = [1 << (bits // count + (index < bits % count)) for index in range(count)]
    y = x.reshape(-1, sizes[-1]) @ sign_matrix(sizes[-1], x).mul(scale)
    inner = sizes[-1]
    for factor in reversed(sizes[:-1]):
        y = sign_matrix(factor, x) @ y.view(-1, factor, inner)
        inner *= factor
    return y


def _by_butterflies(x: Tensor, scale: float) -> Tensor:
    """Multiply by the innermost factor. Then replace rows a and b by a + b and a - b in place, over longer and longer rows."""
    size, many = x.shape[-1], x.numel() >= MIN_NUMBERS_FOR_HALF_FACTOR
    inner = FACTOR_SIZE // 2 if many else FACTOR_SIZE
    signs = sign_matrix(inner, x).mul(scale)
    y = x.reshape(-1, inner) @ (signs.T if many else signs)
    for piece in y.view(-1, size).split(max(NUMBERS_PER_PIECE // size, 1)) if y.numel() > NUMBERS_PER_PIECE else (y,):
        width = inner
        while width < size:
            first, second = piece.view(-1, 2, width).unbind(1)
            first.add_(second)
            torch.sub(first, second, alpha=2, out=second)
            width *= 2
    return y
