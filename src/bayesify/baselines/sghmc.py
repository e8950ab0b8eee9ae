"""Stochastic gradient Hamiltonian Monte Carlo with a cyclical schedule: a sampler that uses one minibatch per step."""

import copy
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from bayesify.arguments.checks import Count, DataCount, Level, Positive, Probability, checked
from bayesify.baselines.fixed_draws import FixedDraws
from bayesify.draws import Draws
from bayesify.likelihoods.objectives import exact_copy
from bayesify.network import BayesianNetwork
from bayesify.posteriors.point import Point
from bayesify.predictor import Batch
from bayesify.running.generators import own_generators
from bayesify.running.runner import Runner
from bayesify.training import Update, fit
from bayesify.training.batches import BatchReader, check_repeatable, count_batches, count_examples, parse_batch
from bayesify.weights.batch_statistics import tracking_layers

STABLE_RATE = 1.0
"""Default learning rate, in units of one over the largest curvature. Explicit steps without friction diverge at 4.

At a rate of 1, the variance along the steepest direction is a third too large, and the variances along other directions are
nearly exact. A smaller rate explores less in the same number of steps. `docs/truth.md` compares both with exact posteriors."""
MIN_RATE_SHARE = 0.5
"""Learning rate at the end of a cycle, as a share of the initial rate. At a rate of 0 the chain would not move."""
MIN_CYCLE_STEPS = 10
"""Minimum number of steps per cycle. Short runs therefore have fewer cycles."""
POWER_STEPS = 15
"""Number of power iterations that estimate the largest curvature."""


class CyclicalSGHMC(torch.optim.Optimizer):
    r"""Momentum with friction and noise (Chen et al. 2014, eq. 15), with a cyclical learning rate (Zhang et al. 2020, eq. 1).

    $$ v \leftarrow (1 - a) v - \ell_t s^2 \nabla \tfrac{1}{N} U + s \sqrt{2 a \ell_t / N}\, \xi, \qquad w \leftarrow w + v $$

    with $U = -\log p(w, y)$ and the prior standard deviation s of the weight. If the rates $\ell_t$ are small and the gradients
    have no noise, w is distributed as $e^{-U}$. In each cycle, the rate falls from $\ell$ to $\ell / 2$ along a cosine. The
    first part of a cycle explores without adding noise.

    `groups` has one dictionary per weight, with the weight's `params` and its `scale` s. `sghmc` documents the other arguments.
    """

    def __init__(self, groups: Iterable[dict[str, Any]], learning_rate: float, **chosen: float) -> None:
        super().__init__(groups, {"lr": learning_rate, **chosen, "step": 0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Take one step from the gradients of U / N."""
        for group in self.param_groups:
            place = group["step"] % group["cycle_steps"] / group["cycle_steps"]
            rate = group["lr"] * (MIN_RATE_SHARE + (1 - MIN_RATE_SHARE) * 0.5 * (1 + math.cos(math.pi * place)))
            group["step"] += 1
            for value in group["params"]:
                if value.grad is None:
                    continue
                state = self.state[value]
                velocity = state.setdefault("velocity", torch.zeros_like(value))
                velocity.mul_(1 - group["friction"]).add_(value.grad, alpha=-rate * group["scale"] ** 2)
                if place >= group["explore"]:
                    std = group["scale"] * math.sqrt(2 * group["friction"] * rate / group["num_data"])
                    velocity.add_(torch.randn_like(velocity), alpha=std)
                value.add_(velocity)


@checked
def sghmc(
    bnn: BayesianNetwork,
    loader: Iterable[Any],
    epochs: Count,
    *,
    cycles: Count = 4,
    num_draws: Count = 100,
    learning_rate: Positive | None = None,
    friction: Level = 0.03,
    explore: Probability = 0.3,
    num_data: DataCount | None = None,
    read_batch: BatchReader | None = None,
    **options: Any,
) -> FixedDraws:
    r"""Draw approximately from the posterior, with minibatch gradients; see `CyclicalSGHMC` for the steps.

    The error of the draws grows with the learning rate and with the noise of minibatch gradients. Prior, likelihood and network
    come from `bnn`. Parameters of the likelihood stay at their current values.

    Args:
        bnn: A trained network with the posterior `Point`, a likelihood and a fixed prior; it is not changed.
        loader: Iterable of batches that can be iterated once per epoch.
        epochs: Number of passes over the data.
        cycles: Number of cycles; the rate falls once in each cycle.
        num_draws: Number of draws S to keep. They are evenly spaced over the later parts of all cycles.
        learning_rate: Rate $\ell$ at the beginning of a cycle; by default 1 / (largest curvature of U / N on the first batch).
        friction: Friction a.
        explore: Initial share of each cycle, in which no noise is added and no draws are kept.
        num_data: Number of examples N; counted by default.
        read_batch: Function that converts an item of the loader to inputs and targets.
        options: Further arguments of `bayesify.fit`: checkpoint, seed, device, progress and others.

    Returns:
        The draws.

    Raises:
        TypeError: If the posterior is not `Point`.
        ValueError: If an argument is out of range, the prior is hierarchical, a layer is a BatchNorm, or a gradient is not finite.
    """
    moving, values = _moving(bnn)
    check_repeatable(loader)
    std = bnn.prior.draw(1).require_fixed("sghmc").std
    total = count_examples(loader, read_batch) if num_data is None else num_data
    with own_generators():
        steps = epochs * (count_batches(loader) or sum(1 for _ in loader))
    groups = [{"params": [value], "scale": float(std[name])} for name, value in values.items()]
    if learning_rate is None:
        with own_generators():
            first = parse_batch(next(iter(loader)), read_batch)
        learning_rate = STABLE_RATE / _largest_curvature(moving, first, groups, total)
    cycle_steps = max(min(steps, MIN_CYCLE_STEPS), math.ceil(steps / cycles))
    keeping = _Keeping(values, num_draws, steps, cycle_steps, explore)
    chosen = {"friction": friction, "num_data": total, "cycle_steps": cycle_steps, "explore": explore}
    fit(
        moving, loader, epochs=epochs, num_data=total, optimizer=lambda _: CyclicalSGHMC(groups, learning_rate, **chosen),
        read_batch=read_batch, update=keeping, num_draws=1, **options,
    )  # fmt: skip
    return FixedDraws(keeping.draws(moving), bnn.require_likelihood("sghmc"), bnn.output)


def _moving(bnn: BayesianNetwork) -> tuple[BayesianNetwork, dict[str, Tensor]]:
    """A copy of the network in which only the weights with the posterior `Point` are trainable, and these weights by name."""
    if not isinstance(bnn, BayesianNetwork) or not all(isinstance(part, Point) for part in bnn.posteriors):
        raise TypeError("sghmc: the posterior is not Point; make the network with posteriors.Point()")
    if tracking_layers(bnn.network):
        raise ValueError(
            "sghmc: the network has BatchNorm, whose running statistics fit only one of the draws; use SWAG, or a network with "
            "GroupNorm"
        )
    moving = copy.deepcopy(bnn).requires_grad_(False)
    moving.likelihood = exact_copy(bnn.require_likelihood("sghmc")).requires_grad_(False)
    parts = [part.value for part in moving.posteriors if isinstance(part, Point)]
    return moving, {name: value.requires_grad_() for part in parts for name, value in part.items()}


def _largest_curvature(bnn: BayesianNetwork, batch: Batch, groups: Sequence[dict[str, Any]], num_data: int) -> float:
    """Largest absolute eigenvalue of the Hessian of U / N, with weights in units of the prior's standard deviation."""
    values, scales = [group["params"][0] for group in groups], [group["scale"] for group in groups]
    generator = torch.Generator().manual_seed(0)
    direction = [torch.randn(value.shape, generator=generator).to(value) for value in values]
    found = 1.0
    for _ in range(POWER_STEPS):
        norm = torch.stack([part.norm() for part in direction]).norm()
        direction = [part / norm for part in direction]
        data, penalty = bnn.terms(batch, phase="variational", num_data=max(num_data, len(batch)), num_draws=1)
        slopes = torch.autograd.grad((penalty - data).sum() / num_data, values, create_graph=True)
        along = sum((slope * part * scale).sum() for slope, part, scale in zip(slopes, direction, scales, strict=True))
        curved = torch.autograd.grad(along, values, materialize_grads=True)
        direction = [scale * part for part, scale in zip(curved, scales, strict=True)]
        found = float(torch.stack([part.norm() for part in direction]).norm())
    return found if math.isfinite(found) and found > 0 else 1.0


class _Keeping(Update):
    def __init__(self, values: Mapping[str, Tensor], num_draws: int, steps: int, cycle: int, explore: float) -> None:
        self.values, self.steps = values, 0
        late = [step for step in range(steps) if (step % cycle) / cycle >= explore]
        late = late if len(late) > 1 else list(range(steps))  # a run of only a few steps has no later part
        count = min(num_draws, len(late))
        self.wanted = {late[(index + 1) * len(late) // count - 1] for index in range(count)}
        self.kept: list[dict[str, Tensor]] = []

    def after_step(self) -> None:
        if self.steps in self.wanted:
            self.kept.append({name: value.detach().clone() for name, value in self.values.items()})
        self.steps += 1

    def draws(self, bnn: BayesianNetwork) -> Draws:
        weights = {name: torch.stack([draw[name] for draw in self.kept]) for name in self.values}
        unknown = next(iter(weights.values())).new_full((len(self.kept),), float("nan"))
        return Draws(Runner(bnn.network, bnn.weights).snapshot(), weights, unknown)

    def identity(self) -> dict[str, Any]:
        return {"update": {"name": "SGHMC", "kept": len(self.wanted)}}

    def state_dict(self) -> dict[str, Any]:
        return {"steps": self.steps, "kept": self.kept}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        like = next(iter(self.values.values()))
        self.steps = state["steps"]
        self.kept = [{name: value.to(like) for name, value in draw.items()} for draw in state["kept"]]
