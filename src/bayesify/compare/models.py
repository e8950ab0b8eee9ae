"""The models of a comparison, trained on each split: estimators, as `bayesify fit` trains them, and rivals from other libraries."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import numpy as np
import torch

from bayesify.likelihoods import Categorical
from bayesify.predictive.base import Outputs, Predictive
from bayesify.predictive.regression import RegressionPredictive, pair
from bayesify.predictor import Predictor
from bayesify.sklearn import BayesianClassifier, BayesianRegressor
from bayesify.sklearn.settings import EffortName
from bayesify.training.random_streams import derive_seed

FAILURES = (ArithmeticError, RuntimeError, ValueError)
"""Errors that a method raises if its training diverges or if it does not suit the data."""
SMOOTHING_ROWS = 1.0
"""Classes that the model does not know get some probability from a uniform distribution, whose weight is this number of rows."""


@dataclass(frozen=True)
class SplitRows:
    """Training rows of one split."""

    x: np.ndarray  # inputs in their own units, [N, D]
    y: np.ndarray  # targets, [N]: numbers, or indices of classes
    num_classes: int  # 0 for a regression
    seed: int  # seed of everything random; the same for all methods, so that their networks start from the same weights


@dataclass(frozen=True)
class SplitModel:
    """The trained model of a run."""

    predict: Callable[[np.ndarray], Predictive]  # predictive distribution of inputs [N, D]
    model: Predictor | None = None  # the predictor that `predict` uses; `None` for a rival


def fit_splits(name: str, rows: Sequence[SplitRows], effort: EffortName) -> list[SplitModel | Exception]:
    """The fitted estimators of a method on several splits, which train together if possible, or the errors of failed fits."""
    make: Any = BayesianClassifier if rows[0].num_classes else BayesianRegressor
    try:
        estimators = [make(name, effort=effort, random_state=part.seed, memory_rows=0) for part in rows]
        fitted = make.fit_several(estimators, [(part.x, part.y) for part in rows])
        return [_model_of(one, part) for one, part in zip(fitted, rows, strict=True)]
    except FAILURES as error:
        if len(rows) == 1:
            return [error]
        return [found for part in rows for found in fit_splits(name, [part], effort)]


def _model_of(estimator: Any, rows: SplitRows) -> SplitModel:
    if not rows.num_classes or len(estimator.classes_) == rows.num_classes:
        return SplitModel(estimator.predictive, estimator.model_)
    known = estimator.classes_.astype(int)
    return SplitModel(lambda x: of_probabilities(estimator.predict_proba(x), known, rows), estimator.model_)


def of_probabilities(probs: np.ndarray, known: np.ndarray, rows: SplitRows) -> Predictive:
    """The predictive distribution over all classes, from probabilities [N, K] of the `known` classes [K]; others get a little."""
    every = np.zeros((len(probs), rows.num_classes))
    every[:, known] = probs
    smooth = (len(rows.y) * every + SMOOTHING_ROWS / rows.num_classes) / (len(rows.y) + SMOOTHING_ROWS)
    return Categorical().predictive(Outputs(torch.from_numpy(np.log(smooth))[None]))


MAX_RESIDUALS = 60
"""Maximum number of components of a predictive distribution."""
WIDE_SHARE = 0.05
"""Share of components that are wide, so that residuals beyond the observed range are improbable instead of impossible."""
WIDE_STD = 3.0
"""Standard deviation of the wide components, in standard deviations of the residuals."""
NUM_FOLDS, MAX_ROWS_FOR_ALL_FOLDS = 5, 2000
"""Number of folds from which held-out residuals are computed, and number of rows above which only the first fold is predicted."""
MAX_TREES = 100
"""Maximum number of trees of scikit-learn's boosting."""
MIN_ROWS_PER_INPUT = 3
"""If there are fewer rows per input than this, the linear model is a lasso, which selects inputs."""
NUM_PENALTIES = 30
"""Number of lasso penalties. They span three decades; each penalty is a fifth smaller than the previous one."""

Guess = Callable[[np.ndarray], np.ndarray]


def train_rival(name: str, rows: SplitRows) -> SplitModel:
    """Train a rival from `contestants.RIVALS` on the rows of a split."""
    return SplitModel(_classifier(name, rows) if rows.num_classes else _regressor(name, rows))


def _distribution(guess: Guess, residuals: np.ndarray, logarithm: bool = False) -> Callable[[np.ndarray], Predictive]:
    r"""A predictive distribution made from a point prediction f and its errors on held-out rows.

    If $r_s$ are quantiles of these errors and $h_s$ are bandwidths, then

    $$ p(y | x) = \frac1S \sum_s \mathcal{N}(y; f(x) + r_s, h_s^2), $$

    so that the ends of its central intervals are f(x) plus quantiles of the errors, as in conformal intervals (Barber et al.
    2021). If f predicts the target's logarithm, the means are $e^{f(x) + r_s}$, and $h_s$ is multiplied by them.
    """
    centers, widths = _errors(residuals)

    def predict(x: np.ndarray) -> Predictive:
        mean = centers[:, None] + guess(x)
        log_width = np.broadcast_to(np.log(widths)[:, None], mean.shape)
        if logarithm:
            mean, log_width = np.exp(mean), log_width + mean
        both = torch.stack((torch.from_numpy(mean), torch.from_numpy(2 * log_width).exp()), -1)  # [S, B, 2]
        return RegressionPredictive(Outputs(both.unsqueeze(2)), pair)

    return predict


def _regressor(name: str, rows: SplitRows) -> Callable[[np.ndarray], Predictive]:
    if name == "constant":
        return _distribution(lambda x: np.zeros(len(x)), rows.y)
    costs = {}
    for logarithm in (False, True) if rows.y.min() > 0 else (False,):
        y = np.log(rows.y) if logarithm else rows.y
        residuals = _held_out(name, rows.x, y, rows.seed)
        cost = math.log(max(float(np.sqrt(np.mean(residuals**2))), 1e-12)) + (float(y.mean()) if logarithm else 0.0)
        costs[cost] = logarithm, residuals, y
    logarithm, residuals, y = costs[min(costs)]
    return _distribution(_fit(name, rows.x, y, rows.seed), residuals, logarithm)


def _held_out(name: str, x: np.ndarray, y: np.ndarray, seed: int) -> np.ndarray:
    """Residuals on rows that the rival was not trained on."""
    order = np.random.default_rng(derive_seed(seed, "rival")).permutation(len(y))
    parts = np.array_split(order, min(NUM_FOLDS, len(y)))
    residuals = []
    for part in parts[:1] if len(y) > MAX_ROWS_FOR_ALL_FOLDS else parts:
        rest = np.setdiff1d(order, part)
        residuals.append(y[part] - _fit(name, x[rest], y[rest], seed)(x[part]))
    return np.concatenate(residuals)


def _errors(residuals: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Centers and standard deviations [S] of the components: quantiles with Silverman's bandwidth, and some wide components."""
    count = min(len(residuals), MAX_RESIDUALS)
    middle = np.quantile(residuals, (np.arange(count) + 0.5) / count)
    spread = float(np.std(residuals)) or 1e-6 * (abs(float(residuals.mean())) or 1.0)
    inner = float(np.subtract(*np.quantile(residuals, (0.75, 0.25)))) / 1.34
    bandwidth = 0.9 * min(spread, inner or spread) * len(residuals) ** -0.2
    wide = max(1, round(WIDE_SHARE * count))
    centers = np.concatenate((middle, np.full(wide, residuals.mean())))
    return centers, np.concatenate((np.full(count, bandwidth), np.full(wide, WIDE_STD * spread)))


def _classifier(name: str, rows: SplitRows) -> Callable[[np.ndarray], Predictive]:
    if name == "constant":
        shares = np.bincount(rows.y, minlength=rows.num_classes) / len(rows.y)
        every = np.arange(rows.num_classes)
        return lambda x: of_probabilities(np.repeat(shares[None], len(x), 0), every, rows)
    model = _make(name, rows.x, regression=False, seed=rows.seed).fit(rows.x, rows.y)
    return lambda x: of_probabilities(model.predict_proba(x), model.classes_.astype(int), rows)


def _fit(name: str, x: np.ndarray, y: np.ndarray, seed: int) -> Any:
    return _make(name, x, regression=True, seed=seed).fit(x, y).predict


PACKAGES = {
    "lightgbm": ("lightgbm", "LGBM", {"verbose": -1, "n_jobs": 1}),
    "xgboost": ("xgboost", "XGB", {"n_jobs": 1}),
    "catboost": ("catboost", "CatBoost", {"verbose": False, "thread_count": 1, "allow_writing_files": False}),
}
"""Modules with estimators in scikit-learn's style, the prefixes of their class names, and options that silence their output."""


def installed() -> list[str]:
    """Rivals whose package is installed."""
    return [name for name, (module, _, _) in PACKAGES.items() if find_spec(module) is not None]


def _make(name: str, x: np.ndarray, *, regression: bool, seed: int) -> Any:
    if name in PACKAGES:
        module, start, options = PACKAGES[name]
        made = getattr(import_module(module), start + ("Regressor" if regression else "Classifier"))
        return made(random_state=seed % 2**31, **options)
    if name == "boosted_trees":
        from sklearn.ensemble import HistGradientBoostingClassifier, HistGradientBoostingRegressor

        trees = HistGradientBoostingRegressor if regression else HistGradientBoostingClassifier
        return trees(max_iter=MAX_TREES, random_state=seed % 2**31)
    from sklearn.linear_model import LassoCV, LogisticRegression, RidgeCV
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    if not regression:
        model: Any = LogisticRegression(C=1.0 if len(x) > MIN_ROWS_PER_INPUT * x.shape[1] else 0.1, max_iter=500)
    elif len(x) > MIN_ROWS_PER_INPUT * x.shape[1]:
        model = RidgeCV(np.logspace(-3, 3, 13))
    else:
        model = LassoCV(alphas=NUM_PENALTIES, cv=min(5, len(x)), random_state=seed % 2**31)
    return make_pipeline(StandardScaler(), model)
