r"""Draws from the linearized posterior over all weights, each the solution of a perturbed regression (sample-then-optimize)."""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

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
from bayesify.storage import tensor_files
from bayesify.weights.catalog import group_layers
from bayesify.weights.module_state import below, prefixed

Inputs = tuple[tuple[Any, ...], Mapping[str, Any]]

NUM_EVIDENCE_STEPS = 6
"""Most updates of the prior precision."""
MAX_EVIDENCE_EXAMPLES = 5000
"""Examples by which the prior precision is found; more of them stand for all."""
MIN_EVIDENCE_CHANGE = 0.02
"""Change in the logarithm of the prior precision below which its updates end."""
MIN_RELATIVE_SCALE = 0.01
"""Smallest entry of the g-prior's scale relative to the mean of its layer: weights that the data hardly move stay bounded."""
NUM_SCALE_SAMPLES = 2
"""Vectors per example from which the scale of the prior and the preconditioner are computed."""
MIN_SECONDS_BETWEEN_WRITES = 30.0
"""Seconds from one checkpoint to the next."""


@checked
@dataclass(frozen=True)
class Sampled:
    r"""Options of `Laplace(covariance=Sampled(...))`: draws of all weights, by conjugate gradients; `"sampled"` has the defaults.

    Each iteration takes about four passes over the data for each draw, whatever the number of outputs.

    Args:
        num_draws: n, draws that are kept: one copy of the weights each. Variances are off by $\sqrt{2 / n}$ of themselves.
        iterations: Most iterations for each draw.
        at_once: Draws that are solved at a time; each takes six more copies of the weights while it is.
        tolerance: Relative residual at which iterations end early.
        settle: Whether the covariance is scaled down until the mean log predictive density of training rows is at most 0.005 nats
            below the network's own: for classes, where `fit` finds the prior precision. The evidence alone often asks for so
            wide a prior that the linearized network leaves the region where it is right.
    """

    num_draws: Count = 16
    iterations: Count = 10
    at_once: Count = 4
    tolerance: Positive = 0.01
    settle: bool = True

    @property
    def num_groups(self) -> int:
        """Groups of draws that are solved one after the other."""
        return -(-self.num_draws // self.at_once)

    def count_bytes(self, size: int, dtype: torch.dtype) -> int:
        """Memory of the draws over so many weights: one copy each, seven while a draw is solved, and two for all."""
        copies = self.num_draws + 6 * min(self.at_once, self.num_draws) + 2
        return copies * size * torch.finfo(dtype).bits // 8

    def count_passes(self) -> int:
        """Passes of the network over the data that `fit` takes at most, those that find the prior precision apart."""
        products = self.num_groups * (self.iterations + 1)
        return products * (4 * min(self.at_once, self.num_draws) + 2)


class DrawsFile:
    """The file in which draws are kept while they are solved.

    Args:
        path: Path of the file.
        settings: What the run that continues it must have in common with it, plain data.
    """

    def __init__(self, path: Path, settings: Mapping[str, Any]) -> None:
        self._path, self._settings = path, dict(settings)

    def read(self) -> tuple[dict[str, Any], dict[str, Tensor]] | None:
        """Facts and tensors; `None` where there is no file.

        Raises:
            ValueError: If the file is of another run.
        """
        if not self._path.exists():
            return None
        header, tensors = tensor_files.read(self._path, "sampled draws")
        for key, value in self._settings.items():
            before = header["settings"].get(key)
            if before != value:
                shown = f"{key}={before!r}, this run has {value!r}" if key != "network" else "another network"
                raise ValueError(f"{self._path}: was written with {shown}; use the same, or give another checkpoint=")
        return header["facts"], tensors

    def write(self, facts: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
        """Write them in one step of the file system."""
        tensor_files.write(self._path, "sampled draws", {"settings": self._settings, "facts": dict(facts)}, tensors)


class SampledCovariance(WeightCovariance):
    r"""The Gaussian $\mathcal{N}(0, \frac1n \sum_s z_s z_s^\top)$ of n draws $z_s$; see `WeightCovariance`.

    Args:
        subset: The weights.
        draws: Deviations from the mean, [n, S].
        prior: $\delta$, [S].
        factor: c, which the draws belong to.
        narrowed: Factor that the covariance was multiplied with.
    """

    def __init__(self, subset: Subset, draws: Tensor, prior: Tensor, factor: float, narrowed: float = 1.0) -> None:
        super().__init__(subset, prior)
        self.draws, self.factor, self.narrowed = draws, factor, narrowed

    def diagonalize(self) -> bool:
        """Never: draws belong to one prior precision."""
        return False

    def rescaled(self, factor: float) -> Self:
        """Itself, for its own factor.

        Raises:
            ValueError: For another factor.
        """
        if factor != self.factor:
            raise ValueError(
                "Laplace: covariance='sampled' has draws for one prior precision, which fit finds by the evidence; fit again with "
                "prior_precision=..., or set temperature"
            )
        return self

    def outputs(self, gradients: Gradients, factors: list[float] | None = None) -> Tensor:
        """Products of the draws' effects."""
        roots = self.subset.move(gradients, self.draws).permute(2, 1, 0) / math.sqrt(len(self.draws))  # [B, K, n]
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
        roots = self.subset.move(gradients, self.draws).movedim(0, -1).transpose(0, 1).flatten(0, 1)  # [B K, n]
        return roots @ roots.T / len(self.draws)

    def directions(self, count: int, generator: torch.Generator) -> Tensor:
        """All of them: their products are the covariance."""
        return self.draws

    def draw(self, num_draws: int, generator: torch.Generator | None = None) -> Tensor:
        """Some of the draws, each once; more than there are come as random sums of them, which have their covariance."""
        count = len(self.draws)
        if num_draws <= count:
            place = self.noise(count, generator=generator).argsort()[:num_draws]
            return self.draws[place]
        return self.noise(num_draws, count, generator=generator) @ self.draws / math.sqrt(count)

    def dense(self) -> Tensor:
        """Of rank n."""
        return self.draws.T @ self.draws / len(self.draws)

    def variances(self) -> Tensor:
        """Mean squares."""
        return self.draws.square().mean(0)

    def log_det_ratio(self) -> Tensor:
        """Unknown.

        Raises:
            ValueError: Always.
        """
        raise ValueError(
            "Laplace: covariance='sampled' has no determinant, so that evidence and KL are unknown; fit has found the prior "
            "precision by the evidence; use covariance='kronecker' for a number"
        )

    def tensors(self) -> dict[str, Tensor]:
        """The draws and the prior's scale."""
        return {"draws": self.draws, "prior": self.prior}


@dataclass(frozen=True)
class OutputHessian:
    r"""$H_n = \omega_n (\operatorname{diag}(h) - q q^\top)$ of the examples of a batch.

    Args:
        diagonal: h, [B, ...].
        product: q, which is h where there is one: classes.
        axis: Axis of the classes.
        weights: $\omega$, in a shape that h can be multiplied with.
    """

    diagonal: Tensor
    product: Tensor | None
    axis: int
    weights: Tensor

    @classmethod
    def of(cls, likelihood: Likelihood, outputs: Tensor, batch: Batch, weight: float = 1.0) -> OutputHessian:
        """That of a likelihood, times a weight of all examples."""
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


def whiten(subset: Subset, curvature: Mapping[str, Tensor], prior: Tensor | None) -> tuple[Tensor, KroneckerCovariance]:
    r"""The prior's scale $\delta$, [S], and $(\delta^{-1/2} K \delta^{-1/2} + c I)^{-1}$ for the Kronecker-factored curvature K.

    Without a prior it is the g-prior (Antorán et al. 2023, section 5): $\delta$ is the diagonal of K, so that the data move all
    weights alike in units of the prior and weights before a normalization may have any size.
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
    return found, KroneckerCovariance(subset, whitened, torch.ones_like(found)).keep_eigenvectors()


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
        iteration: Iterations that are done.
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
    application to linearised Laplace"). The paper descends by minibatches with Nesterov's momentum. Here conjugate gradients
    solve the same equations, preconditioned by Kronecker factors, without a learning rate. Products $J_n v$ and $J_n^\top v$
    take two passes of the network each, for all draws of a group at once, and no Jacobian is formed.

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
        advance: Called after each pass.
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

    def __post_init__(self) -> None:
        self.root = self.prior.rsqrt()
        self._data: DataTerm | None = None

    @property
    def likelihood(self) -> Likelihood:
        """p(y | outputs)."""
        return self.pieces.loss.likelihood

    def start(self, first: int, count: int) -> Group:
        """The equations of some draws, from zero: the first iteration goes along the solution under the preconditioner."""
        target = math.sqrt(self.factor) * self.prior_noise(first, count) + self._data_noise(first, count)
        return Group(target, torch.zeros_like(target), target.clone(), self.precondition(target))

    def restart(self, group: Group) -> Group:
        """The same under another prior precision, from the present solution."""
        group.residual = group.target - self.product(group.solution)
        group.direction, group.iteration = self.precondition(group.residual), 0
        return group

    def solve(self, group: Group, most: int, tolerance: float, after: Callable[[], None] | None = None) -> float:
        """Conjugate gradients for each equation, up to some iterations: the largest relative residual that is left."""
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

    def precondition(self, vectors: Tensor) -> Tensor:
        """Products with the preconditioner under the present noise."""
        return self.preconditioner.rescaled(self.factor / self.noise_ratio).times(vectors) / self.noise_ratio

    def product(self, vectors: Tensor) -> Tensor:
        r"""$(\delta^{-1/2} H \delta^{-1/2} + c I) v$ for vectors [g, S], in a pass over the data."""
        along = self.subset.spread(self.root * vectors)

        def vectors_at(outputs: Callable[[], Tensor], piece: Batch, inputs: Inputs) -> tuple[Tensor, Tensor]:
            found, changes = self.pieces.jacobians.push(*inputs, along)
            return found, self._hessian(found, piece).times(changes)

        return self._pulled(vectors_at, len(vectors)).add_(vectors, alpha=self.factor)

    def _data_noise(self, first: int, count: int) -> Tensor:
        r"""$\delta^{-1/2} \sum_n J_n^\top H_n \epsilon_n$ for some draws, [g, S], in a pass over the data."""
        generator = torch.Generator(self.prior.device).manual_seed(2_000_003 * self.seed + 2 * first + 1)

        def vectors_at(outputs: Callable[[], Tensor], piece: Batch, inputs: Inputs) -> tuple[Tensor, Tensor]:
            found = outputs()
            return found, self._hessian(found, piece).noise(count, generator)

        return self._pulled(vectors_at, count)

    def mode_target(self, mean: Tensor) -> Tensor:
        r"""$\delta^{-1/2} (H w^* - \nabla \ell)$, [1, S], the right side of the equation for the mode of the linearized model."""
        along = self.subset.spread(mean.unsqueeze(0))
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
        """Standard normal numbers, [g, S], the same each time."""
        generator = torch.Generator(self.prior.device).manual_seed(2_000_003 * self.seed + 2 * first)
        shape = (count, len(self.prior))
        return torch.randn(shape, generator=generator, dtype=self.prior.dtype, device=self.prior.device)

    def _pulled(
        self, vectors_at: Callable[[Callable[[], Tensor], Batch, Inputs], tuple[Tensor, Tensor]], count: int
    ) -> Tensor:
        r"""$\delta^{-1/2} \sum_n J_n^\top v_n$, [g, S], for vectors that a function gives with the outputs of each piece.

        Raises:
            ValueError: If the loader gives other examples in each pass.
        """
        total, data = self.prior.new_zeros(count, len(self.prior)), DataTerm()
        jacobians = self.pieces.jacobians
        for piece, inputs in self.pieces.read(data, self._rows):
            outputs, vectors = vectors_at(functools.partial(jacobians.run, *inputs), piece, inputs)
            pulled = self.subset.gather(jacobians.pull(*inputs, vectors))
            total.addcmul_(self.root, pulled.to(total))
            data.add(self.likelihood, outputs, piece)
        self.pieces.close(data)
        known = self._data = self._data or data
        tolerance = 1e-3 * (abs(known.log_likelihood) + known.total_weight)
        if data.num_data != known.num_data or abs(data.log_likelihood - known.log_likelihood) > tolerance:
            raise ValueError(
                "Laplace.fit: the loader gives other examples in each pass (random changes of the inputs, or drop_last=True with "
                "shuffle=True); covariance='sampled' needs the same ones, so give a loader without these"
            )
        if self.advance is not None:
            self.advance()
        return total

    def _rows(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> int:
        """Examples whose activations and their changes fit into the budget."""
        held = (4 * self.at_once + 2) * self.pieces.jacobians.cost(args, kwargs).activations
        return max(1, int(self.pieces.memory // held))

    def set_noise(self, variance: float) -> float:
        """Use another variance of a Gaussian noise: the ratio of the former one to it."""
        assert isinstance(self.likelihood, Gaussian)
        ratio = float(self.likelihood.noise.detach()) / variance
        self.likelihood.set_noise(variance)
        self.noise_ratio *= ratio
        self._data = None  # its log-likelihood is that of the former noise
        return ratio


def find_factor(
    equations: Equations, mean: Tensor, num_outputs: float, iterations: int, tolerance: float, *, finds_noise: bool
) -> float:
    r"""Leave the equations at the prior precision, and the Gaussian noise, of the largest evidence of the linearized model.

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
    most = min(len(mean), num_outputs)
    norm = float((equations.prior.double() * mean.double().square()).sum())
    equations.factor = most / max(norm, 1e-12)
    group, gamma = equations.start(0, equations.at_once), most
    mode = equations.mode_target(mean)
    added = {
        "target": mode,
        "solution": torch.zeros_like(mode),
        "residual": mode,
        "direction": equations.precondition(mode),
    }
    for key, row in added.items():
        setattr(group, key, torch.cat([getattr(group, key), row]))
    noise = equations.prior_noise(0, equations.at_once)
    before: tuple[float, float] | None = None
    for _ in range(NUM_EVIDENCE_STEPS):
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
        equations.factor = factor
        if change < MIN_EVIDENCE_CHANGE:
            break
        equations.restart(group)
    return gamma


def _fixed_point(before: tuple[float, float] | None, now: tuple[float, float]) -> float:
    """Where x = g(x), by the secant through the last two pairs (x, g(x)), at most a factor of a hundred away."""
    x, g = now
    slope = 0.0 if before is None or before[0] == x else (g - before[1]) / (x - before[0])
    return x + min(max((g - x) / (1 - min(max(slope, -1.0), 0.9)), -4.6), 4.6)


class DrawSolver:
    """Draws of the solutions of `Equations`, group after group.

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
        """All draws that are missing."""
        equations, options = self._equations, self._options
        while self._done < options.num_draws:
            count = min(equations.at_once, options.num_draws - self._done)
            group = self._group = self._group or equations.start(self._done, count)
            left = equations.solve(group, options.iterations, options.tolerance, self._write)
            self.residual = max(self.residual, left)
            self.draws[self._done : self._done + count] = equations.root * group.solution
            self._done, self._group = self._done + count, None
            self._write(always=True)
        return SampledCovariance(equations.subset, self.draws, equations.prior, equations.factor)

    def _write(self, *, always: bool = False) -> None:
        """Keep the draws so far, at most every `MIN_SECONDS_BETWEEN_WRITES`."""
        if self._checkpoint is None or not (always or time.monotonic() - self._written > MIN_SECONDS_BETWEEN_WRITES):
            return
        facts, tensors = {"done": self._done, "residual": self.residual}, {"draws": self.draws[: self._done]}
        if self._group is not None:
            facts["iteration"] = self._group.iteration
            tensors |= prefixed(group={key: value for key, value in vars(self._group).items() if key != "iteration"})
        self._checkpoint(facts, tensors)
        self._written = time.monotonic()

    def continue_from(self, facts: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
        """Take over what a checkpoint has."""
        self._done, self.residual = facts["done"], facts["residual"]
        self.draws[: self._done] = tensors["draws"].to(self.draws)
        group = {key: value.to(self.draws) for key, value in below("group", tensors).items()}
        self._group = Group(**group, iteration=facts["iteration"]) if group else None


def _dot(left: Tensor, right: Tensor) -> Tensor:
    """Inner products of rows, [g, 1], without a copy of them."""
    return (left.unsqueeze(1) @ right.unsqueeze(2)).squeeze(2)
