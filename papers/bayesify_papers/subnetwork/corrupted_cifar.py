"""Corrupted CIFAR-10 (section 5.3, figure 4, tables 1 and 15 to 20): a ResNet-18 and the posteriors around it.

    python -m bayesify_papers.subnetwork.corrupted_cifar --out DIR
    python -m bayesify_papers.subnetwork.corrupted_cifar --evaluate DIR

The same systems and the same options as `rotated_mnist`. The paper averages over 16 corruptions, we over the six that
`datasets.corruptions` computes. As other images the paper uses SVHN: it is used here where it is in the
folder of the data or can be downloaded; Fashion-MNIST and notMNIST in three channels are always there.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from bayesify.datasets import corruptions, images
from bayesify_papers.shared import records
from bayesify_papers.shared.sources import available, like, noise
from bayesify_papers.subnetwork import image_scores, shifted_images
from bayesify_papers.subnetwork.image_systems import Settings
from bayesify_papers.subnetwork.image_training import Recipe
from bayesify_papers.subnetwork.rotated_mnist import image_program, train_and_evaluate
from bayesify_papers.subnetwork.shifted_images import spread_out

RECIPE = Recipe(epochs=300, drops=(0.5, 0.75), crops=4, flips=True)
"""The schedule of table 21. The text does not speak of augmentation, the authors' code has it."""


def corrupt_at_random(pictures: np.ndarray, seed: int = 0) -> np.ndarray:
    """Images of which each sixth is corrupted at one severity from 0 to 5, the kinds taking turns."""
    corrupted, generator = pictures.copy(), np.random.default_rng(seed)
    severity = generator.permutation(len(pictures)) % 6
    kind = generator.permutation(len(pictures)) % len(corruptions.SEVERITIES)
    for place, name in enumerate(corruptions.SEVERITIES):
        for strength in range(1, 6):
            chosen = (kind == place) & (severity == strength)
            if chosen.any():
                corrupted[chosen] = corruptions.corrupt(pictures[chosen], name, strength, seed=seed)
    return corrupted


def make_task(
    data: images.Images, outside: Mapping[str, np.ndarray], severities: Sequence[int], num_test: int
) -> shifted_images.Task:
    """The test images as they are and under each corruption, and other images."""
    pictures, labels = spread_out(num_test, data.test_images, data.test_labels)
    sets = {"shifted/none-0": pictures}
    for kind in corruptions.SEVERITIES:
        for severity in severities:
            sets[f"shifted/{kind}-{severity}"] = corruptions.corrupt(pictures, kind, severity)
    sets |= {f"ood/{name}": like(others[:num_test], pictures) for name, others in outside.items()}
    return shifted_images.Task(data, corrupt_at_random, sets, labels)


def evaluate(folder: Path) -> int:
    """Score what a run wrote, print the tables and write `results.json`."""
    scores, about = image_scores.score(folder), records.read(folder / "run.json")
    print(tables(scores, about["dataset"]))
    records.write(folder / "results.json", {**about, "scores": scores})
    return 0


def tables(scores: Mapping[str, Any], dataset: str) -> str:
    """All tables as text: means over corruptions by severity."""
    sets = list(next(iter(scores.values()))["shifted"])
    severities = sorted({name.rpartition("-")[2] for name in sets})
    columns = {severity: [name for name in sets if name.endswith(f"-{severity}")] for severity in severities}
    source = f"means over {', '.join(corruptions.SEVERITIES)}; the paper's rows are its tables 15 to 20, means over 16 corruptions"
    places = {severity: int(severity) for severity in severities}
    return image_scores.tables(scores, dataset, "SVHN", columns, places, f"by severity, {source}.")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the experiment from the command line."""
    program = image_program(__doc__, __spec__, "corrupted-cifar", RECIPE, Settings(vogn_epochs=300))
    chosen = program.read(arguments)
    if chosen.evaluate is not None:
        return evaluate(chosen.evaluate)
    if chosen.smoke:
        data = images.synthetic(100, 20, side=8)
        task = make_task(data, {"noise": noise(data.test_images)}, (5,), 20)
    else:
        data = images.load("cifar10", chosen.data).first(chosen.num_train)
        outside = available(("svhn", "fashion_mnist", "notmnist"), chosen.data)
        task = make_task(data, outside, (1, 2, 3, 4, 5), chosen.num_test)
    return train_and_evaluate(chosen, task, evaluate, flips=True)


if __name__ == "__main__":
    sys.exit(main())
