"""Search for the last layer of a network."""

from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd
from torch.utils import _pytree as pytree

from bayesify.running.inputs_and_outputs import Args, Kwargs, select_output, split_rows
from bayesify.running.runner import Runner
from bayesify.weights.catalog import Weight

LINEAR_MAPS = (nn.Linear, nn.Bilinear, _ConvNd, nn.MultiheadAttention, nn.RNNBase, nn.RNNCellBase)
"""Layers that can be the last layer. Attention runs as one layer, including its projections."""
MATRIX_PRODUCTS = ("Addmm", "Mm", "Bmm", "Baddbmm", "Addmv", "Mv", "Dot", "Linear", "Convolution")
"""Autograd names of operations in which even a vector of weights acts as a linear map."""

NUM_GAIN_EXAMPLES = 32
"""Number of examples over which `output_gain` averages."""


@torch.enable_grad()
def last_layer(
    runner: Runner,
    weights: Mapping[str, Weight],
    args: Args,
    kwargs: Kwargs,
    output: str | int | None = None,
    *,
    values: Mapping[str, Tensor] | None = None,
    owner: str = "Laplace",
    seen: Callable[[Tensor], None] | None = None,
) -> list[str]:
    """Weights of the last linear maps, which have no other linear map between them and the output.

    Most networks have one such map. A network that concatenates several heads has one such map in each head. The result contains
    all weights of these layers. A weight that the layer shares with another layer (tied embeddings) is included, and so are the
    parameters from which a weight is computed (weight normalization).

    `weights` describes the network's trainable weights by name. `values` contains their values, by default the network's own.
    Only two examples are run, and `seen` is called with their outputs. Error messages name the caller, `owner`.

    Raises:
        ValueError: If no linear map was called, or if an operation after the last layer uses a weight outside of a layer's call.
    """
    network = runner.network
    maps = {name: _maps_of(network, weight) for name, weight in weights.items()}
    known = values or {}
    own = {name: known[name] if name in known else network.get_parameter(name) for name in weights}
    given = {name: value.detach().requires_grad_() for name, value in own.items()}  # new tensors with the same values
    called: list[tuple[nn.Module, list[Any]]] = []  # each module with the autograd nodes of its outputs

    def note(module: nn.Module, _: Any, made: Any) -> None:
        called.append((module, [leaf.grad_fn for leaf in pytree.tree_leaves(made) if isinstance(leaf, Tensor)]))

    with runner.hooked({module for own_maps in maps.values() for module in own_maps}, note) as alone:
        outputs = select_output(alone.call({**known, **given}, *next(split_rows(args, kwargs, 2))), output)
    if seen is not None:
        seen(outputs.detach())
    names = {id(value): name for name, value in given.items()}
    leaves = {id(node.variable) for node in _nodes(outputs.grad_fn) if hasattr(node, "variable")}
    owned: dict[int, list[str]] = {}  # names of the weights in use, by the id of their linear map
    for name, value in given.items():
        for key in {id(module) for module in maps[name]} if id(value) in leaves else ():
            owned.setdefault(key, []).append(name)
    called = [(module, nodes) for module, nodes in called if id(module) in owned]
    last = _last_calls(outputs.grad_fn, [nodes for _, nodes in called])
    found = list(dict.fromkeys(name for place in last for name in owned[id(called[place][0])]))
    end = max((node._sequence_nr() for place in last for node in called[place][1] if node is not None), default=-1)
    made = {node for _, nodes in called for node in nodes}
    after = ((weights.get(names.get(leaf, "")), kind) for leaf, kind in _used_after(outputs.grad_fn, end, made))
    for weight, is_product in after:  # a matrix, or a weight in a product, that is used after the last call of a layer
        if weight is not None and weight.kind != "norm" and (is_product or sum(size > 1 for size in weight.shape) > 1):
            raise ValueError(
                f"{owner}: {weight.name} is used outside of a call of its layer, so the last layer cannot be determined; "
                f"name the weights with subset=[{weight.name!r}, ...]"
            )
    if not found:
        raise ValueError(f"{owner}: the output depends on no trainable linear map; name the weights with subset=[...]")
    return found


@torch.enable_grad()
def output_gain(
    runner: Runner, weights: Sequence[Weight], args: Args, kwargs: Kwargs, output: str | int | None
) -> float:
    r"""The mean of $\sum_j (\partial f_o / \partial a_j)^2$ over outputs o, where a is the output of the last call of each layer.

    The gain is 1 if the layers are the end of the network, and $s^2$ if the network's outputs are s times the layer's outputs. It
    is 0 if no layer returns a tensor.

    `weights` are the weights of the last layer, or of several heads. Only some examples are run.
    """
    probes: dict[nn.Module, Tensor] = {}  # of the last call of each layer
    tied = any(len(_maps_of(runner.network, weight)) > 1 for weight in weights)

    def probe(module: nn.Module, inputs: Any, made: Any) -> Any:
        if not isinstance(made, Tensor):
            return None
        if tied:  # the earlier layer is not at the end of the network
            probes.clear()
        probes[module] = torch.zeros_like(made, requires_grad=True)
        return made + probes[module]

    with runner.hooked({module for weight in weights for module in _maps_of(runner.network, weight)}, probe) as alone:
        outputs = select_output(alone.call({}, *next(split_rows(args, kwargs, NUM_GAIN_EXAMPLES))), output)
    if not probes:
        return 0.0
    signs = torch.randint(2, outputs.shape, generator=torch.Generator().manual_seed(0)).to(outputs) * 2 - 1
    grads = torch.autograd.grad(outputs, list(probes.values()), signs, allow_unused=True)
    return sum(float(grad.square().sum()) for grad in grads if grad is not None) / outputs.numel()


def _maps_of(network: nn.Module, weight: Weight) -> list[nn.Module]:
    """The linear maps to which a weight belongs. A tied weight has several names and belongs to several maps."""
    found: list[nn.Module] = []
    for name in (weight.name, *weight.aliases):
        path, behind, _ = name.partition(".parametrizations.")  # a computed weight belongs to the layer above
        parts = path.split(".") if behind else path.split(".")[:-1]
        above = [network.get_submodule(".".join(parts[:end])) for end in range(len(parts) + 1)]
        whole = next((module for module in above if isinstance(module, nn.MultiheadAttention)), above[-1])
        if isinstance(whole, LINEAR_MAPS):
            found.append(whole)
    return found


def _last_calls(node: Any, calls: Sequence[list[Any]]) -> list[int]:
    """Indices, in `calls`, of the layer calls from which a path leads to `node` without passing another layer call. A call is
    left out if another call in the result depends on it.

    `node` is the outputs' node in the autograd graph. `calls` contains, for each call of a layer, the nodes of its outputs.
    """
    place_of = {made: place for place, nodes in enumerate(calls) for made in nodes if made is not None}
    reached = {place_of[one] for one in _nodes(node, place_of) if one in place_of}
    behind = {place: set().union(*(_nodes(made) for made in calls[place])) for place in reached}
    upstream = {
        place for place in reached for other in reached - {place} if behind[other].intersection(calls[place]) - {None}
    }
    return sorted(reached - upstream)


def _used_after(node: Any, end: int, made: set[Any]) -> Iterator[tuple[int, bool]]:
    """The id and a flag for each tensor that an operation after node number `end` uses outside of a layer's call. The flag says
    whether the operation is a matrix product.

    `node` is the outputs' node in the autograd graph, and `made` has the nodes of the outputs of layer calls.
    """
    for after in _nodes(node):
        if hasattr(after, "variable") or after._sequence_nr() <= end:
            continue
        is_product = after.name().removesuffix("Backward0") in MATRIX_PRODUCTS
        for operand, _ in after.next_functions:
            behind = _nodes(operand)
            if not behind & made:
                yield from ((id(leaf.variable), is_product) for leaf in behind if hasattr(leaf, "variable"))


def _nodes(node: Any, ends: Container[Any] = ()) -> set[Any]:
    """A node of the autograd graph and all nodes on which it depends; the search does not continue past the nodes in `ends`."""
    seen: set[Any] = set()
    waiting = [node]
    while waiting:
        node = waiting.pop()
        if node is not None and node not in seen:
            seen.add(node)
            waiting += [parent for parent, _ in node.next_functions] if node not in ends else []
    return seen
