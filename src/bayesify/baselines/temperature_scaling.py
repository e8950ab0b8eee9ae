"""Temperature scaling: a single number, fitted to validation data, makes predictions softer or sharper."""

import copy
import math
import warnings
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any, Self

import torch
from torch import Tensor, nn

from bayesify.arguments.checks import Budget, Count, Seed, checked, shown
from bayesify.baselines.fixed_draws import FixedDraws
from bayesify.configuration import make_likelihood
from bayesify.draws import Draws
from bayesify.likelihoods import Likelihood
from bayesify.predictive.base import Predictive
from bayesify.predictive.families.gaussian import GaussianFamily
from bayesify.predictive.regression import RegressionPredictive, match_targets
from bayesify.predictor import Predictor
from bayesify.running.runner import Runner
from bayesify.storage.serializers import MODULE_NAME, STORED_CLASSES, register_predictor, stored_name
from bayesify.training.batches import BatchReader, check_repeatable, parse_batch
from bayesify.weights.catalog import catalog
from bayesify.weights.module_state import below, prefixed, restore_module, tensors_of

MIN_SCALE, MAX_SCALE = 1e-3, 1e3
"""Range of the search for the temperature or for the factor on the variance."""
NUM_GRID_POINTS, NUM_BISECTION_STEPS = 49, 60
"""Number of grid points over this range, and number of steps of the bisection that follows."""
Judged = tuple[Predictive, Tensor, Tensor]
"""A tuple of a prediction in float64, the targets [B, ...], and the example weights [B]."""


@register_predictor
class TemperatureScaling(Predictor):
    r"""A model whose logits are divided by a temperature, or whose noise variance is multiplied by a factor (Guo et al. 2017).

    $$ p(y | x) = \frac1S \sum_s \operatorname{softmax}(f_s(x) / T)_y, \qquad
       p(y | x) = \frac1S \sum_s \mathcal{N}(y; \mu_s(x), c\, v_s(x)) $$

    The first formula is for classification (including binary outputs), the second for regression. `fit` chooses the T or c that
    maximizes the weighted log-likelihood of the validation data.

    For one draw, such as a plain network, the negative log-likelihood is convex in 1/T, and dividing the logits by T does not
    change the most probable class. For one draw, the best c has a closed form, $c = \operatorname{mean} (y - \mu)^2 / v$. This
    mean is weighted by the example weights. For several draws, the logits of each draw are divided by T, which can change the
    most probable class if two classes are nearly equal. The factor c changes the noise but not the disagreement of the draws. For
    several draws, T or c is found by a one-dimensional search that starts at the best point of a grid.

    Args:
        model: A plain network, or a predictor that returns a mixture over draws, such as a `BayesianNetwork` or `SWAG`.
        likelihood: Likelihood p(y | outputs) of a plain network, as an instance, a name or plain data.
        output: Name or index of the output that the likelihood applies to, for a plain network with several outputs.

    Attributes:
        temperature: The temperature T; 1 before `fit` and for regression.
        variance_scale: The factor c; 1 before `fit` and for classification.
        method: Default of `method=` in `predict`, which is the method given to `fit`. If no method is given to `fit`, the model's
            default is used; for `Laplace`, `"linearized_mc"` is used, because a closed form has no draws to scale.

    Raises:
        TypeError: If the model is neither a module nor a predictor.
        ValueError: If a plain network is given without a likelihood.
    """

    @checked
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
        self.method = model.mixture_method if isinstance(model, Predictor) else None
        if isinstance(model, Predictor):
            if likelihood is not None:
                own = f"{type(model).__name__} has its own likelihood"
                raise ValueError(f"TemperatureScaling: {own}; leave likelihood= out")
            self.likelihood, self.output = model.likelihood, model.output
            return
        if not isinstance(model, nn.Module):
            raise TypeError(f"TemperatureScaling: model={shown(model)} does not predict; give a network or a predictor")
        made = make_likelihood(likelihood)
        if made is None:
            remedy = "give likelihood=, such as likelihoods.Categorical()"
            raise ValueError(f"TemperatureScaling: a plain network needs a likelihood; {remedy}")
        self.likelihood = copy.deepcopy(made).to(next(model.parameters()))

    @checked
    def fit(
        self,
        loader: Iterable[Any],
        *,
        num_draws: Count | None = None,
        seed: Seed = 0,
        read_batch: BatchReader | None = None,
        **options: Any,
    ) -> Self:
        """Find the temperature or the variance factor that makes the validation data most probable.

        Args:
            loader: Batches of validation data, on which the model was not trained, with or without example weights.
            num_draws: Number of draws in the model's predictions. By default, the model chooses the number.
            seed: Seed of the draws, which are the same for every batch.
            read_batch: Function that converts an item of the loader to inputs and targets.
            options: Further arguments of the model's `predict`. Later predictions use the same `method` by default.

        Raises:
            ValueError: If the loader has no example of positive weight, or if a log-likelihood is not finite.
            TypeError: If the model's predictions are not a mixture over draws.
        """
        check_repeatable(loader)
        method = options.setdefault("method", self._predictor.mixture_method)
        found: list[Judged] = []
        device = next((tensor.device for tensor in self._predictor.state().values()), None)
        for item in loader:
            data = parse_batch(item, read_batch)
            data = (data if device is None else data.to(device)).weighed()
            if not len(data):
                continue
            generator = torch.Generator().manual_seed(seed)
            prediction = self._predict(data.x, num_draws, generator=generator, **options).materialize()
            # Float64 lets the search find the optimum to rounding error.
            found.append((prediction.with_outputs(prediction.outputs.double()), data.y, data.counts.to(data.y.device)))
        if not found:
            raise ValueError(
                "TemperatureScaling: the loader yields no example of positive weight; give a loader over validation data"
            )
        if isinstance(found[0][0], RegressionPredictive):
            self.variance_scale = self._best_variance_scale(found)
        else:
            self.temperature = _minimize(lambda log: _nll(found, temperature=log.exp()), "the temperature")
        self.method = method
        return self

    @property
    def num_distinct_draws(self) -> int | None:
        return self._predictor.num_distinct_draws

    @checked
    def predict(
        self,
        x: Any,
        num_draws: Count | None = None,
        *,
        generator: torch.Generator | None = None,
        memory: Budget = None,
        **options: Any,
    ) -> Predictive:
        """The predictive distribution with scaled outputs or noise; see `Predictor.predict` for the other arguments.

        Args:
            num_draws: Number of draws S. By default, the model chooses the number. A plain network always has one draw.
            memory: Memory budget in bytes, or a string such as `"1GiB"`; by default the model's budget.
            options: Further arguments of the model's `predict`, such as `split_batch`.
        """
        options.setdefault("method", self.method)
        prediction = self._predict(x, num_draws, generator=generator, memory=memory, **options)
        return rescale(prediction, self.temperature, self.variance_scale)

    def _predict(self, x: Any, num_draws: int | None, **options: Any) -> Predictive:
        """The model's prediction; a plain network always has one draw."""
        predictor = self._predictor
        if options["method"] is None:  # not every model's `predict` has this argument
            del options["method"]
        return predictor.predict(x, num_draws if predictor is self.model else None, **options)

    @property
    def _predictor(self) -> Predictor:
        """The model, if it is a predictor. Otherwise a predictor whose only draw is the plain network."""
        if isinstance(self.model, Predictor):
            return self.model
        assert self.likelihood is not None
        name, weight = next(iter(catalog(self.model).weights.items()))
        value = self.model.get_parameter(name).detach().unsqueeze(0)
        draws = Draws(Runner(self.model, {name: weight}), {name: value}, value.new_zeros(1))
        return FixedDraws(draws, self.likelihood, self.output)

    def _best_variance_scale(self, found: list[Judged]) -> float:
        families = [prediction.family for prediction, _, _ in found if isinstance(prediction, RegressionPredictive)]
        if len(found[0][0].outputs) > 1 or not isinstance(families[0], GaussianFamily):
            return _minimize(lambda log: _nll(found, variance_scale=log.exp()), "the factor on the variance")
        total = count = 0.0
        for prediction, y, counts in found:
            assert isinstance(prediction, RegressionPredictive)
            target = match_targets(y.to(prediction.mean), prediction.mean)
            standardized = (target - prediction.mean).square() / prediction.variance
            each = standardized.reshape(len(y), -1)  # [B, outputs]
            total, count = total + float(counts @ each.sum(1)), count + float(counts.sum()) * each.shape[1]
        if not (math.isfinite(total) and total > 0):
            raise ValueError(
                f"TemperatureScaling: the sum of the squared standardized residuals is {total}, but must be positive and "
                "finite; check the targets"
            )
        return total / count

    # -- storage ---------------------------------------------------------------------------------------------------

    def config(self) -> dict[str, Any]:
        """The temperature, the variance factor, and the model's configuration."""
        plain = not isinstance(self.model, Predictor)
        return {
            "temperature": self.temperature,
            "variance_scale": self.variance_scale,
            "method": self.method,
            "likelihood": self.likelihood.config() if plain and self.likelihood is not None else None,
            "output": self.output if plain else None,
            "type": stored_name(self.model),
            "model": None if plain else self.model.config(),
        }

    def state(self) -> dict[str, Tensor]:
        """The model's tensors and, for a plain network, the likelihood's tensors."""
        if isinstance(self.model, Predictor):
            return prefixed(model=self.model.state())
        assert self.likelihood is not None
        return prefixed(model=tensors_of(self.model), likelihood=self.likelihood.state_dict())

    @classmethod
    def restore(cls, net: nn.Module, config: Any, state: dict[str, Tensor]) -> Self:
        """The model over a copy of the network, with its temperature and variance factor."""
        inner = below("model", state)
        if config["type"] == MODULE_NAME:
            scaled = cls(restore_module(net, inner), config["likelihood"], output=config["output"])
            assert scaled.likelihood is not None
            scaled.likelihood.load_state_dict(below("likelihood", state))
        else:
            scaled = cls(STORED_CLASSES[config["type"]].restore(net, config["model"], inner))
        scaled.temperature, scaled.variance_scale = float(config["temperature"]), float(config["variance_scale"])
        scaled.method = config.get("method")  # earlier versions did not store it
        return scaled

    def fingerprint(self) -> dict[str, str]:
        return self._predictor.fingerprint()

    def __repr__(self) -> str:
        return (
            f"TemperatureScaling({type(self.model).__name__}, temperature {self.temperature:.4g}, "
            f"variance scale {self.variance_scale:.4g})"
        )


def rescale(
    prediction: Predictive, temperature: float | Tensor = 1.0, variance_scale: float | Tensor = 1.0
) -> Predictive:
    """Divide each draw's logits by a temperature, or multiply each draw's variance by a factor."""
    if isinstance(prediction, RegressionPredictive):
        return prediction.map_components(partial(prediction.family.scale_variance, variance_scale))
    return prediction.map_outputs(lambda outputs: outputs / temperature)


def _nll(found: list[Judged], temperature: float | Tensor = 1.0, variance_scale: float | Tensor = 1.0) -> Tensor:
    terms = []
    for prediction, y, counts in found:
        target = y.double() if isinstance(prediction, RegressionPredictive) else y
        terms.append(-counts @ rescale(prediction, temperature, variance_scale).log_prob(target))
    return torch.stack([term.cpu() for term in terms]).sum() / sum(float(counts.sum()) for _, _, counts in found)


def _minimize(loss: Callable[[Tensor], Tensor], what: str) -> float:
    """The scale that minimizes `loss`, a function of the scale's logarithm: the best point of a grid, refined by bisection."""
    grid = torch.linspace(math.log(MIN_SCALE), math.log(MAX_SCALE), NUM_GRID_POINTS, dtype=torch.float64)
    with torch.no_grad():
        values = torch.stack([loss(point) for point in grid])
    if not bool(torch.isfinite(values).any()):
        raise ValueError(
            "TemperatureScaling: the log-likelihood is not finite for any temperature or factor; check "
            "the outputs and the targets for NaN and infinity"
        )
    best = int(values.nan_to_num(nan=math.inf).argmin())
    if best in (0, NUM_GRID_POINTS - 1):
        bound, why = math.exp(float(grid[best])), "the outputs carry no information about the targets"
        why = why if best else "probabilities as extreme as possible fit the data best"
        remedy = "use more validation data, or check the model"
        warnings.warn(f"TemperatureScaling: {what} reached its bound {bound:g}, because {why}; {remedy}", stacklevel=3)
        return bound
    low, high = float(grid[best - 1]), float(grid[best + 1])
    for _ in range(NUM_BISECTION_STEPS):
        middle = 0.5 * (low + high)
        point = torch.tensor(middle, dtype=torch.float64, requires_grad=True)
        with torch.enable_grad():
            (slope,) = torch.autograd.grad(loss(point), point)
        low, high = (middle, high) if slope < 0 else (low, middle)
    return math.exp(0.5 * (low + high))
