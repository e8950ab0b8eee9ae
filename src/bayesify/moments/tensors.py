"""Tensors that carry means and variances through a network in the place of numbers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Self

import torch
from torch import Tensor

from bayesify.weights.structured import StructuredWeight


class NoRule(Exception):
    """A function has no rule for means and variances.

    Args:
        reason: Which, and why, in words.
    """


@dataclass
class Pass:
    """What one pass through the network counts: products of the plain network, and of the moments, for a whole batch."""

    plain: float = 0.0
    spent: float = 0.0
    used: set[str] = field(default_factory=set)


@dataclass(frozen=True)
class Origin:
    r"""How units [B, O] came from others: by a linear map, $\delta y = M\,\delta h + \text{own}$, or by an elementwise function,
    $\delta y = g\,\delta h + \dots$

    Args:
        input: h; nothing where the input is a plain tensor.
        weight: M, [O, I].
        own: Variance of what the weights' noise added, [B, O], independent between units.
        gain: g, [B or 1, O or 1], in place of these.
    """

    input: Moments | None
    weight: Tensor | None = None
    own: Any = None
    gain: Tensor | None = None


class Moments(StructuredWeight):
    r"""Means and variances of random weights or units.

    Weights are independent. Of units it is assumed that those of one channel vary together over positions, and that channels vary
    independently: $\delta h_{bcp} = \sqrt{v_{bcp}}\,\varepsilon_{bc}$. One kernel moves all positions of its channel, so
    independent positions would average out in pooling what in truth stays.

    Args:
        mean: [B, ...].
        variance: As the mean.
        channels: For each axis: 0 where its entries vary together (positions), n where they are channels, in blocks of n
            that vary together.
        origin: How they came from other units, where that is known and those are [B, I].
        pass_: For weights, the pass they are for.
        name: For weights.
    """

    mean_: Tensor
    variance_: Tensor
    channels_: tuple[int, ...]
    origin_: Origin | None
    pass_: Pass | None
    name_: str

    def __new__(
        cls,
        mean: Tensor,
        variance: Tensor,
        channels: tuple[int, ...] = (),
        origin: Origin | None = None,
        pass_: Pass | None = None,
        name: str = "",
    ) -> Self:
        """From means and variances."""
        channels = channels or (0,) * (mean.ndim - 1) + (1,)
        made = cls.wrap(mean.shape, mean, (mean, variance), (channels, None, pass_, name))
        made.mean_, made.variance_, made.origin_ = mean, variance, origin
        made.channels_, made.pass_, made.name_ = channels, pass_, name
        return made

    def materialize(self) -> Tensor:
        """There is no plain tensor that it stands for."""
        raise NoRule("a plain tensor is needed")

    @classmethod
    def fallback(cls, func: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
        """A function without a rule is refused."""
        name = getattr(func, "__name__", str(func))
        raise NoRule(f"{name} has no rule for means and variances")

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        """What torch does below its functions, such as `weight.T`, is refused too."""
        return cls.fallback(func.overloadpacket, args, kwargs)

    def like(self, mean: Tensor, variance: Tensor, gain: Tensor | None = None) -> Moments:
        """Units of the same shape and layout.

        Args:
            mean: Theirs.
            variance: Theirs.
            gain: By what an elementwise function multiplies small changes, where it is one.
        """
        origin = None
        if gain is not None and self.mean_.ndim == 2 and self.origin_ is not None:
            origin = Origin(self, gain=torch.atleast_2d(gain))
        return Moments(mean, variance, self.channels_, origin)


def moments_of(value: Tensor | None) -> tuple[Any, Any]:
    """Mean and variance; nothing for the variance of a plain tensor."""
    if isinstance(value, Moments):
        return value.mean_, value.variance_
    return value, None


def channels_last(maps: Tensor) -> Tensor:
    """Maps [B, C, H, W] with channels last in memory, on a processor, where pooling and convolutions are faster."""
    if maps.ndim != 4 or maps.device.type != "cpu" or maps.stride(1) == 1:
        return maps
    return torch.empty_like(maps, memory_format=torch.channels_last).copy_(
        maps
    )  # `contiguous` leaves one channel alone


MAX_PIECE_UNITS = 2**17
"""Units at a time on a processor: what a step makes on its way stays in its second cache, in memory that the next piece uses again;
whole maps would take new memory for each step, whose pages cost more than the step."""


def in_pieces(step: Callable[..., tuple[Tensor, ...]], *units: Tensor | None) -> tuple[Tensor, ...]:
    """What a step makes of each example's own units: of a few examples at a time, on a processor.

    Args:
        step: Takes tensors with examples on their first axis, and returns such.
        units: Its arguments; nothing stays nothing.
    """
    first = next(part for part in units if part is not None)
    rows = max(1, MAX_PIECE_UNITS * len(first) // max(1, first.numel()))
    if first.device.type != "cpu" or rows >= len(first):
        return step(*units)
    pieces = [[None] * -(-len(first) // rows) if part is None else part.split(rows) for part in units]
    wholes: tuple[Tensor, ...] = ()
    for index, parts in enumerate(zip(*pieces, strict=True)):
        made = step(*parts)
        if not wholes:
            wholes = tuple(_longer(part, len(first)) for part in made)
        for whole, part in zip(wholes, made, strict=True):
            whole[index * rows : (index + 1) * rows] = part  # a piece's own memory is used again for the next
    return wholes


def _longer(part: Tensor, rows: int) -> Tensor:
    """Memory for more examples, with channels last where a part has them so."""
    last = part.ndim == 4 and part.stride(1) == 1
    form = torch.channels_last if last else torch.contiguous_format
    return torch.empty(rows, *part.shape[1:], dtype=part.dtype, device=part.device, memory_format=form)


def use(weight: Any) -> None:
    """Note that a weight is used.

    Raises:
        NoRule: If it was before: two uses of one weight are not independent.
    """
    if isinstance(weight, Moments) and weight.pass_ is not None:
        if weight.name_ in weight.pass_.used:
            raise NoRule(f"{weight.name_} is used more than once in a pass, and its uses are not independent")
        weight.pass_.used.add(weight.name_)
