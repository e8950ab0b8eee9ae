"""Synthetic results of a comparison's runs, made from the scores that a test needs."""

import numpy as np

from bayesify.compare.scores import NUM_POINTS, THIRDS

NAMES = {"50": 0.5, "90": 0.9, "95": 0.95}


def result(
    nll,
    *,
    cover=None,
    error=None,
    fall=False,
    rmse=None,
    calibration=0.02,
    thirds=(0.9, 0.9, 0.9),
    test=200,
    seconds=1.0,
):
    """The result of a run with these scores."""
    if error is not None:
        return {"error": error}
    scores = {"nll": nll, "rmse": nll if rmse is None else rmse, "crps": nll, "calibration": calibration}
    for name, level in NAMES.items():
        scores |= {f"coverage_{name}": (cover or {}).get(name, level), f"width_{name}": 2.0}
        scores |= {f"conformal_coverage_{name}": level, f"conformal_width_{name}": 1.5}
    scores |= {f"coverage_90_{name}": value for name, value in zip(THIRDS, thirds, strict=True)}
    return {
        "scores": scores,
        "curves": {"rejection": np.linspace(1.0, 0.5 if fall else 1.0, NUM_POINTS).tolist()},
        "times": {"train_seconds": seconds, "predict_ms": 1.0},
        "parameters": 10,
        "bytes": 2000,
        "rows": {"fit": 4 * test, "test": test},
    }


def label(nll, accuracy, confusion, test=100):
    """The result of a classification's run."""
    found = result(nll, test=test)
    found["scores"] |= {"accuracy": accuracy, "brier": 0.1, "ece": 0.02}
    found["curves"] |= {"confusion": confusion, "rejection": [accuracy] * NUM_POINTS}
    return found


def noisy(mean, spread, splits=5, seed=0):
    return [float(value) for value in np.random.default_rng(seed).normal(mean, spread, splits)]
