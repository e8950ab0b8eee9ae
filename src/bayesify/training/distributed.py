"""Processes that train together: a single process, or several processes of Lightning Fabric."""

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

KEPT_OPTIONS: tuple[str, ...] = ("num_workers", "collate_fn", "pin_memory", "timeout", "worker_init_fn")
KEPT_OPTIONS += ("multiprocessing_context", "generator", "prefetch_factor")
"""Options of a `DataLoader` that do not depend on its sampler."""


class Processes:
    """The processes that train together: this process alone, or several processes of a launched `Fabric`.

    The loader yields whole batches. Of R processes, the process with rank r takes the examples r, r + R, ... of a batch. With a
    map-style `DataLoader`, each process loads only its part. With other loaders, each process loads the whole batch and uses only
    its part.
    """

    def __init__(self, fabric: Any = None) -> None:
        self._fabric = fabric
        self.rank: int = 0 if fabric is None else fabric.global_rank
        self.count: int = 1 if fabric is None else fabric.world_size

    def device(self, asked: torch.device | None) -> torch.device:
        """Device of this process: the device that Fabric assigned to the process or, without Fabric, the requested device."""
        found: torch.device | None = asked if self._fabric is None else self._fabric.device
        assert found is not None
        if found.type == "cuda" and not torch.cuda.is_available():
            raise ValueError(f"fit: device={str(found)!r}, but torch sees no CUDA device here; use device='cpu'")
        if found.type == "cuda" and (found.index or 0) >= torch.cuda.device_count():
            raise ValueError(
                f"fit: device={str(found)!r}, but this machine has {torch.cuda.device_count()} CUDA devices; use a lower index"
            )
        return found

    def wrap(self, module: nn.Module) -> nn.Module:
        """The module, wrapped by DistributedDataParallel (which averages gradients) if there are several processes."""
        fabric = self._fabric
        wrapped: nn.Module = module if fabric is None else fabric.setup_module(module, move_to_device=False)
        return wrapped

    def without_sync(self, module: nn.Module) -> AbstractContextManager[Any]:
        """A context in which backward passes change only the gradients of this process."""
        return nullcontext() if self._fabric is None else self._fabric.no_backward_sync(module)

    def total(self, values: Any) -> Any:
        """Sum of a number over all processes, or one sum for each number of a list; in float64 if the device supports it."""
        if self._fabric is None:
            return values
        device = self._fabric.device
        dtype = torch.float32 if device.type == "mps" else torch.float64
        return self._fabric.all_reduce(torch.tensor(values, dtype=dtype, device=device), reduce_op="sum").tolist()

    def gather(self, state: Tensor) -> list[Tensor]:
        """Tensors of all processes, in order of rank, on the CPU."""
        if self._fabric is None:
            return [state]
        gathered: Tensor = self._fabric.all_gather(state.to(self._fabric.device))
        return list(gathered.cpu().view(self.count, *state.shape))

    def any(self, flag: bool) -> bool:
        """Whether the flag is set in any process."""
        return bool(self.total(float(flag)) > 0)

    def agree(self, value: int) -> int:
        """Return the first process's value in all processes."""
        agreed: int = value if self._fabric is None else self._fabric.broadcast(value)
        return agreed

    def barrier(self) -> None:
        """Wait for all processes."""
        if self._fabric is not None:
            self._fabric.barrier()

    def batches(
        self, loader: Any, iterate: Callable[[Iterable[Any]], Iterator[Any]], reader: BatchReader | None
    ) -> Iterator[tuple[Batch, int, int]]:
        """For each batch: this process's part, the number of examples in the part, and the number in the whole batch.

        If a batch has fewer examples than there are processes, a process without a part gets one example, which does
        not count.
        """
        sampler: _PartSampler | None = None
        indexed = isinstance(loader, DataLoader) and not isinstance(loader.dataset, IterableDataset)
        if self._fabric is not None and indexed and loader.batch_sampler is not None:
            sampler = _PartSampler(loader.batch_sampler, self.rank, self.count)
            kept = {key: getattr(loader, key) for key in KEPT_OPTIONS}
            loader = DataLoader(loader.dataset, batch_sampler=sampler, **kept)
        for item in iterate(loader):
            batch = parse_batch(item, reader)
            whole = len(batch) if sampler is None else sampler.sizes.popleft()
            own = len(range(self.rank, whole, self.count))
            if self._fabric is not None and sampler is None:
                batch = batch.rows(slice(self.rank, None, self.count) if own else slice(0, 1))
            yield batch, own, whole


class _PartSampler:
    """Batch sampler of one process's part of each batch of another sampler. It stores the sizes of the whole batches."""

    def __init__(self, batches: Any, rank: int, count: int) -> None:
        self._batches, self._rank, self._count = batches, rank, count
        self.sizes: deque[int] = deque()

    def __iter__(self) -> Iterator[list[int]]:
        for batch in self._batches:
            self.sizes.append(len(batch))
            yield list(batch)[self._rank :: self._count] or list(batch)[:1]

    def __len__(self) -> int:
        return len(self._batches)


def count_nodes() -> int:
    """Number of machines on which torchrun started this program; 1 if torchrun was not used."""
    return int(os.environ.get("GROUP_WORLD_SIZE", "1")) if "TORCHELASTIC_RUN_ID" in os.environ else 1


def make_fabric(devices: Devices, *, unused: bool) -> Any:
    """Make a Fabric over several devices. `unused` allows parameters that get no gradient, as in the MAP phase."""
    try:
        from lightning_fabric import Fabric
        from lightning_fabric.strategies.ddp import DDPStrategy
    except ImportError:
        raise ImportError(f"fit: Devices({devices.count}) needs Lightning Fabric; {how_to_install('train')}") from None
    kind = torch.device(devices.kind or ("cuda" if torch.cuda.is_available() else "cpu")).type
    if kind == "cuda" and torch.cuda.device_count() < devices.count:
        raise ValueError(
            f"fit: Devices({devices.count}), but this machine has {torch.cuda.device_count()} CUDA devices; give "
            "Devices a smaller count"
        )
    starts: dict[str, Any] = {"script": "popen", "fork": "fork"}
    ddp = DDPStrategy(start_method=starts[devices.launch], find_unused_parameters=unused)
    return Fabric(accelerator=kind, devices=devices.count, num_nodes=count_nodes(), strategy=ddp)
