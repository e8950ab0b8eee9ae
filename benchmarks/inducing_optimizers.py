"""Training of FFG-U: Adam or SGD, usual or balanced matrices (narrow ResNet-18, small CIFAR-10).

    BAYESIFY_DATA=FOLDER python -m benchmarks.inducing_optimizers [--arms ...] [--seeds 0]

The first 5,000 training images are used for training, and the last 5,000 training images are scored. Images are averaged to 16 x 16
pixels, so that an arm takes about seven minutes on one core. The network has 16 channels in the first stage, and U has M = 16. Each
stage therefore has the same ratio of M to its channels as in the ResNet-18 with M = 64. The weight 0.03 of the KL divided by
5,000 images is about as large as a weight of 0.3 divided by 50,000 images. Arms "after 15 epochs" start at a deterministic network
that was trained by SGD for 15 of the 40 epochs. The learning rates of Adam are those of the recipe for CIFAR-10 and, for the
deterministic network, 3e-3. `bayesify_papers.inducing_weights.systems.make_inducing_sgd` describes SGD for FFG-U. Balanced arms
have balanced matrices in the last three stages (see `InducingWeights`) and a larger M there, with at most as many numbers.
"""

import sys
from dataclasses import replace
from typing import Any

import torch.nn.functional as F
from bayesify_papers.inducing_weights.systems import SYSTEMS, Recipe, train
from bayesify_papers.shared.image_problems import ImageProblem
from bayesify_papers.shared.sources import Source
from torch import Tensor

from bayesify import metrics

from . import runs
from .timing import record

NUM_TRAIN, NUM_SCORED = 5_000, 5_000
RECIPE = Recipe(
    epochs=40, batch=128, depth=2, width=16, inducing=16, augment=True, cutout=8, schedule="one_cycle", kl_weight=0.03
)
ADAM = {"learning_rate": 5e-3, "inducing_learning_rate": 5e-3, "spread_learning_rate": 0.05}
SGD = {"inducing_optimizer": "sgd"}
START = {"start_epochs": 15, "epochs": 25, "point_optimizer": "sgd"}
BALANCED = {"inducing_by_stage": "16,b18,b24,b24"}
ARMS: dict[str, tuple[str, dict[str, Any]]] = {
    "deterministic, SGD": ("deterministic", {"point_optimizer": "sgd"}),
    "deterministic, Adam": ("deterministic", {"learning_rate": 3e-3}),
    "FFG-U, Adam": ("ffg_u", ADAM),
    "FFG-U, Adam, balanced": ("ffg_u", ADAM | BALANCED),
    "FFG-U, SGD": ("ffg_u", SGD | {"u_learning_rate": 1.0, "z_learning_rate": 1.0}),
    "FFG-U after 15 epochs, Adam": ("ffg_u", START | ADAM),
    "FFG-U after 15 epochs, SGD": ("ffg_u", START | SGD),
    "FFG-U after 15 epochs, SGD, balanced": ("ffg_u", START | SGD | BALANCED),
    "FFG-U after 15 epochs, SGD, rate of U 20": ("ffg_u", START | SGD | {"u_learning_rate": 20.0}),
}
"""System and changes of the recipe by name."""


def small(images: Tensor) -> Tensor:
    """Images of half the size: [B, C, 2 H, 2 W] -> [B, C, H, W]."""
    return F.avg_pool2d(images, 2)


def run(arm: str, seed: int, given: ImageProblem, inside: Tensor) -> dict[str, float]:
    """Scores of one arm."""
    system, changes = ARMS[arm]
    recipe = replace(RECIPE, **changes)
    bnn, history = train(SYSTEMS[system], recipe, given, seed)
    scores = metrics.evaluate(bnn.predict(inside, SYSTEMS[system].count_draws(recipe)), given.test_labels)
    return {"training_nll": history[-1]["nll"], **{key: scores[key] for key in ("accuracy", "nll", "ece")}}


def main() -> None:
    """Run the arms and store their scores."""
    chosen = runs.parser(__doc__, arms=list(ARMS), seeds=[0]).parse_args()
    if unknown := set(chosen.arms) - set(ARMS):
        sys.exit(f"unknown arms {sorted(unknown)}; the arms are {list(ARMS)}")
    source = Source("cifar10", validation=NUM_SCORED)
    given = ImageProblem(source, "cpu")
    given.x, given.y = small(given.x[:NUM_TRAIN]), given.y[:NUM_TRAIN]
    inside = small(given.scale(source.images().test_images, given.device))
    for seed in chosen.seeds:
        for arm in chosen.arms:
            record("inducing_optimizers", {f"{arm}, seed {seed}": run(arm, seed, given, inside)}, keep=True, digits=4)


if __name__ == "__main__":
    main()
