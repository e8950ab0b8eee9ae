"""Priors over functions, each a Gaussian over the function values at any inputs."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from bayesify.arguments.checks import Memory, Positive, checked
from bayesify.function_space.contexts import DeviceCopies
from bayesify.function_space.moments import Covariance, output_covariance
from bayesify.jacobians import Jacobians
from bayesify.jacobians.general import Args, Kwargs
from bayesify.maths.value_checks import should_check
from bayesify.running.runner import Runner


class FunctionPrior(ABC):
    """A Gaussian process over a network's outputs. A subclass implements `moments`."""

    name: ClassVar[str]

    def bind(self, jacobians: Jacobians, means: Mapping[str, Tensor], stds: Mapping[str, Any], memory: Memory) -> None:
        """Store what the prior needs from the network, before the network is trained.

        Args:
            jacobians: Jacobians of the network.
            means: Posterior means of the weights by name, detached.
            stds: Prior standard deviations of the weights by name.
            memory: Memory budget in bytes.
        """
        return

    @abstractmethod
    def moments(self, args: Args, kwargs: Kwargs, outputs: Tensor, kind: Covariance) -> tuple[Tensor, Tensor]:
        """Mean and covariance of the function values at the given inputs.

        Args:
            args: Positional inputs of B examples.
            kwargs: Keyword inputs.
            outputs: The network's outputs at the inputs, [B, O]; they determine the shape, type and device.
            kind: Kind of covariance; see `FunctionSpaceVI`.

        Returns:
            Mean [B, O] and, depending on `kind`, variance [B, O], covariance [O, B, B] or covariance [B O, B O].
        """

    def config(self) -> dict[str, Any] | None:
        """The prior as plain data, including tensors; `None` if it contains code, which cannot be stored."""
        return None


class Constant(FunctionPrior):
    """A constant mean and variance. Values of different outputs or at different inputs are independent (the paper's choice).

    Args:
        mean: Mean of the function values: a number, or one per output.
        variance: Variance of the function values: a number, or one per output.

    Raises:
        ValueError: If a variance is not positive, or if a value is not finite.
    """

    name = "constant"

    @checked
    def __init__(self, mean: float | Sequence[float] = 0.0, variance: Positive | Sequence[Positive] = 1.0) -> None:
        self.mean, self.variance = (
            torch.as_tensor(value, dtype=torch.float64).detach().cpu() for value in (mean, variance)
        )
        self._copies = DeviceCopies(self.mean, self.variance)
        if not bool(torch.isfinite(self.mean).all()) or not self.mean.numel():
            raise ValueError(f"FunctionSpaceVI: prior_mean={mean}; give finite numbers")
        if not bool((self.variance > 0).all() & torch.isfinite(self.variance).all()) or not self.variance.numel():
            raise ValueError(f"FunctionSpaceVI: prior_variance={variance}; give a positive number, or one per output")

    def moments(self, args: Args, kwargs: Kwargs, outputs: Tensor, kind: Covariance) -> tuple[Tensor, Tensor]:
        """Mean and covariance, which do not depend on the inputs."""
        try:
            mean, variance = (value.expand(outputs.shape) for value in self._copies.like(outputs))
        except RuntimeError:
            sizes = [list(value.shape) for value in (self.mean, self.variance)]
            raise ValueError(
                f"FunctionSpaceVI: prior_mean= and prior_variance= have shapes {sizes} for {outputs.shape[1]} "
                f"outputs; give a number, or one number per output"
            ) from None
        if kind == "diagonal":
            return mean, variance
        return mean, torch.diag_embed(variance.T if kind == "full" else variance.flatten())

    def config(self) -> dict[str, Any]:
        """Mean and variance."""
        return {"name": self.name, "mean": self.mean.tolist(), "variance": self.variance.tolist()}


class GaussianProcess(FunctionPrior):
    """A Gaussian process with any kernel; its outputs are independent.

    Args:
        kernel: Function that takes inputs [B, ...] and inputs [C, ...] and returns covariances [B, C], or [O, B, C] if
            outputs differ.
        mean: Mean of the process: a number, or a function from inputs [B, ...] to means [B] or [B, O].

    Raises:
        TypeError: If `kernel` cannot be called.
    """

    name = "gaussian_process"

    @checked
    def __init__(
        self, kernel: Callable[[Tensor, Tensor], Tensor], mean: float | Callable[[Tensor], Tensor] = 0.0
    ) -> None:
        self.kernel, self.mean = kernel, mean

    def moments(self, args: Args, kwargs: Kwargs, outputs: Tensor, kind: Covariance) -> tuple[Tensor, Tensor]:
        """The mean, and the kernel's matrix or its diagonal."""
        x = next(iter((*args, *kwargs.values())))
        size, num_outputs = outputs.shape
        mean = torch.as_tensor(self.mean(x) if callable(self.mean) else self.mean).to(outputs)
        mean = (mean.unsqueeze(-1) if mean.ndim == 1 else mean).expand(outputs.shape)
        covariance = self.kernel(x, x).to(outputs)
        if covariance.shape[-2:] != (size, size) or covariance.ndim > 3:
            raise ValueError(
                f"GaussianProcess: the kernel returns shape {list(covariance.shape)} for {size} inputs; it must return "
                f"[{size}, {size}], or [{num_outputs}, {size}, {size}]"
            )
        covariance = covariance.expand(num_outputs, size, size)
        variances = covariance.diagonal(dim1=-2, dim2=-1)
        if should_check(variances) and not bool((variances > 0).all()):
            raise ValueError(
                "GaussianProcess: the kernel returns a variance of 0 or below at an input; give a kernel with positive variances"
            )
        if kind == "diagonal":
            return mean, variances.T
        if kind == "full":
            return mean, covariance
        spread = covariance.new_zeros(size, num_outputs, size, num_outputs)
        index = torch.arange(num_outputs, device=covariance.device)
        spread[:, index, :, index] = covariance
        return mean, spread.reshape(size * num_outputs, size * num_outputs)


class NeuralTangent(FunctionPrior):
    r"""The Gaussian process that a Gaussian over the weights implies for the outputs. The network is linearized at the means that
    the weights have before training.

    $$ p(f) = \mathcal{GP}\bigl(f(x; m_0),\ J_{m_0}(x) \operatorname{diag}(\sigma_0^2) J_{m_0}(x')^\top\bigr) $$

    This is the paper's prior process (equations 3 and 4) for $w \sim \mathcal{N}(m_0, \sigma_0^2)$. This prior needs a
    second linearization of the network in each step.

    Args:
        std: Standard deviation $\sigma_0$ of all weights; by default the standard deviations of the network's own prior.
        mean: Constant prior mean that replaces $f(x; m_0)$.

    Raises:
        ValueError: If `std` is not positive.
    """

    name = "neural_tangent"

    @checked
    def __init__(self, std: Positive | None = None, mean: float | None = None) -> None:
        self.std, self.mean = std, mean
        self._values: dict[str, Tensor] = {}
        self._points: dict[str, Tensor] = {}
        self._variances: dict[str, Tensor] = {}

    def bind(self, jacobians: Jacobians, means: Mapping[str, Tensor], stds: Mapping[str, Any], memory: Memory) -> None:
        """Store the means, the point estimates and the buffers, unless the prior already has them from a stored model."""
        frozen = jacobians.runner.snapshot()
        if not self._values:
            self._values = {name: value.detach().clone() for name, value in means.items()}
            self._points = dict(frozen.point_values)
            self._variances = {
                name: torch.full_like(means[name], self.std**2)
                if self.std is not None
                else torch.as_tensor(stds[name]).to(means[name]).square().expand(means[name].shape).clone()
                for name in means
            }
        runner = Runner(frozen.network, frozen.weights, self._points)
        self._jacobians = Jacobians(runner, jacobians.names, output=jacobians.output)
        self._memory = memory

    def moments(self, args: Args, kwargs: Kwargs, outputs: Tensor, kind: Covariance) -> tuple[Tensor, Tensor]:
        """Mean and covariance of the network linearized at the stored means."""
        self._follow(outputs)
        point = self._jacobians.at(args, kwargs, self._values)
        with torch.no_grad():
            gradients = point.pull(point.identity())
            found = output_covariance(self._jacobians, gradients, self._variances, kind, self._memory).to(outputs.dtype)
        mean = point.outputs.detach().reshape(outputs.shape).to(outputs.dtype)
        mean = mean if self.mean is None else torch.full_like(mean, self.mean)
        return mean, found.T if kind == "diagonal" else found

    def _follow(self, outputs: Tensor) -> None:
        """Move the stored tensors to the device of `outputs`, and convert float32 and float64 tensors to the dtype of
        `outputs`."""
        for kept in (self._values, self._points, self._variances):
            for name, value in kept.items():
                dtype = outputs.dtype if value.dtype in (torch.float32, torch.float64) else value.dtype
                if value.device != outputs.device or value.dtype != dtype:
                    kept[name] = value.to(outputs.device, dtype)

    def config(self) -> dict[str, Any]:
        """The arguments, and the tensors stored from the network."""
        return {
            "name": self.name,
            "std": self.std,
            "mean": self.mean,
            "values": dict(self._values),
            "points": dict(self._points),
            "variances": dict(self._variances),
        }

    @classmethod
    def restore(cls, config: Mapping[str, Any]) -> Self:
        """Inverse of `config`."""
        prior = cls(config["std"], config["mean"])
        prior._values, prior._points, prior._variances = (config[key] for key in ("values", "points", "variances"))
        return prior


class UnknownPrior(FunctionPrior):
    """Placeholder for a prior whose code was not stored with its model. Using it raises an error."""

    name = "unknown"

    def __init__(self, name: str) -> None:
        self.was = name  # kind of the original prior

    def moments(self, args: Args, kwargs: Kwargs, outputs: Tensor, kind: Covariance) -> tuple[Tensor, Tensor]:
        raise ValueError(
            f"FunctionSpaceVI: the model was loaded without its prior ({self.was}), because a file cannot store code; "
            "set model.prior again"
        )

    def config(self) -> dict[str, Any]:
        return {"name": self.was}


def restore_prior(config: Mapping[str, Any]) -> FunctionPrior:
    """A prior from its plain data. A prior that contained code, which a file cannot store, becomes `UnknownPrior`."""
    if config["name"] == "constant":
        return Constant(config["mean"], config["variance"])
    return NeuralTangent.restore(config) if config["name"] == "neural_tangent" else UnknownPrior(str(config["name"]))
