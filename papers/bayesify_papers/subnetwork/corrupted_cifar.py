"""Corrupted CIFAR-10 (section 5.3, figure 4, tables 1 and 15 to 20): a ResNet-18 and the posteriors around it.

    python -m bayesify_papers.subnetwork.corrupted_cifar --out DIR
    python -m bayesify_papers.subnetwork.corrupted_cifar --evaluate DIR

Systems and options are those of `rotated_mnist`. The paper averages over 16 corruptions, we average over six (`COMPARED_KINDS`).
The paper's out-of-distribution images are SVHN. We use SVHN if it is in the folder of the data or can be downloaded, and always
Fashion-MNIST and notMNIST in three channels.
"""

import sys
from collections.abc import Mapping, Sequence

import numpy as np

from bayesify.datasets import corruptions, images
from bayesify_papers.shared.sources import COMPARED_KINDS, available, like, noise
from bayesify_papers.subnetwork import image_scores, rows, shifted_images
from bayesify_papers.subnetwork.image_systems import Settings
from bayesify_papers.subnetwork.image_training import Recipe
from bayesify_papers.subnetwork.rotated_mnist import image_program, train
from bayesify_papers.subnetwork.shifted_images import spread_out

RECIPE = Recipe(epochs=300, drops=(0.5, 0.75), crops=4, flips=True)
"""The schedule of table 21. Augmentation is in the authors' code but not in the text."""


def corrupt_at_random(pictures: np.ndarray, seed: int = 0) -> np.ndarray:
    """Corrupted images, a sixth of them at each severity from 0 to 5. The kinds of corruption take turns."""
    corrupted, generator = pictures.copy(), np.random.default_rng(seed)
    severity = generator.permutation(len(pictures)) % 6
    kind = generator.permutation(len(pictures)) % len(COMPARED_KINDS)
    for place, name in enumerate(COMPARED_KINDS):
        for strength in range(1, 6):
            chosen = (kind == place) & (severity == strength)
            if chosen.any():
                corrupted[chosen] = corruptions.corrupt(pictures[chosen], name, strength, seed=seed)
    return corrupted


def make_task(
    data: images.Images, outside: Mapping[str, np.ndarray], severities: Sequence[int], num_test: int
) -> shifted_images.Task:
    """The task: clean and corrupted test images, and out-of-distribution images."""
    pictures, labels = spread_out(num_test, data.test_images, data.test_labels)
    sets = {"shifted/none-0": pictures}
    for kind in COMPARED_KINDS:
        for severity in severities:
            sets[f"shifted/{kind}-{severity}"] = corruptions.corrupt(pictures, kind, severity)
    sets |= {f"ood/{name}": like(others[:num_test], pictures) for name, others in outside.items()}
    return shifted_images.Task(data, corrupt_at_random, sets, labels)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the experiment from the command line."""
    program = image_program(__doc__, __spec__, "corrupted-cifar", RECIPE, Settings(vogn_epochs=300))
    chosen = program.read(arguments)
    if chosen.evaluate is not None:
        return image_scores.evaluate(chosen.evaluate, rows.corrupted_cifar, lambda scores: [])
    if chosen.smoke:
        data = images.synthetic(100, 20, side=8)
        task = make_task(data, {"noise": noise(data.test_images)}, (5,), 20)
    else:
        data = images.load("cifar10", chosen.data).first(chosen.num_train)
        outside = available(("svhn", "fashion_mnist", "notmnist"), chosen.data)
        task = make_task(data, outside, (1, 2, 3, 4, 5), chosen.num_test)
    train(chosen, task, flips=True)
    return image_scores.evaluate(chosen.out, rows.corrupted_cifar, lambda scores: [])


if __name__ == "__main__":
    sys.exit(main())
