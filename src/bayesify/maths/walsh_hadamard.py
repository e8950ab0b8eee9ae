r"""Matrices of the form $W = S_1 H \operatorname{diag}(g) H S_2$: products with vectors, entries, and the geometry of
the map from g to W (Rossi et al. 2020)."""

import math
from typing import Any

import torch
from torch import Tensor

from bayesify.maths.autograd_functions import Function
from bayesify.transforms import hadamard, hadamard_matrix


def multiply(x: Tensor, left: Tensor, g: Tensor, right: Tensor) -> Tensor:
    r"""The product $W x = s_1 \circ H (g \circ H (s_2 \circ x))$, computed without forming W, in O(D log D).

    All four arguments are [..., D]; `left` is $s_1$, and `right` is $s_2$.
    """
    return hadamard(hadamard(x * right) * g) * left


def dyadic_values(g: Tensor) -> Tensor:
    r"""The D distinct numbers $c = D^{-1/2} H g$ of $H \operatorname{diag}(g) H$, whose entry (i, j) is $c_{i \oplus j}$.

    The elementwise product of rows i and j of H is, up to a factor, row $i \oplus j$ (exclusive or): $H_{ik} H_{jk} =
    D^{-1/2} H_{i \oplus j, k}$. Both g and c are [..., D].
    """
    return hadamard(g) / math.sqrt(g.shape[-1])


def dyadic(c: Tensor) -> Tensor:
    r"""The matrix with $c_{i \oplus j}$ at row i and column j: [..., D] -> [..., D, D]."""
    result: Tensor = _Dyadic.apply(c, False)
    return result


def dyadic_sums(matrix: Tensor) -> Tensor:
    r"""Sums over all entries with the same $i \oplus j$: [..., D, D] -> [..., D]. As a linear map, this is the
    transpose of `dyadic`."""
    result: Tensor = _Dyadic.apply(matrix, True)
    return result


def materialize(left: Tensor, g: Tensor, right: Tensor) -> Tensor:
    """The matrix W itself, computed from `left`, `g` and `right`: [..., D] each -> [..., D, D], in O(D^2)."""
    return dyadic(dyadic_values(g)) * left.unsqueeze(-1) * right.unsqueeze(-2)


def _entries(c: Tensor) -> Tensor:
    size = c.shape[-1]
    # Two axes are 5 times faster than more axes.
    flat = c.reshape(-1, size).index_select(-1, _exclusive_or(size, c.device).view(-1))
    return flat.view(*c.shape, size)


def _sums(matrix: Tensor) -> Tensor:
    index = _exclusive_or(matrix.shape[-1], matrix.device)
    return matrix.gather(-1, index.expand(matrix.shape)).sum(-2)


class _Dyadic(Function):
    """The map from c to the matrix with entries c_{i ^ j} or, if `sums` is true, the transpose of this map. The gradient of each
    map is the other map, so the backward pass gathers entries instead of scattering them."""

    @staticmethod
    def forward(value: Tensor, sums: bool) -> Tensor:
        return _sums(value) if sums else _entries(value)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, bool], output: Tensor) -> None:
        ctx.sums = inputs[1]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return _Dyadic.apply(grads[0], not ctx.sums), None

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int, None], value: Tensor, sums: bool) -> tuple[Tensor, int]:
        return _Dyadic.apply(value.movedim(in_dims[0], 0), sums), 0


def _exclusive_or(size: int, device: torch.device) -> Tensor:
    """i ^ j at row i and column j, [D, D]."""
    index = torch.arange(size, device=device)
    return index.unsqueeze(-1) ^ index


def geometry(left: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
    r"""The map from g to W as a rotation followed by a scaling, $\operatorname{vec} W = L Q g$ (appendix B, equation 6).

    vec stacks columns. $Q = [H \operatorname{diag}(h_i)]_i$ has orthonormal columns: it rotates the D dimensions of g into
    the $D^2$ dimensions of W. L is diagonal, with $s^{(2)}_i s^{(1)}$ for column i. The arguments are $s_1$ and $s_2$, [D]
    each. The results are the diagonal of L, [D^2], and Q, [D^2, D].
    """
    signs = hadamard_matrix(left.shape[-1], left) / math.sqrt(left.shape[-1])
    rotation = signs * signs.unsqueeze(-2)  # [column of W, row of W, g]
    return (right.unsqueeze(-1) * left).flatten(), rotation.flatten(0, 1)


@torch.no_grad()
def nearest(matrix: Tensor, steps: int = 50, generator: torch.Generator | None = None) -> tuple[Tensor, Tensor, Tensor]:
    r"""Factors $s_1, g, s_2$ whose W is close to a matrix in the Frobenius norm (equation 7), found by alternating least squares.

    Given two of $s_1$, $c$ and $s_2$, the best third factor has a closed form, so the distance never grows. The initial $s_1$ and
    $s_2$ have random signs, because the problem has many optima. The matrix is [..., D, D], and the factors are [..., D]
    each. `steps` is the number of rounds over the three factors.
    """
    shape, where = matrix.shape[:-1], generator.device if generator is not None else matrix.device
    left, right = (
        torch.randint(2, shape, generator=generator, device=where).to(matrix).mul_(2).sub_(1) for _ in range(2)
    )
    tiny = torch.finfo(matrix.dtype).tiny
    c = torch.zeros_like(left)
    for _ in range(steps):
        outer = left.unsqueeze(-1) * right.unsqueeze(-2)
        # An autograd call would cost more than these few numbers.
        c = _sums(matrix * outer) / _sums(outer.square()).clamp_min(tiny)
        values = _entries(c)
        spread = values * right.unsqueeze(-2)
        left = (matrix * spread).sum(-1) / spread.square().sum(-1).clamp_min(tiny)
        spread = values * left.unsqueeze(-1)
        right = (matrix * spread).sum(-2) / spread.square().sum(-2).clamp_min(tiny)
        # Only the product of the three scales matters, so equalize them to keep each bounded.
        scale = [factor.square().mean(-1, keepdim=True).sqrt().clamp_min(tiny) for factor in (left, right)]
        left, right, c = left / scale[0], right / scale[1], c * scale[0] * scale[1]
    return left, hadamard(c) * math.sqrt(c.shape[-1]), right
