"""Training with every step recorded as one CUDA graph: draw, network, bound, gradients and Adam in a single launch.

A small network on a large GPU waits for Python most of the time. `fit` cannot record its steps, since it serves any
network, loader and optimizer; here all are known. Without a GPU the same steps run unrecorded.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sized
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from bayesify.network import BayesianNetwork

WARM_UP = 3
"""Steps that run unrecorded: libraries choose their kernels and Adam makes its state in them."""


class Batches(Sized, Protocol):
    """Batches of equal size, on the network's device, that start anew each time they are asked for."""

    def __iter__(self) -> Any: ...


def fit_recorded(
    bnn: BayesianNetwork,
    batches: Batches,
    optimizer: torch.optim.Optimizer,
    *,
    num_data: int,
    epochs: int,
    kl_schedule: Callable[[float], float],
    kl_weight: float = 1.0,
    num_draws: int = 1,
    precision: Literal["float32", "bf16"] = "float32",
    decay_epoch: int | None = None,
    seed: int = 0,
    terms: Callable[..., tuple[Tensor, Tensor]] | None = None,
    keeps_mode: bool = False,
) -> list[dict[str, Any]]:
    """Minimize the negative bound per example, as `fit` does.

    Args:
        bnn: The network, with a likelihood; it is left in training mode.
        batches: See `Batches`.
        optimizer: On a GPU one that can be recorded, its learning rates being tensors there; see `as_recordable`.
        num_data: N.
        epochs: Passes over the data.
        kl_schedule: Factor on the KL as a function of the epochs that have passed.
        kl_weight: Constant factor on the KL.
        num_draws: Draws in a step.
        precision: `"bf16"` runs the network under autocast.
        decay_epoch: Epochs after which learning rates fall to a tenth; never if left out.
        seed: Of the order of the batches, if those take torch's global random numbers, and of the draws.
        terms: Data term and penalty of another objective, called as `bnn.elbo_terms`, which it is if left out.
        keeps_mode: Whether the network trains in the mode it is in.

    Returns:
        For each epoch `epoch`, `nll` per example, `kl` in nats and `kl_weight` at its end.

    Raises:
        ValueError: If the bound is not finite.
    """
    device = next(bnn.parameters()).device
    if not keeps_mode:
        bnn.train()
    generator = torch.Generator(device).manual_seed(seed)
    step = RecordedStep(terms or bnn.elbo_terms, optimizer, num_data, num_draws, precision, generator)
    history, weight = [], 0.0
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        for epoch in range(epochs):
            if epoch == decay_epoch:
                scale_learning_rates(optimizer, 0.1)
            step.sums.zero_()
            for index, (x, y) in enumerate(batches):
                weight = kl_weight * kl_schedule(epoch + index / len(batches))
                step(x, y, weight)
            nll, kl = (step.sums / len(batches)).tolist()
            if not math.isfinite(nll + kl):
                raise ValueError(f"epoch {epoch + 1}: the bound is not finite; lower the learning rate")
            history.append({"epoch": epoch + 1, "nll": nll / num_data, "kl": kl, "kl_weight": weight})
    optimizer.zero_grad(set_to_none=True)
    mark_changed(bnn)
    return history


@torch.no_grad()
def mark_changed(bnn: BayesianNetwork) -> None:
    """Raise the version of all parameters, by which factors are remembered: a graph that is played back does not."""
    for parameter in bnn.parameters():
        parameter.add_(0.0)


def as_recordable(optimizer: torch.optim.Optimizer, device: torch.device) -> torch.optim.Optimizer:
    """Adam whose step can be recorded on a GPU, in place: learning rates as tensors there."""
    if device.type == "cuda":
        for group in optimizer.param_groups:
            group["capturable"] = True
            group["lr"] = torch.as_tensor(group["lr"], dtype=torch.float32, device=device)
    return optimizer


def scale_learning_rates(optimizer: torch.optim.Optimizer, factor: float) -> None:
    """Multiply every learning rate; tensors in place, where a graph reads them."""
    for group in optimizer.param_groups:
        if isinstance(group["lr"], Tensor):
            group["lr"].mul_(factor)
        else:
            group["lr"] *= factor


def set_learning_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Set every learning rate; tensors in place, where a graph reads them."""
    for group in optimizer.param_groups:
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(rate)
        else:
            group["lr"] = rate


class RecordedStep:
    """A step of training; on a GPU it is recorded after a few.

    Args:
        terms: Data term and penalty, called as `BayesianNetwork.elbo_terms`.
        optimizer: See `fit_recorded`.
        num_data: N.
        num_draws: Draws in a step.
        precision: `"bf16"` runs the network under autocast.
        generator: Of the draws; its device is that of the step.

    Attributes:
        sums: Negative data term and penalty, summed over steps since it was last set to zero, [2].
    """

    def __init__(
        self,
        terms: Callable[..., tuple[Tensor, Tensor]],
        optimizer: torch.optim.Optimizer,
        num_data: int,
        num_draws: int,
        precision: str,
        generator: torch.Generator,
    ) -> None:
        self.terms, self.optimizer, self.generator = terms, optimizer, generator
        self.num_data, self.num_draws, self.precision = num_data, num_draws, precision
        self.device = generator.device
        self.sums = torch.zeros(2, dtype=torch.float64, device=self.device)
        self.kl_weight = torch.zeros((), device=self.device)
        self.given: tuple[Tensor, Tensor] | None = None
        self.graph: torch.cuda.CUDAGraph | None = None
        self.count = 0

    def __call__(self, x: Tensor, y: Tensor, kl_weight: float) -> None:
        """Make a step on a batch, all of one size, with a factor on the penalty."""
        self.kl_weight.fill_(kl_weight)
        if self.device.type != "cuda":
            self._run(x, y)
            return
        if self.given is None:
            self.given = (x.clone(), y.clone())
        for own, new in zip(self.given, (x, y), strict=True):
            own.copy_(new)
        self.count += 1
        if self.count <= WARM_UP:
            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                self._run(*self.given)
            torch.cuda.current_stream().wait_stream(side)
            return
        if self.graph is None:
            self._record()
        assert self.graph is not None
        self.graph.replay()

    def _record(self) -> None:
        assert self.given is not None
        self.optimizer.zero_grad(set_to_none=True)
        graph = torch.cuda.CUDAGraph()
        graph.register_generator_state(self.generator)
        with torch.cuda.graph(graph):
            self._run(*self.given, reset=False)
        self.graph = graph

    def _run(self, x: Tensor, y: Tensor, reset: bool = True) -> None:
        if reset:
            self.optimizer.zero_grad(set_to_none=True)
        with self._autocast():
            data, kl = self.terms(x, y, num_data=self.num_data, num_draws=self.num_draws, generator=self.generator)
        data, kl = data.mean(), kl.mean()
        ((self.kl_weight * kl - data) / self.num_data).backward()
        self.optimizer.step()
        self.sums.add_(torch.stack((-data.detach(), kl.detach())).double())

    def _autocast(self) -> AbstractContextManager[Any]:
        if self.precision == "float32":
            return nullcontext()
        return torch.autocast(self.device.type, dtype=torch.bfloat16, cache_enabled=False)
