"""`BayesianRegressor`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from numbers import Real
from typing import Any, Self

import numpy as np
import torch
from sklearn.base import RegressorMixin
from torch import Tensor, nn

from bayesify.arguments.checks import LARGEST, Level, checked
from bayesify.likelihoods import Gaussian, Likelihood
from bayesify.predictive.regression import RegressionPredictive
from bayesify.sklearn.estimator import BayesianEstimator
from bayesify.sklearn.rows import Rows
from bayesify.sklearn.training import Plan, estimate_noise
from bayesify.sklearn.units import ScaledPredictive


class BayesianRegressor(RegressorMixin, BayesianEstimator):
    r"""Regression by a Bayesian network under any method, with Gaussian noise: $y = f_w(x) + \varepsilon$.

    Inputs and targets are standardized by the training rows, and predictions come back in the targets' units. Everything is in
    float64 on the CPU. A weight of k means k copies of a row: rows that fit into one batch give the same result to
    the last bit either way.

    Args:
        method: A name or alias from the registry, such as `"mean_field"`, `"ensemble"` or `"laplace"`; `bayesify methods`
            lists them.
        hidden: Units of each hidden layer; `()` for Bayesian linear regression.
        activation: `"tanh"`, `"relu"`, `"silu"` or `"gelu"`.
        network: A network of your own in place of `hidden`: from [B, columns] to [B, targets]. It is copied.
        method_options: Arguments of the method's posterior or recipe, such as `{"members": 10}`.
        prior_scale: The weights' prior has standard deviation `prior_scale / sqrt(fan_in)`.
        noise: Noise variance in the targets' squared unit. If left out, it is estimated for each target by cross-validation of
            the network at its maximum a posteriori, which holds the network's own error too; posteriors then learn how much
            less it is, methods that keep point estimates and those with a recipe of their own take it as it is.
        epochs: Passes over the data in the main phase, after a quarter as many to the maximum a posteriori; by the number
            of rows by default.
        learning_rate: Of Adam, at the first step; recipes have their own, see `method_options`.
        batch_size: All rows up to 1,024 by default, else 256.
        num_draws: Draws of the weights in a training step.
        prediction_draws: Draws of the weights for predictions, the same for every row and call; a chain or an ensemble gives
            no more than it has.
        standardize: Whether inputs and targets are brought to mean 0 and variance 1.
        memory_rows: Training rows that stay in the estimator, for `partial_fit`; 0 for none.
        random_state: Seed of everything random.
        verbose: Whether to show a progress bar.

    Attributes:
        model_: What was trained, on standardized data: a `BayesianNetwork`, a `Laplace`, ...
        method_: The method's name in the registry.
        noise_: Noise variance of each target, in its squared unit.
        n_features_in_: Columns.
        feature_names_in_: Their names, where X had names.
    """

    def __init__(
        self,
        method: str = "mean_field",
        hidden: Sequence[int] = (50,),
        *,
        activation: str = "tanh",
        network: nn.Module | None = None,
        method_options: Mapping[str, Any] | None = None,
        prior_scale: float = 2.0,
        noise: float | None = None,
        epochs: int | None = None,
        learning_rate: float | None = None,
        batch_size: int | None = None,
        num_draws: int = 4,
        prediction_draws: int = 100,
        standardize: bool = True,
        memory_rows: int = 10_000,
        random_state: Any = None,
        verbose: bool = False,
    ) -> None:
        super().__init__(
            method,
            hidden,
            activation=activation,
            network=network,
            method_options=method_options,
            prior_scale=prior_scale,
            epochs=epochs,
            learning_rate=learning_rate,
            batch_size=batch_size,
            num_draws=num_draws,
            prediction_draws=prediction_draws,
            standardize=standardize,
            memory_rows=memory_rows,
            random_state=random_state,
            verbose=verbose,
        )
        self.noise = noise

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.target_tags.multi_output = True
        return tags

    # -- training --------------------------------------------------------------------------------------------------

    def fit(self, X: Any, y: Any, sample_weight: Any = None) -> Self:
        """Train from the start.

        Args:
            X: [N, D] numbers.
            y: [N] or [N, O] numbers.
            sample_weight: How many examples each row stands for, [N]; 1 by default.

        Returns:
            Itself.

        Raises:
            ValueError: If data or parameters are not valid, such as an unknown method.
            ImportError: If the method needs a package that is not installed.
        """
        return self._fit(self._training_rows(X, y, sample_weight, first=True))

    def partial_fit(self, X: Any, y: Any, sample_weight: Any = None) -> Self:
        """Train on more rows, beside those of earlier calls.

        The first call does what `fit` does. Later ones go on from the posterior they find, for a quarter as long, on the new rows
        together with up to `memory_rows` of the earlier ones, which stand for all of them; a method with a recipe of its
        own is trained from the start on these. Units stay those of the first call where training goes on.

        Args:
            X: [N, D] numbers.
            y: [N] or [N, O] numbers.
            sample_weight: How many examples each row stands for, [N].

        Returns:
            Itself.

        Raises:
            ValueError: As for `fit`, or if no rows were kept.
        """
        return self._partial_fit(self._training_rows(X, y, sample_weight, first=not hasattr(self, "model_")))

    def _training_rows(self, X: Any, y: Any, sample_weight: Any, first: bool) -> Rows:
        number = isinstance(self.noise, Real) and not isinstance(self.noise, bool)
        if self.noise is not None and not (number and 0 < self.noise <= LARGEST):
            raise ValueError(
                f"BayesianRegressor: noise={self.noise!r}; it is a variance, give a positive number, or None to learn it"
            )
        X, y, weights = self._rows(
            X, y, sample_weight, reset=first, least=2 if first else 1, multi_output=True, y_numeric=True
        )
        y = y.astype(np.float64)
        if first:
            self._flat, self._targets = y.ndim == 1, 1 if y.ndim == 1 else y.shape[1]
        y = y.reshape(len(y), -1)
        if y.shape[1] != self._targets:
            raise ValueError(f"BayesianRegressor: y has {y.shape[1]} columns; it had {self._targets} in the first call")
        return Rows(X, y, weights).weighed()

    def _choose_units(self, rows: Rows) -> None:
        super()._choose_units(rows)
        self._y_units = self._units(rows.y, rows.weights)

    def _scale_targets(self, rows: Rows) -> Rows:
        return Rows(rows.x, self._y_units(rows.y), rows.weights)

    def _likelihood(self, net: nn.Module, rows: Rows, plan: Plan) -> Likelihood:
        if self.noise is None:
            return Gaussian(estimate_noise(net, rows, plan).tolist()).double()
        return Gaussian((float(self.noise) / self._y_units.std[0] ** 2).tolist(), learn=False).double()

    def _num_outputs(self) -> int:
        return self._targets

    @property
    def noise_(self) -> np.ndarray:
        """Noise variance of each target, in its squared unit: [O]."""
        found: np.ndarray = self._y_units.std[0] ** 2 * self.model_.likelihood.noise.detach().numpy()
        return found

    # -- prediction ------------------------------------------------------------------------------------------------

    def predictive(self, X: Any) -> RegressionPredictive:
        """The predictive distribution in the targets' units: mean, parts of the variance, quantiles, `log_prob`; each [N, O].

        Args:
            X: [N, D] numbers.

        Raises:
            sklearn.exceptions.NotFittedError: Before `fit`.
        """
        inner = self._predict_standardized(X)
        assert isinstance(inner, RegressionPredictive)
        units = self._y_units
        return ScaledPredictive(inner, torch.from_numpy(units.mean[0]), torch.from_numpy(units.std[0]))

    @checked
    def predict(self, X: Any, return_std: bool = False) -> Any:
        """The predictive mean.

        Args:
            X: [N, D] numbers.
            return_std: Whether to return the predictive standard deviation too, noise included.

        Returns:
            The mean in the shape of y, or the pair of mean and standard deviation.
        """
        found = self.predictive(X)
        mean = self._shaped(found.mean)
        return (mean, self._shaped(found.std)) if return_std else mean

    @checked
    def predict_interval(self, X: Any, level: Level = 0.9) -> tuple[np.ndarray, np.ndarray]:
        """The central interval that holds a new target with probability `level`.

        Args:
            X: [N, D] numbers.
            level: Between 0 and 1.

        Returns:
            Lower and upper ends, each in the shape of y.

        Raises:
            ValueError: If the level is not strictly between 0 and 1.
        """
        lower, upper = self.predictive(X).interval(level)
        return self._shaped(lower), self._shaped(upper)

    @checked
    def predict_quantiles(self, X: Any, quantiles: Sequence[Level] = (0.05, 0.5, 0.95)) -> np.ndarray:
        """Values that a new target stays below with given probabilities.

        Args:
            X: [N, D] numbers.
            quantiles: Q probabilities, each strictly between 0 and 1.

        Returns:
            [Q, N], or [Q, N, O] for targets in columns.

        Raises:
            ValueError: If a probability is not strictly between 0 and 1.
        """
        return self._shaped(self.predictive(X).quantile([float(q) for q in quantiles]))

    def _shaped(self, values: Tensor) -> np.ndarray:
        array = values.detach().numpy()
        return array[..., 0] if self._flat else array
