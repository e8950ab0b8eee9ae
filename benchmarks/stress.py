"""Two hundred simulated tables that try to make predictions explode: atoms, heavy tails, constant columns, tiny counts.

    python -m benchmarks.stress                      # all of them, with the short training of effort="quick"; stored
    python -m benchmarks.stress --tables 50          # the first ones, stored in their place
    python -m benchmarks.stress --effort full --tables 40
    python -m benchmarks.stress --workers 8 --runs build/stress.jsonl      # a line per table; finished ones stay

Each table has 60 to 160 training rows and 100 new rows; a tenth of the new rows have inputs five times as large. A prediction has
exploded if its mean lies outside the training targets by more than half of their range (for targets of at least 0: above 1.5 times
the largest), and its row is not `unusual`. The score is compared with the score of one distribution for all rows.
"""

import argparse
import json
import time
import warnings
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import pandas
import torch

from bayesify.sklearn import BayesianRegressor
from benchmarks.timing import record, rounded

KINDS = (
    "zeros",
    "rare_amounts",
    "log_normal",
    "pareto",
    "tiny_counts",
    "wild_counts",
    "one_value",
    "clipped",
    "cauchy",
    "far_away",
)
NUM_NEW, SHIFTED_SHARE, SHIFT = 100, 0.1, 5.0
MAX_RATIO = 1.5
LEVELS = np.arange(1, 20) / 20


def targets(kind: str, signal: np.ndarray, draw: np.random.Generator) -> np.ndarray:
    """Targets of a kind for rows with this `signal`, which has about mean 0 and variance 1."""
    rows, noise = len(signal), draw.normal(size=len(signal))
    if kind in ("zeros", "rare_amounts"):
        share = draw.uniform(0.1, 0.8) if kind == "zeros" else draw.uniform(0.85, 0.97)
        amount = np.exp(draw.uniform(-3, 8) + 0.5 * signal + draw.uniform(0.2, 1.5) * noise)
        return np.where(draw.random(rows) < 1 / (1 + (1 / share - 1) * np.exp(signal)), 0.0, amount.round(2))
    if kind == "log_normal":
        return np.exp(draw.uniform(0.3, 1.5) * signal + draw.uniform(0.5, 2.0) * noise)
    if kind == "pareto":
        return np.exp(0.5 * signal) * (1 + draw.pareto(draw.uniform(1.1, 3.0), rows))
    if kind == "tiny_counts":
        return draw.poisson(draw.uniform(0.05, 0.8) * np.exp(0.5 * signal)).astype(float)
    if kind == "wild_counts":
        return draw.poisson(np.exp(1 + 0.7 * signal + draw.uniform(0.5, 2.0) * noise)).astype(float)
    if kind == "one_value":
        return np.where(draw.random(rows) < draw.uniform(0.7, 0.97), 7.0, 7.0 + 3 * signal + noise)
    if kind == "clipped":
        return np.clip(signal + 0.5 * noise, -0.5, 0.5)
    if kind == "cauchy":
        return signal + 0.3 * draw.standard_t(draw.uniform(1.0, 2.0), rows)
    return 1e6 + signal + 0.5 * noise


def simulate(seed: int) -> tuple[str, pandas.DataFrame, np.ndarray, pandas.DataFrame, np.ndarray]:
    """One table: its kind, training rows with targets, and new rows with targets."""
    draw, kind = np.random.default_rng(seed), KINDS[seed % len(KINDS)]
    num_train = int(draw.integers(60, 161))
    rows = num_train + NUM_NEW
    count = int(draw.integers(1, 5))
    numbers = draw.normal(size=(rows, count)) if draw.random() < 0.6 else draw.lognormal(0, 1.5, size=(rows, count))
    signal = np.tanh(numbers) @ draw.normal(size=count)
    frame = pandas.DataFrame(numbers, columns=[f"x{index}" for index in range(count)])
    if draw.random() < 0.5:
        levels = int(draw.choice([3, 15, 40]))
        code = draw.integers(0, levels, rows)
        frame["group"] = [f"g{index}" for index in code]
        signal = signal + draw.normal(size=levels)[code]
    if draw.random() < 0.5:
        frame["same"] = 3.0
        frame["nearly"] = np.where(draw.random(rows) < 0.02, 1e3, 1.0)
    if draw.random() < 0.3:
        frame.loc[draw.random(rows) < 0.1, "x0"] = np.nan
    y = targets(kind, signal / max(signal.std(), 1e-9), draw)
    if (y[:num_train] == y[0]).all():
        y[0] += 1
    shifted = num_train + np.flatnonzero(draw.random(NUM_NEW) < SHIFTED_SHARE)
    frame.loc[shifted, "x0"] *= SHIFT
    return kind, frame[:num_train], y[:num_train], frame[num_train:].reset_index(drop=True), y[num_train:]


def score(model: BayesianRegressor, frame: pandas.DataFrame, y: np.ndarray, train: np.ndarray) -> dict[str, Any]:
    """Distance of means and upper ends from the range of training targets, and scores of new rows."""
    mean, quantiles = model.predict(frame), model.predict_quantiles(frame, LEVELS.tolist())
    low, high = train.min(), train.max()
    room = (MAX_RATIO - 1) * (high if low >= 0 else high - low)
    beyond = np.maximum(mean - high, low - mean) / max(room, 1e-300)
    usual = ~model.unusual(frame)
    constant = np.quantile(train, LEVELS)[:, None]
    crps, guess = (
        2 * np.maximum(LEVELS[:, None] * (y - q), (LEVELS[:, None] - 1) * (y - q)).mean() for q in (quantiles, constant)
    )
    lower, upper = model.predict_interval(frame)
    return {
        "likelihood": model.choices_["likelihood"],
        "transform": model.choices_["transform"],
        "exploded": int((~np.isfinite(mean) | (beyond > 1))[usual].sum()),
        "exploded_unusual": int((~np.isfinite(mean) | (beyond > 1))[~usual].sum()),
        "furthest": float(beyond[usual].max()),
        "crps_over_constant": float(crps / guess),
        "inside_90": float(((lower <= y) & (y <= upper)).mean()),
        "upper_ranges": float((upper.max() - high) / (high - low)),
        "warned": len(model.choices_["left_out"]) and model.choices_["left_out"][-1].startswith("These likelihoods"),
    }


def run(seed: int, effort: str) -> dict[str, Any]:
    """The scores of one table."""
    kind, frame, y, new, new_y = simulate(seed)
    start = time.process_time()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = BayesianRegressor(effort=effort, random_state=0).fit(frame, y)  # type: ignore[arg-type]
        found = score(model, new, new_y, y)
    return {"seed": seed, "kind": kind, "rows": len(y), "seconds": time.process_time() - start, **found}


def main() -> None:
    """Run the tables, print a line for each kind, and store all of them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tables", type=int, default=200)
    parser.add_argument("--effort", default="quick", choices=("full", "quick"))
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--runs", type=Path, help="file of finished tables, which are not run again")
    arguments = parser.parse_args()
    kept = arguments.runs.read_text().splitlines() if arguments.runs and arguments.runs.exists() else []
    found = [json.loads(line) for line in kept]
    wanted = sorted(set(range(arguments.tables)) - {one["seed"] for one in found})
    with ProcessPoolExecutor(arguments.workers, get_context("spawn"), torch.set_num_threads, (1,)) as pool:
        for one in pool.map(run, wanted, [arguments.effort] * len(wanted)):
            found.append(one)
            print(rounded(one, 3), flush=True)
            if arguments.runs:
                with arguments.runs.open("a") as file:
                    file.write(json.dumps(one) + "\n")
    for kind in KINDS:
        part = [one for one in found if one["kind"] == kind]
        ratio = float(np.exp(np.mean([np.log(one["crps_over_constant"]) for one in part]))) if part else float("nan")
        print(
            f"{kind:12} {len(part)} tables, {sum(one['exploded'] for one in part)} rows exploded, CRPS {ratio:.2f} of one guess"
        )
    if arguments.effort == "quick":
        tables = {str(one.pop("seed")): one for one in sorted(found, key=lambda one: one["seed"])}
        record("stress", tables, digits=4)


if __name__ == "__main__":
    main()
