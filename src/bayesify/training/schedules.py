"""Optimizer of a training run, and schedules of the factor on the KL and of the learning rate."""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from bayesify.arguments.checks import NonNegative, checked


@checked
@dataclass(frozen=True)
class KLSchedule:
    r"""Factor on the KL: first 0, then linearly growing, then 1.

    $$ \beta(t) = \min\bigl(1, \max(0, (t - \text{zero\_epochs}) / \text{linear\_epochs})\bigr) $$

    where $t$ is the number of epochs of the variational phase so far, including fractions. `fit` accepts any other function of
    $t$ instead.

    Args:
        zero_epochs: Number of epochs without the KL.
        linear_epochs: Number of epochs over which the factor grows; 0 switches the KL on at once.

    Raises:
        ValueError: If a length is negative or not finite.
    """

    zero_epochs: NonNegative = 0.0
    linear_epochs: NonNegative = 0.0

    @checked
    def __call__(self, epoch: NonNegative) -> float:
        """Factor after `epoch` epochs."""
        passed = epoch - self.zero_epochs
        if self.linear_epochs == 0:
            return 1.0 if passed >= 0 else 0.0
        return min(1.0, max(0.0, passed / self.linear_epochs))


def cosine(share: float) -> float:
    """Factor on a learning rate. The factor falls from 1 to 0 as half a cosine. `share` is the fraction of the run that is
    finished."""
    return 0.5 * (1 + math.cos(math.pi * share))


def falling(epoch: float, map_epochs: int, epochs: int) -> float:
    """Default factor on the learning rate: 1 in a MAP phase, then half a cosine that reaches 0 at the end of the run.

    `epoch` is the number of epochs of both phases so far, including fractions. If there is no variational phase, the
    rate falls in the MAP phase.
    """
    if epochs == 0:
        return cosine(epoch / map_epochs)
    return cosine(max(0.0, epoch - map_epochs) / epochs)


def make_optimizer(choice: Any, module: nn.Module, learning_rate: float) -> torch.optim.Optimizer:
    """Optimizer of a module's trainable parameters: the given optimizer, the result of a given function, or fused Adam."""
    trainable = [parameter for parameter in module.parameters() if parameter.requires_grad]
    if choice is None:
        fused = all(parameter.device.type in ("cpu", "cuda") for parameter in trainable)
        return torch.optim.Adam(trainable, lr=learning_rate, fused=fused)
    made = choice if isinstance(choice, torch.optim.Optimizer) else choice(trainable)
    if not isinstance(made, torch.optim.Optimizer):
        raise TypeError(
            f"fit: the function optimizer= returned an object of type {type(made).__name__}; return a "
            "torch.optim.Optimizer"
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
    """Give a loaded optimizer state the memory layout of its parameters, such as channels last. Fused optimizers require this."""
    for parameter, state in optimizer.state.items():
        for key, value in state.items():
            if isinstance(value, Tensor) and value.shape == parameter.shape and value.stride() != parameter.stride():
                state[key] = torch.empty_like(parameter, dtype=value.dtype).copy_(value)
