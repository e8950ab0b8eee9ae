"""Copies of a module tree that share all its tensors. A pass through a copy changes nothing that another thread can see."""

import copy
import functools
import operator
import types
import weakref
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Collection
from itertools import chain, repeat, starmap
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from bayesify.maths.torch_versions import has_global_hooks

HOOKS_OF_A_PASS = ("_forward_hooks", "_forward_pre_hooks")
SLOTS = ("_parameters", "_buffers")
_REFUSING = operator.itemgetter(*HOOKS_OF_A_PASS, "_modules")
"""A module can be shared instead of copied only if these attributes are empty."""
_STANDARD = frozenset(nn.Module().__dict__)
_HOOKS = tuple(key for key in _STANDARD if key.startswith("_forward_"))
_WATCHED = ("training", *SLOTS, "_modules", *HOOKS_OF_A_PASS)
"""Standard module attributes on which a pass depends. The other standard attributes concern storage and gradients."""
_ATOMIC: tuple[type, ...] = (str, bytes, int, float, complex, type(None), type, types.ModuleType)
_ATOMIC += (types.FunctionType, types.BuiltinFunctionType)
_ATOMIC += (Tensor, torch.dtype, torch.device, torch.Size, torch.Generator)
_PLAIN = frozenset((*_ATOMIC, bool))
_CLOSED = (type, types.ModuleType, types.FunctionType, nn.Module, Tensor)
_COMPARED = frozenset((bool, int, float, str, torch.Size, torch.dtype, torch.device))
"""Types of attributes that count as unchanged if they are equal."""

_CONTAINERS = frozenset((list, dict, set, deque, OrderedDict, defaultdict))
MAX_CONTAINER_ENTRIES = 1024
"""Maximum number of entries, including nested containers, of a container that a pass may change in place. Larger containers are
tables, such as a vocabulary, which passes only read."""

MAX_FREE_COPIES = 8
"""Maximum number of free copies of each kind, and so the number of threads that can reuse a copy at the same time."""
MAX_MISSED_COPIES = 8
"""After this many consecutive copies that could not be reused, no copy is kept, because the network changes in every pass."""

Places = tuple[list[str], list[tuple[dict[str, Any], str]]]
"""Names of parameters and buffers, and the location of each, which is a dict and a key."""
_Pair = tuple[nn.Module, nn.Module, dict[str, Any], Collection[Any]]
"""A tuple of a module, its copy, and the initial attributes and children of the copy."""


class EmptySlot:
    """What the slots of drawn weights contain after a pass. Every use raises an error."""

    remedy = "use torch.utils.checkpoint with use_reentrant=False"

    @classmethod
    def _refuse(cls) -> NoReturn:
        raise RuntimeError(
            "drawn weights were used outside of a pass, so they are gone. Gradient checkpointing runs layers again in the backward "
            f"pass; {cls.remedy}, or turn gradient checkpointing off (Hugging Face: model.gradient_checkpointing_disable()). A "
            "backward hook also runs outside of a pass; save what it needs of the weights in a forward hook"
        )

    @classmethod
    def __torch_function__(cls, *_: object) -> NoReturn:
        cls._refuse()

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):
            raise AttributeError(name)
        self._refuse()


EMPTY = EmptySlot()


class KnownModules:
    """Cached facts about the modules of one network."""

    def __init__(self) -> None:
        self.kinds: dict[type, tuple[bool, bool, bool]] = {}
        self._holders: dict[int, tuple[weakref.ref[nn.Module], Any, tuple[tuple[str, ...], tuple[str, ...]]]] = {}

    def kind(self, kind: type) -> tuple[bool, bool, bool]:
        """Whether modules of one type are torch's own, whether a pass stores nothing in them, and whether they are scripted."""
        own = is_torchs(kind)
        leaf = own and not issubclass(kind, nn.RNNBase)
        found = self.kinds[kind] = own, leaf, issubclass(kind, torch.jit.ScriptModule)
        return found

    def holders(self, module: nn.Module, state: dict[str, Any], own: bool) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Names of the attributes (other than children) that contain modules, and names of the attributes whose containers a pass
        may change.

        The search is repeated if an attribute has become another object or a container has changed its length. The cache key is
        the module's id, because creating a weak reference would take as long as copying a module.
        """
        place = id(module)
        known, now = self._holders.get(place), len(state) if own else _attributes(state)
        if known is None or known[0]() is not module or known[1] != now:
            names = tuple(key for key in state.keys() - _STANDARD if _holds_modules(state[key], set()))
            found = [key for key in state.keys() - _STANDARD - {*names} if type(state[key]) in _CONTAINERS and not own]
            others = tuple(key for key in found if len(state[key]) <= MAX_CONTAINER_ENTRIES)
            known = self._holders[place] = weakref.ref(module), now, (names, others)
        return known[2]

    def serves_again(self, module: nn.Module) -> bool:
        """Whether a copy of the module can serve more than one pass. The module must have no forward hooks, must keep its state
        in its `__dict__`, and must contain other modules only as children."""
        state, kind = module.__dict__, type(module)
        has_slots = kind.__basicsize__ > nn.Module.__basicsize__
        return not (
            has_slots or any(state[key] for key in HOOKS_OF_A_PASS) or self.holders(module, state, is_torchs(kind))[0]
        )


class LightCopy:
    """A copy of a module tree that shares all tensors with the original. The copy has its own modes and its own slots for
    parameters and buffers.

    If an attribute (list, dict, bound method or object) refers to modules of the tree, the copy's attribute refers to the copied
    modules. In modules that are not torch's own, a container in an attribute is copied together with its nested containers, if
    they have at most `MAX_CONTAINER_ENTRIES` entries in total. All other attributes are shared, and so are the contents of tuples
    and other objects. Copying takes microseconds per module.

    With `hooks=True`, hooks can be registered on the copy's modules. `owners` are the paths of the modules whose slots will be
    filled. If `owners` is given and `hooks` is false, some leaf modules are shared instead of copied: torch's own modules that
    are not in `owners` and that a pass does not change.
    """

    def __init__(
        self,
        network: nn.Module,
        *,
        evaluate: bool = False,
        hooks: bool = True,
        owners: Collection[str] | None = None,
        known: KnownModules | None = None,
    ) -> None:
        self._known = known or KnownModules()
        self._kinds = self._known.kinds
        self._evaluate, self._owners = evaluate, None if hooks else owners
        self._shared: dict[int, nn.Module] = {}
        self._own = (*SLOTS, *_HOOKS) if hooks else SLOTS
        self._clones: dict[int, nn.Module] = {}
        self._copied: list[nn.Module] = []
        self._pairs: list[_Pair] = []
        self._scripted: list[tuple[nn.Module, nn.Module]] = []
        self._containers: dict[int, tuple[Any, Any, list[Any]]] = {}
        self._filled: set[int] = set()
        self.owned: dict[str, nn.Module] = {}  # copies of the owners, by path
        self.complete = True  # false for a compiled network, because compiled code runs only the original module
        self.places: Places = ([], [])  # slots that the last pass filled
        self._found_originals: dict[int, Any] = {}
        self._emptied: list[tuple[dict[str, Any], str, Any]] = []  # slots without a value, and their own values
        self._records: tuple[Record, Record] | None = None
        self.root = self._copy(network, "")
        if self._owners is not None and len(self.owned) < len(self._owners):
            self._find_others(network, self._owners)

    def _find_others(self, network: nn.Module, owners: Collection[str]) -> None:
        """Add the modules in `owners` that were found under another path, such as parts of shared modules.

        If such a module was shared instead of copied, the whole copy is made again.
        """
        modules = {path: network.get_submodule(path) for path in owners if path not in self.owned}
        self._filled = {id(module) for module in modules.values()}
        if not self._filled <= self._clones.keys():
            lists = (self._copied, self._pairs, self._scripted)
            for known in (*lists, self._shared, self._clones, self._containers, self.owned):
                known.clear()
            self.root = self._copy(network, "")
        self.owned |= {path: self[module] for path, module in modules.items()}

    def __getitem__(self, module: nn.Module) -> nn.Module:
        """The copy of one module of the tree."""
        return self._shared[id(module)] if id(module) in self._shared else self._clones[id(module)]

    @property
    def shares_modules(self) -> bool:
        """Whether the copy runs some of the network's own modules."""
        return bool(self._shared)

    def empty(self) -> None:
        """Put an `EmptySlot` into the slots that the last pass filled, so that a layer that runs again raises an error."""
        self._emptied = [(place, leaf, place[leaf]) for place, leaf in self.places[1] if isinstance(place, dict)]
        for place, leaf, _ in self._emptied:  # scripted modules have no dicts
            place[leaf] = EMPTY

    def refill(self) -> None:
        """Inverse of `empty`."""
        for place, leaf, value in self._emptied:
            place[leaf] = value

    def originals(self) -> list[nn.Module]:
        """All modules of the network, in the order in which they were found."""
        return [*self._copied, *(module for module, _ in self._scripted), *self._shared.values()]

    def _copy(self, module: nn.Module, path: str | None = None) -> nn.Module:
        place, owners = id(module), self._owners
        is_owner = owners is None or path is None or path in owners
        known = self._clones.get(place)
        if known is not None:
            if is_owner and path is not None:
                self.owned[path] = known
            return known
        if place in self._shared:
            return module
        clone: nn.Module
        kind, state = type(module), module.__dict__
        own, leaf, scripted = self._kinds.get(kind) or self._known.kind(kind)
        evaluate, children = self._evaluate, state.get("_modules")
        stays = leaf and not is_owner and not children and not (evaluate and state["training"])
        if stays and _is_unhooked(state) and place not in self._filled:
            self._shared[place] = module
            return module
        if scripted:
            clone = copy.copy(module)
            if evaluate:
                clone.eval()
            self._clones[place] = clone
            self._scripted.append((module, clone))
            return clone
        clone = self._clones[place] = object.__new__(kind)
        self._copied.append(module)
        state = state.copy()
        object.__setattr__(clone, "__dict__", state)
        if is_owner and path is not None:
            self.owned[path] = clone
        if state.get("_compiled_call_impl") is not None or "dynamo_ctx" in state:
            self.complete = False
        for key in self._own:
            state[key] = state[key].copy()
        if state["_forward_hooks"] or state["_forward_pre_hooks"]:
            for key in HOOKS_OF_A_PASS:
                state[key] = _swap(state[key], self._copy, {})  # hooks may be methods of modules
        copies = state["_modules"] = {}
        if children:
            before = f"{path}." if path else ""
            for name, child in children.items():
                found = None if child is None else self._copy(child, None if path is None else before + name)
                copies[name] = found
        holders, containers = self._known.holders(module, state, own)
        for key in holders:
            state[key] = _swap(state[key], self._copy, {})
        for key in containers:
            state[key] = self._copy_container(state[key])
        if evaluate:  # nothing is written back
            state["training"] = False
        else:
            self._pairs.append((module, clone, state.copy(), tuple(copies.values()) if children else ()))
        return clone

    def _copy_container(self, container: Any) -> Any:
        """Copy a container and its nested containers, each once. If the containers are too large, return the container itself."""
        if id(container) in self._containers:
            return self._containers[id(container)][1]
        found = _nested(container)
        copies = {place: one.copy() for place, one in found.items() if place not in self._containers}
        for place, own in copies.items():
            self._containers[place] = found[place], own, []
        for place, own in copies.items():
            if len(found) > 1 and not isinstance(own, set):
                for key, held in list(own.items() if isinstance(own, dict) else enumerate(own)):
                    if id(held) in found:
                        own[key] = self._containers[id(held)][1]
            if not self._evaluate:  # in evaluation mode nothing is written back
                self._containers[place][2].extend(entries_of(own))
        return self._containers[id(container)][1] if found else container

    def remember(self) -> None:
        """Record the network and the copy, for `is_current` and `write_back`.

        Nothing is recorded if the copy can serve only one pass. A copy can serve only one pass if objects other than modules hold
        modules, or if modules have hooks, are scripted, or can keep state outside their dict.
        """
        if self._scripted or not self.complete or not all(map(self._known.serves_again, self._copied)):
            return
        containers = self._containers.values()
        originals = Record(self._copied, [container for container, _, _ in containers])
        self._records = originals, Record(list(self._clones.values()), [own for _, own, _ in containers])
        self._shared_kinds = list(map(type, self._shared.values()))

    def is_current(self) -> bool:
        """Whether the network is unchanged since `remember`. A new copy of an unchanged network would equal this copy."""
        states = [module.__dict__ for module in self._shared.values()]
        return (
            self._records is not None
            and list(map(type, self._shared.values())) == self._shared_kinds
            and not any(chain.from_iterable(map(_REFUSING, states)))
            and not any(map(operator.contains, states, repeat("forward")))
            and self._records[0].holds()
        )

    def write_back(self) -> bool:
        """Write to the network what a pass has stored in attributes, buffers, children and containers of the copies. The
        result is true if the copy is unchanged since `remember`, so that nothing was written back."""
        if self._records is not None and self._records[1].holds():
            return True
        self._found_originals = {}
        for container, own, entries in self._containers.values():
            if not are_same(entries_of(own), entries):
                self._write_container(container, own)
        for original, clone, before, children in self._pairs:
            if not _is_same(original, clone, before, children):
                self._write_back(original, clone.__dict__, before)
        return False

    def changed(self) -> bool:
        """Whether a pass has changed the copy, so that `write_back` would write other values. In evaluation mode, nothing is
        written."""
        if self._evaluate or (self._records is not None and self._records[1].holds()):
            return False
        return any(not are_same(entries_of(own), entries) for _, own, entries in self._containers.values()) or not all(
            starmap(_is_equal, self._pairs)
        )

    def _originals(self) -> dict[int, Any]:
        """The originals of copied modules and containers, by id, and of the modules that the pass has made."""
        if not self._found_originals:
            pairs = chain(
                self._scripted, (pair[:2] for pair in self._containers.values()), (pair[:2] for pair in self._pairs)
            )
            self._found_originals = {id(own): original for original, own in pairs}
        return self._found_originals

    def _write_container(self, container: Any, own: Any) -> None:
        originals = self._originals()
        container.clear()
        if isinstance(own, dict):
            container.update({_give_back(key, originals): _give_back(held, originals) for key, held in own.items()})
        else:
            add = container.update if isinstance(own, set) else container.extend
            add(_give_back(held, originals) for held in own)

    def _write_back(self, original: nn.Module, now: dict[str, Any], before: dict[str, Any]) -> None:
        originals = self._originals()
        original._buffers.update(now["_buffers"])
        original._modules.update({name: _original(child, originals) for name, child in now["_modules"].items()})
        for key, value in now.items():
            if value is not before.get(key, before) and key != "_flat_weights":
                original.__dict__[key] = _give_back(value, originals)
        for key in before.keys() - now.keys():
            original.__dict__.pop(key, None)


class Record:
    """Record of modules at one moment: their state, and the containers in their attributes. The modules must have no forward
    hooks.

    Types, attributes, slots, children and entries are compared by identity.
    """

    def __init__(self, modules: list[nn.Module], containers: list[Any]) -> None:
        states = [module.__dict__ for module in modules]
        dicts = [state[key] for state in states for key in (*SLOTS, "_modules")]
        called = [state[key] for state in states for key in HOOKS_OF_A_PASS]
        self._modules, self._kinds, self._lengths = modules, list(map(type, modules)), list(map(len, states))
        self._getters = [operator.itemgetter(*_WATCHED, *(state.keys() - _STANDARD)) for state in states]
        self._dicts, self._containers = list(filter(None, dicts)), list(filter(None, containers))
        self._empty = [one for one in (*dicts, *called, *containers) if not one]
        self._names = list(chain.from_iterable(self._dicts))
        self._values = self._held(states)
        self._contents = [entries_of(container) for container in self._containers]

    def _held(self, states: list[dict[str, Any]]) -> list[Any]:
        attributes = chain.from_iterable(map(operator.call, self._getters, states))
        return list(chain(attributes, chain.from_iterable(map(dict.values, self._dicts))))

    def holds(self) -> bool:
        """Whether all recorded modules and containers are unchanged."""
        states = [module.__dict__ for module in self._modules]
        try:
            held = self._held(states)
        except KeyError:  # an attribute was deleted
            return False
        return (
            not any(self._empty)
            and list(map(type, self._modules)) == self._kinds
            and list(map(len, states)) == self._lengths
            and are_same(held, self._values)
            and list(chain.from_iterable(self._dicts)) == self._names
            and all(map(are_same, map(entries_of, self._containers), self._contents))
        )


class FreeCopies:
    """Copies of one network (see `LightCopy`) that no pass is using. Single passes in the network's own mode reuse these copies.

    A copy is reused if the network is unchanged since the copy was made, and if the pass left nothing in the copy that had to be
    written back. Checking both conditions costs less than making another copy. Other code may still refer to a module of a copy,
    for example by using the module as a dictionary key. Such a copy can be reused, because a network that is not copied would
    use the same module as a key in every call. Each prediction uses a new copy.
    """

    def __init__(self) -> None:
        self._free: dict[bool, list[LightCopy]] = {}
        self._missed = -1  # -1, because the first pass, which may be the only one, keeps no copy
        self.known = KnownModules()

    def take(self, network: nn.Module, owners: Collection[str] | None) -> LightCopy:
        """Take a free copy, or make a new one, for passes without hooks; see `LightCopy`."""
        free = self._free.setdefault(owners is None, [])
        while free:
            try:
                copied = free.pop()
            except IndexError:  # another thread took the last copy
                break
            if copied.is_current():
                copied.refill()
                return copied
            self._missed += 1
        copied = LightCopy(network, hooks=False, owners=owners, known=self.known)
        if 0 <= self._missed < MAX_MISSED_COPIES:
            copied.remember()
        return copied

    def put(self, copied: LightCopy, owners: Collection[str] | None, *, unchanged: bool) -> None:
        """Put a copy back after its pass; `unchanged` is the result of `LightCopy.write_back`."""
        free = self._free[owners is None]
        if unchanged and len(free) < MAX_FREE_COPIES:
            free.append(copied)
            self._missed = 0
        else:
            self._missed += 1


def entries_of(container: Any) -> list[Any]:
    """All keys and values of a container, in order."""
    return [*container.keys(), *container.values()] if isinstance(container, dict) else list(container)


def are_same(now: Collection[Any], before: Collection[Any]) -> bool:
    """Whether two collections contain identical objects."""
    return len(now) == len(before) and all(map(operator.is_, now, before))


def is_torchs(kind: type) -> bool:
    """Whether a module type is torch's own."""
    return kind.__module__.startswith("torch.nn.modules.")


def _is_same(original: nn.Module, clone: nn.Module, before: dict[str, Any], children: Collection[Any]) -> bool:
    """Whether a pass has left alone the attributes, buffers and children of a module's copy."""
    now = clone.__dict__
    return (
        len(now) == len(before)
        and all(map(operator.is_, now.values(), before.values()))
        and (not now["_buffers"] or are_same(now["_buffers"].values(), original._buffers.values()))
        and (not now["_modules"] or are_same(now["_modules"].values(), children))
    )


def _is_equal(original: nn.Module, clone: nn.Module, before: dict[str, Any], children: Collection[Any]) -> bool:
    """`_is_same`, or only attributes differ, and these are equal constants."""
    if _is_same(original, clone, before, children):
        return True
    now = clone.__dict__
    same = {key: before[key] if _is_constant(value, before.get(key)) else value for key, value in now.items()}
    if len(same) != len(before) or not all(map(operator.is_, same.values(), before.values())):
        return False
    slots = are_same(now["_buffers"].values(), original._buffers.values())
    return slots and are_same(now["_modules"].values(), children)


def _is_constant(now: Any, before: Any) -> bool:
    """Whether two values are equal constants, tuples of such constants, or both NaN."""
    if now is before:
        return True
    if type(now) is tuple and type(before) is tuple:
        return len(now) == len(before) and all(map(_is_constant, now, before))
    known = type(now) is type(before) and type(now) in _COMPARED
    return known and bool(now == before or (now != now and before != before))


def _nested(container: Any) -> dict[int, Any]:
    """A container and all nested containers, by id; empty if together they have more than `MAX_CONTAINER_ENTRIES` entries."""
    found, waiting, entries = {id(container): container}, [container], 0
    while waiting:
        one = waiting.pop()
        entries += len(one)
        if entries > MAX_CONTAINER_ENTRIES:
            return {}
        parts = one.values() if isinstance(one, dict) else one
        if not _CONTAINERS.isdisjoint(map(type, parts)):
            inner = {id(part): part for part in parts if type(part) in _CONTAINERS and id(part) not in found}
            found |= inner
            waiting += inner.values()
    return found


def _give_back(value: Any, originals: dict[int, Any]) -> Any:
    """Replace copies of modules and containers by the originals in a value that a pass has stored."""
    if id(value) in originals:
        return originals[id(value)]
    return _swap(value, lambda held: _original(held, originals), {})


def _original(module: Any, originals: dict[int, Any]) -> Any:
    """The original of a copy. If the pass has made a module that contains copies, the result is another module that contains the
    originals, because the backward pass may run the module that the pass has made."""
    if id(module) in originals or not isinstance(module, nn.Module):
        return originals.get(id(module), module)
    originals[id(module)] = module
    children = {name: _original(child, originals) for name, child in module._modules.items()}
    if not are_same(children.values(), module._modules.values()):
        originals[id(module)] = made = copy.copy(module)
        made.__dict__["_modules"] = children
    return originals[id(module)]


def attributes_of_objects(module: nn.Module) -> list[dict[str, Any]]:
    """The `__dict__` of each object that a module's attributes reach through objects and containers, up to
    `MAX_CONTAINER_ENTRIES` of them. Modules, tensors, constants, types and functions are not searched."""
    found: list[dict[str, Any]] = []
    waiting = deque(value for key, value in module.__dict__.items() if key not in _STANDARD)
    seen: set[int] = set()
    while waiting and len(seen) < MAX_CONTAINER_ENTRIES:
        value = waiting.popleft()
        if type(value) in _PLAIN or isinstance(value, _CLOSED) or id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, (dict, list, tuple, set, frozenset, deque)):
            waiting.extend(entries_of(value))
        try:
            held = object.__getattribute__(value, "__dict__")
        except AttributeError:
            continue
        if type(held) is dict:
            found.append(held)
            waiting.extend(held.values())
    return found


def _attributes(state: dict[str, Any]) -> list[Any]:
    """A key that changes when attributes that may hold modules change. It consists of names, ids, and lengths of containers."""
    found: list[Any] = []
    for key, value in state.items():
        if key not in _STANDARD and type(value) not in _PLAIN:
            found += key, id(value), len(value) if isinstance(value, (list, dict, set)) else 0
    return found


def _is_unhooked(state: dict[str, Any]) -> bool:
    """Whether a module runs only the forward pass of its type, without hooks."""
    return not (state["_forward_hooks"] or state["_forward_pre_hooks"] or "forward" in state)


def leaves_inputs(network: nn.Module) -> bool:
    """Whether all modules of a network are plain torch modules that do not work in place, and so leave its inputs alone."""
    return not has_global_hooks() and all(
        is_torchs(type(module)) and _is_unhooked(module.__dict__) and not getattr(module, "inplace", False)
        for module in network.modules()
    )


def _holds_modules(value: Any, seen: set[int]) -> bool:
    if isinstance(value, nn.Module):
        return True
    if isinstance(value, _ATOMIC) or id(value) in seen:
        return False
    seen.add(id(value))
    return any(_holds_modules(part, seen) for part in _parts(value))


def _parts(value: Any) -> list[Any]:
    """The objects to which a container, a bound method, a `functools.partial` or the `__dict__` of another object refers."""
    if isinstance(value, (dict, list, tuple, set, frozenset)):
        return entries_of(value)
    if isinstance(value, types.MethodType):
        return [value.__self__]
    if isinstance(value, functools.partial):
        return [value.func, value.args, value.keywords]
    return list(getattr(value, "__dict__", {}).values())


def _swap(value: Any, other: Callable[[nn.Module], nn.Module], done: dict[int, Any]) -> Any:
    """The value with every module replaced by `other(module)`."""
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
