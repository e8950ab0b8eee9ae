"""The base class of posteriors: a module that spans all its weights and draws them together with their KL."""

from __future__ import annotations

import copy
import inspect
from abc import abstractmethod
from collections import ChainMap
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, Self

import torch
from torch import Tensor, nn

from bayesify.maths.noise import NoiseSource, choose_members
from bayesify.posteriors.common import starts
from bayesify.priors import Prior, PriorDraw
from bayesify.running.caching import Computed, Results
from bayesify.running.runner import Runner
from bayesify.weights.catalog import Layer, Weight
from bayesify.weights.layout import NetworkLayout
from bayesify.weights.named_parameters import decode


@dataclass(frozen=True, kw_only=True)
class DrawRequest:
    """A request for draws from a posterior.

    Args:
        num_draws: Number of draws S.
        prior: The prior's scales, for the KL and for posteriors that are built on the prior.
        noise: Source of the random numbers.
        antithetic: Whether to draw noise in pairs of opposite sign. This halves the number of random numbers and cancels errors
            that are odd functions of the noise.
        local: Whether noise may differ between examples. It is true only inside the training objective.
        runner: The network, for posteriors that must run it to draw.
        weights: Weights that the network's other posteriors drew. Only a posterior that runs the network to make its own draws
            needs them.
        num_data: Number of examples N in the dataset, if the draw is for a bound over the dataset.
        chosen: The indices that `choose` returned, by number of members.
        layout: Memory layout of the network's own weights. A posterior may write its draws in this layout directly.
        autocast: Dtype in which the network runs under autocast. Autocast is off while a posterior draws.
    """

    num_draws: int
    prior: PriorDraw
    noise: NoiseSource = field(default_factory=NoiseSource)
    antithetic: bool = False
    local: bool = False
    runner: Runner | None = None
    weights: Mapping[str, Tensor] | None = None
    num_data: int | None = None
    chosen: dict[int, Tensor] = field(default_factory=dict)
    layout: NetworkLayout | None = None
    autocast: torch.dtype | None = None

    def dtype(self, name: str) -> torch.dtype:
        """Dtype of a weight in the network if this dtype has low precision, otherwise float32."""
        return torch.float32 if self.layout is None else self.layout.low_precision.get(name, torch.float32)

    def choose(self, num_members: int, device: torch.device) -> Tensor:
        """For each draw, the index of its member in a mixture, [S]; see `choose_members`.

        Mixtures of a network with the same number of members use the same indices, so that draw s is one member of an ensemble,
        no matter how many posteriors the ensemble consists of. Mixtures of different sizes choose independently, except that
        several `Ensemble` posteriors form networks together.
        """
        if num_members not in self.chosen:
            self.chosen[num_members] = choose_members(num_members, self.num_draws, self.noise, device)
        return self.chosen[num_members]

    def normals(self, sizes: Sequence[int], like: Tensor, tile: int = 1) -> list[Tensor]:
        """Standard normal numbers for several weights in one call.

        Args:
            sizes: Number of random numbers per draw for each weight.
            like: A tensor with the type and device that the noise will have.
            tile: Alignment. Each draw of a weight starts at a multiple of `tile` in the sequence of random numbers.

        Returns:
            One [S, size] tensor per entry of `sizes`, each aligned for vector loads. A tensor is contiguous if its size is a
            multiple of `tile`.
        """
        halves = (self.num_draws + 1) // 2 if self.antithetic else self.num_draws
        rows = [-(-size // tile) * tile for size in sizes]
        pieces = self.room(rows)
        flat = self.noise.normal(sum(pieces), like)
        parts = []
        for part, size, row in zip(flat.split(pieces), sizes, rows, strict=True):
            part = part if part.shape[0] == halves * row else part[: halves * row]
            part = part.view(halves, row) if size == row else part.view(halves, row)[:, :size]
            if self.antithetic:
                pairs = part.new_empty(self.num_draws, size)
                pairs[::2] = part
                pairs[1::2] = -part[: self.num_draws // 2]
                part = pairs
            parts.append(part)
        return parts

    def room(self, sizes: Sequence[int]) -> list[int]:
        """Number of random numbers that `normals` uses for each weight, a multiple of 64. `sizes` contains the number of random
        numbers per draw for each weight."""
        halves = (self.num_draws + 1) // 2 if self.antithetic else self.num_draws
        return [-(-halves * size // 64) * 64 for size in sizes]


class Posterior(nn.Module):
    """A distribution q over weights of a network.

    A user constructs a posterior with its options, and `bayesianize` binds a copy to the selected weights. A subclass defines

    - `__init__`, which checks every argument and stores it under its own name,
    - `build(values)`, which makes parameters, starting from the network's weights,
    - `draw(request)`, which returns weights with a leading axis of draws, and the KL of each draw,
    - `mean()` and `variance()`, and also `entropy()` if q has a density, because the KL to any Gaussian prior is computed from
    these three,
    - `set_to_prior(prior)`, if q can equal the prior.
    """

    name: ClassVar[str]
    """Name in code, configuration files and on the command line."""
    title: ClassVar[str] = ""
    """Short name for tables and figures; by default the name of the class."""
    paper: ClassVar[str] = ""
    """Author and year of the source."""
    cost: ClassVar[str] = ""
    """Number of stored parameters for P weights, as text."""
    aliases: ClassVar[tuple[str, ...]] = ()
    """Other names of the method in papers."""
    small_options: ClassVar[Mapping[str, Any]] = MappingProxyType({})
    """Arguments that suit small networks, for the estimators, the demonstration and comparisons."""
    is_point: ClassVar[bool] = False
    """Whether most or all weights are point estimates; see `methods.Method`."""
    slow: ClassVar[bool] = False
    """Whether a step is slow. A slow method takes fewer steps by default."""
    starts_at_rows: ClassVar[str | None] = None
    """Name of the argument that gives the inducing inputs, if they should start at rows of the training data."""
    runs_network: ClassVar[bool] = False
    """Whether drawing runs the network. Posteriors that run the network draw after all other posteriors."""
    capturable: bool = False
    """Whether a draw is a fixed sequence of operations on the device, so that a CUDA graph can capture it."""
    training_draws: int = 1
    """Default number of draws per step in `fit`."""
    num_members: int = 1
    """Number of members if the posterior is a mixture of members that all layers share."""
    local_reparameterization: bool = False
    """Whether noise differs between examples in the training objective."""
    looked: bool
    """Whether the training objective has been computed before, so that `materialized` is final."""
    materialized: set[str]
    """Weights that the network uses more than once. Even in the training objective, all examples share one draw of them."""
    correlated_priors: ClassVar[bool] = False
    """Whether the KL is known under a prior that correlates the positions of a kernel; see `second_moments`."""
    prior_scale: ClassVar[float] = 8.0
    """Default scale of Neal's prior. With scale 1, a trained network lost 1 to 4 percentage points of accuracy in three
    epochs, even as a point estimate. A rule fixed in advance chose 8 among 4, 8, 16 and 32
    (`benchmarks/prior_widths.py`)."""
    independent: ClassVar[bool] = False
    """Whether weights are independent Gaussians, so that `mean()` and `variance()` describe q completely."""
    init_std: float | None = None
    """Standard deviations before training, if the user has set them."""
    shares_statistics: bool = True
    """Whether draws vary around the network's weights, so that the network's own batch statistics suit all draws."""
    starts_at_network: bool = True
    """Whether the posterior starts at the network's weights, as closely as its family allows."""
    narrowing: float = 1.0
    """Factor on the initial standard deviations that the user has not set."""
    starts_wide: bool = False
    """Whether the noise acts on whole inputs or outputs of layers. If so, `fit` checks how much the noise costs a classifier."""
    keeping_init: ClassVar[str] = "network"
    """For posteriors with an argument `init`, its value that starts at the network's weights."""
    relative_stds: Mapping[str, float] = MappingProxyType({})
    """Default initial standard deviations by layer, relative to the layer's root mean square. Layers that are not listed use
    `RELATIVE_STD`."""
    prior_means: ClassVar[bool] = True
    """Whether the KL is known under a prior whose mean is not 0. For families that are built on the prior, it is not known."""

    def __init__(self) -> None:
        super().__init__()
        self.layers: tuple[Layer, ...] = ()
        self.bound_prior: PriorDraw | None = None
        self.runner: Runner | None = None
        self.results = Results()
        self.materialized: set[str] = set()
        self.looked = False

    # -- binding ---------------------------------------------------------------------------------------------------

    def config(self) -> dict[str, Any]:
        """The posterior as a plain dict: its name and its arguments."""
        arguments = inspect.signature(type(self).__init__).parameters
        return {"name": self.name, **{key: getattr(self, key) for key in arguments if key != "self"}}

    def bind(
        self,
        layers: tuple[Layer, ...],
        values: Mapping[str, Tensor],
        modules: Mapping[str, nn.Module],
        prior: PriorDraw | None = None,
        runner: Runner | None = None,
        relative_stds: Mapping[str, float] | None = None,
    ) -> Self:
        """A copy of this posterior over the given layers.

        Args:
            layers: The layers that the posterior spans.
            values: The network's weights by name. Means start at these values.
            modules: The module that owns each weight, by weight name, for posteriors that reinitialize modules.
            prior: The prior's scales, stored as `bound_prior`. Some families define q through the prior and therefore need these
                scales.
            runner: The network without its weights. Posteriors that run the network store this argument as `runner`.
            relative_stds: See the attribute `relative_stds`.

        Raises:
            ValueError: If the prior correlates the positions of a kernel or has a mean other than 0, and this family does not
                support such a prior.
        """
        if prior is not None and not self.correlated_priors:
            for weight in (weight for layer in layers for weight in layer.weights if weight.name in prior.factor):
                raise ValueError(
                    f"{type(self).__name__}: this family does not support a prior that correlates the positions of a "
                    f"kernel ({weight.name}); use priors.Scale() or priors.Neal(), or a posterior among "
                    f"{', '.join(sorted(kind.__name__ for kind in Posterior.__subclasses__() if kind.correlated_priors))}"
                )
        if prior is not None and len(prior.mean) and not self.prior_means:
            raise ValueError(
                f"{type(self).__name__}: this family needs a prior with mean 0; use priors.Neal(), or MeanField() with this prior"
            )
        bound = copy.deepcopy(self)
        bound.layers, bound.bound_prior, bound.relative_stds = layers, prior, dict(relative_stds or {})
        bound.runner = runner if self.runs_network else None
        bound.build(values, modules)
        return bound

    def relative_std(self, layer: Layer) -> float:
        """Default initial standard deviation of a layer's weights, relative to their root mean square."""
        return self.narrowing * self.relative_stds.get(layer.weights[0].layer, starts.RELATIVE_STD)

    def start_std(self, layer: Layer, values: Mapping[str, Tensor]) -> float:
        """The standard deviation of a layer's weights before training. `values` are the network's weights by name."""
        if self.init_std is not None:
            return self.init_std
        return self.relative_std(layer) * starts.root_mean_square(layer, values)

    @abstractmethod
    def build(self, values: Mapping[str, Tensor], modules: Mapping[str, nn.Module]) -> None:
        """Make the parameters; see `bind` for the arguments."""

    # -- buffers that differ between draws -------------------------------------------------------------------------

    def bind_network(self, buffers: Mapping[str, Tensor], posteriors: Sequence[Posterior]) -> None:
        """Adapt to the other posteriors, and store separate running statistics for different draws, if this posterior needs
        them. The network calls this method when all its posteriors are bound.

        Args:
            buffers: Running statistics of the network's normalization layers, by name.
            posteriors: All posteriors of the network, including this one.
        """

    def buffers_for(self, request: DrawRequest) -> list[dict[str, Tensor]] | None:
        """One dict of buffers for each draw of a finished request, or `None` if the posterior has no buffers of its own. The
        network reads and updates these buffers."""
        return None

    def average_buffers(self, network: nn.Module) -> None:
        """Write buffers that suit the posterior mean into a plain network."""

    @property
    def num_distinct_draws(self) -> int | None:
        """The number of different draws, or `None` if they cannot be counted. By default, a prediction uses each different draw
        once."""
        return None

    # -- drawing and moments ----------------------------------------------------------------------------------------

    @abstractmethod
    def draw(self, request: DrawRequest) -> tuple[MutableMapping[str, Tensor], Tensor]:
        """Draw weights.

        Returns:
            Weights by name, and the KL in nats. Each weight is a tensor or a structured weight, [S, *shape]. The KL is [S], or a
            scalar if all draws have the same KL.
        """

    @abstractmethod
    def mean(self) -> dict[str, Tensor]:
        """E_q[w] by name."""

    def mean_given(self, others: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """E_q[w] by name. Some posteriors run the network to compute this mean, with the means `others` as the weights of the
        other posteriors."""
        return self.mean()

    @abstractmethod
    def variance(self) -> dict[str, Tensor]:
        """Var_q[w] of each entry, by name."""

    def entropy(self) -> Tensor | float:
        """Differential entropy of q in nats; 0 if q has no density."""
        return 0.0

    def kl(self, prior: PriorDraw) -> Tensor:
        """KL(q || p) in nats, computed from q's entropy and second moments: a scalar, or [S] for S draws of a hierarchical
        prior."""
        return prior.cross_entropy(self.second_moments(prior), self.sizes()) - self.entropy()

    def second_moments(self, prior: PriorDraw, variance: Mapping[str, Tensor] | None = None) -> dict[str, Tensor]:
        r"""Second moments $\mathbb{E}_q \lVert w \rVert^2$, by name.

        For a kernel whose positions are correlated in the prior (`prior.factor`), the value is the matrix $\sum_f \mathbb{E}_q
        w_f w_f^\top$, [K, K], where f runs over the filters. Positions are independent in q by default. Families that correlate
        positions override `spatial_covariance`. Callers that have already computed the variance pass it as `variance`.
        """
        mean, variance = self.mean(), self.variance() if variance is None else variance
        found = {}
        for weight in self.weights:
            name = weight.name
            if name not in prior.factor:
                found[name] = (prior.centered(name, mean[name]).square() + variance[name]).sum()
            else:
                spread = self.spatial_covariance(weight, variance[name], prior.factor[name].shape[-1])
                found[name] = prior.second_moments(name, mean[name]) + spread
        return found

    def spatial_covariance(self, weight: Weight, variance: Tensor, positions: int) -> Tensor:
        """The covariance matrix of a filter's entries under q, summed over all filters of a kernel: [K, K].

        Args:
            weight: The kernel.
            variance: Variance of each entry, [*shape].
            positions: Number of positions K.
        """
        return torch.diag(variance.reshape(-1, positions).sum(0))

    def set_to_prior(self, prior: PriorDraw) -> None:
        """Make q equal to the prior, in place.

        Raises:
            ValueError: If this family does not contain the prior.
        """
        raise ValueError(
            f"{type(self).__name__}: q cannot be set to the prior; use MeanField or another Gaussian family"
        )

    def prune(self, keep: float) -> None:
        """Keep a fraction of the stored parameters, in place; see `bayesify.prune`."""
        raise ValueError(f"prune: {type(self).__name__} cannot be pruned; use MeanField or InducingWeights")

    def draws_fused(self, request: DrawRequest) -> bool:
        """Whether a draw needs so few kernel launches that a CUDA graph would not make it faster."""
        return False

    # -- for subclasses --------------------------------------------------------------------------------------------

    @property
    def weights(self) -> tuple[Weight, ...]:
        """All weights that this posterior spans."""
        return tuple(weight for layer in self.layers for weight in layer.weights)

    def cached(self, key: Hashable, compute: Callable[[], Computed]) -> Computed:
        """The result of a computation on the parameters. If gradients are off, the result is cached until the parameters change;
        see `Results`."""
        return self.results.cached(self, key, compute)

    def count_by_weight(self) -> dict[str, int | None]:
        """Number of trainable scalars by weight name. Parameters of a whole layer count toward the layer's first weight.

        A layer's other weights have the count `None` unless they have their own parameters.
        """
        counts: dict[str, int | None] = {}
        stored: dict[str, int] = {}
        for key, parameter in self.named_parameters():
            owner = decode(key.rpartition(".")[2])
            stored[owner] = stored.get(owner, 0) + (parameter.numel() if parameter.requires_grad else 0)
        for layer in self.layers:
            by_layer = stored.get(layer.name, 0) if layer.name not in {weight.name for weight in layer.weights} else 0
            for index, weight in enumerate(layer.weights):
                own = stored.get(weight.name, 0) + (by_layer if index == 0 else 0)
                counts[weight.name] = own if own or index == 0 else None
        return counts

    def remarks(self) -> dict[str, str]:
        """Remarks on single weights, by weight name. The summary shows these remarks to the user."""
        return {}

    def sizes(self) -> dict[str, int]:
        """Number of scalars in each weight, by name."""
        return {weight.name: weight.numel for weight in self.weights}


def by_layer(layers: Iterable[Layer], matrix: Callable[[Layer], Tensor]) -> dict[str, Tensor]:
    """Split each layer's matrix `[W b]`, [*batch, rows, cols], into the layer's weights, by name."""
    return {name: value for layer in layers for name, value in layer.from_matrix(matrix(layer)).items()}


def fixed_stds(posterior: Posterior, prior: PriorDraw) -> dict[str, float]:
    """Prior standard deviation of each weight. `set_to_prior` uses these values in families that can equal a prior with fixed
    scales. Raises `ValueError` if the prior draws its scales, correlates the entries of a weight, or has a mean other than 0."""
    for name in posterior.sizes():
        if isinstance(prior.std[name], Tensor) or name in prior.factor or name in prior.mean:
            raise ValueError(
                f"{type(posterior).__name__}: q of {name} cannot be set to a prior that has random scales, correlates "
                "positions, or is centered on a network; use a prior such as Neal()"
            )
    return {name: float(prior.std[name]) for name in posterior.sizes()}


def repeat_draws(value: Tensor, num_draws: int) -> Tensor:
    """The same value in every draw, without a copy: [*shape] -> [S, *shape]."""
    return value.unsqueeze(0) if num_draws == 1 else value.expand(num_draws, *value.shape)


# -- the posteriors of one network ------------------------------------------------------------------------------------


def shares_statistics(posteriors: Sequence[Posterior]) -> bool:
    """Whether at least one posterior varies around the network's weights and every other posterior has a single draw, so that the
    network's batch statistics suit all draws."""
    others = [part for part in posteriors if not part.shares_statistics]
    return len(others) < len(posteriors) and all(part.num_distinct_draws == 1 for part in others)


class Posteriors(nn.ModuleList):
    """The posteriors of one network, in the order of their selectors."""

    if TYPE_CHECKING:

        def __iter__(self) -> Iterator[Posterior]: ...

    def in_drawing_order(self) -> list[Posterior]:
        """The posteriors in the order of drawing: posteriors that run the network come last."""
        return sorted(self, key=lambda part: part.runs_network)

    @property
    def num_distinct_draws(self) -> int | None:
        """The number of different draws: 1 for point estimates, the number of networks for ensembles, otherwise `None`."""
        counts = {part.num_distinct_draws for part in self} - {1}
        return counts.pop() if len(counts) == 1 else None if counts else 1

    def bind_network(self, buffers: dict[str, Tensor]) -> None:
        """Show each posterior the network's running statistics and the other posteriors; see `Posterior.bind_network`."""
        for part in self:
            part.bind_network(buffers, list(self))

    def buffers_for(self, request: DrawRequest) -> list[dict[str, Tensor]] | None:
        """For each draw, one dict with the buffers of all posteriors; `None` if no posterior has its own buffers."""
        owned = [found for part in self if (found := part.buffers_for(request)) is not None]
        return [dict(ChainMap(*each)) for each in zip(*owned, strict=True)] or None

    def means(self, layout: NetworkLayout) -> dict[str, Tensor]:
        """The posterior means by name, [1, *shape]. Posteriors that run the network use the means of the other posteriors."""
        means: dict[str, Tensor] = {}
        for part in self.in_drawing_order():
            others = {name: mean[0] for name, mean in layout.cast(dict(means)).items()} if part.runs_network else {}
            means |= {name: mean.unsqueeze(0) for name, mean in part.mean_given(others).items()}
        return means

    def kl(self, prior: Any) -> Tensor:
        """KL to a draw of the prior, in closed form: a scalar."""
        return torch.as_tensor(sum((part.kl(prior) for part in self), prior.kl)).mean()

    def set_to_prior(self, prior: Prior) -> None:
        """Make q equal to the prior, in place. If a posterior cannot equal the prior, raise `ValueError` and change nothing."""
        before = [copy.deepcopy(part.state_dict()) for part in (self, prior)]
        try:
            prior.set_to_prior()
            for part in self:
                part.set_to_prior(prior.draw(1))
        except ValueError:
            self.load_state_dict(before[0])
            prior.load_state_dict(before[1])
            raise
