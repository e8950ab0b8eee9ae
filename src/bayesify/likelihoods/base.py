"""The base classes of likelihoods: distributions of targets given a network's outputs."""

import inspect
import math
from abc import abstractmethod
from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from bayesify.arguments.checks import checked, refuse
from bayesify.maths.constraints import positive, raw_positive
from bayesify.maths.gamma import as_float
from bayesify.maths.value_checks import should_check
from bayesify.predictive.base import Outputs, Predictive, with_column
from bayesify.predictive.families.base import Family
from bayesify.predictive.gaussian import Link, OutputGaussian
from bayesify.predictive.regression import RegressionPredictive


class Likelihood(nn.Module):
    """p(y | f): the distribution of targets given a network's outputs f.

    A subclass defines `check_values`, `log_density`, `predictive` and `fisher`, and also `target_shape` if the shape of
    targets differs from the shape of outputs. Likelihoods of numeric targets derive from `NumberLikelihood`.
    """

    name: ClassVar[str]
    task: ClassVar[str]
    """`"regression"` or `"classification"`."""
    outputs_per_target: int = 1
    """Number of outputs that the network needs per target (per class, if targets are classes)."""
    no_curvature: str | None = None
    """The reason why there is no Fisher matrix, and what to use instead; `None` if there is a Fisher matrix."""

    def config(self) -> dict[str, Any]:
        """The likelihood as plain data: its name and its arguments."""
        arguments = inspect.signature(type(self)).parameters.values()
        named = [argument.name for argument in arguments if argument.kind is argument.POSITIONAL_OR_KEYWORD]
        return {"name": self.name, **{key: getattr(self, f"_{key}") for key in named}}

    @checked
    def log_prob(self, outputs: Tensor, y: Tensor, *, has_draws: bool | None = None) -> Tensor:
        """Log-density or log-probability of each example, summed over its outputs or positions.

        Args:
            outputs: The network's outputs, [B, ...], or [S, B, ...] with an axis of draws.
            y: Targets of B examples; see the class.
            has_draws: Whether outputs have an axis of draws. By default this is inferred from the shapes.

        Returns:
            Values in nats, [B] or [S, B].

        Raises:
            ValueError: If targets do not fit the outputs, are not finite, or are not valid labels.
        """
        return self._per_example(self.log_density, outputs, y, has_draws)

    def objective(self, outputs: Tensor, y: Tensor, *, has_draws: bool | None = None) -> Tensor:
        """The quantity that training maximizes for each example, [B] or [S, B]. By default it is `log_prob`."""
        return self._per_example(self.training_density, outputs, y, has_draws)

    def training_density(self, outputs: Tensor, y: Tensor) -> Tensor:
        """Terms whose sum is `objective`. There is one term per entry, as in `log_density`."""
        return self.log_density(outputs, y)

    def held_out_score(self, outputs: Tensor, y: Tensor) -> Tensor:
        """Score of held-out rows for early stopping. There is one number per entry, as in `log_density`. Higher is better."""
        return self.log_density(outputs, y)

    def _per_example(
        self, function: Callable[[Tensor, Tensor], Tensor], outputs: Tensor, y: Tensor, has_draws: bool | None
    ) -> Tensor:
        outputs = as_float(outputs)
        y, has_draws = self._fit_targets(outputs, y, has_draws)
        batched = outputs if has_draws else outputs.unsqueeze(0)
        if should_check(y):
            self.check_values(batched, y)
        density = function(batched, y)
        per_example = density.flatten(2).sum(-1) if density.ndim > 2 else density
        return per_example if has_draws else per_example[0]

    def _fit_targets(self, outputs: Tensor, y: Tensor, has_draws: bool | None) -> tuple[Tensor, bool]:
        """The targets, reshaped without broadcasting to fit the outputs of one draw, and whether outputs have a draw axis."""
        for draws in (False, True) if has_draws is None else (has_draws,):
            if outputs.ndim < self.least_dims + draws and (draws or has_draws):
                continue
            found = with_column(y, self.target_shape(outputs[0] if draws else outputs))
            if found is not None:
                return found, draws
        given = tuple(outputs.shape[1:] if has_draws else outputs.shape)  # the shape that the network returned
        raise ValueError(
            f"likelihoods.{type(self).__name__}: targets of shape {tuple(y.shape)} do not fit outputs of shape {given}; "
            f"{self.shape_remedy}"
        )

    integrates_gaussians: ClassVar[bool] = False
    """Whether `closed_form` integrates over Gaussian outputs without draws."""
    remedy: ClassVar[str] = ", such as likelihoods.Categorical() for classes or likelihoods.Gaussian() for numbers,"
    shape_remedy: ClassVar[str] = "give targets in the outputs' shape"
    least_dims: ClassVar[int] = 1  # smallest number of axes of a batch's outputs, including the axis of examples

    def target_shape(self, outputs: Tensor) -> tuple[int, ...]:
        """Shape of the targets that fit outputs [B, ...] of one draw."""
        return tuple(outputs.shape)

    @abstractmethod
    def check_values(self, outputs: Tensor, y: Tensor) -> None:
        """Raise `ValueError` if a target is impossible for the outputs [S, B, ...]."""

    @abstractmethod
    def log_density(self, outputs: Tensor, y: Tensor) -> Tensor:
        """Log-density of each entry of y given outputs [S, B, ...]: [S, *y.shape]."""

    @abstractmethod
    def predictive(self, outputs: Outputs) -> Predictive:
        """The predictive distribution from the outputs of each draw."""

    @abstractmethod
    def closed_form(self, outputs: OutputGaussian, link: Link = "mc") -> Predictive:
        """The predictive for a Gaussian over outputs. Likelihoods of classes use a link; see `GaussianClassPredictive`."""

    def logit_axis(self, ndim: int) -> int | None:
        """Axis of the classes in outputs [B, ...] with `ndim` axes, counted from the end; `None` if there is no such axis."""
        return None

    @abstractmethod
    def fisher(self, outputs: Tensor) -> Tensor:
        """The expected Hessian of `-log p(y | f)` with respect to outputs [..., O], where y is drawn from p(y | f).

        Returns:
            The Fisher matrices, [..., O, O], which are positive semidefinite.
        """

    def fisher_factor(self, outputs: Tensor, y: Tensor | None = None) -> Tensor:
        r"""Vectors $r_k$ whose outer products $\sum_k r_k r_k^\top$ are the Fisher matrix of an example's outputs.

        Args:
            outputs: Outputs of one draw, [B, ...].
            y: Targets, which are needed only if some of them mean "no label here".

        Returns:
            K vectors with the shape of the outputs, [K, B, ...]. K is the number of entries of an example's outputs.
        """
        wide = as_float(outputs) if outputs.ndim > 1 else as_float(outputs).unsqueeze(-1)
        return spread_factor(self._factor(wide)).reshape(-1, *outputs.shape)

    def fisher_parts(self, outputs: Tensor, y: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        r"""The Fisher matrix of an example's outputs as $\operatorname{diag}(h) - q q^\top$, with one q per group of classes.

        Args:
            outputs: Outputs of one draw, [B, ...].
            y: Targets, which are needed only if some of them mean "no label here".

        Returns:
            The tensors h and q, with the shape of the outputs. By default the matrix is diagonal, and q is `None`.
        """
        wide = as_float(outputs) if outputs.ndim > 1 else as_float(outputs).unsqueeze(-1)
        return self.fisher(wide).diagonal(dim1=-2, dim2=-1).reshape(outputs.shape), None

    def fisher_samples(
        self, outputs: Tensor, count: int, y: Tensor | None = None, *, generator: torch.Generator | None = None
    ) -> Tensor:
        r"""Random vectors, [K, B, ...], whose outer products add up, in expectation, to the Fisher matrix of an example.

        Each vector is a sum of the vectors of `fisher_factor` with random signs, divided by $\sqrt K$. If
        `fisher_factor` has at most `count` vectors, they are returned unchanged.
        """
        factor = self.fisher_factor(outputs, y)
        if len(factor) <= count:
            return factor
        signs = random_signs((count, *factor.shape[:2]), factor, generator)
        return torch.einsum("kfb,fb...->kb...", signs, factor) / math.sqrt(count)

    def _factor(self, outputs: Tensor) -> Tensor:
        """Rows [..., K, O] whose outer products add up to `fisher`, which is assumed to be diagonal."""
        return self.fisher(outputs).sqrt()


class NumberLikelihood(Likelihood):
    r"""Likelihood of numeric targets that share one family of distributions: $p(y | f) = \prod_o p(y_o; \theta_o(f))$.

    The network's last axis holds `outputs_per_target` blocks of O outputs. The first block holds locations. Targets are
    [B, ..., O]; the last axis may be missing if O = 1. A subclass defines `split` and `parts`, and stores its own
    parameters with `_store`.
    """

    task = "regression"
    shape_remedy = "give targets in the outputs' shape, or use likelihoods.Categorical() for class labels"
    parts: str = "a mean"
    """Description of the outputs of one target, as text."""
    family: Family
    """The distribution of one number."""
    _beta: float = 0.0

    def __init__(self) -> None:
        super().__init__()
        self._given: dict[str, Any] = {}

    @staticmethod
    @abstractmethod
    def split(outputs: Tensor, **numbers: Tensor) -> tuple[Tensor, ...]:
        """The parameters of the family, [..., O] each, computed from the outputs and the likelihood's own parameters."""

    def numbers(self) -> dict[str, Tensor]:
        """The likelihood's own parameters, which `split` takes."""
        return {}

    def components(self, outputs: Tensor) -> tuple[Tensor, ...]:
        """The parameters of the family, [..., O] each, computed from outputs [..., K O]."""
        return type(self).split(as_float(outputs), **self.numbers())

    def target_shape(self, outputs: Tensor) -> tuple[int, ...]:
        each, found = self.outputs_per_target, outputs.shape[-1]
        if found % each:
            raise ValueError(
                f"likelihoods.{type(self).__name__}: the network has {found} outputs, but needs {self.parts} for "
                f"each target; give its last layer a multiple of {each} outputs"
            )
        for name in self._given:
            raw = getattr(self, f"raw_{name}")
            if raw.ndim and raw.shape[0] != found // each:
                raise ValueError(
                    f"likelihoods.{type(self).__name__}: there are {raw.shape[0]} values of {name}, but "
                    f"{found // each} outputs; give one value per output, or a single number"
                )
        return (*outputs.shape[:-1], found // each) if each > 1 else tuple(outputs.shape)

    def check_values(self, outputs: Tensor, y: Tensor) -> None:
        self.family.check_targets(y)

    def log_density(self, outputs: Tensor, y: Tensor) -> Tensor:
        return self.family.log_density(y, *self.components(outputs))

    def training_density(self, outputs: Tensor, y: Tensor) -> Tensor:
        """The log-density. If the network predicts the spread, the gradients are weighted; see `HeteroscedasticGaussian`."""
        location, *rest = self.components(outputs)
        density = self.family.log_density(y, location, *rest)
        if not self._beta or self.outputs_per_target == 1:
            return density
        shared, fixed = self._stored("noise").to(location), density.detach()
        weight = ((rest[0] / shared) ** self._beta).detach()
        beside = self.family.log_density(y, location.detach(), shared, *(part.detach() for part in rest[1:]))
        # The values of the density, with weighted gradients, and with the gradient of the shared variance.
        return fixed + weight * (density - fixed) + (beside - beside.detach())

    def predictive(self, outputs: Outputs) -> RegressionPredictive:
        numbers = {name: value.detach().clone() for name, value in self.numbers().items()}
        return RegressionPredictive(outputs, partial(_split, type(self).split, numbers), self.family)

    def closed_form(self, outputs: OutputGaussian, link: Link = "mc") -> RegressionPredictive:
        """A mixture over draws from the Gaussian over outputs, because no closed form is known."""
        return self.predictive(Outputs(kept=outputs.draws))

    def _store(self, name: str, given: Any, learn: bool) -> float | list[float]:
        """Store a positive number, or a list with one per target, as its inverse softplus in `raw_<name>`, and return it."""
        owner = f"likelihoods.{type(self).__name__}"
        if isinstance(given, Tensor) and given.ndim > 1:
            raise refuse(owner, name, given, "a number, or one per output")
        values: Any = given.tolist() if isinstance(given, Tensor) else given
        single = isinstance(values, (int, float))
        flat = [float(value) for value in ([values] if single else values)]
        if not flat or not all(0 < value < math.inf for value in flat):
            raise ValueError(f"{owner}: {name}={given}; give a positive number, or one per output")
        plain = self._given[name] = flat[0] if single else flat
        raw = _raw(plain)
        if learn:
            self.register_parameter(f"raw_{name}", nn.Parameter(raw))
        else:
            self.register_buffer(f"raw_{name}", raw)
        return plain

    def _stored(self, name: str) -> Tensor:
        return positive(getattr(self, f"raw_{name}"))

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        """Convert the tensors. Conversion to float64 restores the initial value of an unchanged parameter without rounding."""
        exact = {}
        for name, given in self._given.items():
            raw, wanted = getattr(self, f"raw_{name}"), _raw(given, torch.float64)
            if raw.dtype == torch.float32 and torch.equal(raw.detach().cpu(), wanted.float()):
                exact[f"raw_{name}"] = wanted
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        for name, wanted in exact.items():
            if (raw := getattr(self, name)).dtype == torch.float64:
                with torch.no_grad():
                    raw.copy_(wanted)
        return self


def _raw(plain: float | list[float], dtype: torch.dtype | None = None) -> Tensor:
    raw = [raw_positive(value) for value in plain] if isinstance(plain, list) else raw_positive(plain)
    return torch.tensor(raw, dtype=dtype)


def _split(split: Callable[..., tuple[Tensor, ...]], numbers: dict[str, Tensor], outputs: Tensor) -> tuple[Tensor, ...]:
    return split(as_float(outputs), **numbers)


def spread_factor(factor: Tensor) -> Tensor:
    """Extend each vector of one position to all outputs of the example by zeros: [B, *T, K, O] -> [prod(T) K, B, *T, O]."""
    batch, places, (count, size) = factor.shape[0], factor.shape[1:-2], factor.shape[-2:]
    flat = factor.reshape(batch, -1, count, size)
    positions = flat.shape[1]
    if positions == 1:
        return flat[:, 0].movedim(1, 0).reshape(count, batch, *places, size)
    spread = flat.new_zeros(positions, count, batch, positions, size)
    index = torch.arange(positions, device=flat.device)
    spread[index, :, :, index] = flat.permute(1, 2, 0, 3)
    return spread.reshape(positions * count, batch, *places, size)


def random_signs(shape: tuple[int, ...], like: Tensor, generator: torch.Generator | None) -> Tensor:
    """Random signs: -1 or 1 with equal probability."""
    return torch.randint(2, shape, generator=generator, device=like.device).to(like).mul_(2).sub_(1)
