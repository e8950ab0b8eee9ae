"""Context inputs, at which the KL compares the variational process with the prior over functions. Each step draws new inputs."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from bayesify.arguments.checks import Count, NonNegative, Positive, checked
from bayesify.maths.noise import standard_normal
from bayesify.running.generators import own_generators
from bayesify.running.inputs_and_outputs import as_inputs
from bayesify.training.batches import parse_batch

DEFAULT_WIDTHS = 1.0
"""Margin on every side of a box whose ends are not given, relative to the range of the batch's inputs. Images have no margin."""


class DeviceCopies:
    """Copies of tensors by device and dtype. They are cached, because a copy to a device cannot be captured in a CUDA graph."""

    def __init__(self, *tensors: Tensor) -> None:
        self._tensors, self._kept = tensors, dict[tuple[torch.device, torch.dtype], tuple[Tensor, ...]]()

    def like(self, other: Tensor) -> tuple[Tensor, ...]:
        """The tensors with the device and dtype of another tensor."""
        key = (other.device, other.dtype)
        if key not in self._kept:
            self._kept[key] = tuple(tensor.to(other) for tensor in self._tensors)
        return self._kept[key]


class Context(ABC):
    """A distribution over inputs of a network.

    A subclass sets `name` and the number of inputs `n`, and implements `draw`.
    """

    name: ClassVar[str]
    n: int

    @abstractmethod
    def draw(self, x: Any, generator: torch.Generator | None = None) -> Any:
        """Draw `n` inputs for the network.

        Args:
            x: A batch of training inputs, which determines the shape, type and device.
            generator: Source of randomness.

        Returns:
            The n inputs, in the form of `x`.
        """

    def config(self) -> dict[str, Any]:
        """The context as plain data, without the inputs that it stores."""
        return {"name": self.name, "n": self.n}


class Box(Context):
    """Uniform inputs in a box (the paper's choice, appendix 3).

    Args:
        low: Lower end: a number for all features, or a tensor with the shape of one input. If `low` and `high` are not given, the
            box depends on the training batch. For images [B, C, H, W] the box has one range for all pixels: 0 to 1, or wider if a
            pixel lies outside this range. For vectors and sequences the box has the range of each feature over the batch,
            extended on every side by `DEFAULT_WIDTHS` times this range. Features that do not vary stay constant.
        high: Upper end of the box, in the same form as `low`.
        n: Number of inputs.

    Raises:
        ValueError: If `low` is not below `high`, if only one of the two is given, or if `n` is below 1.
    """

    name = "box"

    @checked
    def __init__(
        self,
        low: float | Sequence[float] | Tensor | None = None,
        high: float | Sequence[float] | Tensor | None = None,
        n: Count = 10,
    ) -> None:
        if (low is None) != (high is None):
            raise ValueError(
                "Box: only one of low= and high= is given; give both, or give neither to use the range of each batch"
            )
        self.follows_batch = low is None
        ends = (0.0, 1.0) if low is None else (low, high)
        self.low, self.high = (torch.as_tensor(end, dtype=torch.float64).detach().cpu() for end in ends)
        if any(not end.numel() or not bool(torch.isfinite(end).all()) for end in (self.low, self.high)):
            raise ValueError(f"Box: low={low}, high={high}; give finite numbers")
        try:
            below = bool((self.low < self.high).all())
        except RuntimeError:
            raise ValueError(
                f"Box: low= has shape {tuple(self.low.shape)}, but high= has shape {tuple(self.high.shape)}; give both with the "
                "same shape"
            ) from None
        if not below:
            raise ValueError(
                f"Box: low={low} is not below high={high}; give low= a smaller value, or high= a larger one"
            )
        self.n = n
        self._copies = DeviceCopies(self.low, self.high - self.low)

    @classmethod
    @checked
    def around(cls, x: Tensor, widths: NonNegative = 2.0, n: Count = 10) -> Self:
        """A box around training inputs [N, ...], extended on every side by `widths` times their range."""
        flat = torch.as_tensor(x).detach().double()
        low, high = flat.amin(0), flat.amax(0)
        margin = widths * (high - low).clamp_min(torch.finfo(torch.float32).eps)
        return cls(low - margin, high + margin, n)

    def draw(self, x: Any, generator: torch.Generator | None = None) -> Any:
        """Draw `n` uniform inputs in the box."""
        like, key = _single(x, "Box")
        shape = like.shape[1:]
        try:
            ends = self._ends_of_batch(like) if self.follows_batch else self._copies.like(like)
            low, width = (end.expand(shape) for end in ends)
        except RuntimeError:
            size = list(torch.broadcast_shapes(self.low.shape, self.high.shape))
            raise ValueError(
                f"Box: low= and high= have shape {size}, but inputs have shape {list(shape)}; give numbers, or "
                f"tensors of the inputs' shape"
            ) from None
        place = generator.device if generator is not None else like.device
        dtype = like.dtype if like.is_floating_point() else torch.float32
        uniform = torch.rand((self.n, *shape), generator=generator, device=place, dtype=dtype).to(like.device)
        return _like(x, key, torch.addcmul(low, width, uniform))

    def _ends_of_batch(self, like: Tensor) -> tuple[Tensor, Tensor]:
        if not like.is_floating_point():
            raise ValueError(
                f"Box: inputs have type {like.dtype}, but a box contains real numbers; give "
                "context=DatasetContext(inputs, n), with inputs of the same type"
            )
        if like.shape[0] == 0:
            raise ValueError("Box: the batch is empty; give at least one example")
        if like.ndim == 4:
            low, high = like.detach().amin().clamp_max(0.0), like.detach().amax().clamp_min(1.0)
            return low, high - low
        low, high = like.detach().amin(0), like.detach().amax(0)
        return low - DEFAULT_WIDTHS * (high - low), (1 + 2 * DEFAULT_WIDTHS) * (high - low)

    def config(self) -> dict[str, Any]:
        """Ends of the box and number of inputs."""
        both = {} if self.follows_batch else {"low": self.low, "high": self.high}
        ends = {key: end if end.ndim else float(end) for key, end in both.items()}
        return {"name": self.name, **ends, "n": self.n}


class StoredContext(Context):
    """Random inputs from a set in memory; the base of `DatasetContext` and `NoisyContext`."""

    @checked
    def __init__(self, source: Tensor | Iterable[Any], n: Count = 10, keep: Count = 10_000) -> None:
        self.source, self.n, self.keep = source, n, keep
        self._held: Tensor | None = self._checked(source.detach()) if isinstance(source, Tensor) else None
        if isinstance(source, list | tuple) and not source:
            raise ValueError(
                f"{type(self).__name__}: source={source!r} has no batches; give a tensor of inputs, or a loader of "
                "batches"
            )

    @property
    def held(self) -> Tensor:
        """The stored inputs, [N, ...]. A loader is read on first use."""
        if self._held is None:
            self._held = self._checked(self._read(self.source))
        return self._held

    def _checked(self, held: Tensor) -> Tensor:
        if held.ndim == 0 or held.shape[0] == 0:
            raise ValueError(f"{type(self).__name__}: the source has no inputs; give at least one input")
        if not bool(torch.isfinite(held).all()):
            raise ValueError(f"{type(self).__name__}: the source contains NaN or infinity; give finite inputs")
        return held

    def _read(self, loader: Iterable[Any]) -> Tensor:
        parts: list[Tensor] = []
        with own_generators():  # a shuffling loader must not advance the caller's generator
            for batch in loader:
                parts.append(self._inputs(batch))
                if sum(map(len, parts)) >= self.keep:
                    break
        if not parts:
            raise ValueError(f"{type(self).__name__}: the loader yields no batches; give a loader with data")
        return torch.cat(parts)[: self.keep]

    def _inputs(self, batch: Any) -> Tensor:
        x = batch if isinstance(batch, Tensor) else parse_batch(batch).x if len(batch) > 1 else batch[0]
        inputs, _ = _single(x, type(self).__name__)
        return inputs.detach()

    def draw(self, x: Any, generator: torch.Generator | None = None) -> Any:
        """Draw random rows, without replacement if there are enough rows."""
        like, key = _single(x, type(self).__name__)
        held = self.held
        if held.shape[1:] != like.shape[1:]:
            raise ValueError(
                f"{type(self).__name__}: context inputs have shape {list(held.shape[1:])}, but training inputs have "
                f"shape {list(like.shape[1:])}; give inputs of the same shape"
            )
        place, rows = generator.device if generator is not None else like.device, held.shape[0]
        if self.n <= rows:  # unlike a permutation, this can be captured in a CUDA graph
            index = torch.rand(rows, generator=generator, device=place).topk(self.n).indices
        else:
            index = torch.randint(rows, (self.n,), generator=generator, device=place)
        if held.device != like.device:
            held = self._held = held.to(like.device)
        found = held[index.to(held.device)].to(like.dtype)
        return _like(x, key, self.change(found, generator))

    def change(self, inputs: Tensor, generator: torch.Generator | None) -> Tensor:
        """The drawn rows, which subclasses may change."""
        return inputs


class DatasetContext(StoredContext):
    """Inputs of another dataset, such as images from a different source.

    Args:
        source: A tensor of inputs, or a loader. The first `keep` inputs of a loader are read on first use and kept in memory.
        n: Number of inputs per draw.
        keep: Number of inputs to keep from a loader.

    Raises:
        ValueError: If a count is below 1.
    """

    name = "loader"


class NoisyContext(StoredContext):
    """Training inputs with Gaussian noise.

    Args:
        source: Training inputs: a tensor [N, ...] or a loader.
        std: Standard deviation of the noise.
        n: Number of inputs per draw.
        keep: Number of inputs to keep from a loader.

    Raises:
        ValueError: If a count is below 1 or `std` is not positive.
    """

    name = "jittered"

    @checked
    def __init__(self, source: Tensor | Iterable[Any], std: Positive, n: Count = 10, keep: Count = 10_000) -> None:
        super().__init__(source, n, keep)
        self.std = std

    def change(self, inputs: Tensor, generator: torch.Generator | None) -> Tensor:
        """Add the noise."""
        if not inputs.is_floating_point():
            raise ValueError(
                f"NoisyContext: inputs have type {inputs.dtype}, to which no noise can be added; use DatasetContext"
            )
        noise = standard_normal(inputs.numel(), inputs, generator).view(inputs.shape)
        return torch.add(inputs, noise, alpha=self.std)

    def config(self) -> dict[str, Any]:
        """The context as plain data, with the standard deviation of its noise."""
        return {**super().config(), "std": self.std}


class Mixture(Context):
    """Inputs of several contexts, drawn together in each step.

    Args:
        contexts: Two or more contexts.

    Raises:
        ValueError: If there are fewer than two contexts.
    """

    name = "mixture"

    def __init__(self, *contexts: Context) -> None:
        if len(contexts) < 2:
            raise ValueError(f"Mixture: the number of contexts is {len(contexts)}; give at least two contexts")
        for context in contexts:
            if not isinstance(context, Context):
                raise TypeError(
                    f"Mixture: {type(context).__name__} is not a Context; wrap a tensor of inputs as DatasetContext(inputs, n)"
                )
        self.contexts = contexts
        self.n = sum(context.n for context in contexts)

    def draw(self, x: Any, generator: torch.Generator | None = None) -> Any:
        """Draw from all contexts and concatenate the inputs."""
        _, key = _single(x, "Mixture")
        parts = [as_inputs(context.draw(x, generator)) for context in self.contexts]
        found = torch.cat([next(iter((*args, *named.values()))) for args, named in parts])
        return _like(x, key, found)

    def config(self) -> dict[str, Any]:
        """All contexts as plain data."""
        return {"name": self.name, "contexts": [context.config() for context in self.contexts]}


class MissingContext(Context):
    """Placeholder for a context that was not stored with its model. Drawing from it raises an error."""

    name = "unknown"

    def __init__(self, was: Any) -> None:
        self.was, self.n = was, int(was.get("n", 1)) if isinstance(was, dict) else 1

    def draw(self, x: Any, generator: torch.Generator | None = None) -> Any:
        raise ValueError(
            f"FunctionSpaceVI: the inputs of the context ({self.was}) are not in the file; set model.context to continue training"
        )

    def config(self) -> dict[str, Any]:
        return dict(self.was)


def restore_context(config: dict[str, Any]) -> Context:
    """A context from its plain data. A context that stored inputs becomes `MissingContext`."""
    if config["name"] == "box":
        return Box(config.get("low"), config.get("high"), config["n"])
    if config["name"] == "mixture":
        parts = [restore_context(part) for part in config["contexts"]]
        if not any(isinstance(part, MissingContext) for part in parts):
            return Mixture(*parts)
    return MissingContext(config)


def _single(x: Any, owner: str) -> tuple[Tensor, str | None]:
    """The single input tensor of a batch, and its name if it is a keyword input."""
    args, kwargs = as_inputs(x)
    if len(args) + len(kwargs) != 1 or not all(isinstance(value, Tensor) for value in (*args, *kwargs.values())):
        raise ValueError(
            f"{owner}: the network has several inputs, but this context draws only one; write a Context whose draw "
            "returns all inputs"
        )
    return (args[0], None) if args else (next(iter(kwargs.values())), next(iter(kwargs)))


def _like(x: Any, key: str | None, found: Tensor) -> Any:
    if key is not None:
        return {key: found}
    return found if isinstance(x, Tensor) else type(x)([found])
