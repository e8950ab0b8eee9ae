"""One run of a method on some splits; its input and its result are plain data."""

import tempfile
import time
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from torch import nn

from bayesify import metrics
from bayesify.arguments.suggestions import reason_of
from bayesify.compare.compared_table import ComparedTable
from bayesify.compare.contestants import RIVALS, obstacle
from bayesify.compare.explanation import examples, importance
from bayesify.compare.models import SplitModel, SplitRows, fit_splits, train_rival
from bayesify.compare.scores import score_classification, score_regression
from bayesify.predictive.regression import RegressionPredictive
from bayesify.predictor import Predictor
from bayesify.storage.save_load import save
from bayesify.tables.preparation import Preparation
from bayesify.training.random_streams import derive_seed
from bayesify.weights.catalog import count_parameters

Job = Mapping[str, Any]
Result = dict[str, Any]
NUM_TIMED_ROWS = 1000
"""Number of rows of the prediction that is timed."""
TIMES = ("train_seconds", "predict_ms")
"""Results that differ from run to run; everything else depends only on the seed."""


def run_method(path: str, job: Job) -> Result:
    """Train and score one method on some splits.

    `path` is a file with `ComparedTable.arrays`, and `job` has `data` (the table's fingerprint), `method`, `splits`, `seed` and
    `quick`. The result has `runs` with one entry per split. An entry has either `error`, or `scores`, `curves`, `times`,
    `parameters`, `bytes` and `rows` (the number of rows in each part). The entry of the first split also has `examples`,
    `importance` and the time of a prediction. If there are out-of-distribution inputs, entries also have `ood`.
    """
    table = ComparedTable.read(Path(path))
    if table.fingerprint != job["data"]:
        raise ValueError(f"{path} holds the data of another comparison; give each comparison its own folder")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return {"runs": _run(table, job)}
    except Exception as error:
        return {"runs": [{"error": reason_of(error)}] * len(job["splits"])}


def seed_of(seed: int, split: int) -> int:
    """Seed of the estimators on one split."""
    return derive_seed(seed, "run", split) % 2**31


def _run(table: ComparedTable, job: Job) -> list[Result]:
    rows = []
    for split in job["splits"]:
        fit = table.parts(split, job["seed"]).fit
        inputs = Preparation.of(table.features, fit)(table.features, fit)
        rows.append(SplitRows(inputs, table.values[fit], len(table.classes), seed_of(job["seed"], split)))
        reason = obstacle(job["method"], inputs.shape[1], len(table.classes) or 1)
        if reason:
            return [{"error": reason}] * len(job["splits"])
    start = time.process_time()
    if job["method"] in RIVALS:
        found: list[SplitModel | Exception] = [train_rival(job["method"], part) for part in rows]
    else:
        found = fit_splits(job["method"], rows, "quick" if job["quick"] else "full")
    seconds = (time.process_time() - start) / len(rows)
    return [
        {"error": reason_of(one)} if isinstance(one, Exception) else _score(table, job, split, one, seconds)
        for split, one in zip(job["splits"], found, strict=True)
    ]


def _score(table: ComparedTable, job: Job, split: int, trained: SplitModel, seconds: float) -> Result:
    parts = table.parts(split, job["seed"])
    preparation = Preparation.of(table.features, parts.fit)
    inputs = preparation(table.features, parts.test)
    test, calibration = (trained.predict(preparation(table.features, part)) for part in (parts.test, parts.calibration))
    values = table.values[parts.test], table.values[parts.calibration]
    score: Any = score_regression if isinstance(test, RegressionPredictive) else score_classification
    scores, curves = score(test, values[0], calibration, values[1])
    result: Result = {
        "scores": scores,
        "curves": curves,
        "times": {"train_seconds": seconds},
        **_costs(trained.model),
        "rows": {name: len(rows) for name, rows in vars(parts).items()},
    }
    if split == 0:
        rows, start = np.resize(np.arange(len(inputs)), NUM_TIMED_ROWS), time.process_time()
        timed = trained.predict(inputs[rows])
        # The predictive may be lazy, so the timing includes the computation of a result.
        getattr(timed, "variance" if isinstance(timed, RegressionPredictive) else "class_probs")
        result["times"]["predict_ms"] = 1000 * (time.process_time() - start)
        result["examples"] = examples(test, parts.test, values[0])
        seed = derive_seed(job["seed"], "shuffling")
        result["importance"] = importance(trained.predict, preparation, table.features, parts.test, table.values, seed)
    if table.outside is not None:
        outside = trained.predict(preparation(table.outside, np.arange(len(table.outside))))
        result["ood"] = metrics.ood(test, outside)
    return result


def _costs(model: Predictor | None) -> dict[str, int | None]:
    """Number of parameters (trainable scalars of a module, stored scalars of other models), and bytes of the model's file."""
    if model is None:
        return {"parameters": None, "bytes": None}
    stored = sum(tensor.numel() for tensor in model.state().values())
    count = count_parameters(model) if isinstance(model, nn.Module) else stored
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.safetensors"
        try:
            save(model, path)
        except (TypeError, ValueError):
            return {"parameters": count, "bytes": None}
        return {"parameters": count, "bytes": path.stat().st_size}
