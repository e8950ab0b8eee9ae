"""One run: a method on a split, from plain data to plain data."""

from __future__ import annotations

import math
import tempfile
import time
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from bayesify import metrics
from bayesify.compare.models import HIDDEN, Data, Trained, noise_of, train_model
from bayesify.compare.preparation import Preparation
from bayesify.compare.problems import Problem
from bayesify.compare.scores import score_classification, score_regression
from bayesify.compare.tuning import candidates, obstacle
from bayesify.predictive.base import Predictive
from bayesify.predictive.classification import ClassificationPredictive
from bayesify.predictive.regression import RegressionPredictive
from bayesify.training.random_streams import derive_seed
from bayesify.weights.catalog import count_parameters

Job = Mapping[str, Any]
Result = dict[str, Any]
TIMED_ROWS = 1000
"""Rows of the prediction that is timed."""
DIVERGED = 3.0
"""Nats by which full training may be worse on validation rows than a brief try before another setting is taken."""
TIMES = ("train_seconds", "tune_seconds", "predict_ms")
"""What differs from one run to the next; everything else is the same for the same seed."""


def estimate_noise(path: str, job: Job) -> Result:
    """The noise of a split's regression, which all methods share.

    Args:
        path: A file of `Problem.arrays`; no part of what makes a job.
        job: `data` (their fingerprint), `split`, `seed`, `quick`.

    Returns:
        `noise`, in standardized units.

    Raises:
        ValueError: If the file holds other data.
    """
    problem = _read(path, job)
    with _alone():
        data, _ = _data(problem, job)
        return {"noise": noise_of(data, quick=job["quick"], seed=_seed(job))}


def run_method(path: str, job: Job) -> Result:
    """Tune, train and score one method on one split; what goes wrong with the method becomes `error`.

    Args:
        path: As above.
        job: `data`, `split`, `seed` and `quick` as above, `method`, and `noise` (`None` for a classification).

    Returns:
        `scores`, `curves`, `times`, `parameters`, `bytes`, `choice`, `rows` (of each part), and `ood` where there are other inputs;
        or `error`.

    Raises:
        ValueError: If the file holds other data.
    """
    problem = _read(path, job)
    try:
        with _alone():
            return _run(problem, job)
    except Exception as error:
        return {"error": _reason(error)}


def _read(path: str, job: Job) -> Problem:
    problem = Problem.read(Path(path))
    if problem.fingerprint != job["data"]:
        raise ValueError(f"{path} holds other data than this comparison's; give each comparison a folder of its own")
    return problem


def _run(problem: Problem, job: Job) -> Result:
    data, inputs = _data(problem, job)
    parts = problem.parts(job["split"], job["seed"])
    targets = {name: problem.values[rows] for name, rows in vars(parts).items()}
    reason = obstacle(job["method"], data.x.shape[1], HIDDEN, data.num_outputs)
    if reason:
        return {"error": reason}
    validation = (inputs["validation"], targets["validation"])
    shared = {"noise": job["noise"], "validation": validation, "quick": job["quick"], "seed": _seed(job)}
    start = time.process_time()
    choice, tried = _tune(job, data, shared)
    tuned = time.process_time()
    trained, choice = _train(job, data, choice, tried, shared)
    done = time.process_time()
    test, calibration = trained(inputs["test"]), trained(inputs["calibration"])
    if isinstance(test, RegressionPredictive):
        assert isinstance(calibration, RegressionPredictive)
        scores, curves = score_regression(test, targets["test"], calibration, targets["calibration"])
    else:
        assert isinstance(test, ClassificationPredictive)
        assert isinstance(calibration, ClassificationPredictive)
        scores, curves = score_classification(test, targets["test"], calibration, targets["calibration"])
    result: Result = {
        "scores": scores,
        "curves": curves,
        "times": {
            "train_seconds": done - tuned,
            "tune_seconds": tuned - start,
            "predict_ms": _predict_milliseconds(trained, inputs["test"]),
        },
        "parameters": _count(trained.model),
        "bytes": _size(trained.model),
        "choice": choice,
        "tried": tried,
        "rows": {name: len(rows) for name, rows in vars(parts).items()} | {"trained": len(trained.data.x)},
    }
    if problem.outside is not None:
        preparation = Preparation.of(problem.features, parts.fit)
        outside = trained(preparation(problem.outside, np.arange(len(problem.outside))))
        result["ood"] = metrics.ood(test, outside)
    return result


def _data(problem: Problem, job: Job) -> tuple[Data, dict[str, np.ndarray]]:
    parts = problem.parts(job["split"], job["seed"])
    preparation = Preparation.of(problem.features, parts.fit)
    inputs = {name: preparation(problem.features, rows) for name, rows in vars(parts).items()}
    return Data(inputs["fit"], problem.values[parts.fit], len(problem.classes)), inputs


def _tune(job: Job, data: Data, shared: dict[str, Any]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The choice with the least NLL on validation rows; the first where there is but one, or none works."""
    choices = candidates(job["method"], "classification" if data.num_classes else "regression", job["quick"])
    if len(choices) == 1:
        return choices[0], []
    tried: list[dict[str, Any]] = []
    for choice in choices:
        try:
            found = train_model(job["method"], data, choice, tuning=True, **shared)
            nll = _validation_nll(found, shared, data.num_classes)
        except (ArithmeticError, RuntimeError, ValueError):
            nll = math.inf
        tried.append({"choice": choice, "nll": nll if math.isfinite(nll) else None})
    known = [entry for entry in tried if entry["nll"] is not None]
    best = min(known, key=lambda entry: entry["nll"])["choice"] if known else choices[0]
    return best, tried


def _train(
    job: Job, data: Data, choice: dict[str, Any], tried: list[dict[str, Any]], shared: dict[str, Any]
) -> tuple[Trained, dict[str, Any]]:
    """The chosen setting trained in full; where longer training makes it diverge, the next one."""
    known = sorted((entry for entry in tried if entry["nll"] is not None), key=lambda entry: float(entry["nll"]))
    best: tuple[float, Trained, dict[str, Any]] | None = None
    for entry in known or [{"choice": choice, "nll": math.inf}]:
        trained = train_model(job["method"], data, entry["choice"], **shared)
        nll = _validation_nll(trained, shared, data.num_classes)
        if best is None or nll < best[0]:
            best = (nll, trained, entry["choice"])
        if nll <= entry["nll"] + DIVERGED:
            break
    assert best is not None
    return best[1], best[2]


def _validation_nll(trained: Trained, shared: dict[str, Any], num_classes: int) -> float:
    """On validation rows; infinite if it is not finite."""
    x, y = shared["validation"]
    targets = torch.from_numpy(y)
    try:
        nll = float(-trained(x).log_prob(targets if num_classes else targets[:, None]).mean())
    except (ArithmeticError, RuntimeError, ValueError):
        return math.inf
    return nll if math.isfinite(nll) else math.inf


def _seed(job: Job) -> int:
    return derive_seed(job["seed"], "run", job["split"]) % 2**31


def _predict_milliseconds(trained: Trained, x: np.ndarray) -> float:
    rows = np.resize(np.arange(len(x)), TIMED_ROWS)
    start = time.process_time()
    _reduce(trained(x[rows]))
    return 1000 * (time.process_time() - start)


def _reduce(prediction: Predictive) -> None:
    """Work that a lazy prediction has put off."""
    if isinstance(prediction, RegressionPredictive):
        prediction.variance.sum()
    elif isinstance(prediction, ClassificationPredictive):
        prediction.class_probs.sum()


def _count(model: Any) -> int | None:
    """Trainable scalars, or all stored ones of a model that is no module."""
    if isinstance(model, nn.Module):
        return count_parameters(model)
    return sum(tensor.numel() for tensor in model.state().values())


def _size(model: Any) -> int | None:
    """Bytes of the model's file."""
    from bayesify.storage.save_load import save

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.safetensors"
        try:
            save(model, path)
        except (TypeError, ValueError):
            return None
        return path.stat().st_size


class _alone:
    """One thread, so that runs side by side do not fight and sums have one order; and no warnings."""

    def __enter__(self) -> None:
        self._threads = torch.get_num_threads()
        torch.set_num_threads(1)
        self._warnings = warnings.catch_warnings()
        self._warnings.__enter__()
        warnings.simplefilter("ignore")

    def __exit__(self, *error: Any) -> None:
        self._warnings.__exit__(*error)
        torch.set_num_threads(self._threads)


def _reason(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    words = f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
    return words if len(words) <= 300 else words[:299] + "…"
