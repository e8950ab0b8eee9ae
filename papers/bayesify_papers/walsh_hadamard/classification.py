"""Table 9: two and three hidden layers of 64 to 512 units on EEG, letter and magic, several splits at once.

    python -m bayesify_papers.walsh_hadamard.classification [--datasets magic] [--layers 2] [--widths 64] [--out DIR] [--smoke]

The schedule is that of appendix D.1, without a noise variance: 50,500 steps of Adam on batches of 64. The paper does not say how
the sets are split. Here, each split tests on a random tenth (`datasets.uci.seeded_splits`). Columns are standardized by training
rows. EEG has a few huge spikes, so its columns are first clipped to 5 standard deviations of their central 98 %. WHVI has the
library's prior and initial values and Gaussian biases, not the settings of `shallow_regression`.
"""

import sys
from collections.abc import Sequence
from dataclasses import asdict
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bayesify import BayesianNetwork, ClassificationPredictive, bayesianize
from bayesify.datasets import Standardization, uci
from bayesify.likelihoods import Categorical
from bayesify.models import mlp
from bayesify.priors import Neal
from bayesify.training import ModelStack
from bayesify_papers.shared.program import Program
from bayesify_papers.shared.rows import show
from bayesify_papers.walsh_hadamard import rows
from bayesify_papers.walsh_hadamard.regression import MODELS, Report, run_stored
from bayesify_papers.walsh_hadamard.shallow_regression import PAPER, SMOKE, add_options
from bayesify_papers.walsh_hadamard.stacked_training import Recipe, train


def scaled(train: np.ndarray, test: np.ndarray, cut: bool) -> tuple[Tensor, Tensor]:
    """Columns standardized by training rows.

    Args:
        train: Training inputs.
        test: Test inputs.
        cut: Whether to clip columns to 5 standard deviations around the mean of their central 98 % before standardization.
    """
    if cut:
        low, high = np.quantile(train, [0.01, 0.99], axis=0)
        middle = np.ma.masked_array(train, (train < low) | (train > high))
        mean, std = np.asarray(middle.mean(0)), np.asarray(middle.std(0))
        train, test = (np.clip(part, mean - 5 * std, mean + 5 * std) for part in (train, test))
    scale = Standardization.of(train)
    return torch.from_numpy(scale(train)).float(), torch.from_numpy(scale(test)).float()


def make(model: str, sizes: Sequence[int], seed: int) -> BayesianNetwork:
    """An untrained network with the given layer sizes."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return bayesianize(mlp(sizes), MODELS[model](), likelihood=Categorical(), prior=Neal())


def judge(prediction: ClassificationPredictive, labels: Tensor) -> dict[str, float]:
    """Error and mean negative log-likelihood of the mixture of draws, and the likelihood of single draws (`mnll_draws`).

    The authors score the error of the mixture and the likelihood of single draws.

    Args:
        prediction: Prediction with its outputs, [S, B, C].
        labels: Classes, [B].
    """
    single = prediction.outputs.log_softmax(-1)[:, torch.arange(len(labels)), labels]  # [S, B]
    return {
        "error": float((prediction.probs.argmax(-1) != labels).double().mean()),
        "mnll": -float(prediction.log_prob(labels).mean()),
        "mnll_draws": -float(single.mean()),
    }


def run_setting(
    folder: Path,
    data: uci.Table,
    model: str,
    hidden_layers: int,
    width: int,
    recipe: Recipe,
    *,
    splits: int = 5,
    num_draws: int = 64,
    facts: dict[str, Any] | None = None,
    device: str = "cpu",
) -> list[dict[str, Any]]:
    """Train one setting on several splits of a data set, or read the results of an earlier run.

    Args:
        folder: See `regression.run_stored`.
        model: A key of `regression.MODELS`.
        splits: Number of splits, from the first.
        device: Device for training. Scores are computed on a CPU.

    Returns:
        For each split the scores of `judge`. Runs stored before `mnll_draws` existed do not have it.
    """
    chosen = data.splits[:splits]
    about = {"recipe": asdict(recipe), "num_draws": num_draws, "splits": len(chosen)}

    def work(checkpoint: Path, report: Report) -> tuple[list[dict[str, float]], float]:
        parts = [(scaled(data.X[s.train], data.X[s.test], data.name == "eeg"), s) for s in chosen]
        sizes = [data.X.shape[1], *[width] * hidden_layers, data.num_classes]
        networks = [make(model, sizes, seed).to(device) for seed in range(len(parts))]
        x = torch.stack([inputs for (inputs, _), _ in parts]).to(device)
        y = torch.stack([torch.from_numpy(data.y[split.train]) for _, split in parts]).to(device)
        seconds = train(ModelStack(networks), x, y, recipe, checkpoint, report=report)
        scores = []
        for index, (network, ((_, test), split)) in enumerate(zip(networks, parts, strict=True)):
            labels = torch.from_numpy(data.y[split.test])
            generator = torch.Generator().manual_seed(index)
            prediction = network.cpu().predict(test, num_draws, generator=generator, keep_outputs=True)
            assert isinstance(prediction, ClassificationPredictive)
            scores.append(judge(prediction, labels))
        return scores, seconds

    network_of = {"dataset": data.name, "model": model, "hidden_layers": hidden_layers, "width": width}
    stem = f"{data.name}-{model.lower()}-{hidden_layers}x{width}"
    return run_stored(folder, stem, network_of, about, facts, recipe, work)


def synthetic(rows: int = 60, inputs: int = 3) -> uci.Table:
    """A small synthetic classification for quick runs."""
    generator = np.random.default_rng(0)
    X = generator.normal(size=(rows, inputs))
    y = np.digitize(X.sum(1), [-1, 1]).astype(np.int64)
    return uci.Table("synthetic", "classification", X, y, uci.seeded_splits(X, y, count=3))


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the experiment from the command line."""
    program = Program(__doc__, __spec__, "walsh-hadamard-classification", small=True)
    program.choice("datasets", uci.CLASSIFICATION).choice("layers", (2, 3)).choice("widths", PAPER["widths"])
    program.choice("models", ("WHVI", "MCD", "MFG"), ["WHVI"])
    add_options(program).set_defaults(splits=5)
    chosen = program.read(arguments)
    recipe = SMOKE if chosen.smoke else Recipe(steps=chosen.steps)
    options = {"splits": chosen.splits, "facts": chosen.facts, "device": chosen.device}
    wanted = product(
        [64] if chosen.smoke else chosen.widths, chosen.layers, chosen.datasets[: 1 if chosen.smoke else None]
    )
    for width, layers, name in () if chosen.table else wanted:
        data = synthetic() if chosen.smoke else uci.load(name, chosen.data)
        for model in chosen.models:
            run_setting(chosen.out, data, model, layers, width, recipe, **options)
    print(show(rows.table9(chosen.out), "Classification: test error and mean negative log-likelihood."))
    return 0


if __name__ == "__main__":
    sys.exit(main())
