"""Gamma and Wishart distributions. A gamma distribution with shape a and rate b has mean a / b."""

import math

import torch
from torch import Tensor

from bayesify.maths.noise import Randomness, source_of, standard_normal
from bayesify.maths.positive_definite import inverse_from_factor


def draw_gamma(shape: Tensor, num_draws: int, generator: Randomness = None) -> Tensor:
    r"""Draws of $\mathrm{Gamma}(\text{shape}, 1)$, differentiable with respect to the shape. For a rate b, divide the draws by b.

    The draws come from torch's rejection sampler, which takes a generator. Their gradient is the implicit gradient
    (Figurnov et al. 2018), $-\partial_a F(x; a) / p(x; a)$, where F is the distribution function. It equals the gradient of
    $x = F^{-1}(u; a)$; torch approximates this gradient with a relative error below 5e-4. If the shape parameters a are [*shape],
    the result is [S, *shape].
    """
    return source_of(generator).gamma(shape.expand(num_draws, *shape.shape))


def gamma_kl(shape: Tensor, rate: Tensor, prior_shape: float, prior_rate: float) -> Tensor:
    r"""$\mathrm{KL}(\mathrm{Gamma}(a, b) \| \mathrm{Gamma}(a_0, b_0))$ in nats, elementwise.

    $$ (a - a_0) \psi(a) - \log \frac{\Gamma(a)}{\Gamma(a_0)} + a_0 \log \frac{b}{b_0} + a \frac{b_0 - b}{b} $$

    The computation uses float64 if the device supports it, because single terms reach millions of nats in large layers.
    """
    a, b = widened(shape), widened(rate)
    start = a.new_full((), prior_shape)
    gammas = torch.lgamma(start) - torch.lgamma(a)
    kl = (a - start) * torch.digamma(a) + gammas + start * (b / prior_rate).log() + a * (prior_rate / b - 1)
    return kl.to(shape.dtype)


def inverse_root_moments(shape: Tensor, rate: Tensor) -> tuple[Tensor, Tensor]:
    r"""Mean and variance of $x^{-1/2}$ under $\mathrm{Gamma}(a, b)$, elementwise, for $a > 1$.

    $$ \mathbb{E}[x^{-1/2}] = \sqrt b\, \frac{\Gamma(a - \tfrac12)}{\Gamma(a)}, \qquad \mathbb{E}[x^{-1}] = \frac{b}{a - 1} $$
    """
    a, b = widened(shape), widened(rate)
    mean = b.sqrt() * (torch.lgamma(a - 0.5) - torch.lgamma(a)).exp()
    return mean.to(shape.dtype), (b / (a - 1) - mean.square()).to(shape.dtype)


def widened(value: Tensor) -> Tensor:
    """The value in float64, if its device supports float64."""
    return value if value.device.type == "mps" else value.double()


def as_float(value: Tensor) -> Tensor:
    """The value in float32 or a wider type. In half precision, small differences of log-densities and sums would be
    lost."""
    return value.float() if value.dtype in (torch.float16, torch.bfloat16) else value


def bartlett(dof: Tensor, size: int, num_draws: int, generator: Randomness = None) -> Tensor:
    r"""Lower triangular A with $A A^\top \sim \mathcal{W}_K(I, n)$ (Bartlett 1933). Its entries are independent:

    $$ A_{ii}^2 \sim \chi^2_{n - i + 1} = 2\,\mathrm{Gamma}(\tfrac{n - i + 1}{2}, 1), \quad i = 1, \dots, K, \qquad
       A_{ij} \sim \mathcal{N}(0, 1), \quad i > j. $$

    If $T T^\top = V$, then $T A A^\top T^\top$ is a draw of $\mathcal{W}_K(V, n)$. Draws are differentiable with respect to the
    degrees of freedom n, which may be any numbers above K - 1 (see `draw_gamma`). Draws are [S, *batch, K, K], and n is [*batch].
    """
    halves = (dof.unsqueeze(-1) - torch.arange(size, dtype=dof.dtype, device=dof.device)) / 2
    diagonal = (2 * draw_gamma(halves, num_draws, generator)).sqrt()  # [S, *batch, K]
    shape = (*diagonal.shape, size)
    below = standard_normal(math.prod(shape), dof, generator).view(shape).tril(-1)
    return below + torch.diag_embed(diagonal)


def bartlett_mean(dof: Tensor, size: int) -> Tensor:
    r"""$\mathbb{E}[A]$ for the matrix A of `bartlett`. It is diagonal, with entries $\sqrt2\, \Gamma(\tfrac{n - i + 2}{2}) /
    \Gamma(\tfrac{n - i + 1}{2})$."""
    halves = (widened(dof).unsqueeze(-1) - torch.arange(size, dtype=widened(dof).dtype, device=dof.device)) / 2
    roots = math.sqrt(2) * (torch.lgamma(halves + 0.5) - torch.lgamma(halves)).exp()
    return torch.diag_embed(roots).to(dof.dtype)


def wishart_kl(precision: Tensor, dof: Tensor, prior_precision: float, prior_dof: float) -> Tensor:
    r"""$\mathrm{KL}(\mathcal{W}(\Psi^{-1}, n) \| \mathcal{W}((c I)^{-1}, n_0))$ in nats. It equals the KL of the inverse Wisharts
    $\mathcal{W}^{-1}(\Psi, n)$ and $\mathcal{W}^{-1}(c I, n_0)$.

    $$ \frac{n_0}{2} \log\det(\Psi / c) + \frac n2 (\operatorname{tr}(c \Psi^{-1}) - K)
       + \log \frac{\Gamma_K(n_0 / 2)}{\Gamma_K(n / 2)} + \frac{n - n_0}{2} \psi_K(n / 2) $$

    Here $\Gamma_K$ is the multivariate gamma function, and $\psi_K$ is the derivative of its logarithm. The precisions $\Psi$ are
    [*batch, K, K], and the degrees of freedom n are [*batch]. The computation uses float64 if the device supports it.
    """
    psi, n, size = widened(precision), widened(dof), precision.shape[-1]
    factor = torch.linalg.cholesky_ex(psi)[0]
    log_det = 2 * factor.diagonal(dim1=-2, dim2=-1).log().sum(-1) - size * math.log(prior_precision)
    trace = prior_precision * inverse_from_factor(factor).diagonal(dim1=-2, dim2=-1).sum(-1)
    steps = torch.arange(size, dtype=n.dtype, device=n.device)
    halves = (n.unsqueeze(-1) - steps) / 2
    start = (prior_dof - steps) / 2
    gammas = (torch.lgamma(start) - torch.lgamma(halves)).sum(-1)
    slope = 0.5 * (n - prior_dof) * torch.digamma(halves).sum(-1)
    found: Tensor = (0.5 * prior_dof * log_det + 0.5 * n * (trace - size) + gammas + slope).to(precision.dtype)
    return found
