"""The two interfaces of models: a `Predictor` predicts, and a `Trainable` trains on batches."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Self

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from bayesify.draws import Draws
from bayesify.likelihoods import Likelihood
from bayesify.likelihoods.objectives import check_example_weights
from bayesify.predictive.base import Predictive
from bayesify.predictive.findings import Finding

Phase = Literal["map", "variational"]
"""The objective that a step maximizes: the log posterior at the mean, or the evidence lower bound."""

DEFAULT_NUM_DRAWS = 32
"""Default number of draws of a prediction, if distinct draws cannot be counted."""


class Serializable(ABC):
    """An object that `save` writes and `load` restores. The object is stored as its options (plain data) and its named
    tensors."""

    @abstractmethod
    def config(self) -> dict[str, Any]:
        """The options of the object, as plain data and tensors, for `save`."""

    @abstractmethod
    def state(self) -> Mapping[str, Tensor]:
        """The tensors to store, by dotted name."""

    @classmethod
    @abstractmethod
    def restore(cls, net: nn.Module, config: Any, state: dict[str, Tensor]) -> Self:
        """Restore the object that `config` and `state` describe, with a copy of `net` as its network. The network's code is not
        stored.

        `config` and `state` may come from an untrusted file. The function therefore opens no other file, and it raises an error
        if the contents are wrong.
        """

    def fingerprint(self) -> dict[str, str]:
        """Descriptions of the network's parts, by name. `load` compares them with the given network. The dict can be empty."""
        return {}


class Predictor(Serializable):
    """An object that gives a predictive distribution for inputs, such as a Bayesian network, Laplace, SWAG or a Gaussian process.

    Adapters, estimators, metrics, conformal prediction and reports use only this interface. If only one kind of predictor has an
    option, the option is an extra keyword argument of this predictor's `predict`.

    Attributes:
        likelihood: Likelihood p(y | outputs), or `None` if it has not been set.
        output: Key or position of the output that the likelihood describes; see `bayesianize`.
        findings: Problems found when this predictor was constructed; see `check`.
        mixture_method: The value of `method=` with which `predict` gives a mixture over draws, if the default method gives a
            closed form.
    """

    likelihood: Likelihood | None
    output: str | int | None
    findings: Sequence[Finding] = ()
    mixture_method: ClassVar[str | None] = None

    @property
    def num_distinct_draws(self) -> int | None:
        """The number of different draws, or `None` if they cannot be counted. By default, a prediction uses each different draw
        once."""
        return None

    def require_likelihood(self, what: str) -> Likelihood:
        """The likelihood. If there is none, raise a `ValueError` which says that `what` needs a likelihood."""
        if self.likelihood is None:
            raise ValueError(
                f"{what}: this network has no likelihood; pass one to bayesianize, such as likelihoods.Categorical()"
            )
        return self.likelihood

    @abstractmethod
    def predict(
        self,
        x: Any,
        num_draws: int | None = None,
        *,
        generator: torch.Generator | None = None,
        memory: int | str | None = None,
    ) -> Predictive:
        """The predictive distribution of a batch, in evaluation mode, without gradients.

        Args:
            x: Inputs: a tensor, a tuple of positional inputs, or a dict of keyword inputs.
            num_draws: Number of draws S. The default depends on the method. A predictor without draws ignores `num_draws`.
            generator: Source of randomness. A predictor without draws ignores `generator`.
            memory: Memory budget in bytes, or text such as `"1GiB"`. The default is 256 MiB.

        Predictors that run draws through the user's network also take `split_batch`. With `split_batch=False` the batch is
        never split. Use this if the output of a row depends on other rows, or if an input, such as a graph, belongs to
        the whole batch.
        """


class Drawable(Predictor):
    """A predictor from which functions can be drawn.

    Attributes:
        remedy: Advice for error messages: how to get a predictor that can be drawn from.
    """

    remedy: ClassVar[str] = ", such as a BayesianNetwork; bayesianize makes one"

    @abstractmethod
    def draw(self, num_draws: int = 1, *, generator: torch.Generator | None = None) -> Draws:
        """Draw functions. Each draw is one function for all inputs."""

    def prediction_draws(self, num_draws: int | None = None, *, generator: torch.Generator | None = None) -> Draws:
        """The draws that `predict` uses with the same arguments. To use the same draws for many batches, pass them to `predict`
        as `draws`.

        For a network with BatchNorm, draws may have been stored by `keep_draws` or at the end of `fit`. If draws are stored, the
        result consists of the first `num_draws` of them, each with its own statistics. All draws are fresh if `num_draws` exceeds
        the number of stored draws or if a parameter has changed. Fresh draws use the running averages of the BatchNorm layers.
        """
        kept = self._kept_draws(num_draws)
        if kept is not None:
            return kept
        return self.draw(num_draws or self.num_distinct_draws or DEFAULT_NUM_DRAWS, generator=generator)

    def _kept_draws(self, num_draws: int | None) -> Draws | None:
        """The first `num_draws` draws that are stored for predictions; by default, all stored draws. The result is `None` if no
        draws, or fewer than `num_draws`, are stored."""
        return None


@dataclass(frozen=True)
class Batch:
    """One batch of B examples.

    Args:
        x: Inputs: a tensor, a tuple of positional inputs, or a dict of keyword inputs.
        y: Targets, [B, ...].
        weights: Example weights, [B], or `None`.
    """

    x: Any
    y: Tensor
    weights: Tensor | None = None

    def __len__(self) -> int:
        return self.y.shape[0]

    @property
    def counts(self) -> Tensor:
        """The weight of each example, [B], float64 on the CPU; 1 if there are no weights."""
        return torch.ones(len(self), dtype=torch.float64) if self.weights is None else self.weights.cpu().double()

    def map(self, function: Callable[[Tensor], Tensor]) -> tuple[Any, Tensor, Tensor | None]:
        """Apply a function to each tensor of the inputs, the targets and the weights."""
        if isinstance(self.x, Tensor):
            return function(self.x), function(self.y), None if self.weights is None else function(self.weights)
        found: tuple[Any, Tensor, Tensor | None]
        found = pytree.tree_map_only(Tensor, function, (self.x, self.y, self.weights))
        return found

    def to(self, device: torch.device) -> Self:
        """The same batch on a device."""
        return type(self)(*self.map(lambda leaf: leaf.to(device, non_blocking=True)))

    def weighed(self) -> Self:
        """The batch without the examples whose weight is 0. The result may be empty.

        Raises:
            ValueError: If a weight is negative or not finite.
        """
        if self.weights is None:
            return self
        check_example_weights(self.weights, len(self))
        return self if bool((self.weights > 0).all()) else self.rows(self.weights > 0)

    def mean(self, values: Tensor) -> float:
        """The mean of values [B, ...] over all axes, weighted by the examples' weights."""
        return float(self.counts @ values.reshape(len(self), -1).mean(1).double().cpu() / self.counts.sum())

    def rows(self, index: slice | Tensor) -> Self:
        """Some of the examples. An input whose length differs from the batch size is not indexed."""
        return type(self)(*self.map(lambda leaf: leaf[index] if leaf.ndim and leaf.shape[0] == len(self) else leaf))


class Trainable(ABC):
    """A model that `fit` can train; it has parameters and an objective with two terms.

    Attributes:
        phases: The phases of training. If a model's posterior mean can be trained before its other parameters, the model has the
            phase `"map"`.
        remedy: Advice for error messages: how to get a model that can be trained.
    """

    phases: ClassVar[tuple[Phase, ...]] = ("variational",)
    remedy: ClassVar[str] = Drawable.remedy

    @property
    def module(self) -> nn.Module:
        """The module that owns the parameters, the buffers and the mode (train or eval). By default this is the object itself."""
        assert isinstance(self, nn.Module)
        return self

    @property
    @abstractmethod
    def training_draws(self) -> int:
        """Default number of draws per step in `fit`."""

    @property
    def num_models(self) -> int | None:
        """Number of models R that train together, each with its own row of every parameter; `None` for one model."""
        return None

    @property
    def keeps_mode(self) -> bool:
        """Whether training leaves the current mode (train or eval) unchanged."""
        return False

    @property
    def noise_per_example(self) -> bool:
        """Whether each example has its own noise. If so, parts of a batch that are computed separately must use different
        noise."""
        return False

    def check_ready(self) -> None:  # noqa: B027 (most are ready)
        """Raise `ValueError` if something that training needs is missing."""

    @abstractmethod
    def terms(
        self, batch: Batch, *, phase: Phase, num_data: int, num_draws: int, generator: torch.Generator | None = None
    ) -> tuple[Tensor, Tensor]:
        """The two terms of the objective for a batch, in nats, scaled to the whole dataset. `fit` maximizes
        `first - beta * second`.

        Returns:
            The expected log-likelihood, and the KL or its substitute. Each is [S], or [R, S] for R models whose objectives add
            up. The last axis has length 1 if the value is the same for all draws.
        """

    def clip_gradients(self, max_norm: float, norm: Tensor) -> None:
        """Scale the gradients, in place, to a norm of at most `max_norm`. `norm` is the norm of all gradients together.

        With several models, each model is clipped by the norm of its own gradients, as if it trained alone.
        """
        if self.num_models is None:
            torch.nn.utils.clip_grads_with_norm_(self.module.parameters(), max_norm, norm)
            return
        grads = [parameter.grad for parameter in self.module.parameters() if parameter.grad is not None]
        scale = (max_norm / (norms_by_model(grads, self.num_models) + 1e-6)).clamp(max=1.0)  # [R]
        for grad in grads:
            grad.mul_(scale.view(-1, *[1] * (grad.ndim - 1)))

    @abstractmethod
    def config(self) -> dict[str, Any]:
        """The options of the model, as plain data and tensors. A resumed run must have the same options as the interrupted
        run."""


def norms_by_model(grads: Sequence[Tensor], num_models: int) -> Tensor:
    """Norm of each model's gradients, [R]. Each model has its own row of every gradient."""
    norms: Tensor = torch.stack([grad.reshape(num_models, -1).norm(dim=1) for grad in grads]).norm(dim=0)
    return norms
