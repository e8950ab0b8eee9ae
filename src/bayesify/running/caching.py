"""Results that a module keeps, and that are computed once per state of its parameters."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from bayesify.maths.value_checks import transforming
from bayesify.weights.named_parameters import first_parameter, tensors_in

Computed = TypeVar("Computed")

MAX_COMPARED_NUMBERS = 2**24
"""Nothing is kept of a module with more parameters than this: to tell whether they have changed takes a copy of them."""

MAX_RECENT_RESULTS = 4
"""Results that `Results.recent` keeps, those that were asked for last."""

_NUMBERS = itertools.count()


class _Scope(threading.local):
    """What the present thread has asked for."""

    settled: dict[Results, _State | None] | None = None
    anew = False


_SCOPE = _Scope()


class _State(NamedTuple):
    """Parameters and buffers of a module as they were, and what was computed from them."""

    number: int
    tensors: list[Tensor]
    values: dict[Hashable, Any]


class Results:
    """Results for one module, which owns them.

    What was computed from the parameters holds while their values are the same: they are compared with a copy. So no way to change
    them goes unseen, whereas a tensor's version does not count what is done to `parameter.data`, by fused optimizers, or in
    inference mode. A copy or a pickle of this object is empty.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._state: _State | None = None
        self._constants: dict[Hashable, Any] = {}
        self._recent: dict[Hashable, tuple[Any, bool]] = {}
        self._sides: dict[torch.device, torch.cuda.Stream] = {}

    def __reduce__(self) -> tuple[type[Results], tuple[()]]:
        return Results, ()

    def cached(self, owner: nn.Module, key: Hashable, compute: Callable[[], Computed]) -> Computed:
        """The result of a computation on the owner's parameters, done once per state of them where gradients and `vmap` are off."""
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
        """All that is kept of the parameters at this moment, for those who must keep it alive."""
        return list(self._state.values.values()) if self._state is not None else []

    def constant(self, owner: nn.Module, key: Hashable, compute: Callable[[], Computed]) -> Computed:
        """The result of a computation that depends on nothing but its key, done once."""
        if transforming():
            return compute()
        if key not in self._constants:
            self._constants[key] = _compute(owner, compute)
        found: Computed = self._constants[key]
        return found

    def recent(self, key: Hashable, compute: Callable[[], Computed]) -> Computed:
        """The result of a computation that depends on nothing but its key; the last few are kept.

        What is asked for while a CUDA graph is captured is kept for good: the graph reads its memory in every replay.
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
        """A number that changes with the owner's parameters and buffers; `None` where that cannot be told, or not cheaply."""
        state = self._state_of(owner)
        return None if state is None else state.number

    def is_settled(self) -> bool:
        """Whether the parameters were compared before in a time in which they stay as they are; see `settled`."""
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
        """Run something on the owner's GPU, and tell whether the parameters were in a state as it began.

        The comparison is on a stream of its own, so that the device has work while the host waits for the outcome.
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
    with torch.inference_mode(False), torch.no_grad(), torch.autocast(device, enabled=False):  # it outlives the modes
        return compute()


def _noted(tensors: Sequence[Tensor]) -> _State | None:
    """A new state, with a copy of the tensors; `None` where it would not be cheap to compare them again."""
    if sum(map(Tensor.numel, tensors)) > MAX_COMPARED_NUMBERS or any(tensor.is_meta for tensor in tensors):
        return None
    if any(tensor.is_cuda for tensor in tensors) and torch.cuda.is_current_stream_capturing():
        return None
    with torch.inference_mode(False), torch.no_grad():
        return _State(next(_NUMBERS), [tensor.detach().clone() for tensor in tensors], {})


@torch.no_grad()
def _are_equal(now: Sequence[Tensor], before: Sequence[Tensor]) -> bool:
    """Whether tensors have the same form and values; one wait for a GPU in all."""
    if len(now) != len(before):
        return False
    try:
        if not now or not now[0].is_cuda:
            return all(map(torch.equal, now, before))
    except RuntimeError:  # of another type, or on another device
        return False
    for one, other in zip(now, before, strict=True):
        if one.shape != other.shape or one.dtype != other.dtype or one.device != other.device:
            return False
    if torch.cuda.is_current_stream_capturing():
        return False
    real = [[value if value.is_floating_point() else value.double() for value in values] for values in (now, before)]
    differences = torch._foreach_norm(torch._foreach_sub(*real), float("inf"))
    return bool(torch.stack([difference.float() for difference in differences]).sum() == 0)


@contextmanager
def computed_anew() -> Iterator[None]:
    """Inside, `Results.cached` computes whatever it is asked for, as a CUDA graph must that follows the parameters."""
    before, _SCOPE.anew = _SCOPE.anew, True
    try:
        yield
    finally:
        _SCOPE.anew = before


@contextmanager
def settled() -> Iterator[None]:
    """For a while parameters stay as they are in this thread, so that they are compared once for each module."""
    outer = _SCOPE.settled
    _SCOPE.settled = {} if outer is None else outer
    try:
        yield
    finally:
        _SCOPE.settled = outer
