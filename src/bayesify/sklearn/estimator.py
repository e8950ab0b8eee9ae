"""What both estimators share: parameters, training from arrays, prediction."""

from __future__ import annotations

import inspect
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from numbers import Real
from typing import Any, Self

import numpy as np
import torch
from sklearn.base import BaseEstimator
from sklearn.utils import check_random_state
from sklearn.utils.validation import _check_sample_weight, check_is_fitted, validate_data
from torch import nn

from bayesify.arguments.checks import LARGEST, MOST
from bayesify.datasets.scaling import Standardization
from bayesify.likelihoods import Likelihood
from bayesify.network import BayesianNetwork
from bayesify.predictive.base import Predictive
from bayesify.registry import Method, get_method, suggest
from bayesify.running.generators import own_generators
from bayesify.sklearn.rows import FULL_BATCH, Rows, standardization
from bayesify.sklearn.training import ACTIVATIONS, Plan, make_network, own_network, predict, train, train_posteriors
from bayesify.training.random_streams import derive_seed

LATER_EFFORT = 0.25
"""Share of the training that a later call of `partial_fit` gets."""


class BayesianEstimator(BaseEstimator):
    """Common base of `BayesianRegressor` and `BayesianClassifier`; their pages describe the parameters."""

    def __init__(
        self,
        method: str = "mean_field",
        hidden: Sequence[int] = (50,),
        *,
        activation: str = "tanh",
        network: nn.Module | None = None,
        method_options: Mapping[str, Any] | None = None,
        prior_scale: float = 2.0,
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
    def _likelihood(self, net: nn.Module, rows: Rows, plan: Plan) -> Likelihood:
        """p(y | outputs) in standardized units."""

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
        if self.standardize:
            return standardization(values, weights)
        return Standardization(np.zeros((1, values.shape[1])), np.ones((1, values.shape[1])))

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
                f"{type(self).__name__}: partial_fit with memory_rows=0, so that no rows are there to train on beside new ones; "
                "let the estimator keep some"
            )
        whole = self._merged(self._kept.joined(rows))
        if isinstance(self.model_, BayesianNetwork) and method.posterior is not None and method.name == self.method_:
            rows, plan = self._prepared(whole), self._plan(method)
            train_posteriors([self.model_], [rows], [plan], effort=LATER_EFFORT, start=False)
        else:
            self._start(whole, method)
        self._keep(whole)
        return self

    def _keep(self, rows: Rows) -> None:
        seed = derive_seed(self._seed, "rows", len(rows), rows.num_data)
        self._kept: Rows | None = rows.thinned(self.memory_rows, seed) if self.memory_rows else None

    def _start(self, rows: Rows, method: Method) -> None:
        self._seed = int(check_random_state(self.random_state).randint(2**31 - 1))
        self._choose_units(rows)
        net = self._make_network()
        with own_generators():
            torch.manual_seed(derive_seed(self._seed, "training"))
            prepared, plan = self._prepared(rows), self._plan(method)
            self.model_ = train(net, self._likelihood(net, prepared, plan), prepared, plan)
        self.method_ = method.name

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

    def _make_network(self) -> nn.Module:
        owner, sizes = type(self).__name__, (self.n_features_in_, self._num_outputs())
        if self.network is not None:
            return own_network(self.network, *sizes, owner)
        return make_network(sizes[0], tuple(self.hidden), self.activation, sizes[1], derive_seed(self._seed, "network"))

    def _rows(
        self, X: Any, y: Any, sample_weight: Any, *, reset: bool, least: int = 2, **options: Any
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        with self._telling("X as numbers [N, D] and y with one target for each row"):
            X, y = validate_data(self, X, y, reset=reset, dtype=np.float64, ensure_min_samples=least, **options)
        with self._telling("sample_weight as numbers of at least 0, one for each row"):
            weights = _check_sample_weight(sample_weight, X, dtype=np.float64, ensure_non_negative=True)
            if not 0 < weights.sum() <= LARGEST:
                raise ValueError("every sample_weight is zero, or one is too large")
        return X, y, weights

    @contextmanager
    def _telling(self, words: str) -> Iterator[None]:
        """Errors of scikit-learn's checks, with what to give."""
        try:
            yield
        except (ValueError, TypeError) as error:
            kind = TypeError if isinstance(error, TypeError) else ValueError
            raise kind(f"{type(self).__name__}: {str(error).rstrip('.')}; give {words}") from error

    def _check_parameters(self) -> Method:
        owner = type(self).__name__
        kinds: list[tuple[str, Any, Any, str]] = [
            ("method", self.method, str, "a name or alias from the registry"),
            ("activation", self.activation, str, f"one of {', '.join(ACTIVATIONS)}"),
            ("network", self.network, nn.Module | None, "a torch.nn.Module, or None"),
            ("method_options", self.method_options, Mapping | None, "a dictionary of the method's arguments, or None"),
            ("standardize", self.standardize, bool | np.bool_, "True or False"),
            ("verbose", self.verbose, bool | np.bool_, "True or False"),
        ]
        for key, value, kind, words in kinds:
            if not isinstance(value, kind):
                raise ValueError(f"{owner}: {key}={value!r}; give {words}")
        try:
            check_random_state("a flag" if isinstance(self.random_state, bool | np.bool_) else self.random_state)
        except ValueError:
            raise ValueError(
                f"{owner}: random_state={self.random_state!r}; give an integer from 0 to 2**32 - 1, a "
                "numpy.random.RandomState, or None"
            ) from None
        try:
            method = get_method(self.method)
        except ValueError as error:
            raise ValueError(f"{owner}: {error}") from None
        if method.status != "ready":
            raise ImportError(f"{owner}: method={method.name!r} {method.status}; pip install 'bayesify[all]'")
        if self.activation not in ACTIVATIONS:
            raise ValueError(f"{owner}: activation={self.activation!r}; {suggest(str(self.activation), ACTIVATIONS)}")
        counts: dict[str, Any] = {
            "epochs": self.epochs,
            "batch_size": self.batch_size,
            "num_draws": self.num_draws,
            "prediction_draws": self.prediction_draws,
            "memory_rows": self.memory_rows,
        }
        if isinstance(self.hidden, (str, int)) or not isinstance(self.hidden, (Sequence, np.ndarray)):
            raise ValueError(f"{owner}: hidden={self.hidden!r}; give a tuple of widths such as (50,), () for none")
        counts |= {f"hidden[{index}]": width for index, width in enumerate(self.hidden)}
        for key, value in counts.items():
            optional = key in ("epochs", "batch_size") and value is None
            least = 0 if key == "memory_rows" else 1
            whole = isinstance(value, (int, np.integer)) and not isinstance(value, bool)
            if not optional and not (whole and least <= value <= MOST):
                raise ValueError(f"{owner}: {key}={value!r}; give an integer of at least {least} and at most {MOST:,}")
        numbers: dict[str, Any] = {"prior_scale": self.prior_scale, "learning_rate": self.learning_rate}
        for key, value in numbers.items():
            optional = key == "learning_rate" and value is None
            number = isinstance(value, Real) and not isinstance(value, bool)
            if not optional and not (number and 0 < value <= LARGEST):
                raise ValueError(f"{owner}: {key}={value!r}; give a positive number of at most {LARGEST}")
        self._check_options(method)
        return method

    def _check_options(self, method: Method) -> None:
        known = inspect.signature(method.fit or method.posterior).parameters  # type: ignore[arg-type]
        given = ("net", "likelihood", "loader", "prior", "num_data", "epochs", "seed") if method.fit else ()
        names = [name for name in known if name not in given]
        for name in self.method_options or {}:
            if name not in names:
                raise ValueError(
                    f"{type(self).__name__}: method_options has {name!r}, which {method.name!r} does not take; "
                    f"{suggest(str(name), names) if names else 'it takes none'}"
                )

    # -- prediction ------------------------------------------------------------------------------------------------

    def _predict_standardized(self, X: Any) -> Predictive:
        check_is_fitted(self, "model_")
        with self._telling("X as numbers [N, D], in the columns of the training"):
            X = validate_data(self, X, reset=False, dtype=np.float64)
        x = torch.from_numpy(self._x_units(X))
        return predict(self.model_, x, self.prediction_draws, derive_seed(self._seed, "draws"))
