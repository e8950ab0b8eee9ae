"""Maps between unconstrained storage and positive or triangular quantities."""

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor


def positive(raw: Tensor, maximum: float | None = None) -> Tensor:
    r"""A positive number made from an unconstrained number x: softplus(x) or, with a maximum, $\text{maximum} \cdot
    \text{sigmoid}(x)$."""
    return F.softplus(raw) if maximum is None else maximum * torch.sigmoid(raw)


def raw_positive(value: float, maximum: float | None = None) -> float:
    """Inverse of `positive` for a single number: the raw value to store. Raises `ValueError` outside (0, `maximum`)."""
    limit = math.inf if maximum is None else maximum
    if not 0 < value < limit:
        raise ValueError(f"the start value {value} is not between 0 and {limit}; give a start value in this range")
    if maximum is not None:
        return math.log(value) - math.log(maximum - value)
    return value + math.log(-math.expm1(-value))  # log(exp(v) - 1), stable at both ends


def raw_softplus(value: Tensor) -> Tensor:
    """Inverse of softplus, elementwise."""
    return value + torch.log(-torch.expm1(-value))


def raw_positives(values: Sequence[float], like: Tensor, maximum: float | None = None) -> Tensor:
    """Raw values of several numbers, with the dtype and device of the tensor `like`: [len(values)]."""
    return like.new_tensor([raw_positive(value, maximum) for value in values])


def tril(packed: Tensor, raw_diagonal: Tensor) -> Tensor:
    """Cholesky factor [*batch, n, n], made from its strictly lower entries (see `strict_tril`) and from raw values [*batch, n]
    whose softplus is its diagonal."""
    return strict_tril(packed, raw_diagonal.shape[-1]) + torch.diag_embed(positive(raw_diagonal))


def strict_tril(packed: Tensor, n: int) -> Tensor:
    """Strictly lower triangular matrix [*batch, n, n], made from its entries [*batch, n (n - 1) / 2], row by row."""
    rows, cols = torch.tril_indices(n, n, -1, device=packed.device)
    flat = packed.new_zeros(*packed.shape[:-1], n * n).index_copy(-1, rows * n + cols, packed)
    return torch.unflatten(flat, -1, (n, n))


def relative_tril(relative: Tensor, raw_diagonal: Tensor) -> Tensor:
    r"""Cholesky factor $\operatorname{diag}(s) (I + N)$ [*batch, n, n], made from the entries of N (see `strict_tril`) and from
    raw values [*batch, n] whose softplus is s."""
    size = positive(raw_diagonal)
    return size.unsqueeze(-1) * strict_tril(relative, size.shape[-1]) + torch.diag_embed(size)


def raw_relative_tril(factor: Tensor) -> tuple[Tensor, Tensor]:
    """Inverse of `relative_tril` for one factor [n, n]: the entries of N, row by row, and the raw diagonal."""
    rows, cols = torch.tril_indices(len(factor), len(factor), -1, device=factor.device)
    return factor[rows, cols] / factor.diagonal()[rows], raw_softplus(factor.diagonal())
