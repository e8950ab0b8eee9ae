"""Local reparameterization: Gaussian weights that add their noise to a layer's output."""

from __future__ import annotations

from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor

from bayesify.maths.noise import Randomness
from bayesify.weights.structured import LocalWeight


class LocalGaussian(LocalWeight):
    r"""A Gaussian weight whose noise is drawn for each example at the output of a linear map.

    For independent $W_{ij} \sim \mathcal{N}(m_{ij}, s_{ij}^2)$, the output $y = W x + b$ of one example is Gaussian
    with independent entries $\mathcal{N}(m x + m_b, s^2 x^2 + s_b^2)$. Drawing $y$ instead of $W$ reduces the
    gradient's variance (Kingma et al. 2015, eq. 6). Each example keeps its marginal, but the joint distribution over
    examples is lost, so only the training objective uses this weight.

    The rule needs a linear map that sees each example once: inputs [B, d_in] in one call. Layers with positions (sequences,
    convolutions), layers whose rows are not the batch's examples, and all other functions get one plain draw of the weight. A
    second call of a layer raises `UsedAgain`, and the objective is then computed again with a plain draw.

    Shapes:
        mean, variance: the weight's shape, optionally with a leading axis of draws.
    """

    def __new__(cls, mean: Tensor, variance: Tensor, noise: Randomness = None, name: str = "") -> Self:
        """A weight from its mean and variance."""
        return cls.wrap(mean.shape, mean, (mean, variance), (noise, name))

    def times(self, factor: float) -> Self:
        """The weight multiplied by a number."""
        mean, variance = self.components_
        return self.from_components((mean * factor, variance * factor**2), self.static_)

    def draw(self) -> Tensor:
        """Mean plus standard deviation times noise."""
        mean, variance = self.components_
        return mean + variance.sqrt() * self.normal(mean.shape, mean)

    def use(self) -> tuple[Tensor, ...]:
        """Mean and variance, for a rule that draws noise for each example."""
        self.check_unused()
        self.used_ = True
        return self.components_


@LocalGaussian.rule(F.linear)
def _linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Any:
    if not isinstance(weight, LocalGaussian) or isinstance(x, LocalGaussian):
        return NotImplemented
    if x.ndim != 2 or not weight.is_local(x):
        return NotImplemented
    mean, variance = weight.use()
    bias_mean, bias_variance = bias.use() if isinstance(bias, LocalGaussian) else (bias, None)
    noise = weight.normal((len(x), mean.shape[0]), mean)
    output, spread = F.linear(x, mean, bias_mean), F.linear(x.square(), variance, bias_variance)
    # Clamp the variance: if all inputs are 0, the variance is 0, and its square root has no gradient.
    std = spread.clamp_min(torch.finfo(spread.dtype).tiny).sqrt()
    return torch.addcmul(output, std, noise.to(output.dtype))
