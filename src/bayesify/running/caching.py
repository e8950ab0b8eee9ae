"""Results that are computed once per state of a module's parameters."""

from __future__ import annotations

import ctypes
import itertools
import os
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from bayesify.maths.value_checks import transforming

Computed = TypeVar("Computed")

LARGEST = 2**24
"""Parameters of a module above which nothing is kept: to tell whether they changed takes a copy of them."""

MOST_RECENT = 4
"""Results that `recent` keeps for a module."""

_CACHE: weakref.WeakKeyDictionary[nn.Module, dict[Any, tuple[int, Any]]] = weakref.WeakKeyDictionary()
_STATES: weakref.WeakKeyDictionary[nn.Module, tuple[int, list[Tensor]]] = weakref.WeakKeyDictionary()
_CONSTANTS: weakref.WeakKeyDictionary[nn.Module, dict[Any, Any]] = weakref.WeakKeyDictionary()
_RECENT: weakref.WeakKeyDictionary[nn.Module, dict[Any, tuple[Any, bool]]] = weakref.WeakKeyDictionary()
_SIDES: dict[torch.device, torch.cuda.Stream] = {}
_COUNTER = itertools.count()
_LOCK = threading.RLock()


class _ByThread(threading.local):
    settled: dict[nn.Module, int | None] | None = None
    anew = False


_THREAD = _ByThread()


def cached_values(owner: nn.Module) -> list[Any]:
    """All that is cached of a module's parameters at this moment, for those who must keep it alive."""
    return [value for _, value in _CACHE.get(owner, {}).values()]


def cached(owner: nn.Module, key: Any, compute: Callable[[], Computed]) -> Computed:
    """The result of a computation on a module's parameters, done once per state of them where gradients and `vmap` are off.

    The state is the parameters' values, compared with a copy of them, so that no way to change them goes unseen: a tensor's
    version does not count what is done to `parameter.data`, by fused optimizers, or in inference mode.
    """
    if torch.is_grad_enabled() or transforming() or torch.compiler.is_compiling() or _THREAD.anew:
        return compute()
    state = parameter_state(owner)
    if state is None:
        return compute()
    known = _CACHE.setdefault(owner, {}).get(key)
    if known is None or known[0] != state:
        known = (state, _compute(owner, compute))
        _CACHE[owner][key] = known
    result: Computed = known[1]
    return result


@contextmanager
def computed_anew() -> Iterator[None]:
    """Inside, `cached` computes whatever it is asked for, as a CUDA graph must that follows the parameters."""
    before, _THREAD.anew = _THREAD.anew, True
    try:
        yield
    finally:
        _THREAD.anew = before


def constant(owner: nn.Module, key: Any, compute: Callable[[], Computed]) -> Computed:
    """The result of a computation that depends on nothing but its key, done once for a module."""
    if transforming():
        return compute()
    known = _CONSTANTS.setdefault(owner, {})
    if key not in known:
        known[key] = _compute(owner, compute)
    result: Computed = known[key]
    return result


def recent(owner: nn.Module, key: Any, compute: Callable[[], Computed]) -> Computed:
    """The result of a computation that depends on nothing but its key; the last few are kept for a module.

    What is asked for while a CUDA graph is captured is kept as long as the module: the graph reads its memory in every replay.
    """
    with _LOCK:
        known = _RECENT.get(owner)
        if known is None:
            known = _RECENT[owner] = {}
        found, held = known.pop(key, None) or (compute(), False)
        held = held or (torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing())
        known[key] = (found, held)
        if len(known) > MOST_RECENT:
            free = [name for name, (_, is_held) in known.items() if not is_held]
            for name in free[:-MOST_RECENT]:
                del known[name]
    result: Computed = found
    return result


def _compute(owner: nn.Module, compute: Callable[[], Computed]) -> Computed:
    device = next((parameter.device.type for parameter in owner.parameters()), "cpu")
    with torch.inference_mode(False), torch.no_grad(), torch.autocast(device, enabled=False):  # it outlives the modes
        return compute()


def parameter_state(owner: nn.Module) -> int | None:
    """A number that changes with a module's parameters and buffers; nothing where that cannot be told, or not cheaply."""
    settled = _THREAD.settled
    if settled is not None and owner in settled:
        return settled[owner]
    state = _parameter_state([*owner.parameters(), *owner.buffers()], owner)
    if settled is not None:
        settled[owner] = state
    return state


def _parameter_state(parameters: Sequence[Tensor], owner: nn.Module) -> int | None:
    with _LOCK:
        known = _STATES.get(owner)
        if known is not None and len(parameters) == len(known[1]) and all(map(_same_bytes, parameters, known[1])):
            return known[0]
    if sum(parameter.numel() for parameter in parameters) > LARGEST:
        return None
    if any(parameter.is_meta for parameter in parameters):
        return None
    if any(parameter.is_cuda for parameter in parameters) and torch.cuda.is_current_stream_capturing():
        return None
    with _LOCK:
        known = _STATES.get(owner)
        if known is None or not _are_equal(parameters, known[1]):
            with torch.inference_mode(False), torch.no_grad():
                known = next(_COUNTER), [parameter.detach().clone() for parameter in parameters]
            _STATES[owner] = known
    return known[0]


def is_settled(owner: nn.Module) -> bool:
    """Whether a module's parameters were compared before in a time in which they stay as they are; see `settled`."""
    return _THREAD.settled is not None and owner in _THREAD.settled


def run_beside_comparison(owner: nn.Module, state: int, run: Callable[[], Computed]) -> tuple[Computed, bool]:
    """Run something on a module's GPU, and tell whether the parameters were in a state as it began.

    The comparison is on a stream of its own, so that the device has work while the host waits for the outcome.
    """
    parameters = [*owner.parameters(), *owner.buffers()]
    with _LOCK:
        known, device = _STATES.get(owner), parameters[0].device
        if device not in _SIDES:
            _SIDES[device] = torch.cuda.Stream(device, priority=-1)
        side = _SIDES[device]
        side.wait_stream(torch.cuda.current_stream(device))
        found = run()
        with torch.cuda.stream(side):
            same = known is not None and known[0] == state and _are_equal(parameters, known[1])
    if same and _THREAD.settled is not None:
        _THREAD.settled[owner] = state
    return found, same


@torch.no_grad()
def _are_equal(now: Sequence[Tensor], before: Sequence[Tensor]) -> bool:
    def form(tensors: Sequence[Tensor]) -> list[Any]:
        return [(tensor.shape, tensor.dtype, tensor.device) for tensor in tensors]

    if form(now) != form(before):
        return False
    if not any(tensor.is_cuda for tensor in now):
        return all(map(_is_equal, now, before))
    real = [[value if value.is_floating_point() else value.double() for value in values] for values in (now, before)]
    differences = torch._foreach_norm(torch._foreach_sub(*real), float("inf"))
    return bool(torch.stack([difference.float() for difference in differences]).sum() == 0)  # one wait for the device


_C = ctypes.cdll.msvcrt if os.name == "nt" else ctypes.CDLL(None)
_COMPARE = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)(("memcmp", _C))


def _same_bytes(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors on a processor have the same form and the same bytes; not where there are gaps between these."""
    if type(one) not in (Tensor, nn.Parameter) or not one.is_cpu or one.dtype != other.dtype:
        return False
    if one.shape != other.shape or one.stride() != other.stride():
        return False
    if not one.is_contiguous() and (one.ndim != 4 or not one.is_contiguous(memory_format=torch.channels_last)):
        return False
    return _COMPARE(one.data_ptr(), other.data_ptr(), one.nbytes) == 0  # torch compares one number at a time


def _is_equal(one: Tensor, other: Tensor) -> bool:
    return _same_bytes(one, other) or torch.equal(one, other)


@contextmanager
def settled() -> Iterator[None]:
    """For a while parameters stay as they are in this thread, so that they are compared once for each module."""
    outer = _THREAD.settled
    _THREAD.settled = {} if outer is None else outer
    try:
        yield
    finally:
        _THREAD.settled = outer
