"""Student-t noise: Gaussian in the middle, with heavy tails for outliers."""

from collections.abc import Sequence
from typing import Annotated

import torch
from torch import Tensor

from bayesify.arguments.checks import Positive, Range, Share, checked
from bayesify.likelihoods.base import NumberLikelihood
from bayesify.predictive.families.student_t import STUDENT_T


class StudentT(NumberLikelihood):
    r"""Noise with heavy tails: $y = f + s\,t_\nu$, where t has $\nu$ degrees of freedom.

    $$ \log p(y | f) = \log \frac{\Gamma(\frac{\nu + 1}2)}{\Gamma(\frac\nu2) \sqrt{\nu \pi}\, s}
       - \frac{\nu + 1}2 \log\Bigl(1 + \frac{(y - f)^2}{\nu s^2}\Bigr) $$

    The scale s is one number, or one number per output, unless the network predicts it for each example. If the network predicts
    the scale, the network's last axis holds O locations, then O values $f_v = \log s^2$, which are clipped to [-20, 20]. All
    outputs share the degrees of freedom, which are above 2 so that the variance $s^2 \nu / (\nu - 2)$ is finite. The Fisher
    matrix in $(f, f_v)$ is $\operatorname{diag}\bigl(\frac{\nu + 1}{(\nu + 3) s^2}, \frac{\nu}{2 (\nu + 3)}\bigr)$. Targets are
    [B, O]. The scale is the softplus of `raw_scale`, and $\nu - 2$ is the softplus of `raw_degrees`. Both raw values are
    parameters if they are learned.

    If the network predicts the scale, gradients of `objective` are weighted by $(s^2 / \bar s^2)^\beta$; see
    `HeteroscedasticGaussian`. The common scale $\bar s$ is then one learned number.

    Args:
        scale: Initial s: a number for all outputs, one number per output, or `None` if the network predicts it.
        degrees: Initial $\nu$.
        learn: Whether to train scale and degrees.
        beta: Exponent $\beta$ of the gradients' weights. The value 0 gives the plain likelihood.

    Raises:
        ValueError: If a scale is not positive and finite, or if `degrees` is not above 2.
    """

    name = "student_t"
    family = STUDENT_T
    parts = "a location"

    @checked
    def __init__(
        self,
        scale: Positive | Sequence[Positive] | Tensor | None = 0.3,
        degrees: Annotated[float, Range(above=2)] = 5.0,
        learn: bool = True,
        beta: Share = 0.5,
    ) -> None:
        super().__init__()
        self._scale = None if scale is None else self._store("scale", scale, learn)
        self._degrees, self._learn, self._beta = float(degrees), learn, beta
        if scale is None:
            self.outputs_per_target, self.parts = 2, "a location and a logarithm of the squared scale"
        if scale is None and beta:
            self._store("noise", 1.0, True)
        self._store("degrees", float(degrees) - 2, learn)

    @property
    def scale(self) -> Tensor | None:
        """The scale s, a scalar or [O]; `None` if the network predicts it."""
        return None if self._scale is None else self._stored("scale")

    @property
    def degrees(self) -> Tensor:
        r"""$\nu$, a scalar."""
        return 2 + self._stored("degrees")

    def numbers(self) -> dict[str, Tensor]:
        return {"degrees": self.degrees} | ({} if self.scale is None else {"scale": self.scale})

    @staticmethod
    def split(outputs: Tensor, **numbers: Tensor) -> tuple[Tensor, ...]:
        """Locations, squared scales and degrees."""
        degrees = numbers["degrees"].to(outputs)
        if "scale" in numbers:
            return outputs, numbers["scale"].to(outputs).square(), degrees
        location, log_square = outputs.chunk(2, dim=-1)
        return location, log_square.clamp(-20, 20).exp(), degrees

    def fisher(self, outputs: Tensor) -> Tensor:
        r"""$\operatorname{diag}((\nu + 1) / ((\nu + 3) s^2), \nu / (2 \nu + 6))$; the second entry exists only if the
        network predicts s."""
        location, square, degrees = self.components(outputs)
        entries = ((degrees + 1) / ((degrees + 3) * square)).expand_as(location)
        if self._scale is None:
            entries = torch.cat((entries, (degrees / (2 * degrees + 6)).expand_as(location)), dim=-1)
        return torch.diag_embed(entries)
