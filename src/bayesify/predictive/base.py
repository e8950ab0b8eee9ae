"""The base class of predictions: mixtures over draws, from which means, spreads, probabilities and scores are computed."""

from __future__ import annotations

import copy
import math
from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar, Self, TypeVar, cast

import torch
from torch import Tensor

MAX_ELEMENTS_PER_CHUNK = 2**22
"""A reduction processes arrays [S, rows, O] with at most this many entries at a time."""

Result = TypeVar("Result")
"""A tensor, or a tuple of tensors."""


class Joined:
    """Tensors joined along an axis, as by `torch.cat`, where each tensor is copied and freed as soon as it is added.

    Small results that stay in memory between the large activations of the chunks would split the memory that each chunk frees.
    The next chunk would then need new memory, and the process would grow with the number of chunks (on Linux, to many times the
    memory in use).

    Tensors that require gradients are kept, and joined by `torch.cat`.

    Args:
        axis: The axis along which tensors are joined.
        size: The total length along this axis, if it is known.
    """

    def __init__(self, axis: int = 0, size: int = 0) -> None:
        self._axis, self._size, self._filled = axis, size, 0
        self._room: Tensor | None = None
        self._parts: list[Tensor] = []

    def add(self, part: Tensor) -> None:
        """Add a tensor at the end."""
        whole = self._room is None and part.shape[self._axis] >= self._size > 0
        if whole or part.requires_grad or self._parts or not self._takes(part):
            self._parts += [part] if self._room is None else [self.all(), part]
            self._room = None
            return
        end = self._filled + part.shape[self._axis]
        if self._room is None or end > self._room.shape[self._axis]:
            shape = list(part.shape)
            shape[self._axis] = max(end, 2 * self._filled, self._size)
            room = part.new_empty(shape)
            if self._room is not None:
                room.narrow(self._axis, 0, self._filled).copy_(self.all())
            self._room = room
        self._room.narrow(self._axis, self._filled, end - self._filled).copy_(part)
        self._filled = end

    def _takes(self, part: Tensor) -> bool:
        """Whether a tensor has the type and shape of the others, except along the axis. `torch.cat` treats the other tensors."""
        if self._room is None:
            return True
        shape = list(part.shape)
        shape[self._axis] = self._room.shape[self._axis]
        return shape == list(self._room.shape) and part.dtype == self._room.dtype

    def all(self) -> Tensor:
        """The joined tensor."""
        if self._room is None:
            return self._parts[0] if len(self._parts) == 1 else torch.cat(self._parts, self._axis)
        filled = self._room.narrow(self._axis, 0, self._filled)
        return self._room if self._filled == self._room.shape[self._axis] else filled.clone()


class Outputs:
    """The network's outputs for each draw, [S, B, ...]. The outputs are stored in memory, or they are computed again chunk by
    chunk whenever they are needed.

    Args:
        kept: All outputs, or `None`.
        chunks: Function that yields the outputs in order, in pieces [S, rows, ...]. Every call must yield the same outputs. The
            function is required if `kept` is `None`.
    """

    def __init__(self, kept: Tensor | None = None, chunks: Callable[[], Iterator[Tensor]] | None = None) -> None:
        if (kept is None) == (chunks is None):
            raise ValueError("Outputs: give either kept= or chunks=, but not both")
        self.kept = kept
        self._chunks = chunks

    def __iter__(self) -> Iterator[Tensor]:
        if self._chunks is not None:
            yield from self._chunks()
            return
        assert self.kept is not None
        per_row = max(1, self.kept[:, :1].numel())
        yield from self.kept.split(max(1, MAX_ELEMENTS_PER_CHUNK // per_row), dim=1)

    def transform(self, function: Callable[[Tensor], Tensor]) -> Outputs:
        """Apply a function that acts on each draw and row separately.

        If these outputs are stored in memory, the result is stored in memory too.
        """
        if self.kept is not None:
            return Outputs(kept=function(self.kept))
        return Outputs(chunks=lambda: (function(chunk) for chunk in self))

    def __getstate__(self) -> dict[str, Any]:
        if self.kept is None:
            raise RuntimeError(
                "Predictive: this prediction cannot be pickled or copied, because its outputs are computed chunk by "
                "chunk from the network; call materialize() first, or predict with keep_outputs=True"
            )
        return vars(self)

    def map(self, function: Callable[..., Result], *rowwise: Tensor) -> Result:
        """Apply a function to each chunk, and join the results along the first axis, which is the axis of examples.

        Args:
            function: Function that takes outputs [S, rows, ...] and the same rows of each tensor in `rowwise`. It returns a
                tensor, or a tuple of tensors, with examples on the first axis.
            rowwise: Tensors with one row per example.
        """
        results: list[Joined] = []
        start, several = 0, False
        for chunk in self:
            rows = slice(start, start + chunk.shape[1])
            found = function(chunk, *(tensor[rows] for tensor in rowwise))
            several = isinstance(found, tuple)
            parts = cast(tuple[Tensor, ...], found if several else (found,))
            results = results or [Joined() for _ in parts]
            for result, part in zip(results, parts, strict=True):
                result.add(part)
            start = rows.stop
        for tensor in rowwise:
            if tensor.shape[0] != start:
                raise ValueError(
                    f"Predictive: there are {tensor.shape[0]} targets for {start} predictions; give one "
                    "target per example"
                )
        joined = tuple(result.all() for result in results)
        return cast(Result, joined if several else joined[0])


_OF_REGRESSION = {"mean", "variance", "std", "epistemic", "aleatoric", "quantile", "interval", "cdf", "crps"}
_OF_CLASSIFICATION = {"probs", "class_probs", "labels", "confidence", "mutual_information", "aleatoric_entropy"}
_OF_CLASSIFICATION |= {"logits", "entropy"}


class Predictive:
    """The predictive distribution of a batch of examples, which is a mixture over draws.

    A prediction can be pickled if its outputs are stored in memory.

    Args:
        outputs: The network's outputs for each draw.
    """

    is_mixture: ClassVar[bool] = True
    """Whether the prediction is a plain mixture over draws, with one distribution for each draw's outputs."""

    def __init__(self, outputs: Outputs) -> None:
        self._source = outputs

    if not TYPE_CHECKING:  # a type checker reports wrong names without this method

        def __getattr__(self, name: str) -> Any:
            kind = type(self).__name__
            if name in _OF_REGRESSION:
                words = "for regression; this is a classification, which has probs, labels, confidence and entropy"
                other = "regression"
            elif name in _OF_CLASSIFICATION:
                words = "for classification; this is a regression, which has mean, std, quantile(q) and interval(level)"
                other = "classification"
            else:
                raise AttributeError(f"{kind!r} object has no attribute {name!r}")
            raise AttributeError(f"{kind}: {name} is {words}; to get {name}, give the model a likelihood for {other}")

    def with_outputs(self, outputs: Tensor | Outputs) -> Self:
        """The same kind of mixture, but with other outputs for each draw, [S, B, ...]. The original prediction stays unchanged.

        Raises:
            TypeError: If this prediction is a closed form and not a mixture over draws.
        """
        made = self._fresh()
        made._source = outputs if isinstance(outputs, Outputs) else Outputs(kept=outputs)
        return made

    def map_outputs(self, function: Callable[[Tensor], Tensor]) -> Self:
        """The same kind of mixture with a function applied to each draw's outputs. For example, the function can divide logits by
        a temperature.

        Raises:
            TypeError: If this prediction is a closed form and not a mixture over draws.
        """
        return self.with_outputs(self._source.transform(function))

    def materialize(self) -> Self:
        """The same prediction with all outputs in memory, whatever their size. The result can be pickled."""
        return self if self._source.kept is not None else self.with_outputs(torch.cat(list(self._source), dim=1))

    def _check_mixture(self) -> None:
        if not self.is_mixture:
            raise TypeError(
                f"{type(self).__name__} is not a mixture over draws; predict with method='draws' (for Laplace, with "
                "method='linearized_mc' or 'network_mc')"
            )

    def _fresh(self) -> Self:
        """A copy without the values that were computed from the outputs."""
        self._check_mixture()
        made = copy.copy(self)
        for kind in type(self).__mro__:
            for name, member in vars(kind).items():
                if isinstance(member, cached_property):
                    vars(made).pop(name, None)
        return made

    @property
    def outputs(self) -> Tensor:
        """The network's outputs for each draw: [S, B, ...].

        Raises:
            RuntimeError: If the outputs were not kept, because they exceeded the memory budget.
        """
        if self._source.kept is None:
            raise RuntimeError(
                "Predictive: the outputs were not kept, because they exceed the memory budget; predict with "
                "keep_outputs=True, or predict fewer rows at a time"
            )
        return self._source.kept

    @abstractmethod
    def log_prob(self, y: Tensor) -> Tensor:
        """Log predictive density (or log-probability) of the targets, one number per example: [B]."""

    def nll_per_element(self, y: Tensor) -> Tensor:
        """For each example, the negative log predictive density divided by the number of targets, [B]. It is meant for
        segmentations and sequences.

        Targets of one example are scored together, as in `log_prob`. Targets with the label `ignore_index` do not count.
        """
        return -self.log_prob(y) / self._elements(y)

    def _elements(self, y: Tensor) -> Tensor:
        return y.new_full((len(y),), y[0].numel(), dtype=torch.int64)

    def __len__(self) -> int:
        kept = self._source.kept
        return kept.shape[1] if kept is not None else sum(chunk.shape[1] for chunk in self._source)

    def __repr__(self) -> str:
        kept = self._source.kept
        if kept is None:
            return f"{type(self).__name__}(outputs computed chunk by chunk)"
        parts = f"{kept.shape[0]} draws" if self.is_mixture else "closed form", f"{kept.shape[1]} examples"
        shape = (f"outputs {list(kept.shape[2:])}",) if self.is_mixture else ()
        return f"{type(self).__name__}({', '.join((*parts, *shape))})"


def with_column(y: Tensor, shape: Sequence[int]) -> Tensor | None:
    """Reshape the targets to a given shape. If necessary, add or drop a last axis of one entry. The result is `None` if the
    targets do not fit.

    Nothing is broadcast.
    """
    if y.shape == shape:
        return y
    if (*y.shape, 1) == shape:  # [B] against [B, 1] would silently broadcast to [B, B]
        return y.unsqueeze(-1)
    return y.squeeze(-1) if y.shape == (*shape, 1) else None


def check_finite(tensor: Tensor, what: str) -> None:
    """Raise `ValueError` if a tensor contains NaN or infinity. The message names the index of the first such entry.

    A finite sum proves that all entries are finite, and needs no temporary tensor. Large finite numbers can overflow the sum, so
    if the sum is not finite, the entries are checked row by row.
    """
    if not tensor.is_floating_point() or math.isfinite(tensor.sum().item()):
        return
    for index, row in enumerate(tensor.unbind(0) if tensor.ndim else (tensor,)):
        wrong = ~torch.isfinite(row)
        if bool(wrong.any()):
            place = [index, *wrong.nonzero()[0].tolist()] if tensor.ndim else []
            raise ValueError(
                f"{what} hold {tensor[tuple(place)].item()} at index {place}; remove or impute these rows first"
            )
