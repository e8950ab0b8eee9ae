"""Running statistics of normalization layers: the buffers, the test whether a training run set them, and statistics per draw."""

from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass
from typing import Literal, Self, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from bayesify.weights.named_parameters import POSITIONS_SUFFIX

Items = TypeVar("Items", bound=Sized)

BatchStatistics = Literal["auto", "frozen", "train"] | Sequence[str]
"""Treatment of running statistics while a posterior trains; see `bayesianize`. A sequence names the frozen layers."""
MAX_INITIAL_SHARE = 0.05
"""Statistics count as trained if their initial values (mean 0, variance 1) have less weight than this, which takes 29 batches at
the usual momentum of 0.1. One or two forward passes in training mode are therefore too few."""
MIN_BATCHES = 20
"""Smallest number of batches for trained statistics. This limit matters for plain averages (`momentum=None`), in which initial
values have no weight, and for large momenta."""


def tracking_layers(network: nn.Module) -> dict[str, _NormBase]:
    """The layers that track running statistics and use them for normalization in evaluation mode, by name."""
    return {
        path: module
        for path, module in network.named_modules()
        if isinstance(module, _NormBase) and module.running_mean is not None and module.running_var is not None
    }


def running_statistics(network: nn.Module) -> dict[str, Tensor]:
    """The buffers in which normalization layers keep running statistics, by name."""
    return {
        f"{path}.{name}" if path else name: buffer
        for path, module in tracking_layers(network).items()
        for name, buffer in module.named_buffers(recurse=False)
    }


def pooling(layers: Iterable[_NormBase], batches: Iterable[Items]) -> Iterator[Items]:
    """Yield the batches unchanged. Before each batch, the momentum of every layer in `layers` is set.

    After a pass over all batches, the running statistics are averages in which each batch is weighted by its size. Raises
    `ValueError` if there are no batches.
    """
    layers, seen = list(layers), 0
    for batch in batches:
        seen += len(batch)
        for layer in layers:
            layer.momentum = len(batch) / seen
        yield batch
    if not seen:
        raise ValueError(
            "the loader from which batch statistics are computed yields no batch; give a loader over the training data"
        )


def is_trained(layer: _NormBase) -> bool:
    """Whether a layer's statistics come from a training run.

    The statistics must have been computed from enough batches. If the layer does not count batches, its statistics must differ
    from their initial values.
    """
    assert layer.running_mean is not None
    assert layer.running_var is not None
    if layer.running_mean.is_meta:
        return False
    batches = 0 if layer.num_batches_tracked is None else int(layer.num_batches_tracked)
    if batches and layer.momentum != 0:
        return batches >= MIN_BATCHES and (1 - (layer.momentum or 1.0)) ** batches < MAX_INITIAL_SHARE
    return bool((layer.running_mean != 0).any() | (layer.running_var != 1).any())


def frozen_layers(network: nn.Module, choice: BatchStatistics, belong: bool) -> tuple[str, ...]:
    """Names of the layers whose statistics stay fixed while a posterior trains; for `choice` see `bayesianize`.

    `belong` says whether the statistics suit the initial draws of all posteriors; if it is false, `"auto"` freezes no layer.
    Raises `ValueError` if a name in `choice` does not name a layer with running statistics.
    """
    layers = tracking_layers(network)
    if choice == "train":
        return ()
    if choice == "auto":
        return tuple(path for path, layer in layers.items() if belong and is_trained(layer))
    names = tuple(layers) if choice == "frozen" else (choice,) if isinstance(choice, str) else tuple(choice)
    for name in names:
        if name not in layers:
            raise ValueError(
                f"bayesianize: batch_statistics= names {name!r}, which is not a layer with running statistics; give "
                "'auto', 'frozen', 'train', or names of layers that keep them "
                f"({', '.join(layers) or 'the network has none'})"
            )
    return names


def same_choice(network: nn.Module, frozen: tuple[str, ...]) -> str | list[str]:
    """A value of `batch_statistics` that freezes the layers `frozen`, whatever the network's statistics are."""
    tracking = tuple(tracking_layers(network))
    if frozen and frozen != tracking:
        return list(frozen)
    return "frozen" if frozen else "train" if tracking else "auto"


@dataclass(frozen=True)
class KeptStatistics:
    """Running statistics of K draws, each computed with the draw's own weights; a seed determines the draws.

    The statistics are valid until a tensor that determines the draws or the forward passes changes. A checksum of the tensors on
    which the statistics depend detects changes. The seed is for a generator on the CPU, whose numbers are the same for every
    device.
    """

    seed: int
    checksum: int  # see `checksum_of`
    values: Mapping[str, Tensor]  # statistics by the buffer's name, [K, *shape] each

    @classmethod
    def of(cls, seed: int, values: Mapping[str, Tensor], *modules: nn.Module) -> Self:
        """Statistics that are valid as long as the parameters and buffers of the modules stay the same."""
        return cls(seed, checksum_of(modules, values), values)

    def hold(self, *modules: nn.Module) -> bool:
        """Whether the modules still have the parameters and buffers for which the statistics are valid."""
        return self.checksum == checksum_of(modules, self.values)

    def __len__(self) -> int:
        return len(next(iter(self.values.values())))

    def buffers(self, num_draws: int) -> list[dict[str, Tensor]]:
        """Buffers by name, for each of the first `num_draws` draws, as copies, because training mode changes buffers in place."""
        copied = {name: value[:num_draws].clone() for name, value in self.values.items()}
        return [{name: value[index] for name, value in copied.items()} for index in range(num_draws)]

    def map(self, function: Callable[[Tensor], Tensor]) -> Self:
        """A new object with `function` applied to each statistic."""
        return type(self)(self.seed, self.checksum, {name: function(value) for name, value in self.values.items()})

    def state(self) -> dict[str, Tensor]:
        """Tensors by name, for a file."""
        return {"seed": torch.tensor(self.seed), "checksum": torch.tensor(self.checksum), **self.values}

    @classmethod
    def restore(cls, state: Mapping[str, Tensor], network: nn.Module) -> Self:
        """The object from its `state`, on the devices of a network's own statistics. Raises `ValueError` if the state
        does not hold statistics of this network."""
        own, values = running_statistics(network), dict(state)
        seed, checksum = (int(values.pop(name)) for name in ("seed", "checksum"))
        for name, value in values.items():
            mine = own.get(name)
            if mine is None or value.ndim == 0 or (value.shape[1:], value.dtype) != (mine.shape, mine.dtype):
                raise ValueError(f"the file has batch statistics for {name} that do not fit this network")
        if not values or len({len(value) for value in values.values()}) > 1 or not all(map(len, values.values())):
            raise ValueError("the stored batch statistics of the layers have different numbers of draws")
        return cls(seed, checksum, {name: value.to(own[name].device) for name, value in values.items()})


_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@torch.no_grad()
def checksum_of(modules: Iterable[nn.Module], without: Container[str]) -> int:
    """A 64-bit checksum of all parameters and buffers of modules: sums of their bits, mixed with their positions.

    The checksum is the same on every device. Tensors whose names are in `without` do not count. The positions of entries that
    pruning kept do not count either, because these positions follow from the masks.
    """
    total: Tensor | None = None
    named = (pair for module in modules for pair in (*module.named_parameters(), *module.named_buffers()))
    for tensor in (value for name, value in named if name not in without and not name.endswith(POSITIONS_SUFFIX)):
        bits = tensor.detach().contiguous().view(_INTEGERS[min(tensor.element_size(), 8)]).reshape(-1).long()
        mixed = bits + torch.arange(1, bits.numel() + 1, device=bits.device) * 0x1E3779B97F4A7C15
        part = (mixed * (mixed >> 31)).sum()
        total = part if total is None else total.to(part.device) * 1_000_003 + part
    return 0 if total is None else int(total)
