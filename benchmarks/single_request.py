"""A single request: one example, 16 draws that exist already, against 16 passes of the plain network.

    python -m benchmarks.single_request [--output NAME]

The aim is at most 1.5 on a CPU; fresh draws, whose random numbers cost more than the passes, are beside it.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn

import bayesify
from bayesify import baselines, likelihoods, posteriors
from benchmarks.timing import ratios, record

NUM_DRAWS = 16
NETWORKS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "MLP 784-256-256-10": (
        lambda: nn.Sequential(nn.Linear(784, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10)),
        (784,),
    ),
    "MLP 64-64-64-10": (
        lambda: nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)),
        (64,),
    ),
    "CNN 1-16-32, 28 x 28": (
        lambda: nn.Sequential(
            nn.Conv2d(1, 16, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(16, 32, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(32 * 49, 10),
        ),
        (1, 28, 28),
    ),
}


@torch.no_grad()
def passes(net: nn.Module, x: Tensor) -> None:
    """The floor: as many passes of the plain network as there are draws."""
    for _ in range(NUM_DRAWS):
        net(x)


def measure(make: Callable[[], nn.Module], shape: tuple[int, ...], seconds: float) -> dict[str, float]:
    """Times of requests, as ratios to the plain passes."""
    torch.manual_seed(0)
    net, x = make().eval(), torch.randn(1, *shape)
    bnn = bayesify.bayesianize(net, posteriors.MeanField(), likelihood=likelihoods.Categorical())
    draws = bnn.draw(NUM_DRAWS).detach()
    fixed = baselines.FixedDraws(draws, likelihoods.Categorical())
    found = ratios(
        partial(passes, net, x),
        lambda: bnn.predict(x, draws=draws).probs,
        lambda: fixed.predict(x).probs,
        lambda: bnn.predict(x, NUM_DRAWS).probs,
        seconds=seconds,
    )
    return dict(zip(("predict(x, draws=draws)", "FixedDraws.predict(x)", "fresh draws"), found, strict=True))


def main() -> None:
    """Measure all networks and write the record."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=6.0)
    parser.add_argument("--output", default="single_request_cpu")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    figures = {name: measure(*network, arguments.seconds) for name, network in NETWORKS.items()}
    record(arguments.output, figures, unit="time of 16 passes of the plain network, one example", num_draws=NUM_DRAWS)


if __name__ == "__main__":
    main()
