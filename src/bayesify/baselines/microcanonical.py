"""Microcanonical Langevin sampling with chains that start at the members of an ensemble and run together on one stack of models."""

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from bayesify.arguments.checks import Count, Seed, checked
from bayesify.baselines.ensemble_members import members_of
from bayesify.baselines.fixed_draws import Chains
from bayesify.conversion import bayesianize
from bayesify.draws import Draws
from bayesify.likelihoods.objectives import check_example_weights, exact_copy
from bayesify.network import BayesianNetwork
from bayesify.posteriors import Ensemble, Point
from bayesify.predictor import Batch
from bayesify.running.inputs_and_outputs import checked_inputs
from bayesify.running.runner import Runner
from bayesify.storage import tensor_files
from bayesify.training.stack import ModelStack

FIRST_TURN_SHARE = 0.1931833275037836
"""Length of a step's first turn, as a share of the step. This value minimizes the energy error of a step (McLachlan 1995)."""
MAX_ENERGY_ERROR = 1000.0
"""Energy error in nats above which a trajectory is discarded."""
MOVING_TENSORS = ("position", "direction", "log_density", "gradient", "sums")
"""Names of the tensors that a trajectory changes."""
ENERGY_ERROR_POWER = 6.0
"""The squared energy error grows with this power of the step size."""
SECONDS_BETWEEN_CHECKPOINTS = 20.0
INIT_TRAJECTORY_STEPS = 8
"""Mean number of steps of a trajectory before its length is tuned."""
INIT_STEP_SIZE = 0.02
"""Step size before tuning, as a multiple of the square root of P, the number of weights."""


@dataclass(eq=False)
class Microcanonical:
    r"""State and dynamics of C Markov chains that take each step together.

    Each chain has a position z, the weights in units of the prior's standard deviations, and a direction u with $|u| = 1$. The
    chain follows the dynamics with energy $E = (P - 1) \log |p| - \log p(z, y)$ (Robnik et al. 2023, eq. 6),

    $$ \dot z = u, \qquad \dot u = \frac{1}{P - 1} (I - u u^\top) \nabla \log p(z, y), $$

    in steps of length $\epsilon$, with the minimal norm integrator. A trajectory has about $L / \epsilon$ steps.

    With `adjust`, a trajectory starts in a random direction and is accepted with probability $\min(1, e^{-\Delta E})$, where
    $\Delta E$ is the sum of the energy errors of its steps (Robnik et al. 2025). The draws are then exact. Without `adjust`,
    every trajectory is accepted. After each step, noise turns the direction: $u \leftarrow (u + \nu \xi) / |\cdot|$ with $\nu^2 =
    (e^{2 \epsilon / L} - 1) / P$. The chain therefore forgets its direction over a distance L (Robnik & Seljak 2023). Without
    `adjust`, the draws are biased. The bias depends on the variance of a step's energy error, divided by the number of weights.
    $\epsilon$ is tuned so that this quantity equals `energy_variance`.
    """

    stack: ModelStack  # C networks with the posterior `Point`, at the chains' starting points
    values: Sequence[Tensor]  # parameters of the stack that the chains change, each [C, *shape]
    batch: Batch  # all data
    scale: Tensor  # prior standard deviation of each weight, [P], in the order of `values`
    adjust: bool = True
    accept: float = 0.9  # acceptance probability to which the step size is tuned if `adjust` is true
    energy_variance: float = 5e-4  # variance of a step's energy error, per weight, to which it is tuned otherwise
    max_steps: int = 256  # largest mean number of steps of a trajectory
    seed: int = 0

    def __post_init__(self) -> None:
        self.generator = torch.Generator(self.scale.device).manual_seed(self.seed)
        flat = torch.cat([value.detach().flatten(1) for value in self.values], dim=1)
        self.position = flat / self.scale  # [C, P]
        chains, self.size = self.position.shape
        if self.size < 2:
            found = f"the network has only {self.size} weight"
            raise ValueError(f"microcanonical: {found}; give a network with at least 2 weights")
        self.step, self.length = INIT_STEP_SIZE * math.sqrt(self.size), math.sqrt(self.size)
        self.direction = F.normalize(self._normal())
        self.log_density, self.gradient = self.slope(self.position)
        self.sums = self.scale.new_zeros(3, chains)  # trajectories, squared energy errors, acceptance probabilities

    # -- moving ------------------------------------------------------------------------------------------------------

    def slope(self, position: Tensor) -> tuple[Tensor, Tensor]:
        """The log density log p(z, y), [C], and its gradient with respect to z, [C, P]."""
        weights = (position * self.scale).split([value[0].numel() for value in self.values], dim=1)
        with torch.no_grad():
            for value, part in zip(self.values, weights, strict=True):
                value.copy_(part.view_as(value))
        with torch.enable_grad():
            data, penalty = self.stack.terms(self.batch, num_data=len(self.batch))
            found = (data - penalty)[:, 0]
            slopes = torch.autograd.grad(found.sum(), self.values)
        return found.detach(), torch.cat([slope.flatten(1) for slope in slopes], dim=1) * self.scale

    def _turn(self, share: float) -> Tensor:
        """Turn each chain's direction toward its gradient, for the `share` of a step. Returns the gains of kinetic energy, [C]."""
        norm = self.gradient.norm(dim=1, keepdim=True).clamp_min(1e-30)
        toward = self.gradient / norm
        angle = share * self.step * norm / (self.size - 1)
        cosine = (self.direction * toward).sum(1, keepdim=True)
        shrink = (-angle).exp()
        turned = toward * (1 - shrink) * (1 + shrink + cosine * (1 - shrink)) + 2 * shrink * self.direction
        self.direction = F.normalize(turned)
        gained = angle - math.log(2) + (1 + cosine + (1 - cosine) * shrink.square()).log()
        found: Tensor = (self.size - 1) * gained[:, 0]
        return found

    def _move(self) -> Tensor:
        """Move all chains by one step, and return the energy errors, [C]."""
        before, kinetic = self.log_density, self._turn(FIRST_TURN_SHARE)
        for share in (1 - 2 * FIRST_TURN_SHARE, FIRST_TURN_SHARE):
            self.position = self.position + 0.5 * self.step * self.direction
            self.log_density, self.gradient = self.slope(self.position)
            kinetic = kinetic + self._turn(share)
        return kinetic - (self.log_density - before)

    def _normal(self) -> Tensor:
        like = self.scale
        return torch.randn(self.position.shape, generator=self.generator, dtype=like.dtype, device=like.device)

    @torch.no_grad()
    def advance(self, mean_steps: float | None = None) -> Tensor:
        """Run one trajectory of each chain, accept or reject it, and add its errors to `sums`.

        By default, the mean number of steps is determined by the length L of a trajectory. The result is the squared energy error
        of each chain's trajectory or, without `adjust`, the mean squared energy error of the trajectory's steps, [C].
        """
        if mean_steps is None:
            mean_steps = min(max(self.length / self.step, 1.0), self.max_steps)
        jitter = 0.5 + float(torch.rand((), generator=self.generator, device=self.scale.device))
        start = self.position, self.log_density, self.gradient
        if self.adjust:
            self.direction = F.normalize(self._normal())
        steps = max(1, round(jitter * mean_steps))
        total, squares = torch.zeros_like(self.log_density), torch.zeros_like(self.log_density)
        for index in range(steps):
            if index and not self.adjust:  # add noise, so that chains forget their directions after the length L
                noise = math.sqrt(math.expm1(2 * self.step / self.length) / self.size)
                self.direction = F.normalize(self.direction + noise * self._normal())
            error = self._move()
            total, squares = total + error, squares + error.square()
        valid = total.isfinite() & (total.abs() < MAX_ENERGY_ERROR) & self.position.isfinite().all(1)
        chance = torch.where(valid, (-total).exp().clamp(max=1.0), torch.zeros_like(total))
        drawn = torch.rand(chance.shape, generator=self.generator, dtype=chance.dtype, device=chance.device)
        taken = drawn < chance if self.adjust else valid
        self.position = torch.where(taken.unsqueeze(1), self.position, start[0])
        self.gradient = torch.where(taken.unsqueeze(1), self.gradient, start[2])
        self.log_density = torch.where(taken, self.log_density, start[1])
        self.direction = torch.where(valid.unsqueeze(1), self.direction, F.normalize(self._normal()))
        found = torch.where(valid, total.square() if self.adjust else squares / steps, MAX_ENERGY_ERROR)
        self.sums += torch.stack((torch.ones_like(found), found, chance if self.adjust else valid.to(found)))
        return found

    # -- tuning ------------------------------------------------------------------------------------------------------

    def warm_up(self, num_trajectories: int) -> None:
        r"""Tune the step size from the chains' mean energy error, and the length L from the spread of their positions.

        The trajectories in the first third of the warm-up are short, and they tune the step size. The second third of the
        trajectories tunes the step size further and estimates the spread $\sqrt{\sum_p \operatorname{var} z_p}$ over all chains.
        This spread becomes the length L. If the chains are still far apart, the spread is the distance that each chain still has
        to travel. The last third of the trajectories tunes the step size for the length L.
        """
        # Energy errors of trajectories are nearly N(s^2 / 2, s^2), so the acceptance probability is 2 Phi(-s / 2).
        spread = 2 * float(torch.special.ndtri(torch.tensor(self.accept / 2, dtype=torch.float64)))
        aim = spread**2 if self.adjust else self.energy_variance * self.size
        third = max(1, num_trajectories // 3)
        for phase, count in enumerate((third, third, max(1, num_trajectories - 2 * third))):
            logs, first, second = [], torch.zeros_like(self.position), torch.zeros_like(self.position)
            center = self.position.mean(0)
            for index in range(count):
                error = self.advance(None if phase else INIT_TRAJECTORY_STEPS).clamp(max=100.0).mean().item()
                change = math.log(aim / max(error, 1e-12)) / ENERGY_ERROR_POWER
                self.step *= math.exp(min(max(change, -1.0), 1.0) / math.sqrt(1 + index / 4))
                self.step = min(self.step, math.sqrt(self.size))
                logs.append(math.log(self.step))
                first, second = first + (self.position - center), second + (self.position - center).square()
            self.step = math.exp(sum(logs[len(logs) // 2 :]) / len(logs[len(logs) // 2 :]))
            if phase == 1 and count > 3:
                mean = (first / count).mean(0)
                self.length = math.sqrt(float(((second / count).mean(0) - mean.square()).sum()))
        self.sums.zero_()

    # -- keeping -----------------------------------------------------------------------------------------------------

    def state(self) -> dict[str, Tensor]:
        """Everything on which the next trajectory depends."""
        tuned = torch.tensor([self.step, self.length], dtype=torch.float64)
        moving = {name: getattr(self, name) for name in MOVING_TENSORS}
        return {**moving, "tuned": tuned, "generator": self.generator.get_state()}

    def set_state(self, state: Mapping[str, Tensor]) -> None:
        """Inverse of `state`."""
        for name in MOVING_TENSORS:
            setattr(self, name, state[name].to(self.scale))
        self.step, self.length = state["tuned"].tolist()
        self.generator.set_state(state["generator"].cpu())

    @property
    def energy_error(self) -> Tensor:
        """Root mean square energy error per trajectory (per step without `adjust`) since the warm-up, in nats: [C]."""
        return (self.sums[1] / self.sums[0].clamp_min(1)).sqrt()

    @property
    def acceptance(self) -> Tensor:
        """Mean acceptance probability of each chain, [C]."""
        return self.sums[2] / self.sums[0].clamp_min(1)


@checked
def microcanonical(
    bnn: BayesianNetwork,
    x: Any,
    y: Tensor,
    *,
    example_weights: Tensor | None = None,
    num_draws: Count = 100,
    num_warmup: Count = 60,
    thin: Count = 1,
    adjust: bool = True,
    max_steps: Count = 256,
    checkpoint: str | Path | None = None,
    seed: Seed = 0,
) -> Chains:
    r"""Draw from the exact posterior $p(w | y) \propto p(w) \prod_n p(y_n | f_w(x_n))^{\omega_n}$, with one chain per member.

    This is the sampling phase of MILE (Sommer et al. 2025), which trains an ensemble and then runs microcanonical dynamics from
    each member. All chains run together on one `ModelStack`; see `Microcanonical` for the dynamics. Prior, likelihood and network
    come from `bnn`. Parameters of the likelihood keep their current values, and so do weights that are not in the ensemble. A
    trajectory costs up to `3 * max_steps` gradients over all data.

    Args:
        bnn: A trained network with an `Ensemble` posterior, a likelihood and a fixed prior; it is not changed.
        x: Inputs of all N examples, in any form that `bnn.predict` accepts.
        y: Targets of the examples.
        example_weights: Number of examples $\omega$ that each row represents, [N]; 1 by default.
        num_draws: Number of draws T that each chain keeps.
        num_warmup: Number of warm-up trajectories, in which step size and length are tuned.
        thin: Number of trajectories per kept draw.
        adjust: Whether trajectories can be rejected. If false, the draws are biased, but the steps can be longer in networks with
            many thousands of weights.
        max_steps: Upper limit on the mean number of steps per trajectory.
        checkpoint: File in which the chains are stored. A call with the same arguments, or with more draws, continues the chains.
        seed: Seed of the chains.

    Returns:
        The draws of all chains, with their diagnostics.

    Raises:
        TypeError: If the posterior is not an `Ensemble`.
        ValueError: If an argument is out of range, if inputs or targets are not finite, if example weights are invalid,
            if the prior is hierarchical, or if the checkpoint belongs to another run.
    """
    members_of(bnn, "microcanonical")
    if y.is_floating_point() and not bool(torch.isfinite(y).all()):
        raise ValueError("microcanonical: some targets are not finite; remove the rows with these targets")
    if example_weights is not None:
        check_example_weights(example_weights, len(y))
    args, kwargs = checked_inputs(x)
    inputs = x if isinstance(x, Tensor) else kwargs or args
    sampler, shapes = sampler_of(bnn, Batch(inputs, y, example_weights), adjust=adjust, max_steps=max_steps, seed=seed)
    settings = {"num_warmup": num_warmup, "thin": thin, "adjust": adjust, "max_steps": max_steps, "seed": seed}
    kept, densities = _run(sampler, settings, num_draws, None if checkpoint is None else Path(checkpoint))
    return _chains(bnn, sampler, shapes, torch.stack(kept, dim=1), torch.stack(densities, dim=1))


def sampler_of(bnn: BayesianNetwork, batch: Batch, **options: Any) -> tuple[Microcanonical, dict[str, tuple[int, ...]]]:
    """A sampler whose chains start at the members of an ensemble, and the weights' shapes, ordered as in a position z."""
    likelihood, std = bnn.require_likelihood("microcanonical"), bnn.prior.draw(1).require_fixed("microcanonical").std
    parts = [part.value for part in bnn.posteriors if isinstance(part, Ensemble)]
    members = {name: value.detach() for part in parts for name, value in part.items()}
    make = partial(bayesianize, bnn.mean_network(), likelihood=likelihood, prior=bnn.prior, output=bnn.output)
    model = make(Point())
    if {name for part in model.posteriors for name in part.sizes()} != set(members):
        model = make({name: Point() for name in members})
    own = {name: value for part in model.posteriors if isinstance(part, Point) for name, value in part.value.items()}
    paths = {id(value): path for path, value in model.named_parameters()}
    chains = len(next(iter(members.values())))
    stack = ModelStack([model] * chains, likelihoods=[exact_copy(likelihood)]).eval()
    values = [stack.stacked(paths[id(own[name])]) for name in members]
    with torch.no_grad():
        for value, member in zip(values, members.values(), strict=True):
            value.copy_(member)
    sizes = {name: value[0].numel() for name, value in members.items()}
    scales = [values[0].new_full((size,), float(std[name])) for name, size in sizes.items()]
    shapes = {name: tuple(value.shape[1:]) for name, value in members.items()}
    return Microcanonical(stack, values, batch, torch.cat(scales), **options), shapes


def _chains(
    bnn: BayesianNetwork, sampler: Microcanonical, shapes: dict[str, tuple[int, ...]], kept: Tensor, densities: Tensor
) -> Chains:
    flat = (kept * sampler.scale).flatten(0, 1)  # [C T, P]
    parts = flat.split([math.prod(shape) for shape in shapes.values()], dim=1)
    weights = {name: part.reshape(-1, *shape) for (name, shape), part in zip(shapes.items(), parts, strict=True)}
    draws = Draws(Runner(bnn.network, bnn.weights).snapshot(), weights, flat.new_full((len(flat),), float("nan")))
    likelihood, errors = bnn.require_likelihood("microcanonical"), (sampler.energy_error, sampler.acceptance)
    return Chains(draws, likelihood, bnn.output, log_density=densities, energy_error=errors[0], acceptance=errors[1])


def _run(
    sampler: Microcanonical, settings: Mapping[str, Any], num_draws: int, path: Path | None
) -> tuple[list[Tensor], list[Tensor]]:
    """For each draw, the chains' positions [C, P] and log densities [C]. Draws that are in the file are not made again."""
    kept, densities = _read(sampler, settings, path) if path is not None and path.exists() else ([], [])
    if not kept:
        sampler.warm_up(settings["num_warmup"])
    told = time.monotonic()
    while len(kept) < num_draws:
        for _ in range(settings["thin"]):
            sampler.advance()
        kept.append(sampler.position)
        densities.append(sampler.log_density)
        if path is not None and (len(kept) == num_draws or time.monotonic() - told > SECONDS_BETWEEN_CHECKPOINTS):
            told = time.monotonic()
            tensors = {"kept": torch.stack(kept), "densities": torch.stack(densities), **sampler.state()}
            tensor_files.write(path, "chains", {"settings": dict(settings)}, tensors)
    return kept[:num_draws], densities[:num_draws]


def _read(sampler: Microcanonical, settings: Mapping[str, Any], path: Path) -> tuple[list[Tensor], list[Tensor]]:
    header, tensors = tensor_files.read(path, "chains")
    written = f"{path}: the checkpoint was written with"
    if header["settings"] != settings:
        both = f"the settings {header['settings']}, but this run has {dict(settings)}"
        raise ValueError(f"{written} {both}; use the same settings, or another path")
    if tensors["position"].shape != sampler.position.shape:
        raise ValueError(f"{written} a different network or a different number of members; give another path")
    sampler.set_state(tensors)
    now = sampler.slope(sampler.position)[0]
    if not torch.allclose(now, sampler.log_density, rtol=1e-3):
        raise ValueError(f"{written} different data, a different prior or a different likelihood; give another path")
    like = sampler.scale
    return list(tensors["kept"].to(like).unbind()), list(tensors["densities"].to(like).unbind())
