"""The common base of the two estimators: parameters, training on arrays, prediction, and storage in files."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from numbers import Integral
from typing import Any, Self

import numpy as np
from sklearn.base import BaseEstimator, is_classifier
from sklearn.utils import check_consistent_length, check_random_state
from sklearn.utils.validation import _check_sample_weight, check_is_fitted, validate_data
from torch import Tensor, nn

from bayesify.arguments.checks import MAX_FLOAT32, Count, CountOrZero, Level, Positive, checked, refuse
from bayesify.arguments.suggestions import suggest
from bayesify.methods import Method, get_method
from bayesify.network import BayesianNetwork
from bayesify.predictor import Predictor, Serializable
from bayesify.sklearn.columns import Columns, is_frame, is_pandas, refuse_cells
from bayesify.sklearn.fitted import FittedTable
from bayesify.sklearn.networks import ACTIVATIONS
from bayesify.sklearn.reasons import Cells, Explanation, Groups, cells_as_text, explain_rows
from bayesify.sklearn.recipe import TrainingTable, fit_further, fit_tables, merge_rows
from bayesify.sklearn.rows import Rows, warn_of_copies
from bayesify.sklearn.settings import AUTO, TEMPERATURE, EffortName, Settings

NONE = "no_validation"
"""The value that scikit-learn uses for an absent X or y."""
_comparing = cache(checked)  # reads the annotations once


class BayesianEstimator(BaseEstimator, Serializable):  # type: ignore[misc]
    """Common base of `BayesianRegressor` and `BayesianClassifier`; their pages describe the parameters.

    The attribute `fitted_` contains everything that was fitted. A saved file contains no training rows except the scaled inputs
    with which `unusual` compares new rows, so `partial_fit` cannot continue from a file.
    """

    fitted_: FittedTable
    n_features_in_: int

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
        num_draws: Count | None = None,
        prediction_draws: Count = 100,
        standardize: bool = True,
        memory_rows: CountOrZero = 10_000,
        effort: EffortName = "full",
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
        self.effort = effort
        self.random_state = random_state
        self.verbose = verbose

    # -- training --------------------------------------------------------------------------------------------------

    def _settings(self) -> Settings:
        """The checked parameters as a `Settings` object."""
        method = self._check_parameters()
        return Settings(
            method,
            self.method == TEMPERATURE,
            dict(self.method_options or {}),
            hidden=None if self.hidden is None else tuple(self.hidden),
            activation=self.activation,
            network=self.network,
            prior_scale=float(self.prior_scale),
            epochs=self.epochs,
            learning_rate=self.learning_rate,
            batch_size=self.batch_size,
            num_draws=self.num_draws,
            prediction_draws=self.prediction_draws,
            standardize=self.standardize,
            effort=self.effort,
            seed=int(check_random_state(self.random_state).randint(2**31 - 1)),
            progress=bool(self.verbose),
            owner=type(self).__name__,
        )

    def _take(self, fitted: FittedTable, rows: Rows) -> Self:
        self.fitted_ = fitted.with_rows(rows, self.prediction_draws, self.memory_rows)
        return self

    @abstractmethod
    def _score_targets(self, y: np.ndarray, weights: np.ndarray) -> np.ndarray:
        """Scores [N, K] of the targets y, given the row weights: normal scores, or centered class indicators. A text column with
        many levels is encoded by the mean score of each level.
        """

    @abstractmethod
    def _training_table(self, X: Any, y: Any, sample_weight: Any, *, first: bool) -> TrainingTable:
        """Checked training data; see `fit`. `first` is true if no earlier fit is continued."""

    @classmethod
    def fit_several(
        cls, estimators: Sequence[Self], tables: Sequence[tuple[Any, Any]], weights: Sequence[Any] | None = None
    ) -> list[Self]:
        """Fit each estimator to its own table; the results are the same as from separate calls of `fit`.

        If a named method is used and the networks have equal sizes, the networks train together, which takes a fraction
        of the time.

        Args:
            estimators: Estimators of one class and one method, which differ only in their seeds.
            tables: X and y of each estimator.
            weights: For each estimator, the number of examples that each row stands for; 1 by default.

        Raises:
            ValueError: If `fit` would refuse any of the tables.
        """
        each = zip(estimators, tables, weights or [None] * len(tables), strict=True)
        return cls._fit_together([(one, one._training_table(*table, own, first=True)) for one, table, own in each])

    @classmethod
    def _fit_together(cls, pairs: Sequence[tuple[Self, TrainingTable]]) -> list[Self]:
        fitted = fit_tables([table for _, table in pairs], [estimator._settings() for estimator, _ in pairs])
        return [one._take(found, merge_rows(table.rows)) for (one, table), found in zip(pairs, fitted, strict=True)]

    def _partial_fit(self, table: TrainingTable) -> Self:
        """Train on more rows, together with the rows of earlier calls."""
        if not hasattr(self, "fitted_"):
            return self._fit_together([(self, table)])[0]
        settings, fitted = self._settings(), self.fitted_
        if fitted.kept is None:
            raise ValueError(
                f"{type(self).__name__}: partial_fit needs the rows of earlier calls, but none were kept (memory_rows=0, "
                "or the estimator was loaded from a file); call fit on all rows"
            )
        # Merging has sorted the kept rows.
        table = replace(table, rows=merge_rows(Rows.of((fitted.kept, table.rows))), ordered=False)
        posterior = settings.method is not None and settings.method.posterior is not None
        if not posterior or settings.method_name != fitted.method or not isinstance(fitted.model, BayesianNetwork):
            return self._fit_together([(self, table)])[0]
        return self._take(fit_further(fitted, table, replace(settings, seed=fitted.seed)), table.rows)

    @property
    def model_(self) -> Predictor:
        """The trained model, for example a `BayesianNetwork` or a `Laplace`. The model takes scaled inputs. In a regression, it
        predicts scaled targets."""
        return self.fitted_.model

    @property
    def method_(self) -> str:
        """The method's name, or `"auto"`."""
        return self.fitted_.method

    @property
    def choices_(self) -> dict[str, Any]:
        """Chosen settings: the method; for the default method, also the likelihood, the transform, and the out-of-fold scores of
        all trials."""
        check_is_fitted(self, "fitted_")
        fitted, found = self.fitted_, dict[str, Any](method=self.method_, categories=self.fitted_.report.categories)
        if fitted.method == AUTO:
            assert fitted.network is not None
            found |= {
                "likelihood": fitted.likelihood,
                "transform": "none" if fitted.units is None else fitted.units.transform,
                "members": fitted.model.num_distinct_draws,
                "hidden": fitted.network.hidden,
                "steps": fitted.report.steps,
                "out_of_fold_score": fitted.report.score,
                "out_of_fold": dict(fitted.report.out_of_fold),
                "tried": dict(fitted.report.tried),
            }
        left_out = () if fitted.columns is None else fitted.columns.notes
        return found | {"left_out": [*left_out, *fitted.report.notes]}

    # -- reading ---------------------------------------------------------------------------------------------------

    def _read_rows(
        self, X: Any, y: Any, sample_weight: Any, *, reset: bool, min_rows: int = 2, **options: Any
    ) -> tuple[Rows, Columns | None]:
        """The checked rows whose weight is positive, and the rules that turned a frame into these rows (`None` for an array)."""
        known = self._weights(sample_weight, X) if is_pandas(X) else None
        inputs, y, columns = self._read(X, y, known, reset=reset, ensure_min_samples=min_rows, **options)
        weights = self._weights(sample_weight, inputs) if known is None else known
        warn_of_copies(weights, type(self).__name__)
        used = weights > 0
        if used.sum() < min_rows:
            raise ValueError(
                f"{type(self).__name__}: X has {used.sum()} rows with a positive sample_weight=; give at least "
                f"{min_rows}"
            )
        return Rows(inputs[used], y[used], weights[used]), columns

    def _weights(self, sample_weight: Any, X: Any) -> np.ndarray:
        """Number of examples that each row stands for, [N]."""
        with self._telling("sample_weight with one number of at least 0 for each row"):
            weights: np.ndarray = _check_sample_weight(sample_weight, X, dtype=np.float64, ensure_non_negative=True)
            if not 0 < weights.sum() <= MAX_FLOAT32:
                raise ValueError(
                    f"the sum of sample_weight= is {weights.sum():g}; give weights whose sum is positive and at most "
                    f"{MAX_FLOAT32:.3g}"
                )
        return weights

    @contextmanager
    def _telling(self, words: str, X: Any = None) -> Iterator[None]:
        """Context that extends the errors of scikit-learn's checks: it adds the place of the first number in X that is not
        finite, and a remedy."""
        try:
            yield
        except (ValueError, TypeError) as error:
            kind = TypeError if isinstance(error, TypeError) else ValueError
            raise kind(f"{type(self).__name__}: {str(error).rstrip('.')}{_place(X)}; give {words}") from error

    @property
    def _targets_wanted(self) -> str:
        """The last part of an error message about targets, which says what to give as y."""
        if is_classifier(self):
            return "y with one label for each row, without missing labels"
        return "y with one number for each row, without missing numbers (BayesianClassifier takes texts)"

    def _read(
        self, X: Any, y: Any = NONE, weights: np.ndarray | None = None, *, reset: bool, **options: Any
    ) -> tuple[np.ndarray, Any, Columns | None]:
        """Inputs as numbers [N, D], targets if given, and the rules that turn a frame into numbers. If `reset` is true,
        new rules are learned.
        """
        owner = type(self).__name__
        columns = None if reset else self.fitted_.columns
        if is_frame(X) if reset else columns is not None:
            if not reset and not is_pandas(X):
                raise ValueError(
                    f"{owner}: X is {type(X).__name__}, but the training data were a data frame; give a frame with the "
                    "same columns"
                )
            if len(X) < options.pop("ensure_min_samples", 1):
                raise ValueError(
                    f"{owner}: X has {len(X)} rows (samples); give at least 2 rows to train, or 1 row to predict"
                )
            if y is not NONE:
                with self._telling(self._targets_wanted):
                    y = validate_data(self, NONE, y, **options)
                    check_consistent_length(X, y)
            if columns is not None:
                return columns(X, owner), y, columns
            columns, inputs = Columns.learn(X, owner, None if y is NONE else y, weights, self._score_targets)
            self.n_features_in_ = X.shape[1]
            if all(isinstance(name, str) for name in X.columns):
                self.feature_names_in_ = np.array(list(X.columns), dtype=object)
            else:
                self.__dict__.pop("feature_names_in_", None)
            return inputs, y, columns
        if is_frame(X):
            refuse_cells(X, owner)
        words = f"and {self._targets_wanted}" if reset else "with the columns of the training data"
        with self._telling(f"X as numbers [N, D], or a data frame, {words}", X):
            found = validate_data(self, X, y, reset=reset, dtype=np.float64, **options)
        return (found, y, None) if y is NONE else (*found, None)

    def _check_parameters(self) -> Method | None:
        """Check the parameters and return the method, or `None` for the default method."""
        kind, owner = type(self), type(self).__name__
        if not isinstance(self.method, str):
            raise refuse(owner, "method", self.method, "a name that `bayesify methods` lists")
        # By scikit-learn's convention, parameters are checked in `fit`, not in the constructor.
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
            raise ValueError(
                f"{owner}: method='auto' builds its own network, so network= cannot be used; give hidden= instead, "
                "or choose another method"
            )
        self._check_options(AUTO, ("members",))
        members = (self.method_options or {}).get("members", 2)
        if isinstance(members, bool) or not isinstance(members, Integral) or members < 2:
            words = "an integer of at least 2, because each member predicts rows that the others train on"
            raise refuse(owner, "members", members, f"{words}; for a single network, choose method='point'")
        return None

    def _find_method(self) -> Method:
        owner = type(self).__name__
        try:
            method = get_method("point" if self.method == TEMPERATURE else self.method)
        except ValueError as error:
            raise ValueError(f"{owner}: {error}") from None
        if method.status != "ready":
            raise ImportError(f"{owner}: method={method.name!r} {method.status}; {method.remedy}")
        return method

    def _check_options(self, method: str, names: tuple[str, ...] | None) -> None:
        for name in self.method_options or {}:
            if names is not None and name not in names:
                raise ValueError(
                    f"{type(self).__name__}: method_options= has the entry {name!r}, which {method!r} does not "
                    f"accept; {suggest(str(name), names) if names else 'it accepts no options'}"
                )

    # -- prediction ------------------------------------------------------------------------------------------------

    def _inputs(self, X: Any) -> np.ndarray:
        check_is_fitted(self, "fitted_")
        return self._read(X, reset=False)[0]

    @checked
    def unusual(self, X: Any, share: Level = 0.01) -> np.ndarray:
        """Whether each row is unlike the training rows: [N] booleans, true for unusual rows.

        Predictions of unusual rows are guesses. A row is unusual if its `unusual_share` is at most `share`. Each of these four
        cases makes a row unusual:

        - The row is far from its nearest training rows.
        - The network's draws strongly disagree about the row.
        - The row has a text that did not occur in its column during training.
        - The row has an empty cell in a numeric column that had no empty cells in training.

        Args:
            X: Numbers [N, D], or a frame.
            share: Share of ordinary rows (rows like the training rows) that are expected to be called unusual.

        Raises:
            ValueError: If the share is not between 0 and 1.
        """
        return self.unusual_share(X) <= share

    def unusual_share(self, X: Any) -> np.ndarray:
        """For each row, the share [N] of training rows that are at least as unusual as this row. It is near 0 for an unusual row.

        The share depends on two measures: the mean distance to the five nearest training rows, and the epistemic uncertainty. For
        a regression, the epistemic uncertainty is the variance of the network's first outputs over draws; for a classification,
        it is the mutual information. See `bayesify.sklearn.unusual.Neighbors`.

        Args:
            X: Numbers [N, D], or a frame.
        """
        inputs = self._inputs(X)
        found = self.fitted_.unusual_share(inputs, self.prediction_draws)
        if self.fitted_.columns is not None:
            columns = self.fitted_.columns
            found[columns.preparation.unseen(columns.read(X, type(self).__name__))] = 0.0
        return found

    @checked
    def explain(self, X: Any, level: Level = 0.9, share: Level = 0.01) -> Explanation:
        r"""Reasons for predictions: which columns raise or lower a prediction, which columns widen its interval, and why a row is
        unusual.

        To explain a row, start from a typical row and replace its cells by those of the explained row, one after the other. To
        obtain a column's contribution $\phi_j$, take the change of the prediction when the column's cell is replaced, and average
        this change over all orders of replacement. The contributions add up to the row's prediction minus the typical row's
        prediction. The average is estimated from two opposite orders; see `bayesify.sklearn.reasons.Explanation`. An explanation
        costs at most 20 times as much as a prediction of the rows.

        Args:
            X: Numbers [N, D], or a frame.
            level: Level of the intervals whose widths are explained.
            share: Share of ordinary rows (rows like the training rows) that are expected to be called unusual.

        Returns:
            An explanation with contributions `moves` and `widens`, each [N, D], and with texts `unusual`, which say why rows are
            unusual.

        Raises:
            ValueError: If `level` or `share` is not between 0 and 1.
        """
        inputs, columns = self._inputs(X), self.fitted_.columns
        if columns is None:
            given = list(map(str, getattr(self, "feature_names_in_", ())))
            names = given or [f"x{place}" for place in range(self.n_features_in_)]
            table = Cells(Groups.of(names, names, {}), cells_as_text(inputs))
        else:
            features = columns.read(X, type(self).__name__)
            groups = Groups.of(columns.used, columns.preparation.owners(features), columns.schema.kinds)
            own = X[list(columns.used)]
            cells = cells_as_text(own.astype(object).where(own.notna(), None).to_numpy(object))
            table = Cells(groups, cells, columns.unseen(features), columns.cut(features), columns.cells_of)
        return explain_rows(self.fitted_, inputs, table, level=level, share=share, num_draws=self.prediction_draws)

    # -- files -----------------------------------------------------------------------------------------------------

    def config(self) -> dict[str, Any]:
        """The parameters and everything that was fitted, as plain data, without tensors.

        Raises:
            ValueError: If the estimator uses the user's own network.
        """
        check_is_fitted(self, "fitted_")
        parameters, names = self.get_params(deep=False), getattr(self, "feature_names_in_", None)
        if self.fitted_.network is None:
            owner = type(self).__name__
            raise ValueError(
                f"save: {owner} uses your own network, whose code cannot be stored in a file; save the attribute "
                "model_ instead"
            )
        seed = parameters["random_state"]
        parameters["random_state"] = int(seed) if isinstance(seed, (int, np.integer)) else None
        return {
            "parameters": {key: _plain(value) for key, value in parameters.items() if key != "network"},
            "num_features": self.n_features_in_,
            "names": None if names is None else [str(name) for name in names],
            "table": self.fitted_.config(),
        }

    def state(self) -> dict[str, Tensor]:
        """The tensors of everything that was fitted."""
        return self.fitted_.state()

    @classmethod
    def restore(cls, net: nn.Module, config: Any, state: dict[str, Tensor]) -> Self:
        """An estimator from `config` and `state`; no network is needed.

        Raises:
            ValueError: If an earlier version of bayesify wrote `config` and `state`.
        """
        if "table" not in config:
            raise ValueError(
                f"{cls.__name__}: the file was written by an earlier version of bayesify; fit again with this version"
            )
        made = cls(**config["parameters"])
        made.n_features_in_ = int(config["num_features"])
        if config["names"] is not None:
            made.feature_names_in_ = np.array(config["names"], dtype=object)
        made.fitted_ = FittedTable.restore(config["table"], state)
        return made


def _place(X: Any) -> str:
    """Text with the place of the first non-finite number in X; empty if X is not an array of numbers."""
    try:
        bad = np.argwhere(~np.isfinite(np.asarray(X, dtype=np.float64)))
    except (TypeError, ValueError):
        return ""
    found = len(bad) > 0 and bad.shape[1:] == (2,)
    return f" (first in column {bad[0, 1]}, row {bad[0, 0]}, counted from 0)" if found else ""


def _plain(value: Any) -> Any:
    """A parameter as plain data."""
    if isinstance(value, np.ndarray):
        return value.tolist()
    return value.item() if isinstance(value, np.generic) else value
