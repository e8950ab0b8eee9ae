"""Linear maps inside a network: each map's input when the network runs, and the matrices for a regression on this input.

Convolutions are regressions on patches. The patches are never extracted.
"""

import math
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd

from bayesify.maths.convolution_moments import Geometry, convolution_moments
from bayesify.maths.gamma import widened
from bayesify.maths.patch_products import patch_products
from bayesify.posteriors.global_inducing.inputs import OWNER
from bayesify.posteriors.global_inducing.likelihood import HalfPrecision
from bayesify.running.runner import Runner
from bayesify.weights.catalog import Layer, owner_of


@dataclass(frozen=True)
class LinearMap:
    """One layer `[W b]` of a network as a regression from the layer's input to pseudo-outputs."""

    layer: Layer
    hooked: str
    """Name of the module whose call reveals the layer's input."""
    features_axis: ClassVar[int] = -1
    """The axis of the pseudo-outputs along which the layer's outputs lie."""
    costly: ClassVar[bool] = False
    """Whether the matrices of the regression cost more than passing the inducing inputs through the layer."""

    def takes(self, module: nn.Module, dtype: torch.dtype) -> bool:
        """Whether `moments` has a special method for features of a low-precision dtype."""
        return False

    @property
    def has_weight(self) -> bool:
        """Whether the posterior spans the layer's matrix, and not only its bias."""
        return not self.layer.weights[0].is_bias

    @property
    def has_bias(self) -> bool:
        """Whether the posterior spans the layer's bias."""
        return self.layer.weights[-1].is_bias

    def seen(self, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Tensor]:
        """A list of features. If groups of the layer's outputs have different features, the list has one entry for each group.
        Each entry is [M, *positions, d]."""
        return [argument(args, kwargs, 0, "input")]

    def output_shape(self, seen: list[Tensor], module: nn.Module) -> tuple[int, ...]:
        """Shape of the pseudo-outputs."""
        positions = seen[0].shape[1:-1] if self.has_weight else ()
        return (seen[0].shape[0], *positions, self.layer.rows)

    def outputs(self, module: nn.Module, seen: list[Tensor], matrix: Tensor) -> Tensor:
        r"""$A [W\ b]^\top$, of shape `output_shape`: the outputs for the features from `seen`. `matrix` is `[W b]`."""
        bias = matrix[:, -1] if self.has_bias else matrix.new_zeros(len(matrix))
        if not self.has_weight:
            return bias.expand(self.output_shape(seen, module)).clone()
        weights = matrix[:, : self.layer.weights[0].matrix_shape[1]].chunk(len(seen))
        return torch.cat([features @ part.mT for features, part in zip(seen, weights, strict=True)], -1) + bias

    def moments(
        self, module: nn.Module, seen: list[Tensor], targets: Tensor, mix: HalfPrecision
    ) -> tuple[Tensor, Tensor]:
        r"""$A^\top \Lambda A$, [G, D, D], and $A^\top \Lambda V$, [G, D, R], for targets V of shape `output_shape`."""
        parts = mix(targets).flatten(0, -2).chunk(len(seen), -1)
        ones = mix(targets.new_ones(targets.shape[0], *[1] * (targets.ndim - 1))).expand(*targets.shape[:-1], 1)
        grams, crosses = [], []
        for features, part in zip(seen, parts, strict=True):
            columns = [mix(features).flatten(0, -2)] if self.has_weight else []
            columns += [ones.flatten(0, -2)] if self.has_bias else []
            design = torch.cat(columns, -1) if len(columns) > 1 else columns[0]
            grams.append(design.mT @ design)
            crosses.append(design.mT @ part)
        return torch.stack(grams), torch.stack(crosses)


class BilinearMap(LinearMap):
    """`nn.Bilinear`: linear in the products of its two inputs."""

    def seen(self, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Tensor]:
        """All products of an entry of the first input and an entry of the second input."""
        left, right = widened(argument(args, kwargs, 0, "input1")), widened(argument(args, kwargs, 1, "input2"))
        return [(left.unsqueeze(-1) * right.unsqueeze(-2)).flatten(-2)]


class AttentionInput(LinearMap):
    """The projections of queries, keys and values in `nn.MultiheadAttention`. The projections are separate or stacked in one
    matrix."""

    def seen(self, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Tensor]:
        """The queries, keys or values. For a stacked matrix, the result has one entry if queries, keys and values are the same
        tensor, and otherwise three entries."""
        names = ("query", "key", "value")
        given = [argument(args, kwargs, index, name) for index, name in enumerate(names)]
        leaf = self.layer.name.rpartition(".")[2]
        for name, tensor in zip(names, given, strict=True):
            if leaf == f"{name[0]}_proj":
                return [tensor]
        if not self.has_weight or (given[0] is given[1] and given[1] is given[2]):
            return given[:1]
        if len({tensor.shape for tensor in given}) > 1:
            shapes = ", ".join(str(tuple(tensor.shape)) for tensor in given)
            raise ValueError(
                f"{OWNER}: {self.layer.name} projects queries, keys and values of different shapes ({shapes}) by one "
                "matrix; give this layer another posterior, such as MeanField()"
            )
        return given


class AttentionOutput(LinearMap):
    """The projection at the end of `nn.MultiheadAttention`. Torch applies this projection without calling its module."""

    def seen(self, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Tensor]:
        """The output of the heads. To find this output, the attention module runs with the identity in place of its output
        projection."""
        assert isinstance(module, nn.MultiheadAttention)
        slots: dict[str, Any] = module.out_proj._parameters
        kept = dict(slots)
        query = argument(args, kwargs, 0, "query")
        try:
            slots["weight"] = torch.eye(module.embed_dim, dtype=query.dtype, device=query.device)
            slots["bias"] = query.new_zeros(module.embed_dim)
            heads: Tensor = module.forward(*args, **{**kwargs, "need_weights": False})[0]
        finally:
            slots.update(kept)
        return [heads]


def argument(args: tuple[Any, ...], kwargs: Mapping[str, Any], index: int, name: str) -> Any:
    """An argument of a call, found by position or by name."""
    return args[index] if index < len(args) else kwargs[name]


class Convolution(LinearMap):
    """A convolution over any number of axes. Pseudo-outputs are maps, [M, c_out, *o], and all positions share the precision."""

    features_axis: ClassVar[int] = 1
    costly: ClassVar[bool] = True

    def seen(self, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Tensor]:
        """The map over which the kernel moves. Padding with values other than zero is already applied."""
        assert isinstance(module, _ConvNd)
        x: Tensor = argument(args, kwargs, 0, "input")
        if x.ndim != len(module.kernel_size) + 2:
            raise ValueError(
                f"{OWNER}: {self.layer.name} gets an input of shape {tuple(x.shape)}, which has no axis of examples; "
                "change the network so that every layer keeps the examples along the first axis"
            )
        if module.padding_mode != "zeros":
            x = F.pad(x, module._reversed_padding_repeated_twice, mode=module.padding_mode)
        return [x]

    def geometry(self, module: nn.Module) -> Geometry:
        """Geometry of the kernel over the map that `seen` returns."""
        assert isinstance(module, _ConvNd)
        twice = list(module._reversed_padding_repeated_twice)
        pairs = [(twice[i], twice[i + 1]) for i in range(0, len(twice), 2)][::-1]
        if module.padding_mode != "zeros":
            pairs = [(0, 0)] * len(pairs)
        return Geometry(module.kernel_size, module.stride, module.dilation, tuple(pairs), module.groups)

    def output_shape(self, seen: list[Tensor], module: nn.Module) -> tuple[int, ...]:
        positions = self.geometry(module).outputs(seen[0].shape[2:]) if self.has_weight else ()
        return (seen[0].shape[0], self.layer.rows, *positions)

    def outputs(self, module: nn.Module, seen: list[Tensor], matrix: Tensor) -> Tensor:
        bias = matrix[:, -1] if self.has_bias else None
        if not self.has_weight:
            assert bias is not None
            return bias.expand(self.output_shape(seen, module)).clone()
        x, geometry = self.geometry(module).padded(seen[0])
        columns = matrix[:, : self.layer.weights[0].matrix_shape[1]]
        kernel = self._moving(columns.unflatten(-1, (-1, math.prod(geometry.kernel)))).unflatten(-1, geometry.kernel)
        convolve = (F.conv1d, F.conv2d, F.conv3d)[len(geometry.kernel) - 1]
        made: Tensor = convolve(x, kernel, bias, geometry.stride, 0, geometry.dilation, geometry.groups)
        return made

    def _moving(self, kernel: Tensor) -> Tensor:
        """Reorder the kernel so that an ordinary convolution can apply it to the map from `seen`: [c_out, c_in / g, K]."""
        return kernel

    def takes(self, module: nn.Module, dtype: torch.dtype) -> bool:
        return dtype == torch.bfloat16 and self.has_weight and self.geometry(module).groups == 1

    def moments(
        self, module: nn.Module, seen: list[Tensor], targets: Tensor, mix: HalfPrecision
    ) -> tuple[Tensor, Tensor]:
        ones = mix(targets.new_ones(targets.shape[0]))
        if not self.has_weight:
            return ones.square().sum().view(1, 1, 1), (ones @ mix(targets)).view(1, 1, -1)
        geometry, column = self.geometry(module), ones if self.has_bias else None
        if seen[0].dtype == torch.bfloat16 and mix.numbers is not None:
            found = patch_products(seen[0], targets, geometry, mix.numbers, self.has_bias)
        else:
            found = convolution_moments(mix(seen[0]), mix(targets), geometry, column)
        return self._arrange(geometry, *found)

    def _arrange(self, geometry: Geometry, gram: Tensor, cross: Tensor) -> tuple[Tensor, Tensor]:
        """Reorder the kernel positions in both matrices to match the columns of the layer's matrix."""
        return gram, cross


class TransposedConvolution(Convolution):
    """A transposed convolution. It convolves the flipped kernel with the map after zeros are inserted between the map's
    entries."""

    def seen(self, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Tensor]:
        """The map with zeros between and around its entries."""
        assert isinstance(module, _ConvTransposeNd)
        if len(args) > 1 or kwargs.get("output_size") is not None:
            raise ValueError(
                f"{OWNER}: {self.layer.name} is called with output_size=, which is not supported; use "
                "output_padding=, or give this layer another posterior"
            )
        x: Tensor = argument(args, kwargs, 0, "input")
        sizes = [s * (n - 1) + 1 for s, n in zip(module.stride, x.shape[2:], strict=True)]
        spread = x.new_zeros(*x.shape[:2], *sizes)
        index = (slice(None), slice(None), *(slice(None, None, s) for s in module.stride))
        spread[index] = x
        pads: list[tuple[int, int]] = []
        for axis, (k, d) in enumerate(zip(module.kernel_size, module.dilation, strict=True)):
            around = d * (k - 1) - int(module.padding[axis])
            pads.append((around, around + module.output_padding[axis]))
        return [F.pad(spread, [size for pair in reversed(pads) for size in pair])]

    def geometry(self, module: nn.Module) -> Geometry:
        assert isinstance(module, _ConvTransposeNd)
        axes = len(module.kernel_size)
        return Geometry(module.kernel_size, (1,) * axes, module.dilation, ((0, 0),) * axes, module.groups)

    def _moving(self, kernel: Tensor) -> Tensor:
        return kernel.flip(-1)

    def _arrange(self, geometry: Geometry, gram: Tensor, cross: Tensor) -> tuple[Tensor, Tensor]:
        positions = math.prod(geometry.kernel)
        order = torch.arange(gram.shape[-1], device=gram.device)
        columns = gram.shape[-1] - self.has_bias
        order[:columns] = order[:columns].view(-1, positions).flip(1).flatten()
        return gram[:, order][:, :, order], cross[:, order]


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
                    f"{OWNER}: {entry.layer.name} gets inputs of shape {tuple(features.shape)} for {points} inducing "
                    "inputs; change the network so that every layer keeps the examples along the first axis "
                    "(batch_first=True in attention)"
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
    """The linear map that belongs to a layer. Raises `ValueError` if the layer has no linear map, or if the map's input is not
    visible from outside."""
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
    """The input that each layer receives at its first call, in the order of the calls."""
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
    """Raise `ValueError` if a layer's inputs for the first half of the inducing inputs depend on the other inducing inputs."""
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
    """Check the targets, and return a detached copy of them as initial pseudo-outputs of the last layer. The targets must be
    finite numbers."""
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
