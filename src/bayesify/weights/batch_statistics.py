"""Running statistics of normalization layers: where they lie, and whether they are those of a training."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence, Sized
from typing import Literal, TypeVar

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

Items = TypeVar("Items", bound=Sized)

BatchStatistics = Literal["auto", "frozen", "train"] | Sequence[str]
"""What a posterior's training does with them: see `bayesianize`. Names are those of the layers that are frozen."""
MAX_INITIAL_SHARE = 0.05
"""Weight of the values that statistics start with (mean 0, variance 1), below which they are those of a training: 29 batches at the
usual momentum of 0.1. A forward pass or two of a fresh network in training mode do not make it a trained one."""
MIN_BATCHES = 20
"""The same for plain averages (`momentum=None`), whose start has no weight, and for large momenta."""


def tracking_layers(network: nn.Module) -> dict[str, _NormBase]:
    """The layers that keep statistics of the batches they have seen, and normalize by them in evaluation mode, by name."""
    return {
        path: module
        for path, module in network.named_modules()
        if isinstance(module, _NormBase) and module.running_mean is not None and module.running_var is not None
    }


def running_statistics(network: nn.Module) -> dict[str, Tensor]:
    """The buffers in which normalization layers keep statistics of the batches they have seen, by name."""
    return {
        f"{path}.{name}" if path else name: buffer
        for path, module in tracking_layers(network).items()
        for name, buffer in module.named_buffers(recurse=False)
    }


def pooling(layers: Iterable[_NormBase], batches: Iterable[Items]) -> Iterator[Items]:
    """The same batches, each of which the layers' momenta are set for: a pass over all gives means in which batches count by size.

    Raises:
        ValueError: If there are none.
    """
    layers, seen = list(layers), 0
    for batch in batches:
        seen += len(batch)
        for layer in layers:
            layer.momentum = len(batch) / seen
        yield batch
    if not seen:
        raise ValueError("the loader for batch statistics yields no batch; give one over the training data")


def is_trained(layer: _NormBase) -> bool:
    """Whether a layer's statistics are those of a training: of enough batches, or different from their start without a count."""
    assert layer.running_mean is not None
    assert layer.running_var is not None
    if layer.running_mean.is_meta:
        return False
    batches = 0 if layer.num_batches_tracked is None else int(layer.num_batches_tracked)
    if batches and layer.momentum != 0:
        return batches >= MIN_BATCHES and (1 - (layer.momentum or 1.0)) ** batches < MAX_INITIAL_SHARE
    return bool((layer.running_mean != 0).any() | (layer.running_var != 1).any())


def frozen_layers(network: nn.Module, choice: BatchStatistics, belong: bool) -> tuple[str, ...]:
    """Names of the layers whose statistics stay as they are while a posterior trains.

    Args:
        network: As it was given.
        choice: See `bayesianize`.
        belong: Whether the statistics belong to the draws of all posteriors at their start, which `"auto"` asks for.

    Raises:
        ValueError: If a name is no such layer's.
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
                f"bayesianize: batch_statistics names {name!r}, which keeps no running statistics; "
                f"give 'auto', 'frozen', 'train', or names of such layers ({', '.join(layers) or 'the network has none'})"
            )
    return names


def same_choice(network: nn.Module, frozen: tuple[str, ...]) -> str | list[str]:
    """The choice that freezes the same layers, whatever statistics a network has."""
    tracking = tuple(tracking_layers(network))
    if frozen and frozen != tracking:
        return list(frozen)
    return "frozen" if frozen else "train" if tracking else "auto"
