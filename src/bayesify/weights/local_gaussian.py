"""Local reparameterisation: Gaussian weights that add their noise to a layer's output."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor

from bayesify.maths.noise import Randomness, standard_normal
from bayesify.maths.signatures import known_signature
from bayesify.maths.value_checks import transforming
from bayesify.weights.structured import StructuredWeight


class LocalGaussian(StructuredWeight):
    r"""A Gaussian weight whose noise is drawn for each example at the output of a linear map.

    For independent $W_{ij} \sim \mathcal{N}(m_{ij}, s_{ij}^2)$ the output $y = W x + b$ of one example is Gaussian with
    independent entries $\mathcal{N}(m x + m_b, s^2 x^2 + s_b^2)$; drawing $y$ instead of $W$ has less variance in
    training (Kingma et al. 2015, eq. 6). It keeps each example's marginal and destroys the joint over examples, so it
    serves the training objective only. Linear maps and convolutions follow this rule; anything else gets one
    plain draw of the weight.

    Shapes:
        mean, variance: the weight's, or with a leading axis of draws.
    """

    batchable = False
    mean_: Tensor
    variance_: Tensor
    noise_: Randomness
    formed_: Tensor | None

    def __new__(cls, mean: Tensor, variance: Tensor, noise: Randomness = None) -> Self:
        """A weight from its mean and variance."""
        weight = cls.wrap(mean.shape, mean)
        weight.mean_, weight.variance_, weight.noise_ = mean, variance, noise
        weight.formed_ = None
        return weight

    def components(self) -> tuple[Tensor, ...]:
        """Mean and variance."""
        return self.mean_, self.variance_

    def static(self) -> Any:
        """The source of noise."""
        return self.noise_

    @classmethod
    def from_components(cls, components: list[Tensor], static: Any) -> Self:
        """From mean and variance."""
        mean, variance = components
        return cls(mean, variance, static)

    def materialize(self) -> Tensor:
        """One draw of the weight, the same for all examples and in every use (a cell uses its weights at each step)."""
        if self.formed_ is None:
            self.formed_ = self.mean_ + self.variance_.sqrt() * _noise(self.mean_, self.noise_)
        return self.formed_


def _noise(like: Tensor, noise: Randomness) -> Tensor:
    return standard_normal(like.numel(), like, noise).view(like.shape)


@known_signature
class _LocalLinear(torch.autograd.Function):
    """Mean plus standard deviation times noise of a linear map's output, in as few passes as it takes."""

    @staticmethod
    def forward(
        x: Tensor, mean: Tensor, variance: Tensor, bias_mean: Tensor | None, bias_variance: Tensor | None, noise: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        squares = x.square()
        output = F.linear(x, mean, bias_mean)
        std = _away_from_zero(F.linear(squares, variance, bias_variance)).sqrt_()
        return output.addcmul_(std, noise), noise.div(std).mul_(0.5), squares

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        x, mean, variance, bias_mean, bias_variance, _ = inputs
        ctx.mark_non_differentiable(*output[1:])
        ctx.biases = (bias_mean is not None, bias_variance is not None)
        ctx.save_for_backward(x, mean, variance, *output[1:])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        x, mean, variance, slope, squares = ctx.saved_tensors
        grad = grads[0]
        grad_variance = grad * slope
        grad_x = None
        if ctx.needs_input_grad[0]:
            grad_x = torch.addcmul(grad @ mean, x, grad_variance @ variance, value=2)
        rows, rows_variance = grad.flatten(0, -2), grad_variance.flatten(0, -2)
        return (
            grad_x,
            rows.T @ x.flatten(0, -2),
            rows_variance.T @ squares.flatten(0, -2),
            rows.sum(0) if ctx.biases[0] else None,
            rows_variance.sum(0) if ctx.biases[1] else None,
            None,
        )


def _away_from_zero(variance: Tensor) -> Tensor:
    """Where all inputs are 0 so is the variance, and its root has no gradient."""
    return variance.clamp_min_(torch.finfo(variance.dtype).tiny)


def _moments_of(bias: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
    return (bias.mean_, bias.variance_) if isinstance(bias, LocalGaussian) else (bias, None)


@LocalGaussian.rule(F.linear)
def _linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    if not isinstance(weight, LocalGaussian) or isinstance(x, LocalGaussian):
        return NotImplemented
    size = (*x.shape[:-1], weight.mean_.shape[0])
    if torch.is_autocast_enabled(x.device.type) or x.ndim < 2 or transforming():
        return _by_autograd(F.linear)(x, weight, bias)
    noise = standard_normal(math.prod(size), weight.mean_, weight.noise_).view(size)
    output: Tensor = _LocalLinear.apply(x, weight.mean_, weight.variance_, *_moments_of(bias), noise)[0]
    return output


def _by_autograd(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """The rule for any function that is linear in its weight and adds a bias."""

    def rule(x: Tensor, weight: Tensor, bias: Tensor | None = None, *args: Any, **kwargs: Any) -> Tensor:
        if not isinstance(weight, LocalGaussian) or isinstance(x, LocalGaussian):
            return NotImplemented
        bias_mean, bias_variance = _moments_of(bias)
        mean = function(x, weight.mean_, bias_mean, *args, **kwargs)
        variance = function(x.square(), weight.variance_, bias_variance, *args, **kwargs)
        return mean + _away_from_zero(variance).sqrt() * _noise(mean, weight.noise_)

    return rule


for _function in (F.conv1d, F.conv2d, F.conv3d, F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d):
    LocalGaussian.rule(_function)(_by_autograd(_function))
