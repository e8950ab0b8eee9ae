"""Image classification: accuracy, calibration, other image sets, corrupted images (the paper's tables 3, 5, 11 and 12).

    python -m bayesify.experiments.inducing_weights.classification --out DIR
    python -m bayesify.experiments.inducing_weights.classification --evaluate DIR

The first command trains, writes each system's predictions to DIR as soon as they are there, and scores them where
torchmetrics is installed; the second only scores. Data come from the folder that BAYESIFY_DATA names.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bayesify.datasets import corruptions, images
from bayesify.experiments import records
from bayesify.experiments.inducing_weights import predictions, scores
from bayesify.experiments.inducing_weights.systems import SYSTEMS, Recipe, train
from bayesify.network import BayesianNetwork
from bayesify.weights import count_parameters

OUTSIDE = {
    "fashion_mnist": ("mnist", "notmnist"),
    "mnist": ("fashion_mnist", "notmnist"),
    "cifar10": ("fashion_mnist", "notmnist"),
}
"""Image sets from elsewhere for each training set; for CIFAR-10 they are padded and get three channels."""

CORRUPTED_IMAGES = 2000
"""Test images that are corrupted: the first so many."""

WHOLE = ("epochs", "batch", "depth", "width", "inducing", "members", "ensemble_draws")
FRACTIONS = (
    "learning_rate",
    "inducing_learning_rate",
    "spread_learning_rate",
    "max_lambda",
    "max_std",
    "ensemble_max_lambda",
    "mean_field_max_std",
)
"""Settings of `Recipe` that the command line takes."""

SMOKE = Recipe(epochs=3, batch=50, width=4, inducing=4, members=2, ensemble_draws=2, prediction_draws=3)
"""Settings under which everything runs in seconds."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the experiment from the command line."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    chosen = _parser().parse_args(given)
    if chosen.evaluate is not None:
        return evaluate(chosen.evaluate)
    recipe, data, outside = SMOKE, images.synthetic(), {"noise": _noise(images.synthetic())}
    if not chosen.smoke:
        options: dict[str, Any] = {name: getattr(chosen, name) for name in (*WHOLE, *FRACTIONS)}
        recipe = Recipe(precision="float32" if chosen.device == "cpu" else chosen.precision, **options)
        data = images.load(chosen.dataset, chosen.data).first(chosen.num_train)
        outside = {name: images.load(name, chosen.data).test_images for name in OUTSIDE[chosen.dataset]}
    chosen.out.mkdir(parents=True, exist_ok=True)
    run(
        chosen.out,
        data,
        outside,
        recipe,
        systems=chosen.systems,
        seed=chosen.seed,
        device=torch.device("cpu" if chosen.smoke else chosen.device),
        corrupted_images=60 if chosen.smoke else chosen.corrupted_images,
        severities=(5,) if chosen.smoke else (1, 2, 3, 4, 5),
        facts=records.facts("bayesify.experiments.inducing_weights.classification", given),
    )
    if find_spec("torchmetrics") is None:
        print(f"torchmetrics is not installed here; score with: --evaluate {chosen.out}")
        return 0
    return evaluate(chosen.out)


def run(
    folder: Path,
    data: images.Images,
    outside: dict[str, np.ndarray],
    recipe: Recipe,
    *,
    systems: Sequence[str] = tuple(SYSTEMS),
    seed: int = 0,
    device: torch.device | str = "cpu",
    corrupted_images: int = CORRUPTED_IMAGES,
    severities: Sequence[int] = (1, 2, 3, 4, 5),
    facts: dict[str, Any] | None = None,
) -> None:
    """Train systems one after the other and write what they predict.

    Args:
        folder: Gets `labels.npz`, one `.npz` per system and `run.json`. What a former run of other systems
            left there stays.
        data: Training and test images.
        outside: Images from elsewhere by name, uint8.
        recipe: How to train.
        systems: Names from `SYSTEMS`.
        seed: Of everything random; network k of an ensemble has `seed + k`.
        device: Where to train.
        corrupted_images: How many test images are corrupted.
        severities: How strongly.
        facts: Goes into `run.json`.
    """
    device = torch.device(device)
    scale = Normalization(data.train_images)
    x = scale(data.train_images, device)
    y = torch.from_numpy(data.train_labels.astype(np.int64)).to(device)
    num_classes = int(data.train_labels.max()) + 1
    np.savez_compressed(folder / "labels.npz", test=data.test_labels)
    former = scores.read_run(folder)
    content: dict[str, Any] = {**(facts or {}), "dataset": data.name, "seed": seed, "settings": asdict(recipe)}
    for key in ("parameters", "seconds", "history"):
        content[key] = former.get(key, {}) if former.get("settings") == content["settings"] else {}
    plain: BayesianNetwork | None = None
    for name in systems:
        system, start = SYSTEMS[name], time.perf_counter()
        networks: list[BayesianNetwork] = []
        for index in range(system.count_networks(recipe)):
            if name == "ensemble_w" and index == 0 and plain is not None:
                networks.append(plain)
                continue
            network, history = train(system, recipe, x, y, num_classes=num_classes, seed=seed + index)
            networks.append(network)
            content["history"][name] = [
                {key: entry[key] for key in ("epoch", "nll", "kl", "kl_weight")} for entry in history
            ]
        plain = networks[0] if name == "deterministic" else plain
        trained = time.perf_counter()
        draws = system.count_draws(recipe)

        def predict(
            pictures: np.ndarray, networks: list[BayesianNetwork] = networks, draws: int = draws
        ) -> predictions.StoredPrediction:
            return predictions.predict(networks, scale(pictures, device), draws, seed)

        made = {"test": predict(data.test_images)}
        for other, pictures in outside.items():
            made[f"ood/{other}"] = predict(_like(pictures, data.test_images))
        for kind in corruptions.SEVERITIES:
            for severity in severities:
                pictures = corruptions.corrupt(data.test_images[:corrupted_images], kind, severity, seed=seed)
                made[f"corrupted/{kind}-{severity}"] = predict(pictures)
        predictions.write(folder / f"{name}.npz", made)
        content["parameters"][name] = sum(count_parameters(network) for network in networks)
        content["seconds"][name] = round(trained - start, 1)
        records.write(folder / "run.json", content)
        accuracy = float((made["test"].labels.numpy() == data.test_labels).mean())
        print(
            f"{system.title}: {100 * accuracy:.2f} % of the test images, trained {trained - start:.0f} s, "
            f"predicted {time.perf_counter() - trained:.0f} s",
            flush=True,
        )


def evaluate(folder: Path) -> int:
    """Score what a run wrote, print the tables and write `results.json`."""
    found, about = scores.score(folder), scores.read_run(folder)
    dataset = about.get("dataset", "unknown")
    print(scores.tables(found, dataset, about))
    lines = scores.requirement(found)
    print("\n" + "\n".join(lines))
    history = about.pop("history", {})
    last = {name: rows[-1] for name, rows in history.items() if rows}
    records.write(folder / "results.json", {**about, "last_epoch": last, "scores": found, "requirement": lines})
    return 0


class Normalization:
    """Images as float32, shifted and scaled so that a set of them has mean 0 and variance 1 in every channel.

    Args:
        reference: That set, uint8, [N, C, H, W]; of a large one, some ten thousand images.
    """

    def __init__(self, reference: np.ndarray) -> None:
        values = reference.astype(np.float64) if reference.size < 1e7 else reference[:: len(reference) // 10_000]
        axes = (0, 2, 3)
        self.mean = torch.tensor(values.mean(axes), dtype=torch.float32).reshape(1, -1, 1, 1)
        self.std = torch.tensor(values.std(axes), dtype=torch.float32).clamp_min(1.0).reshape(1, -1, 1, 1)

    def __call__(self, pictures: np.ndarray, device: torch.device) -> Tensor:
        """uint8 [B, C, H, W] -> float32 of the same shape, on a device."""
        moved = torch.from_numpy(np.ascontiguousarray(pictures)).to(device).float()
        return (moved - self.mean.to(device)) / self.std.to(device)


def _like(pictures: np.ndarray, reference: np.ndarray) -> np.ndarray:
    """Pictures with the channels and the size of others: gray is repeated, a smaller picture gets a black border."""
    channels, side = reference.shape[1], reference.shape[2]
    if pictures.shape[1] != channels:
        pictures = np.repeat(pictures[:, :1], channels, axis=1)
    missing = side - pictures.shape[2]
    if missing < 0:
        raise ValueError(f"images of {pictures.shape[2]} pixels do not fit into {side}; give smaller ones")
    border = (missing // 2, missing - missing // 2)
    return np.pad(pictures, ((0, 0), (0, 0), border, border))


def _noise(data: images.Images) -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, data.test_images.shape, dtype=np.uint8)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    defaults = Recipe()
    parser.add_argument("--dataset", choices=list(OUTSIDE), default="fashion_mnist")
    parser.add_argument("--data", help="folder of the data; BAYESIFY_DATA if left out")
    parser.add_argument("--out", type=Path, default=Path("bayesify-report") / "classification")
    parser.add_argument("--evaluate", type=Path, metavar="DIR", help="only score what a run wrote to DIR")
    parser.add_argument("--smoke", action="store_true", help="tiny synthetic images, seconds on a CPU")
    parser.add_argument("--systems", nargs="+", choices=list(SYSTEMS), default=list(SYSTEMS))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--num-train", type=int, help="only the first so many training images")
    parser.add_argument("--corrupted-images", type=int, default=CORRUPTED_IMAGES)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--precision", choices=("float32", "bf16"), default="bf16", help="on a GPU")
    for name in WHOLE:
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=getattr(defaults, name))
    for name in FRACTIONS:
        parser.add_argument(f"--{name.replace('_', '-')}", type=float, default=getattr(defaults, name))
    return parser


if __name__ == "__main__":
    sys.exit(main())
