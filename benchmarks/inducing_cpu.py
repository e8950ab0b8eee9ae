"""What an inducing ResNet-18 costs next to the deterministic one on the CPU: four draws, and a training step."""

from __future__ import annotations

import argparse
import copy
import statistics
from collections.abc import Callable

import torch
import torch.nn.functional as F

import bayesify
from bayesify import likelihoods, models, posteriors

from .timing import adam_step, clock, record


def alternate(baseline: Callable[[], None], candidate: Callable[[], None], rounds: int) -> float:
    """Median over rounds of the candidate's time over the baseline's, after one call of each."""
    baseline()
    candidate()
    return statistics.median(_ratio(baseline, candidate) for _ in range(rounds))


def _ratio(baseline: Callable[[], None], candidate: Callable[[], None]) -> float:
    base = clock(baseline)
    return clock(candidate) / base


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3, help="rounds per comparison; one takes about 20 seconds")
    rounds = parser.parse_args().rounds
    torch.manual_seed(0)
    net = models.resnet18().eval()
    posterior = posteriors.InducingWeights(rows=64, cols=64)
    bnn = bayesify.bayesianize(net, posterior, likelihood=likelihoods.Categorical())
    x = torch.randn(100, 3, 32, 32)
    with torch.no_grad():

        def four_passes() -> None:
            for _ in range(4):
                net(x)

        draws = alternate(four_passes, lambda: bnn.draw(4)(x), rounds)
    x, y = torch.randn(64, 3, 32, 32), torch.randint(0, 10, (64,))
    plain = copy.deepcopy(net).train()
    bnn.train()
    training = alternate(
        adam_step(plain, lambda: F.cross_entropy(plain(x), y)),
        adam_step(bnn, lambda: -bnn.elbo(x, y, num_data=50_000) / 50_000),
        rounds,
    )
    record(
        "inducing_cpu",
        {"resnet18_batch100_4_draws": round(draws, 3), "resnet18_batch64_training_step": round(training, 3)},
        unit="time as a ratio to the deterministic network: four forward passes, one Adam step",
    )


if __name__ == "__main__":
    main()
