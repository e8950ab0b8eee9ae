"""Likelihoods: how targets follow from a network's outputs."""

from __future__ import annotations

import inspect
import math
from abc import abstractmethod
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bayesify.arguments.checks import Axis, Index, Positive, checked
from bayesify.maths.constraints import positive, raw_positive
from bayesify.maths.value_checks import should_check
from bayesify.predictive.base import Outputs, Predictive, check_finite
from bayesify.predictive.classification import ClassificationPredictive
from bayesify.predictive.gaussian import GaussianClassPredictive, GaussianRegressionPredictive, Link, OutputGaussian
from bayesify.predictive.regression import RegressionPredictive, gaussian_log_density, with_variance


class Likelihood(nn.Module):
    """p(y | f): the distribution of targets given a network's outputs f.

    A subclass writes `check_values`, `log_density`, `predictive` and `fisher`, and `target_shape` if targets do not have the
    outputs' shape.
    """

    name: ClassVar[str]
    task: ClassVar[str]
    """`"regression"` or `"classification"`."""

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
        outputs = as_float(outputs)
        y, has_draws = self._fit_targets(outputs, y, has_draws)
        batched = outputs if has_draws else outputs.unsqueeze(0)
        if should_check(y):
            self.check_values(batched, y)
        density = self.log_density(batched, y)
        per_example = density.flatten(2).sum(-1) if density.ndim > 2 else density
        return per_example if has_draws else per_example[0]

    def _fit_targets(self, outputs: Tensor, y: Tensor, has_draws: bool | None) -> tuple[Tensor, bool]:
        """Targets in the shape of one draw's targets, and whether outputs carry draws. Nothing is broadcast."""
        for draws in (False, True) if has_draws is None else (has_draws,):
            if outputs.ndim < self.least_dims + draws and (draws or has_draws):
                continue
            wanted = self.target_shape(outputs[0] if draws else outputs)
            if y.shape == wanted:
                return y, draws
            if (*y.shape, 1) == wanted:  # [B] against [B, 1] would silently broadcast to [B, B]
                return y.unsqueeze(-1), draws
            if y.shape == (*wanted, 1):
                return y.squeeze(-1), draws
        raise ValueError(
            f"likelihoods.{type(self).__name__}: targets of shape {tuple(y.shape)} do not fit outputs of shape "
            f"{tuple(outputs.shape)}; {self.shape_remedy}"
        )

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
        return spread_factor(
            self._factor(as_float(outputs) if outputs.ndim > 1 else as_float(outputs).unsqueeze(-1))
        ).reshape(-1, *outputs.shape)

    def _factor(self, outputs: Tensor) -> Tensor:
        """Rows whose products add up to `fisher`, [..., K, O]; here for a diagonal one."""
        return self.fisher(outputs).sqrt()


class Gaussian(Likelihood):
    r"""Homoscedastic noise: $p(y | f) = \mathcal{N}(y; f, \text{noise})$, independent over outputs.

    Fisher: $I / \text{noise}$. Targets have the outputs' shape; a single output column may be missing on either side.
    Stored: `raw_noise` through softplus, a parameter if learned.

    Args:
        noise: Starting variance: a number is shared by all outputs, a sequence gives one per output.
        learn: Whether the variance is trained.

    Raises:
        ValueError: If a variance is not positive and finite.
    """

    name = "gaussian"
    task = "regression"

    @checked
    def __init__(self, noise: Positive | Sequence[Positive] | Tensor = 0.1, learn: bool = True) -> None:
        super().__init__()
        values = noise.tolist() if isinstance(noise, Tensor) else noise
        flat = [float(values)] if isinstance(values, (int, float)) else [float(value) for value in values]
        if not flat or not all(0 < value < math.inf for value in flat):
            raise ValueError(f"likelihoods.Gaussian: noise={noise}; give at least one variance, each a positive number")
        self._noise: Any = float(values) if isinstance(values, (int, float)) else flat
        self._learn = learn
        raw = torch.tensor([raw_positive(value) for value in flat])
        raw = raw[0] if isinstance(values, (int, float)) else raw
        self.raw_noise: Tensor
        if learn:
            self.raw_noise = nn.Parameter(raw)
        else:
            self.register_buffer("raw_noise", raw)

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        """Convert; a variance that nobody has changed since it was given has all digits in double precision."""
        given = self._noise if isinstance(self._noise, list) else [self._noise]
        exact = torch.tensor([raw_positive(value) for value in given], dtype=torch.float64).reshape(
            self.raw_noise.shape
        )
        untouched = self.raw_noise.dtype == torch.float32 and torch.equal(self.raw_noise.detach().cpu(), exact.float())
        super()._apply(fn, recurse)
        if untouched and self.raw_noise.dtype == torch.float64:
            with torch.no_grad():
                self.raw_noise.copy_(exact)
        return self

    @property
    def noise(self) -> Tensor:
        """Noise variance: a scalar, or [O]."""
        return positive(self.raw_noise)

    def target_shape(self, outputs: Tensor) -> tuple[int, ...]:
        """The outputs' shape."""
        if self.raw_noise.ndim and self.raw_noise.shape[0] != outputs.shape[-1]:
            raise ValueError(
                f"likelihoods.Gaussian: {self.raw_noise.shape[0]} noise variances for {outputs.shape[-1]} outputs; "
                "give one per output, or a single number"
            )
        return tuple(outputs.shape)

    def check_values(self, outputs: Tensor, y: Tensor) -> None:
        """Targets must be finite."""
        check_finite(y, "targets")

    def log_density(self, outputs: Tensor, y: Tensor) -> Tensor:
        """Gaussian log-density of each entry."""
        return gaussian_log_density(y, outputs, self.noise.to(outputs))

    def predictive(self, outputs: Outputs) -> RegressionPredictive:
        """A Gaussian around each draw's outputs."""
        noise = self.noise.detach().clone()
        return RegressionPredictive(outputs, partial(_around, variance=noise))

    def closed_form(self, outputs: OutputGaussian, link: Link = "mc") -> RegressionPredictive:
        """Exact: $\\mathcal{N}(y; f, C + \\text{noise})$."""
        noise = self.noise.detach().to(outputs.mean).expand(outputs.mean.shape).clone()
        return GaussianRegressionPredictive(outputs, outputs.mean, outputs.variance, noise, correlated=True)

    def fisher(self, outputs: Tensor) -> Tensor:
        """`I / noise`."""
        precision = (1 / self.noise).to(as_float(outputs)).expand(outputs.shape)
        return torch.diag_embed(precision)


class HeteroscedasticGaussian(Likelihood):
    r"""Noise that depends on the input: the network's last axis holds O means, then O log-variances.

    $p(y | f) = \mathcal{N}(y; f_{\mu}, \exp f_v)$ with $f_v$ cut to [-20, 20]. Fisher in $(\mu, f_v)$:
    $\operatorname{diag}(\exp(-f_v), 1/2)$. Targets are [B, O].
    """

    name = "heteroscedastic_gaussian"
    task = "regression"

    def target_shape(self, outputs: Tensor) -> tuple[int, ...]:
        """The outputs' shape with half the last axis."""
        if outputs.shape[-1] % 2:
            raise ValueError(
                f"likelihoods.HeteroscedasticGaussian: {outputs.shape[-1]} outputs; "
                "the network's last layer needs a mean and a log-variance for each target, an even number"
            )
        return (*outputs.shape[:-1], outputs.shape[-1] // 2)

    def check_values(self, outputs: Tensor, y: Tensor) -> None:
        """Targets must be finite."""
        check_finite(y, "targets")

    def log_density(self, outputs: Tensor, y: Tensor) -> Tensor:
        """Gaussian log-density of each entry."""
        mean, variance = self.components(outputs)
        return gaussian_log_density(y, mean, variance)

    @staticmethod
    def components(outputs: Tensor) -> tuple[Tensor, Tensor]:
        """Means and variances, each [..., O], from outputs [..., 2 O]."""
        mean, log_variance = as_float(outputs).chunk(2, dim=-1)
        return mean, log_variance.clamp(-20, 20).exp()

    def predictive(self, outputs: Outputs) -> RegressionPredictive:
        """A Gaussian per draw with that draw's own variance."""
        return RegressionPredictive(outputs, HeteroscedasticGaussian.components)

    def closed_form(self, outputs: OutputGaussian, link: Link = "mc") -> RegressionPredictive:
        r"""A Gaussian whose noise is its expectation under the Gaussian over log-variances, $\exp(f_v + C_{vv} / 2)$."""
        (mean, log_noise), (variance, spread) = outputs.mean.chunk(2, dim=-1), outputs.variance.chunk(2, dim=-1)
        noise = (log_noise.clamp(-20, 20) + 0.5 * spread).clamp_max(20).exp()
        return GaussianRegressionPredictive(outputs, mean, variance, noise, correlated=False)

    def fisher(self, outputs: Tensor) -> Tensor:
        """`diag(1 / v, 1 / 2)`."""
        _, variance = self.components(outputs)
        return torch.diag_embed(torch.cat((1 / variance, torch.full_like(variance, 0.5)), dim=-1))


class Categorical(Likelihood):
    r"""One of C classes: $p(y = c | f) = \operatorname{softmax}(f)_c$.

    Fisher: $\operatorname{diag}(p) - p p^\top$. Outputs are [B, ..., C], classes last; targets are integers [B, ...].

    Args:
        class_axis: Axis of the outputs that holds the classes, counted in one example's batch [B, ...]: -1, or 1 for images
            segmented in torch's order [B, C, H, W].
        ignore_index: A label that stands for "no label here" and adds nothing.

    Raises:
        ValueError: If `class_axis` is 0, the examples.
    """

    name = "categorical"
    task = "classification"

    @checked
    def __init__(self, class_axis: Axis = -1, ignore_index: Index = -100) -> None:
        super().__init__()
        if class_axis == 0:
            raise ValueError("likelihoods.Categorical: class_axis=0 is the examples; give the axis of the classes")
        self._class_axis, self._ignore_index = class_axis, ignore_index

    @property
    def class_axis(self) -> int:
        """Axis of the outputs that holds the classes."""
        return self._class_axis

    def _classes_last(self, outputs: Tensor) -> Tensor:
        return outputs.movedim(self._class_axis if self._class_axis < 0 else self._class_axis + 1, -1)

    shape_remedy = "give one integer label per example, or set class_axis"
    least_dims = 2

    def target_shape(self, outputs: Tensor) -> tuple[int, ...]:
        """The outputs' shape without the classes."""
        if outputs.ndim < 2:
            raise ValueError(
                f"likelihoods.Categorical: outputs of shape {tuple(outputs.shape)} have no axis of classes; "
                "give the network one output per class, or use Bernoulli"
            )
        return tuple(self._classes_last(outputs.unsqueeze(0)).shape[1:-1])

    def check_values(self, outputs: Tensor, y: Tensor) -> None:
        """Labels must be integers in 0..C-1."""
        if y.is_floating_point() or y.is_complex():
            raise ValueError(
                f"likelihoods.Categorical: targets are {y.dtype}; give integer labels (y.long()), or use Bernoulli"
            )
        classes = self._classes_last(outputs).shape[-1]
        valid = y != self._ignore_index
        if bool(((y < 0) | (y >= classes)).logical_and(valid).any()):
            wrong = y[((y < 0) | (y >= classes)) & valid][0].item()
            raise ValueError(
                f"likelihoods.Categorical: label {wrong} is out of range for {classes} outputs; "
                f"labels go from 0 to {classes - 1}"
            )

    def log_density(self, outputs: Tensor, y: Tensor) -> Tensor:
        """Log-probability of each label."""
        log_probs = F.log_softmax(self._classes_last(outputs), dim=-1)
        ignored = y == self._ignore_index
        labels = y.masked_fill(ignored, 0).long()
        inside = labels.clamp(0, log_probs.shape[-1] - 1)
        found = log_probs.gather(-1, inside.expand(log_probs.shape[:-1]).unsqueeze(-1)).squeeze(-1)
        # A label out of range that nobody looked at is NaN with its gradient, not a crash of the device.
        return found.masked_fill(ignored, 0.0) * torch.where(labels == inside, 1.0, torch.nan)

    def predictive(self, outputs: Outputs) -> ClassificationPredictive:
        """A mixture of the draws' class probabilities."""
        return ClassificationPredictive(outputs, self._log_probs(), ignore_index=self._ignore_index)

    def closed_form(self, outputs: OutputGaussian, link: Link = "mc") -> ClassificationPredictive:
        """See `GaussianClassPredictive`."""
        return GaussianClassPredictive(
            outputs, self.logit_axis(outputs.mean.ndim), link, ignore_index=self._ignore_index
        )

    def logit_axis(self, ndim: int) -> int:
        """That of the classes."""
        return self._class_axis if self._class_axis < 0 else self._class_axis - ndim

    def _log_probs(self) -> Callable[[Tensor], Tensor]:
        axis = self._class_axis if self._class_axis < 0 else self._class_axis + 1
        return partial(_class_log_probs, axis=axis)

    def fisher(self, outputs: Tensor) -> Tensor:
        """`diag(p) - p p^T` over the last axis."""
        probs = as_float(outputs).softmax(-1)
        return torch.diag_embed(probs) - probs.unsqueeze(-1) * probs.unsqueeze(-2)

    def fisher_factor(self, outputs: Tensor, y: Tensor | None = None) -> Tensor:
        r"""C - 1 vectors whose products add up to $\operatorname{diag}(p) - p p^\top$: [K, B, ...].

        With $s = \sqrt p$, a unit vector, the Fisher matrix is $\operatorname{diag}(s)\,Q Q^\top \operatorname{diag}(s)$ for an
        orthonormal basis Q of what is orthogonal to s: the columns but the first of the reflection that takes s to an axis.
        """
        last = self._classes_last(as_float(outputs).unsqueeze(0))[0]
        factor = self._factor(last)  # [B, ..., K, C]
        if y is not None:
            labels, _ = self._fit_targets(outputs, y, False)
            factor = factor * (labels != self._ignore_index)[..., None, None]
        found = spread_factor(factor)  # [K, B, ..., C]
        return found.movedim(-1, self._class_axis if self._class_axis < 0 else self._class_axis + 1)

    def _factor(self, outputs: Tensor) -> Tensor:
        root = outputs.softmax(-1).sqrt()  # [..., C], a unit vector
        normal = root.clone()
        normal[..., 0] += 1.0  # all entries of the root are positive: the sum cannot cancel
        scale = 2 / normal.square().sum(-1)
        eye = torch.eye(root.shape[-1], dtype=root.dtype, device=root.device)
        basis = eye[1:] - (scale.unsqueeze(-1) * normal[..., 1:]).unsqueeze(-1) * normal.unsqueeze(-2)
        return basis * root.unsqueeze(-2)


class Bernoulli(Likelihood):
    r"""Yes or no for each output: $p(y = 1 | f) = \operatorname{sigmoid}(f)$; with several outputs, several labels at once.

    Fisher: $\operatorname{diag}(p (1 - p))$. Targets are 0 and 1 in the outputs' shape; a single output column may be missing on
    either side.
    """

    name = "bernoulli"
    task = "classification"

    def check_values(self, outputs: Tensor, y: Tensor) -> None:
        """Targets must be 0 or 1."""
        wrong = (y != 0) & (y != 1)
        if bool(wrong.any()):
            raise ValueError(f"likelihoods.Bernoulli: target {y[wrong][0].item()}; give 0 or 1")

    def log_density(self, outputs: Tensor, y: Tensor) -> Tensor:
        """Log-probability of each entry."""
        return F.logsigmoid(torch.where(y.bool(), outputs, -outputs))

    def predictive(self, outputs: Outputs) -> ClassificationPredictive:
        """A mixture of the draws' probabilities."""
        return ClassificationPredictive(outputs, _binary_log_probs, binary=True)

    def closed_form(self, outputs: OutputGaussian, link: Link = "mc") -> ClassificationPredictive:
        """See `GaussianClassPredictive`."""
        return GaussianClassPredictive(outputs, None, link)

    def fisher(self, outputs: Tensor) -> Tensor:
        """`diag(p (1 - p))`."""
        probs = as_float(outputs).sigmoid()
        return torch.diag_embed(probs * (1 - probs))


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


def as_float(outputs: Tensor) -> Tensor:
    """Outputs in at least float32: half precision loses the small differences that log-densities live on."""
    return outputs.float() if outputs.dtype in (torch.float16, torch.bfloat16) else outputs


def _around(outputs: Tensor, variance: Tensor) -> tuple[Tensor, Tensor]:
    return with_variance(as_float(outputs), variance)


def _class_log_probs(outputs: Tensor, axis: int) -> Tensor:
    return F.log_softmax(as_float(outputs).movedim(axis, -1), dim=-1)


def _binary_log_probs(outputs: Tensor) -> Tensor:
    outputs = as_float(outputs)
    return torch.stack((F.logsigmoid(-outputs), F.logsigmoid(outputs)), dim=-1)


REGISTRY: dict[str, type[Likelihood]] = {
    kind.name: kind for kind in (Gaussian, HeteroscedasticGaussian, Categorical, Bernoulli)
}
"""Likelihoods by the name that configuration files use."""
