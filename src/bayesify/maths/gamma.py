"""Gamma distributions, given by shape and rate: reparameterized draws, KL and the moments of inverse roots."""

from __future__ import annotations

import torch
from torch import Tensor

from bayesify.maths.noise import Randomness, source_of


def draw_gamma(shape: Tensor, num_draws: int, generator: Randomness = None) -> Tensor:
    r"""Draws of $\mathrm{Gamma}(\text{shape}, 1)$, differentiable with respect to the shape. For a rate b, divide the draws by b.

    The draws come from torch's rejection sampler, which takes a generator. Their gradient is the implicit gradient
    (Figurnov et al. 2018), $-\partial_a F(x; a) / p(x; a)$, where F is the distribution function. It equals the
    gradient of $x = F^{-1}(u; a)$. torch approximates it with a relative error below 5e-4. For shape parameters a in a
    tensor of any shape, the result is [S, *shape].
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
