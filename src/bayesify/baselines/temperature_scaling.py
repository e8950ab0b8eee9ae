"""Temperature scaling: one number, fitted to validation data, that makes predictions softer or sharper."""

from __future__ import annotations

import copy
import inspect
import math
import warnings
from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any, Self

import torch
from torch import Tensor, nn

from bayesify.configuration import make_likelihood
from bayesify.draws import Draws
from bayesify.likelihoods import Likelihood
from bayesify.predictive.base import Predictive
from bayesify.predictive.regression import RegressionPredictive
from bayesify.running.inputs import as_inputs, check_inputs, explain_shape_errors
from bayesify.running.runner import Runner
from bayesify.storage.serializers import SERIALIZERS, Serializer, fingerprint, register_serializer, serializer_for
from bayesify.training.batches import BatchReader, check_repeatable, parse_batch
from bayesify.weights.catalog import catalog

LOWEST, HIGHEST = 1e-3, 1e3
"""Between these the temperature, or the factor on the variance, is sought."""


class TemperatureScaling:
    r"""A model whose logits are divided by one temperature, or whose noise is multiplied by one factor (Guo et al. 2017).

    $$ p(y | x) = \frac1S \sum_s \operatorname{softmax}(f_s(x) / T)_y, \qquad
       p(y | x) = \frac1S \sum_s \mathcal{N}(y; \mu_s(x), c\, v_s(x)) $$

    for classification (yes-or-no outputs too) and for regression. The number is that which maximizes the validation data's
    log-likelihood. For one draw, such as a plain network's, the first problem is convex in 1/T and the most probable class
    stays what it was; the second has the closed form $c = \operatorname{mean} (y - \mu)^2 / v$. For several draws each
    draw's logits are divided, which may move the mean of their probabilities across a tie, and c changes the noise but not
    what the draws disagree about; both are then solved in one dimension, from the best point of a grid.

    Args:
        model: A plain network, or anything with `.predict` that returns a mixture over draws, such as a `BayesianNetwork`
            or `SWAG`.
        likelihood: p(y | outputs), for a plain network: an instance, a name or plain data.
        output: Which of several outputs of a plain network the likelihood is about.

    Attributes:
        temperature: T; 1 before `fit` and for regression.
        variance_scale: c; 1 before `fit` and for classification.

    Raises:
        TypeError: If the model neither is a module nor predicts.
        ValueError: If a plain network comes without a likelihood.
    """

    def __init__(
        self,
        model: Any,
        likelihood: Likelihood | str | Mapping[str, Any] | None = None,
        *,
        output: str | int | None = None,
    ) -> None:
        self.model, self.output = model, output
        self.likelihood: Likelihood | None = None
        self.temperature = self.variance_scale = 1.0
        if hasattr(model, "predict"):
            if likelihood is not None:
                raise ValueError(
                    f"TemperatureScaling: {type(model).__name__} has a likelihood of its own; leave it out"
                )
            return
        if not isinstance(model, nn.Module):
            raise TypeError(
                f"TemperatureScaling: {type(model).__name__} does not predict; give a network, or something with .predict"
            )
        made = make_likelihood(likelihood)
        if made is None:
            raise ValueError(
                "TemperatureScaling: a plain network needs a likelihood, such as likelihoods.Categorical()"
            )
        self.likelihood = copy.deepcopy(made).to(next(model.parameters()))

    def fit(
        self,
        loader: Iterable[Any],
        *,
        num_draws: int | None = None,
        seed: int = 0,
        read_batch: BatchReader | None = None,
        **options: Any,
    ) -> Self:
        """Find the number that makes validation data most probable.

        Args:
            loader: Batches of validation data, which the model was not trained on.
            num_draws: Draws of the model's predictions, where it draws; its own default if left out.
            seed: Of the draws: the same functions for every batch.
            read_batch: A function from what the loader yields to inputs and targets.
            options: Further arguments of the model's `predict`.

        Returns:
            Itself.

        Raises:
            ValueError: If the loader is empty, or a log-likelihood is not finite.
            TypeError: If the model's predictions are no mixture over draws.
        """
        check_repeatable(loader)
        found: list[tuple[Predictive, Tensor]] = []
        device = self._device()
        for item in loader:
            data = parse_batch(item, read_batch)
            data = data if device is None else data.to(device)
            drawing = self._drawing(num_draws, seed) | options
            prediction = self._predict(data.x, keep_outputs=True, **drawing)
            # In float64, in which one number is fitted to rounding.
            found.append((prediction.with_outputs(prediction.outputs.double()), data.y))
        if not found:
            raise ValueError("TemperatureScaling: the loader yields no batch; give one over validation data")
        if isinstance(found[0][0], RegressionPredictive):
            self.variance_scale = self._best_variance_scale(found)
        else:
            self.temperature = _minimize(lambda log: _nll(found, temperature=log.exp()), "the temperature")
        return self

    def predict(self, x: Any, num_draws: int | None = None, **options: Any) -> Predictive:
        """The predictive distribution with scaled outputs or noise.

        Args:
            x: Inputs: a tensor, a tuple of positional inputs, or a dict of keyword inputs.
            num_draws: S, where the model draws; its own default if left out.
            options: Further arguments of the model's `predict`, such as `generator`.
        """
        given = {} if num_draws is None else {"num_draws": num_draws}
        prediction = self._predict(x, **given, **options)
        return rescale(prediction, self.temperature, self.variance_scale)

    @torch.no_grad()
    def _predict(self, x: Any, **options: Any) -> Predictive:
        if self.likelihood is None:
            known = inspect.signature(self.model.predict).parameters
            if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in known.values()):
                options = {key: value for key, value in options.items() if key in known or key != "keep_outputs"}
            prediction: Predictive = self.model.predict(x, **options)
            return prediction
        options.pop("num_draws", None)
        options.pop("generator", None)
        args, kwargs = as_inputs(x)
        check_inputs(args, kwargs)
        name, weight = next(iter(catalog(self.model).weights.items()))
        value = self.model.get_parameter(name).detach().unsqueeze(0)
        draws = Draws(Runner(self.model, {name: weight}), {name: value}, value.new_zeros(1))
        with explain_shape_errors(args, kwargs):
            outputs = draws.outputs(
                args,
                kwargs,
                output=self.output,
                keep=options.pop("keep_outputs", None),
                memory=options.pop("memory", None),
            )
        if options:
            raise TypeError(f"TemperatureScaling: predict of a plain network takes no {next(iter(options))!r}")
        return self.likelihood.predictive(outputs)

    def _drawing(self, num_draws: int | None, seed: int) -> dict[str, Any]:
        known = inspect.signature(self.model.predict).parameters if self.likelihood is None else {}
        given: dict[str, Any] = {} if num_draws is None else {"num_draws": num_draws}
        if "generator" in known:
            given["generator"] = torch.Generator().manual_seed(seed)
        return given

    def _device(self) -> torch.device | None:
        for owner in (self.model, getattr(self.model, "network", None)):
            if isinstance(owner, nn.Module):
                return next((tensor.device for tensor in (*owner.parameters(), *owner.buffers())), None)
        return None

    def _best_variance_scale(self, found: list[tuple[Predictive, Tensor]]) -> float:
        if any(prediction.outputs.shape[0] > 1 for prediction, _ in found):
            return _minimize(lambda log: _nll(found, variance_scale=log.exp()), "the factor on the variance")
        total, count = 0.0, 0
        for prediction, y in found:
            assert isinstance(prediction, RegressionPredictive)
            target = y.to(prediction.mean).view(prediction.mean.shape)
            standardized = (target - prediction.mean).square() / prediction.variance
            total, count = total + float(standardized.sum()), count + standardized.numel()
        if not (math.isfinite(total) and total > 0):
            raise ValueError(f"TemperatureScaling: squared standardized residuals sum to {total}; check the targets")
        return total / count

    def __repr__(self) -> str:
        return (
            f"TemperatureScaling({type(self.model).__name__}, temperature {self.temperature:.4g}, "
            f"variance scale {self.variance_scale:.4g})"
        )


def rescale(
    prediction: Predictive, temperature: float | Tensor = 1.0, variance_scale: float | Tensor = 1.0
) -> Predictive:
    """A prediction with each draw's logits divided by a temperature, or each draw's variance multiplied by a factor.

    Raises:
        TypeError: If the prediction is no mixture over draws.
    """
    if not prediction.is_mixture:
        raise TypeError(
            f"TemperatureScaling: {type(prediction).__name__} is no mixture over draws of outputs; use a prediction by draws"
        )
    if isinstance(prediction, RegressionPredictive):
        return prediction.map_components(partial(_scaled, factor=variance_scale))
    return prediction.map_outputs(lambda outputs: outputs / temperature)


def _scaled(mean: Tensor, variance: Tensor, factor: float | Tensor) -> tuple[Tensor, Tensor]:
    return mean, variance * factor


def _nll(
    found: list[tuple[Predictive, Tensor]],
    temperature: float | Tensor = 1.0,
    variance_scale: float | Tensor = 1.0,
) -> Tensor:
    terms = []
    for prediction, y in found:
        target = y.double() if isinstance(prediction, RegressionPredictive) else y
        terms.append(-rescale(prediction, temperature, variance_scale).log_prob(target).sum())
    return torch.stack([term.cpu() for term in terms]).sum() / sum(len(y) for _, y in found)


def _minimize(loss: Any, what: str, points: int = 49, steps: int = 60) -> float:
    """exp of the number in [log LOWEST, log HIGHEST] where a loss is least: a grid, then bisection on its derivative."""
    grid = torch.linspace(math.log(LOWEST), math.log(HIGHEST), points, dtype=torch.float64)
    with torch.no_grad():
        values = torch.stack([loss(point) for point in grid])
    if not bool(torch.isfinite(values).any()):
        raise ValueError("TemperatureScaling: the log-likelihood is not finite at any value; check outputs and targets")
    best = int(values.nan_to_num(nan=math.inf).argmin())
    if best in (0, points - 1):
        why = "every validation example is predicted right" if best == 0 else "the outputs say nothing of the targets"
        warnings.warn(
            f"TemperatureScaling: {what} runs to its bound {math.exp(float(grid[best])):g}: {why}; use more validation data, "
            "or look at the model",
            stacklevel=3,
        )
        return math.exp(float(grid[best]))
    low, high = float(grid[best - 1]), float(grid[best + 1])
    for _ in range(steps):
        middle = 0.5 * (low + high)
        point = torch.tensor(middle, dtype=torch.float64, requires_grad=True)
        with torch.enable_grad():
            (slope,) = torch.autograd.grad(loss(point), point)
        low, high = (middle, high) if slope < 0 else (low, middle)
    return math.exp(0.5 * (low + high))


# -- storage -----------------------------------------------------------------------------------------------------------


def _config(scaled: TemperatureScaling) -> dict[str, Any]:
    rule = serializer_for(scaled.model)
    return {
        "temperature": scaled.temperature,
        "variance_scale": scaled.variance_scale,
        "likelihood": None if scaled.likelihood is None else scaled.likelihood.config(),
        "output": scaled.output,
        "type": rule.name,
        "model": rule.config(scaled.model),
    }


def _state(scaled: TemperatureScaling) -> dict[str, Tensor]:
    state = {f"model.{name}": value for name, value in serializer_for(scaled.model).state(scaled.model).items()}
    if scaled.likelihood is not None:
        state |= {f"likelihood.{name}": value for name, value in scaled.likelihood.state_dict().items()}
    return state


def _restore(net: nn.Module, config: Any, state: dict[str, Tensor]) -> TemperatureScaling:
    inner = {name.removeprefix("model."): value for name, value in state.items() if name.startswith("model.")}
    model = SERIALIZERS[config["type"]].restore(net, config["model"], inner)
    scaled = TemperatureScaling(model, config["likelihood"], output=config["output"])
    if scaled.likelihood is not None:
        own = {
            name.removeprefix("likelihood."): value for name, value in state.items() if name.startswith("likelihood.")
        }
        scaled.likelihood.load_state_dict(own)
    scaled.temperature, scaled.variance_scale = config["temperature"], config["variance_scale"]
    return scaled


register_serializer(
    Serializer(
        kind=TemperatureScaling,
        name="TemperatureScaling",
        config=_config,
        state=_state,
        fingerprint=lambda scaled: (
            fingerprint(scaled.model)
            if scaled.likelihood is not None
            else serializer_for(scaled.model).fingerprint(scaled.model)
        ),
        restore=_restore,
    )
)
