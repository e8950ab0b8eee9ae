"""What a network takes and returns: inputs in any form, drawn weights as dictionaries, and outputs of any type."""

import copy
import dataclasses
import operator
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from itertools import zip_longest
from types import FunctionType, ModuleType, NoneType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from bayesify.maths.value_checks import should_check
from bayesify.predictive.base import check_finite
from bayesify.running.modes import outside_inference_mode
from bayesify.weights.layout import PlacedWeights
from bayesify.weights.structured import StructuredWeight

WeightDict = Mapping[str, Tensor]
Args = tuple[Any, ...]
Kwargs = Mapping[str, Any]
"""Positional and keyword inputs of a network."""


def as_inputs(x: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Positional and keyword inputs of a network, from a tensor, a tuple or list of inputs, or a mapping of keyword inputs."""
    if isinstance(x, Mapping):
        return (), dict(x)
    if isinstance(x, (tuple, list)):
        return tuple(x), {}
    return (x,), {}


def checked_inputs(x: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """`as_inputs` with checks: raise an error for arrays of another library and for inputs that contain NaN or infinity."""
    args, kwargs = as_inputs(x)
    for key, value in [*enumerate(args), *kwargs.items()]:
        if len(args) > 1 and isinstance(value, (int, float)) and not isinstance(value, bool) and key == 0:
            raise TypeError("inputs are a list of numbers; give a tensor, for example torch.tensor([...])")
        _refuse_array(value)
        if isinstance(value, Tensor) and value.is_floating_point() and should_check(value):
            check_finite(value, "inputs" if key == 0 else f"inputs {key!r}")
    return args, kwargs


def _refuse_array(value: Any) -> None:
    if not isinstance(value, Tensor) and hasattr(value, "__array__"):
        raise TypeError(
            f"inputs are {type(value).__name__}; give tensors, for example torch.from_numpy(...).float() for an array"
        )


def _input_remedy(tensors: list[Tensor], reason: str) -> str:
    """Advice on how to change inputs that the network refuses."""
    if any(x.dtype == torch.float64 for x in tensors) and "type" in reason:
        return "give the inputs in the network's type, for example x.float()"
    if any(x.ndim == 1 and x.is_floating_point() for x in tensors):
        return (
            "give a batch [B, ...] in the shape and type that the network expects, for example x.unsqueeze(0) for one "
            "example, or DataLoader(dataset, batch_size=...) for a dataset"
        )
    return "give inputs of the shape and type that the network expects"


def _in_words(args: Args, kwargs: Kwargs) -> str:
    """Description of the number and form of the inputs, if they are not a single tensor."""
    if kwargs:
        return f"keyword inputs {', '.join(kwargs)}"
    return f"{len(args)} positional inputs (a tuple or list counts as several inputs; stack a batch into one tensor)"


@contextmanager
def explain_shape_errors(args: Args, kwargs: Kwargs) -> Iterator[None]:
    """Turn errors about shapes, types or the number of arguments into errors that name the network's inputs."""
    try:
        yield
    except (TypeError, RuntimeError, IndexError) as error:
        explained = explain_shape_error(error, args, kwargs)
        if explained is error:
            raise
        raise explained from error


def explain_shape_error(error: Exception, args: Args, kwargs: Kwargs) -> Exception:
    """An error about shapes, types or the number of arguments that names the network's inputs; other errors as they are."""
    if isinstance(error, TypeError):
        if "argument" not in str(error) or (len(args) == 1 and not kwargs):
            return error
        return TypeError(f"the network does not accept {_in_words(args, kwargs)}: {error}")
    words = ("shape", "size", "dim", "type", "channel", "index out of range")
    known = isinstance(error, (RuntimeError, IndexError)) and not isinstance(error, torch.OutOfMemoryError)
    if not known or not any(word in str(error) for word in words):
        return error
    tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
    given = ", ".join(f"shape {tuple(x.shape)} and type {str(x.dtype).removeprefix('torch.')}" for x in tensors)
    reason = str(error).strip().splitlines()[0].rstrip(".")
    if len(args) != 1 or kwargs:
        given += f" ({_in_words(args, kwargs)})"
    return ValueError(f"inputs of {given} do not fit the network: {reason}; {_input_remedy(tensors, reason)}")


def batch_size(args: Args, kwargs: Kwargs) -> int:
    """Number of examples in a batch: the length of the first input tensor."""
    for leaf in pytree.tree_leaves((args, dict(kwargs))):
        if isinstance(leaf, Tensor) and leaf.ndim:
            return leaf.shape[0]
        _refuse_array(leaf)
    kinds = ", ".join(type(value).__name__ for value in (*args, *kwargs.values())) or "nothing"
    raise ValueError(
        f"predict: none of the inputs ({kinds}) is a tensor with a batch dimension; give at least one tensor [B, ...]; "
        "for a loader, call predict for each batch"
    )


def kinds_of(args: Args, kwargs: Kwargs) -> list[Any]:
    """Key of an example's cost: dtype and shape of each tensor without its first axis; value or type of every other input."""
    found: list[Any] = []
    for leaf in pytree.tree_leaves((args, dict(kwargs))):
        if isinstance(leaf, Tensor):
            found += leaf.shape[1:], leaf.dtype
        else:
            found.append(leaf if leaf is None or isinstance(leaf, (bool, int, float, str)) else type(leaf))
    return found


def check_lengths(args: Args, kwargs: Kwargs) -> None:
    """Raise `ValueError` if the first axes of the inputs have different lengths, because the batch size is then ambiguous."""
    leaves = pytree.tree_leaves((args, dict(kwargs)))
    lengths = dict.fromkeys(leaf.shape[0] for leaf in leaves if isinstance(leaf, Tensor) and leaf.ndim)
    if len(lengths) > 1:
        raise ValueError(
            f"predict: the first axes of the inputs have {' and '.join(map(str, lengths))} entries, so the batch cannot "
            "be split by examples; give split_batch=False to pass the whole batch to the network at once"
        )


def map_rows(function: Callable[[Tensor], Tensor], args: Args, kwargs: Kwargs) -> tuple[Any, dict[str, Any]]:
    """Apply a function to each input tensor that has one entry per example; return all other inputs unchanged."""
    total = batch_size(args, kwargs)

    def change(leaf: Any) -> Any:
        return function(leaf) if isinstance(leaf, Tensor) and leaf.ndim and leaf.shape[0] == total else leaf

    found: tuple[Any, dict[str, Any]] = pytree.tree_map(change, (args, dict(kwargs)))
    return found


def split_rows(args: Args, kwargs: Kwargs, rows: int) -> Iterator[tuple[Any, dict[str, Any]]]:
    """Split a batch into pieces of `rows` examples. Inputs without one entry per example are passed whole with every piece."""
    for start in range(0, batch_size(args, kwargs), rows):
        yield map_rows(lambda leaf, start=start: leaf[start : start + rows], args, kwargs)  # type: ignore[misc]


def spread_rows(args: Args, kwargs: Kwargs, rows: int) -> tuple[Any, dict[str, Any]]:
    """At most `rows` examples, taken alternately from both halves of the batch. Inputs without one entry per example stay whole."""
    total = batch_size(args, kwargs)
    count = min(rows, total)
    places = [(total - 1) * place // max(1, count - 1) for place in range(count)]
    middle = (count + 1) // 2
    index = [place for pair in zip_longest(places[middle:], places[:middle]) for place in pair if place is not None]
    return map_rows(lambda leaf: leaf[index], args, kwargs)


MAX_PARTS = 2000
"""Largest number of parts of inputs that are copied with all their objects. A copy of so many parts takes a few milliseconds."""
_WHOLE = (Tensor, nn.Module, torch.Generator, type, FunctionType, ModuleType, str, bytes, int, float, complex, NoneType)
"""Parts of inputs that are not searched for further parts."""
_CONTAINERS = (dict, list, tuple, set, frozenset, deque)


def _is_kept(part: Any) -> bool:
    """Whether a part of inputs is never copied: modules, NumPy arrays, and `object()`, which serves as a sentinel."""
    return isinstance(part, (nn.Module, torch.Generator, ModuleType, np.ndarray)) or type(part) is object


def _is_open(part: Any) -> bool:
    """Whether all of a part's content is known, so that a change can be noticed."""
    return type(part) in _CONTAINERS or isinstance(part, _WHOLE) or _is_kept(part)


def _contents(parts: Sequence[Any]) -> list[Any]:
    """All that the containers among the parts of inputs hold."""
    found: list[Any] = []
    for part in parts:
        if type(part) in _CONTAINERS:
            found.append(len(part))
            found += [*part.keys(), *part.values()] if isinstance(part, dict) else part
    return found


def _slots(part: Any) -> list[str]:
    """Names of the attributes of an object that are not in its `__dict__`."""
    found: list[str] = []
    for kind in type(part).__mro__:
        slots = kind.__dict__.get("__slots__", ())
        found += (slots,) if isinstance(slots, str) else slots
    return found


def parts_of(*given: Any) -> list[Any] | None:
    """Everything that inputs consist of, each object once: containers, objects, their attributes, and leaves. None if there are
    more than `MAX_PARTS`, or if Python cannot copy one."""
    found: list[Any] = []
    seen: set[int] = set()
    rest = list(given)
    while rest:
        one = rest.pop()
        if id(one) in seen:
            continue
        seen.add(id(one))
        found.append(one)
        if isinstance(one, (*_WHOLE, np.ndarray)):
            continue
        if isinstance(one, _CONTAINERS):
            rest.extend(one.values() if isinstance(one, dict) else one)
        rest.extend(getattr(one, name, None) for name in _slots(one))
        attributes = getattr(one, "__dict__", {})
        rest.extend(attributes.values())
        # `copy` cannot copy a dict that is its own attributes.
        if len(found) + len(rest) > MAX_PARTS or attributes is one:
            return None
    return found


class Untouched:
    """Inputs for several passes of a network that may change its inputs. Each pass sees the same values.

    The caller's inputs stay unchanged. Passes get the same copies of tensors and containers until a pass changes one of them, and
    copies of their own of all other objects. Modules, NumPy arrays and `object()` are never copied. If inputs have more than
    `MAX_PARTS` parts, or parts that cannot be copied, only their tensors, dicts and lists are copied, and objects are the caller's
    own (`whole` is then false).
    """

    def __init__(self, args: Args, kwargs: Kwargs) -> None:
        self._given = (args, dict(kwargs))
        # The common case takes less time.
        self._plain = not kwargs and all(type(value) is Tensor for value in args)
        found = list(args) if self._plain else parts_of(*args, *kwargs.values())
        self.whole = found is not None
        parts = pytree.tree_leaves(self._given) if found is None else found
        self._is_open = found is not None and all(map(_is_open, parts))
        self._kept = {id(part): part for part in parts if _is_kept(part)}
        self._tensors = [part for part in parts if isinstance(part, Tensor)]
        self._copies: list[Tensor] = []
        self._versions: list[int] = []
        self._made: tuple[tuple[Any, ...], dict[str, Any]] | None = None
        self._parts: list[Any] = []  # of the copies, and what these held
        self._state: list[Any] = []

    def take(self, *, last: bool = False) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Inputs for the next pass, or for the `last` one."""
        fresh = self._copy_tensors()
        if self._plain:
            return tuple(self._copies), {}
        if self._made is not None and not fresh and not self._is_changed():
            made = self._made
        else:
            made = self._make()
            if self._is_open and not last:
                self._made, self._parts = made, parts_of(*made[0], *made[1].values()) or []
                self._state = _contents(self._parts)
        return made[0], dict(made[1])  # the outer tuple and dict are the pass's own

    def _is_changed(self) -> bool:
        """Whether a pass has changed containers of the copies."""
        now = _contents(self._parts)
        return len(now) != len(self._state) or any(map(operator.is_not, now, self._state))

    def _copy_tensors(self) -> bool:
        """Copy all tensors at first, and later those whose copies were changed. Whether any was copied."""
        changed = [place for place, one in enumerate(self._copies) if one._version != self._versions[place]]
        if self._copies and not changed:
            return False
        # Tensors have no versions in inference mode.
        with outside_inference_mode() if torch.is_inference_mode_enabled() else nullcontext():
            for place in changed:
                self._copies[place] = self._tensors[place].clone()
            self._copies = self._copies or list(map(Tensor.clone, self._tensors))
        for given, made in zip(self._tensors, self._copies, strict=True):
            if given.__dict__ and type(given) is Tensor:
                made.__dict__.update(given.__dict__)
        self._versions = [one._version for one in self._copies]
        return True

    def _make(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        known = dict(zip(map(id, self._tensors), self._copies, strict=True))
        if self.whole:
            try:
                return copy.deepcopy(self._given, {**self._kept, **known})
            except Exception:  # whatever the class of an object does
                self.whole = False
        made: tuple[tuple[Any, ...], dict[str, Any]] = pytree.tree_map(
            lambda leaf: known.get(id(leaf), leaf), self._given
        )
        return made


def stack(*leaves: Any) -> Any:
    """Stack tensors along a new first axis. Of other values, return the first draw's."""
    if not isinstance(leaves[0], Tensor):
        return leaves[0]
    return torch.stack(leaves) if len(leaves) > 1 else leaves[0].unsqueeze(0)


def each(values: WeightDict) -> Iterator[WeightDict]:
    """Yield the draws one by one, without the draws axis.

    All draws come from one `unbind`. If draws were indexed one by one, the gradient of each draw would have the size of all
    draws.
    """
    if count_draws(values) == 1 or isinstance(values, PlacedWeights):
        yield from (at(values, index) for index in range(count_draws(values)))
        return
    for draw in zip(*(value.unbind(0) for value in values.values()), strict=True):
        yield dict(zip(values, draw, strict=True))


def at(values: WeightDict, index: int | slice) -> WeightDict:
    """One draw (without the draws axis) or a slice of draws."""
    if isinstance(values, PlacedWeights) and isinstance(index, int):
        return values.at(index)
    if index == 0 and count_draws(values) == 1:
        return {
            name: value.unbind(0)[0] if isinstance(value, StructuredWeight) else value.squeeze(0)
            for name, value in values.items()
        }
    return {
        name: value.at(index) if isinstance(value, StructuredWeight) else value[index] for name, value in values.items()
    }


def count_draws(values: WeightDict) -> int:
    """Length of the draws axis."""
    if isinstance(values, PlacedWeights):
        return values.num_draws
    return next(iter(values.values())).shape[0]


_CONSTANTS = (NoneType, bool, int, float, str, torch.Size, torch.dtype, torch.device)


def as_tree(output: Any) -> tuple[Any, Callable[[Any], Any]]:
    """A network's output as nested dicts, lists, tuples and tensors, and a function that converts this form back to the output's
    own types.

    `vmap` does not accept dataclasses and custom Mappings, such as the outputs of Hugging Face models. Constants are left out;
    they must be equal in every draw.
    """
    if isinstance(output, Tensor):
        return output, _same
    if dataclasses.is_dataclass(output) and not isinstance(output, type):
        kind = type(output)
        fields = {entry.name: getattr(output, entry.name) for entry in dataclasses.fields(output)}
        if isinstance(output, Mapping) and all(entry.init for entry in dataclasses.fields(output)):
            tree, build = as_tree(fields)
            return tree, lambda tree: kind(**build(tree))
        others = {name: held for name, held in getattr(output, "__dict__", {}).items() if _has_tensors(held)}
        tree, build = as_tree({**fields, **others})
        return tree, lambda tree: _replaced(output, build(tree))
    if isinstance(output, Mapping):
        mapping: Any = type(output)
        parts = {key: _part(value) for key, value in output.items()}

        def rebuild(tree: Any) -> Any:
            made = {key: build(tree[key]) for key, (_, build) in parts.items()}
            return made if mapping is dict else mapping(**made)

        return {key: tree for key, (tree, _) in parts.items()}, rebuild
    if isinstance(output, (list, tuple)):
        row = [_part(value) for value in output]
        return tuple(tree for tree, _ in row), lambda tree: _like(
            output, [build(part) for (_, build), part in zip(row, tree, strict=True)]
        )
    return output, _same


def _part(value: Any) -> tuple[Any, Callable[[Any], Any]]:
    """`as_tree` for a part of an output. Constants become `()`, because `vmap` returns only tensors."""
    return ((), lambda _: value) if isinstance(value, _CONSTANTS) else as_tree(value)


def _has_tensors(value: Any) -> bool:
    return any(isinstance(leaf, Tensor) for leaf in pytree.tree_leaves(value))


def _same(tree: Any) -> Any:
    return tree


def _like(output: Any, values: list[Any]) -> Any:
    """A list, tuple or named tuple like `output` with other values."""
    return type(output)(*values) if hasattr(output, "_fields") else type(output)(values)


def _replaced(output: Any, values: dict[str, Any]) -> Any:
    """A copy of a dataclass with other values in some fields. Its `__post_init__` does not run again."""
    made = copy.copy(output)
    for name, value in values.items():
        object.__setattr__(made, name, value)
    return made


def select_output(output: Any, key: str | int | None) -> Tensor:
    """The tensor among a network's outputs that the likelihood uses.

    The output is a tensor, or a tuple, dict or dataclass of tensors. The key `None` selects the only tensor, or the one named
    `logits`. Raises `ValueError` if the choice is ambiguous, or if there is no tensor.
    """
    if isinstance(output, Tensor):
        if key is not None:
            raise ValueError(f"output={key!r}, but the network returns a single tensor; give output=None")
        return output
    tree, _ = as_tree(output)
    entries = dict(enumerate(tree)) if isinstance(tree, (tuple, list)) else tree
    if isinstance(entries, dict):
        entries = {name: value for name, value in entries.items() if isinstance(value, Tensor) or value}
    else:
        raise ValueError(f"the network returns {type(output).__name__}; give a network that returns tensors")
    if key is not None:
        if key not in entries:
            raise ValueError(f"the network's output has no entry {key!r}; its entries are {list(entries)}")
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
        f"the network returns {list(entries)}; name the entry that the likelihood should use: bayesianize(..., "
        "output=...)"
    )
