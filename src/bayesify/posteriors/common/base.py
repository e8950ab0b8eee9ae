"""What every posterior is: a module that spans all its weights and draws them together with their KL."""

from __future__ import annotations

import copy
import inspect
from abc import abstractmethod
from collections.abc import Callable, Hashable, Iterable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn

from bayesify.maths.noise import NoiseSource
from bayesify.posteriors.common import starts
from bayesify.priors import PriorDraw
from bayesify.running.caching import Computed, Results
from bayesify.running.runner import Runner
from bayesify.weights.catalog import Layer, Weight
from bayesify.weights.layout import NetworkLayout
from bayesify.weights.named_parameters import decode


@dataclass(frozen=True, kw_only=True)
class DrawRequest:
    """What a posterior is asked for.

    Args:
        num_draws: S.
        prior: The prior's scales, for KL and for posteriors that are built on the prior.
        noise: Source of the random numbers.
        antithetic: Draw noise in pairs of opposite sign, which halves the random numbers and cancels odd errors.
        local: Whether noise may differ between examples: true inside the training objective only.
        runner: The network, for posteriors that run it in order to draw.
        weights: The draws of other posteriors of the same network, for those that run it.
        num_data: Examples in the dataset, where the draw is for a bound over it.
        networks: Which of the networks that ensembles make together each draw is, [S], by their number; whoever draws first
            chooses.
        layout: How the network's own weights lie in memory; who draws may write them so at once.
        autocast: Type in which the network runs under autocast, which is off while a posterior draws.
    """

    num_draws: int
    prior: PriorDraw
    noise: NoiseSource = field(default_factory=NoiseSource)
    antithetic: bool = False
    local: bool = False
    runner: Runner | None = None
    weights: Mapping[str, Tensor] | None = None
    num_data: int | None = None
    networks: dict[int, Tensor] = field(default_factory=dict)
    layout: NetworkLayout | None = None
    autocast: torch.dtype | None = None

    def dtype(self, name: str) -> torch.dtype:
        """Type of a weight in the network, where that is not the posterior's; else float32."""
        return torch.float32 if self.layout is None else self.layout.low_precision.get(name, torch.float32)

    def normals(self, sizes: Sequence[int], like: Tensor, tile: int = 1) -> list[Tensor]:
        """Standard normal numbers for several weights in one call.

        Args:
            sizes: Numbers per draw for each weight.
            like: A tensor whose type and device the noise takes.
            tile: What each draw of a weight starts at a multiple of, in the source's numbers.

        Returns:
            One [S, size] tensor per entry of `sizes`, each aligned for vector loads; contiguous where a draw is whole tiles.
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
        """Numbers of the source that `normals` takes for each weight, given those of a draw: multiples of 64."""
        halves = (self.num_draws + 1) // 2 if self.antithetic else self.num_draws
        return [-(-halves * size // 64) * 64 for size in sizes]


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
    """Name in code, configuration files and on the command line."""
    title: ClassVar[str] = ""
    """Short name for tables and figures; by default the name of the class."""
    paper: ClassVar[str] = ""
    """Author and year of the source."""
    cost: ClassVar[str] = ""
    """Number of stored parameters for P weights, in words."""
    aliases: ClassVar[tuple[str, ...]] = ()
    """Other names by which it is known in papers."""
    small_options: ClassVar[Mapping[str, Any]] = MappingProxyType({})
    """Arguments that suit small networks, for the estimators, the demonstration and comparisons."""
    is_point: ClassVar[bool] = False
    """Whether its weights, or most of them, are point estimates; see `methods.Method`."""
    slow: ClassVar[bool] = False
    """Whether its steps are slow, so that it gets fewer of them by default."""
    starts_at_rows: ClassVar[str | None] = None
    """Name of an argument that takes rows of the training data."""
    runs_network: ClassVar[bool] = False
    """Whether drawing runs the network; such posteriors are drawn after all others."""
    capturable: bool = False
    """Whether drawing is a fixed sequence of operations on the device, which a CUDA graph can capture."""
    training_draws: int = 1
    """Draws per step that `fit` uses unless told otherwise."""
    local_reparameterization: bool = False
    """Whether noise differs between examples in the training objective."""
    looked: bool
    """Whether the training objective was computed before, so that `materialized` is known."""
    materialized: set[str]
    """Weights that are drawn whole in the training objective too, since the network was seen to use them more than once."""
    correlated_priors: ClassVar[bool] = False
    """Whether the KL is known under a prior that correlates the positions of a kernel; see `second_moments`."""
    prior_scale: ClassVar[float] = 8.0
    """Scale of Neal's prior by default. With 1, three epochs pull a trained network down by 1 to 4 points of accuracy, even as a
    point estimate; of 4, 8, 16 and 32 a rule that was fixed before chose 8 (`benchmarks/prior_widths.py`)."""
    independent: ClassVar[bool] = False
    """Whether weights are independent Gaussians, so that `mean()` and `variance()` say all of q."""
    init_std: float | None = None
    """Standard deviations before training, where a user gives them."""
    shares_statistics: bool = True
    """Whether draws vary around the network's weights, so that the batch statistics of its training serve them all."""
    starts_at_network: bool = True
    """Whether it starts at the network's weights, as far as it can be there."""
    narrowing: float = 1.0
    """Factor on standard deviations before training that nobody has given."""
    starts_wide: bool = False
    """Whether its noise is for whole inputs or outputs of layers, so that `fit` looks at what draws of a classifier lose."""
    keeping_init: ClassVar[str] = "network"
    """The `init` that starts at the network's weights, for posteriors that have this option."""
    relative_stds: Mapping[str, float] = MappingProxyType({})
    """Standard deviations before training by default, as shares of a layer's root mean square; `RELATIVE_STD` for others."""
    prior_means: ClassVar[bool] = True
    """Whether the KL is known under a prior around other weights than 0; families that are built on the prior have none."""

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
        """The posterior as plain data: its name and its arguments."""
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
            layers: What it spans.
            values: The network's weights by name, where means start.
            modules: The module that owns each weight, by weight name; for posteriors that initialize again.
            prior: The prior's scales, kept as `bound_prior` for posteriors that are built on the prior.
            runner: The network without its weights, kept as `runner` by posteriors that run it.
            relative_stds: See the attribute.

        Raises:
            ValueError: If the prior correlates the positions of a kernel and this family has no KL for that.
        """
        if prior is not None and not self.correlated_priors:
            for weight in (weight for layer in layers for weight in layer.weights if weight.name in prior.factor):
                raise ValueError(
                    f"{type(self).__name__}: no KL is known under a prior that correlates the positions of a kernel "
                    f"({weight.name}); use priors.Scale() or priors.Neal(), or one of {', '.join(_correlated())}"
                )
        if prior is not None and len(prior.mean) and not self.prior_means:
            raise ValueError(
                f"{type(self).__name__}: it is built on a prior around 0; use priors.Neal(), or MeanField() with this prior"
            )
        bound = copy.deepcopy(self)
        bound.layers, bound.bound_prior, bound.relative_stds = layers, prior, dict(relative_stds or {})
        bound.runner = runner if self.runs_network else None
        bound.build(values, modules)
        return bound

    def relative_std(self, layer: Layer) -> float:
        """Standard deviations of a layer before training by default, as a share of its root mean square."""
        return self.narrowing * self.relative_stds.get(layer.weights[0].layer, starts.RELATIVE_STD)

    def start_std(self, layer: Layer, values: Mapping[str, Tensor]) -> float:
        """The standard deviation of a layer's weights before training, given the network's weights by name."""
        if self.init_std is not None:
            return self.init_std
        return self.relative_std(layer) * starts.root_mean_square(layer, values)

    @abstractmethod
    def build(self, values: Mapping[str, Tensor], modules: Mapping[str, nn.Module]) -> None:
        """Make the parameters; see `bind` for the arguments."""

    # -- buffers that differ between draws -------------------------------------------------------------------------

    def bind_buffers(self, buffers: Mapping[str, Tensor], posteriors: Sequence[Posterior]) -> None:
        """Take charge of buffers that are not the same in every draw; called once all posteriors of the network are bound.

        Args:
            buffers: Running statistics of the network's normalization layers, by name.
            posteriors: All posteriors of the network, this one among them.
        """

    def buffers_for(self, request: DrawRequest) -> list[dict[str, Tensor]] | None:
        """The buffers of each draw of a request that was drawn, which the network reads and updates; `None`: has none."""
        return None

    def average_buffers(self, network: nn.Module) -> None:
        """Put buffers that suit the posterior mean into a plain network, in place."""

    @property
    def num_distinct_draws(self) -> int | None:
        """How many different draws there are, where they can be counted: a prediction then takes each once."""
        return None

    # -- what the network asks -------------------------------------------------------------------------------------

    @abstractmethod
    def draw(self, request: DrawRequest) -> tuple[MutableMapping[str, Tensor], Tensor]:
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
        return prior.cross_entropy(self.second_moments(prior), self.sizes()) - self.entropy()

    def second_moments(self, prior: PriorDraw, variance: Mapping[str, Tensor] | None = None) -> dict[str, Tensor]:
        r"""Second moments by name: $\mathbb{E}_q \lVert w \rVert^2$, and for kernels with correlated positions (`prior.factor`) the
        matrix $\sum_f \mathbb{E}_q w_f w_f^\top$ over filters, [K, K].

        Here with independent positions in q; families that correlate them write `spatial_covariance`. The variance is taken as
        given where a draw has computed it already.
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

    def draws_fused(self, request: DrawRequest) -> bool:
        """Whether a draw is a few launches already, so that to capture it as a CUDA graph gains nothing."""
        return False

    # -- for subclasses --------------------------------------------------------------------------------------------

    @property
    def weights(self) -> tuple[Weight, ...]:
        """All weights under this posterior."""
        return tuple(weight for layer in self.layers for weight in layer.weights)

    def cached(self, key: Hashable, compute: Callable[[], Computed]) -> Computed:
        """The result of a computation on the parameters, done once per state of them where gradients are off; see `Results`."""
        return self.results.cached(self, key, compute)

    def count_by_weight(self) -> dict[str, int | None]:
        """Trainable scalars by weight name; what is stored per layer counts with its first weight, `None` for the others."""
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
        """What a user should know of single weights, by name, for the summary."""
        return {}

    def sizes(self) -> dict[str, int]:
        """Scalars in each weight, by name."""
        return {weight.name: weight.numel for weight in self.weights}


def _correlated() -> list[str]:
    """Names of the families that take a prior with correlated positions."""
    return sorted(kind.__name__ for kind in Posterior.__subclasses__() if kind.correlated_priors)


def by_layer(layers: Iterable[Layer], matrix: Callable[[Layer], Tensor]) -> dict[str, Tensor]:
    """Weights by name from a matrix `[W b]` of each layer, [*batch, rows, cols]."""
    return {name: value for layer in layers for name, value in layer.from_matrix(matrix(layer)).items()}


def fixed_stds(posterior: Posterior, prior: PriorDraw) -> dict[str, float]:
    """Prior standard deviation of each weight. Used by families in which q can equal the prior, when the prior is fixed.

    Raises:
        ValueError: If the prior draws its scales, or correlates a weight's entries: q does not depend on these draws.
    """
    for name in posterior.sizes():
        if isinstance(prior.std[name], Tensor) or name in prior.factor or name in prior.mean:
            raise ValueError(
                f"{type(posterior).__name__}: q of {name} cannot be a prior that draws its own scales or is around a network; "
                "use one such as Neal()"
            )
    return {name: float(prior.std[name]) for name in posterior.sizes()}


def repeat_draws(value: Tensor, num_draws: int) -> Tensor:
    """The same value in every draw, without a copy: [*shape] -> [S, *shape]."""
    return value.unsqueeze(0) if num_draws == 1 else value.expand(num_draws, *value.shape)
