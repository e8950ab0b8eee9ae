"""What a trained model does on test rows, for readers: examples, and how much each column matters."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from bayesify.compare.leakage import strongest
from bayesify.predictive.base import Predictive
from bayesify.predictive.classification import ClassificationPredictive
from bayesify.predictive.regression import RegressionPredictive
from bayesify.tables.columns import Features
from bayesify.tables.preparation import Preparation

NUM_EXAMPLES = 6
"""Test rows that are shown."""
MAX_JUDGED_ROWS = 200
"""Test rows by which columns are judged."""
MAX_JUDGED_COLUMNS = 30
"""Columns that are judged; of more, those that vary together with the target most."""


def examples(prediction: Predictive, rows: np.ndarray, values: np.ndarray) -> list[dict[str, Any]]:
    """Some rows from low to high predictions, or from sure to unsure, with what was predicted.

    Args:
        prediction: Of test rows.
        rows: Their numbers in the table, [N].
        values: Their targets, [N].

    Returns:
        For each `row` and `truth`; of a regression `mean`, `lower` and `upper` (90 %), else `guess` and `probability`.
    """
    if isinstance(prediction, RegressionPredictive):
        mean = prediction.mean.reshape(-1).numpy()
        lower, upper = (end.reshape(-1).numpy() for end in prediction.interval(0.9))
        keys: tuple[str, ...] = ("mean", "lower", "upper")
        columns: tuple[np.ndarray, ...] = (mean, lower, upper)
        order = np.argsort(mean, kind="stable")
    else:
        assert isinstance(prediction, ClassificationPredictive)
        probs = prediction.class_probs.numpy()
        keys, columns = ("guess", "probability"), (probs.argmax(1), probs.max(1))
        order = np.argsort(-probs.max(1), kind="stable")
    count = min(NUM_EXAMPLES, len(order))
    chosen = order[[round((place + 0.5) * len(order) / count - 0.5) for place in range(count)]]
    return [
        {
            "row": int(rows[one]),
            "truth": values[one].item(),
            **{key: column[one].item() for key, column in zip(keys, columns, strict=True)},
        }
        for one in chosen
    ]


def columns_of(features: Features) -> dict[str, tuple[list[int], list[int]]]:
    """The table's columns, each with the positions of its numbers and of its codes; the parts of a date are one column."""
    found: dict[str, tuple[list[int], list[int]]] = {}
    for place, name in enumerate(features.sources):
        found.setdefault(name, ([], []))[0].append(place)
    for place, name in enumerate(features.code_names):
        found.setdefault(name, ([], []))[1].append(place)
    return found


def importance(
    predict: Callable[[np.ndarray], Predictive],
    preparation: Preparation,
    features: Features,
    rows: np.ndarray,
    values: np.ndarray,
    seed: int,
) -> dict[str, float]:
    """By how much the error grows when a column is shuffled over the rows (Breiman 2001): by column, largest first.

    Of a regression the root mean squared error, as a share of the error with the column in order; of a classification the
    share of rows that are wrong, in addition.
    """
    generator = np.random.default_rng(seed)
    if len(rows) > MAX_JUDGED_ROWS:
        rows = np.sort(generator.choice(rows, MAX_JUDGED_ROWS, replace=False))
    before = predict(preparation(features, rows))
    start, classes, found = _error(before, values[rows]), isinstance(before, ClassificationPredictive), {}
    every = columns_of(features)
    columns = {
        name: [*features.numbers[:, numbers].T, *features.codes[:, codes].T.astype(np.float64)]
        for name, (numbers, codes) in every.items()
    }
    for name in strongest(columns, values, MAX_JUDGED_COLUMNS):
        numbers, codes = every[name]
        shuffled = generator.permutation(rows)
        mixed = replace(features, numbers=features.numbers[rows], codes=features.codes[rows])
        mixed.numbers[:, numbers] = features.numbers[shuffled][:, numbers]
        mixed.codes[:, codes] = features.codes[shuffled][:, codes]
        error = _error(predict(preparation(mixed, np.arange(len(rows)))), values[rows])
        found[name] = error - start if classes else error / start - 1 if start > 0 else 0.0
    return dict(sorted(found.items(), key=lambda entry: (-entry[1], entry[0])))


def _error(prediction: Predictive, values: np.ndarray) -> float:
    with torch.no_grad():
        if isinstance(prediction, RegressionPredictive):
            return float(np.sqrt(np.mean(np.square(prediction.mean.reshape(-1).numpy() - values))))
        assert isinstance(prediction, ClassificationPredictive)
        return float((prediction.class_probs.argmax(1).numpy() != values).mean())
