"""Corrupted CIFAR-10 (section 5.3, figure 4, tables 1 and 15 to 20): a ResNet-18 and the posteriors around it.

    python -m bayesify_papers.subnetwork.corrupted_cifar --out DIR
    python -m bayesify_papers.subnetwork.corrupted_cifar --evaluate DIR

The same systems and the same options as `rotated_mnist`. The paper averages over 16 corruptions, we over the six that
`datasets.corruptions` computes. Against images from elsewhere the paper uses SVHN: it is used here where it is in the
folder of the data or can be downloaded; Fashion-MNIST and notMNIST in three channels are always there.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from bayesify.datasets import corruptions, images
from bayesify_papers import records
from bayesify_papers.subnetwork import image_scores, published, rotated_mnist, shifted_images
from bayesify_papers.subnetwork.image_systems import Settings
from bayesify_papers.subnetwork.image_training import Recipe

RECIPE = Recipe(epochs=300, drops=(0.5, 0.75), crops=True)
"""The schedule of table 21. Flips and crops are our addition: the paper does not speak of augmentation."""


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


def like(pictures: np.ndarray, reference: np.ndarray) -> np.ndarray:
    """Pictures with the channels and the size of others: gray is repeated, a smaller picture gets a black border."""
    channels, missing = reference.shape[1], reference.shape[2] - pictures.shape[2]
    if pictures.shape[1] != channels:
        pictures = np.repeat(pictures[:, :1], channels, axis=1)
    border = (missing // 2, missing - missing // 2)
    return np.pad(pictures, ((0, 0), (0, 0), border, border))


def make_task(
    data: images.Images, outside: Mapping[str, np.ndarray], severities: Sequence[int], num_test: int
) -> shifted_images.Task:
    """The test images as they are and under each corruption, and images from elsewhere."""
    pictures = data.test_images[:num_test]
    sets = {"shifted/none-0": pictures}
    for kind in corruptions.SEVERITIES:
        for severity in severities:
            sets[f"shifted/{kind}-{severity}"] = corruptions.corrupt(pictures, kind, severity)
    sets |= {f"ood/{name}": like(others[:num_test], pictures) for name, others in outside.items()}
    return shifted_images.Task(data, corrupt_at_random, sets, data.test_labels[:num_test])


def evaluate(folder: Path) -> int:
    """Score what a run wrote, print the tables and write `results.json`."""
    scores, about = image_scores.score(folder), json.loads((folder / "run.json").read_text())
    print(tables(scores, about["dataset"]))
    records.write(folder / "results.json", {**about, "scores": scores})
    return 0


def tables(scores: Mapping[str, Any], dataset: str) -> str:
    """All tables as text: means over corruptions by severity."""
    sets = list(next(iter(scores.values()))["shifted"])
    severities = sorted({name.rpartition("-")[2] for name in sets})
    columns = {severity: [name for name in sets if name.endswith(f"-{severity}")] for severity in severities}
    theirs: Mapping[str, Any] = {}
    if dataset == "cifar10":
        theirs = {
            name: {key: [values[int(severity)] for severity in severities] for key, values in system.items()}
            for name, system in published.CORRUPTED_CIFAR10.items()
        }
    kinds = ", ".join(corruptions.SEVERITIES)
    source = f"means over {kinds}; the paper's rows are its tables 15 to 20, means over 16 corruptions"
    names = {"ll": "Log-likelihood", "error": "Error", "ece": "Expected calibration error", "brier": "Brier score"}
    texts = [
        image_scores.shift_table(scores, key, columns, theirs, f"{name} by severity, {source}.")
        for key, name in names.items()
    ]
    return "\n\n".join([*texts, image_scores.ood_table(scores, dataset, "SVHN"), image_scores.rejection_table(scores)])


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the experiment from the command line."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    made = rotated_mnist.parser(RECIPE, Settings(vogn_epochs=300), "corrupted-cifar")
    made.description = (__doc__ or "").splitlines()[0]
    chosen = made.parse_args(given)
    if chosen.evaluate is not None:
        return evaluate(chosen.evaluate)
    if chosen.smoke:
        recipe, settings = rotated_mnist.SMOKE
        recipe, data, device = replace(recipe, crops=True), images.synthetic(200, 60), "cpu"
        noise = np.random.default_rng(0).integers(0, 256, data.test_images.shape, dtype=np.uint8)
        task = make_task(data, {"noise": noise}, (5,), 60)
    else:
        recipe = rotated_mnist.from_arguments(chosen, Recipe)
        settings, device = rotated_mnist.from_arguments(chosen, Settings), chosen.device
        data = images.load("cifar10", chosen.data).first(chosen.num_train)
        task = make_task(data, _outside(chosen.data), (1, 2, 3, 4, 5), chosen.num_test)
    facts = records.facts("bayesify_papers.subnetwork.corrupted_cifar", given)
    shifted_images.run(
        chosen.out, task, recipe, settings, systems=chosen.systems, seed=chosen.seed, device=device, facts=facts
    )
    if find_spec("torchmetrics") is None:
        print(f"torchmetrics is not installed here; score with: --evaluate {chosen.out}")
        return 0
    return evaluate(chosen.out)


def _outside(folder: str | None) -> dict[str, np.ndarray]:
    """SVHN where it can be had, and gray images."""
    found: dict[str, np.ndarray] = {}
    for name in ("svhn", "fashion_mnist", "notmnist"):
        try:
            found[name] = images.load(name, folder).test_images
        except (FileNotFoundError, ImportError) as missing:
            print(f"{name} is left out: {missing}")
    return found


if __name__ == "__main__":
    sys.exit(main())
