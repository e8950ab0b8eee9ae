"""Local reparameterisation: Gaussian weights that add their noise to a layer's output."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor

from bayesify.maths.noise import standard_normal
from bayesify.structured import StructuredWeight


class LocalGaussian(StructuredWeight):
    r"""A Gaussian weight whose noise is drawn for each example at the output of a linear map.

    For independent $W_{ij} \sim \mathcal{N}(m_{ij}, s_{ij}^2)$ the output $y = W x + b$ of one example is Gaussian with
    independent entries $\mathcal{N}(m x + m_b, s^2 x^2 + s_b^2)$; drawing $y$ instead of $W$ has less variance in
    training (Kingma et al. 2015, eq. 6). It keeps each example's marginal and destroys the joint over examples, so it
    serves the training objective only. Linear maps and convolutions follow this rule; anything else gets one
    plain draw of the weight.

    Shapes:
        mean, std: the weight's, or with a leading axis of draws.
    """

    batchable = False
    mean_: Tensor
    std_: Tensor
    generator_: torch.Generator | None

    def __new__(cls, mean: Tensor, std: Tensor, generator: torch.Generator | None = None) -> Self:
        """A weight from its mean and standard deviation."""
        weight = cls.wrap(mean.shape, mean)
        weight.mean_, weight.std_, weight.generator_ = mean, std, generator
        return weight

    def components(self) -> tuple[Tensor, ...]:
        """Mean and standard deviation."""
        return self.mean_, self.std_

    def static(self) -> Any:
        """The generator."""
        return self.generator_

    @classmethod
    def from_components(cls, components: list[Tensor], static: Any) -> Self:
        """From mean and standard deviation."""
        mean, std = components
        return cls(mean, std, static)

    def form(self) -> Tensor:
        """One draw of the weight, the same for all examples."""
        return self.mean_ + self.std_ * _noise(self.mean_, self.generator_)


def _noise(like: Tensor, generator: torch.Generator | None) -> Tensor:
    return standard_normal(like.numel(), like, generator).view(like.shape)


def _local(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """The rule for a function that is linear in its weight and adds a bias."""

    def rule(x: Tensor, weight: Tensor, bias: Tensor | None = None, *args: Any, **kwargs: Any) -> Tensor:
        if not isinstance(weight, LocalGaussian) or isinstance(x, LocalGaussian):
            return NotImplemented
        local_bias = isinstance(bias, LocalGaussian)
        bias_mean = bias.mean_ if isinstance(bias, LocalGaussian) else bias
        bias_var = bias.std_.square() if isinstance(bias, LocalGaussian) else None
        mean = function(x, weight.mean_, bias_mean, *args, **kwargs)
        variance = function(x.square(), weight.std_.square(), bias_var if local_bias else None, *args, **kwargs)
        # Where all inputs are 0 so is the variance, and its root has no gradient: keep it away from 0.
        std = variance.clamp_min(torch.finfo(variance.dtype).tiny).sqrt()
        return mean + std * _noise(mean, weight.generator_)

    return rule


for _function in (
    F.linear,
    F.conv1d,
    F.conv2d,
    F.conv3d,
    F.conv_transpose1d,
    F.conv_transpose2d,
    F.conv_transpose3d,
):
    LocalGaussian.rule(_function)(_local(_function))
