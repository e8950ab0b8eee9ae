"""Data that stay on the device: batches of a loader without a copy from the host for each."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset, default_collate

MAX_MEMORY_SHARE = 0.25
"""A data set is held on a GPU if it takes at most this share of its free memory."""


class ResidentLoader:
    """The batches of a `DataLoader` over a `TensorDataset`, in its order and from its random numbers, gathered on the device."""

    def __init__(self, loader: DataLoader[Any], device: torch.device) -> None:
        self.loader, self.device = loader, device
        dataset: Any = loader.dataset
        self.tensors = [tensor.to(device) for tensor in dataset.tensors]

    def __iter__(self) -> Iterator[tuple[Tensor, ...]]:
        torch.empty((), dtype=torch.int64).random_(generator=self.loader.generator)  # the seed of a loader's workers
        for rows in self.loader.batch_sampler:  # type: ignore[union-attr]
            index = torch.tensor(rows)
            index = index.pin_memory().to(self.device, non_blocking=True) if self.device.type == "cuda" else index
            yield tuple(tensor.index_select(0, index) for tensor in self.tensors)


def as_resident(loader: Any, device: torch.device) -> Any:
    """A loader whose data stay on a GPU where they are tensors that fit, else the loader itself."""
    plain = type(loader) is DataLoader and type(loader.dataset) is TensorDataset
    if device.type != "cuda" or not plain or loader.collate_fn is not default_collate or loader.batch_sampler is None:
        return loader
    needed = sum(tensor.numel() * tensor.element_size() for tensor in loader.dataset.tensors)
    return ResidentLoader(loader, device) if needed <= MAX_MEMORY_SHARE * torch.cuda.mem_get_info(device)[0] else loader
