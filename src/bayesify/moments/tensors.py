"""Tensors that contain means and variances instead of numbers, and that pass through a network."""

from __future__ import annotations

import inspect
import math
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor

from bayesify.moments.responses import Node, Noise, Plan, Spread, covariance, variances
from bayesify.weights.structured import StructuredWeight

Sources = frozenset[tuple[int, int, int]]
"""Noise sources. Each source is given by the order of its node and a range of channels (first, end)."""

EXACT, ESTIMATED, UNKNOWN = range(3)
"""These constants say how well the variances of a value's units are known. EXACT variances ignore only correlations between
channels. ESTIMATED variances use an average correlation between positions. UNKNOWN means that a value was combined with
itself."""


class NoRule(Exception):
    """Raised if a function has no rule for means and variances.

    Args:
        reason: Text that names the function and says why it is not supported.
    """


@dataclass
class Pass:
    """State of one pass through the network."""

    rows: int = 0  # number of examples
    used: set[str] = field(default_factory=set)
    units: dict[Any, Value] = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class Value:
    r"""Random units, and the sources of their noise.

    Channels are treated as independent. For the variances of functions of these units, all pairs of a channel's positions are
    assumed to have the same correlation within an example. The covariance of the outputs does not need this approximation (see
    `responses`).

    `channels` gives the kind of each axis: -1 for the batch, 0 for positions, and n > 0 for channels of n consecutive positions
    each. If the units are f(v) for other units v and a nondecreasing function f, `before` holds v and f. Maximum pooling
    can then be applied to v, before f. Two values whose `stem` attributes overlap are strongly correlated.
    """

    mean: Tensor  # [B, ...]
    variance: Tensor
    channels: tuple[int, ...]  # kind of each axis
    node: Node  # node of the units in the graph of responses
    together: Tensor  # correlation between neighboring positions, and between any two positions, [2, B]
    sources: Sources  # noise sources on which the units depend
    stem: Sources  # noise sources that the last linear maps added
    aligned: int = -1  # order of the last linear map's node, if the units are channels of this map
    lanes: Tensor | None = None  # for each unit, its channel in the last linear map, if channels are tracked
    doubt: int = EXACT  # how well the variances are known: `EXACT`, `ESTIMATED` or `UNKNOWN`
    base: Value | None = None  # units of which these units are an elementwise function
    chain: Callable[[Tensor], Tensor] | None = None  # the elementwise function from `base` to these units
    affine: bool = True  # whether the function is affine
    before: tuple[Value, Callable[[Moments], Moments]] | None = None

    @property
    def batch(self) -> int:
        """The axis of examples."""
        return self.channels.index(-1)

    @property
    def root(self) -> Value:
        """The units `base`, or these units themselves if there is no `base`."""
        return self if self.base is None else self.base

    def at(self, units: Tensor) -> Tensor:
        """The elementwise function, applied to given units of the root."""
        return units if self.chain is None else self.chain(units)

    def per_example(self, numbers: Tensor) -> Tensor:
        """Numbers [B], reshaped to broadcast against the units."""
        shape = [1] * self.mean.ndim
        shape[self.batch] = -1
        return numbers.view(shape)

    def num_positions(self) -> int:
        """Number of positions of a channel."""
        return count_positions(self.channels, self.mean.shape)

    def own_lanes(self) -> Sources:
        """The index of the last linear map, and the range of its channels that these units contain; empty if the range is
        unknown."""
        if self.lanes is None or self.aligned < 0:
            return frozenset()
        few = self.lanes[tuple(0 if step == 0 else slice(None) for step in self.lanes.stride())]
        return frozenset({(self.aligned, int(few.min()), int(few.max()) + 1)} if few.numel() else ())

    def derived(self, mean: Tensor, variance: Tensor, push: Callable[..., Tensor], **changes: Any) -> Value:
        """The result of a linear function of these units."""
        node = Node(mean.shape, (self.node,), push)
        lanes = self.lanes if mean.shape == self.mean.shape else None
        changes = {"base": None, "chain": None, "affine": True, "before": None, "lanes": lanes, **changes}
        return replace(self, mean=mean, variance=variance, node=node, **changes)


def count_positions(channels: Sequence[int], shape: Sequence[int]) -> int:
    """Number of positions of a channel; see `Value` for the kinds of the axes."""
    return math.prod(size if flag == 0 else max(1, flag) for flag, size in zip(channels, shape, strict=True))


def fresh(mean: Tensor, variance: Tensor, channels: tuple[int, ...], noise: Noise | None = None) -> Value:
    """Units whose only noise is one new source."""
    node = Node(mean.shape, noise=noise or Spread(variance, channels, mean.new_ones(mean.shape[channels.index(-1)])))
    rows = mean.shape[channels.index(-1)]
    source = frozenset({(node.order, 0, 2**62)})
    lanes = number_lanes(mean.shape, channels)
    return Value(mean, variance, channels, node, mean.new_ones(2, rows), source, source, node.order, lanes)


def number_lanes(shape: torch.Size, channels: tuple[int, ...]) -> Tensor:
    """Index of each unit's channel; see `Value`."""
    sizes = [size if flag > 0 else 1 for size, flag in zip(shape, channels, strict=True)]
    return torch.arange(math.prod(sizes)).view(sizes).expand(shape)


def meet(first: Sources, second: Sources) -> bool:
    """Whether two sets of noise sources overlap."""
    return any(a[0] == b[0] and a[1] < b[2] and b[1] < a[2] for a in first for b in second)


class Moments(StructuredWeight):
    r"""Means and variances of random weights or units.

    The object is a handle: it refers to a value that can be replaced. An in-place operation replaces its `value`, and
    all variables that refer to the handle see the new value. A tensor and its views form a family of handles. An
    in-place operation is refused if another member of the family still exists.
    """

    value_: Value | None
    pass_: Pass | None
    name_: str
    family_: list[weakref.ref[Moments]]

    def __new__(
        cls,
        mean: Tensor,  # means of weights of any shape, or of units [B, ...]
        variance: Tensor,
        channels: tuple[int, ...] = (),  # for units, the kinds of their axes; see `Value`
        value: Value | None = None,  # the units; they replace the three arguments above
        pass_: Pass | None = None,  # for weights, the pass in which they are used
        name: str = "",  # for weights, their name
    ) -> Self:
        made = cls.wrap(mean.shape, mean, (mean, variance), (channels, value, pass_, name))
        made.value_ = fresh(mean, variance, channels) if value is None and channels else value
        made.pass_, made.name_, made.family_ = pass_, name, []
        made.family_.append(weakref.ref(made))
        return made

    @property
    def mean_(self) -> Tensor:
        """Means."""
        return self.components_[0]

    @property
    def variance_(self) -> Tensor:
        """Variances."""
        return self.components_[1]

    def materialize(self) -> Tensor:
        """Always raises `NoRule`, because there is no equivalent plain tensor."""
        raise NoRule("this step needs a plain tensor instead of means and variances")

    def unbind(self, dim: int = 0) -> tuple[Any, ...]:
        """Slices of the units along an axis, as for any tensor. Unlike in other structured weights, the slices are not draws."""
        return tuple(torch.unbind(self, dim))

    def become(self, other: Moments, name: str) -> Moments:
        """Take over the value of another handle, as an in-place operation does."""
        if other is self:
            return self
        if self.value_ is None or any(known() is not None and known() is not self for known in self.family_):
            raise NoRule(
                f"{name} changes units in place, but another variable or view refers to these units; use the "
                "out-of-place operation"
            )
        if other.shape != self.shape:
            raise NoRule(f"{name} changes the shape in place, which is not supported")
        self.value_, self.components_, self.static_ = other.value_, other.components_, other.static_
        return self

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None) -> Any:
        """Apply the rule of a function. An in-place operation changes the value of its first argument."""
        kwargs, name = kwargs or {}, getattr(func, "__name__", str(func))
        if kwargs.get("out") is not None:
            raise NoRule(f"{name} with out= is not supported")
        rule = cls.rules.get(func)
        if rule is not None and kwargs:
            kwargs = _renamed(rule, kwargs)
        if rule is None or not _is_inplace(func, name, args, kwargs):
            try:
                return super().__torch_function__(func, types, args, kwargs)
            except TypeError as error:
                if rule is None:
                    raise
                raise NoRule(f"{name} with these arguments is not supported") from error
        if not isinstance(args[0], Moments):
            raise NoRule(f"{name} adds noise to a plain tensor in place; use the out-of-place operation")
        return args[0].become(super().__torch_function__(func, types, args, kwargs), name)

    @classmethod
    def fallback(cls, func: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
        """Raise `NoRule` for a function without a rule."""
        name = getattr(func, "__name__", str(func))
        raise NoRule(f"{name} is not supported")

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        """Raise `NoRule` also for operations below the level of torch functions, such as `weight.T`."""
        return cls.fallback(func.overloadpacket, args, kwargs)


_NAMES = {
    "input": "x",
    "tensor": "x",
    "other": "y",
    "tensors": "values",
    "axis": "dim",
    "keepdims": "keepdim",
    "normalized_shape": "shape",
    "num_groups": "groups",
    "kernel_size": "size",
    "output_size": "size",
    "split_size": "size",
    "split_size_or_sections": "size",
}
"""Mapping from torch's argument names to the shorter names that the rules use."""


def _renamed(function: Callable[..., Any], kwargs: dict[str, Any]) -> dict[str, Any]:
    known = inspect.signature(function).parameters
    return {_NAMES[name] if _NAMES.get(name) in known else name: value for name, value in kwargs.items()}


_PLACES_OF_INPLACE: dict[Any, int] = {
    **dict.fromkeys((F.relu, F.selu, F.silu, F.mish, F.relu6, F.hardswish, F.hardsigmoid), 1),
    **dict.fromkeys((F.leaky_relu, F.elu, F.celu), 2),
    **dict.fromkeys((F.hardtanh, F.dropout, F.dropout1d, F.dropout2d, F.dropout3d, F.alpha_dropout), 3),
}
"""Position of the argument `inplace` of each function."""


def _is_inplace(func: Any, name: str, args: Any, kwargs: dict[str, Any]) -> bool:
    if name.startswith("__i") or (name.endswith("_") and not name.endswith("__")):
        return True
    place = _PLACES_OF_INPLACE.get(func)
    return bool(kwargs.get("inplace", place is not None and len(args) > place and args[place]))


def units(value: Value) -> Moments:
    """A handle for units."""
    if value.doubt != UNKNOWN:
        value.node.total = Spread(value.variance, value.channels, value.together[1])
    return Moments(value.mean, value.variance, value=value)


def view(x: Moments, value: Value) -> Moments:
    """A handle for units that may share memory with x."""
    made = units(value)
    made.family_ = x.family_
    x.family_[:] = [known for known in x.family_ if known() is not None]
    x.family_.append(weakref.ref(made))
    return made


def affine(value: Value, function: Callable[[Tensor], Tensor], gain: Any) -> Moments:
    """Apply an elementwise affine function that keeps the shape. `gain` is the factor by which the function multiplies the
    units."""

    def chain(units: Tensor) -> Tensor:
        return function(value.at(units))

    changes = {"base": value.root, "chain": chain, "affine": value.affine}
    squared = gain.square() if isinstance(gain, Tensor) else gain**2
    return units(value.derived(function(value.mean), value.variance * squared, lambda change: change * gain, **changes))


MAX_SETTLED_UNITS = 512
"""If an example has at most this many units, unknown variances are computed one by one."""

MAX_SETTLED_COST = 3e6
"""If at most this many multiplications per example are needed, unknown variances are computed one by one."""

MAX_ESTIMATED_CHANNELS = 12
"""If there are more channels than this, channels are treated as independent. In tests, noise shared by 16 channels changed
standard deviations by at most 4 %, and one reverse pass per unit would cost as much as hundreds of draws."""


def _settle(*values: Value) -> tuple[Tensor, Tensor, Tensor] | None:
    """Three results: the variances of all units, [B, n]; the nonlinear parts of these variances; and, for each i, the covariance
    of unit i of the first value with unit i of the second value. See `responses`. The result is `None` if there are too many
    units.
    """
    shape = values[0].mean.shape
    rows = shape[values[0].batch]
    size = sum(value.mean.numel() for value in values) // rows
    batch = values[0].batch

    def push(*changes: Tensor) -> Tensor:
        return torch.cat([change.movedim(batch, 0).flatten(1) for change in changes], 1)

    node = Node(torch.Size((rows, size)), tuple(value.node for value in values), push)
    plan = Plan(node, size)
    if size > MAX_SETTLED_UNITS or plan.cost > MAX_SETTLED_COST * rows:
        return None
    return variances(plan, values[0].mean.new_empty(rows, size), size // 2 if len(values) > 1 else 0)


def nonlinear(value: Value, what: str) -> Value:
    """The value with known variances, which nonlinear functions need. If the units have few channels and the computation is
    cheap, estimated variances are replaced by variances that follow from the linear responses. Raises `NoRule` if the variances
    are unknown and there are too many units to compute the variances one by one.
    """
    channels = math.prod(size for size, kind in zip(value.mean.shape, value.channels, strict=True) if kind > 0)
    if value.doubt == EXACT or (value.doubt == ESTIMATED and channels > MAX_ESTIMATED_CHANNELS):
        return value
    found = _settle(value)
    if found is None and value.doubt == UNKNOWN:
        raise NoRule(
            f"{what} does not support units in which a random layer's outputs are combined with themselves (added or "
            "concatenated)"
        )
    return value if found is None else replace(value, variance=_back(found[0], value), doubt=EXACT)


MAX_BENT_SHARE = 0.3
"""Maximum share of nonlinear noise in the variance of units that are multiplied. The variance of a product depends on the
skewness of the units, which is about 2 for units with more nonlinear noise."""


def check_gaussian(value: Value, what: str) -> None:
    """Raise `NoRule` for units that are far from Gaussian. They are tested only if the test is cheap."""
    found = None if value.sources == value.stem else _settle(value)
    share = 0.0 if found is None else float((found[1] / found[0].clamp_min(1e-30)).max())
    if share > MAX_BENT_SHARE:
        raise NoRule(
            f"{what} does not support units that are far from Gaussian ({share:.0%} of a variance is nonlinear noise, but "
            f"at most {MAX_BENT_SHARE:.0%} is supported)"
        )


def _back(flat: Tensor, value: Value) -> Tensor:
    moved = value.mean.movedim(value.batch, 0)
    return flat.view(moved.shape).movedim(0, value.batch)


def settled_pair(x: Value, y: Value) -> tuple[Value, Value, Tensor] | None:
    """The two given values, now with known variances, and the covariance of each unit of the first value with the same unit of
    the second value. The result is `None` if there are too many units to compute the variances one by one."""
    found = _settle(x, y)
    if found is None:
        return None
    size = found[2].shape[1]
    parts = (found[0][:, :size], found[0][:, size:], found[2])
    first, second, both = (_back(part.contiguous(), x) for part in parts)
    return replace(x, variance=first, doubt=EXACT), replace(y, variance=second, doubt=EXACT), both


MIN_COMPARED_CHANNELS, MAX_COMPARED_CHANNELS, MAX_COMPARED_UNITS = 2, 4, 128
"""Minimum and maximum number of channels, and maximum number of units per example, in comparisons of positions."""


MAX_GAP_OF_COPIES = 1e-4
"""Two positions count as holding the same random number if the mean square of their difference is at most this share of their
variance."""

MIN_SURE_SHARE_OF_COPIES = 0.1
"""Two positions can count as holding the same number only if at least this share of the variance is exact in one of the compared
channels."""


def correlations(value: Value) -> Tensor | None:
    """Correlations [B, P, P] between the positions of maps [B, C, ...], computed from linear responses and averaged over some
    channels. The result is `None` if this is too expensive."""
    rows, count, *sizes = value.mean.shape
    most = max(MIN_COMPARED_CHANNELS, min(MAX_COMPARED_CHANNELS, MAX_COMPARED_UNITS // math.prod(sizes)))
    chosen = torch.linspace(0, count - 1, min(count, most)).long().tolist()
    size = len(chosen) * math.prod(sizes)
    node = Node(torch.Size((rows, size)), (value.node,), lambda change: change[:, chosen].flatten(1))
    plan = Plan(node, size)
    if size > MAX_COMPARED_UNITS or plan.cost > 10 * MAX_SETTLED_COST * rows:
        return None
    whole, sure = (
        part.view(rows, len(chosen), math.prod(sizes), len(chosen), math.prod(sizes)).diagonal(dim1=1, dim2=3)
        for part in covariance(plan, value.mean.new_empty(rows, size))
    )  # [B, P, P, c]
    scale, sure_scale = (_scales(part) for part in (whole, sure))
    known = scale > 1e-30  # ignore channels without noise, for example inactive channels after a ReLU
    found = (torch.where(known, whole / scale, 0.0).sum(-1) / known.sum(-1).clamp_min(1)).clamp(-1, 1)
    # If two positions have the same response to all exact noise, they hold the same number, so their other noise is equal too.
    alike = (sure >= (1 - MAX_GAP_OF_COPIES) * sure_scale) | (sure_scale <= 1e-6 * scale)
    enough = known & (sure_scale > MIN_SURE_SHARE_OF_COPIES * scale)
    return torch.where(alike.all(-1) & enough.any(-1), 1.0, found)


def channel_covariances(value: Value) -> Tensor | None:
    """The covariance of the channels on the last axis, for each position: [B, P, C, C]. The result is `None` if it is too
    expensive to compute."""
    moved = value.mean.movedim(value.batch, 0)
    rows, count = moved.shape[0], moved.shape[-1]
    if value.doubt == EXACT and value.sources == value.stem:  # channels are independent
        return value.variance.movedim(value.batch, 0).reshape(rows, -1, count).diag_embed()
    size = moved[0].numel()
    plan = Plan(Node(torch.Size((rows, size)), (value.node,), lambda one: one.movedim(value.batch, 0).flatten(1)), size)
    if size > MAX_COMPARED_UNITS or plan.cost > MAX_SETTLED_COST * rows:
        return None
    blocks = covariance(plan, moved.new_empty(rows, size))[0].view(rows, -1, count, size // count, count)
    return blocks.diagonal(dim1=1, dim2=3).movedim(-1, 1)


def _scales(covariance: Tensor) -> Tensor:
    """For each pair of positions, the product of their standard deviations, [B, P, P, c]."""
    std = covariance.diagonal(dim1=1, dim2=2).mT.sqrt()  # [B, P, c]
    return std.unsqueeze(1) * std.unsqueeze(2)


class SameSizes(Exception):
    """Raised if another axis has the same length as the batch, so that the axis of examples is ambiguous."""


def find_batch(x: Tensor, axes: int, pass_: Pass | None) -> int:
    """The axis of examples among the first axes of a plain tensor."""
    if pass_ is None:
        return 0
    found = [axis for axis in range(axes) if x.shape[axis] == pass_.rows]
    if not found:
        raise NoRule(
            f"an input of shape {tuple(x.shape)} has no axis for the {pass_.rows} examples, which is not supported"
        )
    if len(found) > 1 and pass_.rows > 1:
        raise SameSizes
    return found[0]


def per_axis(size: Any, dims: int) -> list[int]:
    """One size for each of `dims` axes, from a single number or from a sequence of 1 or `dims` numbers."""
    return [size] * dims if isinstance(size, int) else list(size) * (dims // len(size))


def value_of(x: Moments, axes: int = 0, batch: int = 0) -> Value:
    """The units of a handle. The units of a weight are the same random numbers for every example.

    `axes` is the number of axes that a weight's units have. If `axes` is 0, the units have the weight's own axes, and the first
    axis, which must have length 1, becomes the batch.
    """
    if x.value_ is not None:
        return x.value_
    if x.pass_ is None:
        raise NoRule(f"{x.name_ or 'a weight outside a pass'} has no means and variances")
    axes = axes or x.ndim
    key = (x.name_, axes, batch)
    if key in x.pass_.units:
        return x.pass_.units[key]
    use(x)
    shape = [*[1] * (axes - x.ndim), *x.shape]
    if len(shape) > axes or shape[batch] != 1:
        raise NoRule(f"{x.name_} is a random weight without an axis for examples, which is not supported here")
    sizes = [*shape[:batch], x.pass_.rows, *shape[batch + 1 :]]
    mean, variance = (part.view(shape).expand(sizes) for part in (x.mean_, x.variance_))
    channels = tuple(-1 if axis == batch else 1 for axis in range(axes))
    found = fresh(mean, variance, channels, Spread(variance, channels))
    x.pass_.units[key] = replace(found, together=torch.zeros_like(found.together))
    return x.pass_.units[key]


def moments_of(value: Tensor | None) -> tuple[Any, Any]:
    """The mean and the variance of a tensor; the variance of a plain tensor is `None`."""
    if isinstance(value, Moments):
        return value.mean_, value.variance_
    return value, None


def channels_last(maps: Tensor) -> Tensor:
    """On a CPU, copy maps [B, C, H, W] so that channels come last in memory, which makes pooling and convolutions
    faster."""
    if maps.ndim != 4 or maps.device.type != "cpu" or maps.stride(1) == 1:
        return maps
    # `contiguous` would not change a single channel.
    return torch.empty_like(maps, memory_format=torch.channels_last).copy_(maps)


MAX_PIECE_UNITS = 2**17
"""Number of units that a CPU processes at a time. With this size, intermediate results stay in the second-level cache, and the
next piece reuses their memory. Whole maps would need new memory for each step, and the page faults would cost more than the
step."""


def in_pieces(step: Callable[..., tuple[Tensor, ...]], *units: Tensor | None) -> tuple[Tensor, ...]:
    """The result of `step`, a function that treats each example separately; examples are on the first axis of all tensors. On a
    CPU, the result is computed for a few examples at a time."""
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
            whole[index * rows : (index + 1) * rows] = part  # copied, so that the next piece reuses this memory
    return wholes


def _longer(part: Tensor, rows: int) -> Tensor:
    """An uninitialized tensor like `part` but with `rows` examples; channels come last in memory if they do in `part`."""
    last = part.ndim == 4 and part.stride(1) == 1
    form = torch.channels_last if last else torch.contiguous_format
    return torch.empty(rows, *part.shape[1:], dtype=part.dtype, device=part.device, memory_format=form)


def use(weight: Any) -> None:
    """Record that a weight is used. Raises `NoRule` if the weight was used before, because the two uses are not independent."""
    if isinstance(weight, Moments) and weight.pass_ is not None:
        if weight.name_ in weight.pass_.used:
            raise NoRule(f"{weight.name_} is used more than once in a pass, so the uses are not independent")
        weight.pass_.used.add(weight.name_)
