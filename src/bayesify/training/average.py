"""Average of the parameters over a training run."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from bayesify.arguments.checks import Probability, Share, checked


@checked
@dataclass(frozen=True)
class Average:
    r"""Average of the trainable parameters over the steps of a run. It replaces the parameters at the end of `fit`.

    $$ \bar\theta_n = \bar\theta_{n-1} + \max(1 - \gamma, 1 / n) (\theta_n - \bar\theta_{n-1}) $$

    where $\theta_n$ are the parameters after the n-th step since the average began; skipped steps do not count. In the first
    $1 / (1 - \gamma)$ steps, the average is the plain mean; afterwards it is an exponential average. The first step has no extra
    weight. With `decay=1.0`, the average is the mean of all steps (Polyak and Juditsky 1992). `Average(1.0, start=0.75)` is the
    mean over the last quarter of a run (stochastic weight averaging, Izmailov et al. 2018). If the learning rate has not fallen
    to 0, the average removes most of the gradient noise.

    Variational parameters are averaged in their unconstrained form, so that a standard deviation stays positive. Deterministic
    parameters are averaged too. One pass over the training data recomputes the running statistics of BatchNorm layers for
    the average. The average is stored in float32 or wider.

    Args:
        decay: Weight $\gamma$ of the previous average in each step.
        start: Share of the run after which the average begins. If the run has a variational phase, the average begins
            after the MAP phase.

    Raises:
        ValueError: If an argument is out of range.
    """

    decay: Share = 0.999
    start: Probability = 0.0


class RunningAverage:
    """Average of the parameters in one run.

    All values that vary between steps are in tensors that change in place, so that a step captured as a CUDA graph can include
    the update.
    """

    def __init__(self, module: nn.Module, choice: Average, dtype: torch.dtype) -> None:
        self._module, self.choice = module, choice
        self._named = {name: value for name, value in module.named_parameters() if value.requires_grad}
        self._values = {
            name: torch.zeros_like(value, dtype=torch.promote_types(value.dtype, torch.float32), requires_grad=False)
            for name, value in self._named.items()
        }
        groups: dict[tuple[Any, ...], list[str]] = {}
        for name, value in self._named.items():
            groups.setdefault((value.device, value.dtype), []).append(name)
        self._groups = list(groups.values())
        device = next(iter(self._named.values())).device
        self._count = torch.zeros((), dtype=dtype, device=device)
        self._active = torch.zeros((), dtype=dtype, device=device)
        self.replaced: dict[str, Tensor] = {}  # the run's own tensors, while the module holds the average

    def prepare(self, active: bool) -> None:
        """Set whether the average includes the next step. If `active` is false, the average starts again after this step."""
        self._active.fill_(float(active))

    @torch.no_grad()
    def add(self, taken: Tensor) -> None:
        """Add the parameters after a step, without waiting for the device. `taken` says whether the step was taken."""
        moves = taken * self._active
        self._count.copy_((self._count + moves) * self._active)
        weight = moves * (1 / self._count.clamp_min(1.0)).clamp_min(1 - self.choice.decay)
        for names in self._groups:
            values = [self._values[name] for name in names]
            changes = torch._foreach_sub([self._named[name].to(self._values[name].dtype) for name in names], values)
            torch._foreach_mul_(changes, weight.to(values[0]))
            torch._foreach_add_(values, changes)

    @property
    def is_empty(self) -> bool:
        """Whether the average contains no step yet. Reading this property waits for the device."""
        return not bool(self._count > 0)

    @torch.no_grad()
    def put_in(self) -> None:
        """Replace the module's parameters by the average."""
        for name, value in self._named.items():
            value.copy_(self._values[name])

    @contextmanager
    def in_place(self, refresh: Callable[[], None]) -> Iterator[None]:
        """Replace the parameters by the average in this context; `refresh` sets the buffers. At the end, both are restored."""
        if self.is_empty:
            yield
            return
        self.replaced = {name: value.detach().clone() for name, value in self._places()}
        try:
            self.put_in()
            refresh()
            yield
        finally:
            with torch.no_grad():
                for name, value in self._places():
                    value.copy_(self.replaced[name])
            self.replaced = {}

    def _places(self) -> Iterator[tuple[str, Tensor]]:
        """Averaged parameters and all buffers, each under all of its names."""
        trained = {id(value) for value in self._named.values()}
        for name, value in self._module.named_parameters(remove_duplicate=False):
            if id(value) in trained:
                yield name, value
        yield from self._module.named_buffers(remove_duplicate=False)

    def state_dict(self) -> dict[str, Any]:
        """State for a checkpoint."""
        return {"count": float(self._count), "values": dict(self._values)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Inverse of `state_dict`; raises `ValueError` if the state belongs to other parameters."""
        shapes = {name: value.shape for name, value in state["values"].items()}
        if shapes != {name: value.shape for name, value in self._values.items()} or not 0 <= state["count"] < 2**53:
            raise ValueError("the averaged parameters in the checkpoint do not match this network's parameters")
        self._count.fill_(state["count"])
        for name, value in self._values.items():
            value.copy_(state["values"][name])
