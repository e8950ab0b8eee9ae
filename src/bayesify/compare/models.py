"""The estimators, trained on the rows of splits in the same way as by `bayesify fit --method NAME`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from bayesify.likelihoods import Categorical
from bayesify.predictive.base import Outputs, Predictive
from bayesify.predictor import Predictor
from bayesify.sklearn import BayesianClassifier, BayesianRegressor
from bayesify.sklearn.settings import EffortName

FAILURES = (ArithmeticError, RuntimeError, ValueError)
"""Errors that a method raises if its training diverges or if it does not suit the data."""
SMOOTHING_ROWS = 1.0
"""Classes that the model does not know get some probability from a uniform distribution, whose weight is this number of rows."""


@dataclass(frozen=True)
class SplitRows:
    """Training rows of one split.

    All methods have the same seed, so that their networks start from the same weights.
    """

    x: np.ndarray  # inputs in their own units, [N, D]
    y: np.ndarray  # targets, [N]: numbers, or indices of classes
    num_classes: int  # 0 for a regression
    seed: int  # seed of everything random


@dataclass(frozen=True)
class SplitModel:
    """The trained model of a run."""

    predict: Callable[[np.ndarray], Predictive]  # predictive distribution of inputs [N, D]
    model: Predictor | None = None  # the predictor that `predict` uses; `None` for a rival


def fit_splits(name: str, rows: Sequence[SplitRows], effort: EffortName) -> list[SplitModel | Exception]:
    """Fit a method's estimator on several splits, which train together if possible. Returns one entry per split: the model, or
    the error if the fit failed."""
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
    """The predictive distribution over all classes, made from the probabilities [N, K] of the `known` classes [K]. All other
    classes get a small probability."""
    every = np.zeros((len(probs), rows.num_classes))
    every[:, known] = probs
    smooth = (len(rows.y) * every + SMOOTHING_ROWS / rows.num_classes) / (len(rows.y) + SMOOTHING_ROWS)
    return Categorical().predictive(Outputs(torch.from_numpy(np.log(smooth))[None]))
