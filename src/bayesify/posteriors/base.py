"""What every posterior is: a module that spans all its weights and draws them together with their KL."""

from __future__ import annotations

import copy
import inspect
import weakref
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Self, TypeVar

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from bayesify.maths.noise import standard_normal
from bayesify.priors import PriorDraw
from bayesify.weights import Layer, Weight

Computed = TypeVar("Computed")
_REMEMBERED: weakref.WeakKeyDictionary[nn.Module, dict[Any, Any]] = weakref.WeakKeyDictionary()


@dataclass(frozen=True)
class DrawRequest:
    """What a posterior is asked for.

    Args:
        num_draws: S.
        prior: The prior's scales, for KL and for posteriors that are built on the prior.
        generator: Source of randomness; the global one if `None`.
        antithetic: Draw noise in pairs of opposite sign, which halves the random numbers and cancels odd errors.
        local: Whether noise may differ between examples: true inside the training objective only.
        runner: The network, for posteriors that run it in order to draw.
        weights: The draws of other posteriors of the same network, for those that run it.
        num_data: Examples in the dataset, where the draw is for a bound over it.
        members: Which member of an ensemble each draw takes, [S], by the size of the ensemble; whoever draws first chooses.
    """

    num_draws: int
    prior: PriorDraw
    generator: torch.Generator | None = None
    antithetic: bool = False
    local: bool = False
    runner: Any = None
    weights: Mapping[str, Tensor] | None = None
    num_data: int | None = None
    members: dict[int, Tensor] = field(default_factory=dict)

    def normals(self, sizes: Sequence[int], like: Tensor) -> list[Tensor]:
        """Standard normal numbers for several weights in one call.

        Args:
            sizes: Numbers per draw for each weight.
            like: A tensor whose type and device the noise takes.

        Returns:
            One [S, size] tensor per entry of `sizes`, each contiguous and aligned for vector loads.
        """
        halves = (self.num_draws + 1) // 2 if self.antithetic else self.num_draws
        counts = [halves * size for size in sizes]
        starts = [0]
        for count in counts:
            starts.append(starts[-1] + -(-count // 64) * 64)
        flat = standard_normal(starts[-1], like, self.generator)
        parts = []
        for start, count, size in zip(starts, counts, sizes, strict=False):
            part = flat[start : start + count].view(halves, size)
            if self.antithetic:
                pairs = part.new_empty(self.num_draws, size)
                pairs[::2] = part
                torch.neg(part[: self.num_draws // 2], out=pairs[1::2])
                part = pairs
            parts.append(part)
        return parts


class Posterior(nn.Module):
    """A distribution q over weights of a network.

    A user makes one with its options; `bayesianize` binds a copy to the weights it selected. A subclass writes

    - `__init__`, which keeps every argument under its own name and checks it,
    - `build(values)`, which makes parameters, starting from the network's weights,
    - `draw(request)`, which returns weights with a leading axis of draws, and the KL of each draw,
    - `mean()` and `variance()`, and `entropy()` where q has a density: the KL to any Gaussian prior follows from them,
    - `set_to_prior(prior)`, if q can be the prior.
    """

    name: ClassVar[str]
    runs_network: ClassVar[bool] = False
    """Whether drawing runs the network; such posteriors are drawn after all others."""
    recordable: bool = False
    """Whether drawing is a fixed sequence of operations on the device, which a CUDA graph can record."""
    training_draws: int = 1
    """Draws per step that `fit` uses unless told otherwise."""
    correlated_priors: ClassVar[bool] = False
    """Whether the KL is known under a prior that correlates the positions of a kernel; see `squares`."""

    def __init__(self) -> None:
        super().__init__()
        self.layers: tuple[Layer, ...] = ()
        self.bound_prior: PriorDraw | None = None
        self.runner: Any = None

    # -- binding ---------------------------------------------------------------------------------------------------

    def config(self) -> dict[str, Any]:
        """The posterior as plain data: its name and its arguments."""
        arguments = inspect.signature(type(self).__init__).parameters
        return {"name": self.name, **{key: getattr(self, key) for key in arguments if key != "self"}}

    def bind(
        self,
        layers: tuple[Layer, ...],
        values: Mapping[str, Tensor],
        modules: Mapping[str, nn.Module],
        prior: PriorDraw | None = None,
        runner: Any = None,
    ) -> Self:
        """A copy of this posterior over the given layers.

        Args:
            layers: What it spans.
            values: The network's weights by name, where means start.
            modules: The module that owns each weight, by weight name; for posteriors that initialize anew.
            prior: The prior's scales, kept as `bound_prior` for posteriors that are built on the prior.
            runner: The network without its weights, kept as `runner` by posteriors that run it.

        Raises:
            ValueError: If the prior correlates the positions of a kernel and this family has no KL for that.
        """
        if prior is not None and not self.correlated_priors:
            for weight in (weight for layer in layers for weight in layer.weights if weight.name in prior.factor):
                raise ValueError(
                    f"{type(self).__name__}: no KL is known under a prior that correlates the positions of a kernel "
                    f"({weight.name}); use priors.Scale() or priors.Neal(), or one of {', '.join(_correlated())}"
                )
        bound = copy.deepcopy(self)
        bound.layers, bound.bound_prior = layers, prior
        bound.runner = runner if self.runs_network else None
        bound.build(values, modules)
        return bound

    @abstractmethod
    def build(self, values: Mapping[str, Tensor], modules: Mapping[str, nn.Module]) -> None:
        """Make the parameters; see `bind` for the arguments."""

    @property
    def support(self) -> int | None:
        """How many different draws there are, where they can be counted: a prediction then takes each once."""
        return None

    # -- what the network asks -------------------------------------------------------------------------------------

    @abstractmethod
    def draw(self, request: DrawRequest) -> tuple[dict[str, Tensor], Tensor]:
        """Draw weights.

        Returns:
            Weights by name, each [S, *shape] (a tensor or a structured weight), and the KL in nats: [S], or a scalar
            where it is the same for every draw.
        """

    @abstractmethod
    def mean(self) -> dict[str, Tensor]:
        """E_q[w] by name."""

    def mean_given(self, others: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """E_q[w] by name, for posteriors that run the network given the means of the other posteriors' weights."""
        return self.mean()

    @abstractmethod
    def variance(self) -> dict[str, Tensor]:
        """Var_q[w] of each entry, by name."""

    def entropy(self) -> Tensor | float:
        """Differential entropy of q in nats; 0 stands in for it where q has no density."""
        return 0.0

    def kl(self, prior: PriorDraw) -> Tensor:
        """KL(q || p) in nats by entropy and second moments; a scalar, or [S] for S draws of a hierarchical prior."""
        return prior.cross_entropy(self.squares(prior), self.sizes()) - self.entropy()

    def squares(self, prior: PriorDraw) -> dict[str, Tensor]:
        r"""Second moments by name: $\mathbb{E}_q \lVert w \rVert^2$, and for kernels with correlated positions (`prior.factor`) the
        matrix $\sum_f \mathbb{E}_q w_f w_f^\top$ over filters, [K, K].

        Here with independent positions in q; families that correlate them write `spatial_covariance`.
        """
        mean, variance = self.mean(), self.variance()
        found = {}
        for weight in self.weights:
            name = weight.name
            if name not in prior.factor:
                found[name] = (mean[name].square() + variance[name]).sum()
            else:
                spread = self.spatial_covariance(weight, variance[name], prior.factor[name].shape[-1])
                found[name] = prior.squares(name, mean[name]) + spread
        return found

    def spatial_covariance(self, weight: Weight, variance: Tensor, positions: int) -> Tensor:
        """Covariance of a filter's entries under q, summed over the filters of a kernel: [K, K].

        Args:
            weight: The kernel.
            variance: Of each entry, [*shape].
            positions: K.
        """
        return torch.diag(variance.reshape(-1, positions).sum(0))

    def set_to_prior(self, prior: PriorDraw) -> None:
        """Make q equal to the prior, in place.

        Raises:
            ValueError: If this family does not contain the prior.
        """
        raise ValueError(
            f"{type(self).__name__}: q cannot be the prior; use MeanField or another Gaussian family for that"
        )

    def prune(self, keep: float) -> None:
        """Keep a fraction of the stored numbers, in place; see `bayesify.prune`."""
        raise ValueError(f"prune: {type(self).__name__} cannot be pruned; MeanField and InducingWeights can")

    def check_prunable(self, keep: float) -> None:
        """Raise `ValueError` where `prune` would, without changing anything."""
        copy.deepcopy(self).prune(keep)

    # -- for subclasses --------------------------------------------------------------------------------------------

    @property
    def weights(self) -> tuple[Weight, ...]:
        """All weights under this posterior."""
        return tuple(weight for layer in self.layers for weight in layer.weights)

    def remembered(self, key: Any, compute: Callable[[], Computed], of: Sequence[Tensor] | None = None) -> Computed:
        """The result of a computation on the parameters, done once per state of them where gradients are off.

        Args:
            key: Names the computation.
            compute: Does it.
            of: The tensors that the result depends on; all parameters if left out.
        """
        if torch.is_grad_enabled() and of is None:
            return compute()
        used = self.parameters() if of is None else of
        state: list[Any] = [(tensor.data_ptr(), tensor._version, tensor.device, tensor.dtype) for tensor in used]
        if of is None:
            state.append(steps_taken())
        known = _REMEMBERED.setdefault(self, {})
        if key not in known or known[key][0] != state:
            with torch.inference_mode(False), torch.set_grad_enabled(False):  # the result may outlive the mode
                known[key] = (state, compute())
        result: Computed = known[key][1]
        return result

    def count_by_weight(self) -> dict[str, int | None]:
        """Trainable scalars by weight name; what is stored per layer counts with its first weight, `None` for the others."""
        counts: dict[str, int | None] = {}
        stored: dict[str, int] = {}
        for key, parameter in self.named_parameters():
            owner = _decode(key.rpartition(".")[2])
            stored[owner] = stored.get(owner, 0) + (parameter.numel() if parameter.requires_grad else 0)
        for layer in self.layers:
            by_layer = stored.get(layer.name, 0) if layer.name not in {weight.name for weight in layer.weights} else 0
            for index, weight in enumerate(layer.weights):
                own = stored.get(weight.name, 0) + (by_layer if index == 0 else 0)
                counts[weight.name] = own if own or index == 0 else None
        return counts

    def remarks(self) -> dict[str, str]:
        """What a user should know of single weights, by name, for the summary."""
        return {}

    def sizes(self) -> dict[str, int]:
        """Scalars in each weight, by name."""
        return {weight.name: weight.numel for weight in self.weights}


def _correlated() -> list[str]:
    """Names of the families that take a prior with correlated positions."""
    return sorted(kind.__name__ for kind in Posterior.__subclasses__() if kind.correlated_priors)


def fixed_std(owner: str, prior: PriorDraw, name: str) -> float:
    """The prior's standard deviation of a weight, for families that q can be the prior in where the prior is fixed.

    Raises:
        ValueError: If the prior draws its scales, or correlates the weight's entries: q does not depend on these draws.
    """
    std = prior.std[name]
    if isinstance(std, Tensor) or name in prior.factor:
        raise ValueError(
            f"{owner}: q of {name} cannot be a prior that draws its own scales; use a fixed one, such as Neal()"
        )
    return float(std)


_STEPS = 0


def _count_step(*_: Any) -> None:
    global _STEPS
    _STEPS += 1


register_optimizer_step_post_hook(_count_step)


def steps_taken() -> int:
    """Steps of all optimizers in this process so far: fused ones change parameters without raising their version."""
    return _STEPS


def remembered_values(posterior: Posterior) -> list[Any]:
    """All that a posterior remembers at this moment, for those who must keep it alive."""
    return [value for _, value in _REMEMBERED.get(posterior, {}).values()]


def repeat_draws(value: Tensor, num_draws: int) -> Tensor:
    """The same value in every draw, without a copy: [*shape] -> [S, *shape]."""
    return value.unsqueeze(0) if num_draws == 1 else value.expand(num_draws, *value.shape)


class NamedParameters(nn.Module):
    """Parameters under dotted names, such as weights' and layers' names, which torch does not allow directly.

    A parameter can be pruned: then only the entries that a mask keeps are stored, in one vector, and `dense` puts them back
    among zeros. The mask is a buffer next to it.
    """

    def __init__(self, values: Mapping[str, Tensor], trainable: bool = True) -> None:
        super().__init__()
        for name, value in values.items():
            self.register_parameter(_encode(name), nn.Parameter(value, requires_grad=trainable))

    def __getitem__(self, name: str) -> Tensor:
        value = self._parameters[_encode(name)]
        assert value is not None
        return value

    def items(self) -> list[tuple[str, Tensor]]:
        """Pairs of name and parameter."""
        return [(_decode(key), value) for key, value in self._parameters.items() if value is not None]

    def __iter__(self) -> Any:
        return (_decode(key) for key in self._parameters)

    def __len__(self) -> int:
        return len(self._parameters)

    def values(self) -> list[Tensor]:
        """The parameters, in order."""
        return [value for value in self._parameters.values() if value is not None]

    def mask(self, name: str) -> Tensor | None:
        """Which entries are kept, in the dense shape; `None` where all are."""
        return self._buffers.get(_encode(name) + MASK)

    def prune(self, name: str, mask: Tensor) -> None:
        """Keep only the entries of a parameter where the mask, of its dense shape, is true; it becomes a new parameter."""
        key, parameter = _encode(name), self[name]
        kept = self.dense(name).detach()[mask]
        self._parameters[key] = nn.Parameter(kept, requires_grad=parameter.requires_grad)
        self.register_buffer(key + MASK, mask)

    def dense(self, name: str) -> Tensor:
        """A parameter in its dense shape."""
        return self.scatter(name, self[name])

    def scatter(self, name: str, values: Tensor) -> Tensor:
        """Values for the stored entries of a parameter, [*batch, stored shape], among zeros: [*batch, *dense shape]."""
        mask = self.mask(name)
        if mask is None:
            return values
        batch = values.shape[:-1]
        return values.new_zeros(*batch, *mask.shape).masked_scatter(mask.expand(*batch, *mask.shape), values)

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any) -> None:
        theirs = {key for key in state_dict if key.startswith(prefix) and key.endswith(MASK)}
        ours = {prefix + key for key in self._buffers}
        if theirs != ours:
            what = "pruned, but this network is not" if theirs - ours else "not pruned, but this network is"
            args[-1].append(f"{prefix[:-1]}: the state is {what}; load a pruned network's file with bayesify.load")
            return
        super()._load_from_state_dict(state_dict, prefix, *args)


MASK = ":mask"
"""What the name of a mask ends in, after the name of its parameter."""


def _encode(name: str) -> str:
    return name.replace(".", "/") or "/"  # no name holds a slash; "/" is the empty name, of a network that is one layer


def _decode(key: str) -> str:
    return "" if key == "/" else key.replace("/", ".")


def check_positive(owner: str, **values: float | None) -> None:
    """Raise `ValueError` for an argument that is given and not positive."""
    for key, value in values.items():
        if value is not None and not value > 0:
            raise ValueError(f"{owner}: {key}={value}; give a positive number")


def check_count(owner: str, **values: int) -> None:
    """Raise `ValueError` for a count that is not an integer of at least 1."""
    for key, value in values.items():
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ValueError(f"{owner}: {key}={value}; give an integer of at least 1")
