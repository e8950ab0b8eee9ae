"""Parts that all regressions on pseudo-outputs share: the prior's scale by layer, and the precision of pseudo-outputs."""

import os
from collections.abc import Mapping, Sequence
from typing import Any, Self

import torch
from torch import Tensor

from bayesify.maths.constraints import tril
from bayesify.maths.gamma import widened
from bayesify.maths.torch_versions import cpu_float32_precisions
from bayesify.posteriors.common.base import Posterior
from bayesify.priors import PriorDraw
from bayesify.weights.catalog import Layer

NEGLIGIBLE_LOG_PRECISION = -60.0
"""Log precision at which pseudo-outputs are negligible compared with the prior in double precision."""
NETWORK_PRECISION = 300.0
r"""Precision $\lambda$, times the number of positions, of pseudo-outputs that start at the network's outputs. Suppose
that there are as many inducing inputs as columns, that outputs under the prior have variance 1, and that the network's
weights come from the prior. At the inducing inputs, the outputs of q's mean then differ from the network's outputs by
at most $1 / (2 \sqrt{\lambda})$ (root mean square, one layer). The outputs of draws from q scatter by at most
$1 / \sqrt{\lambda}$."""

MAX_ROUNDING_ERROR = 5e-4
"""Largest estimated error of float32 in a regression, in units of the prior. Measured errors are at most a tenth of this."""


def exact_float32(like: Tensor) -> bool:
    """Whether a tensor is on a CPU on which float32 matrix products have full float32 precision."""
    if like.device.type != "cpu" or torch.is_autocast_enabled("cpu"):
        return False
    names = cpu_float32_precisions()
    names += [os.environ.get(f"{library}_DEFAULT_FPMATH_MODE", "none").lower() for library in ("DNNL", "ONEDNN")]
    return all(name in ("none", "ieee", "strict") for name in names)


class PriorScale:
    r"""Products of rows with the matrix T or its transpose, where $T T^\top$ is the prior's covariance of one row of a layer's
    matrix `[W b]`.

    T is diagonal; for a kernel whose positions are correlated in the prior, T is block diagonal, with one block per input
    channel. T is made once, in float64. If the data determine the weights, two gradients with respect to T cancel each other: the
    gradient through the features and the gradient through the weights. These gradients must therefore be added in float64.

    `batched` is a dict with those scales and factors of the prior that differ between draws; each is a tensor [S, ...].
    """

    def __init__(self, prior: PriorDraw, layers: Sequence[Layer], num_draws: int) -> None:
        self.fixed: dict[str, float | Tensor] = {}
        self.batched: dict[str, Tensor] = {}
        self.made: dict[str, Tensor] = {}
        for weight in (weight for layer in layers for weight in layer.weights):
            for kind, value in (("std", prior.std[weight.name]), ("factor", prior.factor.get(weight.name))):
                value = widened(value) if isinstance(value, Tensor) else value
                if isinstance(value, Tensor) and value.ndim:
                    self.batched[f"{kind} {weight.name}"] = value.expand(num_draws, *value.shape[1:])
                elif value is not None:
                    self.fixed[f"{kind} {weight.name}"] = value

    def at(self, values: Mapping[str, Tensor]) -> Self:
        """The scale of one draw. `values` contains the entries of `batched` for this draw."""
        one = object.__new__(type(self))
        one.fixed, one.batched, one.made = {**self.fixed, **values}, {}, {}
        return one

    def first(self) -> Self:
        """The scale of the first draw."""
        return self.at({key: value[0] for key, value in self.batched.items()})

    def aligned(self) -> Self:
        """The scales [S, 1, 1, 1] and factors [S, 1, 1, K, K] of all draws, shaped to multiply rows [S, G, R, D]."""

        def align(key: str, value: Tensor) -> Tensor:
            return value.view(-1, 1, 1, 1) if key.startswith("std") else value[:, None, None]

        return self.at({key: align(key, value) for key, value in self.batched.items()})

    def pull(self, layer: Layer, rows: Tensor) -> Tensor:
        """Rows times T, [..., D]."""
        return self._times(layer, rows, transposed=False)

    def push(self, layer: Layer, rows: Tensor) -> Tensor:
        r"""Rows times $T^\top$, [..., D]. This turns whitened weights into weights."""
        return self._times(layer, rows, transposed=True)

    def _times(self, layer: Layer, rows: Tensor, transposed: bool) -> Tensor:
        stds = [self.fixed[f"std {weight.name}"] for weight in layer.weights]
        factors: list[Any] = [self.fixed.get(f"factor {weight.name}") for weight in layer.weights]
        first = stds[0]
        alike = (std is first or (isinstance(std, float) and isinstance(first, float) and std == first) for std in stds)
        if all(factor is None for factor in factors) and all(alike):
            return rows * first
        if any(factor is not None and factor.is_cuda and factor.ndim == 2 for factor in factors):
            matrix = self._matrix(layer, stds, factors)  # few large operations instead of many small ones
            return rows.to(matrix.dtype) @ (matrix.mT if transposed else matrix)
        parts = []
        widths = [weight.matrix_shape[1] for weight in layer.weights]
        for part, std, factor in zip(rows.split(widths, -1), stds, factors, strict=True):
            if factor is not None:
                blocks = part.to(factor.dtype).unflatten(-1, (-1, factor.shape[-1]))
                part = (blocks @ (factor.mT if transposed else factor)).flatten(-2)
            parts.append(part * std)
        batch = torch.broadcast_shapes(*(part.shape[:-1] for part in parts))
        return torch.cat([part.expand(*batch, -1) for part in parts], -1)

    def _matrix(self, layer: Layer, stds: Sequence[Any], factors: Sequence[Any]) -> Tensor:
        """T as one matrix, [D, D], made once per draw."""
        if layer.name not in self.made:
            like = next(factor for factor in factors if factor is not None)
            blocks = []
            for weight, std, factor in zip(layer.weights, stds, factors, strict=True):
                block = like.new_ones(1, 1) if factor is None else factor
                eye = torch.eye(weight.matrix_shape[1] // len(block), dtype=like.dtype, device=like.device)
                blocks.append(torch.kron(eye, block * std))
            self.made[layer.name] = torch.block_diag(*blocks) if len(blocks) > 1 else blocks[0]
        return self.made[layer.name]


def typical_scale(posterior: Posterior) -> PriorScale:
    """The scale of a posterior's own prior. If the prior draws its scales, the means of these scales are used."""
    assert posterior.bound_prior is not None
    return PriorScale(posterior.bound_prior, posterior.layers, 1).first()


class HalfPrecision:
    r"""A function that multiplies a tensor by $\Lambda^{1/2}$ along its first axis, which has length M.

    If $\Lambda$ is diagonal, `log_diagonal` contains the logarithms of its diagonal, and `numbers` contains the square roots of
    its diagonal, [M] each. If $\Lambda = C C^\top$ is a full matrix, the function multiplies by $C^\top$. `lower` contains the
    strictly lower entries of C, and softplus maps `raw_diagonal` to the diagonal of C, [M].
    """

    def __init__(
        self, log_diagonal: Tensor | None = None, lower: Tensor | None = None, raw_diagonal: Tensor | None = None
    ) -> None:
        self.numbers = None if log_diagonal is None else (0.5 * log_diagonal).exp()
        self.factor = None if lower is None or raw_diagonal is None else tril(lower, raw_diagonal)

    def __call__(self, value: Tensor) -> Tensor:
        if self.numbers is not None:
            return value * self.numbers.view(-1, *[1] * (value.ndim - 1))
        assert self.factor is not None
        return (self.factor.mT @ value.reshape(len(self.factor), -1)).view(value.shape)
