"""One run: a method on a split, from plain data to plain data."""

from __future__ import annotations

import math
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from bayesify import metrics
from bayesify.arguments.suggestions import reason_of
from bayesify.compare.explanation import examples, importance
from bayesify.compare.models import FAILURES, HIDDEN, Case, Data, Trained, noise_of, train_models
from bayesify.compare.problems import Problem
from bayesify.compare.rivals import train_apart
from bayesify.compare.scores import score_classification, score_regression
from bayesify.compare.tuning import APART, candidates, effort, obstacle
from bayesify.predictive.regression import RegressionPredictive
from bayesify.storage.save_load import save
from bayesify.tables.preparation import Preparation
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
    """Tune, train and score one method on some splits; what goes wrong with the method becomes `error`.

    Args:
        path: As above.
        job: `data`, `seed` and `quick` as above, `method`, `splits`, and `noises` of these (`None` for a classification).

    Returns:
        `runs`, one for each split: `scores`, `curves`, `times`, `parameters`, `bytes`, `choice`, `rows` (of each part), `examples`
        and `importance` for the first split, and `ood` where there are other inputs; or `error`.

    Raises:
        ValueError: If the file holds other data.
    """
    problem = _read(path, job)
    try:
        with _alone():
            return {"runs": _run(problem, job)}
    except Exception as error:
        return {"runs": [{"error": reason_of(error)}] * len(job["splits"])}


def _read(path: str, job: Job) -> Problem:
    problem = Problem.read(Path(path))
    if problem.fingerprint != job["data"]:
        raise ValueError(f"{path} holds other data than this comparison's; give each comparison a folder of its own")
    return problem


def _run(problem: Problem, job: Job) -> list[Result]:
    ones = [{**job, "split": split} for split in job["splits"]]
    prepared = [_data(problem, one) for one in ones]
    targets = [
        {name: problem.values[rows] for name, rows in vars(problem.parts(one["split"], one["seed"])).items()}
        for one in ones
    ]
    for data, _ in prepared:
        reason = obstacle(job["method"], data.x.shape[1], HIDDEN, data.num_outputs)
        if reason:
            return [{"error": reason}] * len(ones)
    cases = [
        Case(data, noise, (inputs["validation"], values["validation"]), _seed(one))
        for one, (data, inputs), values, noise in zip(ones, prepared, targets, job["noises"], strict=True)
    ]
    start = time.process_time()
    tried = _tune(job, cases)
    tuned = time.process_time()
    trained = _train(job, cases, tried)
    done = time.process_time()
    seconds = {"train_seconds": (done - tuned) / len(ones), "tune_seconds": (tuned - start) / len(ones)}
    results: list[Result] = []
    for one, (_, inputs), values, entries, found in zip(ones, prepared, targets, tried, trained, strict=True):
        if isinstance(found, Exception):
            results.append({"error": reason_of(found)})
            continue
        results.append(_score(problem, one, inputs, values, entries, *found, seconds))
    return results


def _score(
    problem: Problem,
    job: Job,
    inputs: dict[str, np.ndarray],
    targets: dict[str, np.ndarray],
    tried: list[dict[str, Any]],
    trained: Trained,
    choice: dict[str, Any],
    seconds: dict[str, float],
) -> Result:
    """What is known of one trained model."""
    parts = problem.parts(job["split"], job["seed"])
    test, calibration = trained(inputs["test"]), trained(inputs["calibration"])
    score: Callable[..., Any] = score_classification if problem.classes else score_regression
    scores, curves = score(test, targets["test"], calibration, targets["calibration"])
    result: Result = {
        "scores": scores,
        "curves": curves,
        "times": {**seconds, "predict_ms": _predict_milliseconds(trained, inputs["test"])},
        **_costs(trained.model),
        "choice": choice,
        "tried": tried if len(tried) > 1 else [],
        "rows": {name: len(rows) for name, rows in vars(parts).items()} | {"trained": len(trained.data.x)},
    }
    preparation = Preparation.of(problem.features, parts.fit)
    if job["split"] == 0:
        result["examples"] = examples(test, parts.test, targets["test"])
        result["importance"] = importance(
            trained, preparation, problem.features, parts.test, problem.values, derive_seed(job["seed"], "shuffling")
        )
    if problem.outside is not None:
        outside = trained(preparation(problem.outside, np.arange(len(problem.outside))))
        result["ood"] = metrics.ood(test, outside)
    return result


def _data(problem: Problem, job: Job) -> tuple[Data, dict[str, np.ndarray]]:
    parts = problem.parts(job["split"], job["seed"])
    preparation = Preparation.of(problem.features, parts.fit)
    inputs = {name: preparation(problem.features, rows) for name, rows in vars(parts).items()}
    return Data(inputs["fit"], problem.values[parts.fit], len(problem.classes)), inputs


def _tune(job: Job, cases: list[Case]) -> list[list[dict[str, Any]]]:
    """Each case's choices with their NLL on validation rows, all of one case's `None` where there is but one choice."""
    choices = candidates(job["method"], "classification" if cases[0].data.num_classes else "regression", job["quick"])
    if len(choices) == 1:
        return [[{"choice": choices[0], "nll": None}] for _ in cases]
    pairs = [(case, choice) for case in cases for choice in choices]
    found = _models(job, *zip(*pairs, strict=True), tuning=True)
    tried = []
    for (case, choice), trained in zip(pairs, found, strict=True):
        nll = _validation_nll(trained, case)
        tried.append({"choice": choice, "nll": nll if math.isfinite(nll) else None})
    return [tried[start : start + len(choices)] for start in range(0, len(tried), len(choices))]


def _train(
    job: Job, cases: list[Case], tried: list[list[dict[str, Any]]]
) -> list[tuple[Trained, dict[str, Any]] | Exception]:
    """Each case's best choice, the first where none worked, trained in full; where that makes it diverge, the next one."""
    orders = []
    for entries in tried:
        known = [entry for entry in entries if entry["nll"] is not None]
        orders.append(sorted(known, key=lambda entry: float(entry["nll"])) or [{**entries[0], "nll": math.inf}])
    best: list[tuple[float, Any, dict[str, Any]] | None] = [None] * len(cases)
    open_cases = list(range(len(cases)))
    for place in range(max(map(len, orders))):
        open_cases = [index for index in open_cases if place < len(orders[index])]
        if not open_cases:
            break
        chosen = [orders[index][place] for index in open_cases]
        picked = [cases[index] for index in open_cases]
        found = _models(job, picked, [entry["choice"] for entry in chosen])
        diverged = []
        for index, entry, trained in zip(open_cases, chosen, found, strict=True):
            nll, before = _validation_nll(trained, cases[index]), best[index]
            if before is None or nll < before[0]:
                best[index] = (nll, trained, entry["choice"])
            if nll > entry["nll"] + DIVERGED:
                diverged.append(index)
        open_cases = diverged
    return [one[1] if isinstance(one[1], Exception) else one[1:] for one in best if one is not None]


def _models(
    job: Job, cases: Sequence[Case], choices: Sequence[Mapping[str, Any]], *, tuning: bool = False
) -> list[Any]:
    """What was trained on each case, or the exception."""
    if job["method"] not in APART:
        return train_models(job["method"], cases, choices, quick=job["quick"], tuning=tuning)
    return [train_apart(job["method"], case.data, case.seed, effort(job["quick"]).auto_steps) for case in cases]


def _validation_nll(trained: Trained | Exception, case: Case) -> float:
    """On validation rows; infinite if it is not finite, or training failed."""
    if isinstance(trained, Exception):
        return math.inf
    x, y = case.validation
    targets = torch.from_numpy(y)
    try:
        nll = float(-trained(x).log_prob(targets if case.data.num_classes else targets[:, None]).mean())
    except FAILURES:
        return math.inf
    return nll if math.isfinite(nll) else math.inf


def _seed(job: Job) -> int:
    return derive_seed(job["seed"], "run", job["split"]) % 2**31


def _predict_milliseconds(trained: Trained, x: np.ndarray) -> float:
    rows = np.resize(np.arange(len(x)), TIMED_ROWS)
    start = time.process_time()
    prediction = trained(x[rows])
    getattr(prediction, "variance" if isinstance(prediction, RegressionPredictive) else "class_probs")  # it may be lazy
    return 1000 * (time.process_time() - start)


def _costs(model: Any) -> dict[str, int | None]:
    """Trainable scalars, or all stored ones of a model that is no module, and bytes of its file; `None` for what is no network."""
    if model is None:
        return {"parameters": None, "bytes": None}
    module = isinstance(model, nn.Module)
    count = count_parameters(model) if module else sum(tensor.numel() for tensor in model.state().values())
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.safetensors"
        try:
            save(model, path)
        except (TypeError, ValueError):
            return {"parameters": count, "bytes": None}
        return {"parameters": count, "bytes": path.stat().st_size}


@contextmanager
def _alone() -> Iterator[None]:
    """One thread, so that runs side by side do not fight and sums have one order; and no warnings."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        torch.set_num_threads(threads)
