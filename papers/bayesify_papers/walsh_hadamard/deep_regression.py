"""Tables 7 and 8: two hidden layers of 64 to 512 units on eight UCI regressions, all splits of a data set side by side.

    python -m bayesify_papers.walsh_hadamard.deep_regression [--datasets yacht] [--widths 64] [--out DIR] [--smoke]

Schedule, splits and what the supplement leaves open are those of `shallow_regression`. From a width of 256 on the square layer
multiplies in O(D log D) and is never formed.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from bayesify.datasets import uci
from bayesify_papers import records
from bayesify_papers.walsh_hadamard import published
from bayesify_papers.walsh_hadamard.regression import MODELS, Outcome, Setting, compare, read_folder, run_setting
from bayesify_papers.walsh_hadamard.shallow_regression import DEFAULTS, ORDER, SMOKE, synthetic
from bayesify_papers.walsh_hadamard.stacked_training import Recipe


def published_score(score: str, outcome: Outcome) -> published.Score | None:
    """The paper's mean and standard deviation for an outcome's data set, model and width."""
    table = published.DEEP_RMSE if score == "rmse" else published.DEEP_MNLL
    return table[outcome.model].get(outcome.width, {}).get(outcome.dataset)


def summarize(outcomes: Sequence[Outcome]) -> str:
    """Tables 7 and 8 beside the paper's."""
    title = "Two hidden layers: test RMSE and mean negative log-likelihood, mean over splits (standard error); paper: mean (sd)."
    known = dict.fromkeys((*published.DATASETS, *(one.dataset for one in outcomes)))
    return compare(outcomes, published_score, title, list(known))


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the experiment from the command line."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--datasets", nargs="+", choices=ORDER, default=list(ORDER))
    parser.add_argument("--widths", nargs="+", type=int, choices=published.WIDTHS, default=list(published.WIDTHS))
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=["WHVI"])
    parser.add_argument("--data", help="folder of the data; BAYESIFY_DATA if left out")
    parser.add_argument("--splits", type=int, help="only the first so many")
    parser.add_argument("--steps", type=int, default=Recipe().steps, help="steps after the first 500")
    parser.add_argument("--out", type=Path, default=Path("bayesify-report") / "walsh-hadamard-deep")
    parser.add_argument("--table", action="store_true", help="only print the table of what the folder holds")
    parser.add_argument("--smoke", action="store_true", help="a few rows and steps, seconds")
    chosen = parser.parse_args(given)
    torch.set_num_threads(1)
    if chosen.table:
        print(summarize(read_folder(chosen.out)))
        return 0
    facts = records.facts("bayesify_papers.walsh_hadamard.deep_regression", given)
    recipe = SMOKE if chosen.smoke else Recipe(steps=chosen.steps)
    widths = [64, 256] if chosen.smoke else chosen.widths
    outcomes: list[Outcome] = []
    for width in widths:
        for name in ["synthetic"] if chosen.smoke else chosen.datasets:
            data = synthetic() if chosen.smoke else uci.load(name, chosen.data)
            for model in chosen.models:
                setting = Setting(model, 2, width, **(DEFAULTS if model == "WHVI" else {}))
                outcomes += run_setting(chosen.out, data, setting, recipe, splits=chosen.splits, facts=facts)
    print(summarize(outcomes))
    return 0


if __name__ == "__main__":
    sys.exit(main())
