"""The two contracts: what predicts, and what trains on a batch."""

from __future__ import annotations

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
"""Which objective a step maximizes: that of the posterior mean, or the evidence lower bound."""

DEFAULT_NUM_DRAWS = 32
"""Draws of a prediction unless told otherwise, where draws cannot be counted."""


class Serializable(ABC):
    """What `save` writes and `load` gives back: choices as plain data, and tensors by name."""

    @abstractmethod
    def config(self) -> dict[str, Any]:
        """All choices as plain data and tensors, for `save`."""

    @abstractmethod
    def state(self) -> Mapping[str, Tensor]:
        """The tensors to store, by dotted name."""

    @classmethod
    @abstractmethod
    def restore(cls, net: nn.Module, config: Any, state: dict[str, Tensor]) -> Self:
        """The object that `config` and `state` describe, over a copy of the network, whose code is in no file.

        Both may come from a stranger: no other file is opened, and what they say wrongly is an error.
        """

    def fingerprint(self) -> dict[str, str]:
        """What the user's network was made of, by name, with which `load` compares the one it is given; empty without one."""
        return {}


class Predictor(Serializable):
    """What gives a predictive distribution for inputs: networks under a posterior, Laplace, SWAG, ensembles, processes.

    Adapters, estimators, metrics, conformal prediction and reports know this contract and nothing else. Options of one method
    only are further keyword arguments of its `predict`.

    Attributes:
        likelihood: p(y | outputs), or `None` where none was given yet.
        output: Which of several outputs of the network the likelihood is about; see `bayesianize`.
        findings: What its making has to say; see `check`.
    """

    likelihood: Likelihood | None
    output: str | int | None
    findings: Sequence[Finding] = ()

    @property
    def num_distinct_draws(self) -> int | None:
        """How many different draws there are, where they can be counted: by default a prediction takes each once."""
        return None

    def require_likelihood(self, what: str) -> Likelihood:
        """The likelihood; a `ValueError` that names `what` needs it where there is none."""
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
            num_draws: S; what suits the method by default. A predictor that draws nothing ignores it.
            generator: Source of randomness. A predictor that draws nothing ignores it.
            memory: Budget in bytes, or text such as `"1GiB"`; 256 MiB by default.

        Where draws run through the user's network, `split_batch=False` is the promise that the batch is never cut: for networks
        whose outputs depend on other rows of the batch, or on inputs such as a graph that belong to the whole of it.
        """


class Drawable(Predictor):
    """A predictor from which functions can be drawn.

    Attributes:
        remedy: How to get one, for messages.
    """

    remedy: ClassVar[str] = ", such as a BayesianNetwork; bayesianize makes one"

    @abstractmethod
    def draw(self, num_draws: int = 1, *, generator: torch.Generator | None = None) -> Draws:
        """Draw functions, the same for every input."""

    def prediction_draws(self, num_draws: int | None = None, *, generator: torch.Generator | None = None) -> Draws:
        """The draws that `predict` uses with the same arguments; for many batches, give them to it as `draws`.

        Where `keep_draws`, or `fit` at its end, has kept draws of a network with BatchNorm, these are the first of them,
        each with statistics of its own. More draws than were kept, and all draws once a parameter has changed, are fresh, and
        running averages normalize them.
        """
        kept = self._kept_draws(num_draws)
        if kept is not None:
            return kept
        return self.draw(num_draws or self.num_distinct_draws or DEFAULT_NUM_DRAWS, generator=generator)

    def _kept_draws(self, num_draws: int | None) -> Draws | None:
        """Draws that are kept for predictions, all by default; `None` without so many."""
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
        """How much each example counts, [B], float64 on the CPU: its weight, else 1."""
        return torch.ones(len(self), dtype=torch.float64) if self.weights is None else self.weights.cpu().double()

    def map(self, function: Callable[[Tensor], Tensor]) -> tuple[Any, Tensor, Tensor | None]:
        """Inputs, targets and weights with a function of each tensor in its place."""
        if isinstance(self.x, Tensor):
            return function(self.x), function(self.y), None if self.weights is None else function(self.weights)
        found: tuple[Any, Tensor, Tensor | None]
        found = pytree.tree_map_only(Tensor, function, (self.x, self.y, self.weights))
        return found

    def to(self, device: torch.device) -> Batch:
        """The same batch on a device."""
        return type(self)(*self.map(lambda leaf: leaf.to(device, non_blocking=True)))

    def weighed(self) -> Batch:
        """Without the examples of weight 0, which may leave none.

        Raises:
            ValueError: If a weight is negative or not finite.
        """
        if self.weights is None:
            return self
        check_example_weights(self.weights, len(self))
        return self if bool((self.weights > 0).all()) else self.rows(self.weights > 0)

    def rows(self, index: slice | Tensor) -> Batch:
        """Some of the examples; inputs that do not have the batch's length are kept whole."""
        return Batch(*self.map(lambda leaf: leaf[index] if leaf.ndim and leaf.shape[0] == len(self) else leaf))


class Trainable(ABC):
    """What `fit` can train: parameters, and an objective in two terms.

    Attributes:
        phases: Which phases it has; `"map"` is for those with a posterior mean to train first.
        remedy: How to get one, for messages.
    """

    phases: ClassVar[tuple[Phase, ...]] = ("variational",)
    remedy: ClassVar[str] = Drawable.remedy

    @property
    def module(self) -> nn.Module:
        """What holds parameters, buffers and modes; itself, where it is a module."""
        assert isinstance(self, nn.Module)
        return self

    @property
    @abstractmethod
    def training_draws(self) -> int:
        """Draws per step that `fit` uses by default."""

    @property
    def num_models(self) -> int | None:
        """R where it is R models that train together, each with its own row of every parameter; `None` for one model."""
        return None

    @property
    def keeps_mode(self) -> bool:
        """Whether it trains in the mode (train or eval) that it is in."""
        return False

    @property
    def noise_per_example(self) -> bool:
        """Whether examples have noise of their own, which must differ between the parts of a batch."""
        return False

    def check_ready(self) -> None:  # noqa: B027 (most are ready)
        """Raise `ValueError` if something that training needs is missing."""

    @abstractmethod
    def terms(
        self, batch: Batch, *, phase: Phase, num_data: int, num_draws: int, generator: torch.Generator | None = None
    ) -> tuple[Tensor, Tensor]:
        """The two terms of the objective for a batch in nats of the whole dataset: what is maximized is `first - beta * second`.

        Returns:
            Expected log-likelihood and KL (or what stands in for it), each [S], or [R, S] for R models whose objectives add up;
            1 in place of S for what all draws have in common.
        """

    def clip_gradients(self, max_norm: float, norm: Tensor) -> None:
        """Scale the gradients, in place, to a norm of at most `max_norm`; `norm` is that of all of them.

        Where there are several models, each one's gradient has the norm that counts for it, as if it trained alone.
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
        """All choices as plain data and tensors, which a run that is continued must have in common with the interrupted one."""


def norms_by_model(grads: Sequence[Tensor], num_models: int) -> Tensor:
    """Norm of each model's gradients, [R], where each has its own row of every one of them."""
    norms: Tensor = torch.stack([grad.reshape(num_models, -1).norm(dim=1) for grad in grads]).norm(dim=0)
    return norms
