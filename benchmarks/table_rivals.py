"""The methods of `benchmarks.tables`: bayesify's estimators, and what a user would take instead, on the same rows and inputs.

A method is a function of `Rows`. Its answer is a `Regression` or a `Classification`; both are plain arrays.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import islice
from typing import Any

import numpy as np
from pandas import DataFrame

LEVELS = np.array([0.025, *np.arange(1, 20) / 20, 0.975])
"""Probabilities at which quantiles are asked for: the 19 of the CRPS, and the ends of 95 % intervals."""
TUNING_LEVELS = np.array([0.1, 0.5, 0.9])
"""Those at which boosted quantile trees are tuned."""
TREE_DEPTHS, LEARNING_RATES, MAX_TREES, TREES_STEP = (2, 4, 8), (0.05, 0.15), 200, 10
"""What boosted trees are chosen from; numbers of trees in steps."""


@dataclass(frozen=True)
class Rows:
    """Training and test rows of one fold.

    Args:
        frame: Training inputs as they are.
        frame_test: Test inputs as they are.
        x: Training inputs as numbers, [N, D]: medians for missing numbers beside a mark, one input per frequent level.
        x_test: Test inputs as numbers.
        y: Training targets, or positions of classes from 0 on, [N].
        y_test: Test targets; no method looks at them but to give a density.
        task: `"regression"`, `"count"` or `"classification"`.
        fold: Seed of everything random.
    """

    frame: DataFrame
    frame_test: DataFrame
    x: np.ndarray
    x_test: np.ndarray
    y: np.ndarray
    y_test: np.ndarray
    task: str
    fold: int

    @property
    def num_classes(self) -> int:
        """Classes; every class of the table is among the training rows."""
        return int(self.y.max()) + 1

    @property
    def validation(self) -> np.ndarray:
        """A fifth of the training rows, the same for every method that tunes, as a mask."""
        return np.random.default_rng(self.fold).permutation(len(self.y)) % 5 == 0


@dataclass(frozen=True)
class Regression:
    """Predicted quantiles at `LEVELS` [Q, N], means [N], and log-densities of the test targets [N] where there are any.

    `place` is P(Y <= y) of the test targets [N] where whole numbers are predicted, less a random share of P(Y = y): uniform
    where the prediction is right, which closed intervals of whole numbers cannot show.
    """

    quantiles: np.ndarray
    mean: np.ndarray
    log_prob: np.ndarray | None = None
    place: np.ndarray | None = None


@dataclass(frozen=True)
class Classification:
    """Predicted probabilities, [N, C]."""

    probs: np.ndarray


Method = Callable[[Rows], Regression | Classification]


# -- bayesify ----------------------------------------------------------------------------------------------------------


def default(rows: Rows, **options: Any) -> Any:
    """The estimator, trained."""
    from bayesify.sklearn import BayesianClassifier, BayesianRegressor

    made = BayesianClassifier if rows.task == "classification" else BayesianRegressor
    return made(random_state=rows.fold, **options).fit(rows.frame, rows.y)


def bayesify(rows: Rows, **options: Any) -> Regression | Classification:
    model = default(rows, **options)
    if rows.task == "classification":
        return Classification(model.predict_proba(rows.frame_test))
    import torch

    found = model.predictive(rows.frame_test)
    y = torch.from_numpy(rows.y_test)[:, None]
    place = None
    if found.family.discrete:
        at, below = found.cdf(y), torch.where(y >= 1, found.cdf((y - 1).clamp_min(0)), 0.0)
        place = (at - (at - below) * torch.from_numpy(np.random.default_rng(rows.fold).random(y.shape))).numpy()[:, 0]
    quantiles = found.quantile(LEVELS.tolist())[..., 0].numpy()
    return Regression(quantiles, found.mean[:, 0].numpy(), found.log_prob(y).numpy(), place)


# -- simple ------------------------------------------------------------------------------------------------------------


def constant(rows: Rows) -> Regression | Classification:
    """The training targets' own distribution, whatever the row."""
    count = len(rows.x_test)
    if rows.task == "classification":
        shares = (np.bincount(rows.y, minlength=rows.num_classes) + 1.0) / (len(rows.y) + rows.num_classes)
        return Classification(np.tile(shares, (count, 1)))
    mean, std = np.full(count, rows.y.mean()), rows.y.std()
    return Regression(np.tile(np.quantile(rows.y, LEVELS)[:, None], count), mean, _gaussian(rows.y_test, mean, std))


def linear(rows: Rows) -> Regression | Classification:
    """Ridge regression with the Gaussian of its leave-one-out residuals; logistic regression. Penalties by cross-validation."""
    from scipy.stats import norm
    from sklearn.linear_model import LogisticRegression, RidgeCV
    from sklearn.model_selection import GridSearchCV, StratifiedKFold
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    if rows.task == "classification":
        grid = {"C": np.logspace(-3, 2, 6)}
        folds = StratifiedKFold(5, shuffle=True, random_state=0)
        model = GridSearchCV(LogisticRegression(max_iter=1000), grid, scoring="neg_log_loss", cv=folds)
        fitted = make_pipeline(StandardScaler(), model).fit(rows.x, rows.y)
        return Classification(fitted.predict_proba(rows.x_test))
    ridge = RidgeCV(np.logspace(-3, 3, 13), scoring="neg_mean_squared_error", store_cv_results=False)
    fitted = make_pipeline(StandardScaler(), ridge).fit(rows.x, rows.y)
    mean, std = fitted.predict(rows.x_test), np.sqrt(-fitted[-1].best_score_)
    return Regression(mean + std * norm.ppf(LEVELS)[:, None], mean, _gaussian(rows.y_test, mean, std))


def _gaussian(y: np.ndarray, mean: np.ndarray, std: Any) -> np.ndarray:
    return -0.5 * np.square((y - mean) / std) - np.log(std * np.sqrt(2 * np.pi))


# -- boosted trees -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Trees:
    """A library of boosted trees: a model for a depth, rate, number of trees and quantile (`None`: classes, -1: the mean), and its
    predictions after each `TREES_STEP` more trees."""

    make: Callable[[int, float, int, float | None], Any]
    staged: Callable[[Any, np.ndarray], Iterator[np.ndarray]]


def boosted(rows: Rows, trees: Trees) -> Regression | Classification:
    """Depth, rate and number of trees by the loss of the validation rows, then trained on all training rows.

    Regressions have one model a quantile, and one of the mean."""
    held, levels = rows.validation, [None] if rows.task == "classification" else TUNING_LEVELS.tolist()
    losses: dict[tuple[int, float, int], float] = {}
    for depth in TREE_DEPTHS:
        for rate in LEARNING_RATES:
            models = [trees.make(depth, rate, MAX_TREES, level).fit(rows.x[~held], rows.y[~held]) for level in levels]
            staged = zip(*(trees.staged(model, rows.x[held]) for model in models), strict=True)
            for index, predicted in enumerate(staged, 1):
                loss = np.mean(
                    [_loss(rows.y[held], found, level) for found, level in zip(predicted, levels, strict=True)]
                )
                losses[depth, rate, TREES_STEP * index] = float(loss)
    depth, rate, count = min(losses, key=losses.__getitem__)
    if rows.task == "classification":
        return Classification(trees.make(depth, rate, count, None).fit(rows.x, rows.y).predict_proba(rows.x_test))
    found = [trees.make(depth, rate, count, level).fit(rows.x, rows.y).predict(rows.x_test) for level in LEVELS]
    mean = trees.make(depth, rate, count, -1.0).fit(rows.x, rows.y).predict(rows.x_test)
    return Regression(np.sort(found, axis=0), mean)


def _loss(y: np.ndarray, predicted: np.ndarray, level: float | None) -> float:
    if level is None:
        return float(-np.log(np.clip(predicted[np.arange(len(y)), y], 1e-7, 1)).mean())
    return float(pinball(y, predicted, level).mean())


def pinball(y: np.ndarray, quantile: np.ndarray, level: Any) -> np.ndarray:
    """The loss that a quantile minimizes, in y's unit."""
    return np.maximum(level * (y - quantile), (level - 1) * (y - quantile))


def hist_gradient_boosting(rows: Rows) -> Regression | Classification:
    from sklearn.ensemble import HistGradientBoostingClassifier, HistGradientBoostingRegressor

    def make(depth: int, rate: float, count: int, level: float | None) -> Any:
        shared: dict[str, Any] = {"max_depth": depth, "learning_rate": rate, "max_iter": count}
        shared |= {"early_stopping": False, "random_state": 0}
        if level is None:
            return HistGradientBoostingClassifier(**shared)
        if level < 0:
            return HistGradientBoostingRegressor(**shared)
        return HistGradientBoostingRegressor(loss="quantile", quantile=level, **shared)

    def staged(model: Any, x: np.ndarray) -> Iterator[np.ndarray]:
        every = model.staged_predict_proba(x) if rows.task == "classification" else model.staged_predict(x)
        return islice(every, TREES_STEP - 1, None, TREES_STEP)

    return boosted(rows, Trees(make, staged))


def lightgbm(rows: Rows) -> Regression | Classification:
    from lightgbm import LGBMClassifier, LGBMRegressor

    def make(depth: int, rate: float, count: int, level: float | None) -> Any:
        shared: dict[str, Any] = {"max_depth": depth, "num_leaves": min(2**depth, 31), "learning_rate": rate}
        shared |= {"n_estimators": count, "n_jobs": 1, "verbose": -1, "random_state": 0}
        if level is None:
            return LGBMClassifier(**shared)
        return LGBMRegressor(**shared) if level < 0 else LGBMRegressor(objective="quantile", alpha=level, **shared)

    def staged(model: Any, x: np.ndarray) -> Iterator[np.ndarray]:
        predict = model.predict_proba if rows.task == "classification" else model.predict
        return (predict(x, num_iteration=count) for count in range(TREES_STEP, MAX_TREES + 1, TREES_STEP))

    return boosted(rows, Trees(make, staged))


def catboost(rows: Rows) -> Regression | Classification:
    """One model of all quantiles; its number of trees by the validation rows, then trained on all training rows."""
    from catboost import CatBoostClassifier, CatBoostRegressor

    loss = "MultiQuantile:alpha=" + ",".join(f"{level:.3f}" for level in LEVELS)
    made: Any = CatBoostRegressor if rows.task != "classification" else CatBoostClassifier
    loss = loss if rows.task != "classification" else "MultiClass"
    shared = {"loss_function": loss, "thread_count": 1, "verbose": 0, "random_seed": 0, "allow_writing_files": False}
    held = rows.validation
    first = made(iterations=MAX_TREES, learning_rate=0.1, early_stopping_rounds=30, **shared)
    first.fit(rows.x[~held], rows.y[~held], eval_set=(rows.x[held], rows.y[held]))
    model = made(iterations=first.get_best_iteration() + 1, learning_rate=0.1, **shared).fit(rows.x, rows.y)
    if rows.task == "classification":
        return Classification(model.predict_proba(rows.x_test))
    quantiles = np.sort(model.predict(rows.x_test).T, axis=0)
    return Regression(quantiles, quantiles.mean(0))


def ngboost(rows: Rows) -> Regression | Classification:
    """Natural gradient boosting of a normal or, where that is better on the validation rows, a log-normal distribution."""
    from ngboost import NGBClassifier, NGBRegressor
    from ngboost.distns import LogNormal, Normal, k_categorical

    held = rows.validation

    def make(kind: Any, dist: Any, count: int) -> Any:
        return kind(Dist=dist, n_estimators=count, learning_rate=0.03, verbose=False, random_state=0)

    def best(kind: Any, dist: Any) -> tuple[float, int]:
        model = make(kind, dist, MAX_TREES)
        model.fit(rows.x[~held], rows.y[~held], X_val=rows.x[held], Y_val=rows.y[held], early_stopping_rounds=30)
        losses = model.evals_result["val"]["LOGSCORE"]
        return float(min(losses)), int(np.argmin(losses)) + 1

    def whole(kind: Any, dist: Any, count: int) -> Any:
        return make(kind, dist, count).fit(rows.x, rows.y)

    if rows.task == "classification":
        dist = k_categorical(rows.num_classes)
        return Classification(whole(NGBClassifier, dist, best(NGBClassifier, dist)[1]).predict_proba(rows.x_test))
    tried = {dist: best(NGBRegressor, dist) for dist in [Normal, *([LogNormal] if rows.y.min() > 0 else [])]}
    dist = min(tried, key=lambda kind: tried[kind][0])
    found = whole(NGBRegressor, dist, tried[dist][1]).pred_dist(rows.x_test)
    quantiles = np.stack([found.ppf(level) for level in LEVELS])
    return Regression(quantiles, found.mean(), found.logpdf(rows.y_test))


def forest(rows: Rows) -> Regression | Classification:
    """A quantile forest, 300 trees with leaves of at least 5 rows; scikit-learn's forest for classes."""
    if rows.task == "classification":
        from sklearn.ensemble import RandomForestClassifier

        model = RandomForestClassifier(300, min_samples_leaf=2, random_state=0).fit(rows.x, rows.y)
        return Classification(model.predict_proba(rows.x_test))
    from quantile_forest import RandomForestQuantileRegressor

    found = RandomForestQuantileRegressor(300, min_samples_leaf=5, random_state=0).fit(rows.x, rows.y)
    return Regression(
        np.asarray(found.predict(rows.x_test, quantiles=LEVELS.tolist())).T,
        found.predict(rows.x_test, quantiles="mean"),
    )


METHODS: dict[str, tuple[Method, str]] = {
    "bayesify": (bayesify, "sklearn"),
    "bayesify-ensemble": (lambda rows: bayesify(rows, method="ensemble"), "sklearn"),
    "constant": (constant, "numpy"),
    "linear": (linear, "sklearn"),
    "boosted trees": (hist_gradient_boosting, "sklearn"),
    "LightGBM": (lightgbm, "lightgbm"),
    "CatBoost": (catboost, "catboost"),
    "NGBoost": (ngboost, "ngboost"),
    "forest": (forest, "quantile_forest"),
}
"""Every method, and the package that it needs beside bayesify."""


def installed() -> list[str]:
    """Names of the methods that can run here."""
    return [name for name, (_, package) in METHODS.items() if find_spec(package) is not None]
