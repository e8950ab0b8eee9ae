"""A suite of tables: bayesify's estimators compared with their rivals, on the same rows of real tables.

    python -m benchmarks.tables export FOLDER                       # the tables, from the packages that contain them
    python -m benchmarks.tables run FOLDER --workers 16             # one JSON per table, method and fold; finished ones stay
    python -m benchmarks.tables run FOLDER --new                    # the tables on which no setting was chosen
    python -m benchmarks.tables collect                             # into benchmarks/results/tables, one file per method
    taskset -c 0,1 python -m benchmarks.tables times FOLDER         # seconds of the default fit on two otherwise idle cores
    python -m tools.tables_page                                     # docs/tables.md

`table_sources` has the tables with their training and test rows; `table_rivals` has the methods. Every run has one thread, and its
seconds are processor time.
"""

import argparse
import json
import os
import platform
import sys
import time
import traceback
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.table_rivals import LEVELS, METHODS, Answer, Classification, Regression, Rows, installed, pinball
from benchmarks.table_sources import EVERY_SOURCE, NEW_SOURCES, SOURCES, export, exported
from benchmarks.timing import rounded

RUNS, OURS = Path("build/tables"), "bayesify"
RESULTS = Path(__file__).parent / "results" / "tables"
INTERVALS = {"50": (0.25, 0.75), "90": (0.05, 0.95), "95": (0.025, 0.975)}
TIMED_TABLES = ("yacht", "cars", "boston", "housing", "breast_cancer", "energy", "concrete")
TIMED_TABLES += ("naval", "letter", "power", "protein")
NUM_BINS, NUM_TENTHS = 15, 10
MIN_PROBABILITY = 1e-7
"""Smallest class probability. Smaller probabilities are clipped to it, for all methods."""


def rows_of(folder: Path, name: str, fold: int) -> Rows:
    """The rows of one fold, unchanged and as numbers."""
    from bayesify.tables.columns import read_features
    from bayesify.tables.preparation import Preparation

    source, frame, folds = exported(folder, name)
    inputs, (train, test) = frame.drop(columns=[source.target]), folds[fold]
    features = read_features(inputs)
    prepare = Preparation.of(features, train)
    if source.task == "classification":
        y = np.unique(frame[source.target].to_numpy().astype(str), return_inverse=True)[1]
    else:
        y = frame[source.target].to_numpy(np.float64)
    return Rows(
        inputs.iloc[train].reset_index(drop=True),
        inputs.iloc[test].reset_index(drop=True),
        prepare(features, train),
        prepare(features, test),
        y[train],
        y[test],
        source.task,
        fold,
        bool(source.order),
    )


# -- scores ------------------------------------------------------------------------------------------------------------


def scores(found: Answer, rows: Rows) -> dict[str, Any]:
    """Sums over the test rows, which can be added over folds. `num` is the number of rows; `losses` has the score of each row."""
    made = (
        _class_scores(found.probs, rows.y_test)
        if isinstance(found, Classification)
        else _number_scores(found, rows.y_test, group_of(rows))
    )
    return made | {"validation": found.validation, "held": int(rows.validation.sum())}


def group_of(rows: Rows) -> np.ndarray | None:
    """The text of each test row in the text column with the most levels, if there is a text column."""
    texts = rows.frame.select_dtypes(exclude=["number", "bool", "datetime"])
    if texts.shape[1] == 0:
        return None
    return rows.frame_test[texts.nunique().idxmax()].astype(object).fillna("").astype(str).to_numpy()


def _number_scores(found: Regression, y: np.ndarray, groups: np.ndarray | None) -> dict[str, Any]:
    quantiles = found.quantiles
    if not (np.isfinite(quantiles).all() and np.isfinite(found.mean).all()):
        raise ValueError("a prediction is not finite")
    losses = (2 * pinball(y, quantiles[1:-1], LEVELS[1:-1, None])).mean(0)
    made: dict[str, Any] = {
        "num": len(y),
        "losses": _short(losses),
        "crps": float(losses.sum()),
        "square": float(np.square(y - found.mean).sum()),
        "nll": None,
    }
    if found.log_prob is not None and np.isfinite(found.log_prob).all():
        made["nll"] = float(-found.log_prob.sum())
    position = {round(level, 4): index for index, level in enumerate(LEVELS.tolist())}
    for name, (low, high) in INTERVALS.items():
        lower, upper = quantiles[position[low]], quantiles[position[high]]
        inside = (lower <= y) & (y <= upper)
        made[f"inside_{name}"], made[f"width_{name}"] = int(inside.sum()), float((upper - lower).sum())
        drawn = inside if found.place is None else (low <= found.place) & (found.place <= high)
        if found.place is not None:
            made[f"drawn_{name}"] = int(drawn.sum())
        if name == "90":
            tenths = np.array_split(np.argsort(found.mean, kind="stable"), NUM_TENTHS)
            made["tenths_90"] = [[len(part), int(drawn[part].sum())] for part in tenths]
            own = {} if groups is None else {str(name): groups == name for name in np.unique(groups)}
            made["groups_90"] = {key: [int(part.sum()), int(drawn[part].sum())] for key, part in own.items()}
            thirds = np.array_split(np.argsort(quantiles[position[0.5]], kind="stable"), 3)
            made["thirds_num"] = [len(part) for part in thirds]
            made["thirds_inside_90"] = [int(inside[part].sum()) for part in thirds]
    return made


def _short(losses: np.ndarray) -> list[float]:
    return [float(f"{value:.7g}") for value in losses]


def _class_scores(probs: np.ndarray, y: np.ndarray) -> dict[str, Any]:
    if not np.isfinite(probs).all():
        raise ValueError("a probability is not finite")
    confidence, correct = probs.max(1), probs.argmax(1) == y
    losses = -np.log(np.clip(probs[np.arange(len(y)), y], MIN_PROBABILITY, 1))
    bins = np.minimum((confidence * NUM_BINS).astype(int), NUM_BINS - 1)
    return {
        "num": len(y),
        "losses": _short(losses),
        "log_loss": float(losses.sum()),
        "correct": int(correct.sum()),
        "brier": float(np.square(probs - np.eye(probs.shape[1])[y]).sum()),
        "bin_confidence": np.bincount(bins, confidence, NUM_BINS).round(6).tolist(),
        "bin_correct": np.bincount(bins, correct, NUM_BINS).tolist(),
    }


# -- runs --------------------------------------------------------------------------------------------------------------


def run_one(folder: Path, out: Path, table: str, method: str, fold: int) -> str:
    """Do one run and write its file. Return the printed text if it fails, otherwise an empty text."""
    import warnings

    import torch

    from bayesify.storage import write_file

    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    path = _path(out, table, method, fold)
    try:
        rows = rows_of(folder, table, fold)
        start, cpu = time.perf_counter(), time.process_time()
        found = METHODS[method][0](rows)
        seconds, wall = time.process_time() - cpu, time.perf_counter() - start
        entry = {
            "table": table,
            "method": method,
            "fold": fold,
            "train": len(rows.y),
            "seconds": round(seconds, 3),
            "wall": round(wall, 3),
            "machine": platform.machine(),
            **rounded(scores(found, rows), 6),
        }
    except Exception:
        return traceback.format_exc(limit=-3)
    write_file(path, json.dumps(entry) + "\n")
    return ""


def _path(out: Path, table: str, method: str, fold: int) -> Path:
    return out / method.replace(" ", "_") / f"{table}-{fold}.json"


def run(given: argparse.Namespace) -> int:
    """Do all requested runs that are not finished: the first folds of all tables first, and the longest of them first."""
    wanted = []
    for source in NEW_SOURCES if given.new else SOURCES:
        if given.tables and source.name not in given.tables:
            continue
        _, _, folds = exported(given.folder, source.name)
        for fold in range(min(len(folds), given.folds or len(folds))):
            for method in given.methods or installed():
                if not _path(given.out, source.name, method, fold).exists():
                    wanted.append((len(folds[fold][0]), source.name, method, fold))
    wanted.sort(key=lambda one: (one[3], -one[0]))
    print(f"{len(wanted)} runs", flush=True)
    os.environ |= dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")  # of the workers
    start, failed = time.perf_counter(), 0
    with ProcessPoolExecutor(given.workers, mp_context=get_context("spawn")) as pool:
        waiting = {
            pool.submit(run_one, given.folder, given.out, table, method, fold): f"{table} {method} {fold}"
            for _, table, method, fold in wanted
        }
        for count, done in enumerate(as_completed(waiting), 1):
            if trouble := done.result():
                failed += 1
                print(f"{waiting[done]}: {trouble}", flush=True)
            if count % 50 == 0 or count == len(wanted):
                print(f"{count} of {len(wanted)}, {time.perf_counter() - start:.0f} s", flush=True)
    return 1 if failed else 0


def times(given: argparse.Namespace) -> int:
    """Seconds of the default fit on the first fold of each table, one after the other. The file is written after each."""
    import warnings

    from benchmarks.table_rivals import default

    warnings.simplefilter("ignore")
    found: list[dict[str, Any]] = []
    for name in given.tables or TIMED_TABLES:
        rows = rows_of(given.folder, name, 0)
        if not found:  # warm up, because the first fit of a process also loads packages
            default(rows, epochs=20)
        start, cpu = time.perf_counter(), time.process_time()
        model = default(rows)
        wall, seconds = time.perf_counter() - start, time.process_time() - cpu
        entry = {"table": name, "train": len(rows.y), "wall": round(wall, 2), "seconds": round(seconds, 2)}
        entry["steps"] = max(model.choices_["steps"])
        found.append(entry)
        print(entry, flush=True)
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
        about = {"machine": platform.machine(), "cores": cores, "fits": found}
        given.out.parent.mkdir(parents=True, exist_ok=True)
        given.out.write_text(json.dumps(about, indent=1) + "\n")
    return 0


def collect(given: argparse.Namespace) -> int:
    """Write all finished runs to one file per method, together with earlier runs that were not repeated.

    Scores of single rows are dropped. Sums of their squares and of their products with our scores are kept.
    """
    RESULTS.mkdir(parents=True, exist_ok=True)
    for folder in sorted(path for path in given.out.iterdir() if path.is_dir()):
        path = RESULTS / f"{folder.name}.json"
        known = json.loads(path.read_text()) if path.exists() else []
        finished = [
            _paired(json.loads(file.read_text()), given.out / OURS / file.name) for file in folder.glob("*.json")
        ]
        merged = {(run["table"], run["fold"]): run for run in (*known, *finished)}
        lines = ",\n".join(json.dumps(merged[key]).replace("-Infinity", "null") for key in sorted(merged))
        path.write_text(f"[\n{lines}\n]\n")
        print(f"{path.name}: {len(merged)} runs")
    return 0


def _paired(run: dict[str, Any], ours: Path) -> dict[str, Any]:
    """A run without its rows' scores b, but with the sums of b^2 and, for our scores a, of a, a^2 and a b."""
    losses = np.array(run.pop("losses"))
    run["squares"] = float(np.square(losses).sum())
    if ours.exists():
        other = np.array(json.loads(ours.read_text())["losses"])
        run["ours"] = [float(other.sum()), float(np.square(other).sum()), float((other * losses).sum())]
    return dict(rounded(run, 8))


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    commands = parser.add_subparsers(required=True)
    exporting = commands.add_parser("export", help="write the tables to a folder")
    exporting.add_argument("folder", type=Path)
    exporting.set_defaults(do=lambda given: print(f"{len(export(given.folder))} files") or 0)
    running = commands.add_parser("run", help="run methods on the tables of a folder")
    running.add_argument("folder", type=Path)
    running.add_argument("--methods", nargs="+", choices=list(METHODS), help="default: all installed methods")
    running.add_argument("--new", action="store_true", help="use the tables on which no setting was chosen")
    running.add_argument("--tables", nargs="+", choices=[source.name for source in EVERY_SOURCE])
    running.add_argument(
        "--folds", type=int, default=0, help="number of folds of each table, from the first; 0 for all"
    )
    running.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    running.add_argument("--out", type=Path, default=RUNS)
    running.set_defaults(do=run)
    timing = commands.add_parser("times", help="seconds of the default fit")
    timing.add_argument("folder", type=Path)
    timing.add_argument("--tables", nargs="+", choices=[source.name for source in SOURCES])
    timing.add_argument("--out", type=Path, default=RESULTS.parent / "tables_times.json")
    timing.set_defaults(do=times)
    collecting = commands.add_parser("collect", help="gather finished runs for the repository")
    collecting.add_argument("--out", type=Path, default=RUNS)
    collecting.set_defaults(do=collect)
    given = parser.parse_args()
    return int(given.do(given))


if __name__ == "__main__":
    sys.exit(main())
