"""Table 2: one hidden layer on eight UCI regressions, all splits of a data set side by side.

    python -m bayesify_papers.walsh_hadamard.shallow_regression [--datasets yacht boston] [--models WHVI] [--out DIR] [--smoke]

50 units, 100 for protein; batches of 64, Adam with the paper's decay, 500 steps with a fixed noise variance and 50,000 with a
learned one, one draw a step, 64 draws for predictions (appendices D.1 and D.2). The standard splits: 20, 5 for protein. What the
supplement leaves open (activation, biases, starting values) is in `DEFAULTS` and `CHOICES`; targets are standardized and the noise
variance starts at 0.1. Energy and naval have two targets in the paper and one in the files: they are reported and not compared.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bayesify.datasets import uci
from bayesify_papers import records
from bayesify_papers.walsh_hadamard import published
from bayesify_papers.walsh_hadamard.regression import MODELS, Outcome, Setting, compare, read_folder, run_setting
from bayesify_papers.walsh_hadamard.stacked_training import Recipe

ORDER = ("yacht", "boston", "concrete", "energy", "power", "kin8nm", "naval", "protein")
"""Data sets, the quick ones first."""

CHOICES: dict[str, dict[str, Any]] = {
    "yacht": {"point_biases": False, "shrink": 1.0},
    "boston": {"prior_scale": 2.0, "init_scale": 2.0, "shrink": 1.0},
}
"""What WHVI changes by data set in `DEFAULTS`: boston's chosen on a tenth of the training rows (`validation`), yacht's those of
the first run."""

DEFAULTS: dict[str, Any] = {"prior_scale": 1.0, "init_scale": 1.0, "point_biases": True, "shrink": 10.0}
"""What the supplement leaves open, for WHVI; see `Setting`. Chosen on training rows of concrete that were set aside."""

SMOKE = Recipe(fixed_noise_steps=5, steps=15, batch=16)


def setting(dataset: str, model: str) -> Setting:
    """What table 2 trains on a data set."""
    width = 100 if dataset == "protein" else 50
    return Setting(model, 1, width, **({**DEFAULTS, **CHOICES.get(dataset, {})} if model == "WHVI" else {}))


def published_score(score: str, outcome: Outcome) -> published.Score | None:
    """The paper's mean and standard deviation for an outcome's data set and model."""
    table = published.SHALLOW_RMSE if score == "rmse" else published.SHALLOW_MNLL
    return table.get(outcome.dataset, {}).get(outcome.model)


def summarize(outcomes: Sequence[Outcome]) -> str:
    """Table 2 beside the paper's."""
    title = "One hidden layer: test RMSE and mean negative log-likelihood, mean over splits (standard error); paper: mean (sd)."
    known = dict.fromkeys((*published.DATASETS, *(one.dataset for one in outcomes)))
    return compare(outcomes, published_score, title, list(known))


def synthetic(rows: int = 60, inputs: int = 3) -> uci.Table:
    """A small regression for trying everything out."""
    generator = np.random.default_rng(0)
    X = generator.normal(size=(rows, inputs))
    y = 3 * np.sin(X.sum(1, keepdims=True)) + 0.1 * generator.normal(size=(rows, 1))
    return uci.Table("synthetic", "regression", X, y, uci.seeded_splits(X, y, count=3), ())


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the experiment from the command line."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--datasets", nargs="+", choices=ORDER, default=list(ORDER))
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=["WHVI"])
    parser.add_argument("--data", help="folder of the data; BAYESIFY_DATA if left out")
    parser.add_argument("--splits", type=int, help="only the first so many")
    parser.add_argument("--steps", type=int, default=Recipe().steps, help="steps after the first 500")
    parser.add_argument("--out", type=Path, default=Path("bayesify-report") / "walsh-hadamard-shallow")
    parser.add_argument("--table", action="store_true", help="only print the table of what the folder holds")
    parser.add_argument("--smoke", action="store_true", help="a few rows and steps, seconds")
    chosen = parser.parse_args(given)
    torch.set_num_threads(1)  # the networks are so small that a second thread only waits
    if chosen.table:
        print(summarize(read_folder(chosen.out)))
        return 0
    facts = records.facts("bayesify_papers.walsh_hadamard.shallow_regression", given)
    recipe = SMOKE if chosen.smoke else Recipe(steps=chosen.steps)
    outcomes: list[Outcome] = []
    for name in ["synthetic"] if chosen.smoke else chosen.datasets:
        data = synthetic() if chosen.smoke else uci.load(name, chosen.data)
        for model in MODELS if chosen.smoke else chosen.models:
            wanted = setting(name, model)
            outcomes += run_setting(chosen.out, data, wanted, recipe, splits=chosen.splits, facts=facts)
    print(summarize(outcomes))
    return 0


if __name__ == "__main__":
    sys.exit(main())
