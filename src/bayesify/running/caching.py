"""Cached results of a module, which are computed once for each state of its parameters."""

import itertools
import threading
from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, Self, TypeVar

import torch
from torch import Tensor, nn

from bayesify.maths.value_checks import transforming
from bayesify.running.modes import assigned
from bayesify.weights.named_parameters import first_parameter, tensors_in

Computed = TypeVar("Computed")

MAX_COMPARED_NUMBERS = 2**24
"""A module with more parameters than this caches nothing, because a copy of the parameters is needed to detect changes."""

MAX_RECENT_RESULTS = 4
"""Number of most recently used results that `Results.recent` keeps."""

_NUMBERS = itertools.count()


class _Scope(threading.local):
    """State of the contexts `settled` and `computed_anew` in the current thread."""

    settled: "dict[Results, _State | None] | None" = None
    anew = False


_SCOPE = _Scope()


class _State(NamedTuple):
    """The parameters and buffers of a module at one moment, and the results computed from them."""

    number: int
    tensors: list[Tensor]
    values: dict[Hashable, Any]


class Results:
    """Cached results of one module, which owns this object.

    A result is valid as long as the parameters are equal to a stored copy, so every change is detected. A tensor's version
    counter would miss changes through `parameter.data`, by fused optimizers, or in inference mode. Copies and pickles of this
    object are empty.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._state: _State | None = None
        self._constants: dict[Hashable, Any] = {}
        self._recent: dict[Hashable, tuple[Any, bool]] = {}
        self._sides: dict[torch.device, torch.cuda.Stream] = {}

    def __reduce__(self) -> tuple[type[Self], tuple[()]]:
        return type(self), ()

    def cached(self, owner: nn.Module, key: Hashable, compute: Callable[[], Computed]) -> Computed:
        """Result of a computation on the owner's parameters, cached until they change if gradients and `vmap` are off."""
        if torch.is_grad_enabled() or transforming() or torch.compiler.is_compiling() or _SCOPE.anew:
            return compute()
        state = self._state_of(owner)
        if state is None:
            return compute()
        if key not in state.values:
            state.values[key] = _compute(owner, compute)
        found: Computed = state.values[key]
        return found

    def values(self) -> list[Any]:
        """All results that are currently cached, for callers that must keep these results alive."""
        return list(self._state.values.values()) if self._state is not None else []

    def constant(self, owner: nn.Module, key: Hashable, compute: Callable[[], Computed]) -> Computed:
        """Result of a computation that depends only on `key`; it is computed once."""
        if transforming():
            return compute()
        if key not in self._constants:
            self._constants[key] = _compute(owner, compute)
        found: Computed = self._constants[key]
        return found

    def recent(self, key: Hashable, compute: Callable[[], Computed]) -> Computed:
        """Result of a computation that depends only on `key`. The last few results are cached.

        A result requested during the capture of a CUDA graph is kept forever, because the graph reads its memory in every replay.
        """
        with self._lock:
            found, held = self._recent.pop(key, None) or (compute(), False)
            held = held or (torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing())
            self._recent[key] = (found, held)
            if len(self._recent) > MAX_RECENT_RESULTS:
                free = [name for name, (_, is_held) in self._recent.items() if not is_held]
                for name in free[:-MAX_RECENT_RESULTS]:
                    del self._recent[name]
        result: Computed = found
        return result

    def state(self, owner: nn.Module) -> int | None:
        """A number that changes when the owner's parameters or buffers change; `None` if changes cannot be detected cheaply."""
        state = self._state_of(owner)
        return None if state is None else state.number

    def is_settled(self) -> bool:
        """Whether this thread has already compared the parameters with their stored copy inside the current `settled` context."""
        return _SCOPE.settled is not None and self in _SCOPE.settled

    def _state_of(self, owner: nn.Module) -> _State | None:
        settled = _SCOPE.settled
        if settled is not None and self in settled:
            return settled[self]
        tensors = tensors_in(owner)
        with self._lock:
            state = self._state
            if state is None or not _are_equal(tensors, state.tensors):
                state = _noted(tensors)
                self._state = state or self._state
        if settled is not None:
            settled[self] = state
        return state

    def run_beside_comparison(
        self, owner: nn.Module, number: int, run: Callable[[], Computed]
    ) -> tuple[Computed, bool]:
        """Run a function on the owner's GPU. Return the function's result, and whether the owner's parameters, when the function
        started, were those for which `state` returned `number`.

        The parameters are compared on a separate stream. The device therefore runs the function while the host waits for the
        result of the comparison.
        """
        tensors = tensors_in(owner)
        with self._lock:
            state, device = self._state, tensors[0].device
            if device not in self._sides:
                self._sides[device] = torch.cuda.Stream(device, priority=-1)
            side = self._sides[device]
            side.wait_stream(torch.cuda.current_stream(device))
            found = run()
            with torch.cuda.stream(side):
                same = state is not None and state.number == number and _are_equal(tensors, state.tensors)
        if same and _SCOPE.settled is not None:
            _SCOPE.settled[self] = state
        return found, same


def _compute(owner: nn.Module, compute: Callable[[], Computed]) -> Computed:
    device = first_parameter(owner).device.type
    # Leave the caller's inference mode and autocast, because the result outlives them.
    with torch.inference_mode(False), torch.no_grad(), torch.autocast(device, enabled=False):
        return compute()


def _noted(tensors: Sequence[Tensor]) -> _State | None:
    """A new state with a copy of the tensors; `None` if comparing tensors with this copy would not be cheap."""
    if sum(map(Tensor.numel, tensors)) > MAX_COMPARED_NUMBERS or any(tensor.is_meta for tensor in tensors):
        return None
    if any(tensor.is_cuda for tensor in tensors) and torch.cuda.is_current_stream_capturing():
        return None
    with torch.inference_mode(False), torch.no_grad():
        return _State(next(_NUMBERS), [tensor.detach().clone() for tensor in tensors], {})


@torch.no_grad()
def _are_equal(now: Sequence[Tensor], before: Sequence[Tensor]) -> bool:
    """Whether the tensors have the same shapes, types, devices and values. The host waits for a GPU only once."""
    if len(now) != len(before):
        return False
    try:
        if not now or not now[0].is_cuda:
            return all(map(torch.equal, now, before))
    except RuntimeError:  # the tensors have different types or devices
        return False
    for one, other in zip(now, before, strict=True):
        if one.shape != other.shape or one.dtype != other.dtype or one.device != other.device:
            return False
    if torch.cuda.is_current_stream_capturing():
        return False
    real = [[value if value.is_floating_point() else value.double() for value in values] for values in (now, before)]
    differences = torch._foreach_norm(torch._foreach_sub(*real), float("inf"))
    return bool(torch.stack([difference.float() for difference in differences]).sum() == 0)


def computed_anew() -> AbstractContextManager[None]:
    """Context in which `Results.cached` always computes its result. A CUDA graph needs this context if it must recompute its
    results when the parameters change."""
    return assigned([_SCOPE], "anew", True)


def settled() -> AbstractContextManager[None]:
    """Context in which this thread does not change parameters, so that each module's parameters are compared only once."""
    return assigned([_SCOPE], "settled", {} if _SCOPE.settled is None else _SCOPE.settled)
