"""Local reparameterization: Gaussian weights that add their noise to a layer's output."""

from __future__ import annotations

import math
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor

from bayesify.maths.noise import Randomness, standard_normal
from bayesify.maths.signatures import known_signature
from bayesify.maths.value_checks import transforming
from bayesify.weights.structured import LocalWeight


class LocalGaussian(LocalWeight):
    r"""A Gaussian weight whose noise is drawn for each example at the output of a linear map.

    For independent $W_{ij} \sim \mathcal{N}(m_{ij}, s_{ij}^2)$ the output $y = W x + b$ of one example is Gaussian with
    independent entries $\mathcal{N}(m x + m_b, s^2 x^2 + s_b^2)$; drawing $y$ instead of $W$ has less variance in
    training (Kingma et al. 2015, eq. 6). It keeps each example's marginal and destroys the joint over examples, so it
    serves the training objective only. That holds for a linear map that sees each example once: inputs [B, d_in] in one call. A
    layer with positions (sequences, convolutions), one that sees other rows than the batch's, and any other function get one
    plain draw of the weight; one that is called again raises `UsedAgain`, upon which the objective is computed once more with a
    plain draw.

    Shapes:
        mean, variance: the weight's, or with a leading axis of draws.
    """

    mean_: Tensor
    variance_: Tensor
    noise_: Randomness
    materialized_: Tensor | None

    def __new__(cls, mean: Tensor, variance: Tensor, noise: Randomness = None, name: str = "") -> Self:
        """A weight from its mean and variance."""
        weight = cls.wrap(mean.shape, mean)
        weight.mean_, weight.variance_, weight.noise_ = mean, variance, noise
        weight.materialized_ = None
        return weight.start(name)

    def components(self) -> tuple[Tensor, ...]:
        """Mean and variance."""
        return self.mean_, self.variance_

    def static(self) -> Any:
        """The source of noise and the name."""
        return self.noise_, self.name_

    @classmethod
    def from_components(cls, components: list[Tensor], static: Any) -> Self:
        """From mean and variance."""
        mean, variance = components
        return cls(mean, variance, *static)

    def materialize(self) -> Tensor:
        """One draw of the weight, the same for all examples and in every use (a cell uses its weights at each step)."""
        self.check_unused()
        if self.materialized_ is None:
            self.materialized_ = self.mean_ + self.variance_.sqrt() * _noise(self.mean_, self.noise_)
        return self.materialized_


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
        ctx.save_for_backward(x, mean, variance, bias_variance, *output[1:])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        x, mean, variance, bias_variance, slope, squares = ctx.saved_tensors
        grad = grads[0]
        if torch.is_grad_enabled():  # to be differentiated again, where what was kept would count as constant
            squares = x.square()
            std = F.linear(squares, variance, bias_variance).clamp_min(torch.finfo(x.dtype).tiny).sqrt()
            slope = (slope * std).detach() / std
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


@LocalGaussian.rule(F.linear)
def _linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    if not isinstance(weight, LocalGaussian) or isinstance(x, LocalGaussian):
        return NotImplemented
    if x.ndim != 2 or x.shape[0] != weight.examples_ or weight.materialized_ is not None:
        return NotImplemented
    weight.check_unused()
    weight.used_ = True
    bias_mean, bias_variance = bias, None
    if isinstance(bias, LocalGaussian):
        bias.check_unused()
        bias.used_ = True
        bias_mean, bias_variance = bias.mean_, bias.variance_
    size = (len(x), weight.mean_.shape[0])
    noise = standard_normal(math.prod(size), weight.mean_, weight.noise_).view(size)
    if torch.is_autocast_enabled(x.device.type) or transforming():
        mean = F.linear(x, weight.mean_, bias_mean)
        variance = F.linear(x.square(), weight.variance_, bias_variance)
        return mean + _away_from_zero(variance).sqrt() * noise.to(mean.dtype)
    output: Tensor = _LocalLinear.apply(x, weight.mean_, weight.variance_, bias_mean, bias_variance, noise)[0]
    return output
