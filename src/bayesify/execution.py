"""How draws run through a network: one at a time, all at once by `vmap`, or in a loop; the caller never chooses."""

from __future__ import annotations

import dataclasses
import math
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import zip_longest
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from bayesify.structured import StructuredWeight
from bayesify.weights import Weight, refresh_recurrent

Mode = Literal["single", "vmap", "loop"]
WeightDict = Mapping[str, Tensor]

MEMORY_BUDGET = 256 * 2**20
"""Bytes of activations that one chunk of a prediction may hold, unless the caller gives another budget."""

_REFUSED: weakref.WeakSet[nn.Module] = weakref.WeakSet()
_NO_BATCHING_RULE = (nn.RNNCellBase, nn.EmbeddingBag, nn.MultiheadAttention)
SLOW_VMAP = "There is a performance drop because we have not yet implemented the batching rule"


class Runner:
    """A network with empty slots, and the ways to run draws through it.

    Args:
        network: The network, its slots under the posterior empty.
        weights: The weights that were taken out of it.
        point_values: Values to use in place of the network's own parameters and buffers, by name; a prediction that is
            evaluated later takes a snapshot here.
    """

    def __init__(
        self, network: nn.Module, weights: Mapping[str, Weight], point_values: WeightDict | None = None
    ) -> None:
        self.network = network
        self.weights = weights
        self.point_values = point_values or {}
        self._recurrent = any(isinstance(module, nn.RNNBase) for module in network.modules())

    def snapshot(self) -> Runner:
        """The same network with its point estimates and buffers frozen at their present values."""
        named: dict[str, Tensor] = dict(self.network.named_parameters(remove_duplicate=False))
        named.update(self.network.named_buffers(remove_duplicate=False))
        return Runner(self.network, self.weights, {name: value.detach().clone() for name, value in named.items()})

    def call(self, values: WeightDict, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """One forward pass with one draw: `values` by first name, without an axis of draws."""
        named = dict(self.point_values)
        for name, value in values.items():
            named[name] = value
            if name in self.weights:
                for alias in self.weights[name].aliases:
                    named[alias] = value
        if not self._recurrent:
            return torch.func.functional_call(self.network, named, args, dict(kwargs), tie_weights=False)
        named = {name: value.form() if isinstance(value, StructuredWeight) else value for name, value in named.items()}
        self._load_recurrent(named)
        try:
            return torch.func.functional_call(self.network, named, args, dict(kwargs), tie_weights=False)
        finally:
            refresh_recurrent(self.network)

    def _load_recurrent(self, named: WeightDict) -> None:
        for path, module in self.network.named_modules():
            if isinstance(module, nn.RNNBase):
                prefix = f"{path}." if path else ""
                module._flat_weights = [
                    named.get(prefix + leaf, module._parameters.get(leaf)) for leaf in module._flat_weights_names
                ]

    def mode(self, num_draws: int) -> Mode:
        """How `num_draws` draws should run.

        One draw needs no `vmap`. Recurrent modules and cells, attention, `EmbeddingBag`, and BatchNorm in training mode
        have no batching rule, or one that loops inside with a warning. A convolution
        whose kernel differs between draws becomes a grouped convolution, which is slower than a loop on CPU and GPU.
        Everything else gains from `vmap`; where it is refused, the loop takes over.
        """
        if num_draws == 1:
            return "single"
        if self._recurrent or self.network in _REFUSED:
            return "loop"
        if any(isinstance(module, _NO_BATCHING_RULE) for module in self.network.modules()):
            return "loop"
        if any(weight.kind == "matrix" and len(weight.shape) > 2 for weight in self.weights.values()):
            return "loop"
        for module in self.network.modules():
            if isinstance(module, _BatchNorm) and (module.training or module.running_mean is None):
                return "loop"
        return "vmap"

    def run(
        self,
        values: WeightDict,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        *,
        mode: Mode | None = None,
        chunk_size: int | None = None,
        own: Sequence[WeightDict] | None = None,
    ) -> Any:
        """Run all draws over the same inputs.

        Args:
            values: Weights by first name, each with a leading axis of S draws.
            args: Positional inputs of the network.
            kwargs: Keyword inputs of the network.
            mode: Forces the way to run; chosen automatically if left out.
            chunk_size: Draws that `vmap` holds at once.
            own: Buffers that each draw has for itself, one dict per draw; a loop lets the network update them in place.

        Returns:
            The network's output with a leading axis of S in every tensor.
        """
        num_draws = count_draws(values)
        mode = mode or self.mode(num_draws)
        if any(isinstance(value, StructuredWeight) and not value.batchable for value in values.values()):
            mode = "single" if num_draws == 1 else "loop"
        if mode == "vmap":
            try:
                with warnings.catch_warnings():
                    warnings.filterwarnings("error", message=SLOW_VMAP)
                    together = {name: torch.stack([part[name] for part in own]) for name in own[0]} if own else {}
                    return self._vmap({**values, **together}, args, kwargs, chunk_size)
            except UserWarning as slow:
                if not str(slow).startswith(SLOW_VMAP):
                    raise
                _REFUSED.add(self.network)  # right, but slower than the loop, and torch says so each time
                return self._loop(values, args, kwargs, own)
            except (RuntimeError, ValueError) as refusal:
                outputs = self._loop(
                    values, args, kwargs, own
                )  # a mistake of the caller's fails here too, in plain words
                refuse_vmap(self.network, refusal)
                return outputs
        return self._loop(values, args, kwargs, own)

    def _vmap(
        self, values: WeightDict, args: tuple[Any, ...], kwargs: Mapping[str, Any], chunk_size: int | None
    ) -> Any:
        rebuild: list[Callable[[Any], Any]] = []

        def one(weights: dict[str, Tensor]) -> Any:
            tree, build = as_tree(self.call(weights, args, kwargs))
            rebuild.append(build)
            return tree

        outputs = torch.func.vmap(one, chunk_size=chunk_size, randomness="different")(dict(values))
        return rebuild[0](outputs)

    def _loop(
        self,
        values: WeightDict,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        own: Sequence[WeightDict] | None,
    ) -> Any:
        trees = []
        for index, draw in enumerate(each(values)):
            tree, build = as_tree(self.call({**draw, **own[index]} if own else draw, args, kwargs))
            trees.append(tree)
        if len(trees) == 1:
            return build(pytree.tree_map_only(Tensor, lambda tensor: tensor.unsqueeze(0), trees[0]))
        return build(pytree.tree_map(stack, *trees))


def refuse_vmap(network: nn.Module, refusal: Exception) -> None:
    """Remember that `vmap` cannot run a network, and say so, except where it is only slower."""
    _REFUSED.add(network)
    reason = str(refusal).strip().splitlines()[0]
    if not reason.startswith(SLOW_VMAP):
        warnings.warn(f"{type(network).__name__}: vmap refused ({reason}); draws run in a loop instead", stacklevel=4)


def stack(*leaves: Any) -> Any:
    """Stack tensors along a new first axis; anything else must be equal in every draw and is kept once."""
    return torch.stack(leaves) if isinstance(leaves[0], Tensor) else leaves[0]


def each(values: WeightDict) -> Iterator[dict[str, Tensor]]:
    """The draws one by one, without the axis of draws.

    One `unbind` for all of them: indexing each would fill a gradient of the size of all draws per draw.
    """
    if count_draws(values) == 1:
        yield at(values, 0)
        return
    for draw in zip(*(value.unbind(0) for value in values.values()), strict=True):
        yield dict(zip(values, draw, strict=True))


def at(values: WeightDict, index: int | slice) -> dict[str, Tensor]:
    """One draw (no axis of draws any more) or a slice of draws."""
    if index == 0 and count_draws(values) == 1:
        return {
            name: value.unbind(0)[0] if isinstance(value, StructuredWeight) else value.squeeze(0)
            for name, value in values.items()
        }
    return {
        name: value.at(index) if isinstance(value, StructuredWeight) else value[index] for name, value in values.items()
    }


def count_draws(values: WeightDict) -> int:
    """Length of the axis of draws."""
    return next(iter(values.values())).shape[0]


def as_tree(output: Any) -> tuple[Any, Callable[[Any], Any]]:
    """A network's output as nested dicts, lists and tensors, and the way back to its own type.

    Dataclasses (and Mappings of other types, as Hugging Face's outputs are) are not known to `vmap`.
    """
    if dataclasses.is_dataclass(output) and not isinstance(output, type):
        kind = type(output)
        fields = {entry.name: getattr(output, entry.name) for entry in dataclasses.fields(output)}
        missing = {key: None for key, value in fields.items() if value is None}
        present = {key: value for key, value in fields.items() if value is not None}
        return present, lambda tree: kind(**missing, **tree)
    if isinstance(output, Mapping) and type(output) is not dict:
        mapping: Any = type(output)
        return dict(output), lambda tree: mapping(**tree)
    return output, lambda tree: tree


def select_output(output: Any, key: str | int | None) -> Tensor:
    """The tensor among a network's outputs that the likelihood is about.

    Args:
        output: A tensor, or a tuple, dict or dataclass of tensors.
        key: Which entry; if `None`, the only tensor, or the one called `logits`.

    Raises:
        ValueError: If it is not clear which one, or there is none.
    """
    if isinstance(output, Tensor):
        return output
    tree, _ = as_tree(output)
    entries = dict(enumerate(tree)) if isinstance(tree, (tuple, list)) else tree
    if not isinstance(entries, dict):
        raise ValueError(f"the network returns {type(output).__name__}; it must return tensors")
    if key is not None:
        if key not in entries:
            raise ValueError(f"the network's output has no entry {key!r}; it has {list(entries)}")
        chosen = entries[key]
        if not isinstance(chosen, Tensor):
            raise ValueError(f"the network's output {key!r} is {type(chosen).__name__}; name an entry that is a tensor")
        return chosen
    tensors = {name: value for name, value in entries.items() if isinstance(value, Tensor)}
    if len(tensors) == 1:
        return next(iter(tensors.values()))
    if "logits" in tensors:
        return tensors["logits"]
    raise ValueError(
        f"the network returns {list(entries)}; say which one the likelihood is about: bayesianize(..., output=...)"
    )


def batch_size(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> int:
    """Examples in a batch: the length of the first input tensor."""
    for leaf in pytree.tree_leaves((args, dict(kwargs))):
        if isinstance(leaf, Tensor) and leaf.ndim:
            return leaf.shape[0]
    raise ValueError("predict: no tensor with a batch dimension among the inputs; give at least one")


def split_rows(args: tuple[Any, ...], kwargs: Mapping[str, Any], rows: int) -> Iterator[tuple[Any, dict[str, Any]]]:
    """Cut a batch into pieces of `rows` examples; inputs that do not have the batch's length go to every piece whole."""
    total = batch_size(args, kwargs)
    for start in range(0, total, rows):

        def cut(leaf: Any, start: int = start) -> Any:
            if isinstance(leaf, Tensor) and leaf.ndim and leaf.shape[0] == total:
                return leaf[start : start + rows]
            return leaf

        yield pytree.tree_map(cut, (args, dict(kwargs)))


def spread_rows(args: tuple[Any, ...], kwargs: Mapping[str, Any], rows: int) -> tuple[Any, dict[str, Any]]:
    """Some examples from all over a batch, those of its halves in turn; inputs that do not have the batch's length stay whole."""
    total = batch_size(args, kwargs)
    count = min(rows, total)
    places = [(total - 1) * place // max(1, count - 1) for place in range(count)]
    middle = (count + 1) // 2
    index = [place for pair in zip_longest(places[middle:], places[:middle]) for place in pair if place is not None]

    def pick(leaf: Any) -> Any:
        return leaf[index] if isinstance(leaf, Tensor) and leaf.ndim and leaf.shape[0] == total else leaf

    found: tuple[Any, dict[str, Any]] = pytree.tree_map(pick, (args, dict(kwargs)))
    return found


def rows_within(
    runner: Runner, values: WeightDict, args: tuple[Any, ...], kwargs: Mapping[str, Any], budget: int
) -> tuple[int, Any]:
    """How many examples fit into a budget of activation memory with all draws at once, and the output of a few examples.

    Measured by one pass of one draw over a few examples that adds up the bytes of every tensor it makes, which
    is more than what is alive at one time.
    """
    num_draws = count_draws(values) if runner.mode(count_draws(values)) == "vmap" else 1
    per_row, output = count_activation_bytes(runner, args, kwargs, at(values, 0))
    return max(1, math.floor(budget / max(1, per_row * num_draws))), output


@torch.no_grad()
def count_activation_bytes(
    runner: Runner, args: tuple[Any, ...], kwargs: Mapping[str, Any], values: WeightDict | None = None
) -> tuple[float, Any]:
    """Bytes that one pass makes per example, and the output of a few examples."""
    probe = min(batch_size(args, kwargs), 4)
    few_args, few_kwargs = next(split_rows(args, kwargs, probe))
    with _CountBytes() as counter:
        output = runner.call(values or {}, few_args, few_kwargs)
    return counter.bytes / probe, output


@contextmanager
def evaluating(module: nn.Module) -> Iterator[None]:
    """Put a module into evaluation mode for a while; each submodule gets its own mode back."""
    modes = [(child, child.training) for child in module.modules()]
    module.eval()
    try:
        yield
    finally:
        for child, mode in modes:
            child.training = mode


class _CountBytes(TorchDispatchMode):
    """Adds up the bytes of the tensors that operations return."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        known = {_storage(leaf) for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)}
        for leaf in pytree.tree_leaves(output):
            if isinstance(leaf, Tensor) and _storage(leaf) not in known:  # a view holds no memory of its own
                self.bytes += leaf.numel() * leaf.element_size()
        return output


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
