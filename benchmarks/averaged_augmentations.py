"""Likelihoods that average several augmented views of an image, compared at equal cost (FFG-U, small ResNet, CIFAR-10).

    BAYESIFY_DATA=FOLDER python -m benchmarks.averaged_augmentations [--arms ...] [--seeds 0]

A network f sees K random views x_k (mirrored and shifted) of each image. The likelihood of the label y can use their average
(Nabarro et al. 2022):

    terms           1/K sum_k log p(y | f(x_k)), the usual objective with less noise in its gradient
    logits          log p(y | 1/K sum_k f(x_k))
    probabilities   log 1/K sum_k p(y | f(x_k))

`one_view` has K = 1, and `longer` has K = 1 and three times as many epochs. The other arms have K = 3, so all but `one_view`
see as many images. The first 5,000 training images are used for training. The last 5,000 training images are scored without
augmentation. An arm with K = 3 takes about ten minutes on one core.
"""

import time
from dataclasses import replace
from typing import Any

import torch
from bayesify_papers.inducing_weights.systems import SYSTEMS, Recipe, make_adam, schedule_options
from bayesify_papers.shared.batches import MemoryBatches, mirror_and_shift
from bayesify_papers.shared.image_problems import ImageProblem
from bayesify_papers.shared.sources import Source
from torch import Tensor, nn

import bayesify
from bayesify import likelihoods, metrics

from . import runs
from .timing import record

VIEWS, NUM_TRAIN, NUM_SCORED = 3, 5_000, 5_000
RATES = {"learning_rate": 5e-3, "inducing_learning_rate": 5e-3, "spread_learning_rate": 0.05}
RECIPE = Recipe(epochs=24, batch=100, width=8, inducing=32, schedule="one_cycle", **RATES)
ARMS = ("one_view", "longer", "terms", "logits", "probabilities")


class Views(nn.Module):
    """A network that averages its outputs over the views of an image.

    Args:
        net: Network with logits as outputs.
        average: `"logits"` or `"probabilities"`.
    """

    def __init__(self, net: nn.Module, average: str) -> None:
        super().__init__()
        self.net, self.average = net, average

    def forward(self, x: Tensor) -> Tensor:
        """[B, K, C, H, W] -> [B, O]."""
        logits: Tensor = self.net(x.flatten(0, 1)).unflatten(0, x.shape[:2])  # [B, K, O]
        return logits.mean(1) if self.average == "logits" else logits.log_softmax(-1).logsumexp(1)


class ViewBatches(MemoryBatches):
    """Batches with K views of each image: [B, K, C, H, W], or [B K, C, H, W] with repeated labels if `flat`."""

    flat = False

    def __iter__(self) -> Any:
        for x, y in super().__iter__():
            views = torch.stack([mirror_and_shift(x) for _ in range(VIEWS)], 1)
            yield (views.flatten(0, 1), y.repeat_interleave(VIEWS)) if self.flat else (views, y)


def run(arm: str, seed: int, given: ImageProblem, inside: Tensor) -> dict[str, float]:
    """Scores of one arm and its processor seconds."""
    recipe = replace(RECIPE, epochs=RECIPE.epochs * (VIEWS if arm == "longer" else 1))
    torch.manual_seed(seed)
    net: nn.Module = recipe.network(3, 10)
    averaged = arm in ("logits", "probabilities")
    net = Views(net, arm) if averaged else net
    posterior, prior = SYSTEMS["ffg_u"].posterior(recipe), SYSTEMS["ffg_u"].prior()
    bnn = bayesify.bayesianize(
        net, posterior, likelihood=likelihoods.Categorical(), prior=prior, batch_statistics="train"
    )
    if arm in ("one_view", "longer"):
        batches = MemoryBatches(given.x, given.y, recipe.batch, mirror_and_shift)
    else:
        batches = ViewBatches(given.x, given.y, recipe.batch)
        batches.flat = not averaged
    start = time.process_time()
    history = bayesify.fit(
        bnn,
        batches,
        num_data=len(given.x),
        epochs=recipe.epochs,
        optimizer=make_adam(bnn, recipe),
        kl_schedule=bayesify.KLSchedule(recipe.epochs / 3, recipe.epochs / 6),
        seed=seed,
        progress=False,
        **schedule_options(recipe, len(batches)),
    )
    seconds = time.process_time() - start
    scored = inside[:, None] if averaged else inside
    generator = torch.Generator().manual_seed(0)
    scores = metrics.evaluate(bnn.eval().predict(scored, 20, generator=generator), given.test_labels)
    kept = {key: round(scores[key], 4) for key in ("accuracy", "nll", "ece")}
    return {
        **kept,
        "training_nll": round(history[-1]["nll"], 4),
        "kl": round(history[-1]["kl"]),
        "seconds": round(seconds),
    }


def main() -> None:
    """Run the arms and store their scores."""
    chosen = runs.parser(__doc__, arms=list(ARMS), seeds=[0]).parse_args()
    source = Source("cifar10", validation=NUM_SCORED)
    given = ImageProblem(source, "cpu")
    given.x, given.y = given.x[:NUM_TRAIN], given.y[:NUM_TRAIN]
    inside = given.scale(source.images().test_images, given.device)
    found: dict[str, Any] = {}
    for seed in chosen.seeds:
        for arm in chosen.arms:
            found.setdefault(arm, {})[str(seed)] = run(arm, seed, given, inside)
            print(seed, arm, found[arm][str(seed)], flush=True)
    record("averaged_augmentations", found)


if __name__ == "__main__":
    main()
