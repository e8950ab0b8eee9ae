"""Noise variance of a regression. If it is not given, `fit` finds it in closed form, not by gradients."""

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd

from bayesify.jacobians.effective import held_out_ratio
from bayesify.likelihoods import Gaussian
from bayesify.network import BayesianNetwork, Start, adopt
from bayesify.predictive.base import Predictive
from bayesify.predictive.regression import RegressionPredictive, match_targets
from bayesify.predictor import Batch, Trainable
from bayesify.running.generators import own_generators, set_generator_states
from bayesify.running.inputs_and_outputs import checked_inputs, select_output
from bayesify.running.last_layer import last_layer, output_gain
from bayesify.running.modes import assigned
from bayesify.running.runner import Runner
from bayesify.training.batches import total_count
from bayesify.training.validation import Totals, predict_plain
from bayesify.training.watch import start_network
from bayesify.weights.catalog import catalog, make_gradients_plain, owner_of, put_in
from bayesify.weights.module_state import prefixed, swapped

MAX_EXAMPLES = 8192
"""Number of examples whose residuals give the initial variance. The standard error of the variance is then 1.6 %."""
UNTRAINED_SHARE = 0.1
"""If the given network hardly beats the targets' mean, the initial variance is this multiple of the targets' variance.
The network's residuals then say nothing about the noise, and a large variance would let the prior dominate before the
network has learned anything."""
MIN_EXPLAINED_SHARE = 0.2
"""Share of the targets' variance that a network must explain for its residuals to be used."""
FALLING_SHARE = 2 / 3
"""Share of the epochs in which the variance may only fall, because the residuals of a learning network exceed the noise."""
FINAL_DRAWS, FINAL_EXAMPLES = 8, 1024
"""Number of draws for the predictions that give the final variance, and number of examples that decide how far it is widened."""
START_EXAMPLES, START_DRAWS = 256, 16
"""Numbers of examples and draws that measure the initial spread of predictions to within a few percent."""
MAX_START_SHARE = 0.05
"""For a trained network, the mean epistemic variance of draws at the start may be at most this multiple of the noise. A
step uses one draw, which shifts the predictions of all rows alike. A wide start therefore makes the means noisy and the
predictions wide (`benchmarks.wider_networks.CHOOSING`)."""
MAX_START_LOSS = 0.005
"""The corresponding limit for classification under rank-one noise and dropout: at the start, draws may raise the NLL on
training rows by at most this many nats per label. On five networks for digits and sequences, this rise is 0.04 to 0.16
for rank-one noise, 0.01 to 0.09 for dropout, and 0.003 to 0.018 for other posteriors. In
`benchmarks.wider_networks.CHOOSING`, 4 of 6 pairs missed a bound with a limit of 0.02, and 2 of 6 with 0.005."""
MIN_VARIANCE = 1e-30
"""Smallest allowed variance. Float32 represents it with full precision."""
Read = Callable[[int], list[Batch]]
"""A function that returns the first batches, with a given number of examples."""


class LearnedNoise:
    r"""Noise variance of `likelihoods.Gaussian()` in one run of `fit`.

    The variance starts at the mean squared residual of the network that was made Bayesian or, after earlier training, of the
    posterior mean. If this network hardly beats the targets' mean, the variance starts at a tenth of the targets' variance. For
    given weights, the bound is largest at

    $$ \sigma^2 = \frac{1}{N O} \sum_n \mathbb{E}_q \| y_n - f(x_n) \|^2, $$

    the weighted mean over N examples with O outputs. After each epoch, the variance is set to this value, which follows
    from the epoch's mean negative log-likelihood. In the first two thirds of the epochs, the variance may only become
    smaller. If the network has dropout, the residuals of training batches are larger than the residuals of predictions.
    With dropout, or if a run stops early, the final variance comes from predictions in evaluation mode on the first rows of the
    data.

    A network memorizes part of the noise of its training rows. The final variance is therefore widened until the predictive
    variance is at least `jacobians.effective.held_out_ratio` times the mean squared residual of training rows. The predictive
    variance includes the epistemic variance v. The formula for $\sigma^2$ also includes v, so predictions would count v twice. If
    `held_out_ratio` is known and the draws are not members of an ensemble, the final variance is therefore reduced until the
    predictive variance equals the ratio times the mean squared residual. The variance is not reduced below the mean squared
    residual.

    With `rescales`, the last layer may be rescaled to units of the targets; see `restart`.
    """

    def __init__(self, model: Trainable, epochs: int, rescales: bool = False) -> None:
        bnn = model.module
        likelihood: nn.Module | None = bnn.likelihood if isinstance(bnn, BayesianNetwork) else None
        if isinstance(bnn, nn.ModuleDict) and "likelihood" in bnn:
            likelihood = bnn["likelihood"]  # a plain network trains together with its likelihood
        self._model, self._epochs, self._rescales = model, epochs, rescales
        self._likelihood = likelihood if isinstance(likelihood, Gaussian) and likelihood.is_learned_by_fit else None
        self._numbers = 1
        self.new_rows_ratio = 1.0  # mean squared error on new rows, divided by that on training rows
        # The variance before the change at the end of an epoch, until the epoch is in the history. A checkpoint in between stores
        # this value, because a continued run makes the change again.
        self.replaced: dict[str, Tensor] = {}

    def without_gradient(self) -> AbstractContextManager[None]:
        """Context in which no optimizer changes the variance."""
        return assigned([] if self._likelihood is None else [self._likelihood.raw_noise], "requires_grad", False)

    @torch.no_grad()
    def begin(self, read: Read, device: torch.device) -> None:
        """Record the size of the targets, and set the initial variance unless it is already set."""
        likelihood, bnn = self._likelihood, self._model.module
        batches = read(MAX_EXAMPLES) if likelihood is not None else []
        if likelihood is None or not batches:
            return
        weights = torch.cat([batch.counts for batch in batches])
        targets = torch.cat([batch.y.reshape(len(batch), -1) for batch in batches]).double().cpu()
        self._numbers = targets.shape[1]
        if likelihood.is_settled or not isinstance(bnn, BayesianNetwork):
            return
        shares = (weights / weights.sum()).unsqueeze(-1)
        spread = float((shares * (targets - (shares * targets).sum(0)).square()).sum() / self._numbers)
        network = start_network(self._model)
        assert network is not None
        batches = [batch.to(device) for batch in batches]
        residual, _ = self._errors(batches, lambda x: predict_plain(network, x, likelihood, bnn.output))
        trained = residual < (1 - MIN_EXPLAINED_SHARE) * spread
        constant = float((shares * targets.square()).sum()) / self._numbers or 1.0
        self._set(residual if trained else UNTRAINED_SHARE * (spread if spread > 1e-12 * constant else constant))
        if self._rescales and math.isfinite(residual) and spread > 1e-12 * constant:
            powers = self._find_unit(bnn, network, math.sqrt(spread), batches[0])
            if powers:
                restart(bnn, powers, keep_function=trained)
            if trained and all(part.starts_at_network for part in bnn.posteriors):
                self._narrow(bnn, powers, batches[0], residual)

    def _narrow(self, bnn: BayesianNetwork, powers: dict[str, int], batch: Batch, residual: float) -> None:
        """Reduce the initial standard deviations if a trained network's draws spread too much relative to the noise."""
        generator = torch.Generator(batch.y.device).manual_seed(0)
        some = batch.weighed().rows(slice(0, START_EXAMPLES))
        found = bnn.predict(some.x, START_DRAWS, generator=generator)
        assert isinstance(found, RegressionPredictive)
        share = some.mean(found.epistemic) / max(residual, MIN_VARIANCE)
        if math.isfinite(share) and share > MAX_START_SHARE:
            restart(bnn, powers, narrowing=math.sqrt(MAX_START_SHARE / share))

    def _find_unit(self, bnn: BayesianNetwork, network: nn.Module, size: float, batch: Batch) -> dict[str, int]:
        """Exponent k of the power $10^k$ nearest to the targets' size, for each last-layer weight that acts linearly."""
        args, kwargs = checked_inputs(batch.x)
        try:
            runner = Runner(network, bnn.weights)
            names = last_layer(runner, bnn.weights, args, kwargs, bnn.output, owner="fit")
        except ValueError:
            return {}
        gain = output_gain(runner, [bnn.weights[name] for name in names], args, kwargs, bnn.output)
        power = round(math.log10(size / math.sqrt(gain))) if gain else 0  # relative to the output of the layer
        if not power:
            return {}
        once = select_output(network(*args, **kwargs), bnn.output)
        with swapped(network, {name: 2 * network.get_parameter(name) for name in names}):
            twice = select_output(network(*args, **kwargs), bnn.output)
        linear = torch.allclose(twice, 2 * once, rtol=1e-3, atol=1e-4 * float(once.abs().max()))
        return dict.fromkeys(names, power) if linear else {}

    def _errors(self, batches: Sequence[Batch], predict: Callable[[Any], Predictive]) -> tuple[float, float]:
        """Squared residual and epistemic variance in evaluation mode, as weighted means over examples and outputs."""
        sums, count = torch.zeros(2, dtype=torch.float64), 0.0
        for batch in batches:
            found = predict(batch.x)
            assert isinstance(found, RegressionPredictive)
            parts = ((match_targets(batch.y, found.mean) - found.mean).square(), found.epistemic)
            sums += torch.stack([batch.counts @ part.reshape(len(batch), -1).mean(1).double().cpu() for part in parts])
            count += float(batch.counts.sum())
        residual, spread = (sums / count).tolist() if count > 0 else (math.nan, math.nan)
        return residual, spread

    def after_epoch(self, nll: float, epoch: int, last: bool) -> None:
        """Set the variance from the weighted mean negative log-likelihood of an epoch. `epoch` counts from 1."""
        likelihood = self._likelihood
        if likelihood is None:
            return
        self.replaced = {"likelihood.raw_noise": likelihood.raw_noise.detach().clone()}
        if not math.isfinite(nll):
            return
        now = float(likelihood.noise.detach())
        found = 2 * now * (nll / self._numbers - 0.5 * math.log(2 * math.pi * now))
        if last or epoch > FALLING_SHARE * self._epochs or found < now:
            self._set(found)

    @torch.no_grad()
    def finish(self, read: Read, device: torch.device, num_data: int, stopped: bool) -> None:
        """Set the final variance, perhaps from predictions in evaluation mode, and adapt it to new rows; see `LearnedNoise`."""
        bnn = self._model.module
        if self._likelihood is None or not isinstance(bnn, BayesianNetwork):
            return
        from_start, predict = torch.Generator(device).manual_seed, partial(bnn.predict, num_draws=FINAL_DRAWS)
        if stopped or any(isinstance(part, _DropoutNd) and part.p > 0 for part in bnn.network.modules()):
            batches = [batch.to(device) for batch in read(MAX_EXAMPLES)]
            self._set(sum(self._errors(batches, lambda x: predict(x, generator=from_start(0)))))
        batches = [batch.to(device) for batch in read(FINAL_EXAMPLES)]
        residual, spread = self._errors(batches, lambda x: predict(x, generator=from_start(0)))
        ratio = new_rows_ratio(one_network(bnn, from_start(0)), batches, residual, num_data, bnn.output)
        self.new_rows_ratio = ratio
        found = ratio * residual - spread
        if found > float(self._likelihood.noise):
            self._set(found)
        elif ratio > 1 and bnn.num_distinct_draws is None:
            self._set(min(max(found, residual), float(self._likelihood.noise)))

    def _set(self, variance: float) -> None:
        if self._likelihood is not None and math.isfinite(variance):
            self._likelihood.set_noise(max(variance, MIN_VARIANCE))


@torch.no_grad()
def narrow_start(model: Trainable, read: Read, device: torch.device) -> None:
    """Narrow a classifier's initial posterior if draws raise a trained network's NLL by more than `MAX_START_LOSS`."""
    bnn = model.module
    if not isinstance(bnn, BayesianNetwork) or bnn.likelihood is None or bnn.likelihood.task != "classification":
        return
    if not any(part.starts_wide for part in bnn.posteriors):
        return
    network = start_network(model)
    plain, drawn = Totals(), Totals()
    for batch in (batch.to(device) for batch in read(START_EXAMPLES)):
        assert network is not None
        plain.add(predict_plain(network, batch.x, bnn.likelihood, bnn.output), batch)
        drawn.add(bnn.predict(batch.x, START_DRAWS, generator=torch.Generator(device).manual_seed(0)), batch)
    start = plain.score() if plain.total else None
    if start is None or start.guess is None or start.nll > 0.8 * start.guess:
        return
    loss = (drawn.score().nll - start.nll) / start.numbers
    if math.isfinite(loss) and loss > MAX_START_LOSS:
        restart(bnn, {}, narrowing=math.sqrt(MAX_START_LOSS / loss))


def one_network(bnn: BayesianNetwork, generator: torch.Generator) -> nn.Module:
    """A plain network that represents the posterior: the network at the posterior mean, or one member of an ensemble."""
    if bnn.num_distinct_draws in (None, 1):
        return bnn.mean_network()
    network = copy.deepcopy(bnn.network)
    drawn = bnn.draw(1, generator=generator).materialize().weights
    put_in(network, list(bnn.weights.values()), {name: weight[0].detach() for name, weight in drawn.items()})
    return network


def new_rows_ratio(
    network: nn.Module, batches: Sequence[Batch], residual: float, num_data: int, output: str | int | None
) -> float:
    """`held_out_ratio` of a plain network; 1 if the network cannot be linearized."""
    network, weights = network.eval().apply(make_gradients_plain), catalog(network).trainable
    try:
        inputs = [checked_inputs(batch.x) for batch in batches]
        runner, counts = Runner(network, weights, evaluate=True), [batch.counts for batch in batches]
        total = num_data * total_count(batches) / max(1, sum(map(len, batches)))
        return held_out_ratio(runner, weights, inputs, residual, total, output, counts)
    except (RuntimeError, ValueError, NotImplementedError):
        return 1.0


# -- restart of posteriors, with weights in units of the targets or with smaller standard deviations ------------------


@torch.no_grad()
def restart(
    bnn: BayesianNetwork, powers: Mapping[str, int], *, keep_function: bool = True, narrowing: float = 1.0
) -> bool:
    """Restart the posteriors in place, with weights in units of $10^k$ and smaller standard deviations. The prior and the
    optimizer then see targets of size 1. See `Start` for the arguments.

    The posteriors restart only if none of them has changed since `bayesianize` or the last restart. The result says whether they
    restarted.
    """
    if not bnn.given_weights or not bnn.start.noise:
        return False
    start = replace(bnn.start, powers=powers, keep_function=keep_function, narrowing=narrowing)
    before, now = _built(bnn, bnn.start).state_dict(), bnn.posteriors.state_dict()
    if before.keys() != now.keys() or not all(torch.equal(value, now[name]) for name, value in before.items()):
        return False
    others = _built(bnn, start).state_dict()
    bnn.start = start
    units = {"unit_powers": torch.tensor([powers.get(name, 0) for name in bnn.weights])} if any(powers.values()) else {}
    adopt(bnn, prefixed(posteriors=others) | units)
    bnn.posteriors.load_state_dict(others)
    return True


def _built(bnn: BayesianNetwork, start: Start) -> nn.ModuleList:
    """Build the initial posteriors again, with the same random numbers that `bayesianize` used."""
    kept, values = start.powers if start.keep_function else {}, bnn.layout.widen(bnn.given_weights)
    values |= {name: values[name] / 10.0**power for name, power in kept.items() if power}
    plain = copy.deepcopy(bnn.network)
    put_in(plain, list(bnn.weights.values()), bnn.given_weights)
    modules = {name: owner_of(plain, name)[0] for name in bnn.weights}
    parts = copy.deepcopy(bnn.posteriors)
    with own_generators(start.noise):
        set_generator_states(start.noise)
        for part in parts:
            part.narrowing = start.narrowing
            part.build(values, modules)
    return parts
