"""Choice of torch's kernels by process-wide settings. The first thread that needs a setting turns it on; the last one resets it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from bayesify.running.modes import assigned


class SharedSetting:
    """A process-wide setting that several threads may need at the same time."""

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
    settings: tuple[Any, ...] = (torch.backends.cudnn, torch.backends.cuda.matmul)
    before: list[Any] = []
    try:
        for setting in settings:
            before.append(setting.allow_tf32)
            setting.allow_tf32 = False
    except RuntimeError:  # the user has set precisions through torch's newer settings, which forbid the older ones
        pass
    try:
        yield
    finally:
        for setting, value in zip(settings, before, strict=False):
            setting.allow_tf32 = value


plain_attention = SharedSetting(lambda: sdpa_kernel(SDPBackend.MATH))
"""Compute attention by its formula, because the fused kernels have no second derivative."""

without_cudnn = SharedSetting(lambda: assigned([torch.backends.cudnn], "enabled", False))
"""Run recurrent layers with torch's own kernels, because the cuDNN kernels have no derivative in evaluation mode."""

full_float32 = SharedSetting(_without_tf32)
"""Compute float32 products in full precision. With tf32, outputs of a deep network differ by several percent between batch
sizes."""


@contextmanager
def twice_differentiable(network: nn.Module) -> Iterator[None]:
    """Context with kernels that can be differentiated twice."""
    recurrent = any(isinstance(module, nn.RNNBase) for module in network.modules())
    with plain_attention(), without_cudnn() if recurrent else nullcontext():
        yield
