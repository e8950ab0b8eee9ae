"""Optimizer and scheduler of a run, from the arguments of `fit`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


def make_optimizer(choice: Any, module: nn.Module, learning_rate: float) -> torch.optim.Optimizer:
    """Optimizer of a module's trainable parameters: the given optimizer, the result of a given function, or fused Adam."""
    trainable = [parameter for parameter in module.parameters() if parameter.requires_grad]
    if choice is None:
        fused = all(parameter.device.type in ("cpu", "cuda") for parameter in trainable)
        return torch.optim.Adam(trainable, lr=learning_rate, fused=fused)
    made = choice if isinstance(choice, torch.optim.Optimizer) else choice(trainable)
    if not isinstance(made, torch.optim.Optimizer):
        raise TypeError(
            f"fit: optimizer= gives an object of type {type(made).__name__}; give a torch.optim.Optimizer, or a "
            "function that returns one"
        )
    if isinstance(made, torch.optim.LBFGS):
        raise ValueError(
            "fit: LBFGS is not supported, because it evaluates the objective several times per step; write your own loop "
            "around bnn.elbo"
        )
    known = {id(parameter) for parameter in trainable}
    if not any(id(parameter) in known for group in made.param_groups for parameter in group["params"]):
        raise ValueError(
            "fit: the optimizer holds no parameter of this network; make it from bnn.parameters(), not from net.parameters()"
        )
    return made


def make_scheduler(choice: Any, optimizer: torch.optim.Optimizer | None) -> Any:
    """Scheduler of an optimizer: the given scheduler, or the result of a given function."""
    if choice is None or optimizer is None:
        return None
    made = choice(optimizer) if callable(choice) and not hasattr(choice, "state_dict") else choice
    if not callable(getattr(made, "step", None)) or not callable(getattr(made, "state_dict", None)):
        raise TypeError(
            f"fit: scheduler={choice!r} is not a scheduler; give a scheduler of torch.optim.lr_scheduler, or a "
            "function that makes a scheduler from an optimizer"
        )
    if getattr(made, "optimizer", optimizer) is not optimizer:
        raise ValueError(
            "fit: the scheduler belongs to another optimizer; pass that optimizer as well, or a function that makes a "
            "scheduler from an optimizer"
        )
    return made


def match_layout(optimizer: torch.optim.Optimizer) -> None:
    """Give loaded state the memory layout of its parameters, such as channels last. Fused optimizers require this."""
    for parameter, state in optimizer.state.items():
        for key, value in state.items():
            if isinstance(value, Tensor) and value.shape == parameter.shape and value.stride() != parameter.stride():
                state[key] = torch.empty_like(parameter, dtype=value.dtype).copy_(value)
