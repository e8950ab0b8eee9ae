"""Tables 7 and 8: two hidden layers of 64 to 512 units on eight UCI regressions, all splits of a data set at once.

    python -m bayesify_papers.walsh_hadamard.deep_regression [--datasets yacht] [--widths 64] [--out DIR] [--smoke]

Schedule and splits are those of `shallow_regression`. WHVI has its `DEFAULTS` on all data sets, so boston and yacht do not have
their `CHOICES`. From a width of 256 on, the square layer multiplies in O(D log D) and is never materialized.
"""

import sys
from collections.abc import Sequence

from bayesify_papers.shared.program import Program
from bayesify_papers.shared.rows import show
from bayesify_papers.walsh_hadamard import rows
from bayesify_papers.walsh_hadamard.regression import MODELS, Setting, run_setting
from bayesify_papers.walsh_hadamard.shallow_regression import DATASET_ORDER, DEFAULTS, PAPER, SMOKE, add_options, load
from bayesify_papers.walsh_hadamard.stacked_training import Recipe


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the experiment from the command line."""
    program = Program(__doc__, __spec__, "walsh-hadamard-deep", small=True)
    program.choice("datasets", DATASET_ORDER).choice("widths", PAPER["widths"]).choice("models", MODELS, ["WHVI"])
    chosen = add_options(program).read(arguments)
    options = {"splits": chosen.splits, "facts": chosen.facts, "device": chosen.device}
    recipe = SMOKE if chosen.smoke else Recipe(steps=chosen.steps)
    for width in [64, 256] if chosen.smoke else chosen.widths:
        for data in load(chosen):
            for model in chosen.models:
                setting = Setting(model, 2, width, **(DEFAULTS if model == "WHVI" else {}))
                run_setting(chosen.out, data, setting, recipe, **options)
    print(show(rows.deep(chosen.out), "Two hidden layers: test RMSE and mean negative log-likelihood."))
    return 0


if __name__ == "__main__":
    sys.exit(main())
