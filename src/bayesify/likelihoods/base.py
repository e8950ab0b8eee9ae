"""What every likelihood is: the distribution of targets given a network's outputs."""

from __future__ import annotations

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

    A subclass writes `check_values`, `log_density`, `predictive` and `fisher`, and `target_shape` if targets do not have the
    outputs' shape; one of numbers derives from `NumberLikelihood`.
    """

    name: ClassVar[str]
    task: ClassVar[str]
    """`"regression"` or `"classification"`."""
    outputs_per_target: int = 1
    """Outputs that the network needs for each target (for each class, where targets are classes)."""
    no_curvature: str | None = None
    """Why there is no Fisher matrix, and what to use; `None` where there is one."""

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
            has_draws: Whether outputs carry an axis of draws; told by the shapes by default.

        Returns:
            [B] or [S, B], in nats.

        Raises:
            ValueError: If targets do not fit the outputs, are not finite, or are not valid labels.
        """
        return self._per_example(self.log_density, outputs, y, has_draws)

    def objective(self, outputs: Tensor, y: Tensor, *, has_draws: bool | None = None) -> Tensor:
        """What training maximizes for each example, [B] or [S, B]: `log_prob`, where the class does not say otherwise."""
        return self._per_example(self.training_density, outputs, y, has_draws)

    def training_density(self, outputs: Tensor, y: Tensor) -> Tensor:
        """The summands of `objective`, entry by entry as in `log_density`."""
        return self.log_density(outputs, y)

    def held_out_score(self, outputs: Tensor, y: Tensor) -> Tensor:
        """By what a training stops that watches rows it does not see, entry by entry as in `log_density`; more is better."""
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
        """Targets in the shape of one draw's targets, and whether outputs carry draws. Nothing is broadcast."""
        for draws in (False, True) if has_draws is None else (has_draws,):
            if outputs.ndim < self.least_dims + draws and (draws or has_draws):
                continue
            found = with_column(y, self.target_shape(outputs[0] if draws else outputs))
            if found is not None:
                return found, draws
        raise ValueError(
            f"likelihoods.{type(self).__name__}: targets of shape {tuple(y.shape)} do not fit outputs of shape "
            f"{tuple(outputs.shape)}; {self.shape_remedy}"
        )

    integrates_gaussians: ClassVar[bool] = False
    """Whether `closed_form` has the integral over a Gaussian of outputs in closed form, without draws."""
    remedy: ClassVar[str] = ", such as likelihoods.Categorical(),"
    shape_remedy: ClassVar[str] = "give targets in the outputs' shape"
    least_dims: ClassVar[int] = 1  # axes that the outputs of a batch have at least, examples included

    def target_shape(self, outputs: Tensor) -> tuple[int, ...]:
        """Shape of the targets that fit outputs [B, ...] of one draw."""
        return tuple(outputs.shape)

    @abstractmethod
    def check_values(self, outputs: Tensor, y: Tensor) -> None:
        """Raise `ValueError` for targets that are not possible values under outputs [S, B, ...]."""

    @abstractmethod
    def log_density(self, outputs: Tensor, y: Tensor) -> Tensor:
        """Log-density of each entry of y under outputs [S, B, ...]: [S, *y.shape]."""

    @abstractmethod
    def predictive(self, outputs: Outputs) -> Predictive:
        """The predictive distribution from the outputs of each draw."""

    @abstractmethod
    def closed_form(self, outputs: OutputGaussian, link: Link = "mc") -> Predictive:
        """The predictive distribution of a Gaussian over outputs; of classes by a link, see `GaussianClassPredictive`."""

    def logit_axis(self, ndim: int) -> int | None:
        """Axis of the classes in outputs [B, ...] of `ndim` axes, counted from the end, where one holds them."""
        return None

    @abstractmethod
    def fisher(self, outputs: Tensor) -> Tensor:
        """Hessian of `-log p(y | f)` by the outputs, in expectation over y under the model: never indefinite.

        Args:
            outputs: [..., O].

        Returns:
            [..., O, O].
        """

    def fisher_factor(self, outputs: Tensor, y: Tensor | None = None) -> Tensor:
        r"""Vectors $r_k$ with $\sum_k r_k r_k^\top$ the Fisher matrix of an example's outputs.

        Args:
            outputs: [B, ...], of one draw.
            y: Targets, where some of them stand for "no label here".

        Returns:
            [K, B, ...]: K vectors in the shape of the outputs, one for each entry of an example's outputs.
        """
        wide = as_float(outputs) if outputs.ndim > 1 else as_float(outputs).unsqueeze(-1)
        return spread_factor(self._factor(wide)).reshape(-1, *outputs.shape)

    def fisher_parts(self, outputs: Tensor, y: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        r"""The Fisher matrix of an example's outputs as $\operatorname{diag}(h) - q q^\top$, the product for each group of classes.

        Args:
            outputs: [B, ...], of one draw.
            y: Targets, where some of them stand for "no label here".

        Returns:
            h and q, in the shape of the outputs; no q where the matrix is diagonal, as it is here.
        """
        wide = as_float(outputs) if outputs.ndim > 1 else as_float(outputs).unsqueeze(-1)
        return self.fisher(wide).diagonal(dim1=-2, dim2=-1).reshape(outputs.shape), None

    def fisher_samples(
        self, outputs: Tensor, count: int, y: Tensor | None = None, *, generator: torch.Generator | None = None
    ) -> Tensor:
        r"""A few random vectors with $\mathbb{E} \sum_k r_k r_k^\top$ the Fisher matrix of an example's outputs: [K, B, ...].

        Sums of the vectors of `fisher_factor` with random signs, over $\sqrt K$; those vectors themselves where they are
        no more than `count`.
        """
        factor = self.fisher_factor(outputs, y)
        if len(factor) <= count:
            return factor
        signs = random_signs((count, *factor.shape[:2]), factor, generator)
        return torch.einsum("kfb,fb...->kb...", signs, factor) / math.sqrt(count)

    def _factor(self, outputs: Tensor) -> Tensor:
        """Rows whose products add up to `fisher`, [..., K, O]; here for a diagonal one."""
        return self.fisher(outputs).sqrt()


class NumberLikelihood(Likelihood):
    r"""Targets that are numbers, each with a distribution of one family: $p(y | f) = \prod_o p(y_o; \theta_o(f))$.

    The network's last axis holds `outputs_per_target` blocks of O outputs, the first of them locations. Targets are [B, ..., O]; a
    single column may be missing. A subclass writes `split`, says `parts` and stores its own numbers by `_store`.
    """

    task = "regression"
    parts: str = "a mean"
    """What the outputs of one target are, in words."""
    family: Family
    """The distribution of one number."""

    def __init__(self) -> None:
        super().__init__()
        self._given: dict[str, Any] = {}

    @staticmethod
    @abstractmethod
    def split(outputs: Tensor, **numbers: Tensor) -> tuple[Tensor, ...]:
        """The family's parameters, [..., O] each, from outputs and the likelihood's own numbers."""

    def numbers(self) -> dict[str, Tensor]:
        """The likelihood's own numbers that `split` takes."""
        return {}

    def components(self, outputs: Tensor) -> tuple[Tensor, ...]:
        """The family's parameters, [..., O] each, from outputs [..., K O]."""
        return type(self).split(as_float(outputs), **self.numbers())

    def target_shape(self, outputs: Tensor) -> tuple[int, ...]:
        """The outputs' shape, with one entry of the last axis for each target."""
        each, found = self.outputs_per_target, outputs.shape[-1]
        if found % each:
            raise ValueError(
                f"likelihoods.{type(self).__name__}: {found} outputs; the network's last layer needs {self.parts} for each "
                f"target, a multiple of {each}"
            )
        for name in self._given:
            raw = getattr(self, f"raw_{name}")
            if raw.ndim and raw.shape[0] != found // each:
                raise ValueError(
                    f"likelihoods.{type(self).__name__}: {raw.shape[0]} values of {name} for {found // each} outputs; give one "
                    "per output, or a single number"
                )
        return (*outputs.shape[:-1], found // each) if each > 1 else tuple(outputs.shape)

    def check_values(self, outputs: Tensor, y: Tensor) -> None:
        """Targets must be values that the family has."""
        self.family.check_targets(y)

    def log_density(self, outputs: Tensor, y: Tensor) -> Tensor:
        """Log-density, or log-probability, of each entry."""
        return self.family.log_density(y, *self.components(outputs))

    def predictive(self, outputs: Outputs) -> RegressionPredictive:
        """A mixture over draws of the family's distributions."""
        numbers = {name: value.detach().clone() for name, value in self.numbers().items()}
        return RegressionPredictive(outputs, partial(_split, type(self).split, numbers), self.family)

    def closed_form(self, outputs: OutputGaussian, link: Link = "mc") -> RegressionPredictive:
        """No closed form is known here: a mixture over draws from the Gaussian over outputs."""
        return self.predictive(Outputs(kept=outputs.draws))

    def _store(self, name: str, given: Any, learn: bool) -> float | list[float]:
        """Keep a positive number, or one per target, as `raw_<name>` through softplus; returns it as plain data."""
        if isinstance(given, Tensor) and given.ndim > 1:
            raise refuse(f"likelihoods.{type(self).__name__}", name, given, "a number, or one per output")
        values = given.tolist() if isinstance(given, Tensor) else given
        flat = [float(values)] if isinstance(values, (int, float)) else [float(value) for value in values]
        if not flat or not all(0 < value < math.inf for value in flat):
            raise ValueError(
                f"likelihoods.{type(self).__name__}: {name}={given}; give at least one, each a positive number"
            )
        plain: float | list[float] = float(values) if isinstance(values, (int, float)) else flat
        self._given[name] = plain
        raw = torch.tensor([raw_positive(value) for value in flat])
        raw = raw if isinstance(plain, list) else raw[0]
        if learn:
            self.register_parameter(f"raw_{name}", nn.Parameter(raw))
        else:
            self.register_buffer(f"raw_{name}", raw)
        return plain

    def _stored(self, name: str) -> Tensor:
        return positive(getattr(self, f"raw_{name}"))

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        """Convert; a number that nobody has changed since it was given has all digits in double precision."""
        exact = {}
        for name, given in self._given.items():
            raw = getattr(self, f"raw_{name}")
            values = given if isinstance(given, list) else [given]
            wanted = torch.tensor([raw_positive(value) for value in values], dtype=torch.float64).reshape(raw.shape)
            if raw.dtype == torch.float32 and torch.equal(raw.detach().cpu(), wanted.float()):
                exact[name] = wanted
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        for name, wanted in exact.items():
            raw = getattr(self, f"raw_{name}")
            if raw.dtype == torch.float64:
                with torch.no_grad():
                    raw.copy_(wanted)
        return self


def _split(split: Callable[..., tuple[Tensor, ...]], numbers: dict[str, Tensor], outputs: Tensor) -> tuple[Tensor, ...]:
    return split(as_float(outputs), **numbers)


def reweighted(density: Tensor, weight: Tensor, beside: Tensor) -> Tensor:
    """A log-density with its own values, but with its gradients times a weight and those of another one beside them."""
    fixed = density.detach()
    return fixed + weight.detach() * (density - fixed) + (beside - beside.detach())


def spread_factor(factor: Tensor) -> Tensor:
    """Vectors over all outputs of an example from vectors at each of its positions: [B, *T, K, O] -> [prod(T) K, B, *T, O]."""
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
    """-1 and 1 with equal probability."""
    return torch.randint(2, shape, generator=generator, device=like.device).to(like).mul_(2).sub_(1)
