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

    The default method, `"auto"`, is an ensemble of ten networks, in five pairs. Each pair holds out a different fifth of the
    rows. Each network stops at the step that predicts its held-out rows best; see [the page](../scikit-learn.md). The columns
    of a pandas frame may contain numbers, text, categories, dates, booleans and missing cells; see `bayesify.tables`. Inputs
    are scaled with the statistics of the training rows. Everything runs on the CPU. Named methods (every `method` except
    `"auto"`) use float64. A row of weight k counts as k copies of the row. If all rows fit into one batch, the weighted row and
    its k copies give bitwise equal results.

    Args:
        method: `"auto"`; a name or alias of a method, such as `"mean_field"`, `"ensemble"` or `"laplace"` (`bayesify methods`
            lists them); or `"temperature_scaled"`, the plain network with a temperature that is fitted to out-of-fold
            predictions.
        hidden: Number of units of each hidden layer; `()` for a linear model. The default is (64, 64), or (128, 128)
            for more than 1,500 rows. For named methods, the default is (50,).
        activation: `"tanh"`, `"relu"`, `"silu"`, `"gelu"` or `"silu_relu"` (SiLU for half of the units, ReLU for the
            others). The default is `"silu"`, or `"tanh"` for named methods.
        network: Your own network, which replaces `hidden`; only for named methods. The network, which is copied, maps
            [B, columns] to [B, classes].
        method_options: Arguments of the method's posterior or recipe, such as `{"members": 10}`. For `"auto"`, `members` is the
            number of pairs of networks.
        prior_scale: Scale of the prior. The prior standard deviation of a weight is `prior_scale / sqrt(fan_in)`, or
            five times this for `"auto"`.
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
        standardize: Whether inputs are scaled to mean 0 and variance 1.
        memory_rows: Maximum number of training rows that the estimator stores for `partial_fit`.
        random_state: Seed of everything random.
        verbose: Whether to show a progress bar.

    Attributes:
        classes_: The labels, sorted.
        model_: Trained model, for example a `BayesianNetwork` or a `Laplace`. The model takes scaled inputs.
        method_: Name of the method, or `"auto"`.
        choices_: Chosen settings and the out-of-fold score.
        n_features_in_: Number of columns.
        feature_names_in_: Names of the columns, if X had names.
    """

    # -- training --------------------------------------------------------------------------------------------------

    def fit(self, X: Any, y: Any, sample_weight: Any = None) -> Self:
        """Train from the start.

        Args:
            X: Numbers [N, D], or a data frame.
            y: Labels [N] of any kind: integers, strings, ...
            sample_weight: Number of examples that each row stands for, [N]; 1 by default.

        Returns:
            The estimator itself.

        Raises:
            ValueError: If the data or parameters are invalid, for example if y has a single class or the method is unknown.
            ImportError: If the method needs a package that is not installed.
        """
        return self.fit_several([self], [(X, y)], [sample_weight])[0]

    def partial_fit(self, X: Any, y: Any, classes: Any = None, sample_weight: Any = None) -> Self:
        """Train on more rows, together with the rows of earlier calls.

        The first call does what `fit` does. A later call trains on the new rows and on up to `memory_rows` earlier
        rows, which represent all earlier rows. A later call continues from the current posterior for a quarter of the usual
        number of epochs. All calls use the scaling that the first call computed. If the method has its own training recipe, a
        later call trains it from the start on the new and the stored rows.

        Args:
            X: Numbers [N, D], or a data frame.
            y: [N] labels.
            classes: All labels that will ever occur; required in the first call.
            sample_weight: Number of examples that each row stands for, [N].

        Returns:
            The estimator itself.

        Raises:
            ValueError: If `fit` would refuse the data or parameters, if the first call lacks `classes`, or if no rows of earlier
                calls are stored (see `memory_rows`).
        """
        first = not hasattr(self, "fitted_")
        if first and classes is None:
            raise ValueError(
                "BayesianClassifier: the first call of partial_fit needs classes=; give a list of all labels that "
                "will ever occur"
            )
        if not first and classes is not None and not np.array_equal(self.classes_, np.unique(classes)):
            raise ValueError(
                f"BayesianClassifier: classes={classes!r} differs from the classes of the first call, "
                f"{self.classes_.tolist()}; give the same classes, or leave classes= out"
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
                "include this label in classes= of the first call"
            )
        return TrainingTable(Rows(rows.x, np.searchsorted(known, y), rows.weights), known, columns)

    @property
    def classes_(self) -> np.ndarray:
        """The labels, sorted."""
        assert self.fitted_.classes is not None
        return self.fitted_.classes

    # -- prediction ------------------------------------------------------------------------------------------------

    def predictive(self, X: Any) -> ClassificationPredictive:
        """The predictive distribution over the indices of `classes_`. It gives the probabilities, `log_prob`, the entropy, and
        the entropy's aleatoric and epistemic parts.

        Args:
            X: Numbers [N, D], or a data frame.

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
            X: Numbers [N, D], or a data frame.
        """
        probs = self.predictive(X).class_probs.detach().double()
        return np.asarray(probs / probs.sum(1, keepdim=True))

    def predict_log_proba(self, X: Any) -> np.ndarray:
        """Logarithms of `predict_proba`: [N, C].

        Args:
            X: Numbers [N, D], or a data frame.
        """
        probs = self.predict_proba(X)
        return np.asarray(np.log(np.maximum(probs, np.finfo(probs.dtype).tiny)))

    def predict(self, X: Any) -> np.ndarray:
        """The most probable label of each row: [N].

        Args:
            X: Numbers [N, D], or a data frame.
        """
        best = self.predict_proba(X).argmax(1)
        return np.asarray(self.classes_[best])
