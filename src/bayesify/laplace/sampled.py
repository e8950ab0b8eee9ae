r"""Draws from the linearized posterior over all weights. Each draw solves a perturbed regression (sample-then-optimize)."""

from __future__ import annotations

import itertools
import math
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, Self

import numpy as np
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from bayesify.arguments.checks import Count, Positive, checked
from bayesify.jacobians import Gradients
from bayesify.jacobians.general import Args, Inputs, Kwargs
from bayesify.laplace.covariances import KroneckerCovariance, WeightCovariance
from bayesify.laplace.curvature import DataTerm, OutputCurvature, Pieces
from bayesify.laplace.subnetwork import Subset
from bayesify.likelihoods import Gaussian, Likelihood
from bayesify.predictor import Batch
from bayesify.running.inputs_and_outputs import as_inputs
from bayesify.storage import tensor_files
from bayesify.weights.catalog import group_layers
from bayesify.weights.module_state import below, prefixed

NUM_EVIDENCE_STEPS = 12
"""Largest number of updates of the prior precision."""
MAX_EVIDENCE_EXAMPLES = 1000
"""Largest number of examples that are used to choose the prior precision. If there are more data, this many examples
are sampled."""
MAX_WEIGHTS_SOLVED_TOGETHER = 5_000_000
"""Largest number of weights for which several draws are solved at a time. Used by default and for the evidence."""
MAX_DRAW_ERROR = 0.5
"""Largest relative error at which draws count as converged. The relative error overestimates the true error: on a
residual network with 11,420 weights and 200 digits, standard deviations were wrong by 10 % at a relative error of 0.97,
and by 3 % at a relative error of 0.49."""
LOG_PRECISION_STEP = math.log(4.0)
"""Largest decrease of the logarithm of the prior precision in one update. It is limited because each update starts from
the previous draws."""
LOG_PRECISION_RISE = math.log(16.0)
"""Increase of the logarithm of the prior precision if draws do not converge."""
MAX_LOG_PRECISION_RISE = math.log(256.0)
"""Largest increase of the logarithm of the prior precision in one update if predictions of training rows are too bad."""
CHUNK_WEIGHTS = 1_000_000
"""Number of weights whose differences are computed at a time."""
MOMENTUM = 0.9
"""Nesterov's momentum of the minibatch solver."""
RELATIVE_RATE = 0.2
"""Learning rate of the minibatch solver times the largest eigenvalue of a minibatch's preconditioned equations."""
NUM_POWER_ITERATIONS = 10
"""Number of power iterations that estimate the largest eigenvalue of the equations of a minibatch."""
MAX_GROWTH = 3.0
"""The learning rate is too large if the norm of the solution exceeds this multiple of its initial norm."""
STEPS_BETWEEN_CHECKS = 50
"""Number of minibatch steps between two checks of the solution. Each check may write a checkpoint."""
MIN_EVIDENCE_CHANGE = 0.02
"""The updates of the prior precision end when its logarithm changes by less than this."""
MIN_PRECISION_GAP = 0.35
"""The updates also end when the logarithms of an accepted and a rejected precision are this close."""
MIN_RELATIVE_SCALE = 0.01
"""Smallest entry of the g-prior's scale, relative to the mean of its layer. This bounds weights that the data hardly
constrain."""
NUM_SCALE_SAMPLES = 2
"""Number of vectors per example for the scale of the prior and for the preconditioner."""
MIN_SECONDS_BETWEEN_WRITES = 30.0
"""Smallest number of seconds between two checkpoints."""


Solver = Literal["auto", "conjugate_gradients", "minibatch"]


@checked
@dataclass(frozen=True)
class Sampled:
    r"""Options of `Laplace(covariance=Sampled(...))`, which stores draws of all weights. `covariance="sampled"` is short for
    `Sampled()` with the default options.

    With conjugate gradients, each iteration of a draw takes about four passes over the chosen examples. The minibatch
    solver takes, for each draw, one pass over all data and about four passes over `steps` minibatches. Neither solver's cost
    depends on the number of outputs.

    Args:
        num_draws: Number n of draws. Each draw is one copy of the weights. The relative error of a variance is
            $\sqrt{2 / n}$.
        iterations: Largest number of iterations of conjugate gradients for each draw.
        at_once: Number of draws that are solved at a time. The default is 4, or 1 if there are more than
            `MAX_WEIGHTS_SOLVED_TOGETHER` weights. If draws are solved one at a time, the GPU's memory contains two
            copies of the weights with conjugate gradients, and two and a half copies with the minibatch solver.
            Everything else stays in the memory of the CPU.
        tolerance: Relative error at which conjugate gradients end early. The relative error is the norm of a draw's error divided
            by the norm of the draw. Both norms measure effects on the outputs of the examples.
        settle: Whether to raise the prior precision, and then scale the covariance down, until training rows are
            predicted well enough. The mean log predictive density of training rows may be at most 0.005 nats below that of the
            network itself. `settle` applies to classification only, and only if `fit` finds the prior precision. The evidence
            alone often prefers a prior that is too wide for the linearization to be accurate.
        solver: `"conjugate_gradients"` or `"minibatch"`. `"minibatch"` is stochastic gradient descent with Nesterov's
            momentum. Its learning rate falls to zero in the second half of the steps. `"auto"` means conjugate
            gradients.
        steps: Number of steps of the minibatch solver for each draw.
        batch: Largest number of examples in a step of the minibatch solver. Larger batches of the loader are split.
        examples: Largest number of examples for conjugate gradients. If there are more data, this many examples are
            sampled to represent all data; see `choose_examples`. Too few examples make the draws too wide: the relative error is
            about $\gamma / (3 K O)$ for K examples, O outputs and $\gamma$ effective parameters.
    """

    num_draws: Count = 16
    iterations: Count = 20
    at_once: Count | None = None
    tolerance: Positive = 0.1
    settle: bool = True
    solver: Solver = "auto"
    steps: Count = 500
    batch: Count = 128
    examples: Count = 10_000

    def group(self, size: int) -> int:
        """Number of draws that are solved at a time if there are `size` weights."""
        return min(self.at_once or (4 if size <= MAX_WEIGHTS_SOLVED_TOGETHER else 1), self.num_draws)

    @property
    def takes_minibatches(self) -> bool:
        """Whether the minibatch solver is used."""
        return self.solver == "minibatch"

    def stays_on_host(self, size: int) -> bool:
        """Whether draws, targets, the prior's scale and the preconditioner are kept in the memory of the CPU."""
        return self.group(size) == 1

    def num_groups(self, size: int) -> int:
        """Number of groups of draws that are solved one after the other."""
        return -(-self.num_draws // self.group(size))

    def count_bytes(self, size: int, dtype: torch.dtype) -> int:
        """Memory, in bytes, that draws of `size` weights take.

        The count includes one copy of the weights per draw, six more copies for each draw that is being solved, and two
        copies that all draws share. If the draws are in CPU memory, the count is three copies of the weights.
        """
        copies = 3 if self.stays_on_host(size) else self.num_draws + 6 * self.group(size) + 2
        return copies * size * torch.finfo(dtype).bits // 8

    def count_passes(self, size: int, num_data: int, *, searches: bool = False) -> int:
        """Largest number of passes over the data in `fit`. If `searches` is true, it includes the passes that find the prior
        precision."""
        draws, search = self.num_groups(size) * (4 * self.group(size) + 2), 0.0
        if searches:  # for a group of draws and the mode; see `find_factor`
            share = min(1.0, MAX_EVIDENCE_EXAMPLES / max(1, num_data))
            search = share * NUM_EVIDENCE_STEPS * (4 * self.group(size) + 6) * (self.search_iterations + 1)
        if self.takes_minibatches:
            return math.ceil(search + draws * (1 + self.steps * min(self.batch, num_data) / max(1, num_data)))
        return math.ceil(search + draws * (self.iterations + 2) * min(1.0, self.examples / max(1, num_data)))

    @property
    def search_iterations(self) -> int:
        """Number of iterations for each prior precision that is tried. Few iterations suffice, because each precision
        starts from an earlier solution.
        """
        return -(-self.iterations // 2)


@dataclass(frozen=True)
class DrawsFile:
    """File that stores the draws while they are computed."""

    path: Path
    settings: Mapping[str, Any]  # settings that must be the same in a continued run, as plain data

    def read(self) -> tuple[dict[str, Any], dict[str, Tensor]] | None:
        """The stored facts and tensors; `None` if there is no file. Raises `ValueError` if the file belongs to another run."""
        if not self.path.exists():
            return None
        header, tensors = tensor_files.read(self.path, "sampled draws")
        for key, value in self.settings.items():
            before = header["settings"].get(key)
            if before != value:
                shown = f"{key}={before!r}, but this run has {value!r}" if key != "network" else "another network"
                raise ValueError(
                    f"{self.path}: the checkpoint was written with {shown}; use the same settings, or give "
                    "checkpoint= another path"
                )
        return header["facts"], tensors

    def write(self, facts: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
        """Write facts and tensors atomically."""
        header = {"settings": dict(self.settings), "facts": dict(facts)}
        tensor_files.write(self.path, "sampled draws", header, tensors)


class SampledCovariance(WeightCovariance):
    r"""The Gaussian $\mathcal{N}(0, \frac1n \sum_s z_s z_s^\top)$ of n draws $z_s$; see `WeightCovariance`.

    Args:
        subset: The weights.
        draws: Deviations from the mean, [n, S].
        prior: $\delta$, [S].
        factor: Factor c on the prior precision; the draws were made for this factor.
        narrowed: Factor by which `fit` multiplied the covariance so that training rows are predicted well; 1 if it was not
            changed.
    """

    def __init__(self, subset: Subset, draws: Tensor, prior: Tensor, factor: float, narrowed: float = 1.0) -> None:
        super().__init__(subset, prior)
        self.draws, self.factor, self.narrowed = draws, factor, narrowed

    def diagonalize(self) -> bool:
        """Always `False`, because the draws are valid for one prior precision only."""
        return False

    def rescaled(self, factor: float) -> Self:
        """This object, if `factor` is the factor of the draws.

        Raises:
            ValueError: If `factor` is not the factor of the draws.
        """
        if factor != self.factor:
            raise ValueError(
                "Laplace: with covariance='sampled', the prior precision cannot be changed after fit, because the "
                "draws depend on it; fit again with prior_precision=..., or change temperature= instead"
            )
        return self

    def outputs(self, gradients: Gradients, factors: list[float] | None = None) -> Tensor:
        """Covariances, computed from the changes that the draws cause in the outputs."""
        draws = self.draws.to(gradients.device)
        roots = self.subset.move(gradients, draws).permute(2, 1, 0) / math.sqrt(len(draws))  # [B, K, n]
        found = roots @ roots.mT.contiguous()
        return found if factors is None else torch.stack([found for factor in factors if self.rescaled(factor)])

    def joint(self, gradients: Gradients) -> Tensor:
        """Covariances, computed from the changes that the draws cause in the outputs."""
        moved = self.subset.move(gradients, self.draws.to(gradients.device))  # [n, K, B]
        roots = moved.permute(2, 1, 0).flatten(0, 1)  # [B K, n]
        return roots @ roots.T / len(self.draws)

    def directions(self, count: int, generator: torch.Generator) -> Tensor:
        """All draws, because the mean of their outer products is the covariance."""
        return self.draws

    def draw(self, num_draws: int, generator: torch.Generator | None = None) -> Tensor:
        """A random choice of the stored draws.

        If more draws are requested than are stored, the result consists of random linear combinations of the stored
        draws, which have the same covariance.
        """
        count = len(self.draws)
        if num_draws <= count:
            place = self.noise(count, generator=generator).argsort()[:num_draws]
            return self.draws[place]
        return self.noise(num_draws, count, generator=generator) @ self.draws / math.sqrt(count)

    def dense(self) -> Tensor:
        """The covariance, which has rank n."""
        return self.draws.T @ self.draws / len(self.draws)

    def variances(self) -> Tensor:
        """Mean squares of the draws."""
        return self.draws.square().mean(0)

    def log_det_ratio(self) -> Tensor:
        """Raises `ValueError`, because the determinant of the covariance is unknown if only draws are stored."""
        raise ValueError(
            "Laplace: covariance='sampled' has no determinant, so the evidence and the KL are unknown; use "
            "covariance='kronecker' to compute them"
        )

    def tensors(self) -> dict[str, Tensor]:
        """The draws and the prior's scale."""
        return {"draws": self.draws, "prior": self.prior}


@dataclass(frozen=True)
class OutputHessian:
    r"""Hessians $H_n = \omega_n (\operatorname{diag}(h) - q q^\top)$ of the examples of a batch."""

    diagonal: Tensor  # h, [B, ...]
    product: Tensor | None  # vectors q, which equal h for classes; `None` if the matrices are diagonal
    axis: int  # axis of the classes
    weights: Tensor  # example weights, in a shape that can be multiplied with h

    @classmethod
    def of(cls, likelihood: Likelihood, outputs: Tensor, batch: Batch) -> OutputHessian:
        """The Hessian of a likelihood."""
        h, q = likelihood.fisher_parts(outputs, batch.y)
        counts = batch.counts.to(h).reshape(-1, *[1] * (h.ndim - 1))
        return cls(h, q, likelihood.logit_axis(outputs.ndim) or -1, counts)

    def times(self, vectors: Tensor) -> Tensor:
        """Products of the Hessians with vectors [S, B, ...]."""
        found = self.diagonal * vectors
        if self.product is not None:
            found = found - self.product * (self.product * vectors).sum(self.axis, keepdim=True)
        return self.weights * found

    def noise(self, count: int, generator: torch.Generator) -> Tensor:
        """Normal vectors [S, B, ...] whose covariances are the Hessians. For classes, diag(sqrt p) - p sqrt(p)^T is a root of
        diag(p) - p p^T."""
        normal = torch.randn((count, *self.diagonal.shape), generator=generator, device=generator.device)
        found = self.diagonal.sqrt() * normal.to(self.diagonal)
        if self.product is not None:
            found = found - self.product * found.sum(self.axis, keepdim=True)
        return self.weights.sqrt() * found


def choose_examples(pieces: Pieces, count: int, seed: int) -> list[Batch]:
    r"""About `count` examples that represent all data. Weighted sums over these examples are unbiased estimates of sums over all
    data.

    Example n is kept with the probability $\pi_n = \min\big(1, \frac{K}{2} (\frac{\omega_n}{\sum \omega} + \frac{t_n}{\sum
    t})\big)$, where K is `count`, $\omega_n$ is the example's weight, and $t_n = \omega_n \operatorname{tr} H_n$. A kept example
    has the weight $\omega_n / \pi_n$. Examples with confident predictions have almost no curvature, so a few examples have most
    of the curvature. The choice takes two forward passes over the data. The chosen examples are in CPU memory.
    """
    likelihood, jacobians = pieces.loss.likelihood, pieces.jacobians

    def measured() -> Iterator[tuple[Batch, Tensor]]:
        def rows(args: Args, kwargs: Kwargs) -> int:
            return max(1, int(pieces.memory // (2 * jacobians.cost(args, kwargs).activations)))

        for piece, inputs in pieces.read(DataTerm(), rows):
            h, q = likelihood.fisher_parts(jacobians.run(*inputs), piece.y)
            trace = (h if q is None else h - q.square()).flatten(1).sum(1).cpu().double()
            yield piece, torch.stack([piece.counts, piece.counts * trace], 1)

    total = torch.stack([both.sum(0) for _, both in measured()]).sum(0).clamp_min(1e-300)
    seen: Counter[int] = Counter()
    found, numbers, size = [], [], 1
    for piece, both in measured():
        size = max(size, len(piece))
        chance = (0.5 * count * (both / total).sum(1)).clamp_max(1.0)
        number = _row_numbers(piece, seed, seen)
        kept = number < chance
        weights = (piece.counts / chance.clamp_min(1e-300)).to(piece.y.device)
        found.append(Batch(piece.x, piece.y, weights).rows(kept.to(piece.y.device)).to(torch.device("cpu")))
        numbers.append(number[kept])
    return _joined([batch for batch in found if len(batch)], torch.cat(numbers), size)


def _row_numbers(batch: Batch, seed: int, seen: Counter[int]) -> Tensor:
    """One number per row, uniform between 0 and 1. The number depends on the seed and on the row's contents, but not on the order
    of the rows. Shape: [B].

    A run that resumes with a shuffled loader thus chooses the same examples. `seen` counts how often each row has
    occurred, so that equal rows get different numbers.
    """
    generator = torch.Generator().manual_seed(seed)
    mixed = torch.zeros(len(batch), dtype=torch.int64)
    for leaf in pytree.tree_leaves((batch.x, batch.y, batch.counts)):
        if isinstance(leaf, Tensor) and leaf.ndim and len(leaf) == len(batch):
            words = leaf.detach().reshape(len(batch), -1).cpu().double().contiguous().view(torch.int64)
            factors = torch.randint(-(2**62), 2**62, words.shape[1:], generator=generator).mul_(2).add_(1)
            mixed += (words * factors).sum(1)
    found = []
    for key in mixed.tolist():
        found.append(np.random.default_rng((key % 2**64, seen[key])).random())
        seen[key] += 1
    return torch.tensor(found, dtype=torch.float64)


def _joined(batches: list[Batch], numbers: Tensor, size: int) -> list[Batch]:
    """Batches of the given size, with rows sorted by their numbers. If the inputs are not tensors of one shape, the
    original batches are returned."""
    if any(not isinstance(batch.x, Tensor) or batch.x.shape[1:] != batches[0].x.shape[1:] for batch in batches):
        return batches
    whole = Batch(*(torch.cat([getattr(one, key) for one in batches]) for key in ("x", "y", "weights")))
    order = numbers.argsort()
    return [whole.rows(order[start : start + size]) for start in range(0, len(whole), size)]


def whiten(
    subset: Subset, curvature: Mapping[str, Tensor], prior: Tensor | None, device: torch.device
) -> tuple[Tensor, KroneckerCovariance]:
    r"""The prior's scale $\delta$, [S], and the preconditioner $(\delta^{-1/2} K \delta^{-1/2} + c I)^{-1}$, where K is the
    Kronecker-factored curvature.

    If no prior is given, $\delta$ is the g-prior (Antorán et al. 2023, section 5), which is the diagonal of K. In units of this
    prior, the data constrain all weights equally, whatever the size of the weights before a normalization layer. All results stay
    on the device of the curvature. The eigenvectors are computed on `device`.
    """
    given = {} if prior is None else subset.split(prior)
    scale: dict[str, Tensor] = {}
    whitened: dict[str, Tensor] = {}
    for layer in group_layers(subset.weights[name] for name in subset.names):
        if f"inputs/{layer.name}" not in curvature:
            continue
        a, g = curvature[f"inputs/{layer.name}"], curvature[f"slopes/{layer.name}"]
        columns, rows = torch.ones_like(a[0]), torch.ones_like(g[0])
        if prior is None:
            columns, rows = _floored(a.diagonal()), _floored(g.diagonal())
            made = layer.from_matrix(rows[:, None] * columns)
            scale |= {name: value.reshape(-1) for name, value in made.items()}
        else:
            rows = rows * torch.cat([given[part.name] for part in layer.weights]).mean()
        whitened[f"inputs/{layer.name}"] = a / (columns[:, None] * columns).sqrt()
        whitened[f"slopes/{layer.name}"] = g / (rows[:, None] * rows).sqrt()
    for name in subset.names:
        if f"diagonal/{name}" in curvature:
            h = curvature[f"diagonal/{name}"]
            scale[name] = _floored(h)
            whitened[f"diagonal/{name}"] = h / given.get(name, scale[name])
    found = torch.cat([scale[name] for name in subset.names]) if prior is None else prior
    return found, KroneckerCovariance(subset, whitened, torch.ones_like(found)).keep_eigenvectors(device)


def _floored(scale: Tensor) -> Tensor:
    mean = scale.mean()
    return scale.clamp_min(MIN_RELATIVE_SCALE * mean) if float(mean) > 0 else torch.ones_like(scale)


@dataclass
class Group:
    r"""Equations $(\delta^{-1/2} H \delta^{-1/2} + c I) u = b$ that are being solved, with $u = \delta^{1/2} z$."""

    target: Tensor  # b, [g, S]
    solution: Tensor  # u
    residual: Tensor  # r
    direction: Tensor  # search direction p
    iteration: int = 0  # number of finished iterations


@dataclass
class Equations:
    r"""Perturbed regressions whose solutions are draws from the posterior (sample-then-optimize).

    $$ z = \operatorname*{argmin} \tfrac12 \sum_n \|J_n z - \epsilon_n\|^2_{H_n} + \tfrac{c}{2} \|z - \theta\|^2_\delta $$

    With $\epsilon_n \sim \mathcal{N}(0, H_n^{-1})$ and $\theta \sim \mathcal{N}(0, (c\,\delta)^{-1})$, the minimizer z has the
    distribution $\mathcal{N}(0, (H + c\,\delta)^{-1})$ (Antorán et al. 2023, "Sampling-based inference for large linear models,
    with application to linearised Laplace"). Every solver starts at $z = \theta$, because in directions without data the solution
    equals $\theta$. Solvers that started at zero would take about twice as many iterations. The paper uses gradient descent on
    minibatches with Nesterov's momentum. Here Kronecker factors also precondition these steps. Conjugate gradients solve the same
    equations on all examples or on chosen examples. The products $J_n v$ and $J_n^\top v$ take two passes of the network each,
    for all draws of a group at once. No Jacobian is formed.

    Args:
        pieces: The data. Every pass must yield the same examples.
        subset: The weights.
        prior: $\delta$, [S].
        preconditioner: See `whiten`.
        at_once: Number g of equations that are solved at a time.
        seed: Seed of the draws.
        factor: Factor c on the prior precision.
        noise_ratio: Gaussian noise variance for which the preconditioner was computed, divided by the current variance.
        advance: Function that is called with 1 after each pass or each step.
        minibatch: Largest number of examples in a step of the minibatch solver; `None` for conjugate gradients.
    """

    pieces: Pieces
    subset: Subset
    prior: Tensor
    preconditioner: KroneckerCovariance
    at_once: int
    seed: int
    factor: float = 1.0
    noise_ratio: float = 1.0
    advance: Callable[[int], None] | None = None
    minibatch: int | None = None

    def __post_init__(self) -> None:
        self.root = self.prior.rsqrt()
        self.rate, self.num_minibatches = 0.0, 0  # values of the minibatch solver, unknown at first
        self.seen: DataTerm | None = None  # data term of the first pass; every other pass must have the same examples

    @property
    def device(self) -> torch.device:
        """Device of the network. `prior` and the draws may be in the memory of the CPU."""
        return next(self.pieces.jacobians.runner.network.parameters()).device

    @property
    def on_host(self) -> bool:
        """Whether the GPU holds only the network, the current solution and its momentum."""
        return self.prior.device != self.device

    @property
    def likelihood(self) -> Likelihood:
        """Likelihood p(y | outputs)."""
        return self.pieces.loss.likelihood

    def start(self, first: int, count: int) -> Group:
        """The equations of some draws. The solutions start at draws from the prior."""
        noise = self.prior_noise(first, count)
        target = self._data_noise(first, count).add_(noise, alpha=math.sqrt(self.factor))
        return self.group(target, noise.mul_(self.factor**-0.5))

    def group(self, target: Tensor, solution: Tensor) -> Group:
        """Equations with a given right-hand side and starting solution."""
        group = Group(target, solution, target[:, :0], torch.zeros_like(target))
        return self.restart(group)

    def restart(self, group: Group) -> Group:
        """Restart the solver from the current solution."""
        group.iteration = 0
        if self.minibatch:
            group.direction.zero_()
        else:
            group.residual = group.target - self.product(group.solution)
            group.direction = self.precondition(group.residual)
        return group

    def solve(self, group: Group, most: int, tolerance: float, after: Callable[[], None] | None = None) -> float:
        """Run conjugate gradients on each equation, and return the largest relative error.

        If `minibatch` is set, the minibatch solver runs instead, and the error is unknown (NaN).
        """
        if self.minibatch:
            begin, count = group.iteration, self.at_once if self.on_host else len(group.target)
            for row in range(0, len(group.target), count):
                group.iteration = begin
                self._descend(group, slice(row, row + count), most, after)
            return math.nan
        tiny = torch.finfo(group.target.dtype).tiny
        left = _dot(group.residual, self.precondition(group.residual))
        while group.iteration < most and self._error(group, left) > tolerance:
            product = self.product(group.direction)
            step = left / _dot(group.direction, product).clamp_min(tiny)
            group.solution.addcmul_(group.direction, step)
            group.residual.addcmul_(product, -step)
            del product
            turned = self.precondition(group.residual)
            now = _dot(group.residual, turned)
            group.direction.mul_(now / left.clamp_min(tiny)).add_(turned)
            left = now
            group.iteration += 1
            if after is not None:
                after()
        return self._error(group, left)

    def _error(self, group: Group, left: Tensor) -> float:
        r"""Largest relative error $\sqrt{r^\top M^{-1} r / u^\top \tilde H u}$ of some equations, where M is the preconditioner,
        r is the residual, and $\tilde H = \delta^{-1/2} H \delta^{-1/2}$.

        $r^\top M^{-1} r$ estimates $e^\top (\tilde H + c I) e$ for the error e of the solution u. This quantity bounds the effect
        of e on the outputs. $u^\top \tilde H u = u^\top (b - r - c u)$ is the effect of the draw itself.
        """
        # Subtract before summing: for large c, both sums are so large that float32 cannot resolve their difference.
        parts = zip(
            *(one.split(CHUNK_WEIGHTS, 1) for one in (group.solution, group.target, group.residual)), strict=True
        )
        effect = torch.stack([_dot(u, (b - r).sub_(u, alpha=self.factor)) for u, b, r in parts]).sum(0)
        return float((left / effect.clamp_min(torch.finfo(left.dtype).tiny)).max().clamp_min(0).sqrt())

    def _descend(self, group: Group, rows: slice, most: int, after: Callable[[], None] | None) -> None:
        r"""Take steps of Nesterov's method for some equations; each step uses the curvature of one minibatch.

        The current solution is stored as $z = \delta^{-1/2} u$, so that Jacobian products need no copy. The right-hand side b is
        computed from all data, not from the minibatch (Antorán et al. 2023, section 4.2). Therefore, the smaller the solution is,
        the less a step depends on the choice of the minibatch.
        """
        self.rate = self.rate or RELATIVE_RATE / self._largest_eigenvalue(next(self._minibatches()))
        here, step = self.device, group.iteration
        limit = MAX_GROWTH * float(_norms(group.solution[rows]).max())
        z, velocity = ((self.root * part[rows]).to(here) for part in (group.solution, group.direction))
        if self.on_host:  # the rounding error is smaller than the noise of a minibatch
            velocity = velocity.bfloat16()
        batches = itertools.islice(self._minibatches(), step, None)
        while step < most:
            z.add_(velocity, alpha=MOMENTUM)
            slope = self._slope(z, next(batches)).sub_(group.target[rows].to(here))
            move = self.precondition(slope).mul_(self.root.to(here)).mul_(self.rate * min(1.0, 2 - 2 * step / most))
            del slope
            z.sub_(move)
            velocity.mul_(MOMENTUM).sub_(move)
            del move
            step += 1
            if step % STEPS_BETWEEN_CHECKS and step < most:
                continue
            solution = (z / self.root.to(here)).to(group.solution)
            if not float(_norms(solution).max()) <= limit:  # also true for NaN
                self.rate /= 2
                self._descend(group, rows, most, after)
                return
            group.solution[rows], group.direction[rows] = solution, (velocity / self.root.to(here)).to(solution)
            group.iteration = step
            if after is not None:
                after()

    def _slope(self, z: Tensor, batch: list[tuple[Batch, Inputs]]) -> Tensor:
        r"""The products $\delta^{-1/2} H_b z + c\,\delta^{1/2} z$ for solutions z, [g, S]. $H_b$ is the curvature of a minibatch,
        scaled to all data."""
        jacobians, total = self.pieces.jacobians, torch.zeros(())
        for piece, inputs in batch:
            outputs, changes = jacobians.push(*inputs, self.subset.spread(z))
            vectors = self.num_minibatches * OutputHessian.of(self.likelihood, outputs, piece).times(changes)
            pulled = self.subset.gather(jacobians.pull(*inputs, vectors)).to(z)
            total = total.add_(pulled) if total.ndim else pulled
        root = self.root.to(z.device)
        if self.advance is not None:
            self.advance(1)
        return total.mul_(root).addcdiv_(z, root, value=self.factor)

    def _minibatches(self) -> Iterator[list[tuple[Batch, Inputs]]]:
        while True:
            yield from self._epoch(DataTerm())

    def _epoch(self, data: DataTerm) -> Iterator[list[tuple[Batch, Inputs]]]:
        """The minibatches of one pass over the data. Each minibatch is split into pieces that fit into the memory budget."""
        most = self.minibatch
        for whole, inputs in self.pieces.read(data, self._rows if most is None else lambda *_: most):
            step = self._rows(*inputs)
            parts = [whole.rows(slice(start, start + step)) for start in range(0, len(whole), step)]
            yield [(part, as_inputs(part.x)) for part in parts]

    def _largest_eigenvalue(self, batch: list[tuple[Batch, Inputs]]) -> float:
        """Largest eigenvalue of the matrix of the preconditioned equations, computed on one minibatch. The estimate by power
        iteration is slightly too small."""
        root, found = self.root.to(self.device), 1.0
        z = root * self.prior_noise(-1, 1).to(self.device)
        for _ in range(NUM_POWER_ITERATIONS):
            z = root * self.precondition(self._slope(z / _norms(z / root), batch))
            found = float(_norms(z / root))
        return found

    def precondition(self, vectors: Tensor) -> Tensor:
        """Multiply vectors by the preconditioner, which is adapted to the current noise. The computation is on the
        network's device."""
        now = self.preconditioner.rescaled(self.factor / self.noise_ratio)
        return now.times(vectors, self.device).div_(self.noise_ratio)

    def error(self, group: Group) -> float:
        """Relative error of the solution of a group's first equation, computed in a pass over the data."""
        target, solution = group.target[:1], group.solution[:1]
        residual = target - self.product(solution)
        first = Group(target, solution, residual, target)
        return self._error(first, _dot(residual, self.precondition(residual)))

    def product(self, vectors: Tensor) -> Tensor:
        r"""The products $(\delta^{-1/2} H \delta^{-1/2} + c I) v$ for vectors v, [g, S], computed in a pass over the data."""
        along = self.root * vectors

        def vectors_at(piece: Batch, inputs: Inputs) -> tuple[Tensor, Tensor]:
            outputs, changes = self._push(along, inputs)
            return outputs, OutputHessian.of(self.likelihood, outputs, piece).times(changes)

        return self._pulled(vectors_at, len(vectors)).add_(vectors, alpha=self.factor)

    def _data_noise(self, first: int, count: int) -> Tensor:
        r"""Data noise $\delta^{-1/2} \sum_n J_n^\top H_n \epsilon_n$ of some draws, [g, S], computed in a pass over the data."""
        generator = torch.Generator(self.device).manual_seed((2_000_003 * self.seed + 2 * first + 1) % 2**63)

        def vectors_at(piece: Batch, inputs: Inputs) -> tuple[Tensor, Tensor]:
            outputs = self.pieces.jacobians.run(*inputs)
            return outputs, OutputHessian.of(self.likelihood, outputs, piece).noise(count, generator)

        return self._pulled(vectors_at, count)

    def mode_target(self, mean: Tensor) -> Tensor:
        r"""The right-hand side $\delta^{-1/2} (H w^* - \nabla \ell)$ of the equation for the mode of the linearized model, [1,
        S]."""
        slopes = OutputCurvature(self.likelihood, "empirical")

        def vectors_at(piece: Batch, inputs: Inputs) -> tuple[Tensor, Tensor]:
            outputs, changes = self._push(mean.unsqueeze(0), inputs)
            hessian = OutputHessian.of(self.likelihood, outputs, piece)
            slope = slopes.vectors(outputs, Batch(piece.x, piece.y)).reshape(changes.shape)
            return outputs, hessian.times(changes) + hessian.weights * slope

        return self._pulled(vectors_at, 1)

    def _push(self, along: Tensor, inputs: Inputs) -> tuple[Tensor, Tensor]:
        """The outputs, and their directional derivatives along g directions in weight space, given as [g, S]. The directional
        derivatives are [g, B, ...]."""
        # The directions are copied for each piece, and the copy is freed before gradients of the same size are made.
        return self.pieces.jacobians.push(*inputs, self.subset.spread(along.to(self.device)))

    def prior_noise(self, first: int, count: int) -> Tensor:
        """Standard normal numbers [g, S]; equal arguments give equal numbers."""
        generator = torch.Generator(self.device).manual_seed((2_000_003 * self.seed + 2 * first) % 2**63)
        shape = (count, len(self.prior))
        return torch.randn(shape, generator=generator, dtype=self.prior.dtype, device=self.device).to(self.prior)

    def _pulled(self, vectors_at: Callable[[Batch, Inputs], tuple[Tensor, Tensor]], count: int) -> Tensor:
        r"""Compute $\delta^{-1/2} \sum_n J_n^\top v_n$, [g, S]. The function `vectors_at` returns the outputs and the vectors
        $v_n$ of a piece of data."""
        total, data = self.prior.new_zeros(count, len(self.prior)), DataTerm()
        parts = self.subset.split(total)
        jacobians = self.pieces.jacobians
        self.num_minibatches = 0
        for batch in self._epoch(data):
            self.num_minibatches += 1
            for piece, inputs in batch:
                outputs, vectors = vectors_at(piece, inputs)
                pulled = jacobians.pull(*inputs, vectors)
                for name, part in parts.items():
                    part.add_(self.subset.pick(name, pulled.pop(name).flatten(1)).to(part))
                data.add(self.likelihood, outputs, piece)
        self.pieces.close(data)
        known = self.seen = self.seen or data
        tolerance = 1e-3 * (abs(known.log_likelihood) + known.total_weight)
        if data.num_data != known.num_data or abs(data.log_likelihood - known.log_likelihood) > tolerance:
            raise ValueError(
                "Laplace.fit: the loader gives different examples in each pass (random augmentation, or "
                "drop_last=True with shuffle=True); covariance='sampled' needs the same examples in each pass, so "
                "turn these options off"
            )
        if self.advance is not None:
            self.advance(1)
        return total.mul_(self.root)

    def _rows(self, args: Args, kwargs: Kwargs) -> int:
        """Number of examples for which the activations and their directional derivatives fit into the memory budget."""
        held = (4 * self.at_once + 2) * self.pieces.jacobians.cost(args, kwargs).activations
        return max(1, int(self.pieces.memory // held))

    def set_noise(self, variance: float) -> float:
        """Set the noise variance of the Gaussian likelihood, and return the ratio of the old variance to the new variance."""
        assert isinstance(self.likelihood, Gaussian)
        ratio = float(self.likelihood.noise.detach()) / variance
        self.likelihood.set_noise(variance)
        self.noise_ratio *= ratio
        self.seen = None  # the stored log-likelihood belongs to the previous noise
        return ratio


def find_factor(
    equations: Equations,
    mean: Tensor,
    num_outputs: float,
    iterations: int,
    tolerance: float,
    *,
    finds_noise: bool,
    excess: Callable[[Tensor], float] | None = None,
) -> None:
    r"""Find and set the prior precision and the Gaussian noise for which the evidence of the linearized model is largest.

    At the maximum, $c = \gamma / \|\theta^*\|^2_\delta$ (MacKay 1992). $\theta^*$ is the mode of the linearized model, which is
    not $w^*$ (Antorán et al. 2022, "Adapting the linearised Laplace model evidence for modern deep learning"). The effective
    dimension $\gamma = \operatorname{tr}(H (H + c\,\delta)^{-1}) = \mathbb{E}[u^\top (b - c u)]$ is estimated from a group of
    draws, where u solves the equation with the right-hand side b (see `Group`). The noise variance is $\sigma^2 = \mathrm{SSE} /
    (N O - \gamma)$, where SSE is the sum of squared errors.

    The search starts at a large c, for which the equations are easy, and lowers c. For each c, the solver starts from the draws of
    the previous c. The final c is larger than every c at which the draws did not converge or predicted training rows
    too badly. The draws raise the loss on the training rows by an amount that is about proportional to 1 / c. From the rise at
    the current c, the search computes how far it has to raise c.

    `mean` contains the trained weights w*, [S]. `num_outputs` is N O, the number of outputs of all examples together. The
    function `excess` returns how much draws [g, S] raise the loss on training rows, divided by the largest allowed rise.
    """
    most = min(len(mean), num_outputs)
    group, noise = _easy_equations(equations, mean, most)
    before: tuple[float, float] | None = None
    good, bad, wanted = math.inf, -math.inf, 0.0  # logarithms of c
    for _ in range(NUM_EVIDENCE_STEPS):
        left = equations.solve(group, iterations, tolerance)
        drawn, goals, former = group.solution[:-1], group.target[:-1], equations.factor
        now, ratio = math.log(former), 1.0
        above = 0.0 if excess is None or left > MAX_DRAW_ERROR else excess(equations.root * drawn)
        if left > MAX_DRAW_ERROR or above > 1:
            rise = LOG_PRECISION_RISE if left > MAX_DRAW_ERROR else min(math.log(above) + 0.1, MAX_LOG_PRECISION_RISE)
            bad, wanted = now, min(now + rise, 0.5 * (now + good))
        else:
            gamma = min(max(float((drawn * (goals - former * drawn)).sum(1).mean()), 1e-3), most)
            found = now, math.log(gamma / max(float(group.solution[-1].square().sum()), 1e-12))
            wanted = max(_fixed_point(before, found), now - LOG_PRECISION_STEP, 0.5 * (now + bad))
            if above > 0:  # raise c at least to the precision at which the loss is just allowed
                wanted = max(wanted, now + math.log(above))
            good, before = now, found
            if finds_noise:
                error = max(equations.pieces.data.squared_error, 1e-30)
                ratio = equations.set_noise(error / max(num_outputs - gamma, 0.05 * num_outputs))
        equations.factor = math.exp(wanted)
        _move(group, noise, (former, equations.factor), ratio)
        if max(abs(wanted - now), abs(math.log(ratio))) < MIN_EVIDENCE_CHANGE or good - bad < MIN_PRECISION_GAP:
            break
        equations.restart(group)
    if bad > -math.inf:  # the last value may not have been tried yet
        equations.factor = math.exp(good if good < math.inf else bad + LOG_PRECISION_STEP)


def _easy_equations(equations: Equations, mean: Tensor, most: float) -> tuple[Group, Tensor]:
    """Equations for some draws and for the mode, with a prior precision so large that they are easy to solve. The second result
    is the standard normal noise from which the draws' prior terms are computed."""
    norm = float((equations.prior.double() * mean.double().square()).sum())
    equations.factor = most / max(norm, 1e-12)
    start, noise = equations.start(0, equations.at_once), equations.prior_noise(0, equations.at_once)
    target = torch.cat([start.target, equations.mode_target(mean)])
    return equations.group(target, torch.cat([start.solution, torch.zeros_like(target[-1:])])), noise


def _move(group: Group, noise: Tensor, factors: tuple[float, float], ratio: float) -> None:
    """Adapt the equations and their solutions in `group` to a new prior precision and a new noise variance. The last row of
    `group` belongs to the mode, and the other rows belong to draws."""
    (former, now), goals = factors, group.target[:-1]
    goals.add_(noise, alpha=-math.sqrt(former)).mul_(math.sqrt(ratio))  # the part that comes from the data
    goals.add_(noise, alpha=math.sqrt(now))
    group.target[-1].mul_(ratio)
    group.solution[:-1].add_(noise, alpha=now**-0.5 - former**-0.5)


def _fixed_point(before: tuple[float, float] | None, now: tuple[float, float]) -> float:
    """Estimate of the fixed point x = g(x), where x is a logarithm. It uses the secant through the last two pairs (x,
    g(x)). In one step, exp(x) changes by at most a factor of 100."""
    x, g = now
    slope = 0.0 if before is None or before[0] == x else (g - before[1]) / (x - before[0])
    return x + min(max((g - x) / (1 - min(max(slope, -1.0), 0.9)), -4.6), 4.6)


class DrawSolver:
    """Solver that makes draws from `Equations`, group by group.

    `draws` are deviations from the mean, [n, S], and `error` is the largest relative error of a draw (see
    `Sampled.tolerance`). From time to time, the solver calls the function `checkpoint` with the state that a later run needs to
    continue: plain values and tensors.
    """

    def __init__(
        self,
        equations: Equations,
        options: Sampled,
        checkpoint: Callable[[dict[str, Any], dict[str, Tensor]], None] | None = None,
    ) -> None:
        self._equations, self._options, self._checkpoint = equations, options, checkpoint
        self.draws = equations.prior.new_zeros(options.num_draws, len(equations.prior))
        self.error, self._done = 0.0, 0
        self._group: Group | None = None
        self._written = time.monotonic()

    def run(self) -> SampledCovariance:
        """Compute the missing draws, and return the covariance that all draws define."""
        equations, options = self._equations, self._options
        most = options.steps if equations.minibatch else options.iterations
        while self._done < options.num_draws:
            count = min(equations.at_once, options.num_draws - self._done)
            group = self._group = self._group or equations.start(self._done, count)
            left = equations.solve(group, most, options.tolerance, self._write)
            if math.isnan(left):  # the error of one draw represents all draws
                left = self.error or equations.error(group)
            self.error = max(self.error, left)
            self.draws[self._done : self._done + count] = equations.root * group.solution
            self._done, self._group = self._done + count, None
            self._write(always=True)
        return SampledCovariance(equations.subset, self.draws, equations.prior, equations.factor)

    def _write(self, *, always: bool = False) -> None:
        """Write the draws so far, unless the last write was less than `MIN_SECONDS_BETWEEN_WRITES` seconds ago."""
        if self._checkpoint is None or not (always or time.monotonic() - self._written > MIN_SECONDS_BETWEEN_WRITES):
            return
        facts: dict[str, Any] = {"done": self._done, "error": self.error}
        facts |= {key: getattr(self._equations, key) for key in ("rate", "num_minibatches")}
        facts["seen"] = self._equations.seen and asdict(self._equations.seen)
        tensors = {"draws": self.draws[: self._done]}
        if self._group is not None:
            facts["iteration"] = self._group.iteration
            tensors |= prefixed(group={key: value for key, value in vars(self._group).items() if key != "iteration"})
        self._checkpoint(facts, tensors)
        self._written = time.monotonic()

    def continue_from(self, facts: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
        """Continue from a checkpoint."""
        self._done, self.error = facts["done"], facts["error"]
        self._equations.seen = None if facts["seen"] is None else DataTerm(**facts["seen"])
        self._equations.rate, self._equations.num_minibatches = facts["rate"], facts["num_minibatches"]
        self.draws[: self._done] = tensors["draws"].to(self.draws)
        group = {key: value.to(self.draws) for key, value in below("group", tensors).items()}
        self._group = Group(**group, iteration=facts["iteration"]) if group else None


def _norms(vectors: Tensor) -> Tensor:
    found: Tensor = torch.linalg.vector_norm(vectors, dim=1, keepdim=True)
    return found


def _dot(left: Tensor, right: Tensor) -> Tensor:
    """Inner products of rows, computed without copying the rows: [g, 1]."""
    return (left.unsqueeze(1) @ right.unsqueeze(2)).squeeze(2)
