"""The methods of `benchmarks.tables`: bayesify's estimators and their rivals, on the same rows.

A method is a function of `Rows`. Its answer is a `Regression` or a `Classification`, which hold plain arrays. A rival searches a
few random settings by the loss on the same validation rows, which are a fifth of its training rows. Boosted trees and the
networks of pytabkit take texts as categories. The linear model, the forest and NGBoost take numbers, with one input per frequent
level.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from itertools import islice
from typing import Any

import numpy as np
import pandas
from pandas import DataFrame

LEVELS = np.array([0.025, *np.arange(1, 20) / 20, 0.975])
"""Probabilities of the predicted quantiles: the 19 of the CRPS, and the ends of 95 % intervals."""
TUNING_LEVELS = np.array([0.1, 0.5, 0.9])
"""Probabilities at which every rival is tuned and judged on the validation rows."""
NUM_TRIES, NUM_TRIES_OF_CATBOOST, MAX_TREES, TREES_STEP = 8, 4, 200, 10
"""Number of random settings tried for boosted trees, and for CatBoost; largest number of trees; step between the tree counts
tried."""
MAX_NATIVE_LEVELS = 254
"""Largest number of levels of a text in scikit-learn's boosted trees. Rarer levels count as missing."""


@dataclass(frozen=True)
class Rows:
    """Training and test rows of one fold.

    Args:
        frame: Training inputs, unchanged.
        frame_test: Test inputs, unchanged.
        x: Training inputs as numbers, [N, D]. Missing numbers become medians with an indicator; frequent levels get one input each.
        x_test: Test inputs as numbers.
        y: Training targets, or indices of classes, [N].
        y_test: Test targets. Methods use them only to compute a density.
        task: `"regression"`, `"count"` or `"classification"`.
        fold: Number of the fold, which is the seed of all random numbers.
        ordered: Whether rows are in time order.
    """

    frame: DataFrame
    frame_test: DataFrame
    x: np.ndarray
    x_test: np.ndarray
    y: np.ndarray
    y_test: np.ndarray
    task: str
    fold: int
    ordered: bool = False

    @property
    def num_classes(self) -> int:
        """Number of classes. Every class of the table occurs in the training rows."""
        return int(self.y.max()) + 1

    @property
    def validation(self) -> np.ndarray:
        """Mask of a fifth of the training rows, the same for every method that tunes; the last fifth of rows in time order."""
        if self.ordered:
            return np.arange(len(self.y)) >= 0.8 * len(self.y)
        return np.random.default_rng(self.fold).permutation(len(self.y)) % 5 == 0

    def inner(self) -> "Rows":
        """The other training rows, with the validation rows as test rows."""
        held = self.validation
        frames = self.frame[~held].reset_index(drop=True), self.frame[held].reset_index(drop=True)
        return replace(
            self,
            frame=frames[0],
            frame_test=frames[1],
            x=self.x[~held],
            x_test=self.x[held],
            y=self.y[~held],
            y_test=self.y[held],
        )

    def native(self) -> tuple[DataFrame, DataFrame]:
        """Training and test inputs for methods that take categories and missing numbers. A date becomes three numbers."""
        made: tuple[dict[str, Any], dict[str, Any]] = {}, {}
        for name in self.frame:
            own = self.frame[name]
            levels = None
            if not pandas.api.types.is_any_real_numeric_dtype(own) and own.dtype.kind not in "bM":
                levels = own.value_counts().index[:MAX_NATIVE_LEVELS]
            for columns, column in zip(made, (own, self.frame_test[name]), strict=True):
                if levels is not None:
                    columns[str(name)] = pandas.Categorical(column.where(column.isin(levels)), categories=levels)
                elif own.dtype.kind == "M":
                    days = (column - pandas.Timestamp("2000-01-01")).dt.days
                    columns |= {
                        f"{name} day": days,
                        f"{name} of year": column.dt.day_of_year,
                        f"{name} of week": column.dt.day_of_week,
                    }
                else:
                    columns[str(name)] = column.astype(np.float64)
        return DataFrame(made[0]), DataFrame(made[1])


@dataclass(frozen=True)
class Regression:
    """Predicted quantiles at `LEVELS` [Q, N], means [N], and log-densities of the test targets [N] if the method has any.

    If values have positive probabilities, `place` is P(Y <= y) of the test targets [N] minus a random share of P(Y = y). It is
    uniform if the prediction is right, which closed intervals of counts cannot show. `validation` is the loss on the validation
    rows at `TUNING_LEVELS`.
    """

    quantiles: np.ndarray
    mean: np.ndarray
    log_prob: np.ndarray | None = None
    place: np.ndarray | None = None
    validation: float | None = None


@dataclass(frozen=True)
class Classification:
    """Predicted probabilities, [N, C], and the log-loss on the validation rows."""

    probs: np.ndarray
    validation: float | None = None


Answer = Regression | Classification
Method = Callable[[Rows], Answer]


# -- bayesify ----------------------------------------------------------------------------------------------------------


def default(rows: Rows, **options: Any) -> Any:
    """The trained estimator."""
    from bayesify.sklearn import BayesianClassifier, BayesianRegressor

    made = BayesianClassifier if rows.task == "classification" else BayesianRegressor
    return made(random_state=rows.fold, **options).fit(rows.frame, rows.y)


def bayesify(rows: Rows, **options: Any) -> Answer:
    model = default(rows, **options)
    if rows.task == "classification":
        return Classification(model.predict_proba(rows.frame_test))
    import torch

    found = model.predictive(rows.frame_test)
    y = torch.from_numpy(rows.y_test)[:, None]
    at, below, place = found.cdf(y), found.below(y), None
    if bool((below < at).any()):  # counts, and amounts with an atom at zero
        place = (at - (at - below) * torch.from_numpy(np.random.default_rng(rows.fold).random(y.shape))).numpy()[:, 0]
    quantiles = found.quantile(LEVELS.tolist())[..., 0].numpy()
    return Regression(quantiles, found.mean[:, 0].numpy(), found.log_prob(y).numpy(), place)


# -- simple ------------------------------------------------------------------------------------------------------------


def constant(rows: Rows) -> Answer:
    """The distribution of the training targets, the same for every row."""
    count = len(rows.x_test)
    if rows.task == "classification":
        shares = (np.bincount(rows.y, minlength=rows.num_classes) + 1.0) / (len(rows.y) + rows.num_classes)
        return Classification(np.tile(shares, (count, 1)))
    mean, std = np.full(count, rows.y.mean()), rows.y.std()
    return Regression(np.tile(np.quantile(rows.y, LEVELS)[:, None], count), mean, _gaussian(rows.y_test, mean, std))


def linear(rows: Rows) -> Answer:
    """Ridge regression with a Gaussian of its leave-one-out residuals, or logistic regression. Cross-validation sets penalties."""
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


# -- searches ----------------------------------------------------------------------------------------------------------


Setting = dict[str, Any]


def searched(method: Callable[[Rows, Setting], Answer], settings: Sequence[Setting] = ({},)) -> Method:
    """A method with the best setting on the validation rows, trained on all training rows."""

    def run(rows: Rows) -> Answer:
        inner = rows.inner()
        losses = [loss(method(inner, setting), inner.y_test) for setting in settings]
        return replace(method(rows, settings[int(np.argmin(losses))]), validation=min(losses))

    return run


def loss(found: Answer, y: np.ndarray) -> float:
    """Log-loss, or the mean pinball loss at `TUNING_LEVELS`."""
    if isinstance(found, Classification):
        return _loss(y, found.probs, None)
    places = [int(np.argmin(abs(LEVELS - level))) for level in TUNING_LEVELS]
    return float(np.mean([_loss(y, found.quantiles[place], LEVELS[place]) for place in places]))


def _loss(y: np.ndarray, predicted: np.ndarray, level: float | None) -> float:
    if level is None:
        return float(-np.log(np.clip(predicted[np.arange(len(y)), y], 1e-7, 1)).mean())
    return float(pinball(y, predicted, level).mean())


def pinball(y: np.ndarray, quantile: np.ndarray, level: Any) -> np.ndarray:
    """Pinball loss of a quantile, in the unit of y."""
    return np.maximum(level * (y - quantile), (level - 1) * (y - quantile))


# -- boosted trees -----------------------------------------------------------------------------------------------------


def tree_settings(rows: Rows, count: int) -> list[Setting]:
    """Random settings of boosted trees, from wide ranges."""
    draw = np.random.default_rng([rows.fold, 7])
    return [
        {
            "rate": float(np.exp(draw.uniform(np.log(0.03), np.log(0.3)))),
            "depth": int(draw.integers(2, 9)),
            "min_rows": int(draw.choice([3, 5, 10, 20, 40])),
            "l2": float(np.exp(draw.uniform(np.log(0.01), np.log(10)))),
        }
        for _ in range(count)
    ]


@dataclass(frozen=True)
class Trees:
    """A library of boosted trees: a model for a setting, a number of trees and a quantile, and its staged predictions.

    The quantile is `None` for classes and -1 for the mean. Predictions are made after every `TREES_STEP` trees.
    """

    make: Callable[[Setting, int, float | None], Any]
    staged: Callable[[Any, DataFrame], Iterator[np.ndarray]]


def boosted(rows: Rows, trees: Trees) -> Answer:
    """Boosted trees with the best setting and number of trees on the validation rows, trained on all training rows.

    A regression has one model per quantile, and one for the mean.
    """
    inner, levels = rows.inner(), [None] if rows.task == "classification" else TUNING_LEVELS.tolist()
    (x, held), (every, test) = inner.native(), rows.native()
    best: tuple[float, int, Setting] = np.inf, 0, {}
    for setting in tree_settings(rows, NUM_TRIES):
        models = [trees.make(setting, MAX_TREES, level).fit(x, inner.y) for level in levels]
        staged = zip(*(trees.staged(model, held) for model in models), strict=True)
        for index, predicted in enumerate(staged, 1):
            parts = [_loss(inner.y_test, found, level) for found, level in zip(predicted, levels, strict=True)]
            best = min(best, (float(np.mean(parts)), TREES_STEP * index, setting), key=lambda one: one[0])
    validation, count, setting = best
    if rows.task == "classification":
        return Classification(trees.make(setting, count, None).fit(every, rows.y).predict_proba(test), validation)
    found = [trees.make(setting, count, level).fit(every, rows.y).predict(test) for level in LEVELS]
    mean = trees.make(setting, count, -1.0).fit(every, rows.y).predict(test)
    return Regression(np.sort(found, axis=0), mean, validation=validation)


def hist_gradient_boosting(rows: Rows) -> Answer:
    from sklearn.ensemble import HistGradientBoostingClassifier, HistGradientBoostingRegressor

    def make(setting: Setting, count: int, level: float | None) -> Any:
        shared: dict[str, Any] = {"max_depth": setting["depth"], "learning_rate": setting["rate"], "max_iter": count}
        shared |= {"min_samples_leaf": setting["min_rows"], "l2_regularization": setting["l2"]}
        shared |= {"early_stopping": False, "random_state": 0, "categorical_features": "from_dtype"}
        if level is None:
            return HistGradientBoostingClassifier(**shared)
        if level < 0:
            return HistGradientBoostingRegressor(**shared)
        return HistGradientBoostingRegressor(loss="quantile", quantile=level, **shared)

    def staged(model: Any, x: DataFrame) -> Iterator[np.ndarray]:
        every = model.staged_predict_proba(x) if rows.task == "classification" else model.staged_predict(x)
        return islice(every, TREES_STEP - 1, None, TREES_STEP)

    return boosted(rows, Trees(make, staged))


def lightgbm(rows: Rows) -> Answer:
    from lightgbm import LGBMClassifier, LGBMRegressor

    def make(setting: Setting, count: int, level: float | None) -> Any:
        depth = setting["depth"]
        shared: dict[str, Any] = {"max_depth": depth, "num_leaves": min(2**depth, 31), "learning_rate": setting["rate"]}
        shared |= {"min_child_samples": setting["min_rows"], "reg_lambda": setting["l2"], "n_estimators": count}
        shared |= {"n_jobs": 1, "verbose": -1, "random_state": 0}
        if level is None:
            return LGBMClassifier(**shared)
        return LGBMRegressor(**shared) if level < 0 else LGBMRegressor(objective="quantile", alpha=level, **shared)

    def staged(model: Any, x: DataFrame) -> Iterator[np.ndarray]:
        predict = model.predict_proba if rows.task == "classification" else model.predict
        return (predict(x, num_iteration=count) for count in range(TREES_STEP, MAX_TREES + 1, TREES_STEP))

    return boosted(rows, Trees(make, staged))


def catboost(rows: Rows) -> Answer:
    """One model of all quantiles. Validation rows choose setting and number of trees; then it is trained on all training rows."""
    from catboost import CatBoostClassifier, CatBoostRegressor

    def texts(frame: DataFrame) -> DataFrame:
        return frame.assign(
            **{name: frame[name].astype(object).where(frame[name].notna(), "").astype(str) for name in named}
        )

    (every, test), inner = rows.native(), rows.inner()
    named = list(every.select_dtypes("category"))
    x, held = (texts(part) for part in inner.native())
    made: Any = CatBoostClassifier if rows.task == "classification" else CatBoostRegressor
    quantiles = "MultiQuantile:alpha=" + ",".join(f"{level:.3f}" for level in LEVELS)
    shared = {"loss_function": "MultiClass" if rows.task == "classification" else quantiles, "cat_features": named}
    shared |= {"thread_count": 1, "verbose": 0, "random_seed": 0, "allow_writing_files": False}
    best: tuple[float, dict[str, Any]] = np.inf, {}
    for setting in tree_settings(rows, NUM_TRIES_OF_CATBOOST):
        own = {"learning_rate": setting["rate"], "depth": min(setting["depth"], 6), "l2_leaf_reg": setting["l2"]}
        model = made(iterations=MAX_TREES, early_stopping_rounds=30, **own, **shared)
        model.fit(x, inner.y, eval_set=(held, inner.y_test))
        score = loss(_of_catboost(model, held, rows.task), inner.y_test)
        best = min(best, (score, {"iterations": model.get_best_iteration() + 1, **own}), key=lambda one: one[0])
    return replace(
        _of_catboost(made(**best[1], **shared).fit(texts(every), rows.y), texts(test), rows.task), validation=best[0]
    )


def _of_catboost(model: Any, x: DataFrame, task: str) -> Answer:
    if task == "classification":
        return Classification(model.predict_proba(x))
    quantiles = np.sort(model.predict(x).T, axis=0)
    return Regression(quantiles, quantiles.mean(0))


def ngboost(rows: Rows, setting: Setting) -> Answer:
    """Natural gradient boosting of a normal or a log-normal distribution, whichever is better on the validation rows."""
    from ngboost import NGBClassifier, NGBRegressor
    from ngboost.distns import LogNormal, Normal, k_categorical

    held = rows.validation

    def make(kind: Any, dist: Any, count: int) -> Any:
        return kind(Dist=dist, n_estimators=count, verbose=False, random_state=0, **setting)

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


def forest(rows: Rows, setting: Setting) -> Answer:
    """A quantile forest of 300 trees, or scikit-learn's forest for classes."""
    if rows.task == "classification":
        from sklearn.ensemble import RandomForestClassifier

        model = RandomForestClassifier(300, random_state=0, **setting).fit(rows.x, rows.y)
        return Classification(model.predict_proba(rows.x_test))
    from quantile_forest import RandomForestQuantileRegressor

    found = RandomForestQuantileRegressor(300, random_state=0, **setting).fit(rows.x, rows.y)
    return Regression(
        np.asarray(found.predict(rows.x_test, quantiles=LEVELS.tolist())).T,
        found.predict(rows.x_test, quantiles="mean"),
    )


def pytabkit(rows: Rows, kind: str) -> Answer:
    """A network of pytabkit for all quantiles, with its tuned defaults. Validation rows stop it, and it is not trained again."""
    from pytabkit.models.sklearn import sklearn_interfaces

    made = getattr(sklearn_interfaces, f"{kind}_{'Classifier' if rows.task == 'classification' else 'Regressor'}")
    quantiles = f"multi_pinball({','.join(f'{level:.3f}' for level in LEVELS)})"
    named = {} if rows.task == "classification" else {"train_metric_name": quantiles, "val_metric_name": quantiles}
    (every, test), held = rows.native(), rows.validation
    every, test = (part.assign(**_filled(part, every)) for part in (every, test))
    model = made(device="cpu", random_state=0, n_threads=1, verbosity=0, **named)
    model.fit(every, rows.y, val_idxs=np.flatnonzero(held))

    def answer(x: DataFrame) -> Answer:
        if rows.task == "classification":
            return Classification(model.predict_proba(x))
        found = np.sort(np.asarray(model.predict(x)).T, axis=0)
        return Regression(found, found[1:-1].mean(0))

    return replace(answer(test), validation=loss(answer(every[held].reset_index(drop=True)), rows.y[held]))


def _filled(frame: DataFrame, train: DataFrame) -> dict[str, Any]:
    """Numbers with medians instead of missing values, and indicators of missing values."""
    gaps = [name for name in train if train[name].dtype != "category" and train[name].isna().any()]
    filled = {name: frame[name].fillna(train[name].median()) for name in frame if train[name].dtype != "category"}
    return filled | {f"{name} missing": frame[name].isna().astype(np.float64) for name in gaps}


NGBOOST_SETTINGS = [{"learning_rate": rate, "minibatch_frac": share} for rate in (0.03, 0.1) for share in (0.5, 1.0)]
FOREST_SETTINGS = [{"min_samples_leaf": rows, "max_features": share} for rows in (1, 3, 8) for share in (0.33, 1.0)]
METHODS: dict[str, tuple[Method, str]] = {
    "bayesify": (bayesify, "sklearn"),
    "bayesify-ensemble": (lambda rows: bayesify(rows, method="ensemble"), "sklearn"),
    "constant": (constant, "numpy"),
    "linear": (searched(lambda rows, _: linear(rows)), "sklearn"),
    "boosted trees": (hist_gradient_boosting, "sklearn"),
    "LightGBM": (lightgbm, "lightgbm"),
    "CatBoost": (catboost, "catboost"),
    "NGBoost": (searched(ngboost, NGBOOST_SETTINGS), "ngboost"),
    "forest": (searched(forest, FOREST_SETTINGS), "quantile_forest"),
    "RealMLP": (lambda rows: pytabkit(rows, "RealMLP_TD"), "pytabkit"),
    "TabM": (lambda rows: pytabkit(rows, "TabM_D"), "pytabkit"),
}
"""Every method, and the package that it needs in addition to bayesify."""


def installed() -> list[str]:
    """Names of the methods that can run here."""
    return [name for name, (_, package) in METHODS.items() if find_spec(package) is not None]
