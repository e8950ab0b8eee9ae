"""What a prediction is: a mixture over draws, reduced to means, spreads, probabilities and scores."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

ELEMENTS_AT_ONCE = 2**22
"""Entries of an [S, rows, O] array that one reduction works on at a time."""


class Outputs:
    """The network's outputs of each draw, [S, B, ...]: kept in memory, or computed again chunk by chunk.

    Args:
        kept: All outputs, or `None`.
        chunks: Where they are not kept: a function that yields them in pieces [S, rows, ...], in order, the same each time.
    """

    def __init__(self, kept: Tensor | None = None, chunks: Callable[[], Iterator[Tensor]] | None = None) -> None:
        if (kept is None) == (chunks is None):
            raise ValueError("Outputs: give either kept or chunks")
        self.kept = kept
        self._chunks = chunks

    def __iter__(self) -> Iterator[Tensor]:
        if self._chunks is not None:
            yield from self._chunks()
            return
        assert self.kept is not None
        per_row = max(1, self.kept[:, :1].numel())
        yield from self.kept.split(max(1, ELEMENTS_AT_ONCE // per_row), dim=1)

    def map(self, function: Callable[..., Any], *rowwise: Tensor) -> Any:
        """Apply a function to each chunk and join the results along their first axis, the examples.

        Args:
            function: Takes outputs [S, rows, ...] and the same rows of each further tensor; returns a tensor, or a tuple of
                tensors, with examples on the first axis.
            rowwise: Tensors with one row per example.
        """
        results, start = [], 0
        for chunk in self:
            rows = slice(start, start + chunk.shape[1])
            results.append(function(chunk, *(tensor[rows] for tensor in rowwise)))
            start = rows.stop
        for tensor in rowwise:
            if tensor.shape[0] != start:
                raise ValueError(f"Predictive: {tensor.shape[0]} targets for {start} predictions; give one per example")
        if isinstance(results[0], tuple):
            return tuple(torch.cat(parts) for parts in zip(*results, strict=True))
        return torch.cat(results)


class Predictive:
    """The predictive distribution of a batch of examples, a mixture over draws.

    Args:
        outputs: The network's outputs of each draw.
    """

    def __init__(self, outputs: Outputs) -> None:
        self._source = outputs

    @property
    def outputs(self) -> Tensor:
        """The network's outputs of each draw: [S, B, ...].

        Raises:
            RuntimeError: If the prediction exceeded the memory budget and was reduced chunk by chunk.
        """
        if self._source.kept is None:
            raise RuntimeError(
                "Predictive: outputs were not kept, they exceed the memory budget; "
                "call predict(..., keep_outputs=True), or predict fewer rows at a time"
            )
        return self._source.kept

    @abstractmethod
    def log_prob(self, y: Tensor) -> Tensor:
        """Log predictive density (or probability) of targets, one number per example: [B]."""

    def __len__(self) -> int:
        kept = self._source.kept
        return kept.shape[1] if kept is not None else sum(chunk.shape[1] for chunk in self._source)


def check_finite(tensor: Tensor, what: str) -> None:
    """Raise `ValueError` if a tensor holds NaN or infinity, naming the first place.

    A finite sum proves all entries finite without a temporary of the tensor's size; only a sum that is not, which
    large numbers can have too, is looked into row by row.
    """
    if not tensor.is_floating_point() or bool(torch.isfinite(tensor.sum())):
        return
    for index, row in enumerate(tensor.unbind(0) if tensor.ndim else (tensor,)):
        wrong = ~torch.isfinite(row)
        if bool(wrong.any()):
            place = [index, *wrong.nonzero()[0].tolist()] if tensor.ndim else []
            raise ValueError(
                f"{what} hold {tensor[tuple(place)].item()} at index {place}; remove or impute such rows first"
            )
