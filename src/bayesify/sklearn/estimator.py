"""What both estimators share: parameters, training from arrays, prediction."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from typing import Any, Self

import numpy as np
import torch
from sklearn.utils import check_consistent_length, check_random_state
from sklearn.utils.validation import _check_sample_weight, check_is_fitted, validate_data
from torch import Tensor, nn

from bayesify.arguments.checks import MAX_FLOAT32, Count, CountOrZero, Level, Positive, checked, refuse
from bayesify.arguments.suggestions import suggest
from bayesify.datasets.scaling import Standardization
from bayesify.methods import Method, get_method
from bayesify.network import BayesianNetwork
from bayesify.predictive.base import Predictive
from bayesify.predictive.classification import ClassificationPredictive
from bayesify.predictive.regression import RegressionPredictive
from bayesify.running.generators import own_generators
from bayesify.sklearn.columns import Columns, is_frame, is_pandas, refuse_cells
from bayesify.sklearn.recipe import Fitted, Settings
from bayesify.sklearn.rows import FULL_BATCH, Rows, standardization, warn_of_copies
from bayesify.sklearn.settling import Start, settle_further
from bayesify.sklearn.stored import StoredEstimator
from bayesify.sklearn.training import (
    ACTIVATIONS,
    TEMPERATURE,
    Plan,
    make_network,
    own_network,
    predict,
    scale_temperature,
    train,
    train_posteriors,
)
from bayesify.sklearn.unusual import MOST_ROWS, Neighbors
from bayesify.tables.encoding import Encoding
from bayesify.training.random_streams import derive_seed

AUTO = "auto"
"""The method that is the estimators' own, see `recipe`."""
NONE = "no_validation"
"""scikit-learn's word for X or y that are not there."""
HIDDEN, ACTIVATION = (50,), "tanh"
"""Of the network for methods by name."""
_comparing = cache(checked)  # annotations are read once
LATER_EFFORT = 0.25
"""Share of the training that a later call of `partial_fit` gets."""


class BayesianEstimator(StoredEstimator):
    """Common base of `BayesianRegressor` and `BayesianClassifier`; their pages describe the parameters."""

    def __init__(
        self,
        method: str = AUTO,
        hidden: Sequence[Count] | None = None,
        *,
        activation: str | None = None,
        network: nn.Module | None = None,
        method_options: Mapping[str, Any] | None = None,
        prior_scale: Positive = 2.0,
        epochs: Count | None = None,
        learning_rate: Positive | None = None,
        batch_size: Count | None = None,
        num_draws: Count = 4,
        prediction_draws: Count = 100,
        standardize: bool = True,
        memory_rows: CountOrZero = 10_000,
        random_state: Any = None,
        verbose: bool = False,
    ) -> None:
        self.method = method
        self.hidden = hidden
        self.activation = activation
        self.network = network
        self.method_options = method_options
        self.prior_scale = prior_scale
        self.epochs = epochs
        self.learning_rate = learning_rate
        self.batch_size = batch_size
        self.num_draws = num_draws
        self.prediction_draws = prediction_draws
        self.standardize = standardize
        self.memory_rows = memory_rows
        self.random_state = random_state
        self.verbose = verbose

    # -- what a task adds ------------------------------------------------------------------------------------------

    @abstractmethod
    def _begin(self, net: nn.Module, rows: Rows, plan: Plan) -> Start:
        """Network and likelihood that a method by name starts with."""

    @abstractmethod
    def _num_outputs(self) -> int:
        """Outputs of the network."""

    def _scale_targets(self, rows: Rows) -> Rows:
        """Targets in the units in which they are trained on."""
        return rows

    def _choose_units(self, rows: Rows) -> None:
        """Take the units of training from the rows."""
        self._x_units = self._units(rows.x, rows.weights)

    def _units(self, values: np.ndarray, weights: np.ndarray) -> Standardization:
        return standardization(values, weights) if self.standardize else Standardization.identity(values.shape[1])

    @abstractmethod
    def _fit_members(self, rows: Rows, settings: Settings) -> Fitted:
        """Train the members of the default method on encoded rows."""

    # -- training --------------------------------------------------------------------------------------------------

    def _fit(self, rows: Rows) -> Self:
        method, rows = self._check_parameters(), self._merged(rows)
        self._start(rows, method)
        self._keep(rows)
        return self

    def _partial_fit(self, rows: Rows) -> Self:
        method = self._check_parameters()
        if not hasattr(self, "model_"):
            return self._fit(rows)
        if self._kept is None:
            raise ValueError(
                f"{type(self).__name__}: partial_fit has no earlier rows to train on beside the new ones (memory_rows=0, or the "
                "estimator comes from a file); fit again on all rows"
            )
        whole = self._merged(Rows.of((self._kept, rows)))
        by_posterior = isinstance(self.model_, BayesianNetwork) and method is not None and method.posterior is not None
        if by_posterior and method.name == self.method_:  # type: ignore[union-attr]
            rows, plan = self._prepared(whole), self._plan(method)  # type: ignore[arg-type]
            start = self._settled and settle_further(self._settled, rows, plan)
            if start:
                self.model_.likelihood.load_state_dict(start.likelihood.state_dict())
            train_posteriors([self.model_], [rows], [plan], effort=LATER_EFFORT, start=False)
            if start:
                self._recalibrate(start)
        else:
            self._start(whole, method)
        self._keep(whole)
        return self

    def _keep(self, rows: Rows) -> None:
        seed = derive_seed(self._seed, "rows", len(rows), rows.num_data)
        self._kept = rows.thinned(self.memory_rows, seed) if self.memory_rows else None
        part = rows.thinned(MOST_ROWS, derive_seed(self._seed, "neighbors")).x
        self._neighbors = Neighbors.of(part, _spread(self._predict_inputs(part)))

    def _recalibrate(self, start: Start) -> None:
        self._recalibration = start.recalibration(self._predict_scaled)
        self._settled = None if start.rows is None else replace(start, rows=None, leverage=None, residuals=None)

    def _start(self, rows: Rows, method: Method | None) -> None:
        self._seed = int(check_random_state(self.random_state).randint(2**31 - 1))
        self._fitted = None
        if method is None:
            self._encoding = Encoding.of(rows.x, rows.weights, self.standardize)
            encoded = Rows(self._encoding(rows.x), rows.y, rows.weights)
            with own_generators(seed=derive_seed(self._seed, "training")):
                self._fitted = self._fit_members(encoded, self._settings())
            self.model_, self.method_ = self._fitted.model, AUTO
            return
        self._choose_units(rows)
        net = self._make_network()
        with own_generators(seed=derive_seed(self._seed, "training")):
            prepared, plan = self._prepared(rows), self._plan(method)
            start = self._begin(net, prepared, plan)
            self.model_ = train(start.network, start.likelihood, prepared, plan, settled=start.rows is not None)
            if self.method == TEMPERATURE:
                self.model_ = scale_temperature(self.model_, net, start.likelihood, prepared, plan)
                start = replace(start, rows=None)
            self._recalibrate(start)
        self.method_ = TEMPERATURE if self.method == TEMPERATURE else method.name

    def _prepared(self, rows: Rows) -> Rows:
        return self._scale_targets(Rows(self._x_units(rows.x), rows.y, rows.weights))

    @staticmethod
    def _merged(rows: Rows) -> Rows:
        """Before units are taken, so that copies and weights give the same units to the last bit."""
        return rows.merged() if len(rows) <= FULL_BATCH else rows

    def _plan(self, method: Method) -> Plan:
        return Plan(
            method,
            dict(self.method_options or {}),
            float(self.prior_scale),
            self.epochs,
            self.learning_rate,
            self.batch_size,
            self.num_draws,
            self._seed,
            bool(self.verbose),
        )

    def _settings(self) -> Settings:
        given = {
            "hidden": None if self.hidden is None else tuple(self.hidden),
            "activation": self.activation,
            "steps": self.epochs,
            "learning_rate": self.learning_rate,
            "batch_size": self.batch_size,
            **(self.method_options or {}),
        }
        chosen = {key: value for key, value in given.items() if value is not None}
        return Settings(prior_scale=float(self.prior_scale), seed=self._seed, progress=bool(self.verbose), **chosen)

    @property
    def choices_(self) -> dict[str, Any]:
        """What was chosen: method, and for the default method likelihood, transform and out-of-fold scores of what was tried."""
        check_is_fitted(self, "model_")
        fitted = self._fitted
        found: dict[str, Any] = {"method": self.method_}
        if fitted is not None:
            found |= {
                "likelihood": fitted.likelihood,
                "transform": fitted.transform,
                "members": self.model_.num_distinct_draws,
                "hidden": fitted.hidden,
                "steps": fitted.steps,
                "out_of_fold_score": fitted.score,
                "out_of_fold": dict(fitted.out_of_fold),
                "tried": dict(fitted.scores),
            }
        return found | {"left_out": list(self._columns.notes) if self._columns is not None else []}

    def _make_network(self) -> nn.Module:
        owner, sizes = type(self).__name__, (self._num_inputs, self._num_outputs())
        if self.network is not None:
            return own_network(self.network, *sizes, owner)
        hidden = HIDDEN if self.hidden is None else tuple(self.hidden)
        activation = self.activation or ACTIVATION
        return make_network(sizes[0], hidden, activation, sizes[1], derive_seed(self._seed, "network"))

    def _rows(
        self, X: Any, y: Any, sample_weight: Any, *, reset: bool, least: int = 2, **options: Any
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        X, y = self._read(X, y, reset=reset, ensure_min_samples=least, **options)
        with self._telling("sample_weight as numbers of at least 0, one for each row"):
            weights = _check_sample_weight(sample_weight, X, dtype=np.float64, ensure_non_negative=True)
            if not 0 < weights.sum() <= MAX_FLOAT32:
                raise ValueError("every sample_weight is zero, or one is too large")
        warn_of_copies(weights, type(self).__name__)
        return X, y, weights

    @contextmanager
    def _telling(self, words: str, X: Any = None) -> Iterator[None]:
        """Errors of scikit-learn's checks, with the place of a number of X that is not finite, and with what to give."""
        try:
            yield
        except (ValueError, TypeError) as error:
            kind = TypeError if isinstance(error, TypeError) else ValueError
            raise kind(f"{type(self).__name__}: {str(error).rstrip('.')}{_place(X)}; give {words}") from error

    def _read(self, X: Any, y: Any = NONE, *, reset: bool, **options: Any) -> Any:
        """Inputs as numbers [N, D], and targets where they are given; the columns of a frame are learned where `reset`."""
        owner = type(self).__name__
        columns: Columns | None = None if reset else self._columns
        if is_frame(X) if reset else columns is not None:
            if not reset and not is_pandas(X):
                raise ValueError(
                    f"{owner}: X is {type(X).__name__}, and training was on a data frame; give a frame with its columns"
                )
            if len(X) < options.pop("ensure_min_samples", 1):
                raise ValueError(f"{owner}: X has {len(X)} rows (samples); give at least 2, or 1 to predict")
            if y is not NONE:
                with self._telling("y with one target for each row"):
                    y = validate_data(self, NONE, y, **options)
                    check_consistent_length(X, y)
            if columns is not None:
                inputs = columns(X, owner)
            else:
                self._columns, inputs = Columns.learn(X, owner)
                self._num_inputs, self.n_features_in_ = inputs.shape[1], X.shape[1]
                if all(isinstance(name, str) for name in X.columns):
                    self.feature_names_in_ = np.array(list(X.columns), dtype=object)
                else:
                    self.__dict__.pop("feature_names_in_", None)
            return inputs if y is NONE else (inputs, y)
        if is_frame(X):
            refuse_cells(X, owner)
        words = "and y with one target for each row" if reset else "in the columns of the training"
        with self._telling(f"X as numbers [N, D], or a data frame, {words}", X):
            found = validate_data(self, X, y, reset=reset, dtype=np.float64, **options)
        if reset:
            self._columns, self._num_inputs = None, self.n_features_in_
        return found

    def _check_parameters(self) -> Method | None:
        """The method, `None` for the estimators' own.

        Raises:
            ValueError: If a parameter is not valid.
        """
        kind, owner = type(self), type(self).__name__
        if not isinstance(self.method, str):
            raise refuse(owner, "method", self.method, "a name from the registry, which `bayesify methods` lists")
        # As scikit-learn wants it, parameters are compared with their annotations when they are used, not when they are given.
        _comparing(kind.__init__)(kind.__new__(kind), **self.get_params(deep=False))
        try:
            check_random_state("a flag" if isinstance(self.random_state, bool | np.bool_) else self.random_state)
        except ValueError:
            words = "an integer from 0 to 2**32 - 1, a numpy.random.RandomState, or None"
            raise refuse(owner, "random_state", self.random_state, words) from None
        if self.activation is not None and self.activation not in ACTIVATIONS:
            raise ValueError(f"{owner}: activation={self.activation!r}; {suggest(self.activation, ACTIVATIONS)}")
        method = None if self.method == AUTO else self._find_method()
        if method is not None:
            self._check_options(method.name, method.option_names)
            return method
        if self.network is not None:
            raise ValueError(f"{owner}: method='auto' makes its own network; give hidden, or a method by name")
        self._check_options(AUTO, ("members",))
        return None

    def _find_method(self) -> Method:
        owner = type(self).__name__
        try:
            method = get_method("point" if self.method == TEMPERATURE else self.method)
        except ValueError as error:
            raise ValueError(f"{owner}: {error}") from None
        if method.status != "ready":
            raise ImportError(f"{owner}: method={method.name!r} {method.status}; pip install 'bayesify[all]'")
        return method

    def _check_options(self, method: str, names: tuple[str, ...] | None) -> None:
        for name in self.method_options or {}:
            if names is not None and name not in names:
                raise ValueError(
                    f"{type(self).__name__}: method_options has {name!r}, which {method!r} does not take; "
                    f"{suggest(str(name), names) if names else 'it takes none'}"
                )

    # -- prediction ------------------------------------------------------------------------------------------------

    def _predict_standardized(self, X: Any) -> Predictive:
        check_is_fitted(self, "model_")
        return self._predict_inputs(self._read(X, reset=False))

    def _predict_inputs(self, inputs: np.ndarray) -> Predictive:
        scaled = self._x_units(inputs) if self._fitted is None else self._encoding(inputs)
        return self._predict_scaled(torch.from_numpy(scaled))

    def _predict_scaled(self, x: Tensor) -> Predictive:
        return predict(self.model_, x, self.prediction_draws, derive_seed(self._seed, "draws"))

    @checked
    def unusual(self, X: Any, share: Level = 0.01) -> np.ndarray:
        """Which rows are unlike the training rows: [N], true for those that are.

        These lie further from their nearest training rows than all but a share of the training rows do, or draws of the network
        disagree more about them, or they hold a text that its column has never had, or no number where every training row had
        one; see `unusual_share`. Predictions of such rows are guesses, whatever they say.

        Args:
            X: [N, D] numbers, or a frame.
            share: Of rows like the training rows that are to be called unusual.

        Raises:
            ValueError: If the share is not between 0 and 1.
        """
        return self.unusual_share(X) <= share

    def unusual_share(self, X: Any) -> np.ndarray:
        """The share of training rows that are at least as unlike the others as each row is: [N], near 0 for an unusual row.

        What counts are the mean distance to the five nearest training rows and the epistemic uncertainty: the variance of the
        network's first outputs over draws, or the mutual information of classes; see `bayesify.sklearn.unusual.Neighbors`.

        Args:
            X: [N, D] numbers, or a frame.
        """
        check_is_fitted(self, "model_")
        inputs = self._read(X, reset=False)
        found = self._neighbors.share_beyond(inputs, _spread(self._predict_inputs(inputs)))
        if self._columns is not None:
            found[self._columns.preparation.unseen(self._columns.read(X, type(self).__name__))] = 0.0
        return found


def _place(X: Any) -> str:
    """Where the first number that is not finite is, in words; nothing where X is no array of numbers."""
    try:
        bad = np.argwhere(~np.isfinite(np.asarray(X, dtype=np.float64)))
    except (TypeError, ValueError):
        return ""
    found = len(bad) > 0 and bad.shape[1:] == (2,)
    return f" (first in column {bad[0, 1]}, row {bad[0, 0]}, counted from 0)" if found else ""


def _spread(predictive: Predictive) -> Tensor:
    """Epistemic uncertainty of each row, [N], in the unit of training."""
    if isinstance(predictive, RegressionPredictive):
        return predictive.epistemic.sum(-1)
    assert isinstance(predictive, ClassificationPredictive)
    return predictive.mutual_information
