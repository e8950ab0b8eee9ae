"""What a user would take in place of a network: the mean, a linear model, boosted trees."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import numpy as np
import torch

from bayesify.compare.models import Data
from bayesify.compare.tuning import AUTO
from bayesify.likelihoods import Categorical
from bayesify.predictive.base import Outputs, Predictive
from bayesify.predictive.regression import RegressionPredictive
from bayesify.training.random_streams import derive_seed

MOST_RESIDUALS = 60
"""Components of a predictive distribution."""
WIDE_SHARE = 0.05
"""Share of its components that are wide, so that a residual beyond all others is improbable and not impossible."""
WIDE = 3.0
"""Deviation of these, in deviations of the residuals."""
FOLDS, MANY = 5, 2000
"""Parts of the training rows, each predicted from the others, by which residuals are found; from how many rows on only the first
part is predicted."""
ROUNDS = 100
"""Trees that scikit-learn's boosting adds, at most."""
SPARSE = 3
"""Rows per input below which the linear model chooses its inputs (lasso)."""
PENALTIES = 30
"""Of the lasso, over three decades: each a fifth less than the one before."""
SMOOTHING = 1.0
"""Rows by which probabilities are drawn towards equal ones."""

Guess = Callable[[np.ndarray], "np.ndarray | Predictive"]


def train_apart(name: str, data: Data, seed: int, steps: int | None = None) -> RivalModel:
    """Train what has an estimator of its own on the rows of a split.

    Args:
        name: From `tuning.APART`.
        data: To train on.
        seed: Of folds and training.
        steps: Of the optimizer, at most, for the estimators' default.
    """
    from threadpoolctl import threadpool_limits

    with threadpool_limits(1), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if name == AUTO:
            return _default(data, seed, steps)
        return _classifier(name, data, seed) if data.num_classes else _regressor(name, data, seed)


@dataclass(frozen=True)
class RivalModel:
    r"""A point prediction with the distribution of its errors on rows that it was not trained on.

    Of a regression, with $r_s$ quantiles of these residuals and h a bandwidth,

    $$ p(y | x) = \frac1S \sum_s \mathcal{N}(y; f(x) + r_s, h_s^2), $$

    so that its central intervals end at quantiles of the residuals, as conformal ones do (Barber et al. 2021). Of a target that
    is fitted by its logarithm, means are $e^{f(x) + r_s}$ and deviations $h_s$ times that.

    Args:
        data: What it was trained on.
        guess: From inputs in the units of the table [N, D] to f [N], or probabilities [N, C], or to a prediction that is whole.
        residuals: $r_s$, [S]; `None` for a classification.
        widths: $h_s$, [S].
        logarithm: Whether f is of the target's logarithm.
        model: The networks behind it, where there are some.
    """

    data: Data
    guess: Guess
    residuals: np.ndarray | None = None
    widths: np.ndarray | None = None
    logarithm: bool = False
    model: Any = None

    def __call__(self, x: np.ndarray) -> Predictive:
        """The predictive distribution of rows in the units of the table."""
        found = self.guess(x)
        if isinstance(found, Predictive):
            return found
        if self.residuals is None or self.widths is None:
            return Categorical().predictive(Outputs(torch.from_numpy(np.log(found))[None]))
        mean = self.residuals[:, None] + found
        log_width = np.broadcast_to(np.log(self.widths)[:, None], mean.shape)
        if self.logarithm:
            mean, log_width = np.exp(mean), log_width + mean
        return RegressionPredictive(Outputs(torch.from_numpy(np.stack((mean, 2 * log_width), -1))), _components)


def _default(data: Data, seed: int, steps: int | None) -> RivalModel:
    """What the estimators do by default."""
    from bayesify.sklearn import BayesianClassifier, BayesianRegressor

    options: dict[str, Any] = {"epochs": steps, "random_state": seed % 2**31, "memory_rows": 0}
    if data.num_classes == 0:
        regressor = BayesianRegressor(**options).fit(data.x, data.y)
        return RivalModel(data, regressor.predictive, model=regressor.model_)
    classifier = BayesianClassifier(**options).fit(data.x, data.y)
    return RivalModel(data, partial(_probabilities, classifier, data), model=classifier.model_)


def _probabilities(model: Any, data: Data, x: np.ndarray) -> np.ndarray:
    """Of all classes, also of those that no row to train on had: [N, C]."""
    found = np.zeros((len(x), data.num_classes))
    found[:, model.classes_.astype(int)] = model.predict_proba(x)
    return _smooth(found, len(data.y))


def _components(outputs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Means and variances, each [S, B, 1], from means and log-variances [S, B, 2]."""
    mean, log_variance = outputs.chunk(2, dim=-1)
    return mean, log_variance.exp()


def _regressor(name: str, data: Data, seed: int) -> RivalModel:
    if name == "constant":
        return RivalModel(data, lambda x: np.zeros(len(x)), *_errors(data.y))
    best: tuple[float, RivalModel] | None = None
    for logarithm in (False, True) if data.y.min() > 0 else (False,):
        y = np.log(data.y) if logarithm else data.y
        residuals = _held_out(name, data.x, y, seed)
        cost = math.log(max(float(np.sqrt(np.mean(residuals**2))), 1e-12)) + (float(y.mean()) if logarithm else 0.0)
        if best is None or cost < best[0]:
            fitted = _fit(name, data.x, y, seed)
            best = cost, RivalModel(data, fitted, *_errors(residuals), logarithm)
    assert best is not None
    return best[1]


def _held_out(name: str, x: np.ndarray, y: np.ndarray, seed: int) -> np.ndarray:
    """Residuals of rows that the model was not trained on."""
    order = np.random.default_rng(derive_seed(seed, "rival")).permutation(len(y))
    parts = np.array_split(order, min(FOLDS, len(y)))
    residuals = []
    for part in parts[:1] if len(y) > MANY else parts:
        rest = np.setdiff1d(order, part)
        residuals.append(y[part] - _fit(name, x[rest], y[rest], seed)(x[part]))
    return np.concatenate(residuals)


def _errors(residuals: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Quantiles of residuals with Silverman's bandwidth, some of them wide: [S] and [S]."""
    count = min(len(residuals), MOST_RESIDUALS)
    middle = np.quantile(residuals, (np.arange(count) + 0.5) / count)
    spread = float(np.std(residuals)) or 1e-6 * (abs(float(residuals.mean())) or 1.0)
    inner = float(np.subtract(*np.quantile(residuals, (0.75, 0.25)))) / 1.34
    bandwidth = 0.9 * min(spread, inner or spread) * len(residuals) ** -0.2
    wide = max(1, round(WIDE_SHARE * count))
    centers = np.concatenate((middle, np.full(wide, residuals.mean())))
    return centers, np.concatenate((np.full(count, bandwidth), np.full(wide, WIDE * spread)))


def _classifier(name: str, data: Data, seed: int) -> RivalModel:
    classes = data.num_classes
    if name == "constant":
        shares = _smooth(np.bincount(data.y, minlength=classes)[None] / len(data.y), len(data.y))
        return RivalModel(data, lambda x: np.repeat(shares, len(x), 0))
    model = _make(name, data.x, regression=False, seed=seed).fit(data.x, data.y)
    return RivalModel(data, partial(_probabilities, model, data))


def _smooth(probs: np.ndarray, rows: int) -> np.ndarray:
    return (rows * probs + SMOOTHING / probs.shape[1]) / (rows + SMOOTHING)


def _fit(name: str, x: np.ndarray, y: np.ndarray, seed: int) -> Guess:
    return _make(name, x, regression=True, seed=seed).fit(x, y).predict


PACKAGES = {
    "lightgbm": ("lightgbm", "LGBM", {"verbose": -1, "n_jobs": 1}),
    "xgboost": ("xgboost", "XGB", {"n_jobs": 1}),
    "catboost": ("catboost", "CatBoost", {"verbose": False, "thread_count": 1, "allow_writing_files": False}),
}
"""Modules with estimators of scikit-learn's kind, the start of their names, and what keeps them quiet."""


def installed() -> list[str]:
    """Rivals that need a package which is there."""
    return [name for name, (module, _, _) in PACKAGES.items() if find_spec(module) is not None]


def _make(name: str, x: np.ndarray, *, regression: bool, seed: int) -> Any:
    if name in PACKAGES:
        module, start, options = PACKAGES[name]
        made = getattr(import_module(module), start + ("Regressor" if regression else "Classifier"))
        return made(random_state=seed % 2**31, **options)
    if name == "boosted_trees":
        from sklearn.ensemble import HistGradientBoostingClassifier, HistGradientBoostingRegressor

        trees = HistGradientBoostingRegressor if regression else HistGradientBoostingClassifier
        return trees(max_iter=ROUNDS, random_state=seed % 2**31)
    from sklearn.linear_model import LassoCV, LogisticRegression, RidgeCV
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    if not regression:
        model: Any = LogisticRegression(C=1.0 if len(x) > SPARSE * x.shape[1] else 0.1, max_iter=500)
    elif len(x) > SPARSE * x.shape[1]:
        model = RidgeCV(np.logspace(-3, 3, 13))
    else:
        model = LassoCV(alphas=PENALTIES, cv=min(5, len(x)), random_state=seed % 2**31)
    return make_pipeline(StandardScaler(), model)
