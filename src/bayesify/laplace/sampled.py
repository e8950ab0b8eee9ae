r"""Draws from the linearized posterior over all weights, each the solution of a perturbed regression (sample-then-optimize)."""

from __future__ import annotations

import functools
import itertools
import math
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Self

import torch
from torch import Tensor

from bayesify.arguments.checks import Count, Positive, checked
from bayesify.jacobians import Gradients
from bayesify.laplace.covariances import KroneckerCovariance, WeightCovariance
from bayesify.laplace.curvature import DataTerm, OutputCurvature, Pieces
from bayesify.laplace.subset import Subset
from bayesify.likelihoods import Gaussian, Likelihood
from bayesify.predictive.spreads import Spread
from bayesify.predictor import Batch
from bayesify.running.inputs_and_outputs import as_inputs
from bayesify.storage import tensor_files
from bayesify.weights.catalog import group_layers
from bayesify.weights.module_state import below, prefixed

Inputs = tuple[tuple[Any, ...], Mapping[str, Any]]

NUM_EVIDENCE_STEPS = 6
"""Largest number of updates of the prior precision."""
NUM_MINIBATCH_EVIDENCE_STEPS = 4
"""Largest number of updates with the minibatch solver, whose noise hides small changes."""
MAX_EVIDENCE_EXAMPLES = 2000
"""Largest number of examples that choose the prior precision. From more data, this many stand for all."""
MAX_WEIGHTS_SOLVED_TOGETHER = 5_000_000
"""Largest number of weights for which several draws are solved at a time by default, and for the evidence."""
MAX_GRADIENT_WORK = 1e9
"""Largest product of weights and examples for which conjugate gradients are the default."""
MOMENTUM = 0.9
"""Nesterov's momentum of the minibatch solver."""
RELATIVE_RATE = 0.2
"""Learning rate of the minibatch solver times the largest eigenvalue of a minibatch's preconditioned equations."""
NUM_POWER_ITERATIONS = 10
"""Number of products with a minibatch that estimate this eigenvalue."""
MAX_GROWTH = 3.0
"""If the norm of the solution exceeds this multiple of its start, the learning rate is too large."""
NOT_STARTED = -1
"""Iteration number of equations that the minibatch solver has not started."""
STEPS_BETWEEN_CHECKS = 50
"""Number of minibatch steps between checks of the solution, each of which may write a checkpoint."""
MIN_EVIDENCE_CHANGE = 0.02
"""The updates of the prior precision end when its logarithm changes by less than this."""
MIN_RELATIVE_SCALE = 0.01
"""Smallest entry of the g-prior's scale, relative to the mean of its layer. It bounds weights that the data hardly constrain."""
NUM_SCALE_SAMPLES = 2
"""Number of vectors per example for the scale of the prior and for the preconditioner."""
MIN_SECONDS_BETWEEN_WRITES = 30.0
"""Smallest time between two checkpoints."""


Solver = Literal["auto", "conjugate_gradients", "minibatch"]


@checked
@dataclass(frozen=True)
class Sampled:
    r"""Options of `Laplace(covariance=Sampled(...))`, which keeps draws of all weights. `"sampled"` stands for the defaults.

    Conjugate gradients take about four passes over the data for each draw and iteration. The minibatch solver takes one pass over
    the data and about four passes over `steps` minibatches for each draw. Neither cost depends on the number of outputs.

    Args:
        num_draws: Number n of draws. Each is one copy of the weights. The relative error of a variance is $\sqrt{2 / n}$.
        iterations: Largest number of iterations of conjugate gradients for each draw.
        at_once: Number of draws that are solved at a time. The default is 4, and 1 above `MAX_WEIGHTS_SOLVED_TOGETHER` weights.
            With 1 under the minibatch solver, a GPU holds two and a half copies of the weights: the network, the iterate, and its
            momentum in bfloat16. Everything else stays in the memory of the CPU.
        tolerance: Relative residual at which conjugate gradients end early.
        settle: Whether to scale the covariance down until the mean log predictive density of training rows is at most 0.005 nats
            below the network's own. It applies to classes if `fit` finds the prior precision. The evidence alone often asks for so
            wide a prior that the linearization no longer holds.
        solver: `"conjugate_gradients"`, or `"minibatch"`: stochastic gradient descent with Nesterov's momentum and a learning rate
            that falls to zero in the second half. The default is conjugate gradients for up to
            `MAX_WEIGHTS_SOLVED_TOGETHER` weights, if weights times examples are at most `MAX_GRADIENT_WORK`.
        steps: Number of steps of the minibatch solver for each draw.
        batch: Largest number of examples of a step. Batches of the loader are cut to it.
    """

    num_draws: Count = 16
    iterations: Count = 10
    at_once: Count | None = None
    tolerance: Positive = 0.01
    settle: bool = True
    solver: Solver = "auto"
    steps: Count = 500
    batch: Count = 128

    def group(self, size: int) -> int:
        """Number of draws over `size` weights that are solved at a time."""
        return min(self.at_once or (4 if size <= MAX_WEIGHTS_SOLVED_TOGETHER else 1), self.num_draws)

    def takes_minibatches(self, size: int, num_data: int = 0) -> bool:
        """Whether the minibatch solver is used for this many weights and examples."""
        large = size > MAX_WEIGHTS_SOLVED_TOGETHER or size * num_data > MAX_GRADIENT_WORK
        return self.solver == "minibatch" or (self.solver == "auto" and large)

    def stays_on_host(self, size: int) -> bool:
        """Whether draws, targets, the prior's scale and the preconditioner are kept in the memory of the CPU."""
        return self.group(size) == 1 and self.takes_minibatches(size)

    def num_groups(self, size: int) -> int:
        """Number of groups of draws that are solved one after the other."""
        return -(-self.num_draws // self.group(size))

    def count_bytes(self, size: int, dtype: torch.dtype) -> int:
        """Memory of the draws over `size` weights.

        It is one copy of the weights per draw, six more per draw while it is solved, and two for all draws. It is three copies if
        the rest stays on the CPU.
        """
        copies = 3 if self.stays_on_host(size) else self.num_draws + 6 * self.group(size) + 2
        return copies * size * torch.finfo(dtype).bits // 8

    def count_passes(self, size: int, num_data: int) -> int:
        """Largest number of passes over the data that `fit` takes, without the passes that find the prior precision."""
        each = self.num_groups(size) * (4 * self.group(size) + 2)
        if self.takes_minibatches(size, num_data):
            return math.ceil(each * (1 + self.steps * min(self.batch, num_data) / max(1, num_data)))
        return each * (self.iterations + 1)


class DrawsFile:
    """File that keeps the draws while they are being solved.

    Args:
        path: Path of the file.
        settings: Settings that a continued run must share, as plain data.
    """

    def __init__(self, path: Path, settings: Mapping[str, Any]) -> None:
        self._path, self._settings = path, dict(settings)

    def read(self) -> tuple[dict[str, Any], dict[str, Tensor]] | None:
        """Facts and tensors; `None` if there is no file.

        Raises:
            ValueError: If the file belongs to another run.
        """
        if not self._path.exists():
            return None
        header, tensors = tensor_files.read(self._path, "sampled draws")
        for key, value in self._settings.items():
            before = header["settings"].get(key)
            if before != value:
                shown = f"{key}={before!r}, but this run has {value!r}" if key != "network" else "another network"
                raise ValueError(
                    f"{self._path}: was written with {shown}; use the same settings, or give another checkpoint="
                )
        return header["facts"], tensors

    def write(self, facts: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
        """Write facts and tensors atomically."""
        tensor_files.write(self._path, "sampled draws", {"settings": self._settings, "facts": dict(facts)}, tensors)


class SampledCovariance(WeightCovariance):
    r"""The Gaussian $\mathcal{N}(0, \frac1n \sum_s z_s z_s^\top)$ of n draws $z_s$; see `WeightCovariance`.

    Args:
        subset: The weights.
        draws: Deviations from the mean, [n, S].
        prior: $\delta$, [S].
        factor: Factor c that the draws were made for.
        narrowed: Factor that the covariance was multiplied by.
    """

    def __init__(self, subset: Subset, draws: Tensor, prior: Tensor, factor: float, narrowed: float = 1.0) -> None:
        super().__init__(subset, prior)
        self.draws, self.factor, self.narrowed = draws, factor, narrowed

    def diagonalize(self) -> bool:
        """Always `False`, because draws belong to one prior precision."""
        return False

    def rescaled(self, factor: float) -> Self:
        """This object, if the factor is its own.

        Raises:
            ValueError: For another factor.
        """
        if factor != self.factor:
            raise ValueError(
                "Laplace: the draws of covariance='sampled' belong to one prior precision, which fit finds by the evidence; fit "
                "again with prior_precision=..., or set temperature"
            )
        return self

    def outputs(self, gradients: Gradients, factors: list[float] | None = None) -> Tensor:
        """Products of the draws' effects."""
        draws = self.draws.to(gradients.device)
        roots = self.subset.move(gradients, draws).permute(2, 1, 0) / math.sqrt(len(draws))  # [B, K, n]
        found = roots @ roots.mT.contiguous()
        return found if factors is None else torch.stack([found for factor in factors if self.rescaled(factor)])

    def at_positions(self, a: Tensor, factors: list[float] | None = None) -> list[Spread]:
        """Not by the inputs of a layer."""
        raise NotImplementedError("Laplace: draws have no form by the inputs of a layer")

    def across_positions(self, a: Tensor, factors: list[float] | None = None) -> Tensor:
        """Not by the inputs of a layer."""
        raise NotImplementedError("Laplace: draws have no form by the inputs of a layer")

    def joint(self, gradients: Gradients) -> Tensor:
        """Products of the draws' effects."""
        roots = (
            self.subset.move(gradients, self.draws.to(gradients.device)).movedim(0, -1).transpose(0, 1).flatten(0, 1)
        )  # [B K, n]
        return roots @ roots.T / len(self.draws)

    def directions(self, count: int, generator: torch.Generator) -> Tensor:
        """All draws, because their products are the covariance."""
        return self.draws

    def draw(self, num_draws: int, generator: torch.Generator | None = None) -> Tensor:
        """A random choice of the draws. If more are asked for than there are, random sums of the draws, with the same
        covariance."""
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
        """Not available for draws.

        Raises:
            ValueError: Always.
        """
        raise ValueError(
            "Laplace: covariance='sampled' has no determinant, so that evidence and KL are unknown; use covariance='kronecker' to "
            "compute them"
        )

    def tensors(self) -> dict[str, Tensor]:
        """The draws and the prior's scale."""
        return {"draws": self.draws, "prior": self.prior}


@dataclass(frozen=True)
class OutputHessian:
    r"""$H_n = \omega_n (\operatorname{diag}(h) - q q^\top)$ of the examples of a batch.

    Args:
        diagonal: h, [B, ...].
        product: q, which equals h for classes; `None` if the matrix is diagonal.
        axis: Axis of the classes.
        weights: $\omega$, in a shape that h can be multiplied with.
    """

    diagonal: Tensor
    product: Tensor | None
    axis: int
    weights: Tensor

    @classmethod
    def of(cls, likelihood: Likelihood, outputs: Tensor, batch: Batch, weight: float = 1.0) -> OutputHessian:
        """The Hessian of a likelihood, times a common weight of all examples."""
        h, q = likelihood.fisher_parts(outputs, batch.y)
        counts = (weight * batch.counts).to(h).reshape(-1, *[1] * (h.ndim - 1))
        return cls(h, q, likelihood.logit_axis(outputs.ndim) or -1, counts)

    def times(self, vectors: Tensor) -> Tensor:
        """Products with vectors [S, B, ...]."""
        found = self.diagonal * vectors
        if self.product is not None:
            found = found - self.product * (self.product * vectors).sum(self.axis, keepdim=True)
        return self.weights * found

    def noise(self, count: int, generator: torch.Generator) -> Tensor:
        """Normal vectors with this covariance: [S, B, ...]; diag(sqrt p) - p sqrt(p)^T is a root of diag(p) - p p^T."""
        normal = torch.randn((count, *self.diagonal.shape), generator=generator, device=generator.device).to(
            self.diagonal
        )
        root = self.diagonal.sqrt()
        found = root * normal
        if self.product is not None:
            found = found - self.product * (root * normal).sum(self.axis, keepdim=True)
        return self.weights.sqrt() * found


def whiten(
    subset: Subset, curvature: Mapping[str, Tensor], prior: Tensor | None, device: torch.device
) -> tuple[Tensor, KroneckerCovariance]:
    r"""The prior's scale $\delta$, [S], and $(\delta^{-1/2} K \delta^{-1/2} + c I)^{-1}$ for the Kronecker-factored curvature K.

    Without a given prior, $\delta$ is the g-prior (Antorán et al. 2023, section 5): the diagonal of K. The data then constrain all
    weights equally in units of the prior, and weights before a normalization layer may have any size. All results stay on the
    device of the curvature; `device` computes the eigenvectors.
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
    r"""Equations $(\delta^{-1/2} H \delta^{-1/2} + c I) u = b$ that are being solved, in units $u = \delta^{1/2} z$ of the prior.

    Args:
        target: b, [g, S].
        solution: u.
        residual: r.
        direction: p.
        iteration: Iterations that are done; `NOT_STARTED` for a start of the minibatch solver that is not scaled yet.
    """

    target: Tensor
    solution: Tensor
    residual: Tensor
    direction: Tensor
    iteration: int = 0


@dataclass
class Equations:
    r"""Perturbed regressions whose solutions are draws from the posterior (sample-then-optimize).

    $$ z = \operatorname*{argmin} \tfrac12 \sum_n \|J_n z - \epsilon_n\|^2_{H_n} + \tfrac{c}{2} \|z - \theta\|^2_\delta $$

    With $\epsilon_n \sim \mathcal{N}(0, H_n^{-1})$ and $\theta \sim \mathcal{N}(0, (c\,\delta)^{-1})$ the minimum has the law
    $\mathcal{N}(0, (H + c\,\delta)^{-1})$ (Antorán et al. 2023, "Sampling-based inference for large linear models, with
    application to linearised Laplace"). The paper descends by minibatches with Nesterov's momentum; here the steps are
    preconditioned by Kronecker factors, which also gives the start and the learning rate. Where there are few examples,
    conjugate gradients solve the same equations. Products $J_n v$ and $J_n^\top v$ take two passes of the network each, for all
    draws of a group at once, and no Jacobian is formed.

    Args:
        pieces: The data; every pass has to yield the same examples.
        subset: The weights.
        prior: $\delta$, [S].
        preconditioner: See `whiten`.
        at_once: g, equations that are solved at a time.
        seed: Seed of the draws.
        factor: c.
        example_weight: What each example counts, where the pieces are some of the data.
        noise_ratio: Variance of a Gaussian noise at the time of the preconditioner, relative to the present one.
        advance: Called after each pass, or each step.
        minibatch: Most examples of a step of the minibatch solver; `None`: conjugate gradients.
    """

    pieces: Pieces
    subset: Subset
    prior: Tensor
    preconditioner: KroneckerCovariance
    at_once: int
    seed: int
    factor: float = 1.0
    example_weight: float = 1.0
    noise_ratio: float = 1.0
    advance: Callable[[], None] | None = None
    minibatch: int | None = None

    def __post_init__(self) -> None:
        self.root = self.prior.rsqrt()
        self.rate, self.num_minibatches = 0.0, 0  # of the minibatch solver, unknown
        self._data: DataTerm | None = None

    @property
    def device(self) -> torch.device:
        """Device of the network. `prior` and the draws may be in the memory of the CPU."""
        return next(self.pieces.jacobians.runner.network.parameters()).device

    @property
    def on_host(self) -> bool:
        """Whether the GPU holds only the network, the iterate and its momentum."""
        return self.prior.device != self.device

    @property
    def likelihood(self) -> Likelihood:
        """p(y | outputs)."""
        return self.pieces.loss.likelihood

    def start(self, first: int, count: int) -> Group:
        """The equations of some draws.

        Conjugate gradients start from zero and go along the solution under the preconditioner. The minibatch solver starts there.
        """
        target = self._data_noise(first, count)
        target.add_(self.prior_noise(first, count), alpha=math.sqrt(self.factor))
        return self.group(target)

    def group(self, target: Tensor) -> Group:
        """Equations with a given right side, at the start of a solver."""
        if self.minibatch:
            return Group(target, self.precondition(target), target[:, :0], torch.zeros_like(target), NOT_STARTED)
        return Group(target, torch.zeros_like(target), target.clone(), self.precondition(target))

    def restart(self, group: Group) -> Group:
        """Continue with another prior precision from the present solution."""
        group.iteration = 0
        if self.minibatch:
            group.direction.zero_()
        else:
            group.residual = group.target - self.product(group.solution)
            group.direction = self.precondition(group.residual)
        return group

    def solve(self, group: Group, most: int, tolerance: float, after: Callable[[], None] | None = None) -> float:
        """Run conjugate gradients on each equation, and return the largest relative residual.

        With `minibatch`, run the minibatch solver instead; its residual is unknown (NaN).
        """
        if self.minibatch:
            begin, count = group.iteration, self.at_once if self.on_host else len(group.target)
            for row in range(0, len(group.target), count):
                group.iteration = begin
                self._descend(group, slice(row, row + count), most, after)
            return math.nan
        tiny = torch.finfo(group.target.dtype).tiny
        scale = _dot(group.target, self.precondition(group.target)).clamp_min(tiny)
        left = _dot(group.residual, self.precondition(group.residual))
        while group.iteration < most and float((left / scale).max()) > tolerance**2:
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
        return math.sqrt(max(0.0, float((left / scale).max())))

    def _descend(self, group: Group, rows: slice, most: int, after: Callable[[], None] | None) -> None:
        r"""Steps of Nesterov's method for some equations, with the curvature of a minibatch in place of the curvature of all data.

        The iterate is $z = \delta^{-1/2} u$, so that the network is pushed along it without a copy. The target is that of all data
        (Antorán et al. 2023, section 4.2), so that the variance of a step falls with the iterate. A direction with eigenvalue
        $\lambda$ of the preconditioned equations starts at $\lambda$ times its solution, and T steps at rate $\eta$ leave
        $\lambda e^{-10 \eta \lambda T}$ of it: at most $1 / (27 \eta T)$. The start is scaled down where that exceeds 1.
        """
        self.rate = self.rate or RELATIVE_RATE / self._largest_eigenvalue(next(self._minibatches()))
        if group.iteration < 0:
            group.solution[rows] *= min(1.0, 27 * self.rate * most)
        here, step = self.device, max(0, group.iteration)
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
            if not float(_norms(solution).max()) <= limit:  # or not finite
                self.rate, group.iteration = self.rate / 2, max(0, group.iteration)
                self._descend(group, rows, most, after)
                return
            group.solution[rows], group.direction[rows] = solution, (velocity / self.root.to(here)).to(solution)
            group.iteration = step
            if after is not None:
                after()

    def _slope(self, z: Tensor, batch: list[tuple[Batch, Inputs]]) -> Tensor:
        r"""$\delta^{-1/2} H_b z + c\,\delta^{1/2} z$ for iterates [g, S], $H_b$ the curvature of a minibatch times their number."""
        jacobians, total = self.pieces.jacobians, torch.zeros(())
        for piece, inputs in batch:
            outputs, changes = jacobians.push(*inputs, self.subset.spread(z))
            vectors = self.num_minibatches * self._hessian(outputs, piece).times(changes)
            pulled = self.subset.gather(jacobians.pull(*inputs, vectors)).to(z)
            total = total.add_(pulled) if total.ndim else pulled
        root = self.root.to(z.device)
        if self.advance is not None:
            self.advance()
        return total.mul_(root).addcdiv_(z, root, value=self.factor)

    def _minibatches(self) -> Iterator[list[tuple[Batch, Inputs]]]:
        """Endless minibatches, in repeated passes over the data."""
        while True:
            yield from self._epoch(DataTerm())

    def _epoch(self, data: DataTerm) -> Iterator[list[tuple[Batch, Inputs]]]:
        """The minibatches of a pass over the data, each in pieces that fit into the budget."""
        most = self.minibatch
        for whole, inputs in self.pieces.read(data, self._rows if most is None else lambda *_: most):
            step = self._rows(*inputs)
            parts = [whole.rows(slice(start, start + step)) for start in range(0, len(whole), step)]
            yield [(part, as_inputs(part.x)) for part in parts]

    def _largest_eigenvalue(self, batch: list[tuple[Batch, Inputs]]) -> float:
        """Largest eigenvalue of a minibatch's preconditioned equations, by power iterations, which slightly underestimate it."""
        root, found = self.root.to(self.device), 1.0
        z = root * self.prior_noise(-1, 1).to(self.device)
        for _ in range(NUM_POWER_ITERATIONS):
            z = root * self.precondition(self._slope(z / _norms(z / root), batch))
            found = float(_norms(z / root))
        return found

    def precondition(self, vectors: Tensor) -> Tensor:
        """Products with the preconditioner under the present noise, computed on the network's device."""
        now = self.preconditioner.rescaled(self.factor / self.noise_ratio)
        return (now.times(vectors.to(self.device)) / self.noise_ratio).to(vectors)

    def residual(self, group: Group) -> float:
        """Relative residual of the first equation, in the norm of the preconditioner, by a pass over the data."""
        target = group.target[:1]
        left = target - self.product(group.solution[:1])
        ratio = _dot(left, self.precondition(left)) / _dot(target, self.precondition(target))
        return math.sqrt(max(0.0, float(ratio)))

    def product(self, vectors: Tensor) -> Tensor:
        r"""$(\delta^{-1/2} H \delta^{-1/2} + c I) v$ for vectors [g, S], in a pass over the data."""
        along = self.subset.spread((self.root * vectors).to(self.device))

        def vectors_at(outputs: Callable[[], Tensor], piece: Batch, inputs: Inputs) -> tuple[Tensor, Tensor]:
            found, changes = self.pieces.jacobians.push(*inputs, along)
            return found, self._hessian(found, piece).times(changes)

        return self._pulled(vectors_at, len(vectors)).add_(vectors, alpha=self.factor)

    def _data_noise(self, first: int, count: int) -> Tensor:
        r"""$\delta^{-1/2} \sum_n J_n^\top H_n \epsilon_n$ for some draws, [g, S], in a pass over the data."""
        generator = torch.Generator(self.device).manual_seed(2_000_003 * self.seed + 2 * first + 1)

        def vectors_at(outputs: Callable[[], Tensor], piece: Batch, inputs: Inputs) -> tuple[Tensor, Tensor]:
            found = outputs()
            return found, self._hessian(found, piece).noise(count, generator)

        return self._pulled(vectors_at, count)

    def mode_target(self, mean: Tensor) -> Tensor:
        r"""$\delta^{-1/2} (H w^* - \nabla \ell)$, [1, S], the right side of the equation for the mode of the linearized model."""
        along = self.subset.spread(mean.unsqueeze(0).to(self.device))
        slopes = OutputCurvature(self.likelihood, "empirical")

        def vectors_at(outputs: Callable[[], Tensor], piece: Batch, inputs: Inputs) -> tuple[Tensor, Tensor]:
            found, changes = self.pieces.jacobians.push(*inputs, along)
            hessian = self._hessian(found, piece)
            slope = slopes.vectors(found, Batch(piece.x, piece.y)).reshape(changes.shape)
            return found, hessian.times(changes) + hessian.weights * slope

        return self._pulled(vectors_at, 1)

    def _hessian(self, outputs: Tensor, piece: Batch) -> OutputHessian:
        return OutputHessian.of(self.likelihood, outputs, piece, self.example_weight)

    def prior_noise(self, first: int, count: int) -> Tensor:
        """Standard normal numbers, [g, S], the same in every call."""
        generator = torch.Generator(self.device).manual_seed((2_000_003 * self.seed + 2 * first) % 2**63)
        shape = (count, len(self.prior))
        return torch.randn(shape, generator=generator, dtype=self.prior.dtype, device=self.device).to(self.prior)

    def _pulled(
        self, vectors_at: Callable[[Callable[[], Tensor], Batch, Inputs], tuple[Tensor, Tensor]], count: int
    ) -> Tensor:
        r"""$\delta^{-1/2} \sum_n J_n^\top v_n$, [g, S], for vectors that a function gives with the outputs of each piece.

        Raises:
            ValueError: If the loader gives different examples in each pass.
        """
        total, data = torch.zeros(count, len(self.prior), dtype=self.prior.dtype, device=self.device), DataTerm()
        jacobians = self.pieces.jacobians
        self.num_minibatches = 0
        for batch in self._epoch(data):
            self.num_minibatches += 1
            for piece, inputs in batch:
                outputs, vectors = vectors_at(functools.partial(jacobians.run, *inputs), piece, inputs)
                total.add_(self.subset.gather(jacobians.pull(*inputs, vectors)).to(total))
                data.add(self.likelihood, outputs, piece)
        self.pieces.close(data)
        known = self._data = self._data or data
        tolerance = 1e-3 * (abs(known.log_likelihood) + known.total_weight)
        if data.num_data != known.num_data or abs(data.log_likelihood - known.log_likelihood) > tolerance:
            raise ValueError(
                "Laplace.fit: the loader gives different examples in each pass (random augmentation, or drop_last=True with "
                "shuffle=True); covariance='sampled' needs the same examples, so turn these off"
            )
        if self.advance is not None:
            self.advance()
        return total.mul_(self.root.to(total)).to(self.prior)

    def _rows(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> int:
        """Examples whose activations and their changes fit into the budget."""
        held = (4 * self.at_once + 2) * self.pieces.jacobians.cost(args, kwargs).activations
        return max(1, int(self.pieces.memory // held))

    def set_noise(self, variance: float) -> float:
        """Set the variance of a Gaussian noise, and return the ratio of the former variance to it."""
        assert isinstance(self.likelihood, Gaussian)
        ratio = float(self.likelihood.noise.detach()) / variance
        self.likelihood.set_noise(variance)
        self.noise_ratio *= ratio
        self._data = None  # the stored log-likelihood belongs to the former noise
        return ratio


def find_factor(
    equations: Equations, mean: Tensor, num_outputs: float, iterations: int, tolerance: float, *, finds_noise: bool
) -> float:
    r"""Set the equations to the prior precision, and the Gaussian noise, with the largest evidence of the linearized model.

    There $c = \gamma / \|\theta^*\|^2_\delta$ (MacKay 1992) for the mode $\theta^*$ of the linearized model, which is not $w^*$
    (Antorán et al. 2022, "Adapting the linearised Laplace model evidence for modern deep learning"), and the effective dimension
    $\gamma = \operatorname{tr}(H (H + c\,\delta)^{-1}) = \mathbb{E}[u^\top (b - c u)]$, which a group of draws estimates. The
    noise is $\sigma^2 = \mathrm{SSE} / (N O - \gamma)$.

    Args:
        equations: The equations, over some or all of the data.
        mean: w*, [S].
        num_outputs: N O, of all data.
        iterations: Iterations for each value of c.
        tolerance: See `Sampled`.
        finds_noise: Whether the noise is to be found.

    Returns:
        The effective dimension.
    """
    mean, most = mean.to(equations.prior), min(len(mean), num_outputs)
    norm = float((equations.prior.double() * mean.double().square()).sum())
    equations.factor = most / max(norm, 1e-12)
    noise, gamma = equations.prior_noise(0, equations.at_once), most
    drawn_part = equations.start(0, equations.at_once).target
    group = equations.group(torch.cat([drawn_part, equations.mode_target(mean)]))
    before: tuple[float, float] | None = None
    for _ in range(NUM_MINIBATCH_EVIDENCE_STEPS if equations.minibatch else NUM_EVIDENCE_STEPS):
        equations.solve(group, iterations, tolerance)
        drawn, goals, former = group.solution[:-1], group.target[:-1], equations.factor
        gamma = min(max(float((drawn * (goals - former * drawn)).sum(1).mean()), 1e-3), most)
        found = math.log(former), math.log(gamma / max(float(group.solution[-1].square().sum()), 1e-12))
        factor = math.exp(_fixed_point(before, found))
        before, change = found, abs(math.log(factor / former))
        goals.add_(noise, alpha=-math.sqrt(former))  # what the data have of it
        if finds_noise:
            error = equations.pieces.data.squared_error * equations.example_weight
            ratio = equations.set_noise(max(error, 1e-30) / max(num_outputs - gamma, 0.05 * num_outputs))
            goals.mul_(math.sqrt(ratio))
            group.target[-1].mul_(ratio)
            change = max(change, abs(math.log(ratio)))
        goals.add_(noise, alpha=math.sqrt(factor))
        drawn.add_(noise, alpha=factor**-0.5 - former**-0.5)
        equations.factor, equations.rate = factor, 0.0
        if change < MIN_EVIDENCE_CHANGE:
            break
        equations.restart(group)
    return gamma


def _fixed_point(before: tuple[float, float] | None, now: tuple[float, float]) -> float:
    """Estimate of the fixed point x = g(x) by the secant through the last two pairs (x, g(x)), at most a factor of 100 away."""
    x, g = now
    slope = 0.0 if before is None or before[0] == x else (g - before[1]) / (x - before[0])
    return x + min(max((g - x) / (1 - min(max(slope, -1.0), 0.9)), -4.6), 4.6)


class DrawSolver:
    """Solver that makes draws from `Equations`, group by group.

    Args:
        equations: The equations, over all data, under the final prior precision.
        options: How many draws, how exact.
        checkpoint: Called with facts and tensors of the draws so far, every now and then.

    Attributes:
        draws: Deviations from the mean, [n, S].
        residual: The largest relative residual of a draw.
    """

    def __init__(
        self,
        equations: Equations,
        options: Sampled,
        checkpoint: Callable[[dict[str, Any], dict[str, Tensor]], None] | None = None,
    ) -> None:
        self._equations, self._options, self._checkpoint = equations, options, checkpoint
        self.draws = equations.prior.new_zeros(options.num_draws, len(equations.prior))
        self.residual, self._done = 0.0, 0
        self._group: Group | None = None
        self._written = time.monotonic()

    def run(self) -> SampledCovariance:
        """Solve for all missing draws."""
        equations, options = self._equations, self._options
        while self._done < options.num_draws:
            count = min(equations.at_once, options.num_draws - self._done)
            group = self._group = self._group or equations.start(self._done, count)
            most = options.steps if equations.minibatch else options.iterations
            left = equations.solve(group, most, options.tolerance, self._write)
            if math.isnan(left):  # the residual of one draw stands for all
                left = self.residual or equations.residual(group)
            self.residual = max(self.residual, left)
            self.draws[self._done : self._done + count] = equations.root * group.solution
            self._done, self._group = self._done + count, None
            self._write(always=True)
        return SampledCovariance(equations.subset, self.draws, equations.prior, equations.factor)

    def _write(self, *, always: bool = False) -> None:
        """Write the draws so far, at most once per `MIN_SECONDS_BETWEEN_WRITES`."""
        if self._checkpoint is None or not (always or time.monotonic() - self._written > MIN_SECONDS_BETWEEN_WRITES):
            return
        solved = {key: getattr(self._equations, key) for key in ("rate", "num_minibatches")}
        facts: dict[str, Any] = {"done": self._done, "residual": self.residual, **solved}
        tensors = {"draws": self.draws[: self._done]}
        if self._group is not None:
            facts["iteration"] = self._group.iteration
            tensors |= prefixed(group={key: value for key, value in vars(self._group).items() if key != "iteration"})
        self._checkpoint(facts, tensors)
        self._written = time.monotonic()

    def continue_from(self, facts: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
        """Continue from a checkpoint."""
        self._done, self.residual = facts["done"], facts["residual"]
        self._equations.rate, self._equations.num_minibatches = facts["rate"], facts["num_minibatches"]
        self.draws[: self._done] = tensors["draws"].to(self.draws)
        group = {key: value.to(self.draws) for key, value in below("group", tensors).items()}
        self._group = Group(**group, iteration=facts["iteration"]) if group else None


def _norms(vectors: Tensor) -> Tensor:
    """Euclidean norms of rows: [g, 1]."""
    found: Tensor = torch.linalg.vector_norm(vectors, dim=1, keepdim=True)
    return found


def _dot(left: Tensor, right: Tensor) -> Tensor:
    """Inner products of rows, [g, 1], without a copy of them."""
    return (left.unsqueeze(1) @ right.unsqueeze(2)).squeeze(2)
