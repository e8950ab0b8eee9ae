"""Snelson's regression and two moons: uncertainty away from the data, compared with mean-field inference (figures 1, 3, 4).

    python -m bayesify_papers.function_space.toy --out DIR [--seeds 5]

For each seed, all methods train the same network for the same number of steps; an ensemble has five such networks, with the paper's
weight decay. Mean-field inference has the paper's weight prior N(0, I). A score is the uncertainty two data widths outside the
data, divided by its mean at the data. The uncertainty is the function's standard deviation in the regression, and the entropy on a
ring in the classification. `uncertain` is the share of the ring with an entropy above half of its maximum. Snelson's own 200 points
are used if the folder in BAYESIFY_DATA has `toy/snelson.npz` (arrays `x` and `y`), otherwise similar synthetic points. Figures are
drawn if matplotlib is installed.
"""

import math
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

import bayesify
from bayesify import BayesianNetwork, bayesianize, likelihoods
from bayesify.datasets import toy
from bayesify.function_space import Box, FunctionSpaceVI
from bayesify.posteriors import Ensemble, MeanField
from bayesify.priors import Gaussian, Standard
from bayesify_papers.function_space import rows
from bayesify_papers.function_space.networks import toy_network
from bayesify_papers.function_space.trainings import WEIGHT_DECAY
from bayesify_papers.shared import figures, records
from bayesify_papers.shared.program import Program, fill
from bayesify_papers.shared.rows import show

INIT_STD, NUM_POINTS, WIDTHS = 0.02, 10, 2.0
"""Initial standard deviation of weights; number of context inputs per step; margin of the context box, in data widths."""


@dataclass(frozen=True)
class Schedule:
    """How a method is trained.

    Args:
        epochs: Number of steps. Each step sees all data.
        learning_rate: Constant learning rate of Adam; between 1e-4 and 1e-3 in the paper.
        prior_variance: Prior variance of function values in function space; 1e6 in the paper.
    """

    epochs: int = 400
    learning_rate: float = 1e-2
    prior_variance: float = 10.0


NUM_DRAWS = 200
METHODS = {"fsvi": "FSVI", "mfvi": "MFVI", "ensemble": "Ensemble"}
MIN_FAR_RATIO = 3.0
"""Required ratio of the uncertainty far from the data to the uncertainty at the data."""


def snelson_file() -> Path | None:
    """The file of Snelson's data, if the folder in BAYESIFY_DATA has it."""
    folder = os.environ.get("BAYESIFY_DATA")
    path = Path(folder) / "toy" / "snelson.npz" if folder else None
    return path if path is not None and path.is_file() else None


def snelson(seed: int) -> toy.Regression:
    """Snelson's data if they are available, otherwise similar synthetic data; standardized."""
    path, made = snelson_file(), toy.snelson(seed=seed)
    if path is not None:
        with np.load(path, allow_pickle=False) as stored:
            x, y = (torch.from_numpy(np.asarray(stored[key], dtype=np.float32)).reshape(-1, 1) for key in ("x", "y"))
        made = replace(made, x=x, y=y, x_test=x, y_test=y)
    return made.standardized()


def fit(bnn: BayesianNetwork, x: Tensor, y: Tensor, method: str, seed: int, how: Schedule) -> Any:
    """Train on all data at each step and return a model with `predict`."""
    options: dict[str, Any] = {"epochs": how.epochs, "learning_rate": how.learning_rate, "scheduler": "constant"}
    options |= {"seed": seed, "progress": False}
    if method != "fsvi":
        bayesify.fit(bnn, [(x, y)], **options)
        return bnn
    model = FunctionSpaceVI(bnn, 0.0, how.prior_variance, Box.around(x, WIDTHS, NUM_POINTS))
    model.fit([(x, y)], **options)
    return model


def network(inputs: int, outputs: int, likelihood: Any, method: str, seed: int) -> BayesianNetwork:
    """The network of a method before training. Function-space inference does not use its weight prior."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        net = toy_network(inputs, outputs)
        if method == "ensemble":
            return bayesianize(net, Ensemble(), likelihood=likelihood, prior=Gaussian(WEIGHT_DECAY**-0.5))
        return bayesianize(net, MeanField(init_std=INIT_STD), likelihood=likelihood, prior=Standard())


def regression(method: str, seed: int, how: Schedule) -> tuple[dict[str, float], Any]:
    """Scores of one training run on the regression, and the model."""
    data = snelson(seed)
    model = fit(network(1, 1, likelihoods.Gaussian(noise=0.1), method, seed), data.x, data.y, method, seed, how)
    low, high = data.x.min(), data.x.max()
    far = torch.stack((low - 2 * (high - low), high + 2 * (high - low)))[:, None]

    def spread(x: Tensor) -> Tensor:
        found: Tensor = model.predict(x, NUM_DRAWS, generator=torch.Generator().manual_seed(seed)).epistemic.sqrt()
        return found

    inside, outside = float(spread(data.x).mean()), float(spread(far).min())
    error = model.predict(data.x_test, NUM_DRAWS, generator=torch.Generator().manual_seed(seed)).mean - data.y_test
    rmse = float(error.square().mean().sqrt())
    return {"inside": inside, "outside": outside, "ratio": outside / inside, "rmse": rmse}, model


def classification(method: str, seed: int, how: Schedule) -> tuple[dict[str, float], Any]:
    """Scores of one training run on two moons, and the model."""
    data = toy.two_moons(noise_std=0.1, seed=seed)
    model = fit(network(2, 2, likelihoods.Categorical(), method, seed), data.x, data.y, method, seed, how)

    def entropy(x: Tensor) -> Tensor:
        found: Tensor = model.predict(x, NUM_DRAWS, generator=torch.Generator().manual_seed(seed)).entropy
        return found

    inside, around = float(entropy(data.x).mean()), entropy(ring(data.x))
    outside, uncertain = float(around.mean()), float((around > math.log(2) / 2).float().mean())
    labels = model.predict(data.x_test, NUM_DRAWS, generator=torch.Generator().manual_seed(seed)).labels
    accuracy = float((labels == data.y_test).float().mean())
    scores = {"inside": inside, "outside": outside, "ratio": outside / inside, "uncertain": uncertain}
    return {**scores, "accuracy": accuracy}, model


def ring(x: Tensor, widths: float = 2.0, count: int = 64) -> Tensor:
    """Points on an ellipse around data [N, 2], a number of data widths outside their bounding box: [count, 2]."""
    low, high = x.amin(0), x.amax(0)
    angle = 2 * math.pi * torch.arange(count) / count
    return (low + high) / 2 + (0.5 + widths) * (high - low) * torch.stack((angle.cos(), angle.sin()), dim=1)


PROBLEMS = {"snelson": regression, "two_moons": classification}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the experiment from the command line."""
    chosen = Program(__doc__, __spec__, "function_space_toy").option(seeds=5).settings(Schedule()).read(arguments)
    seeds, how = (1, Schedule(3)) if chosen.smoke else (chosen.seeds, fill(Schedule, chosen))
    data = "Snelson's data" if snelson_file() else "synthetic data, because toy/snelson.npz is not in BAYESIFY_DATA"
    print(f"Regression: {data}", flush=True)
    found: dict[str, dict[str, list[dict[str, float]]]] = {}
    for problem, run in PROBLEMS.items():
        models: dict[str, Any] = {}
        for method in METHODS:
            for seed in range(seeds):
                scores, model = run(method, seed, how)
                models.setdefault(method, model)
                found.setdefault(problem, {}).setdefault(method, []).append(scores)
                print(f"{problem}, {METHODS[method]}, seed {seed}: {scores}", flush=True)
                records.write(chosen.out / "results.json", {**chosen.facts, "regression": data, "scores": found})
        if figures.HAS_MATPLOTLIB:
            from bayesify_papers.function_space.figures import draw

            draw(problem, models, chosen.out / problem)
    title = f"Standard deviation of the function (Snelson) and entropy (two moons); ratios should be at least {MIN_FAR_RATIO:g}."
    print(show(rows.toy(chosen.out), title))
    return 0


if __name__ == "__main__":
    sys.exit(main())
