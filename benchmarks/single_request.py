"""A single request: one example and 16 existing draws compared with 16 passes of the plain network.

    python -m benchmarks.single_request [--output NAME]

The aim is at most 1.5 on a CPU. Fresh draws, whose random numbers cost more than the passes, are measured too.
"""

from collections.abc import Callable

import torch
from torch import nn

import bayesify
from bayesify import baselines, likelihoods, models, posteriors
from benchmarks.runs import parser
from benchmarks.timing import passes, ratios, record, small_cnn

NUM_DRAWS = 16
NETWORKS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "MLP 784-256-256-10": (lambda: models.mlp([784, 256, 256, 10]), (784,)),
    "MLP 64-64-64-10": (lambda: models.mlp([64, 64, 64, 10]), (64,)),
    "CNN 1-16-32, 28 x 28": (small_cnn, (1, 28, 28)),
}


def measure(make: Callable[[], nn.Module], shape: tuple[int, ...], seconds: float) -> dict[str, float]:
    """Times of requests, as ratios to the plain passes."""
    torch.manual_seed(0)
    net, x = make().eval(), torch.randn(1, *shape)
    bnn = bayesify.bayesianize(net, posteriors.MeanField(), likelihood=likelihoods.Categorical())
    draws = bnn.draw(NUM_DRAWS).detach()
    fixed = baselines.FixedDraws(draws, likelihoods.Categorical())
    found = ratios(
        passes(net, x, NUM_DRAWS),
        lambda: bnn.predict(x, draws=draws).probs,
        lambda: fixed.predict(x).probs,
        lambda: bnn.predict(x, NUM_DRAWS).probs,
        seconds=seconds,
    )
    return dict(zip(("predict(x, draws=draws)", "FixedDraws.predict(x)", "fresh draws"), found, strict=True))


def main() -> None:
    arguments = parser(__doc__, "seconds", output="single_request_cpu").parse_args()
    torch.set_num_threads(1)
    figures = {name: measure(*network, arguments.seconds) for name, network in NETWORKS.items()}
    record(arguments.output, figures, unit="time of 16 passes of the plain network, one example", num_draws=NUM_DRAWS)


if __name__ == "__main__":
    main()
