"""Batches from loaders: inputs, targets and example weights."""

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils.data import DataLoader, SequentialSampler, SubsetRandomSampler, TensorDataset, default_collate

from bayesify.predictor import Batch

TARGET_KEYS = ("y", "labels", "label", "targets", "target")
WEIGHT_KEYS = ("weights", "sample_weight", "example_weights")
INPUT_KEYS = ("x", "inputs", "input")
MAX_GATHERED_NUMBERS = 2**22
"""Maximum number of inputs that `StackedBatches` gathers in one call, for several batches."""


@dataclasses.dataclass(frozen=True)
class StackedBatch(Batch):
    """Batches of R models, each with its own B examples; see `ModelStack`.

    Args:
        x: Inputs as in `Batch`, every tensor [R, B, ...].
        y: Targets, [R, B, ...].
        weights: Example weights, [R, B], or `None`.
    """

    def __len__(self) -> int:
        return self.y.shape[1]

    def model(self, index: int) -> Batch:
        """The batch of one model."""
        return Batch(*self.map(lambda leaf: leaf[index]))

    def rows(self, index: slice | Tensor) -> "StackedBatch":
        """The examples at `index`, for each model."""
        return StackedBatch(*self.map(lambda leaf: leaf[:, index]))


class StackedBatches:
    """Loader of batches for R models. Each model has its own rows, which torch's global generator shuffles in each
    epoch.

    Each model sees all of its rows once before it sees any row again. The caller chooses the number of steps per epoch,
    because on small data the overhead of an epoch takes longer than a pass over the rows.

    Args:
        x: Inputs, [R, N, ...].
        y: Targets, [R, N, ...].
        size: Batch size B, but at most the smallest number of rows of any model.
        steps: Number of batches in an epoch.
        weights: Example weights, [R, N], or `None`.
        used: Rows of each model, as R tensors of indices; all rows by default.

    Attributes:
        dataset: Range whose length is the smaller of N and the number of examples in an epoch.
    """

    def __init__(
        self,
        x: Tensor,
        y: Tensor,
        size: int,
        steps: int,
        weights: Tensor | None = None,
        used: Sequence[Tensor] | None = None,
    ) -> None:
        self.x, self.y, self.weights, self.steps = x, y, weights, steps
        self.used = [torch.arange(y.shape[1])] * len(y) if used is None else used
        self.size = min(size, *(len(rows) for rows in self.used))
        self.dataset = range(min(y.shape[1], self.size * steps))

    def __len__(self) -> int:
        return self.steps

    def __iter__(self) -> Iterator[StackedBatch]:
        order = torch.stack([self._order(rows) for rows in self.used]).to(self.x.device)  # [R, steps * B]
        models = torch.arange(len(order), device=order.device).unsqueeze(1)
        at_once = max(1, MAX_GATHERED_NUMBERS // (self.size * self.x[:, 0].numel()))
        for parts in order.unflatten(1, (self.steps, self.size)).transpose(0, 1).split(at_once):  # [steps, R, B] each
            weights = [None] * len(parts) if self.weights is None else self.weights[models, parts]
            yield from map(StackedBatch, self.x[models, parts], self.y[models, parts], weights)

    def _order(self, rows: Tensor) -> Tensor:
        """Indices of the rows for all steps: repeated passes over all rows, each in random order."""
        count = self.size * self.steps
        passes = -(-count // len(rows))
        if passes == 1:
            return rows[torch.randperm(len(rows))[:count]]
        return rows[torch.rand(passes, len(rows)).argsort(1)].flatten()[:count]


BatchReader = Callable[[Any], Any]


def parse_batch(item: Any, reader: BatchReader | None = None) -> Batch:
    """Make a batch from an item of a loader.

    Pairs are (inputs, targets), and triples are (inputs, targets, example weights). In dicts, dataclasses and named
    tuples, the target is called `y`, `labels`, `label`, `targets` or `target`, and example weights are called
    `weights`, `sample_weight` or `example_weights`. All other entries are keyword inputs of the network. However, if
    the only other entry is called `x`, `inputs` or `input`, it is the positional input.

    Args:
        item: Item that the loader yields.
        reader: Function that converts an item of any other form to a pair, a triple or a dict.

    Raises:
        ValueError: If the roles of the entries are not clear.
        TypeError: If the item has the wrong type.
    """
    if reader is not None:
        item = reader(item)
    if isinstance(item, Batch):
        return item
    fields = _fields(item)
    if fields is not None:
        return _from_fields(fields)
    if isinstance(item, (tuple, list)):
        if len(item) not in (2, 3):
            raise ValueError(
                f"a batch has {len(item)} entries; give (inputs, targets) or (inputs, targets, example weights), where "
                "several inputs form one tuple or dict, or pass read_batch= to name the parts"
            )
        return _checked(*item)
    raise TypeError(
        f"a batch has type {type(item).__name__}; give (inputs, targets), a dict or a dataclass, or pass read_batch= "
        "to convert it; for tensors in memory, use DataLoader(TensorDataset(x, y), batch_size=...)"
    )


def _fields(item: Any) -> dict[str, Any] | None:
    if isinstance(item, Mapping):
        return dict(item)
    if dataclasses.is_dataclass(item) and not isinstance(item, type):
        return {entry.name: getattr(item, entry.name) for entry in dataclasses.fields(item)}
    if isinstance(item, tuple) and hasattr(item, "_asdict"):
        named: dict[str, Any] = item._asdict()
        return named if any(key in named for key in TARGET_KEYS) else None
    return None


def _from_fields(fields: dict[str, Any]) -> Batch:
    fields = {key: value for key, value in fields.items() if value is not None}
    targets = [key for key in TARGET_KEYS if key in fields]
    if len(targets) != 1:
        found = " and ".join(targets) if targets else "no target"
        raise ValueError(
            f"a batch has {found} among its entries {list(fields)}; "
            f"give exactly one of {', '.join(TARGET_KEYS)}, or pass read_batch= to name the parts"
        )
    y = fields.pop(targets[0])
    weight_keys = [key for key in WEIGHT_KEYS if key in fields]
    if len(weight_keys) > 1:
        raise ValueError(f"a batch has {' and '.join(weight_keys)}; give only one of these entries")
    weights = fields.pop(weight_keys[0]) if weight_keys else None
    if not fields:
        raise ValueError(f"a batch has only {targets[0]!r}; add the inputs")
    only = next(iter(fields))
    x = fields[only] if len(fields) == 1 and only in INPUT_KEYS else fields
    return _checked(x, y, weights)


def _checked(x: Any, y: Any, weights: Any = None) -> Batch:
    if not (isinstance(x, Tensor) and isinstance(y, Tensor) and weights is None):
        x, y, weights = pytree.tree_map_only(np.ndarray, torch.from_numpy, (x, y, weights))
    for what, value in (("targets", y), ("example weights", weights)):
        if not isinstance(value, Tensor) and not (value is None and what != "targets"):
            texts = isinstance(value, (list, tuple)) and any(isinstance(item, str) for item in value)
            hint = "; for labels that are texts, number the classes from 0" if texts else ""
            raise TypeError(
                f"a batch's {what} have type {type(value).__name__}; give a tensor with one row per example{hint}"
            )
    if y.ndim == 0:
        raise ValueError(
            "a batch's targets are a single number; give one row per example, [B] or [B, ...]; for a dataset, use "
            "DataLoader(dataset, batch_size=...)"
        )
    if y.shape[0] == 0:
        raise ValueError("a batch has no examples; drop empty batches in the loader")
    if weights is not None and weights.shape != (y.shape[0],):
        raise ValueError(
            f"a batch's example weights have shape {tuple(weights.shape)}; give one weight per example, [{y.shape[0]}]"
        )
    return Batch(x, y, weights)


def count_examples(loader: Iterable[Any], reader: BatchReader | None = None) -> int:
    """Number of examples: the length of the loader's dataset or of the sampled subset, or a count in one pass."""
    dataset = getattr(loader, "dataset", None)
    sampler = getattr(loader, "sampler", None)
    if isinstance(sampler, SubsetRandomSampler) and not _yields_batches(loader):
        count = len(sampler)
    elif dataset is not None and hasattr(dataset, "__len__") and not _yields_batches(loader):
        count = len(dataset)
    elif isinstance(loader, DataLoader) and not hasattr(dataset, "__len__"):
        raise ValueError(
            f"fit: {type(dataset).__name__} has no length; give num_data=, the number of examples in the whole dataset"
        )
    else:
        check_repeatable(loader)
        count = sum(len(parse_batch(item, reader)) for item in loader)
    if count == 0:
        raise ValueError("fit: the loader has no examples; give a loader with at least one example")
    return count


def first_batches(loader: Iterable[Any], num_examples: int, reader: BatchReader | None = None) -> list[Batch]:
    """The first batches of a loader with at most `num_examples` examples, but at least one batch if there is any."""
    batches: list[Batch] = []
    for item in loader:
        batch = parse_batch(item, reader)
        if batches and sum(map(len, batches)) + len(batch) > num_examples:
            break
        batches.append(batch)
    return batches


def batches_all_over(
    loader: Iterable[Any], num_examples: int | None, reader: BatchReader | None = None
) -> Iterator[Batch]:
    """Batches with enough examples. Unless the loader shuffles, they are equally spaced, because rows may be sorted."""
    shuffled = isinstance(loader, DataLoader) and not isinstance(loader.sampler, SequentialSampler)
    length = len(loader) if isinstance(loader, Sized) and not shuffled else 0
    seen, needed, total = 0, 1, 1  # `needed` of `total` items are taken
    for index, item in enumerate(loader):
        if index and index * needed // total == (index - 1) * needed // total:
            continue
        batch = parse_batch(item, reader)
        yield batch
        seen += len(batch)
        if num_examples is not None and seen >= num_examples:
            return
        if index == 0 and length and seen and num_examples is not None:
            total, needed = length, min(length, -(-num_examples // seen))


def cut(batches: Sequence[Batch], count: int) -> list[Batch]:
    """The first `count` examples of some batches."""
    found: list[Batch] = []
    for batch in batches:
        left = count - sum(map(len, found))
        if left > 0:
            found.append(batch if len(batch) <= left else batch.rows(slice(0, left)))
    return found


def total_count(batches: Iterable[Batch]) -> float:
    """Sum of the example weights of some batches, or the number of examples if there are no weights. It is never 0."""
    return max(sum(float(batch.counts.sum()) for batch in batches), torch.finfo(torch.float64).tiny)


def min_examples(loader: Any, seen: int | None = None) -> int | None:
    """Lower bound on the number of examples in a loader's dataset; `None` if unknown.

    If the loader forms the batches itself, this is the length of its dataset or sampler. Otherwise it is `seen`, which is the
    number of examples in an epoch.
    """
    dataset: Any = getattr(loader, "dataset", None)
    sampler: Any = getattr(loader, "sampler", None)
    if not hasattr(dataset, "__len__") or _yields_batches(loader):
        return seen
    if getattr(loader, "batch_size", None) is None and getattr(loader, "batch_sampler", None) is not None:
        return min(seen, len(dataset)) if seen is not None else None
    return min(len(dataset), len(sampler)) if hasattr(sampler, "__len__") else len(dataset)


def _yields_batches(loader: Any) -> bool:
    """Whether the items of a loader's dataset are already batches."""
    return isinstance(loader, DataLoader) and loader.batch_sampler is None


def check_num_data(num_data: int | None, found: int | None) -> None:
    """Raise `ValueError` if the loader has more examples than `num_data`."""
    if num_data is not None and found is not None and num_data < found:
        raise ValueError(
            f"fit: num_data={num_data}, but the loader has {found} examples; give at least {found}, or leave out "
            "num_data= to count the examples; a number that is too small makes the prior too strong"
        )


def batch_size(loader: Any) -> int | None:
    """Number of examples in a full batch of a loader; `None` if unknown."""
    size = getattr(loader, "batch_size", None)
    if size is None:
        size = getattr(getattr(loader, "batch_sampler", None), "batch_size", None)
    return size if isinstance(size, int) else None


def count_batches(loader: Any) -> int | None:
    """Number of batches in a loader; `None` if unknown."""
    try:
        return len(loader)
    except TypeError:
        return None


def check_repeatable(loader: Any) -> None:
    """Raise `TypeError` if a loader cannot be iterated once per epoch."""
    if not hasattr(loader, "__iter__") and not hasattr(loader, "__getitem__"):
        raise TypeError(
            f"fit: the loader has type {type(loader).__name__}; give a DataLoader or another iterable of batches"
        )
    if isinstance(loader, Tensor):
        raise TypeError("fit: the loader is a Tensor; give a DataLoader, or a list of batches [(x, y), ...]")
    if hasattr(loader, "__next__"):
        raise TypeError(
            f"fit: the loader has type {type(loader).__name__}, which can be iterated only once; give an iterable that "
            "can be iterated again in every epoch"
        )


# -- data kept on the device -----------------------------------------------------------------------------------------

MAX_MEMORY_SHARE = 0.25
"""A dataset is kept on the GPU if it takes at most this share of the free memory."""


class ResidentLoader:
    """Batches of a `DataLoader` over a `TensorDataset`, gathered on the device, with the same order and random numbers."""

    def __init__(self, loader: DataLoader[Any], device: torch.device) -> None:
        self.loader, self.device = loader, device
        dataset: Any = loader.dataset
        self.tensors = [tensor.to(device) for tensor in dataset.tensors]

    def __iter__(self) -> Iterator[tuple[Tensor, ...]]:
        # A DataLoader draws the seed of its workers at this point.
        torch.empty((), dtype=torch.int64).random_(generator=self.loader.generator)
        for rows in self.loader.batch_sampler:  # type: ignore[union-attr]
            index = torch.tensor(rows)
            index = index.pin_memory().to(self.device, non_blocking=True) if self.device.type == "cuda" else index
            yield tuple(tensor.index_select(0, index) for tensor in self.tensors)


def as_resident(loader: Any, device: torch.device) -> Any:
    """A loader that keeps its data on the GPU, if the data are tensors that fit into GPU memory; otherwise the loader itself."""
    plain = type(loader) is DataLoader and type(loader.dataset) is TensorDataset
    if device.type != "cuda" or not plain or loader.collate_fn is not default_collate or loader.batch_sampler is None:
        return loader
    needed = sum(tensor.numel() * tensor.element_size() for tensor in loader.dataset.tensors)
    return ResidentLoader(loader, device) if needed <= MAX_MEMORY_SHARE * torch.cuda.mem_get_info(device)[0] else loader
