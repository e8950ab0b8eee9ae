"""Tables under the estimator's defaults, by method.

    python -m benchmarks.defaults_regression [--workers 4] [--splits 5] [--limit 300] [--methods ...] [--sets ...]

UCI sets come from the folder that BAYESIFY_DATA names. Each method, set and split is a file in `--folder`, so that a run that was
interrupted goes on; after `--limit` seconds none is begun. Each row of the results is a mean over splits: negative log-likelihood
in the targets' unit, RMSE, the shares of targets in the intervals of 50 and 90 %, seconds on one core. What estimators gave before
is stored as `defaults_regression_before.json`.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import statistics
import time
import warnings
from pathlib import Path
from typing import Any

import torch

from bayesify import metrics
from bayesify.datasets import uci
from bayesify.sklearn import BayesianRegressor

from .timing import record

SETS = ("yacht", "energy", "concrete", "kin8nm")
METHODS = ("laplace", "ensemble", "mean_field", "inducing", "rank_one", "walsh_hadamard", "function_space", "auto", "k_tied",
           "matrix_normal", "dropout", "swag")  # fmt: skip
KEYS = ("nll", "rmse", "coverage_50", "coverage_90")

Job = tuple[str, str, int, Path, float]
"""Method, set, split, folder, and the time after which it is not begun."""


def measure(job: Job) -> dict[str, float] | None:
    """One method on one split."""
    method, name, index, folder, end = job
    path = folder / f"{name}-{method}-{index}.json"
    if path.exists():
        return json.loads(path.read_text())
    if time.time() > end:
        return None
    table = uci.load(name)
    split = table.splits[index]
    start = time.process_time()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = BayesianRegressor(method, random_state=index)
        model.fit(table.X[split.train], table.y[split.train].ravel())
    predictive = model.predictive(table.X[split.test])
    found = metrics.evaluate(predictive, torch.from_numpy(table.y[split.test].reshape(-1, 1)))
    row = {**{key: found[key] for key in KEYS}, "seconds": time.process_time() - start}
    path.with_suffix(".partial").write_text(json.dumps(row))
    path.with_suffix(".partial").replace(path)
    print(path.stem, json.dumps(row), flush=True)
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--methods", nargs="+", default=list(METHODS))
    parser.add_argument("--sets", nargs="+", default=list(SETS), choices=list(SETS))
    parser.add_argument("--splits", type=int, default=5)
    parser.add_argument("--workers", type=int, default=1, help="processes")
    parser.add_argument("--limit", type=float, default=float("inf"), help="seconds")
    parser.add_argument(
        "--folder", type=Path, default=Path("build/defaults_regression"), help="of one file for each result"
    )
    given = parser.parse_args()
    given.folder.mkdir(parents=True, exist_ok=True)
    end = time.time() + given.limit
    jobs: list[Job] = [
        (method, name, index, given.folder, end)
        for index in range(given.splits)
        for name in given.sets
        for method in given.methods
    ]
    with multiprocessing.get_context("spawn").Pool(given.workers, torch.set_num_threads, (1,)) as pool:
        rows = dict(zip(jobs, pool.imap(measure, jobs), strict=True))
    figures: dict[str, Any] = {}
    for name in given.sets:
        for method in given.methods:
            splits = [row for job, row in rows.items() if job[:2] == (method, name) and row is not None]
            if splits:
                means = {key: round(statistics.mean(row[key] for row in splits), 4) for key in splits[0]}
                figures[f"{name}, {method}"] = {**means, "splits": len(splits)}
    record("defaults_regression", figures)


if __name__ == "__main__":
    main()
