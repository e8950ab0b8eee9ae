"""Explanations of a trained model on test rows: example predictions, and the importance of each column."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from bayesify.compare.leakage import strongest
from bayesify.predictive import ClassificationPredictive, Predictive, RegressionPredictive
from bayesify.sklearn.scores import Scores
from bayesify.tables import Features, Preparation

NUM_EXAMPLES = 6
"""Number of test rows that are shown."""
MAX_JUDGED_ROWS = 200
"""Maximum number of test rows from which the importance of columns is computed."""
MAX_JUDGED_COLUMNS = 30
"""Maximum number of columns whose importance is computed; in a wider table, the columns most correlated with the target."""


def examples(prediction: Predictive, rows: np.ndarray, values: np.ndarray) -> list[dict[str, Any]]:
    """Some test rows with their predictions, ordered by the predicted mean or from certain to uncertain classes.

    `rows` are the indices of the test rows in the table, [N], and `values` are their targets, [N]. Each example has `row` and
    `truth`, and `mean`, `lower` and `upper` (ends of the 90 % interval) or `guess` and `probability`.
    """
    if isinstance(prediction, RegressionPredictive):
        mean = prediction.mean.reshape(-1).numpy()
        lower, upper = (end.reshape(-1).numpy() for end in prediction.interval(0.9))
        columns = {"mean": mean, "lower": lower, "upper": upper}
        order = np.argsort(mean, kind="stable")
    else:
        assert isinstance(prediction, ClassificationPredictive)
        probs = prediction.class_probs.numpy()
        columns = {"guess": probs.argmax(1), "probability": probs.max(1)}
        order = np.argsort(-probs.max(1), kind="stable")
    count = min(NUM_EXAMPLES, len(order))
    chosen = order[[round((place + 0.5) * len(order) / count - 0.5) for place in range(count)]]
    columns |= {"row": rows, "truth": values}
    return [{key: column[one].item() for key, column in columns.items()} for one in chosen]


def columns_of(features: Features) -> dict[str, tuple[list[int], list[int]]]:
    """For each column of the table, the indices of its numeric features (a date has several) and of its category codes."""
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
) -> dict[str, dict[str, float]]:
    """For each column, the change of the scores when the column is shuffled (Breiman 2001); the largest `loss` comes first.

    In a regression, `loss` is the relative increase of the CRPS, `error` is the relative increase of the root mean squared
    error, and `coverage` is the increase of the share of targets in 90 % intervals. In a classification, `loss` is the increase
    of the log-loss, `error` is the increase of the share of wrong rows, and `coverage` is the increase of the share of labels
    in 90 % sets. A column that affects only the noise changes `loss` and `coverage`, but not `error`.
    """
    generator = np.random.default_rng(seed)
    if len(rows) > MAX_JUDGED_ROWS:
        rows = np.sort(generator.choice(rows, MAX_JUDGED_ROWS, replace=False))
    before = predict(preparation(features, rows))
    start, every, found = _judge(before, values[rows]), columns_of(features), {}
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
        after = _judge(predict(preparation(mixed, np.arange(len(rows)))), values[rows])
        found[name] = {key: after[key] - start[key] for key in start}
        for key in ("loss", "error") if isinstance(before, RegressionPredictive) else ():
            found[name][key] = found[name][key] / start[key] if start[key] > 0 else 0.0
    return dict(sorted(found.items(), key=lambda entry: (-entry[1]["loss"], entry[0])))


def _judge(prediction: Predictive, values: np.ndarray) -> dict[str, float]:
    with torch.no_grad():
        if isinstance(prediction, RegressionPredictive):
            found = Scores.of_numbers(prediction, values, (0.9,)).means()
            return {"loss": found["crps"], "error": found["rmse"], "coverage": found["coverage_90"]}
        assert isinstance(prediction, ClassificationPredictive)
        probs = prediction.class_probs.double().numpy()
        found = Scores.of_classes(probs, list(map(str, range(probs.shape[1]))), values, (0.9,)).means()
        return {"loss": found["log_loss"], "error": 1 - found["accuracy"], "coverage": found["sets_90"]}
