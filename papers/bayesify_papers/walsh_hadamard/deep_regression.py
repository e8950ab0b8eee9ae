"""Tables 7 and 8: two hidden layers of 64 to 512 units on eight UCI regressions, all splits of a data set side by side.

    python -m bayesify_papers.walsh_hadamard.deep_regression [--datasets yacht] [--widths 64] [--out DIR] [--smoke]

Schedule, splits and what the supplement leaves open are those of `shallow_regression`. From a width of 256 on the square layer
multiplies in O(D log D) and is never formed.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from bayesify.datasets import uci
from bayesify_papers.shared.program import Program
from bayesify_papers.shared.published import Score
from bayesify_papers.shared.regressions import synthetic
from bayesify_papers.walsh_hadamard.regression import (
    MODELS,
    Outcome,
    Setting,
    both_targets,
    compare,
    corrected,
    read_folder,
    run_setting,
)
from bayesify_papers.walsh_hadamard.shallow_regression import DEFAULTS, ORDER, PAPER, SMOKE, add_options
from bayesify_papers.walsh_hadamard.stacked_training import Recipe


def published_score(score: str, outcome: Outcome) -> Score | None:
    """The paper's mean and standard deviation for an outcome's data set, model and width, corrected."""
    found: Score | None = PAPER.find("deep", score, outcome.model, outcome.width, outcome.dataset)
    return corrected(score, outcome.dataset, outcome.model, found)


def summarize(outcomes: Sequence[Outcome]) -> str:
    """Tables 7 and 8 beside the paper's."""
    title = "Two hidden layers: test RMSE and mean negative log-likelihood, mean over splits (standard error); paper: mean (sd)."
    known = dict.fromkeys((*PAPER["datasets"], *(one.dataset for one in outcomes)))
    return compare(outcomes, published_score, title, list(known))


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the experiment from the command line."""
    program = Program(__doc__, __spec__, "walsh-hadamard-deep", small=True)
    program.choice("datasets", ORDER).choice("widths", PAPER["widths"]).choice("models", MODELS, ["WHVI"])
    chosen = add_options(program).read(arguments)
    if chosen.table:
        print(summarize(read_folder(chosen.out)))
        return 0
    recipe = SMOKE if chosen.smoke else Recipe(steps=chosen.steps)
    widths = [64, 256] if chosen.smoke else chosen.widths
    outcomes: list[Outcome] = []
    for width in widths:
        for name in ["synthetic"] if chosen.smoke else chosen.datasets:
            data = synthetic() if chosen.smoke else both_targets(uci.load(name, chosen.data))
            for model in chosen.models:
                setting = Setting(model, 2, width, **(DEFAULTS if model == "WHVI" else {}))
                outcomes += run_setting(chosen.out, data, setting, recipe, splits=chosen.splits, facts=chosen.facts)
    print(summarize(outcomes))
    return 0


if __name__ == "__main__":
    sys.exit(main())
