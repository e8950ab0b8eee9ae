"""Processes that train together: a single process, or several processes of Lightning Fabric."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset

from bayesify.arguments.installing import how_to_install
from bayesify.predictor import Batch
from bayesify.training.arguments import Devices
from bayesify.training.batches import BatchReader, parse_batch


class Processes:
    """A single process; base class of `FabricProcesses`.

    Attributes:
        rank: Rank of this process.
        count: Number of processes.
    """

    rank = 0
    count = 1

    def device(self, asked: torch.device | None) -> torch.device:
        """Device of this process."""
        assert asked is not None
        if asked.type == "cuda" and not torch.cuda.is_available():
            raise ValueError(f"fit: device={str(asked)!r}, but torch sees no CUDA device here; use device='cpu'")
        if asked.type == "cuda" and (asked.index or 0) >= torch.cuda.device_count():
            raise ValueError(
                f"fit: device={str(asked)!r}, but this machine has {torch.cuda.device_count()} CUDA devices; use a lower index"
            )
        return asked

    def wrap(self, module: nn.Module) -> nn.Module:
        """The module whose backward pass averages gradients over processes."""
        return module

    def without_sync(self, module: nn.Module) -> AbstractContextManager[Any]:
        """A context in which backward passes change only the gradients of this process."""
        return nullcontext()

    def total(self, values: Any) -> Any:
        """Sum over processes of a number, or of each number in a list."""
        return values

    def gather(self, state: Tensor) -> list[Tensor]:
        """Tensors of all processes, in order of rank."""
        return [state]

    def any(self, flag: bool) -> bool:
        """Whether the flag is set in any process."""
        return flag

    def agree(self, value: int) -> int:
        """Value of the first process."""
        return value

    def barrier(self) -> None:
        """Wait for all processes."""

    def batches(
        self, loader: Iterable[Any], iterate: Callable[[Iterable[Any]], Iterator[Any]], reader: BatchReader | None
    ) -> Iterator[tuple[Batch, int, int]]:
        """For each batch: this process's part, the number of examples in the part, and the number in the whole batch."""
        for item in iterate(loader):
            batch = parse_batch(item, reader)
            yield batch, len(batch), len(batch)


class FabricProcesses(Processes):
    """Several processes of a launched `Fabric`. Each process handles its part of every batch.

    The loader yields whole batches. The process with rank r of R takes the examples r, r + R, ... of a batch. With a
    map-style `DataLoader`, each process loads only its part. With other loaders, each process loads the whole batch and
    keeps its part.
    """

    def __init__(self, fabric: Any) -> None:
        self._fabric = fabric
        self.rank, self.count = fabric.global_rank, fabric.world_size
        self._device: torch.device = fabric.device  # a device of the requested kind

    def device(self, asked: torch.device | None) -> torch.device:
        """The device that Fabric gave to this process."""
        return self._device

    def wrap(self, module: nn.Module) -> nn.Module:
        """The module inside DistributedDataParallel."""
        wrapped: nn.Module = self._fabric.setup_module(module, move_to_device=False)
        return wrapped

    def without_sync(self, module: nn.Module) -> AbstractContextManager[Any]:
        """DistributedDataParallel's `no_sync`."""
        context: AbstractContextManager[Any] = self._fabric.no_backward_sync(module)
        return context

    def total(self, values: Any) -> Any:
        """Sum over processes of a number, or of each number in a list, in float64 if the device supports it."""
        dtype = torch.float32 if self._device.type == "mps" else torch.float64
        result = self._fabric.all_reduce(torch.tensor(values, dtype=dtype, device=self._device), reduce_op="sum")
        return result.tolist()

    def gather(self, state: Tensor) -> list[Tensor]:
        """Tensors of all processes, in order of rank, on the CPU."""
        gathered: Tensor = self._fabric.all_gather(state.to(self._device))
        return list(gathered.cpu().view(self.count, *state.shape))

    def any(self, flag: bool) -> bool:
        """Whether the flag is set in any process."""
        return bool(self.total(float(flag)) > 0)

    def agree(self, value: int) -> int:
        """Value of the first process."""
        agreed: int = self._fabric.broadcast(value)
        return agreed

    def barrier(self) -> None:
        """Wait for all processes."""
        self._fabric.barrier()

    def batches(
        self, loader: Iterable[Any], iterate: Callable[[Iterable[Any]], Iterator[Any]], reader: BatchReader | None
    ) -> Iterator[tuple[Batch, int, int]]:
        """For each batch: this process's part, the number of examples in the part, and the number in the whole batch.

        If a batch has fewer examples than there are processes, a process without a part gets one example, which does
        not count.
        """
        streams = isinstance(loader, DataLoader) and isinstance(loader.dataset, IterableDataset)
        if isinstance(loader, DataLoader) and loader.batch_sampler is not None and not streams:
            sampler = _PartSampler(loader.batch_sampler, self.rank, self.count)
            for item in iterate(_with_sampler(loader, sampler)):
                batch, whole = parse_batch(item, reader), sampler.sizes.popleft()
                yield batch, _part(whole, self.rank, self.count), whole
            return
        for item in iterate(loader):
            batch = parse_batch(item, reader)
            own = _part(len(batch), self.rank, self.count)
            yield batch.rows(slice(self.rank, None, self.count) if own else slice(0, 1)), own, len(batch)


def _part(size: int, rank: int, count: int) -> int:
    return len(range(rank, size, count))


class _PartSampler:
    """Batch sampler that yields one process's part of each batch of another sampler, and stores the sizes of the whole
    batches."""

    def __init__(self, batches: Any, rank: int, count: int) -> None:
        self._batches, self._rank, self._count = batches, rank, count
        self.sizes: deque[int] = deque()

    def __iter__(self) -> Iterator[list[int]]:
        for batch in self._batches:
            self.sizes.append(len(batch))
            yield list(batch)[self._rank :: self._count] or list(batch)[:1]

    def __len__(self) -> int:
        return len(self._batches)


def _with_sampler(loader: DataLoader[Any], sampler: _PartSampler) -> DataLoader[Any]:
    return DataLoader(
        loader.dataset,
        batch_sampler=sampler,
        num_workers=loader.num_workers,
        collate_fn=loader.collate_fn,
        pin_memory=loader.pin_memory,
        timeout=loader.timeout,
        worker_init_fn=loader.worker_init_fn,
        multiprocessing_context=loader.multiprocessing_context,
        generator=loader.generator,
        prefetch_factor=loader.prefetch_factor,
    )


def count_nodes() -> int:
    """Number of machines on which torchrun started this program; 1 if torchrun was not used."""
    return int(os.environ.get("GROUP_WORLD_SIZE", "1")) if "TORCHELASTIC_RUN_ID" in os.environ else 1


def make_fabric(devices: Devices, *, unused: bool) -> Any:
    """Make a Fabric over several devices. `unused` allows parameters that get no gradient, as in the MAP phase.

    Raises:
        ImportError: If Lightning Fabric is not installed.
        ValueError: If this machine has too few devices.
    """
    try:
        from lightning_fabric import Fabric
        from lightning_fabric.strategies.ddp import DDPStrategy
    except ImportError:
        raise ImportError(f"fit: Devices({devices.count}) needs Lightning Fabric; {how_to_install('train')}") from None
    kind = torch.device(devices.kind or ("cuda" if torch.cuda.is_available() else "cpu")).type
    if kind == "cuda" and torch.cuda.device_count() < devices.count:
        raise ValueError(
            f"fit: Devices({devices.count}), but this machine has {torch.cuda.device_count()} CUDA devices; lower the count"
        )
    starts: dict[str, Any] = {"script": "popen", "fork": "fork"}
    ddp = DDPStrategy(start_method=starts[devices.launch], find_unused_parameters=unused)
    return Fabric(accelerator=kind, devices=devices.count, num_nodes=count_nodes(), strategy=ddp)
