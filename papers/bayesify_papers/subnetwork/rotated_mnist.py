"""Rotated MNIST from 0 to 180 degrees (section 5.3, figure 4, tables 1 to 14): a ResNet-18 and posteriors around it.

    python -m bayesify_papers.subnetwork.rotated_mnist --out DIR
    python -m bayesify_papers.subnetwork.rotated_mnist --evaluate DIR

The first command trains each system, writes its predictions to DIR, and scores them. The second command only scores. A run resumes
where an earlier run ended. Data come from the folder in BAYESIFY_DATA.

Each Laplace posterior predicts with several prior precisions: the paper's; the best on validation images; the smallest that costs
no more on validation images than the paper's own posterior; and the best on validation images rotated by random angles. The
curvature comes from 10,000 training images and is scaled to all of them. As in the authors' code, training images are shifted by up
to two pixels, and the subnetwork has the weights (no biases, no normalization) that vary most while SGD continues from the MAP
estimate.
"""

import argparse
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from bayesify.datasets import images
from bayesify.datasets.rotations import rotate
from bayesify_papers.shared.program import Program, fill
from bayesify_papers.shared.published import published
from bayesify_papers.shared.sources import noise
from bayesify_papers.subnetwork import image_scores, rows, shifted_images
from bayesify_papers.subnetwork.image_systems import DEFAULT_SYSTEMS, SYSTEMS, Settings
from bayesify_papers.subnetwork.image_training import Recipe
from bayesify_papers.subnetwork.shifted_images import spread_out

ANGLES: tuple[int, ...] = published("subnetwork")["angles"]
SMOKE = (
    Recipe(epochs=1, batch=50, depth=1, width=2),
    Settings(
        size=30,
        num_fit=20,
        num_select=20,
        select_epochs=1,
        select_batch=50,
        num_validation=20,
        num_tune=20,
        grid=(0.1, 10.0),
        draws=2,
        members=2,
        apart_batch=50,
        swag_epochs=2,
        vogn_epochs=1,
        chunk=20,
        memory="256MiB",
    ),
)
"""Settings of the quick run, which takes seconds."""

REQUIREMENT = {"angle": 60, "nats": 1.5, "accuracy": 0.01}
"""Required gain of the subnetwork's log-likelihood over MAP's at an angle, and largest accepted loss of accuracy."""


def turn_at_random(pictures: np.ndarray, seed: int = 0) -> np.ndarray:
    """Images rotated by the angles of the test sets, an equal number by each angle."""
    turned = np.empty_like(pictures)
    which = np.random.default_rng(seed).permutation(len(pictures)) % len(ANGLES)
    for place, angle in enumerate(ANGLES):
        turned[which == place] = rotate(pictures[which == place], angle)
    return turned


def make_task(
    data: images.Images, outside: Mapping[str, np.ndarray], angles: Sequence[int], num_test: int
) -> shifted_images.Task:
    """The task: test images rotated by each angle, and out-of-distribution images."""
    pictures, labels = spread_out(num_test, data.test_images, data.test_labels)
    sets = {f"shifted/{angle}": rotate(pictures, angle) for angle in angles}
    sets |= {f"ood/{name}": others[:num_test] for name, others in outside.items()}
    return shifted_images.Task(data, turn_at_random, sets, labels)


def requirement(scores: Mapping[str, Any]) -> list[str]:
    """Lines of text: the gain of each subnetwork posterior over MAP at 60 degrees."""
    angle = str(REQUIREMENT["angle"])
    if "map" not in scores or angle not in scores["map"]["shifted"]:
        return []
    plain, lines = scores["map"]["shifted"][angle], []
    for name, system in scores.items():
        if not name.startswith("subnetwork"):
            continue
        own = system["shifted"][angle]
        better, loss = plain["nll"] - own["nll"], plain["accuracy"] - own["accuracy"]
        met = "met" if better >= REQUIREMENT["nats"] and loss <= REQUIREMENT["accuracy"] else "NOT met"
        lines.append(
            f"{name} at {angle} degrees: log-likelihood {better:+.2f} nats above MAP's (paper: +2.19), "
            f"accuracy {-100 * loss:+.2f} points; at least +1.5 and -1: {met}"
        )
    return lines


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the experiment from the command line."""
    chosen = image_program(__doc__, __spec__, "rotated-mnist", Recipe(), Settings()).read(arguments)
    if chosen.evaluate is not None:
        return image_scores.evaluate(chosen.evaluate, rows.rotated_mnist, requirement)
    if chosen.smoke:
        data = images.synthetic(100, 20, side=8)
        task = make_task(data, {"noise": noise(data.test_images)}, (0, 60), 20)
    else:
        data = images.load("mnist", chosen.data).first(chosen.num_train)
        outside = {name: images.load(name, chosen.data).test_images for name in ("fashion_mnist", "notmnist")}
        task = make_task(data, outside, ANGLES, chosen.num_test)
    train(chosen, task)
    return image_scores.evaluate(chosen.out, rows.rotated_mnist, requirement)


def image_program(doc: str | None, spec: Any, folder: str, recipe: Recipe, settings: Settings) -> Program:
    """The options of the experiments on images."""
    program = Program(doc, spec, folder).choice("systems", SYSTEMS, list(DEFAULT_SYSTEMS))
    program.option("data", "evaluate", "seed", "num_train", "device", num_test=2500)
    return program.settings(recipe, settings)


def train(chosen: argparse.Namespace, task: shifted_images.Task, **recipe: Any) -> None:
    """Run the chosen systems on a task.

    Args:
        chosen: Options that `image_program` read.
        recipe: Settings of the recipe that a quick run changes.
    """
    how, settings, device = fill(Recipe, chosen), fill(Settings, chosen), chosen.device
    if chosen.smoke:
        how, settings, device = replace(SMOKE[0], **recipe), SMOKE[1], "cpu"
    options = {"systems": chosen.systems, "seed": chosen.seed, "device": device, "facts": chosen.facts}
    shifted_images.run(chosen.out, task, how, settings, **options)


if __name__ == "__main__":
    sys.exit(main())
