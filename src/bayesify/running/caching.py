"""Results that are computed once per state of a module's parameters."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from bayesify.maths.value_checks import transforming

Computed = TypeVar("Computed")

_CACHE: weakref.WeakKeyDictionary[nn.Module, dict[Any, Any]] = weakref.WeakKeyDictionary()


_STEPS = 0


def count_step(*_: Any) -> None:
    """Count a step that changed parameters; optimizers are counted by themselves, replayed graphs are not."""
    global _STEPS
    _STEPS += 1


register_optimizer_step_post_hook(count_step)


def steps_taken() -> int:
    """Steps of all optimizers in this process so far: fused ones change parameters without raising their version."""
    return _STEPS


def cached_values(owner: nn.Module) -> list[Any]:
    """All that is cached for a module at this moment, for those who must keep it alive."""
    return [value for _, value in _CACHE.get(owner, {}).values()]


def cached(owner: nn.Module, key: Any, compute: Callable[[], Computed], of: Sequence[Tensor] | None = None) -> Computed:
    """The result of a computation on a module's parameters, done once per state of them where gradients and `vmap` are off.

    Args:
        owner: The module.
        key: Names the computation.
        compute: Does it.
        of: The tensors that the result depends on; all parameters by default.
    """
    if transforming() or (torch.is_grad_enabled() and of is None):
        return compute()
    used = owner.parameters() if of is None else of
    state: list[Any] = [(tensor.data_ptr(), tensor._version, tensor.device, tensor.dtype) for tensor in used]
    if of is None:
        state.append(steps_taken())
    known = _CACHE.setdefault(owner, {})
    if key not in known or known[key][0] != state:
        with torch.inference_mode(False), torch.set_grad_enabled(False):  # the result may outlive the mode
            known[key] = (state, compute())
    result: Computed = known[key][1]
    return result
