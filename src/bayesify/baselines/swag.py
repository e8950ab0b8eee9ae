"""SWAG: a Gaussian fitted to the iterates of stochastic gradient descent."""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Self, cast

import torch
from torch import Tensor, nn

from bayesify.arguments.checks import Budget, Count, CountOrZero, DataCount, NonNegative, Positive, Probability, checked
from bayesify.baselines.fixed_draws import FixedDraws
from bayesify.configuration import make_likelihood, make_prior, restore_likelihood
from bayesify.draws import Draws
from bayesify.likelihoods import Gaussian, Likelihood
from bayesify.likelihoods.objectives import expected_log_likelihood
from bayesify.maths.gamma import as_float
from bayesify.maths.noise import standard_normal
from bayesify.maths.value_checks import should_check
from bayesify.predictive import Predictive, RegressionPredictive
from bayesify.predictive.findings import joined
from bayesify.predictor import DEFAULT_NUM_DRAWS, Batch, Drawable, Phase, Trainable
from bayesify.priors import Prior
from bayesify.running.generators import own_generators
from bayesify.running.inputs_and_outputs import checked_inputs, explain_shape_errors, select_output
from bayesify.running.last_layer import last_layer
from bayesify.running.runner import Runner
from bayesify.storage.serializers import register_predictor
from bayesify.training import History, Update, fit
from bayesify.training.batch_statistics import statistics_of
from bayesify.training.batches import BatchReader, check_repeatable, count_examples, first_batches, parse_batch
from bayesify.training.noise import MAX_EXAMPLES, MIN_VARIANCE, new_rows_ratio
from bayesify.training.random_streams import loader_generators_kept
from bayesify.training.rules import Score, worse_than_start
from bayesify.training.validation import Totals, predict_plain
from bayesify.weights.batch_statistics import tracking_layers
from bayesify.weights.catalog import Weight, catalog
from bayesify.weights.module_state import below, copy_network, fingerprint, prefixed

MAX_LOSS_RISE = 10.0
"""Maximum allowed rise of the loss, in nats per example."""
DEFAULT_RATE = 1e-2
"""Default learning rate of SGD, before `gentle_rate` lowers it."""
RATE_DIVISOR, MAX_TRIES = 4.0, 5
"""If the iterates predict worse than the network, the default rate is divided by `RATE_DIVISOR`, at most `MAX_TRIES - 1` times."""
MAX_RMSE_RISE, MAX_NLL_RISE, MAX_ACCURACY_LOSS = 0.05, 0.03, 0.01
"""Allowed relative rise of the RMSE, rise of the NLL in nats per label, and loss of accuracy at the default rate."""
NUM_TRIAL_EXAMPLES, NUM_TRIAL_DRAWS = 1024, 8
"""Number of training rows and number of draws in the predictions that test the default rate."""


def gentle_rate(rate: float, likelihood: Likelihood, spread: float = 1.0) -> float:
    """A learning rate of SGD that suits the noise of a likelihood.

    The rate shrinks if the variance of the Gaussian noise is below a tenth of the targets' variance `spread`. The rate is then
    proportional to the noise variance, because the loss becomes twice as steep if this variance halves.
    """
    noise = float(likelihood.noise.detach().min()) if isinstance(likelihood, Gaussian) else spread
    return rate * min(1.0, 10 * noise / spread)


@register_predictor
class SWAG(Drawable):
    r"""A Gaussian with a diagonal plus low-rank covariance, fitted to the iterates of SGD (Maddox et al. 2019).

    $$ q(w) = \mathcal{N}\Big(\bar w,\ \tfrac{c}{2} \operatorname{diag}(v) + \tfrac{c}{2 (K - 1)} D D^\top\Big) $$

    $\bar w$ and $v$ are the mean and the variance of the collected iterates. The K columns of D belong to the last K iterates.
    Each column is the deviation of an iterate from the mean of the iterates collected until then (section 3.2). With `rank=0` the
    posterior is SWAG-Diagonal, $\mathcal{N}(\bar w, c \operatorname{diag}(v))$. The posterior covers every trainable parameter,
    including parameters of normalization layers. The moments are stored in float32 or float64. The variance is stored as a sum of
    squared deviations. The alternative, $E[w^2] - E[w]^2$, would lose precision in float32.

    Batch statistics belong to the weights with which they were collected. If the network has BatchNorm, `draw` and `predict`
    need a loader over training data, from which each draw computes its own statistics. Otherwise no loader is needed.

    To collect iterates, call `fit`, which continues training on a copy of the network, or call `collect(net)` in your own
    training loop.

    Args:
        net: The trained network, which is copied.
        likelihood: Likelihood p(y | outputs), as an instance, a name or plain data.
        rank: Largest number of columns of D; 0 for a diagonal covariance.
        scale: Factor c on the covariance; a value below 1 tempers the posterior.
        output: Name or index of the output that the likelihood uses, if the network has several; see `bayesianize`.

    Attributes:
        count: Number of collected iterates.
        mean, squared_deviations: The mean $\bar w$, and the squared deviations from $\bar w$ summed over iterates; each
            maps weight names to tensors.
        deviations: The matrix $D^\top$ as a mapping from weight names to tensors [K, *shape].

    Raises:
        TypeError: If `net` is not a module.
        ValueError: If `rank` or `scale` is out of range, or if the network has no trainable weight.
    """

    likelihood: Likelihood

    @checked
    def __init__(
        self,
        net: nn.Module,
        likelihood: Likelihood | str | Mapping[str, Any],
        rank: CountOrZero = 20,
        *,
        scale: Positive = 1.0,
        output: str | int | None = None,
    ) -> None:
        if rank == 1:
            raise ValueError(f"SWAG: rank={rank}; give an integer of at least 2, or 0 for a diagonal covariance")
        self.rank, self.scale, self.output = rank, float(scale), output
        self.network = copy_network(net, "SWAG")
        self.weights = catalog(net).trainable
        if not self.weights:
            raise ValueError("SWAG: no parameter of the network is trainable; set requires_grad=True on some of them")
        self.likelihood = cast(Likelihood, copy.deepcopy(make_likelihood(likelihood))).to(self._reference)
        self.history, self.count = History(), 0
        self.mean: dict[str, Tensor] = {}
        self.squared_deviations: dict[str, Tensor] = {}
        self.deviations: dict[str, Tensor] = {}

    @property
    def _reference(self) -> Tensor:
        return self.network.get_parameter(next(iter(self.weights)))

    # -- collecting ------------------------------------------------------------------------------------------------

    @torch.no_grad()
    @checked
    def collect(self, net: nn.Module | None = None) -> Self:
        """Add the current weights of a network as one more iterate.

        Args:
            net: A network in training, of the same architecture as this object's network; by default the copy that `fit` trains.

        Raises:
            ValueError: If a weight is missing, has a different shape, or is not finite. In these cases nothing changes.
        """
        values = {name: _iterate(self.network if net is None else net, weight) for name, weight in self.weights.items()}
        self.count += 1
        for name, value in values.items():
            if self.count == 1:
                self.mean[name], self.squared_deviations[name] = value.clone(), torch.zeros_like(value)
                self.deviations[name] = value.new_zeros(0, *value.shape)
            before = value - self.mean[name]
            self.mean[name] += before / self.count
            after = value - self.mean[name]
            self.squared_deviations[name] += before * after
            if self.rank:
                self.deviations[name] = torch.cat((self.deviations[name], after.unsqueeze(0)))[-self.rank :]
        return self

    def variance(self) -> dict[str, Tensor]:
        """For each weight name, the variance v over all iterates, without Bessel's correction."""
        return {name: total / max(1, self.count) for name, total in self.squared_deviations.items()}

    @checked
    def fit(
        self,
        loader: Iterable[Any],
        epochs: Count,
        learning_rate: Positive | None = None,
        *,
        momentum: Probability = 0.9,
        prior: Prior | str | Mapping[str, Any] | None = None,
        weight_decay: NonNegative = 0.0,
        num_data: DataCount | None = None,
        collect_every: Count | None = None,
        skip_epochs: CountOrZero = 0,
        optimizer: Callable[[Any], torch.optim.Optimizer] | None = None,
        read_batch: BatchReader | None = None,
        **options: Any,
    ) -> Self:
        """Continue training the copy of the network with a constant learning rate, and collect its iterates.

        The loss is the mean negative log-likelihood of a batch plus the penalty of the prior or of the weight decay. Parameters
        of the likelihood are trained too; the noise of `Gaussian()` starts at the mean squared residual. If the noise is
        estimated and no layer is a BatchNorm, `history.findings` warns when the mean of the iterates predicts worse than before.

        Args:
            loader: Iterable of batches that can be iterated once per epoch.
            epochs: Number of passes over the data. An iterate is collected at the end of each pass.
            learning_rate: Learning rate of SGD; it should be so large that the iterates keep moving. The default is
                `gentle_rate(0.01, likelihood)`, adapted to the targets' unit if the noise of `Gaussian()` is estimated. If
                iterates at the default rate predict training rows worse than the original network, training starts again at a
                quarter of the rate, at most four times. If all rows have the weight w, divide the rate by w.
            momentum: Momentum of SGD.
            prior: Gaussian prior of the weights. It acts as the weight decay `1 / (N std^2)` of each weight.
            weight_decay: Weight decay of SGD, the same for all weights; give either this or a prior.
            num_data: Number of examples N, which the prior needs; counted by default.
            collect_every: Number of steps between iterates. By default, an iterate is collected once per epoch.
            skip_epochs: Number of epochs before the first iterate is collected.
            optimizer: Function that makes an optimizer from parameter groups (with their weight decay); the default is SGD.
            read_batch: Function that converts an item of the loader to inputs and targets.
            options: Further arguments of `bayesify.fit`: steps, scheduler, precision, device, checkpoint, seed, progress.

        Returns:
            This object. The values of each epoch are in `history`.

        Raises:
            ValueError: If an argument is invalid, if weight decay is used with a prior or example weights, or if the loss diverges.
        """
        total = count_examples(loader, read_batch) if num_data is None else num_data
        groups, by_default = self._groups(prior, weight_decay, total), learning_rate is None and optimizer is None
        first = self._first_batches(loader, read_batch)
        spread, start = self._settle_noise(self._score(first)), self._score(first)
        rates = partial(self._with_rates, groups, spread=spread, first=first) if by_default else lambda _: groups
        options |= {"epochs": epochs, "num_data": total, "read_batch": read_batch}
        collect = partial(_Collecting, self, collect_every, skip_epochs)
        train = partial(self._train, loader, partial(_optimizer, optimizer, rates, momentum), collect, options)
        again = by_default and "checkpoint" not in options and not isinstance(loader, Iterator)
        rate = learning_rate or gentle_rate(DEFAULT_RATE, self.likelihood, spread)
        read = partial(self._read, loader, read_batch) if again else None
        self._train_gently(train, rate, partial(_Iterating, self, not weight_decay), read)
        self._widen_noise(first, total)
        self._compare(start, first)
        return self

    def _train(
        self,
        loader: Iterable[Any],
        make: Callable[[float], torch.optim.Optimizer],
        collect: Callable[[], _Collecting],
        options: Mapping[str, Any],
        rate: float,
        iterating: _Iterating,
    ) -> None:
        """Train at a learning rate and collect iterates. Raises `ValueError` if the loss rises by more than `MAX_LOSS_RISE`."""
        self.history = fit(iterating, loader, optimizer=lambda _: make(rate), update=collect(), **options)
        # The first batch may have fitted better than the others from the start, so the loss of the epoch must rise too.
        above = 0.0 if iterating.first is None else self.history[-1]["nll"] - iterating.first[2]
        if above > MAX_LOSS_RISE and iterating.rise() > MAX_LOSS_RISE:
            raise ValueError(
                f"SWAG: with learning_rate={rate:g}, the loss rose by more than {MAX_LOSS_RISE:g} nats per example; "
                "give learning_rate= a smaller value"
            )

    @torch.no_grad()
    def _widen_noise(self, batches: Sequence[Batch], num_data: int) -> None:
        """Increase the estimated noise, because the network has memorized part of its training rows; see `new_rows_ratio`."""
        likelihood, device = self.likelihood, self._reference.device
        if not batches or not isinstance(likelihood, Gaussian) or self.count < 2 or tracking_layers(self.network):
            return
        batches = [batch.to(device) for batch in batches]
        noise = float(likelihood.noise)
        found = self.predict(batches[0].x, NUM_TRIAL_DRAWS, generator=torch.Generator(device).manual_seed(0))
        ratio = new_rows_ratio(self.mean_network(), batches, noise, num_data, self.output)
        assert isinstance(found, RegressionPredictive)
        likelihood.set_noise(max(noise, ratio * noise / (1 + batches[0].mean(found.epistemic) / noise)))

    def _train_gently(
        self,
        train: Callable[[float, _Iterating], None],
        rate: float,
        make: Callable[[], _Iterating],
        read: Callable[[int], list[Batch]] | None,
    ) -> None:
        """Train at `rate`. If the posterior then predicts the rows from `read` clearly worse than the original network, start
        again at a lower rate, at most `MAX_TRIES - 1` times. If `read` is `None`, train once."""
        parts, network = (self.network, self.likelihood), copy.deepcopy(self.network).eval()
        given, collected = [copy.deepcopy(part.state_dict()) for part in parts], self.count
        for _ in range(MAX_TRIES - 1 if read is not None and not collected else 0):
            iterating = make()
            try:
                train(rate, iterating)
            except ValueError:
                if iterating.rise() <= 0.5:
                    raise
            else:
                assert read is not None
                if self.count < 2 or tracking_layers(self.network) or self._keeps(network, read(NUM_TRIAL_EXAMPLES)):
                    return
            rate /= RATE_DIVISOR
            for part, state in zip(parts, given, strict=True):
                part.load_state_dict(state)
            self.count, self.mean, self.squared_deviations, self.deviations = 0, {}, {}, {}
        train(rate, make())

    @torch.no_grad()
    def _keeps(self, network: nn.Module, batches: Sequence[Batch]) -> bool:
        """Whether the posterior predicts training rows about as well as the given network does."""
        draws = self.draw(NUM_TRIAL_DRAWS, generator=torch.Generator(self._reference.device).manual_seed(0))
        before, after = self._score(batches, network), self._score(batches, draws)
        if before is None or after is None:
            return True
        if before.rmse is not None and after.rmse is not None:
            return after.rmse <= (1 + MAX_RMSE_RISE) * before.rmse
        lost = (before.accuracy or 0.0) - (after.accuracy or 0.0)
        return after.nll - before.nll <= MAX_NLL_RISE * before.numbers and lost <= MAX_ACCURACY_LOSS

    def _with_rates(
        self, groups: list[dict[str, Any]], rate: float, spread: float, first: Sequence[Batch]
    ) -> list[dict[str, Any]]:
        """The parameter groups, with a learning rate added to each. The last layer's rate is proportional to `spread`, the
        variance of the targets, because the weights of this layer scale with the targets."""
        last = self._last_layer(first) if spread != 1 and first else ()
        ids = {id(self.network.get_parameter(name)) for name in last}
        rest = 1.0 if last else min(1.0, spread)
        return [{**group, "lr": rate * (spread if id(group["params"][0]) in ids else rest)} for group in groups]

    def _compare(self, start: Score | None, batches: Sequence[Batch]) -> None:
        if start is None or not self.count or tracking_layers(self.network):
            return
        now = self._score(batches, self.mean_network().eval())
        found = worse_than_start(start, now, held_out=False) if now is not None else []
        self.history.findings = joined([self.history.findings, found])
        for finding in found:
            warnings.warn(f"SWAG.fit: {finding}", stacklevel=4)

    def _first_batches(self, loader: Iterable[Any], read_batch: BatchReader | None) -> list[Batch]:
        """The first batches; empty if the noise need not be estimated, or if the loader can be iterated only once."""
        gaussian = self.likelihood if isinstance(self.likelihood, Gaussian) else None
        if gaussian is None or not gaussian.is_learned_by_fit or isinstance(loader, Iterator):
            return []
        return self._read(loader, read_batch, MAX_EXAMPLES)

    def _read(self, loader: Iterable[Any], read_batch: BatchReader | None, count: int) -> list[Batch]:
        """Batches with at least `count` examples in total, without batches of weight 0; no generator's state changes."""
        device = self._reference.device
        with loader_generators_kept(loader), own_generators([device] if device.type == "cuda" else []):
            found = first_batches(loader, count, read_batch)
        return [batch for batch in found if float(batch.counts.sum()) > 0]

    @torch.no_grad()
    def _score(self, batches: Iterable[Batch], model: nn.Module | Draws | None = None) -> Score | None:
        """The score of a model on the batches; the default is a copy of this object's network in evaluation mode."""
        model, totals = model or copy.deepcopy(self.network).eval(), Totals()
        for batch in batches:
            batch = batch.to(self._reference.device)
            if isinstance(model, Draws):
                made = self.predict(batch.x, draws=model)
            else:
                with explain_shape_errors(*checked_inputs(batch.x)):
                    made = predict_plain(model, batch.x, self.likelihood, self.output)
            totals.add(made, batch)
        return totals.score() if totals.total > 0 else None

    def _settle_noise(self, start: Score | None) -> float:
        """Set the noise to the mean squared residual, unless it is settled. Returns the targets' variance, or 1 if unknown."""
        if not isinstance(self.likelihood, Gaussian) or start is None or not start.guess or start.rmse is None:
            return 1.0
        if not self.likelihood.is_settled:
            self.likelihood.set_noise(max(start.rmse**2, MIN_VARIANCE))
        return start.guess**2

    def _last_layer(self, batches: Sequence[Batch]) -> Sequence[str]:
        """Names of the weights of the last layer; empty if the network has no last layer."""
        args, kwargs = checked_inputs(batches[0].to(self._reference.device).x)
        try:
            return last_layer(Runner(self.network, self.weights), self.weights, args, kwargs, self.output, owner="SWAG")
        except ValueError:
            return ()

    def _groups(self, prior: Any, weight_decay: float, num_data: int) -> list[dict[str, Any]]:
        if prior is not None and weight_decay:
            both = "prior= and weight_decay= are both given, but have the same effect"
            raise ValueError(f"SWAG: {both}; give only one of them")
        decay = dict.fromkeys(self.weights, weight_decay)
        if prior is not None:
            std = make_prior(prior).bind(self.weights).draw(1).std
            decay = {name: 1 / (num_data * float(std[name]) ** 2) for name in self.weights}
        trained = {name: [self.network.get_parameter(name)] for name in self.weights}
        groups: list[dict[str, Any]] = [{"params": trained[name], "weight_decay": decay[name]} for name in trained]
        learned = [parameter for parameter in self.likelihood.parameters() if parameter.requires_grad]
        return [*groups, {"params": learned, "weight_decay": 0.0}] if learned else groups

    # -- drawing ---------------------------------------------------------------------------------------------------

    @torch.no_grad()
    @checked
    def draw(
        self,
        num_draws: Count = 1,
        *,
        generator: torch.Generator | None = None,
        loader: Iterable[Any] | None = None,
        read_batch: BatchReader | None = None,
    ) -> Draws:
        r"""Draw S functions, each with weights $\bar w + \sqrt{c/2}\,(\sqrt v \odot z_1 + D z_2 / \sqrt{K - 1})$.

        Args:
            num_draws: Number of draws S.
            generator: Source of randomness, on any device; the global generator by default.
            loader: Training data from which each draw computes its batch statistics, in one pass per draw.
            read_batch: Function that converts an item of the loader to inputs and targets.

        Returns:
            The draws. Their `kl` is NaN, because it is unknown.

        Raises:
            ValueError: If fewer than 2 iterates were collected, or if the network has BatchNorm and there is no loader."""
        self._check_collected()
        if tracking_layers(self.network) and loader is None:
            needed = "the network has BatchNorm, and each draw computes its own batch statistics"
            raise ValueError(f"SWAG: {needed}; give loader=, a loader over training data")
        like = next(iter(self.mean.values()))
        columns = len(next(iter(self.deviations.values())))
        second = standard_normal(num_draws * columns, like, generator).view(num_draws, columns)
        sizes = [num_draws * weight.numel for weight in self.weights.values()]
        first, weights = standard_normal(sum(sizes), like, generator).split(sizes), {}
        for (name, variance), noise in zip(self.variance().items(), first, strict=True):
            spread = variance.sqrt() * noise.view(num_draws, *variance.shape).to(variance.device)
            if self.rank:
                low_rank = torch.tensordot(second.to(variance), self.deviations[name], dims=1)
                spread = (spread + low_rank / math.sqrt(columns - 1)) * math.sqrt(0.5)
            drawn = self.mean[name] + math.sqrt(self.scale) * spread
            weights[name] = drawn.to(self.network.get_parameter(name).dtype)
        runner, own = Runner(self.network, self.weights).snapshot(), None
        if loader is not None and tracking_layers(self.network):
            own = self._statistics(runner, weights, loader, read_batch)
        return Draws(runner, weights, like.new_full((num_draws,), float("nan")), own)

    def _statistics(
        self, runner: Runner, weights: Mapping[str, Tensor], loader: Iterable[Any], read: BatchReader | None = None
    ) -> list[dict[str, Tensor]]:
        check_repeatable(loader)
        batches = (parse_batch(item, read) for item in loader)
        return statistics_of(runner, weights, tracking_layers(self.network), batches)

    @checked
    def predict(
        self,
        x: Any,
        num_draws: Count | None = None,
        *,
        generator: torch.Generator | None = None,
        memory: Budget = None,
        loader: Iterable[Any] | None = None,
        draws: Draws | None = None,
        keep_outputs: bool | None = None,
        split_batch: bool = True,
    ) -> Predictive:
        """The predictive distribution of a batch; see `FixedDraws.predict` for the other arguments.

        Args:
            loader: Training data for batch statistics; see `draw`.
            draws: Existing draws to use instead of new draws. Their batch statistics are not computed again.
        """
        if draws is None:
            draws = self.draw(num_draws or DEFAULT_NUM_DRAWS, generator=generator, loader=loader)
        fixed = FixedDraws(draws, self.likelihood, self.output)
        return fixed.predict(x, memory=memory, keep_outputs=keep_outputs, split_batch=split_batch)

    @torch.no_grad()
    @checked
    def mean_network(self, loader: Iterable[Any] | None = None) -> nn.Module:
        """A plain network at the mean of the iterates (SWA, Izmailov et al. 2018), with batch statistics computed from the loader.

        Raises:
            ValueError: If no iterate was collected, or if the network has BatchNorm and there is no loader.
        """
        self._check_collected(1)
        plain = copy.deepcopy(self.network)
        for name, mean in self.mean.items():
            plain.get_parameter(name).copy_(mean)
        if tracking_layers(plain):
            if loader is None:
                raise ValueError(
                    "SWAG: the network has BatchNorm, whose statistics must be computed for the mean weights; call "
                    "mean_network(loader) with a loader over the training data"
                )
            means = {name: plain.get_parameter(name).detach().unsqueeze(0) for name in self.mean}
            (own,) = self._statistics(Runner(plain, self.weights), means, loader)
            buffers = dict(plain.named_buffers())
            for name, value in own.items():
                buffers[name].copy_(value)
        return plain

    def covariance_matrix(self) -> Tensor:
        """The covariance of a small network as a dense matrix, [P, P]. Weights are flattened row by row, in the order of `mean`."""
        self._check_collected()
        variance = torch.cat([value.flatten() for value in self.variance().values()])
        if not self.rank:
            return self.scale * torch.diag(variance)
        columns = torch.cat([value.flatten(1) for value in self.deviations.values()], dim=1)
        return 0.5 * self.scale * (torch.diag(variance) + columns.T @ columns / (len(columns) - 1))

    def _check_collected(self, least: int = 2) -> None:
        if self.count < least:
            remedy = f"first call fit, or call collect(net) {least} times"
            raise ValueError(f"SWAG: {self.count} iterates were collected, but at least {least} are needed; {remedy}")

    def moments(self) -> dict[str, dict[str, Tensor]]:
        """The collected moments as nested mappings, keyed by the moment's name in files and then by the weight's name."""
        return {"mean": self.mean, "squares": self.squared_deviations, "deviations": self.deviations}

    def set_moments(self, count: int, moments: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Set the moments of `count` iterates; the inverse of `moments`."""
        self.count, where = count, self._reference.device
        for kind, values in moments.items():
            attribute = "squared_deviations" if kind == "squares" else kind
            setattr(self, attribute, {name: values[name].to(where) for name in self.weights if name in values})

    # -- storage ---------------------------------------------------------------------------------------------------

    def config(self) -> dict[str, Any]:
        """All arguments as plain data, and the number of collected iterates."""
        same = {name: getattr(self, name) for name in ("rank", "scale", "output", "count")}
        return {"likelihood": self.likelihood.config(), "weights": list(self.weights), **same}

    def state(self) -> dict[str, Tensor]:
        """Network, likelihood and moments."""
        network, likelihood = self.network.state_dict(keep_vars=True), self.likelihood.state_dict()
        return prefixed(network=network, likelihood=likelihood, **self.moments())

    @classmethod
    def restore(cls, net: nn.Module, config: Any, state: dict[str, Tensor]) -> Self:
        """Rebuild the posterior over a copy of the network, with the collected moments."""
        swag = cls(net, config["likelihood"], config["rank"], scale=config["scale"], output=config["output"])
        swag.weights = {name: weight for name, weight in catalog(net).weights.items() if name in config["weights"]}
        swag.network.load_state_dict(below("network", state))
        swag.likelihood = restore_likelihood(config["likelihood"], state, swag._reference)
        swag.set_moments(config["count"], {kind: below(kind, state) for kind in swag.moments()})
        return swag

    def fingerprint(self) -> dict[str, str]:
        return fingerprint(self.network)

    def __repr__(self) -> str:
        return f"SWAG({type(self.network).__name__}, {self.count} iterates, rank {self.rank}, scale {self.scale:g})"


class _Iterating(Trainable):
    """The network whose iterates are collected, for `fit`. The optimizer's weight decay takes the place of the prior."""

    training_draws = 1

    def __init__(self, swag: SWAG, takes_weights: bool = True) -> None:
        self.swag, self.takes_weights = swag, takes_weights
        self.first: tuple[Batch, Phase, float] | None = None  # the first step's batch and phase, and its loss
        self._module = nn.ModuleDict({"network": swag.network, "likelihood": swag.likelihood})

    @property
    def module(self) -> nn.Module:
        return self._module

    def config(self) -> dict[str, Any]:
        swag = self.swag
        return {"rank": swag.rank, "output": swag.output, "likelihood": swag.likelihood.config()}

    def terms(
        self, batch: Batch, *, phase: Phase, num_data: int, num_draws: int, generator: torch.Generator | None = None
    ) -> tuple[Tensor, Tensor]:
        if batch.weights is not None and not self.takes_weights:
            raise ValueError(
                "SWAG: a batch has example weights, which weight_decay= cannot take into account; give prior= instead"
            )
        args, kwargs = checked_inputs(batch.x)
        with explain_shape_errors(args, kwargs):
            outputs = select_output(self.swag.network(*args, **kwargs), self.swag.output)
        data = expected_log_likelihood(outputs.unsqueeze(0), batch.y, self.swag.likelihood, num_data, batch.weights)
        if should_check(data):
            if not bool(torch.isfinite(data)):
                found = f"the loss is {-data.item() / num_data}, which is not finite"
                raise ValueError(f"SWAG: {found}; lower the learning rate")
            self.first = self.first or (batch, phase, _loss(data, batch, num_data))
        return data, torch.zeros_like(data)

    def rise(self) -> float:
        """Rise of the first batch's loss since the first step; infinite if the loss is not finite, 0 before the first step."""
        if self.first is None:
            return 0.0
        (batch, phase, start), network = self.first, self.swag.network
        kept = {name: value.clone() for name, value in network.named_buffers()}  # running statistics stay unchanged
        try:
            data, _ = self.terms(batch, phase=phase, num_data=len(batch), num_draws=1)
            return _loss(data, batch, len(batch)) - start
        except ValueError:
            return math.inf
        finally:
            for name, value in network.named_buffers():
                value.copy_(kept[name])


def _optimizer(make: Any, groups: Callable[[float], list[dict[str, Any]]], momentum: float, rate: float) -> Any:
    make = make or partial(torch.optim.SGD, lr=rate, momentum=momentum)
    return make(groups(rate))


def _loss(data: Tensor, batch: Batch, num_data: int) -> float:
    """Negative log-likelihood per example, computed from a batch's data term `data` and divided by the mean example weight."""
    return -float(data.detach()) / num_data / (float(batch.counts.mean()) or 1.0)


class _Collecting(Update):
    def __init__(self, swag: SWAG, collect_every: int | None, skip_epochs: int) -> None:
        self.swag, self.every, self.skip = swag, collect_every, skip_epochs
        self.steps = self.epochs = 0

    def after_step(self) -> None:
        self.steps += 1
        if self.every and self.epochs >= self.skip and self.steps % self.every == 0:
            self.swag.collect()

    def after_epoch(self) -> dict[str, float]:
        self.epochs += 1
        if not self.every and self.epochs > self.skip:
            self.swag.collect()
        return {"collected": self.swag.count}

    def identity(self) -> dict[str, Any]:
        return {"update": {"name": "SWAG", "collect_every": self.every, "skip_epochs": self.skip}}

    def state_dict(self) -> dict[str, Any]:
        return {"steps": self.steps, "epochs": self.epochs, "count": self.swag.count, "moments": self.swag.moments()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.steps, self.epochs = state["steps"], state["epochs"]
        self.swag.set_moments(state["count"], state["moments"])


def _iterate(net: nn.Module, weight: Weight) -> Tensor:
    remedy = "call collect with the network that was given to SWAG"
    try:
        value = net.get_parameter(weight.name).detach()
    except AttributeError:
        raise ValueError(f"SWAG: the network has no weight {weight.name}; {remedy}") from None
    if value.shape != weight.shape:
        shapes = f"shape {tuple(value.shape)} instead of {tuple(weight.shape)}"
        raise ValueError(f"SWAG: {weight.name} has {shapes}; {remedy}")
    if not bool(torch.isfinite(value).all()):
        raise ValueError(f"SWAG: {weight.name} is not finite; lower the learning rate")
    return as_float(value)
