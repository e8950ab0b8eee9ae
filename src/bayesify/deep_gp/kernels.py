"""Kernels with a learned amplitude and learned lengthscales. Each layer of a deep Gaussian process has one kernel."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from bayesify.maths.constraints import positive, raw_positive
from bayesify.maths.gamma import widened
from bayesify.maths.kernels import MATERN, distances, squared_exponential_matrix


class Stationary(nn.Module):
    r"""Stationary kernel $k(x, x') = a^2 \kappa(r)$ with $r^2 = \sum_d (x_d - x'_d)^2 / \ell_d^2$, one lengthscale per input (ARD).

    $\kappa$ is the squared exponential $\exp(-r^2 / 2)$, or Matern of order 1/2, 3/2 or 5/2; see `KERNELS` for the names.
    By default, lengthscales start at $\sqrt D$, the typical distance between standardized inputs.

    Stored parameters: `raw_lengthscale`, [D], and `raw_amplitude`, [], which softplus maps to positive values.
    """

    def __init__(self, name: str, num_inputs: int, lengthscale: float | None = None, amplitude: float = 1.0) -> None:
        super().__init__()
        self.name = name
        start = math.sqrt(num_inputs) if lengthscale is None else lengthscale
        self.raw_lengthscale = nn.Parameter(torch.full((num_inputs,), raw_positive(start)))
        self.raw_amplitude = nn.Parameter(torch.tensor(raw_positive(amplitude)))

    @property
    def lengthscale(self) -> Tensor:
        r"""Lengthscales $\ell$, [D]."""
        return positive(self.raw_lengthscale)

    @property
    def amplitude(self) -> Tensor:
        """Amplitude a, a scalar."""
        return positive(self.raw_amplitude)

    def forward(self, x: Tensor, other: Tensor) -> Tensor:
        """Covariances: [..., N, D] and [..., M, D] -> [..., N, M], in the dtype of the inputs."""
        rate = positive(widened(self.raw_lengthscale)).to(x.dtype).reciprocal()
        amplitude = positive(widened(self.raw_amplitude)).to(x.dtype)
        left = x * rate
        right = left if other is x else other * rate
        if self.name == "squared_exponential":
            return squared_exponential_matrix(left, right, 2 * amplitude.log())
        return amplitude.square() * MATERN[self.name](distances(left, right))

    def diagonal(self, x: Tensor) -> Tensor:
        """Variances: [..., N, D] -> [..., N]."""
        return positive(widened(self.raw_amplitude)).to(x.dtype).square().expand(x.shape[:-1])

    def extra_repr(self) -> str:
        """Name and inputs."""
        return f"{self.name}, {self.raw_lengthscale.numel()} inputs"


class Linear(nn.Module):
    r"""Linear kernel $k(x, x') = b^2 + \sum_d s_d^2 x_d x'_d$: Bayesian linear regression on the layer's inputs.

    Stored parameters: `raw_scale`, [D], and `raw_bias`, [], which softplus maps to positive values. `amplitude` is the initial
    value of b. It is also the initial standard deviation of the linear part at a typical standardized input.
    """

    name = "linear"

    def __init__(self, num_inputs: int, amplitude: float = 1.0) -> None:
        super().__init__()
        self.raw_scale = nn.Parameter(torch.full((num_inputs,), raw_positive(amplitude / math.sqrt(num_inputs))))
        self.raw_bias = nn.Parameter(torch.tensor(raw_positive(amplitude)))

    def _scaled(self, x: Tensor) -> tuple[Tensor, Tensor]:
        scale, bias = (positive(widened(raw)).to(x.dtype) for raw in (self.raw_scale, self.raw_bias))
        return x * scale, bias.square()

    def forward(self, x: Tensor, other: Tensor) -> Tensor:
        """Covariances: [..., N, D] and [..., M, D] -> [..., N, M], in the dtype of the inputs."""
        (left, bias), (right, _) = self._scaled(x), self._scaled(other)
        return left @ right.mT + bias

    def diagonal(self, x: Tensor) -> Tensor:
        """Variances: [..., N, D] -> [..., N]."""
        scaled, bias = self._scaled(x)
        return scaled.square().sum(-1) + bias


KERNELS = ("squared_exponential", *MATERN, "linear")
"""Names of all kernels."""


def make_kernel(name: str, num_inputs: int, lengthscale: float | None, amplitude: float) -> Stationary | Linear:
    """The kernel with the given name."""
    if name == "linear":
        return Linear(num_inputs, amplitude)
    return Stationary(name, num_inputs, lengthscale, amplitude)
