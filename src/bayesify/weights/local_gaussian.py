"""Local reparameterization: Gaussian weights that add their noise to a layer's output."""

from __future__ import annotations

from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor

from bayesify.maths.noise import Randomness
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

    def __new__(cls, mean: Tensor, variance: Tensor, noise: Randomness = None, name: str = "") -> Self:
        """A weight from its mean and variance."""
        return cls.wrap(mean.shape, mean, (mean, variance), (noise, name))

    def draw(self) -> Tensor:
        """Mean plus standard deviation times noise."""
        mean, variance = self.components_
        return mean + variance.sqrt() * self.normal(mean.shape, mean)

    def use(self) -> tuple[Tensor, ...]:
        """Mean and variance, for a rule that draws noise for each example."""
        self.check_unused()
        self.used_ = True
        return self.components_


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
    if x.ndim != 2 or not weight.is_local(x):
        return NotImplemented
    mean, variance = weight.use()
    bias_mean, bias_variance = bias.use() if isinstance(bias, LocalGaussian) else (bias, None)
    noise = weight.normal((len(x), mean.shape[0]), mean)
    if torch.is_autocast_enabled(x.device.type) or transforming():
        output = F.linear(x, mean, bias_mean)
        spread = F.linear(x.square(), variance, bias_variance)
        return output + _away_from_zero(spread).sqrt() * noise.to(output.dtype)
    drawn: Tensor = _LocalLinear.apply(x, mean, variance, bias_mean, bias_variance, noise)[0]
    return drawn
