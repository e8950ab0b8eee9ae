"""Rotated MNIST (section 5.3, figure 4, tables 1 to 14): a ResNet-18 and the posteriors around it, from 0 to 180 degrees.

    python -m bayesify_papers.subnetwork.rotated_mnist --out DIR
    python -m bayesify_papers.subnetwork.rotated_mnist --evaluate DIR

The first command trains, writes each system's predictions to DIR as soon as they are there, and scores them where torchmetrics is
installed; the second only scores. A run goes on where an earlier one ended. Data come from the folder that BAYESIFY_DATA names.

Each Laplace posterior predicts with several prior precisions: the paper's, the best one on validation images, the smallest one
that costs no more on validation images than the paper's own posterior does, and the best one on validation images turned by random
angles. Curvature is that of 10,000 training images, scaled to all of them.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import fields
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bayesify.datasets import images
from bayesify.datasets.rotations import rotate
from bayesify_papers import records
from bayesify_papers.subnetwork import image_scores, published, shifted_images
from bayesify_papers.subnetwork.image_systems import DEFAULT, SYSTEMS, Settings
from bayesify_papers.subnetwork.image_training import Recipe

SMOKE = (
    Recipe(epochs=2, batch=50, depth=1, width=4),
    Settings(
        size=30,
        num_fit=40,
        num_select=20,
        num_validation=40,
        num_tune=20,
        grid=(0.1, 10.0),
        draws=2,
        members=2,
        apart_batch=50,
        swag_epochs=2,
        vogn_epochs=1,
        chunk=30,
        memory="256MiB",
    ),
)
"""Settings under which everything runs in seconds."""

REQUIREMENT = {"angle": 60, "nats": 1.5, "accuracy": 0.01}
"""How much better than MAP's the subnetwork's log-likelihood should be at an angle, and how far its accuracy may lie below."""


def turn_at_random(pictures: np.ndarray, seed: int = 0) -> np.ndarray:
    """Images turned by the angles of the test sets, as many by each."""
    turned = np.empty_like(pictures)
    which = np.random.default_rng(seed).permutation(len(pictures)) % len(published.ANGLES)
    for place, angle in enumerate(published.ANGLES):
        turned[which == place] = rotate(pictures[which == place], angle)
    return turned


def make_task(
    data: images.Images, outside: Mapping[str, np.ndarray], angles: Sequence[int], num_test: int
) -> shifted_images.Task:
    """The test images turned by each angle, and images from elsewhere.

    Args:
        data: MNIST.
        outside: Images from elsewhere by name.
        angles: In degrees, 0 first.
        num_test: How many images of each set: the first ones.
    """
    pictures = data.test_images[:num_test]
    sets = {f"shifted/{angle}": rotate(pictures, angle) for angle in angles}
    sets |= {f"ood/{name}": others[:num_test] for name, others in outside.items()}
    return shifted_images.Task(data, turn_at_random, sets, data.test_labels[:num_test])


def evaluate(folder: Path) -> int:
    """Score what a run wrote, print the tables and write `results.json`."""
    scores, about = image_scores.score(folder), json.loads((folder / "run.json").read_text())
    print(tables(scores, about["dataset"]))
    lines = requirement(scores)
    print("\n" + "\n".join(lines))
    records.write(folder / "results.json", {**about, "scores": scores, "requirement": lines})
    return 0


def tables(scores: Mapping[str, Any], dataset: str) -> str:
    """All tables as text."""
    angles = list(next(iter(scores.values()))["shifted"])
    columns = {angle: [angle] for angle in angles}
    theirs: Mapping[str, Any] = {}
    if dataset == "mnist":
        places = [published.ANGLES.index(int(angle)) for angle in angles]
        theirs = {
            name: {key: [values[place] for place in places] for key, values in system.items()}
            for name, system in published.ROTATED_MNIST.items()
        }
    names = {"ll": "Log-likelihood", "error": "Error", "ece": "Expected calibration error", "brier": "Brier score"}
    texts = [
        image_scores.shift_table(
            scores, key, columns, theirs, f"{name} by angle; the paper's rows are its tables 2 to 14."
        )
        for key, name in names.items()
    ]
    return "\n\n".join(
        [*texts, image_scores.ood_table(scores, dataset, "Fashion-MNIST"), image_scores.rejection_table(scores)]
    )


def requirement(scores: Mapping[str, Any]) -> list[str]:
    """How far each subnetwork posterior is above MAP at 60 degrees, in words."""
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
            f"{image_scores.title(name)} at {angle} degrees: log-likelihood {better:+.2f} nats above MAP's (paper: +2.19), "
            f"accuracy {-100 * loss:+.2f} points; at least +1.5 and -1: {met}"
        )
    return lines


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the experiment from the command line."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    chosen = parser().parse_args(given)
    if chosen.evaluate is not None:
        return evaluate(chosen.evaluate)
    if chosen.smoke:
        recipe, settings = SMOKE
        data = images.synthetic(200, 60)
        noise = np.random.default_rng(0).integers(0, 256, data.test_images.shape, dtype=np.uint8)
        task, device = make_task(data, {"noise": noise}, (0, 60), 60), "cpu"
    else:
        recipe, settings, device = from_arguments(chosen, Recipe), from_arguments(chosen, Settings), chosen.device
        data = images.load("mnist", chosen.data).first(chosen.num_train)
        outside = {name: images.load(name, chosen.data).test_images for name in ("fashion_mnist", "notmnist")}
        task = make_task(data, outside, published.ANGLES, chosen.num_test)
    facts = records.facts("bayesify_papers.subnetwork.rotated_mnist", given)
    shifted_images.run(
        chosen.out, task, recipe, settings, systems=chosen.systems, seed=chosen.seed, device=device, facts=facts
    )
    if find_spec("torchmetrics") is None:
        print(f"torchmetrics is not installed here; score with: --evaluate {chosen.out}")
        return 0
    return evaluate(chosen.out)


def from_arguments(chosen: argparse.Namespace, kind: type[Any]) -> Any:
    """A dataclass whose numbers come from the command line."""
    return kind(**{field.name: getattr(chosen, field.name) for field in fields(kind) if hasattr(chosen, field.name)})


def add_options(made: argparse.ArgumentParser, *defaults: Any) -> None:
    """An option for each number, text or choice of some dataclasses."""
    for default in defaults:
        for field in fields(default):
            value = getattr(default, field.name)
            name = f"--{field.name.replace('_', '-')}"
            if isinstance(value, bool):
                made.add_argument(name, action=argparse.BooleanOptionalAction, default=value)
            elif isinstance(value, tuple):
                made.add_argument(name, nargs="*", type=type(value[0]), default=value)
            else:
                made.add_argument(name, type=type(value), default=value)


def parser(
    recipe: Recipe | None = None, settings: Settings | None = None, folder: str = "rotated-mnist"
) -> argparse.ArgumentParser:
    """The options of the experiments on images."""
    made = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    made.add_argument("--data", help="folder of the data; BAYESIFY_DATA if left out")
    made.add_argument("--out", type=Path, default=Path("bayesify-report") / folder)
    made.add_argument("--evaluate", type=Path, metavar="DIR", help="only score what a run wrote to DIR")
    made.add_argument("--smoke", action="store_true", help="tiny synthetic images, seconds on a CPU")
    made.add_argument("--systems", nargs="+", choices=list(SYSTEMS), default=list(DEFAULT))
    made.add_argument("--seed", type=int, default=0)
    made.add_argument("--num-train", type=int, help="only the first so many training images")
    made.add_argument("--num-test", type=int, default=2000, help="images of each test set")
    made.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    add_options(made, recipe or Recipe(), settings or Settings())
    return made


if __name__ == "__main__":
    sys.exit(main())
