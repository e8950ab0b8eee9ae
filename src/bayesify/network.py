"""The Bayesian network: a network without its weights, and a posterior that draws them."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Mapping, MutableMapping
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Annotated, Any, ClassVar, Generic, Literal, Self, cast

import torch
from torch import Tensor, nn
from typing_extensions import TypeVar

from bayesify import configuration
from bayesify.arguments.checks import Budget, Count, DataCount, Inputs, NonNegative, Range, checked
from bayesify.draws import Draws
from bayesify.likelihoods import Gaussian, Likelihood, objectives
from bayesify.maths.noise import Randomness, source_of
from bayesify.maths.value_checks import should_check
from bayesify.moments import predict_moments
from bayesify.posteriors.common.base import DrawRequest, Posterior, Posteriors, shares_statistics
from bayesify.posteriors.common.gpu_draws import CapturedDraws
from bayesify.posteriors.common.local_passes import run_local
from bayesify.posteriors.common.starts import relative_stds
from bayesify.posteriors.dropout import Dropout
from bayesify.predictive.base import Predictive
from bayesify.predictor import DEFAULT_NUM_DRAWS, Batch, Drawable, Phase, Trainable
from bayesify.priors import Prior
from bayesify.running.generators import generator_states, own_generators
from bayesify.running.inputs_and_outputs import as_inputs, checked_inputs, explain_shape_errors, select_output
from bayesify.running.modes import full_precision, outside_inference_mode
from bayesify.running.runner import Runner
from bayesify.weights.batch_statistics import (
    BatchStatistics,
    KeptStatistics,
    frozen_layers,
    running_statistics,
    same_choice,
)
from bayesify.weights.catalog import Weight, catalog, group_layers, owner_of, put_in, restore_gradients, take_out
from bayesify.weights.layout import NetworkLayout
from bayesify.weights.module_state import below, copy_network, fingerprint, prefixed, put_tensors, tensors_of
from bayesify.weights.named_parameters import first_parameter
from bayesify.weights.selection import select
from bayesify.weights.summary import Summary, summarize

Kind = TypeVar("Kind", bound=Predictive, default=Predictive, covariant=True)
"""Type of the predictive distribution, which the likelihood decides: classification or regression."""


class Road:
    """The code path that makes and runs the draws of one network. The network chooses this path once and keeps it.

    On a CPU each posterior draws directly. On a GPU, a posterior uses CUDA graphs for its draws if the draws can be captured.
    The attribute `runner` decides everything about the network's own modules: whether they are copied, whether draws use `vmap`
    or a loop, and how many rows fit into a memory budget. The network makes a new `Road` if its module or a posterior is
    replaced, or if the type of the device changes. A copied or unpickled network has no `Road` at first.

    `ways` contains one drawing function per posterior. The functions of posteriors that run the network come last. `has_buffers`
    says whether draws may have their own buffers. `num_draws` is the default number of draws in a prediction.
    """

    # Slots hide the modules from copies.
    __slots__ = ("_parts", "captured", "device", "has_buffers", "num_draws", "runner", "ways")

    def __init__(self, bnn: BayesianNetwork[Any]) -> None:
        self._parts = list(bnn.posteriors)
        self.device = first_parameter(bnn.posteriors).device.type
        self.runner = Runner(bnn.network, bnn.weights)
        self.captured = CapturedDraws()
        self.ways = [self._way(part) for part in bnn.posteriors.in_drawing_order()]
        self.has_buffers = any(type(part).buffers_for is not Posterior.buffers_for for part in self._parts)
        self.num_draws = bnn.posteriors.num_distinct_draws or DEFAULT_NUM_DRAWS

    def _way(self, part: Posterior) -> Callable[[DrawRequest], tuple[MutableMapping[str, Tensor], Tensor]]:
        if self.device != "cuda" or torch.compiler.is_compiling():
            return part.draw
        return partial(self.captured.draw, part)

    def leads_through(self, bnn: BayesianNetwork[Any]) -> bool:
        """Whether this `Road` was made for the network's current module, posteriors and device."""
        here = self.runner.network is bnn.network and list(bnn.posteriors) == self._parts
        return here and self.device == first_parameter(bnn.posteriors).device.type


@dataclass(frozen=True)
class Start:
    """Settings that determined the posteriors' initial values; see `training.noise.restart`."""

    noise: Mapping[torch.device, Tensor] = field(default_factory=dict)
    """States of torch's generators, by device, before the posteriors drew their random start. Empty if they never restart."""
    powers: Mapping[str, int] = field(default_factory=dict)
    """Exponent k of the unit $10^k$ of each weight, by name. Weights that are not listed have k = 0."""
    keep_function: bool = True
    """Whether the units leave the network's function unchanged. Otherwise the listed weights become $10^k$ times as large."""
    narrowing: float = 1.0
    """Factor on the initial standard deviations that the user has not set."""


class BayesianNetwork(nn.Module, Drawable, Trainable, Generic[Kind]):
    """A network without its weights, and a posterior that draws them. `bayesianize` makes it.

    Args:
        net: The network to copy.
        posteriors: Pairs of selector and posterior; the selector `None` selects all weights.
        likelihood: Likelihood p(y | outputs), or `None`.
        prior: Prior p(weights).
        output: Key or position of the output that the likelihood describes; see `bayesianize`.
        share_frozen: Whether to share frozen parameters with `net` instead of copying them.
        batch_statistics: See `bayesianize`.

    Attributes:
        network: The copy of `net`. It has no values for the weights that the posterior draws.
        posteriors: The bound posteriors, one per selector.
        likelihood: A copy of the given likelihood, on the network's device.
        prior: The bound prior.
        given_weights: The weights of `net`, kept until `fit` has compared the posterior with them. The dict is empty if every
            posterior starts at the weights of `net` and `fit` restarts no posterior.
        start: The settings that determined the posteriors' initial values.
        frozen_statistics: Names of the layers whose running statistics stay fixed in training mode.
        kept_statistics: Draws that have their own running statistics and that `predict` uses, or `None`; see `keep_draws`.
    """

    remedy = "; bayesianize makes one"

    def __init__(
        self,
        net: nn.Module,
        posteriors: list[tuple[str | nn.Module | None, Posterior]],
        *,
        likelihood: Likelihood | None,
        prior: Prior,
        output: str | int | None = None,
        share_frozen: bool = False,
        batch_statistics: BatchStatistics = "auto",
    ) -> None:
        super().__init__()
        known = catalog(net)
        selected, self._left = select(net, known, [selector for selector, _ in posteriors])
        taken = [weight for _, weights in selected for weight in weights]
        for name in [weight.name for weight in taken if net.get_parameter(weight.name).dtype == torch.float16]:
            raise ValueError(
                f"bayesianize: {name} is float16, which cannot hold small standard deviations; "
                "use net.float() or net.bfloat16(), and autocast for speed"
            )
        self.network = copy_network(net, "bayesianize", share_frozen=share_frozen)
        self.kept_statistics: KeptStatistics | None = None
        self._catalog = known
        self._selectors = [selector for selector, _ in selected]
        self.output = output
        modules = {weight.name: owner_of(net, weight.name)[0] for weight in taken}
        values = take_out(self.network, taken)
        finds_noise = isinstance(likelihood, Gaussian) and likelihood.is_learned_by_fit
        restarts = finds_noise or any(posterior.starts_wide for _, posterior in posteriors)
        elsewhere = restarts or not all(posterior.starts_at_network for _, posterior in posteriors)
        self.given_weights = {name: value.detach() for name, value in values.items()} if elsewhere else {}
        self.layout = NetworkLayout(net, taken, values)
        values = self.layout.widen(values)
        reference = values[taken[0].name]
        self._weights = {weight.name: weight for weight in taken}
        self.prior = prior.bind(self._weights, values).to(reference)
        belong = shares_statistics([posterior for _, posterior in posteriors])
        self.frozen_statistics = frozen_layers(net, batch_statistics, belong)
        for path in self.frozen_statistics:
            self.network.get_submodule(path).eval()
        shares = relative_stds(net, known.weights.values(), self.frozen_statistics, taken) if belong else {}
        live, runner = self.prior.live(), Runner(self.network, self._weights)
        self.start = Start(generator_states(reference.device) if restarts else {})
        self.posteriors = Posteriors(
            posterior.bind(group_layers(weights), values, modules, prior=live, runner=runner, relative_stds=shares)
            for (_, posterior), (_, weights) in zip(posteriors, selected, strict=True)
        )
        self.posteriors.bind_network(running_statistics(self.network))
        self.likelihood = copy.deepcopy(likelihood).to(reference) if likelihood is not None else None
        self._road: Road | None = Road(self)
        self.train(net.training)

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any) -> None:
        self.given_weights = {}
        adopt(self, {name.removeprefix(prefix): value for name, value in state_dict.items() if name.startswith(prefix)})
        super()._load_from_state_dict(state_dict, prefix, *args)

    def train(self, mode: bool = True) -> Self:
        """Set the mode. Layers with frozen statistics always stay in evaluation mode, while their scale and shift train."""
        super().train(mode)
        for path in self.frozen_statistics:
            self.network.get_submodule(path).eval()
        return self

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        if fn(torch.zeros(1)).dtype == torch.float16:
            raise ValueError(
                "BayesianNetwork: float16 cannot hold small standard deviations; use bfloat16, or autocast"
            )
        self.given_weights = {name: fn(value) for name, value in self.given_weights.items()}
        self.kept_statistics = self.kept_statistics and self.kept_statistics.map(fn)
        return nn.Module._apply(self, fn, recurse)

    def __getattr__(self, name: str) -> Any:
        if name == "fit":
            raise AttributeError("BayesianNetwork: there is no method fit; call bayesify.fit(bnn, loader, epochs=10)")
        return super().__getattr__(name)

    # -- drawing ---------------------------------------------------------------------------------------------------

    @property
    def posterior(self) -> Posterior:
        """The only posterior, which spans all selected weights.

        Raises:
            ValueError: If there are several posteriors. Use `posteriors` instead.
        """
        if len(self.posteriors) > 1:
            raise ValueError(
                f"BayesianNetwork.posterior: this network has {len(self.posteriors)} posteriors; choose one with "
                "bnn.posteriors[i]"
            )
        return next(iter(self.posteriors))

    @property
    def weights(self) -> dict[str, Weight]:
        """The weights that have a posterior, by name."""
        return dict(self._weights)

    def _decided(self) -> Road:
        road = self._road
        if road is None or not road.leads_through(self):
            road = Road(self)
            if not torch.compiler.is_compiling():
                self._road = road
        return road

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_road": None}  # a copy or an unpickled network makes a new road

    @checked
    def draw(
        self,
        num_draws: Count = 1,
        *,
        generator: Randomness = None,
        antithetic: bool = False,
        local: bool = False,
        num_data: DataCount | None = None,
    ) -> Draws:
        """Draw S functions from the posterior.

        Args:
            num_draws: Number S of draws.
            generator: Source of randomness, on any device. The default is torch's global generator.
            antithetic: Whether to draw Gaussian noise in pairs of opposite sign. This halves the number of random
                numbers and reduces the Monte Carlo error.
            local: Whether noise may differ between examples. Use this only for a training objective, never for
                prediction.
            num_data: Number N of examples in the dataset, if the draws are for a bound over a dataset.

        Returns:
            The draws, differentiable with respect to the posterior's parameters.
        """
        road, noise = self._decided(), source_of(generator)
        weights: MutableMapping[str, Tensor] = {}
        with full_precision(road.device) if torch.is_autocast_enabled(road.device) else nullcontext() as autocast:
            prior = self.prior.draw(num_draws, noise)
            kl: Any = prior.kl
            request = DrawRequest(
                num_draws=num_draws,
                prior=prior,
                noise=noise,
                antithetic=antithetic,
                local=local,
                num_data=num_data,
                runner=road.runner,
                layout=self.layout,
                autocast=autocast,
            )
            for index, draw in enumerate(road.ways):
                if index:
                    request = replace(request, weights=weights)
                part, part_kl = draw(request)
                part = part if self.layout.is_plain else self.layout.cast(part)
                weights = {**weights, **part} if index else part
                kl = kl + part_kl
        buffers = self.posteriors.buffers_for(request) if road.has_buffers else None
        return Draws(road.runner, weights, kl.expand(num_draws), buffers)

    @checked
    def forward(self, *args: Any, generator: torch.Generator | None = None, **kwargs: Any) -> Any:
        """The network's output with one fresh draw of the weights."""
        return self.draw(1, generator=generator)[0](*args, **kwargs)

    # -- training --------------------------------------------------------------------------------------------------

    phases: ClassVar[tuple[Phase, ...]] = ("map", "variational")

    @property
    def training_draws(self) -> int:
        """Number of draws per training step: the largest number that any posterior recommends."""
        return max(posterior.training_draws for posterior in self.posteriors)

    @property
    def noise_per_example(self) -> bool:
        """Whether any posterior draws noise at the outputs of layers instead of drawing weights."""
        return any(posterior.local_reparameterization for posterior in self.posteriors)

    def check_ready(self) -> None:
        """Raise `ValueError` if there is no likelihood."""
        self.require_likelihood("fit")

    def terms(
        self, batch: Batch, *, phase: Phase, num_data: int, num_draws: int, generator: torch.Generator | None = None
    ) -> tuple[Tensor, Tensor]:
        """If `phase` is `"map"`, the terms of `map_objective` for a batch, each [1]; otherwise the terms of `elbo`, each [S]."""
        options: dict[str, Any] = {"num_data": num_data, "example_weights": batch.weights}
        if phase == "map":
            return self.map_terms(batch.x, batch.y, **options)
        return self.elbo_terms(batch.x, batch.y, num_draws=num_draws, generator=generator, **options)

    @checked
    def elbo(
        self,
        x: Inputs,
        y: Tensor,
        *,
        num_data: DataCount,
        num_draws: Count = 1,
        kl_weight: NonNegative = 1.0,
        example_weights: Tensor | None = None,
        generator: Randomness = None,
        antithetic: bool = False,
    ) -> Tensor:
        r"""Estimate of the evidence lower bound of the whole dataset from one batch, in nats, to be maximized.

        $$ \frac{N}{B} \sum_b \frac1S \sum_s \omega_b \log p(y_b | f_s(x_b)) - \beta\,\mathrm{KL}(q \| p) $$

        Args:
            x: Inputs of B examples: a tensor, a tuple of positional inputs, or a dict of keyword inputs.
            y: Targets.
            num_data: Number N of examples in the dataset.
            num_draws: Number S of draws.
            kl_weight: Weight $\beta$ of the KL.
            example_weights: Weights $\omega$ of the examples, [B].
            generator: Source of randomness.
            antithetic: See `draw`.

        Returns:
            A scalar.

        Raises:
            ValueError: If inputs or targets are not finite or do not fit the network, or if the result is not finite.
        """
        log_likelihood, kl = self.elbo_terms(
            x,
            y,
            num_data=num_data,
            num_draws=num_draws,
            example_weights=example_weights,
            generator=generator,
            antithetic=antithetic,
        )
        return objectives.elbo(log_likelihood, kl, kl_weight)

    @checked
    def elbo_terms(
        self,
        x: Inputs,
        y: Tensor,
        *,
        num_data: DataCount,
        num_draws: Count = 1,
        example_weights: Tensor | None = None,
        generator: Randomness = None,
        antithetic: bool = False,
    ) -> tuple[Tensor, Tensor]:
        """The two terms of `elbo` separately, in nats: the data term and the KL of each draw, [S] each."""

        def compute() -> tuple[Tensor, Tensor]:
            draws = self.draw(num_draws, generator=generator, antithetic=antithetic, local=True, num_data=num_data)
            return self.terms_of(draws, x, y, num_data=num_data, example_weights=example_weights)

        draw = partial(self.draw, 1, local=True, num_data=num_data)
        return run_local(compute, draw, as_inputs(x), self.posteriors, self.network, generator)

    @checked
    def map_objective(
        self, x: Inputs, y: Tensor, *, num_data: DataCount, example_weights: Tensor | None = None
    ) -> Tensor:
        r"""$\log p(\mathcal{D} | m) + \log p(m)$ at the posterior mean m: a scalar in nats, to be maximized."""
        log_likelihood, penalty = self.map_terms(x, y, num_data=num_data, example_weights=example_weights)
        return objectives.elbo(log_likelihood, penalty)

    @checked
    def map_terms(
        self, x: Inputs, y: Tensor, *, num_data: DataCount, example_weights: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        r"""The two terms of `map_objective` separately: the data term and $-\log p$ of the mean, each [1]."""
        with full_precision(self._decided().device):
            means = self.posteriors.means(self.layout)
            prior = self.prior.typical()
            sizes = {name: weight.numel for name, weight in self._weights.items()}
            penalty = prior.cross_entropy(
                {name: prior.second_moments(name, mean) for name, mean in means.items()}, sizes
            )
        self.layout.cast(means)
        draws = Draws(self._decided().runner, means, (penalty + prior.kl).expand(1))
        return self.terms_of(draws, x, y, num_data=num_data, example_weights=example_weights)

    def terms_of(
        self, draws: Draws, x: Any, y: Tensor, *, num_data: int, example_weights: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """The data term and the KL of the given draws, [S] each, in nats; see `elbo`."""
        likelihood = self.likelihood or self.require_likelihood("elbo")
        args, kwargs = checked_inputs(x)
        with explain_shape_errors(args, kwargs):
            outputs = select_output(draws(*args, **kwargs), self.output)
        log_likelihood = objectives.expected_log_likelihood(outputs, y, likelihood, num_data, example_weights)
        if should_check(log_likelihood):
            objectives.check_result((log_likelihood - draws.kl).sum(), draws.weights, outputs)
        return log_likelihood, draws.kl

    @checked
    def kl(self, *, generator: torch.Generator | None = None) -> Tensor:
        """KL(q || p), summed over all weights: a scalar in nats. Without a closed form, the KL is estimated from one draw."""
        if any(posterior.runs_network for posterior in self.posteriors):
            return self.draw(1, generator=generator).kl.mean()
        with full_precision(self._decided().device):
            return self.posteriors.kl(self.prior.draw(1, generator))

    def set_to_prior(self) -> None:
        """Make q equal to the prior, in place.

        Raises:
            ValueError: If a posterior cannot equal the prior. In this case nothing changes.
        """
        self.posteriors.set_to_prior(self.prior)

    # -- prediction ------------------------------------------------------------------------------------------------

    @torch.no_grad()
    @checked
    def predict(
        self,
        x: Inputs,
        num_draws: Count | None = None,
        *,
        generator: torch.Generator | None = None,
        memory: Budget = None,
        antithetic: bool = False,
        keep_outputs: bool | None = None,
        split_batch: bool = True,
        draws: Draws | None = None,
        method: Literal["draws", "moments"] = "draws",
    ) -> Kind:
        """The predictive distribution of a batch, in evaluation mode, without gradients.

        The batch may have any size: it is split so that activations stay within a memory budget. The outputs of all draws are
        kept if they fit into the budget. Otherwise each chunk of outputs is reduced to summaries; quantiles and `log_prob` then
        run the network again.

        Args:
            x: Inputs: a tensor, a tuple of positional inputs, or a dict of keyword inputs.
            num_draws: Number S of draws. The default is all draws kept by `keep_draws`. If no draws are kept, the default is one
                draw per member for an ensemble, and 32 draws for other posteriors.
            generator: Source of randomness. Kept draws are fixed and do not use it.
            memory: The memory budget in bytes, or text such as `"1GiB"`. The default is 256 MiB.
            antithetic: See `draw`.
            keep_outputs: Whether to keep all outputs regardless of their size. By default, all outputs are kept only if they fit
                into the budget `memory`.
            split_batch: Whether the batch may be split. Set it to false if the output of a row depends on other rows,
                or if an input, such as a graph, belongs to the whole batch.
            draws: Draws of this network to use instead of fresh draws. To serve many requests, call `draw(16).detach()` once and
                pass the result each time.
            method: `"draws"`, or `"moments"` to propagate means and variances through the network in one pass without draws.
                `"moments"` works for posteriors of independent Gaussians (`MeanField`, `KTied`, `Point`); see
                `bayesify.moments`.

        Raises:
            ValueError: If there is no likelihood, if `draws` belong to another network, if the inputs do not fit, or if
                moments cannot be propagated through a module.
        """
        likelihood = self.likelihood or self.require_likelihood("predict")
        args, kwargs = checked_inputs(x)
        if method == "moments":
            if num_draws is not None or draws is not None or antithetic:
                raise ValueError("predict: method='moments' draws nothing; omit num_draws=, draws=, antithetic= here")
            road, options = self._decided(), {"output": self.output, "memory": memory, "split_batch": split_batch}
            with explain_shape_errors(args, kwargs), full_precision(road.device):
                given = (road.runner, self.posteriors, self.layout, likelihood, args, kwargs)
                return cast(Kind, predict_moments(*given, **options))
        if draws is None:
            count = num_draws or self._decided().num_draws
            fresh = partial(self.draw, count, generator=generator, antithetic=antithetic)
            draws = fresh() if antithetic else self._kept_draws(num_draws) or fresh()
        elif draws.runner.network is not self.network:
            raise ValueError("predict: the draws belong to another network; make them with draw(...) of this network")
        with explain_shape_errors(args, kwargs):
            outputs = draws.outputs(
                args, kwargs, output=self.output, keep=keep_outputs, memory=memory, split_batch=split_batch
            )
        return cast(Kind, likelihood.predictive(outputs))

    def _kept_draws(self, num_draws: int | None) -> Draws | None:
        kept = self._valid_statistics()
        if kept is None:
            return None
        if num_draws is not None and num_draws > len(kept):
            warnings.warn(
                f"predict: num_draws={num_draws}, but only {len(kept)} draws have their own batch statistics, so "
                "this prediction uses batch statistics averaged over draws, which are less accurate; give a smaller "
                "num_draws=, or keep more draws with bayesify.keep_draws",
                stacklevel=4,
            )
            return None
        count = len(kept) if num_draws is None else num_draws
        drawn = self.draw(len(kept), generator=torch.Generator().manual_seed(kept.seed))[:count]
        return Draws(drawn.runner, drawn.weights, drawn.kl, kept.buffers(count))

    def _valid_statistics(self) -> KeptStatistics | None:
        """The statistics that `keep_draws` stored, or `None` if the network, a posterior or the prior has changed since then."""
        kept = self.kept_statistics
        return kept if kept is not None and kept.hold(self.network, self.posteriors, self.prior) else None

    @property
    def num_distinct_draws(self) -> int | None:
        """The number of different draws, or `None` if draws cannot be counted; see `Posteriors`."""
        return self.posteriors.num_distinct_draws

    @torch.no_grad()
    def mean_network(self) -> nn.Module:
        """A plain network at the posterior mean: a copy of the original network with the weights E_q[w]."""
        plain = copy.deepcopy(self.network)
        with full_precision(self._decided().device):
            means = {name: mean[0] for name, mean in self.layout.cast(self.posteriors.means(self.layout)).items()}
        put_in(plain, list(self._weights.values()), means)
        for part in self.posteriors:
            part.average_buffers(plain)
        return plain.apply(restore_gradients)

    # -- description -----------------------------------------------------------------------------------------------

    def config(self) -> dict[str, Any]:
        """The options of the network as plain data, from which `bayesianize(net, config)` makes the same kind of network
        again."""
        parts = [part.config() for part in self.posteriors]
        posterior: Any = parts[0] if self._selectors == [None] else dict(zip(self._selectors, parts, strict=True))
        return {
            "posterior": posterior,
            "prior": self.prior.config(),
            "likelihood": self.likelihood.config() if self.likelihood is not None else None,
            "output": self.output,
            "batch_statistics": same_choice(self.network, self.frozen_statistics),
        }

    def state(self) -> dict[str, Tensor]:
        """Parameters and buffers by dotted name, packed masks of pruned parameters, and statistics of kept draws."""
        kept = self._valid_statistics()
        return tensors_of(self) | (prefixed(kept_statistics=kept.state()) if kept is not None else {})

    @classmethod
    def restore(cls, net: nn.Module, config: Any, state: dict[str, Tensor]) -> Self:
        """The network that `config()` and `state()` describe, built on a copy of `net`."""
        with own_generators(), outside_inference_mode():  # posteriors may start at random
            made = cls(net, **vars(configuration.restore_choices(net, config)))
        kept = below("kept_statistics", state)
        adopt(made, state)
        put_tensors(made, {name: value for name, value in state.items() if not name.startswith("kept_statistics.")})
        if kept:
            made.kept_statistics = KeptStatistics.restore(kept, made.network)
        return made

    def fingerprint(self) -> dict[str, str]:
        """Fingerprint of the network that was given to `bayesianize`."""
        return fingerprint(self.mean_network())

    def summary(self) -> Summary:
        """Each weight with its posterior, or the reason why it has none. The summary also counts the parameters of the original
        network and of the Bayesian network."""
        points = {name for name, value in self.network.named_parameters() if value.requires_grad}
        total = sum(parameter.numel() for parameter in self.parameters() if parameter.requires_grad)
        return summarize(self._catalog.weights, self._left, self.posteriors, points, total)

    def extra_repr(self) -> str:
        """The number of weights that have a posterior."""
        return f"{len(self._weights)} of {len(self._catalog.weights)} weights under a posterior"


def adopt(bnn: BayesianNetwork[Any], state: Mapping[str, Tensor]) -> None:
    """Set, in place, the posteriors' units and the dropout rates. `fit` found them before its first step and saved them in
    `state`.

    Each weight has a unit $10^k$: the network's weight is the posterior's weight times this unit. `unit_powers` holds the
    exponent k of each weight.
    """
    if "unit_powers" in state:
        powers = state["unit_powers"].to(first_parameter(bnn.posteriors).device)
        bnn.register_buffer("unit_powers", powers)
        bnn.layout.set_units({name: 10.0**k for name, k in zip(bnn.weights, powers.tolist(), strict=True) if k})
    for index, part in enumerate(bnn.posteriors):
        rate = state.get(f"posteriors.{index}.found_rate")
        if rate is not None and isinstance(part, Dropout):
            part.set_rate(float(rate))


@checked
def prune(bnn: BayesianNetwork, keep: Annotated[float, Range(above=0, most=1)]) -> BayesianNetwork:
    """Keep a fraction of a posterior's parameters and set the others to 0, in place (Ritter et al. 2021, section 4.3).

    `InducingWeights` keeps the largest entries of each Z. `MeanField` keeps the mean and the standard deviation of the
    weights with the largest |mean| / std in the whole network. Pruned entries stay 0. The kept entries become new,
    shorter parameters. Further training changes only these parameters and needs a new optimizer, which `fit` creates.
    `count_parameters` counts only kept entries. `save` writes the kept entries and, with one bit per original entry, their
    positions. Draws with their own BatchNorm statistics no longer apply after pruning; `fit` and `keep_draws` make new ones.

    Args:
        bnn: A network whose posteriors are all `MeanField` or `InducingWeights`.
        keep: Fraction to keep, relative to the number of entries before any pruning.

    Returns:
        `bnn`.

    Raises:
        ValueError: If `keep` is not in (0, 1], if it exceeds the fraction that is left, or if a posterior
            cannot be pruned. In these cases nothing has changed.
    """
    parts = bnn.posteriors
    for part in parts:
        copy.deepcopy(part).prune(keep)
    for part in parts:
        part.prune(keep)
    return bnn
