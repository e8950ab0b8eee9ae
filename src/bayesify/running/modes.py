"""Contexts that change torch's settings, torch's choice of kernels, or attributes of objects, and restore them at the end."""

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from typing import Any

import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel


@contextmanager
def outside_inference_mode() -> Iterator[None]:
    """Context outside inference mode, in which new tensors are trainable. The gradient mode stays as it is."""
    with_grad = torch.is_grad_enabled()
    with torch.inference_mode(False), torch.set_grad_enabled(with_grad):
        yield


@contextmanager
def full_precision(device: str) -> Iterator[torch.dtype | None]:
    """Turn autocast off and yield its dtype. Autocast suits the network, but a KL in bfloat16 would be wrong by several percent."""
    if not torch.is_autocast_enabled(device):
        yield None
        return
    with torch.autocast(device, enabled=False):
        yield torch.get_autocast_dtype(device)


@contextmanager
def assigned(owners: Iterable[Any], name: str, *value: Any) -> Iterator[None]:
    """Context in which an attribute of several objects has the given value, if one is given. At the end, it is restored."""
    before = [(owner, getattr(owner, name)) for owner in owners]
    try:
        for owner, _ in before if value else ():
            setattr(owner, name, *value)
        yield
    finally:
        for owner, own in before:
            setattr(owner, name, own)


def modes_kept(modules: Iterable[nn.Module], *, evaluate: bool = False) -> AbstractContextManager[None]:
    """Restore the mode (train or eval) of each module at the end. With `evaluate`, the context is in evaluation mode."""
    return assigned(modules, "training", *([False] if evaluate else []))


@contextmanager
def torch_threads(count: int) -> Iterator[None]:
    """Context in which torch uses `count` threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


class SharedSetting:
    """A process-wide setting that several threads may need: the first one turns it on, and the last one resets it."""

    def __init__(self, make: Callable[[], AbstractContextManager[Any]]) -> None:
        self._make = make
        self._lock = threading.Lock()
        self._users = 0
        self._stack = ExitStack()

    @contextmanager
    def __call__(self) -> Iterator[None]:
        """Context in which the setting is active."""
        with self._lock:
            if self._users == 0:
                self._stack.enter_context(self._make())
            self._users += 1
        try:
            yield
        finally:
            with self._lock:
                self._users -= 1
                if self._users == 0:
                    self._stack.close()


@contextmanager
def _without_tf32() -> Iterator[None]:
    with ExitStack() as stack:
        with suppress(
            RuntimeError
        ):  # the user has used torch's newer settings of precisions, which forbid the older ones
            for setting in (torch.backends.cudnn, torch.backends.cuda.matmul):
                stack.enter_context(assigned([setting], "allow_tf32", False))
        yield


plain_attention = SharedSetting(lambda: sdpa_kernel(SDPBackend.MATH))
"""Compute attention by its formula, because the fused kernels have no second derivative."""

without_cudnn = SharedSetting(lambda: assigned([torch.backends.cudnn], "enabled", False))
"""Run recurrent layers with torch's own kernels, because the cuDNN kernels have no derivative in evaluation mode."""

full_float32 = SharedSetting(_without_tf32)
"""Compute float32 products in full precision. With tf32, outputs differ by several percent between batch sizes."""


@contextmanager
def twice_differentiable(network: nn.Module) -> Iterator[None]:
    """Context with kernels that can be differentiated twice."""
    recurrent = any(isinstance(module, nn.RNNBase) for module in network.modules())
    with plain_attention(), without_cudnn() if recurrent else nullcontext():
        yield
