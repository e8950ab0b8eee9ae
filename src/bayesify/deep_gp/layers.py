"""Layers of a deep Gaussian process. A layer consists of a kernel, a distribution q over the layer's values at inducing inputs,
and a Gaussian process conditioned on these values."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from bayesify.maths.constraints import positive, raw_positive, raw_relative_tril, relative_tril
from bayesify.maths.gamma import widened
from bayesify.maths.kernels import MATERN, KernelScales, distances, squared_exponential_matrix
from bayesify.maths.noise import standard_normal
from bayesify.maths.positive_definite import inverse_and_log_det, linear_and_quadratic_forms, stable_cholesky


class Stationary(KernelScales):
    r"""Stationary kernel $k(x, x') = a^2 \kappa(r)$ with $r^2 = \sum_d (x_d - x'_d)^2 / \ell_d^2$, one lengthscale per input (ARD).

    $\kappa$ is the squared exponential $\exp(-r^2 / 2)$, or Matern of order 1/2, 3/2 or 5/2; see `KERNELS` for the names.
    By default, lengthscales start at $\sqrt D$, the typical distance between standardized inputs.

    Stored parameters, which softplus maps to positive values: `raw_lengthscale` [D] and `raw_amplitude` [].
    """

    def __init__(self, name: str, num_inputs: int, lengthscale: float | None = None, amplitude: float = 1.0) -> None:
        start = math.sqrt(num_inputs) if lengthscale is None else lengthscale
        super().__init__([start] * num_inputs, amplitude)
        self.name = name

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

    Stored parameters, which softplus maps to positive values: `raw_scale` [D] and `raw_bias` []. `amplitude` is the initial value
    of b. It is also the initial standard deviation of the linear part at a typical standardized input.
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


@dataclass(frozen=True)
class Conditional:
    r"""A layer's process $g = f - \text{skip}$, conditioned on its values at the inducing inputs U. Either a draw of these values
    is given, or they have the distribution q.

    $$ g(x) \sim \mathcal{N}\bigl(k(x, U)\, w,\; k(x, x) - k(x, U)\, G\, k(U, x)\bigr) $$

    If the values u at the inducing inputs are given, $w = K^{-1} u$ and $G = K^{-1}$.

    Args:
        layer: The layer whose kernel k is used.
        inputs: Inducing inputs U, [S, M, D], or [1, M, D] if all draws share them.
        weights: Weights w, [S, M, O] or [1, M, O].
        reduction: Matrices G, [S, O, M, M]; S is 1 if draws share them, and O is 1 if outputs share them.
    """

    layer: Layer
    inputs: Tensor
    weights: Tensor
    reduction: Tensor

    def moments(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and variance of g at each input.

        Args:
            x: Inputs, [S, B, D] or [1, B, D].

        Returns:
            Mean [S, B, O], and variance [S, B, O] or [S, B, 1]; S is 1 if nothing differs between draws.
        """
        cross = self.layer.kernel(self.inputs, x)  # [S, M, B]
        weights = self.weights
        shared = len(cross) < len(weights)  # if so, compute the draws as outputs of one product
        if shared:
            weights = weights.movedim(0, 1).flatten(1).unsqueeze(0)  # [1, M, S O]
        mean, reduced = linear_and_quadratic_forms(weights, self.reduction, cross)
        if shared:
            mean = mean[0].unflatten(-1, (len(self.weights), -1)).movedim(1, 0)  # [S, B, O]
        return mean, (self.layer.kernel.diagonal(x).unsqueeze(-1) - reduced.mT).clamp_min(0)


class Layer(nn.Module):
    """Base class of `GlobalLayer` and `LocalLayer`, with a kernel that all outputs share and a skip function."""

    def __init__(
        self,
        kernel: str,  # name of the kernel
        num_inputs: int,
        num_outputs: int,
        *,
        skip: Tensor | None,  # matrix W [D, O] of the mean function x W; `None` for a mean of 0
        lengthscale: float | None,  # initial lengthscale; see `Stationary`
        jitter: float,  # added to the diagonal of K, as a share of the diagonal's mean
        place: int,  # index of the layer, for error messages
        amplitude: float = 1.0,  # initial amplitude
    ) -> None:
        super().__init__()
        self.num_outputs, self.jitter, self.place = num_outputs, jitter, place
        self.kernel: Stationary | Linear = (
            Linear(num_inputs, amplitude)
            if kernel == "linear"
            else Stationary(kernel, num_inputs, lengthscale, amplitude)
        )
        self.skip_matrix: Tensor | None
        self.register_buffer("skip_matrix", skip)

    def skip(self, x: Tensor) -> Tensor | float:
        """`x W`, [..., O], or 0."""
        return 0.0 if self.skip_matrix is None else x @ self.skip_matrix.to(x.dtype)

    def covariance(self, inputs: Tensor, jitter: bool = True) -> Tensor:
        """Kernel matrix K [..., M, M] at inducing inputs [..., M, D], with the jitter on its diagonal."""
        kernel: Tensor = self.kernel(inputs, inputs)
        if not jitter:
            return kernel
        diagonal = kernel.diagonal(dim1=-2, dim2=-1)
        return kernel + torch.diag_embed((self.jitter * diagonal.mean(-1, keepdim=True)).expand_as(diagonal))

    def factorize(self, covariance: Tensor) -> tuple[Tensor, Tensor]:
        """Lower triangular L with L L^T = K, and its inverse: [..., M, M] each."""
        with self.naming():
            factor = stable_cholesky(covariance, self.what)
        eye = torch.eye(factor.shape[-1], dtype=factor.dtype, device=factor.device)
        return factor, torch.linalg.solve_triangular(factor, eye.expand_as(factor), upper=False)

    @property
    def what(self) -> str:
        """Name for the factorized matrix in warnings and error messages."""
        return f"DeepGP: layer {self.place}: the kernel matrix of the inducing inputs"

    @contextmanager
    def naming(self) -> Iterator[None]:
        """Replace the remedies in a factorization's error by remedies for a deep Gaussian process."""
        try:
            yield
        except ValueError as error:
            reason = str(error).split(";")[0]
            raise ValueError(
                f"{reason}; give fewer inducing inputs, inducing inputs that differ more, a larger jitter=, or a "
                "lower learning rate"
            ) from None


class GlobalLayer(Layer):
    r"""A layer whose inducing inputs are the previous layer's values at the previous layer's inducing inputs (Ober & Aitchison
    2021, eq. 22).

    $$ q(u | U_{l-1}) \propto \mathcal{N}(u; 0, K)\, \mathcal{N}(V; u, \Lambda^{-1}), \qquad K = K(U_{l-1}), $$

    for each output. This q is the posterior of a regression onto noisy pseudo-outputs V. All computations use $C = K +
    \Lambda^{-1}$, so that K is never inverted. With u integrated out, the process has $w = C^{-1} V$ and $G = C^{-1}$ (see
    `Conditional`). Its covariance at U is the paper's $\Sigma = K - K C^{-1} K$. Given the previous layers,

    $$ \mathrm{KL} = \tfrac12 \bigl[ O (\operatorname{tr} \Lambda^{-1} C^{-1} - M + \log\det C \Lambda)
       + \operatorname{tr} V^\top C^{-1} K C^{-1} V \bigr]. $$

    A draw is written in whitened form, $u = L v$ with $L L^\top = K$. Matheron's rule computes v from two standard
    normal matrices: $v = E_1 + L^\top C^{-1} (V - L E_1 - \Lambda^{-1/2} E_2)$. Given the draw, $w = L^{-\top} v$ and
    $G = L^{-\top} L^{-1}$.

    Stored parameters besides the kernel's: `pseudo_outputs` (V, unconstrained), and `log_precision` (logarithms of the
    diagonal of $\Lambda$, which all outputs share).

    Shapes:
        pseudo_outputs: [M, O]; log_precision: [M].

    Args:
        kernel: Name of the kernel.
        pseudo_outputs: Initial V.
        precision: Initial diagonal of $\Lambda$.
        num_inputs: Number of inputs D.
        more: Further arguments of `Layer`.
    """

    def __init__(self, kernel: str, pseudo_outputs: Tensor, precision: Tensor, num_inputs: int, **more: Any) -> None:
        super().__init__(kernel, num_inputs, pseudo_outputs.shape[-1], **more)
        self.pseudo_outputs = nn.Parameter(pseudo_outputs)
        self.log_precision = nn.Parameter(precision.log())

    def condition(self, inputs: Tensor) -> tuple[Conditional, Tensor]:
        """The process, with its values at the inducing inputs integrated out; and the KL of these values.

        Args:
            inputs: Values U of the previous layer at its inducing inputs, [S, M, D] or [1, M, D].

        Returns:
            The conditional, and the KL, [S] or [1].
        """
        covariance = self.covariance(inputs, jitter=False)
        inverse, weights, kl = self._regress(covariance)
        return Conditional(self, inputs, weights, inverse.unsqueeze(-3)), kl

    def draw(
        self, inputs: Tensor, num_draws: int, generator: torch.Generator | None
    ) -> tuple[Conditional, Tensor, Tensor]:
        """The process given a draw of its values at the inducing inputs.

        Args:
            inputs: Values U of the previous layer at its inducing inputs, [S, M, D] or [1, M, D].
            num_draws: Number of draws S.
            generator: Source of randomness.

        Returns:
            The conditional, the KL of each draw ([S] or [1]), and the values U of this layer, [S, M, O].
        """
        covariance = self.covariance(inputs)
        inverse, _, kl = self._regress(covariance)
        factor, factor_inverse = self.factorize(covariance)
        size = (num_draws, len(self.pseudo_outputs), 2 * self.num_outputs)
        first, second = standard_normal(math.prod(size), factor, generator).view(size).chunk(2, dim=-1)
        root = (-0.5 * widened(self.log_precision)).exp().unsqueeze(-1)  # Lambda^(-1/2)
        residual = widened(self.pseudo_outputs) - factor @ first - root * second
        values = first + factor.mT @ (inverse @ residual)  # v, [S, M, O]
        reduction = (factor_inverse.mT @ factor_inverse).unsqueeze(-3)
        given = Conditional(self, inputs, factor_inverse.mT @ values, reduction)
        return given, kl, self.skip(inputs) + factor @ values

    def _regress(self, covariance: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Compute C^-1 [S, M, M], C^-1 V [S, M, O] and the KL [S] from the kernel matrix K."""
        targets, log_precision = widened(self.pseudo_outputs), widened(self.log_precision)
        noise = (-log_precision).exp()
        with self.naming():
            inverse, diagonal, log_det = inverse_and_log_det(covariance + torch.diag(noise), self.what)
        weights = inverse @ targets
        shared = diagonal @ noise - len(targets) + log_det + log_precision.sum()
        fits = targets - noise.unsqueeze(-1) * weights  # K C^-1 V
        kl = 0.5 * (self.num_outputs * shared + (weights * fits).sum((-1, -2)))
        return inverse, weights, kl


class LocalLayer(Layer):
    r"""A layer with its own inducing inputs (Salimbeni & Deisenroth 2017), for doubly stochastic variational inference.

    For each output, q is a Gaussian $q(v_o) = \mathcal{N}(m_o, C_o C_o^\top)$ over whitened values v, where $u = L v$
    and $L L^\top = K(Z)$. With v integrated out, the process has $w = L^{-\top} m$ and $G_o = L^{-\top} (I - C_o
    C_o^\top) L^{-1}$ (see `Conditional`).

    Stored parameters besides the kernel's: `inducing_inputs` (Z), `mean_value` (m), `raw_diagonal` and `lower`. `raw_diagonal`
    and `lower` give $C = \operatorname{diag}(c)(I + N)$: softplus maps `raw_diagonal` to c, and `lower` contains the entries of
    N, row by row.

    Shapes:
        inducing_inputs: [M, D]; mean_value: [M, O]; raw_diagonal: [O, M]; lower: [O, M (M - 1) / 2].

    Args:
        kernel: Name of the kernel.
        inducing_inputs: Initial values of Z. The initial q(v) is the prior.
        num_outputs: Number of outputs O.
        more: Further arguments of `Layer`.
    """

    def __init__(self, kernel: str, inducing_inputs: Tensor, num_outputs: int, **more: Any) -> None:
        super().__init__(kernel, inducing_inputs.shape[-1], num_outputs, **more)
        size = len(inducing_inputs)
        self.inducing_inputs = nn.Parameter(inducing_inputs.clone())
        self.mean_value = nn.Parameter(inducing_inputs.new_zeros(size, num_outputs))
        self.raw_diagonal = nn.Parameter(inducing_inputs.new_full((num_outputs, size), raw_positive(1.0)))
        self.lower = nn.Parameter(inducing_inputs.new_zeros(num_outputs, size * (size - 1) // 2))

    @torch.no_grad()
    def start_at(self, pseudo_outputs: Tensor, precision: Tensor) -> LocalLayer:
        """Set q(v), in place, to the posterior given pseudo-outputs [M, O] with precisions [M]; see `GlobalLayer`."""
        factor, _ = self.factorize(self.covariance(widened(self.inducing_inputs)))
        weighted = widened(precision).unsqueeze(-1) * factor
        posterior = torch.linalg.inv(torch.eye(len(factor)).to(factor) + factor.mT @ weighted)
        self.mean_value.copy_(posterior @ weighted.mT @ widened(pseudo_outputs))
        self.set_covariance(0.5 * (posterior + posterior.mT))
        return self

    @torch.no_grad()
    def set_covariance(self, covariance: Tensor) -> None:
        """Set the covariance of q(v), in place, to the same matrix [M, M] for every output."""
        lower, raw_diagonal = raw_relative_tril(stable_cholesky(widened(covariance), self.what))
        self.raw_diagonal.copy_(raw_diagonal)
        self.lower.copy_(lower)

    def scale_tril(self) -> Tensor:
        """C of each output, [O, M, M], in float64 if the device supports it."""
        return relative_tril(widened(self.lower), widened(self.raw_diagonal))

    def condition(self) -> tuple[Conditional, Tensor]:
        """The process, with q(v) integrated out; and the KL of q(v), [1]."""
        inputs = widened(self.inducing_inputs).unsqueeze(0)
        _, inverse = self.factorize(self.covariance(inputs))
        factor, mean = self.scale_tril(), widened(self.mean_value)
        log_det = factor.diagonal(dim1=-2, dim2=-1).log().sum()
        kl = 0.5 * (factor.square().sum() + mean.square().sum() - mean.numel()) - log_det
        spread = factor.mT @ inverse  # C^T L^-1, [O, M, M]
        reduction = (inverse.mT @ inverse - spread.mT @ spread).unsqueeze(0)
        return Conditional(self, inputs, inverse.mT @ mean, reduction), kl.reshape(1)
