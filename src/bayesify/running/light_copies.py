"""Copies of a module tree that share every tensor, so that a pass changes nothing that another thread can see."""

from __future__ import annotations

import copy
import functools
import types
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

_HOOKS = (
    "_forward_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
)
_OWN = ("_parameters", "_buffers", *_HOOKS)
_STANDARD = frozenset(nn.Module().__dict__)
_ATOMIC: tuple[type, ...] = (
    str,
    bytes,
    int,
    float,
    complex,
    type(None),
    type,
    Tensor,
    torch.dtype,
    torch.device,
    torch.Size,
)
_ATOMIC += (torch.Generator, types.FunctionType, types.BuiltinFunctionType, types.ModuleType)

_HOLDERS: weakref.WeakKeyDictionary[nn.Module, tuple[int, tuple[str, ...]]] = weakref.WeakKeyDictionary()
"""Attributes of a module beside its children that hold modules, with the number of attributes when they were looked for."""


def can_copy(modules: list[nn.Module]) -> bool:
    """Whether a light copy runs by itself: code that was compiled for a module object runs that very object."""
    return all(
        module.__dict__.get("_compiled_call_impl") is None and "dynamo_ctx" not in module.__dict__ for module in modules
    )


@dataclass
class LightCopy:
    """A module tree with the same tensors and its own slots, modes and hooks.

    Attributes of any kind that hold modules of the tree (lists, dicts, bound methods, objects) hold the copies instead; all
    others are shared.

    Args:
        root: The copy of the whole.
        pairs: Each module of the tree with its copy, and the copy's attributes as they were first.
    """

    root: nn.Module
    pairs: dict[int, tuple[nn.Module, nn.Module, dict[str, Any]]]

    @classmethod
    def of(cls, network: nn.Module) -> LightCopy:
        """A light copy of a network; microseconds for each module."""
        pairs: dict[int, tuple[nn.Module, nn.Module, dict[str, Any]]] = {}
        return cls(_copy(network, pairs), pairs)

    def __getitem__(self, module: nn.Module) -> nn.Module:
        """The copy of one module of the tree."""
        return self.pairs[id(module)][1]

    def modules(self) -> Iterator[nn.Module]:
        """The copies of all modules."""
        return (clone for _, clone, _ in self.pairs.values())

    def write_back(self) -> None:
        """Give the modules what a pass has assigned to attributes and buffers of their copies: state that a network keeps."""
        originals = {id(clone): original for original, clone, _ in self.pairs.values()}
        for original, clone, before in self.pairs.values():
            for name, value in clone._buffers.items():
                if original._buffers.get(name) is not value:
                    original._buffers[name] = value
            for name, child in clone._modules.items():
                held = originals.get(id(child), child)
                if original._modules.get(name) is not held:
                    original._modules[name] = held
            now = clone.__dict__
            for key, value in now.items():
                if value is not before.get(key, before) and key != "_flat_weights":
                    original.__dict__[key] = _swap(value, lambda held: originals.get(id(held), held), {})
            for key in before.keys() - now.keys():
                original.__dict__.pop(key, None)


def _copy(module: nn.Module, pairs: dict[int, tuple[nn.Module, nn.Module, dict[str, Any]]]) -> nn.Module:
    known = pairs.get(id(module))
    if known is not None:
        return known[1]
    if isinstance(module, torch.jit.ScriptModule):
        clone: Any = copy.copy(module)
        pairs[id(module)] = (module, clone, clone.__dict__)
        return clone
    clone = object.__new__(type(module))
    state = dict(module.__dict__)
    object.__setattr__(clone, "__dict__", state)
    for key in _OWN:
        state[key] = state[key].copy()
    before: dict[str, Any] = {}
    pairs[id(module)] = (module, clone, before)
    children = state["_modules"].items()
    state["_modules"] = {name: child if child is None else _copy(child, pairs) for name, child in children}
    holders = _HOLDERS.get(module)
    if holders is None or holders[0] != len(state):
        holders = len(state), tuple(key for key in state.keys() - _STANDARD if _holds_modules(state[key], set()))
        _HOLDERS[module] = holders
    for key in holders[1]:
        state[key] = _swap(state[key], lambda held: _copy(held, pairs), {})
    before.update(state)
    return clone


def _holds_modules(value: Any, seen: set[int]) -> bool:
    if isinstance(value, nn.Module):
        return True
    if isinstance(value, _ATOMIC) or id(value) in seen:
        return False
    seen.add(id(value))
    return any(_holds_modules(part, seen) for part in _parts(value))


def _parts(value: Any) -> list[Any]:
    """What an object holds, where that can be seen."""
    if isinstance(value, dict):
        return [*value.keys(), *value.values()]
    if isinstance(value, (list, tuple, set, frozenset)):
        return list(value)
    if isinstance(value, types.MethodType):
        return [value.__self__]
    if isinstance(value, functools.partial):
        return [value.func, value.args, value.keywords]
    return list(getattr(value, "__dict__", {}).values())


def _swap(value: Any, other: Callable[[nn.Module], nn.Module], done: dict[int, Any]) -> Any:
    """The same value with other modules in place of those that it holds."""
    if isinstance(value, nn.Module):
        return other(value)
    if isinstance(value, _ATOMIC) or not _holds_modules(value, set()):
        return value
    if id(value) in done:
        return done[id(value)]
    if isinstance(value, tuple):
        parts = [_swap(part, other, done) for part in value]
        return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
    if isinstance(value, types.MethodType):
        return types.MethodType(value.__func__, _swap(value.__self__, other, done))
    if isinstance(value, functools.partial):
        inner = [_swap(part, other, done) for part in (value.func, value.args, value.keywords)]
        return functools.partial(inner[0], *inner[1], **inner[2])
    made = done[id(value)] = copy.copy(value)
    if isinstance(value, dict):
        made.clear()
        made.update({_swap(key, other, done): _swap(part, other, done) for key, part in value.items()})
    elif isinstance(value, list):
        made[:] = [_swap(part, other, done) for part in value]
    elif isinstance(value, (set, frozenset)):
        made = done[id(value)] = type(value)(_swap(part, other, done) for part in value)
    else:
        vars(made).update({key: _swap(part, other, done) for key, part in vars(value).items()})
    return made
