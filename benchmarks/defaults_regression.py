"""Scores of the estimator's defaults on tables, by method.

    python -m benchmarks.defaults_regression [--workers 4] [--splits 5] [--limit 300] [--methods ...] [--sets ...]

UCI sets come from the folder in BAYESIFY_DATA. Each method, set and split is a file in `--folder`, so that an interrupted run can
resume. After `--limit` seconds no new cell starts. Each row of the results is a mean over splits: negative log-likelihood in the
targets' unit, RMSE, the shares of targets in the intervals of 50 and 90 %, and seconds on one core. Scores of an earlier version
are in `defaults_regression_before.json`.

With `--sets noise_200 noise_400 noise_1000`, the tables are made: a linear function of ten normal inputs, with noise of the same
variance. The name says how many rows are for training, and 2,000 are for testing. The results are in
`defaults_regression_noise.json`.
"""

import statistics
import time
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bayesify import metrics
from bayesify.datasets import uci
from bayesify.sklearn import BayesianRegressor

from .runs import Row, cell, many, parser
from .timing import record

SETS = ("yacht", "energy", "concrete", "kin8nm")
MADE = ("noise_200", "noise_400", "noise_1000")
NUM_TEST_ROWS, NUM_INPUTS = 2000, 10
METHODS = ("laplace", "ensemble", "mean_field", "inducing", "rank_one", "walsh_hadamard", "function_space", "auto", "k_tied",
           "matrix_normal", "dropout", "swag")  # fmt: skip
KEYS = ("nll", "rmse", "coverage_50", "coverage_90")


def load(name: str, index: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Inputs and targets of the training rows, and of the test rows."""
    if name not in MADE:
        table = uci.load(name)
        split = table.splits[index]
        return table.X[split.train], table.y[split.train].ravel(), table.X[split.test], table.y[split.test].ravel()
    rows, generator = int(name.removeprefix("noise_")), np.random.default_rng(index)
    x = generator.normal(size=(rows + NUM_TEST_ROWS, NUM_INPUTS))
    signal = x @ generator.normal(size=NUM_INPUTS)
    y = signal + signal.std() * generator.normal(size=len(x))
    return x[:rows], y[:rows], x[rows:], y[rows:]


def measure(method: str, name: str, index: int) -> Row:
    """One method on one split."""
    x, y, test_x, test_y = load(name, index)
    start = time.process_time()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = BayesianRegressor(method, random_state=index)
        model.fit(x, y)
    found = metrics.evaluate(model.predictive(test_x), torch.from_numpy(test_y.reshape(-1, 1)))
    return {**{key: found[key] for key in KEYS}, "seconds": time.process_time() - start}


def stored(method: str, name: str, index: int, folder: Path, end: float) -> Row | None:
    """Result of `measure`, from its file if there is one."""
    return cell(folder / f"{name}-{method}-{index}.json", lambda: measure(method, name, index), end)


def main() -> None:
    options = parser(__doc__, "workers", "limit", methods=METHODS, splits=5, folder=Path("build/defaults_regression"))
    options.add_argument("--sets", nargs="+", default=list(SETS), choices=[*SETS, *MADE])
    given = options.parse_args()
    place = (given.folder, time.time() + given.limit)
    jobs = [
        (method, name, index, *place)
        for index in range(given.splits)
        for name in given.sets
        for method in given.methods
    ]
    rows = dict(zip(jobs, many(stored, jobs, given.workers), strict=True))
    figures: dict[str, Any] = {}
    for name in given.sets:
        for method in given.methods:
            splits = [row for job, row in rows.items() if job[:2] == (method, name) and row is not None]
            if splits:
                means = {key: statistics.mean(row[key] for row in splits) for key in splits[0]}
                figures[f"{name}, {method}"] = {**means, "splits": len(splits)}
    record("defaults_regression_noise" if set(given.sets) <= set(MADE) else "defaults_regression", figures, digits=4)


if __name__ == "__main__":
    main()
