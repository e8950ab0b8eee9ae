"""A trial run of a network on inducing inputs: the order and inputs of its layers, and whether it mixes examples."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd

from bayesify.posteriors.global_inducing.inputs import OWNER
from bayesify.posteriors.global_inducing.maps import (
    AttentionInput,
    AttentionOutput,
    BilinearMap,
    Convolution,
    LinearMap,
    TransposedConvolution,
)
from bayesify.running.runner import Runner
from bayesify.weights.catalog import Layer, owner_of

Arguments = tuple[tuple[Any, ...], dict[str, Any]]
_MAPS: dict[type[nn.Module], type[LinearMap]] = {
    nn.Bilinear: BilinearMap,
    nn.Linear: LinearMap,
    _ConvTransposeNd: TransposedConvolution,
    _ConvNd: Convolution,
}
TOLERANCE = 1e-2
"""If a layer's input for an example changes by more than this share when other examples are left out, the network mixes
examples. The limit is far above rounding errors."""


@torch.no_grad()
def trace(
    runner: Runner, layers: Sequence[Layer], arguments: Arguments, values: Mapping[str, Tensor]
) -> list[tuple[LinearMap, Tensor]]:
    """Run the network once on the inducing inputs, and return its layers in the order of their calls, each with its outputs.
    Raises `ValueError` if a layer is not a linear map or is not called, if the examples are not along the first axis, or if the
    network mixes examples."""
    maps = [find_map(runner.network, layer) for layer in layers]
    for entry in maps:
        _check_ties(runner.network, entry)
    points = next(value for value in (*arguments[0], *arguments[1].values())).shape[0]
    seen = _look(runner, maps, arguments, values)
    for entry in maps:
        if entry.layer.name not in seen:
            raise ValueError(
                f"{OWNER}: {entry.layer.name} is not called when the network runs; give this layer another posterior, such as "
                "MeanField()"
            )
        for features in seen[entry.layer.name]:
            if features.ndim < 2 or features.shape[0] != points:
                raise ValueError(
                    f"{OWNER}: {entry.layer.name} gets inputs of shape {tuple(features.shape)} for {points} inducing inputs; the "
                    "layers must keep the examples along the first axis (batch_first=True in attention)"
                )
    _check_apart(runner, maps, arguments, values, seen, points)
    order = {name: position for position, name in enumerate(seen)}
    called = sorted(maps, key=lambda entry: order[entry.layer.name])
    modules = {entry.layer.name: runner.network.get_submodule(entry.hooked) for entry in maps}
    made = []
    for entry in called:
        matrix = entry.layer.to_matrix(values)
        own = [part.to(matrix.dtype) for part in seen[entry.layer.name]]
        made.append((entry, entry.outputs(modules[entry.layer.name], own, matrix)))
    return made


def find_map(network: nn.Module, layer: Layer) -> LinearMap:
    """The linear map that belongs to a layer. Raises `ValueError` if there is none, or if its input is not visible from
    outside."""
    weight = layer.weights[0]
    module, path = owner_of(network, weight.name)[0], weight.name.rpartition(".")[0]
    above, _, name = path.rpartition(".")
    if name == "out_proj" and isinstance(network.get_submodule(above), nn.MultiheadAttention):
        return AttentionOutput(layer, above)
    if isinstance(module, nn.MultiheadAttention) and weight.kind == "matrix":
        return AttentionInput(layer, path)
    for kind, found in _MAPS.items():
        if isinstance(module, kind):
            return found(layer, path)
    raise ValueError(
        f"{OWNER}: {weight.name} belongs to {type(module).__name__}, which is not a linear map, or whose inputs cannot "
        f"be observed; give this layer another posterior, such as {{'{layer.name}': MeanField(), '*': GlobalInducing(...)}}"
    )


def _look(
    runner: Runner, maps: Sequence[LinearMap], arguments: Arguments, values: Mapping[str, Tensor]
) -> dict[str, list[Tensor]]:
    """The input of each layer at its first call, in the order of calls."""
    seen: dict[str, list[Tensor]] = {}
    dtypes = {arg.dtype for arg in (*arguments[0], *arguments[1].values()) if arg.is_floating_point()}
    if torch.bfloat16 in dtypes:
        values = {name: value.to(torch.bfloat16) for name, value in values.items()}
    try:
        with runner.evaluating().alone() as own, ExitStack() as hooks:
            for entry in maps:

                def look(module: nn.Module, args: Any, kwargs: Any, entry: LinearMap = entry) -> None:
                    if entry.layer.name not in seen:
                        seen[entry.layer.name] = entry.seen(module, args, kwargs)

                hooked = own.network.get_submodule(entry.hooked)
                hooks.callback(hooked.register_forward_pre_hook(look, with_kwargs=True).remove)
            own.call(values, *arguments)
    except (RuntimeError, IndexError, ValueError, TypeError) as error:
        if str(error).startswith(OWNER):
            raise
        shapes = ", ".join(str(tuple(arg.shape)) for arg in (*arguments[0], *arguments[1].values()))
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")
        raise ValueError(
            f"{OWNER}: the network does not run on inducing inputs of shape {shapes} ({reason}); give inputs that the "
            "network accepts"
        ) from error
    return seen


def _check_apart(
    runner: Runner,
    maps: Sequence[LinearMap],
    arguments: Arguments,
    values: Mapping[str, Tensor],
    seen: Mapping[str, list[Tensor]],
    points: int,
) -> None:
    """Raise `ValueError` if a layer's inputs for the first inducing inputs depend on the other inducing inputs."""
    some = max(1, points // 2)

    def cut(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        return torch.cat((value[:some], value[:some].flip(0))) if points == 1 else value[:some]

    fewer = (tuple(cut(arg) for arg in arguments[0]), {key: cut(value) for key, value in arguments[1].items()})
    alone = _look(runner, maps, fewer, values)
    for entry in maps:
        for whole, part in zip(seen[entry.layer.name], alone[entry.layer.name], strict=True):
            kept = whole[:some].double()
            if part.shape[1:] != whole.shape[1:] or (part[:some] - kept).abs().max() > TOLERANCE * kept.abs().max():
                raise ValueError(
                    f"{OWNER}: the input of {entry.layer.name} for an example depends on the other examples; use a network that "
                    "does not mix examples (GroupNorm instead of batch statistics), or give this layer another posterior"
                )


def _check_ties(network: nn.Module, entry: LinearMap) -> None:
    for weight in entry.layer.weights:
        for alias in weight.aliases:
            owner = owner_of(network, alias)[0]
            if owner is not owner_of(network, weight.name)[0]:
                raise ValueError(
                    f"{OWNER}: {weight.name} is tied to {alias}, and the two have different inputs; give this weight another "
                    f"posterior, such as {{'{weight.name}': MeanField(), '*': GlobalInducing(...)}}"
                )


def check_targets(targets: Any) -> Tensor | None:
    """Check the targets, and return a detached copy of them as initial pseudo-outputs of the last layer. They must be finite
    numbers."""
    if targets is None:
        return None
    try:
        made = torch.as_tensor(targets).detach().clone()
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValueError(f"{OWNER}: targets have type {type(targets).__name__}; give labels or numbers") from error
    if made.ndim == 0 or made.numel() == 0:
        raise ValueError(f"{OWNER}: targets have shape {list(made.shape)}; give one target for each inducing input")
    if not bool(torch.isfinite(made).all()):
        raise ValueError(f"{OWNER}: targets hold NaN or infinity; give finite numbers")
    return made


def start_outputs(targets: Tensor, last: LinearMap, shape: tuple[int, ...], like: Tensor) -> Tensor:
    """Targets as pseudo-outputs of the last layer: labels become one-hot rows, and numeric targets stay unchanged."""
    axis = last.features_axis % len(shape)
    width, rest = shape[axis], shape[:axis] + shape[axis + 1 :]
    name = last.layer.name or "(the network)"
    if not targets.is_floating_point() and tuple(targets.shape) == rest:
        if int(targets.min()) < 0 or int(targets.max()) >= width:
            raise ValueError(
                f"{OWNER}: targets hold the label {int(targets.max() if targets.max() >= width else targets.min())}, but the last "
                f"layer {name} has {width} outputs; labels go from 0 to {width - 1}"
            )
        return F.one_hot(targets.long(), width).movedim(-1, axis).to(like)
    if tuple(targets.shape) == rest and width == 1:
        targets = targets.unsqueeze(axis)
    if tuple(targets.shape) != shape:
        raise ValueError(
            f"{OWNER}: targets have shape {tuple(targets.shape)}, but the last layer {name} has outputs of shape "
            f"{shape} for the inducing inputs; give {shape[0]} rows, each with {width} numbers or with one label for "
            "each output"
        )
    return targets.to(like).clone()
