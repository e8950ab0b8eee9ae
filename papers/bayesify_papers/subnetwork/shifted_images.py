"""Predictions of all systems for shifted images, stored set by set."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bayesify.datasets.images import Images
from bayesify_papers.shared import predictions, records
from bayesify_papers.shared.predictions import StoredPrediction
from bayesify_papers.shared.sources import Normalization, as_labels
from bayesify_papers.subnetwork.image_systems import SYSTEMS, Settings, Workshop
from bayesify_papers.subnetwork.image_training import Recipe


@dataclass(frozen=True)
class Task:
    """Images on which systems are trained, and images that they predict.

    Args:
        data: Training images. The test images of this set are not used.
        validation_shift: Function from validation images, uint8, to shifted images.
        sets: Images to predict by name, uint8. `"shifted/..."` have the labels `labels`; `"ood/..."` have no labels.
        labels: Labels of every shifted set.
    """

    data: Images
    validation_shift: Any
    sets: Mapping[str, np.ndarray]
    labels: np.ndarray


def spread_out(count: int, *arrays: np.ndarray) -> tuple[np.ndarray, ...]:
    """Equally spaced rows of arrays, because the first half of MNIST's test images differs from the second half."""
    rows = np.linspace(0, len(arrays[0]) - 1, min(count, len(arrays[0]))).round().astype(int)
    return tuple(array[rows] for array in arrays)


def run(
    folder: Path,
    task: Task,
    recipe: Recipe,
    settings: Settings,
    *,
    systems: Sequence[str],
    seed: int = 0,
    device: torch.device | str = "cpu",
    facts: Mapping[str, Any] | None = None,
) -> None:
    """Train systems and write their predictions. Predictions in the folder with the same settings are not made again.

    Several processes may run different systems in one folder, once the folder has the MAP estimate from which most systems start.

    Args:
        folder: Folder for one `.npz` per system, `labels.npz`, `run.json` and the trained networks.
        systems: Names of `SYSTEMS`.

    Raises:
        ValueError: If the folder has results with other settings.
    """
    folder.mkdir(parents=True, exist_ok=True)
    device = torch.device(device)
    path = folder / "run.json"
    about = {"dataset": task.data.name, "seed": seed, "recipe": asdict(recipe), "settings": asdict(settings)}
    about |= {"num_train": len(task.data.train_images), "num_test": len(task.labels), "sets": list(task.sets)}

    def known() -> dict[str, Any]:
        """Results so far, including those of other processes that share the folder."""
        return records.begin_run(path, about, facts, systems={})

    known()
    records.write_arrays(folder / "labels.npz", labels=task.labels)
    shop, scale = _workshop(folder, task, recipe, settings, seed, device)
    for name in systems:
        if any(entry.get("system") == name for entry in known()["systems"].values()):
            print(f"{name}: predictions already exist", flush=True)
            continue
        made: dict[str, Any] = {}
        for variant in SYSTEMS[name](shop):
            start = time.perf_counter()
            found = {
                set_name: StoredPrediction.of(variant.predict(scale(pictures, device)))
                for set_name, pictures in task.sets.items()
            }
            predictions.write(folder / f"{variant.name}.npz", found)
            seconds = round(time.perf_counter() - start, 1)
            made[variant.name] = {"system": name, **variant.facts, "predict_seconds": seconds}
            numbers = {key: value for key, value in made[variant.name].items() if isinstance(value, float)}
            shown = ", ".join(f"{key} {value:g}" for key, value in numbers.items())
            print(f"{variant.name}: {shown}\n{_brief(found, task.labels)}", flush=True)
        content = known()
        content["systems"] |= made
        records.write(path, content)


def _workshop(
    folder: Path, task: Task, recipe: Recipe, settings: Settings, seed: int, device: torch.device
) -> tuple[Workshop, Normalization]:
    data, aside = task.data, settings.num_validation
    order = np.random.default_rng(0).permutation(len(data.train_images))
    train, held = order[aside:], order[:aside]
    scale, labels = Normalization(data.train_images[train]), as_labels(data.train_labels)
    held_images, held_labels = data.train_images[held], labels[held].to(device)
    shop = Workshop(
        folder=folder,
        x=scale(data.train_images[train], device),
        y=labels[train].to(device),
        validation=(scale(held_images, device), held_labels),
        shifted=(scale(task.validation_shift(held_images), device), held_labels),
        num_classes=int(data.train_labels.max()) + 1,
        recipe=recipe,
        settings=replace(settings, num_fit=min(settings.num_fit, len(train))),
        seed=seed,
    )
    return shop, scale


def _brief(found: Mapping[str, StoredPrediction], labels: np.ndarray) -> str:
    """Lines with the log-likelihood and accuracy of each shifted set."""
    lines, targets = [], as_labels(labels)
    for name, prediction in found.items():
        if name.startswith("shifted/"):
            ll, accuracy = float(prediction.log_prob(targets).mean()), (prediction.labels == targets).double().mean()
            lines.append(f"  {name.partition('/')[2]}: log-likelihood {ll:.3f}, accuracy {accuracy:.4f}")
    return "\n".join(lines)
