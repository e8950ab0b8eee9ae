"""`BayesianClassifier`."""

from __future__ import annotations

from typing import Any, Self

import numpy as np
from sklearn.base import ClassifierMixin
from sklearn.utils.multiclass import check_classification_targets

from bayesify.predictive.classification import ClassificationPredictive
from bayesify.sklearn.estimator import BayesianEstimator
from bayesify.sklearn.recipe import TrainingTable
from bayesify.sklearn.rows import Rows
from bayesify.storage.serializers import register_predictor
from bayesify.tables.level_means import class_scores


@register_predictor
class BayesianClassifier(ClassifierMixin, BayesianEstimator):  # type: ignore[misc]
    """Classification by Bayesian networks on arrays or data frames, with a softmax over two or more classes.

    The default method, `"auto"`, is an ensemble of five networks. Each network holds out a different fifth of the rows and stops at
    the step that predicts its held-out rows best; see [the page](../scikit-learn.md). The columns of a pandas frame may hold
    numbers, text, categories, dates, booleans and missing cells; see `bayesify.tables`. Inputs are scaled by the training rows.
    Everything runs on the CPU, and methods by name use float64. A weight of k means k copies of a row: if the rows fit into one
    batch, both ways give the same result to the last bit.

    Args:
        method: `"auto"`; a name or alias of a method, such as `"mean_field"`, `"ensemble"` or `"laplace"` (`bayesify methods`
            lists them); or `"temperature_scaled"`, the plain network with a temperature that is fitted out of fold.
        hidden: Units of each hidden layer; `()` for none. The default is (64, 64), or (128, 128) above 1,500 rows, and (50,) for
            methods by name.
        activation: `"tanh"`, `"relu"`, `"silu"`, `"gelu"` or `"silu_relu"` (each for half of the units); `"silu"` by default, and
            `"tanh"` for methods by name.
        network: Your own network instead of `hidden`, for methods by name: from [B, columns] to [B, classes]. It is copied.
        method_options: Arguments of the method's posterior or recipe, such as `{"members": 10}`.
        prior_scale: Scale of the prior: weights have the standard deviation `prior_scale / sqrt(fan_in)`, and five times that for
            `"auto"`.
        epochs: Passes over the data in the main phase, after a quarter as many for the maximum a posteriori; the default depends
            on the number of rows. For `"auto"`: maximum number of optimizer steps.
        learning_rate: Initial learning rate of Adam; recipes have their own, see `method_options`.
        batch_size: Rows of a batch. The default is all rows of a table of up to 1,024 rows, otherwise 256. For `"auto"` it is
            128, or 256 above 1,500 rows.
        num_draws: Draws of the weights in a training step.
        prediction_draws: Draws of the weights for predictions, the same for every row and call; a chain or an ensemble gives
            at most as many as it has.
        standardize: Whether inputs are scaled to mean 0 and variance 1.
        memory_rows: Maximum number of training rows that the estimator keeps for `partial_fit`; 0 for none.
        random_state: Seed of everything random.
        verbose: Whether to show a progress bar.

    Attributes:
        classes_: The labels, sorted.
        model_: Trained model, on scaled data: a `BayesianNetwork`, a `Laplace`, ...
        method_: Name of the method, or `"auto"`.
        choices_: Chosen settings, and the out-of-fold score.
        n_features_in_: Number of columns.
        feature_names_in_: Names of the columns, if X had names.
    """

    # -- training --------------------------------------------------------------------------------------------------

    def fit(self, X: Any, y: Any, sample_weight: Any = None) -> Self:
        """Train from the start.

        Args:
            X: [N, D] numbers, or a data frame.
            y: [N] labels of any kind: integers, strings, ...
            sample_weight: Number of examples that each row stands for, [N]; 1 by default.

        Returns:
            The estimator itself.

        Raises:
            ValueError: If the data or parameters are invalid, for example a single class or an unknown method.
            ImportError: If the method needs a package that is not installed.
        """
        return self.fit_several([self], [(X, y)], [sample_weight])[0]

    def partial_fit(self, X: Any, y: Any, classes: Any = None, sample_weight: Any = None) -> Self:
        """Train on more rows, together with the rows of earlier calls.

        The first call does what `fit` does. A later call continues from the current posterior, for a quarter as long, on the new
        rows together with up to `memory_rows` earlier rows, which represent all earlier rows. A method with its own recipe is
        trained from the start on these rows. If training continues, it keeps the units of the first call.

        Args:
            X: [N, D] numbers, or a data frame.
            y: [N] labels.
            classes: All labels that will ever occur; required in the first call.
            sample_weight: Number of examples that each row stands for, [N].

        Returns:
            The estimator itself.

        Raises:
            ValueError: If `fit` would refuse the data or parameters, if the first call lacks `classes`, or if no rows were kept.
        """
        first = not hasattr(self, "fitted_")
        if first and classes is None:
            raise ValueError(
                "BayesianClassifier: the first call of partial_fit needs classes=, all labels that will ever occur"
            )
        if not first and classes is not None and not np.array_equal(self.classes_, np.unique(classes)):
            raise ValueError(
                f"BayesianClassifier: classes={classes!r} differs from the first call, {self.classes_.tolist()}; "
                "give the same classes, or leave them out"
            )
        return self._partial_fit(self._training_table(X, y, sample_weight, classes=classes, first=first))

    def _score_targets(self, y: np.ndarray, weights: np.ndarray) -> np.ndarray:
        return class_scores(y, weights)

    def _training_table(self, X: Any, y: Any, sample_weight: Any, *, first: bool, classes: Any = None) -> TrainingTable:
        min_rows = 2 if first and classes is None else 1
        rows, columns = self._read_rows(X, y, sample_weight, reset=first, min_rows=min_rows)
        y = rows.y
        with self._telling("y as labels"):
            check_classification_targets(y)
        known = np.unique(y if classes is None else classes) if first else self.classes_
        if len(known) < 2:
            raise ValueError(
                f"BayesianClassifier: y holds only one class, {known.tolist()[0]!r}; give rows of at least two classes"
            )
        unknown = ~np.isin(y, known)
        if unknown.any():
            raise ValueError(
                f"BayesianClassifier: label {y[unknown].tolist()[0]!r} is not among the classes {known.tolist()}; "
                "include it in classes= in the first call"
            )
        return TrainingTable(Rows(rows.x, np.searchsorted(known, y), rows.weights), known, columns)

    @property
    def classes_(self) -> np.ndarray:
        """The labels, sorted."""
        assert self.fitted_.classes is not None
        return self.fitted_.classes

    # -- prediction ------------------------------------------------------------------------------------------------

    def predictive(self, X: Any) -> ClassificationPredictive:
        """The predictive distribution over indices of `classes_`: probabilities, entropy and its parts, `log_prob`.

        Args:
            X: [N, D] numbers, or a data frame.

        Raises:
            sklearn.exceptions.NotFittedError: Before `fit`.
        """
        inputs = self._inputs(X)
        found = self.fitted_.predict(inputs, self.prediction_draws)
        assert isinstance(found, ClassificationPredictive)
        return found

    def predict_proba(self, X: Any) -> np.ndarray:
        """Probability of each class, in the order of `classes_`: [N, C].

        Args:
            X: [N, D] numbers, or a data frame.
        """
        probs = self.predictive(X).class_probs.detach().double()
        return np.asarray(probs / probs.sum(1, keepdim=True))

    def predict_log_proba(self, X: Any) -> np.ndarray:
        """Logarithms of `predict_proba`: [N, C].

        Args:
            X: [N, D] numbers, or a data frame.
        """
        probs = self.predict_proba(X)
        return np.asarray(np.log(np.maximum(probs, np.finfo(probs.dtype).tiny)))

    def predict(self, X: Any) -> np.ndarray:
        """The most probable label of each row: [N].

        Args:
            X: [N, D] numbers, or a data frame.
        """
        best = self.predict_proba(X).argmax(1)
        return np.asarray(self.classes_[best])
