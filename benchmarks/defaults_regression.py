"""Tables under the estimator's defaults, beside what their starts were before the suite of defaults chose them.

    python -m benchmarks.defaults_regression [--workers 4] [--splits 5] [--methods ...] [--sets ...]

UCI sets come from the folder that BAYESIFY_DATA names. Each method, set and split is a file in `--folder`, so that a run that was
interrupted goes on. Each row of the results is a mean over splits: negative log-likelihood in the targets' unit, RMSE, and the
share of targets in the interval of 90 %.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import statistics
from pathlib import Path
from typing import Any

import torch

from bayesify import metrics
from bayesify.datasets import uci
from bayesify.sklearn import BayesianRegressor

from .timing import record

SETS = ("yacht", "energy", "concrete", "kin8nm")
SMALL = {"init_std": 0.02}
BEFORE: dict[str, dict[str, Any]] = {
    "mean_field": SMALL,
    "laplace": {},
    "ensemble": {},
    "inducing": {"rows": 8, "cols": 8, "fit_to_layer": False, "init_std": 1e-3, "init_lambda": 1e-4, "init": "random"},
    "k_tied": SMALL,
    "rank_one": {"init_std": 0.01},
    "function_space": SMALL,
    "matrix_normal": SMALL,
    "walsh_hadamard": {**SMALL, "init": "network"},
}
"""The options that the registry gave a method for small problems before; empty where nothing changed but the learning rate."""

Job = tuple[str, str, int, bool, Path]


def measure(job: Job) -> dict[str, float]:
    """One method on one split, with defaults or with `BEFORE`."""
    method, name, index, before, folder = job
    path = folder / f"{name}-{method}-{index}{'-before' if before else ''}.json"
    if path.exists():
        return json.loads(path.read_text())
    table = uci.load(name)
    split = table.splits[index]
    options = BEFORE[method] if before else None
    model = BayesianRegressor(method, random_state=index, method_options=options)
    model.fit(table.X[split.train], table.y[split.train].ravel())
    predictive = model.predictive(table.X[split.test])
    found = metrics.evaluate(predictive, torch.from_numpy(table.y[split.test].reshape(-1, 1)))
    row = {key: found[key] for key in ("nll", "rmse", "coverage_90")}
    path.with_suffix(".partial").write_text(json.dumps(row))
    path.with_suffix(".partial").replace(path)
    print(path.stem, json.dumps(row), flush=True)
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--methods", nargs="+", default=list(BEFORE), choices=list(BEFORE))
    parser.add_argument("--sets", nargs="+", default=list(SETS), choices=list(SETS))
    parser.add_argument("--splits", type=int, default=5)
    parser.add_argument("--workers", type=int, default=1, help="processes")
    parser.add_argument(
        "--folder", type=Path, default=Path("build/defaults_regression"), help="of one file for each result"
    )
    given = parser.parse_args()
    given.folder.mkdir(parents=True, exist_ok=True)
    jobs: list[Job] = [
        (method, name, index, before, given.folder)
        for name in given.sets
        for method in given.methods
        for index in range(given.splits)
        for before in ((False, True) if BEFORE[method] else (False,))
    ]
    with multiprocessing.get_context("spawn").Pool(given.workers, torch.set_num_threads, (1,)) as pool:
        found = dict(zip(jobs, pool.imap(measure, jobs), strict=True))
    figures: dict[str, Any] = {}
    for method, name, before in dict.fromkeys((*job[:2], job[3]) for job in jobs):
        splits = [row for job, row in found.items() if (job[0], job[1], job[3]) == (method, name, before)]
        means = {key: round(statistics.mean(row[key] for row in splits), 4) for key in splits[0]}
        figures[f"{name}, {method}{', before' if before else ''}"] = means
    record("defaults_regression", figures)


if __name__ == "__main__":
    main()
