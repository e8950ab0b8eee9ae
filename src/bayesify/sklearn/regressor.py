"""`BayesianRegressor`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Self

import numpy as np
import torch
from sklearn.base import RegressorMixin
from torch import Tensor, nn

from bayesify.arguments.checks import Count, CountOrZero, Level, Positive, checked
from bayesify.arguments.suggestions import suggest
from bayesify.baselines.temperature_scaling import TemperatureScaling
from bayesify.likelihoods import Gaussian
from bayesify.predictive.regression import RegressionPredictive
from bayesify.predictive.transformed import TargetTransform
from bayesify.sklearn.estimator import BayesianEstimator
from bayesify.sklearn.recipe import COUNT_LIKELIHOODS, NUMBER_LIKELIHOODS, UNSHIFTED_LIKELIHOODS, TrainingTable
from bayesify.sklearn.rows import Rows
from bayesify.sklearn.settings import AUTO, EffortName, Settings
from bayesify.sklearn.units import TRANSFORMS
from bayesify.storage.serializers import register_predictor
from bayesify.tables.level_means import normal_scores


@register_predictor
class BayesianRegressor(RegressorMixin, BayesianEstimator):  # type: ignore[misc]
    r"""Regression by Bayesian networks on arrays or data frames.

    The default method, `"auto"`, is an ensemble of five networks. Each network holds out a different fifth of the rows and stops at
    the step that predicts its held-out rows best. The predictions of held-out rows decide which noise distribution and
    which transform of the target are used. The spread of the noise depends on the row. The quantiles are recalibrated with the
    predictions of held-out rows. See [the page](../scikit-learn.md). Every other value of `method` is a "named method". By
    default, named methods use Gaussian noise with one variance, $y = f_w(x) + \varepsilon$.

    The columns of a pandas frame may contain numbers, text, categories, dates, booleans and missing cells; see `bayesify.tables`.
    Inputs and targets are scaled with the statistics of the training rows, and predictions are in the targets' units. Everything
    runs on the CPU, and named methods use float64. A row of weight k counts as k copies of the row. If all rows fit into one
    batch, the weighted row and its k copies give bitwise equal results.

    Args:
        method: `"auto"`; a name or alias of a method, such as `"mean_field"`, `"ensemble"` or `"laplace"` (`bayesify methods`
            lists them); or `"temperature_scaled"`, the plain network with a variance factor that is fitted to
            out-of-fold predictions.
        hidden: Number of units of each hidden layer; `()` for a linear model. The default is (64, 64), or (128, 128)
            for more than 1,500 rows. For named methods, the default is (50,).
        likelihood: `"auto"`, or the name of the targets' distribution: `"gaussian"`, `"heteroscedastic_gaussian"`, `"student_t"`
            or `"quantiles"`; for counts also `"poisson"` or `"negative_binomial"`; for amounts with zeros also `"hurdle"`.
        target_transform: `"auto"`, `"none"`, `"log"`, `"log1p"` or `"sqrt"`.
        activation: `"tanh"`, `"relu"`, `"silu"`, `"gelu"` or `"silu_relu"` (SiLU for half of the units, ReLU for the
            others). The default is `"silu_relu"`, or `"tanh"` for named methods.
        network: Your own network, which replaces `hidden`; only for named methods. The network, which is copied, maps
            [B, columns] to [B, outputs].
        method_options: Arguments of the method's posterior or recipe, such as `{"members": 10}`.
        prior_scale: Scale of the prior. The prior standard deviation of a weight is `prior_scale / sqrt(fan_in)`, or
            five times this for `"auto"`.
        noise: Noise variance in the targets' squared unit, if it is known. Without `noise`, named methods estimate a variance for
            each target from the evidence of the plain network (see `bayesify.sklearn.settling.settle`). Without `noise`, named
            methods also recalibrate the quantiles, with predictions of rows that were left out of training. Variational
            posteriors start at the estimated variance and learn a smaller one. Other methods use the estimated variance unchanged.
        epochs: Number of passes over the data in the main phase. A first phase, which finds the maximum a posteriori, takes a
            quarter as many passes. The default depends on the number of rows. For `"auto"`, `epochs` is the maximum number of
            optimizer steps.
        learning_rate: Initial learning rate of Adam. Methods with their own training recipe take the learning rate from
            `method_options`.
        batch_size: Number of rows per batch. By default, up to 1,024 rows form one batch, and larger tables use batches
            of 256 rows. For `"auto"`, the default is 128, or 256 for more than 1,500 rows.
        num_draws: Number of draws of the weights per training step.
        prediction_draws: Number of draws of the weights for predictions. All rows and calls use the same draws. A chain or an
            ensemble with fewer than `prediction_draws` draws uses all of them.
        standardize: Whether inputs and targets are scaled to mean 0 and variance 1.
        memory_rows: Maximum number of training rows that the estimator stores for `partial_fit`.
        random_state: Seed of everything random.
        verbose: Whether to show a progress bar.

    Attributes:
        model_: Trained model, for example a `BayesianNetwork` or a `Laplace`. The model takes scaled inputs and predicts scaled
            targets.
        method_: Name of the method, or `"auto"`.
        choices_: Chosen likelihood and transform, with the out-of-fold scores of all trials.
        noise_: Noise variance of each target, in the target's squared unit; exists only if the noise is the same for
            all rows.
        n_features_in_: Number of columns.
        feature_names_in_: Names of the columns, if X had names.
    """

    def __init__(
        self,
        method: str = AUTO,
        hidden: Sequence[Count] | None = None,
        *,
        likelihood: str = "auto",
        target_transform: str = "auto",
        activation: str | None = None,
        network: nn.Module | None = None,
        method_options: Mapping[str, Any] | None = None,
        prior_scale: Positive = 2.0,
        noise: Positive | None = None,
        epochs: Count | None = None,
        learning_rate: Positive | None = None,
        batch_size: Count | None = None,
        num_draws: Count | None = None,
        prediction_draws: Count = 100,
        standardize: bool = True,
        memory_rows: CountOrZero = 10_000,
        effort: EffortName = "full",
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
            effort=effort,
            random_state=random_state,
            verbose=verbose,
        )
        self.likelihood = likelihood
        self.target_transform = target_transform
        self.noise = noise

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.target_tags.multi_output = True
        return tags

    # -- training --------------------------------------------------------------------------------------------------

    def fit(self, X: Any, y: Any, sample_weight: Any = None) -> Self:
        """Train from the start.

        Args:
            X: Numbers [N, D], or a data frame.
            y: Numbers, [N] or [N, O].
            sample_weight: Number of examples that each row stands for, [N]; 1 by default.

        Returns:
            The estimator itself.

        Raises:
            ValueError: If the data or parameters are invalid, for example if the method is unknown.
            ImportError: If the method needs a package that is not installed.
        """
        return self.fit_several([self], [(X, y)], [sample_weight])[0]

    def partial_fit(self, X: Any, y: Any, sample_weight: Any = None) -> Self:
        """Train on more rows, together with the rows of earlier calls.

        The first call does what `fit` does. A later call trains on the new rows and on up to `memory_rows` earlier
        rows, which represent all earlier rows. A later call continues from the current posterior for a quarter of the usual
        number of epochs. All calls use the units that the first call computed. If the method has its own training recipe, a later
        call trains it from the start on the new and the stored rows. A later call estimates the noise and recalibrates the
        quantiles again if the first call estimated the noise.

        Args:
            X: Numbers [N, D], or a data frame.
            y: Numbers, [N] or [N, O].
            sample_weight: Number of examples that each row stands for, [N].

        Returns:
            The estimator itself.

        Raises:
            ValueError: If `fit` would refuse the data or parameters, or if no rows of earlier calls are stored (see
                `memory_rows`).
        """
        return self._partial_fit(self._training_table(X, y, sample_weight, first=not hasattr(self, "fitted_")))

    def _settings(self) -> Settings:
        noise = None if self.noise is None else float(self.noise)
        return replace(super()._settings(), likelihood=self.likelihood, transform=self.target_transform, noise=noise)

    def _score_targets(self, y: np.ndarray, weights: np.ndarray) -> np.ndarray:
        with self._telling("y as numbers"):
            return normal_scores(y.astype(np.float64).reshape(len(y), -1), weights)

    def _training_table(self, X: Any, y: Any, sample_weight: Any, *, first: bool) -> TrainingTable:
        rows, columns = self._read_rows(
            X, y, sample_weight, reset=first, min_rows=2 if first else 1, multi_output=True, y_numeric=True
        )
        with self._telling("y as numbers"):
            y = rows.y.astype(np.float64)
        self._check_choices(y)
        flat, y = y.ndim == 1 if first else self.fitted_.flat, y.reshape(len(y), -1)
        if first and len(y) > 1 and (y == y[:1]).all():
            raise ValueError(
                f"BayesianRegressor: y is {y[0, 0]:g} in every row, so there is nothing to predict; give "
                "targets that vary"
            )
        before = y.shape[1] if first or self.fitted_.units is None else len(self.fitted_.units.shift)
        if y.shape[1] != before:
            raise ValueError(
                f"BayesianRegressor: y has {y.shape[1]} columns, but it had {before} in the first call; give "
                f"{before} columns"
            )
        return TrainingTable(Rows(rows.x, y, rows.weights), None, columns, flat)

    def _check_choices(self, y: np.ndarray) -> None:
        """Raise `ValueError` for a likelihood or transform that is unknown or does not fit the targets."""
        known_names = {"likelihood": NUMBER_LIKELIHOODS, "target_transform": TRANSFORMS}
        for key, known in known_names.items():
            value = getattr(self, key)
            if value != AUTO and value not in known:
                raise ValueError(f"BayesianRegressor: {key}={value!r}; {suggest(str(value), (AUTO, *known))}")
        if self.target_transform != AUTO and not TargetTransform.takes(self.target_transform, torch.from_numpy(y)):
            raise ValueError(
                f"BayesianRegressor: target_transform={self.target_transform!r} does not accept the target {y.min():g}; "
                "choose another transform, or 'auto'"
            )
        if self.likelihood in UNSHIFTED_LIKELIHOODS:
            counts = self.likelihood in COUNT_LIKELIHOODS
            wrong = y[(y < 0) | (counts & (y != np.round(y)))]
            if len(wrong):
                words = "is for counts" if counts else "is for amounts of at least 0"
                raise ValueError(
                    f"BayesianRegressor: likelihood={self.likelihood!r} {words}, but a target is {wrong[0]:g}; choose "
                    "another likelihood"
                )
            if self.target_transform not in (AUTO, "none"):
                raise ValueError(
                    f"BayesianRegressor: target_transform={self.target_transform!r} does not work with "
                    f"likelihood={self.likelihood!r}; {'counts' if counts else 'amounts'} need target_transform='none'"
                )

    @property
    def noise_(self) -> np.ndarray:
        """Noise variance of each target, in the target's squared unit: [O].

        Raises:
            AttributeError: If the noise depends on the row.
        """
        model, units = self.model_, self.fitted_.units
        if not isinstance(model.likelihood, Gaussian) or units is None:
            raise AttributeError(
                "BayesianRegressor: noise_ exists only if all rows have the same noise, but here the noise depends "
                "on the row; use predictive(X).aleatoric"
            )
        factor = model.variance_scale if isinstance(model, TemperatureScaling) else 1.0
        return np.asarray(factor * np.square(units.scale) * model.likelihood.noise.detach().numpy())

    # -- prediction ------------------------------------------------------------------------------------------------

    def predictive(self, X: Any) -> RegressionPredictive:
        """The predictive distribution in the targets' units. The mean, the variance, the variance's aleatoric and epistemic
        parts, and the quantiles are each [N, O].

        Args:
            X: Numbers [N, D], or a data frame.

        Raises:
            sklearn.exceptions.NotFittedError: Before `fit`.
        """
        inputs = self._inputs(X)
        found = self.fitted_.predict(inputs, self.prediction_draws)
        assert isinstance(found, RegressionPredictive)
        return found

    @checked
    def predict(self, X: Any, return_std: bool = False) -> Any:
        """The predictive mean.

        Args:
            X: Numbers [N, D], or a data frame.
            return_std: Whether to return the predictive standard deviation as well. It includes the noise.

        Returns:
            The mean, or the mean and the standard deviation; each has the shape of y.
        """
        found = self.predictive(X)
        mean = self._shaped(found.mean)
        return (mean, self._shaped(found.std)) if return_std else mean

    @checked
    def predict_interval(self, X: Any, level: Level = 0.9) -> tuple[np.ndarray, np.ndarray]:
        """The central interval that contains a new target with probability `level`.

        Args:
            X: Numbers [N, D], or a data frame.
            level: Probability of the interval, between 0 and 1.

        Returns:
            Lower and upper ends of the intervals, each with the shape of y.

        Raises:
            ValueError: If the level is not strictly between 0 and 1.
        """
        lower, upper = self.predictive(X).interval(level)
        return self._shaped(lower), self._shaped(upper)

    @checked
    def predict_quantiles(self, X: Any, quantiles: Sequence[Level] = (0.05, 0.5, 0.95)) -> np.ndarray:
        """Quantiles of a new target: values that the target does not exceed with the given probabilities.

        Args:
            X: Numbers [N, D], or a data frame.
            quantiles: Q probabilities, each strictly between 0 and 1.

        Returns:
            Quantiles, [Q, N], or [Q, N, O] if y is [N, O].

        Raises:
            ValueError: If a probability is not strictly between 0 and 1.
        """
        return self._shaped(self.predictive(X).quantile([float(q) for q in quantiles]))

    def _shaped(self, values: Tensor) -> np.ndarray:
        array = values.detach().double().numpy()
        return array[..., 0] if self.fitted_.flat else array
