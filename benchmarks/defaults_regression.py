"""Tables under the estimator's defaults, beside what their starts were before the suite of defaults chose them.

    python -m benchmarks.defaults_regression [--workers 4] [--splits 5] [--methods ...]

UCI sets come from the folder that BAYESIFY_DATA names. Each row of the results is a mean over splits: negative log-likelihood in
the targets' unit, RMSE, and the share of targets in the interval of 90 %.
"""

from __future__ import annotations

import argparse
import multiprocessing
import statistics
from typing import Any

import torch

from bayesify import metrics
from bayesify.datasets import uci
from bayesify.sklearn import BayesianRegressor

from .timing import record

SETS = ("concrete", "energy", "yacht", "kin8nm")
SMALL = {"init_std": 0.02}
BEFORE: dict[str, dict[str, Any]] = {
    "mean_field": SMALL,
    "k_tied": SMALL,
    "matrix_normal": SMALL,
    "rank_one": {"init_std": 0.01},
    "inducing": {"rows": 8, "cols": 8, "fit_to_layer": False, "init_std": 1e-3, "init_lambda": 1e-4, "init": "random"},
    "walsh_hadamard": {**SMALL, "init": "network"},
    "function_space": SMALL,
    "laplace": {},
    "ensemble": {},
}
"""The options that the registry gave a method for small problems before; empty where nothing changed but the learning rate."""

Job = tuple[str, str, int, bool]


def measure(job: Job) -> dict[str, float]:
    """One method on one split, with defaults or with `BEFORE`."""
    method, name, index, before = job
    table = uci.load(name)
    split = table.splits[index]
    options = BEFORE[method] if before else None
    model = BayesianRegressor(method, random_state=index, method_options=options)
    model.fit(table.X[split.train], table.y[split.train].ravel())
    predictive = model.predictive(table.X[split.test])
    found = metrics.evaluate(predictive, torch.from_numpy(table.y[split.test].reshape(-1, 1)))
    return {key: found[key] for key in ("nll", "rmse", "coverage_90")}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--methods", nargs="+", default=list(BEFORE), choices=list(BEFORE))
    parser.add_argument("--sets", nargs="+", default=list(SETS), choices=list(SETS))
    parser.add_argument("--splits", type=int, default=5)
    parser.add_argument("--workers", type=int, default=1, help="processes")
    given = parser.parse_args()
    jobs: list[Job] = [
        (method, name, index, before)
        for name in reversed(given.sets)
        for method in given.methods
        for index in range(given.splits)
        for before in ((False, True) if BEFORE[method] else (False,))
    ]
    with multiprocessing.get_context("spawn").Pool(given.workers, torch.set_num_threads, (1,)) as pool:
        found = dict(zip(jobs, pool.map(measure, jobs, chunksize=1), strict=True))
    figures: dict[str, Any] = {}
    for method, name, _, before in dict.fromkeys((*job[:2], 0, job[3]) for job in jobs):
        splits = [row for job, row in found.items() if (job[0], job[1], job[3]) == (method, name, before)]
        means = {key: round(statistics.mean(row[key] for row in splits), 4) for key in splits[0]}
        figures[f"{name}, {method}{', before' if before else ''}"] = means
    record("defaults_regression", figures)


if __name__ == "__main__":
    main()
