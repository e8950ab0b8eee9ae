"""Hamiltonian Monte Carlo over the weights of many small networks at once, as a cheap reference for each network."""

import math
from collections.abc import Callable
from itertools import pairwise

import torch
from torch import Tensor

from bayesify_papers.shared.small_products import small_products

TARGET_ACCEPTANCE = 0.8
"""Acceptance rate that the step sizes adapt to."""


class Posterior:
    r"""$p(w | y)$ of fully connected ReLU networks under Neal's prior and Gaussian noise of known variance, for C chains.

    Positions are whitened weights $z = w / \sigma$, so that the prior is standard normal.

    Args:
        sizes: Number of inputs, number of units in each hidden layer, and number of outputs.
        x: Training inputs, [C, N, inputs].
        y: Training targets, [C, N, outputs].
        noise: Noise variances, [C].
    """

    def __init__(self, sizes: tuple[int, ...], x: Tensor, y: Tensor, noise: Tensor) -> None:
        self.x, self.y, self.noise = x.double(), y.double(), noise.double()
        self.shapes = [(below + 1, above) for below, above in pairwise(sizes)]
        self.numbers = [rows * columns for rows, columns in self.shapes]
        self.stds = [1 / math.sqrt(size) for size in sizes[:-1]]

    def outputs(self, position: Tensor, x: Tensor) -> Tensor:
        """Functions at inputs [C, B, inputs], given z [C, P]: [C, B, outputs]."""
        values = x
        for layer, part in enumerate(position.split(self.numbers, dim=-1)):
            weight = part.unflatten(-1, self.shapes[layer]) * self.stds[layer]  # [C, rows + 1, columns]
            values = values if layer == 0 else values.relu()
            values = torch.baddbmm(weight[:, -1:], values, weight[:, :-1])
        return values

    def log_density(self, position: Tensor) -> Tensor:
        """log p(z, y) up to a constant, [C]."""
        misfit = (self.outputs(position, self.x) - self.y).square().sum((-1, -2)) / self.noise
        return -0.5 * (misfit + position.square().sum(-1))

    def gradient(self, position: Tensor) -> tuple[Tensor, Tensor]:
        """`log_density` [C] and its gradient [C, P]."""
        position = position.detach().requires_grad_()
        value = self.log_density(position)
        (found,) = torch.autograd.grad(value.sum(), position)
        return value.detach(), found


def sample(
    posterior: Posterior,
    *,
    num_warmup: int = 200,
    num_draws: int = 200,
    leapfrogs: int = 50,
    step_size: float = 0.01,
    seed: int = 0,
    report: Callable[[int, Tensor, Tensor], None] = lambda step, step_sizes, density: None,
) -> Tensor:
    """Draws of z, [num_draws, C, P], by C chains that start at draws from the prior.

    A trajectory has between 0.5 and 1.5 times `leapfrogs` steps, the same number in all chains. In the warm-up, each chain's step
    size adapts so that four of five proposals are accepted; then it is fixed.

    Args:
        num_warmup: Number of warm-up proposals, which are discarded.
        num_draws: Number of proposals after the warm-up.
        leapfrogs: Mean number of steps of a trajectory.
        step_size: Initial step size.
        report: Function called every 50 proposals with their number, the step sizes and the log-densities, [C].
    """
    generator = torch.Generator().manual_seed(seed)
    chains = len(posterior.x)
    position = torch.randn(chains, sum(posterior.numbers), generator=generator, dtype=torch.float64)
    log_step = torch.full((chains,), math.log(step_size), dtype=torch.float64)
    kept = []
    with small_products():
        value, grad = posterior.gradient(position)
        for proposal in range(num_warmup + num_draws):
            momentum = torch.randn(position.shape, generator=generator, dtype=torch.float64)
            count = int(torch.randint(leapfrogs // 2, leapfrogs + leapfrogs // 2 + 1, (), generator=generator))
            size = log_step.exp()[:, None]
            moved, pushed, new_value, new_grad = position, momentum + 0.5 * size * grad, value, grad
            for step in range(count):
                moved = moved + size * pushed
                new_value, new_grad = posterior.gradient(moved)
                pushed = pushed + (0.5 if step == count - 1 else 1.0) * size * new_grad
            gain = new_value - value - 0.5 * (pushed.square() - momentum.square()).sum(-1)
            chance = gain.nan_to_num(-math.inf).clamp_max(0).exp()
            accepted = (torch.rand(chains, generator=generator) < chance)[:, None]
            position, grad = torch.where(accepted, moved, position), torch.where(accepted, new_grad, grad)
            value = torch.where(accepted[:, 0], new_value, value)
            if proposal < num_warmup:
                log_step = log_step + (chance - TARGET_ACCEPTANCE) * max(0.02, (proposal + 1) ** -0.6)
            else:
                kept.append(position)
            if (proposal + 1) % 50 == 0:
                report(proposal + 1, log_step.exp(), value)
    return torch.stack(kept)


def shrink_factor(values: Tensor) -> float:
    """Gelman and Rubin's factor of values [draws, chains]. It is near 1 if the chains agree."""
    count = len(values)
    within = float(values.var(0).mean())
    between = count * float(values.mean(0).var())
    return math.sqrt(((count - 1) / count * within + between / count) / within)
