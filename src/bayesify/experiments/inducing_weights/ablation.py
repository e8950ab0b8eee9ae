"""The ablation over M, the cap on lambda and the cap on U's spread (the paper's figure 4), on a reduced problem.

    python -m bayesify.experiments.inducing_weights.ablation [--num-train 5000] [--epochs 20] [--out DIR] [--smoke]

The paper varies them on a ResNet-18 and CIFAR-10 and shows a figure without numbers. Here it is the small ResNet of
`classification` on the first images of Fashion-MNIST, one change at a time from its settings.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bayesify import metrics
from bayesify.datasets import images
from bayesify.experiments import records
from bayesify.experiments.inducing_weights import predictions
from bayesify.experiments.inducing_weights.classification import SMOKE, Normalization
from bayesify.experiments.inducing_weights.systems import SYSTEMS, Recipe, train
from bayesify.experiments.tables import number, table

SIZES, LAMBDAS, STDS = (16, 32, 64, 128), (0.0, 0.03, 0.1, 0.3), (0.0, 0.1, 0.3)
"""Values of the paper (appendix J.2)."""


def variants(recipe: Recipe, sizes: Sequence[int] = SIZES) -> Iterator[tuple[str, Recipe]]:
    """Systems and settings, each a change of one thing: M, `max_lambda` or `max_std`."""
    for size in sizes:
        yield "ffg_u", replace(recipe, inducing=size)
        yield "ensemble_u", replace(recipe, inducing=size)
    for cap in LAMBDAS:
        yield "ffg_u", replace(recipe, max_lambda=cap)
        yield "ensemble_u", replace(recipe, ensemble_max_lambda=cap)
    for cap in STDS:
        yield "ffg_u", replace(recipe, max_std=cap)


def run(
    data: images.Images, recipe: Recipe, sizes: Sequence[int], device: torch.device, seed: int
) -> list[dict[str, Any]]:
    """Accuracy, NLL, ECE and Brier score of every variant; equal variants are trained once.

    Args:
        data: Training and test images.
        recipe: What is varied.
        sizes: M.
        device: Where to train.
        seed: Of everything random.
    """
    scale = Normalization(data.train_images)
    x, x_test = scale(data.train_images, device), scale(data.test_images, device)
    y, y_test = (torch.from_numpy(part.astype(np.int64)) for part in (data.train_labels, data.test_labels))
    known: dict[tuple[Any, ...], dict[str, Any]] = {}
    for name, variant in variants(recipe, sizes):
        changed = variant.max_lambda if name == "ffg_u" else variant.ensemble_max_lambda
        key = (name, variant.inducing, changed, variant.max_std if name == "ffg_u" else None)
        if key in known:
            continue
        network, _ = train(SYSTEMS[name], variant, x, y.to(device), num_classes=int(y.max()) + 1, seed=seed)
        made = predictions.predict([network], x_test, variant.prediction_draws, seed)
        known[key] = {
            "system": name,
            "inducing": variant.inducing,
            "max_lambda": changed,
            "max_std": key[3],
            **metrics.evaluate(made, y_test),
        }
        print(f"{SYSTEMS[name].title} M={variant.inducing} max_lambda={changed} max_std={key[3]}", flush=True)
    return list(known.values())


def summarize(rows: Sequence[dict[str, Any]], dataset: str) -> str:
    """The table of what `run` found."""
    cells = [
        [
            SYSTEMS[row["system"]].title,
            str(row["inducing"]),
            number(row["max_lambda"], 2),
            number(row["max_std"], 2),
            number(100 * row["accuracy"], 2),
            number(row["nll"]),
            number(100 * row["ece"], 2),
        ]
        for row in rows
    ]
    title = f"Ablation on {dataset}; the paper shows its own on CIFAR-10 as a figure without numbers."
    return table(["system", "M", "max_lambda", "max_std", "acc %", "nll", "ece %"], cells, title)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the ablation from the command line."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--data", help="folder of the data; BAYESIFY_DATA if left out")
    parser.add_argument("--out", type=Path, default=Path("bayesify-report") / "ablation")
    parser.add_argument("--smoke", action="store_true", help="tiny synthetic images, seconds on a CPU")
    parser.add_argument("--num-train", type=int, default=5000)
    parser.add_argument("--epochs", type=int, default=Recipe().epochs)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    chosen = parser.parse_args(given)
    device, recipe = torch.device("cpu"), replace(SMOKE, epochs=1)
    sizes: Sequence[int] = (2, 4)
    data = images.synthetic(100, 100)
    if not chosen.smoke:
        device, sizes = torch.device(chosen.device), SIZES
        data = images.load("fashion_mnist", chosen.data).first(chosen.num_train)
        recipe = Recipe(epochs=chosen.epochs, batch=100)
    rows = run(data, recipe, sizes, device, chosen.seed)
    print(summarize(rows, data.name))
    chosen.out.mkdir(parents=True, exist_ok=True)
    facts = records.facts("bayesify.experiments.inducing_weights.ablation", given)
    records.write(chosen.out / "ablation.json", {**facts, "settings": asdict(recipe), "rows": rows})
    return 0


if __name__ == "__main__":
    sys.exit(main())
