"""Choices that the supplement leaves open, compared on a tenth of the training rows of every split. Test rows are not used.

    python -m bayesify_papers.walsh_hadamard.validation --dataset boston --scales 1 2 3 [--point-biases] [--out DIR]

All candidates and all splits of a data set train at once. A candidate has one scale for the prior and the initial weights
(`--prior-scales` sets the prior's separately) and a factor by which g is made smaller (`--shrink`, see `regression.rescale`).
"""

import sys
from collections.abc import Sequence
from dataclasses import asdict

import numpy as np

from bayesify.datasets import uci
from bayesify.training import ModelStack
from bayesify_papers.shared import records
from bayesify_papers.shared.program import Program
from bayesify_papers.shared.regressions import synthetic
from bayesify_papers.shared.rows import grouped, show
from bayesify_papers.walsh_hadamard.regression import Rows, Setting, judge, make
from bayesify_papers.walsh_hadamard.shallow_regression import DATASET_ORDER, SMOKE, setting
from bayesify_papers.walsh_hadamard.stacked_training import Recipe, train

Scores = list[dict[str, float]]
"""Mean scores over splits of each candidate."""


def run(data: uci.Table, candidates: Sequence[Setting], recipe: Recipe, splits: int | None = None) -> Scores:
    """Train candidates of one shape on all splits at once, and score them on the rows set aside.

    Args:
        candidates: Settings whose parameters have the same shapes.
        splits: Number of splits, from the first.
    """
    rows = Rows.of(data, data.splits[:splits], validation=True)
    count, inputs = len(rows.units), data.X.shape[1]
    networks = [make(candidate, inputs, seed) for candidate in candidates for seed in range(count)]
    stack = ModelStack(networks)
    x, y = (part.repeat(len(candidates), 1, 1) for part in (rows.x, rows.y))

    def scores() -> Scores:
        stack.unstack()
        found = []
        for index in range(len(candidates)):
            own = networks[index * count : (index + 1) * count]
            judged = [
                judge(network, *scored, unit, 64, seed)
                for seed, (network, scored, unit) in enumerate(zip(own, rows.tests, rows.units, strict=True))
            ]
            found.append({key: round(float(np.mean([one[key] for one in judged])), 4) for key in ("rmse", "mnll")})
        return found

    def report(step: int, seconds: float) -> None:
        if step % 10_000 == 0:
            every = "; ".join(f"{one['rmse']:.3f} {one['mnll']:.3f}" for one in scores())
            print(f"{data.name}: step {step:,} of {recipe.total:,}: {every}", flush=True)

    train(stack, x, y, recipe, report=report)
    return scores()


def main(arguments: Sequence[str] | None = None) -> int:
    """Compare candidates from the command line."""
    program = Program(__doc__, __spec__, "walsh-hadamard-validation", small=True)
    program.choice("dataset", DATASET_ORDER, "boston").choice("activation", ("relu", "tanh"), "relu")
    program.choice("covariance", ("diagonal", "full"), "diagonal").option("data", "splits", model="WHVI")
    program.option(scales=(1.0, 2.0), point_biases=False, steps=Recipe().steps, learning_rate=Recipe().learning_rate)
    program.add_argument("--prior-scales", nargs="+", type=float, help="prior scale for each of --scales")
    program.add_argument("--shrink", nargs="+", type=float, help="factor for each of --scales; needs --point-biases")
    chosen = program.read(arguments)
    data = synthetic() if chosen.smoke else uci.load(chosen.dataset, chosen.data)
    recipe = SMOKE if chosen.smoke else Recipe(steps=chosen.steps, learning_rate=chosen.learning_rate)
    width = setting(chosen.dataset, chosen.model).width
    priors, shrinks = chosen.prior_scales or chosen.scales, chosen.shrink or [1.0] * len(chosen.scales)
    same = {"point_biases": chosen.point_biases, "activation": chosen.activation, "covariance": chosen.covariance}
    candidates = [
        Setting(chosen.model, 1, width, prior, scale, shrink=shrink, validation=True, **same)
        for scale, prior, shrink in zip(chosen.scales, priors, shrinks, strict=True)
    ]
    found = run(data, candidates, recipe, chosen.splits)
    name = f"{candidates[0].stem(data.name)}-and-{len(candidates) - 1}-others.json"
    outcomes = [{**asdict(one), **scores} for one, scores in zip(candidates, found, strict=True)]
    records.write(
        chosen.out / name, {**chosen.facts, "dataset": data.name, "recipe": asdict(recipe), "outcomes": outcomes}
    )
    biases = "point estimates" if chosen.point_biases else "Gaussians"
    settings = ("init_scale", "prior_scale", "shrink")
    print(show(grouped(outcomes, settings, ("rmse", "mnll")), f"{data.name}, rows set aside, biases {biases}:"))
    return 0


if __name__ == "__main__":
    sys.exit(main())
