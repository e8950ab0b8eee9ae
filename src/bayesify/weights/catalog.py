"""The weights of a network, each as a matrix, and the slots of the network's modules that contain the weights."""

import inspect
import math
import types
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd

from bayesify.arguments.checks import checked
from bayesify.weights.batch_statistics import tracking_layers

Kind = Literal["matrix", "lookup", "norm", "custom"]


@dataclass(frozen=True)
class Weight:
    """One weight of a network: the name of a tensor in `named_parameters()`, and the facts that prior and posterior need.

    Args:
        name: The weight's first name in `named_parameters()`.
        shape: The weight's shape in the network.
        layer: Name of the weight's layer. Weight and bias of one linear map share a layer.
        kind: `"matrix"` for a linear map or its bias, `"lookup"` for an embedding table, `"norm"` for scale and
            shift of a normalization layer, `"custom"` for a parameter of a module that the library does not know.
        fan_in: Number of inputs that one output sums over. A bias has its layer's fan-in. `None` if there is no fan-in.
        is_bias: Whether the weight is the bias of its layer.
        groups: Number of groups of a convolution.
        transposed: Whether the weight is the kernel of a transposed convolution, which stores inputs first.
        units: Number of the layer's inputs that the weight reads, or `None` if there is no such number. The columns of the weight's
            matrix are `units` blocks of equal width, one for each input feature or channel.
        aliases: Other names of the same tensor (tied weights).
        position: Index of the weight's layer among the layers that are linear maps, in the order of `named_modules()`.
        normalized: Whether a layer that normalizes by running statistics comes after this weight's layer in `named_modules()`.
        balanced: Whether a kernel's first axis of positions belongs to the rows of the weight's matrix, not to the columns.
    """

    name: str
    shape: torch.Size
    layer: str
    kind: Kind
    fan_in: int | None
    is_bias: bool = False
    groups: int = 1
    transposed: bool = False
    units: int | None = None
    aliases: tuple[str, ...] = ()
    position: int = 0
    normalized: bool = False
    balanced: bool = False

    @cached_property
    def numel(self) -> int:
        """Number of scalars."""
        return math.prod(self.shape)

    @cached_property
    def matrix_shape(self) -> tuple[int, int]:
        """Rows (outputs) and columns (inputs) of the weight as a matrix; see `to_matrix`. A vector is one column."""
        if len(self.shape) <= 1:
            return (self.numel, 1)
        if self.kind == "lookup":
            return (self.shape[1], self.shape[0])
        rows = self.shape[1] * self.groups if self.transposed else self.shape[0]
        if self.kind == "custom":  # for example [1, positions, width] with an axis for the batch
            rows = next((size for size in self.shape[:-2] if size != 1), self.shape[-2])
        rows *= self.shape[2] if self.balanced else 1
        return (rows, self.numel // rows if rows else 0)

    def to_matrix(self, value: Tensor) -> Tensor:
        """View a weight as a matrix of outputs x inputs.

        - A kernel `(c_out, c_in/g, *k)` becomes `c_out x (c_in/g * prod(k))`. If the weight is balanced, the kernel becomes
          `(c_out * k[0]) x (c_in/g * prod(k[1:]))`.
        - In a transposed kernel `(c_in, c_out/g, *k)`, inputs and outputs are first exchanged within each group.
        - An embedding table is the matrix that multiplies a one-hot row.
        - A vector is one column.
        - For a parameter of an unknown module, the outputs are the first axis of size above 1, not counting the last two axes. If
          there is no such axis, the outputs are the second-to-last axis.

        Args:
            value: [*batch, *shape].

        Returns:
            [*batch, rows, cols].
        """
        batch = value.shape[: value.ndim - len(self.shape)]
        if self.kind == "lookup":
            return value.transpose(-1, -2)
        if self.transposed:
            c_in, c_out, *k = self.shape
            grouped = value.reshape(*batch, self.groups, c_in // self.groups, c_out, *k)
            value = grouped.movedim(len(batch) + 2, len(batch) + 1)  # [*batch, g, c_out/g, c_in/g, *k]
        if self.balanced:
            value = value.movedim(2 - len(self.shape), 1 - len(self.shape))  # [*batch, c_out, k[0], c_in/g, *k[1:]]
        return value.reshape((*batch, *self.matrix_shape))

    def from_matrix(self, matrix: Tensor) -> Tensor:
        """Inverse of `to_matrix`: [*batch, rows, cols] -> [*batch, *shape]."""
        batch = matrix.shape[:-2]
        if self.kind == "lookup":
            return matrix.transpose(-1, -2)
        if self.balanced:
            outer, inner, *k = self.shape
            inputs = outer // self.groups if self.transposed else inner
            matrix = matrix.reshape(*batch, -1, k[0], inputs, *k[1:]).movedim(-len(k) - 1, -len(k))
        if self.transposed:
            c_in, c_out, *k = self.shape
            grouped = matrix.reshape(*batch, self.groups, c_out, c_in // self.groups, *k)
            matrix = grouped.movedim(len(batch) + 2, len(batch) + 1)
        value = matrix.reshape((*batch, *self.shape))  # a tuple, because a scalar has no sizes
        return value.contiguous() if self.balanced or self.transposed else value  # networks may call `view`


@dataclass(frozen=True)
class Layer:
    """The weights of one linear map that share one posterior, viewed together as one matrix `[W b]`.

    Args:
        name: Dotted name of the linear map, which is the module's name if the module is a single linear map.
        weights: The weight, the bias, or both, in this order.
    """

    name: str
    weights: tuple[Weight, ...]

    @cached_property
    def rows(self) -> int:
        """Number of rows of `[W b]`: the layer's number of outputs, or a multiple of it if the weight is balanced."""
        return self.weights[0].matrix_shape[0]

    @cached_property
    def cols(self) -> int:
        """Number of columns of `[W b]`: the number of entries in a row of W, plus 1 if the layer has a bias."""
        return sum(weight.matrix_shape[1] for weight in self.weights)

    @cached_property
    def numel(self) -> int:
        """Number of scalars in the layer."""
        return sum(weight.numel for weight in self.weights)

    def to_matrix(self, values: Mapping[str, Tensor]) -> Tensor:
        """The matrix `[W b]`, [*batch, rows, cols], made from the weights' values by name."""
        parts = [weight.to_matrix(values[weight.name]) for weight in self.weights]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1)

    def from_matrix(self, matrix: Tensor) -> dict[str, Tensor]:
        """The weights' values by name, taken from the matrix `[W b]`, [*batch, rows, cols]."""
        sizes = [weight.matrix_shape[1] for weight in self.weights]
        parts = matrix.split(sizes, dim=-1) if len(sizes) > 1 else [matrix]
        return {weight.name: weight.from_matrix(part) for weight, part in zip(self.weights, parts, strict=True)}


@dataclass
class Catalog:
    """All weights of a network, under their first names and in the order of `named_parameters()`.

    `refused` maps the name of each parameter that must stay a point estimate to the reason: it is frozen or not floating point, or
    it is the table of an embedding with `max_norm`.
    """

    weights: dict[str, Weight] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)

    @property
    def trainable(self) -> dict[str, Weight]:
        """The weights that are not refused."""
        return {name: weight for name, weight in self.weights.items() if name not in self.refused}


def catalog(network: nn.Module) -> Catalog:
    """Describe every parameter of a network. A tensor that appears under several names is one weight with aliases.

    Raises `ValueError` if a parameter is uninitialized (lazy modules), if the network has no parameters, or if it holds a
    function that runs one of its modules, because a copy of the network would run the original module.
    """
    _check_functions(network)
    named: dict[int, tuple[Tensor, list[str]]] = {}
    for name, parameter in network.named_parameters(remove_duplicate=False):
        if isinstance(parameter, nn.UninitializedParameter):
            raise ValueError(f"bayesianize: {name} is uninitialized; run one batch through the lazy network first")
        named.setdefault(id(parameter), (parameter, []))[1].append(name)
    if not named:
        raise ValueError(
            f"bayesianize: {type(network).__name__} has no parameters; give a network with at least one weight"
        )
    found = Catalog()
    positions: dict[str, int] = {}
    order = {path: index for index, (path, _) in enumerate(network.named_modules(remove_duplicate=False))}
    last_norm = max((order[path] for path in tracking_layers(network)), default=-1)
    for tensor, (name, *aliases) in named.values():
        owner, _, leaf = name.rpartition(".")
        weight = _describe(network.get_submodule(owner), owner, leaf, name, tensor, tuple(aliases))
        if weight.kind in ("matrix", "lookup"):
            position = positions.setdefault(weight.layer, len(positions))
            weight = Weight(**{**vars(weight), "position": position, "normalized": order[owner] < last_norm})
        found.weights[name] = weight
        if not tensor.is_floating_point():
            found.refused[name] = f"{tensor.dtype} is not a real floating-point type"
        elif not tensor.requires_grad:
            found.refused[name] = "frozen (requires_grad=False)"
        elif any(_changes_in_passes(owner_of(network, one)[0]) for one in (name, *aliases)):
            found.refused[name] = "an embedding with max_norm= changes its rows in every pass"
    return found


def _changes_in_passes(owner: nn.Module) -> bool:
    return isinstance(owner, (nn.Embedding, nn.EmbeddingBag)) and owner.max_norm is not None


def _check_functions(network: nn.Module) -> None:
    """Raise `ValueError` for functions that refer to a module of the network; see `catalog`."""
    paths = {id(part): path for path, part in network.named_modules()}
    for path, part in network.named_modules():
        for name, value in vars(part).items():
            among = value.values() if isinstance(value, dict) else value
            for function in among if isinstance(value, (dict, list, tuple)) else [value]:
                if not isinstance(function, types.FunctionType) or name == "_compiled_call_impl":
                    continue
                try:
                    held = inspect.getclosurevars(function).nonlocals.values()
                except ValueError:  # a closure cell is still empty
                    continue
                if any(id(one) in paths for one in (*held, *(function.__defaults__ or ()))):
                    raise ValueError(
                        f"bayesianize: {name} of {path or 'the network'} holds the function {function.__qualname__}, which runs "
                        "a module of this network; in a copy of the network, the function would still run the original module; "
                        "make the function a method"
                    )


def is_norm(module: nn.Module) -> bool:
    """Whether a module is a normalization layer, whose scale and shift stay point estimates unless a selector names them.

    Torch's own layers are recognized by type. Other libraries have their own normalization layers without a common base
    class. Layers of other libraries are recognized by a class name that ends in "Norm", "Norm2d" or a similar suffix.
    """
    if isinstance(module, (_NormBase, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm)):
        return True
    return type(module).__name__.rstrip("123d").endswith("Norm")


def _describe(module: nn.Module, owner: str, leaf: str, name: str, tensor: Tensor, aliases: tuple[str, ...]) -> Weight:
    shape = tensor.shape

    def matrix(fan_in: int, layer: str = owner, units: int | None = None, **more: object) -> Weight:
        return Weight(name, shape, layer, "matrix", fan_in, units=units, aliases=aliases, **more)  # type: ignore[arg-type]

    if is_norm(module):
        return Weight(name, shape, owner, "norm", None, is_bias=leaf == "bias", aliases=aliases)
    if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and leaf == "weight":
        return Weight(name, shape, owner, "lookup", None, aliases=aliases)
    if isinstance(module, nn.Linear) and leaf in ("weight", "bias"):
        return matrix(module.in_features, is_bias=leaf == "bias", units=module.in_features)
    if isinstance(module, nn.Bilinear) and leaf in ("weight", "bias"):
        return matrix(module.in1_features * module.in2_features, is_bias=leaf == "bias")
    if isinstance(module, _ConvNd) and leaf in ("weight", "bias"):
        channels = module.in_channels // module.groups
        return matrix(
            channels * math.prod(module.kernel_size),
            units=channels,
            is_bias=leaf == "bias",
            groups=module.groups,
            transposed=isinstance(module, _ConvTransposeNd) and leaf == "weight",
        )
    if (
        isinstance(module, nn.MultiheadAttention) and "_proj_" in leaf
    ):  # in_proj_weight, in_proj_bias, q_proj_weight, ...
        fan_in = {"k_proj_weight": module.kdim, "v_proj_weight": module.vdim}.get(leaf, module.embed_dim)
        return matrix(fan_in, name.rpartition("_")[0], fan_in, is_bias=leaf == "in_proj_bias")
    if isinstance(module, (nn.RNNBase, nn.RNNCellBase)) and leaf.startswith(("weight_", "bias_")):
        kind, _, gate = leaf.partition("_")  # weight_ih_l0 -> weight, ih_l0
        layer = f"{owner}.{gate}" if owner else gate
        fan_in = getattr(module, f"weight_{gate}").shape[1]
        return matrix(fan_in, layer, fan_in, is_bias=kind == "bias")
    return Weight(name, shape, name, "custom", None, aliases=aliases)


def group_layers(weights: Iterable[Weight]) -> tuple[Layer, ...]:
    """Group weights by linear map, the weight before the bias. Layers are in the order of their first weights."""
    layers: dict[str, list[Weight]] = {}
    for weight in weights:
        layers.setdefault(weight.layer if weight.kind in ("matrix", "lookup") else weight.name, []).append(weight)
    return tuple(
        Layer(name, tuple(sorted(members, key=lambda weight: weight.is_bias))) for name, members in layers.items()
    )


def take_out(network: nn.Module, weights: Sequence[Weight]) -> dict[str, Tensor]:
    """Empty the slots of weights in a network, in place, and return the weights' values.

    An emptied slot contains `None`, so a network without its posterior raises an error. The slot's name stays registered, because
    printing, pickling and copying need it. Gradients of tables become plain (see `make_gradients_plain`).
    """
    values = {}
    for weight in weights:
        values[weight.name] = network.get_parameter(weight.name).detach().clone()
        for name in (weight.name, *weight.aliases):
            owner, leaf = owner_of(network, name)
            owner._parameters[leaf] = None
            path, computed, _ = f".{name}".partition(".parametrizations.")
            # A computed weight belongs to the layer above.
            make_gradients_plain(network.get_submodule(path[1:]) if computed else owner)
    refresh_recurrent(network)
    return values


def make_gradients_plain(module: nn.Module) -> None:
    """Turn off, in place, what embeddings do to the gradients of their tables: gradients are then dense (`sparse`), and those of
    the objective (`scale_grad_by_freq`). `restore_gradients` undoes this."""
    if isinstance(module, (nn.Embedding, nn.EmbeddingBag)):
        # A module that the network uses twice comes here twice.
        vars(module).setdefault("given_gradients", (module.sparse, module.scale_grad_by_freq))
        module.sparse = module.scale_grad_by_freq = False


def restore_gradients(module: nn.Module) -> None:
    """Undo `make_gradients_plain`, in place."""
    if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and "given_gradients" in vars(module):
        module.sparse, module.scale_grad_by_freq = vars(module).pop("given_gradients")


def put_in(network: nn.Module, weights: Sequence[Weight], values: Mapping[str, Tensor]) -> None:
    """Fill emptied slots with new parameters, in place. Tied names share one parameter. A parameter is contiguous, or has its
    channels last in memory."""
    for weight in weights:
        value = values[weight.name].detach()
        kept = torch.preserve_format if has_channels_last(value) else torch.contiguous_format
        parameter = nn.Parameter(value.clone(memory_format=kept))
        for name in (weight.name, *weight.aliases):
            owner, leaf = owner_of(network, name)
            owner._parameters[leaf] = parameter
    refresh_recurrent(network)


def has_channels_last(value: Tensor) -> bool:
    """Whether a kernel has its channels last in memory."""
    return value.ndim >= 4 and not value.is_contiguous() and value.stride(1) == 1


def owner_of(network: nn.Module, name: str) -> tuple[nn.Module, str]:
    """The module that owns a parameter, and the parameter's own name in this module."""
    *path, leaf = name.split(".")
    owner = network
    for part in path:  # ten times as fast as `get_submodule`
        child = owner._modules.get(part) if type(owner._modules) is dict else None
        if child is None:
            return network.get_submodule(".".join(path)), leaf
        owner = child
    return owner, leaf


def refresh_recurrent(network: nn.Module) -> None:
    """Make the private weight lists of recurrent modules agree with their slots again.

    Recurrent modules such as `nn.LSTM` keep a second list of their weights. After a weight is swapped, this list still contains
    the old weight. The old weight would break copying, and it would keep the memory of a draw allocated.
    """
    for module in network.modules():
        if isinstance(module, nn.RNNBase):
            module._init_flat_weights()


def padding_rows(net: nn.Module, weights: list[Weight]) -> dict[str, tuple[int, Tensor]]:
    """For each embedding that has a padding row, by weight name: index and value of this row."""
    found = {}
    for weight in weights:
        owner = owner_of(net, weight.name)[0]
        if weight.kind == "lookup" and getattr(owner, "padding_idx", None) is not None:
            row = int(owner.padding_idx)  # type: ignore[arg-type]
            found[weight.name] = (row, net.get_parameter(weight.name)[row].detach().clone())
    return found


def padding_entries(net: nn.Module, weights: Mapping[str, Weight]) -> Tensor:
    """Indices [n] of the entries of padding rows in the concatenation of all weights."""
    rows, found, start = padding_rows(net, list(weights.values())), [torch.zeros(0, dtype=torch.long)], 0
    for name, weight in weights.items():
        if name in rows:
            width = weight.shape[1]
            found.append(start + rows[name][0] * width + torch.arange(width))
        start += weight.numel
    return torch.cat(found)


@checked
def count_parameters(module: nn.Module) -> int:
    """Number of trainable scalars of a module. A tensor under several names counts once."""
    return sum(parameter.numel() for parameter in module.parameters() if parameter.requires_grad)
