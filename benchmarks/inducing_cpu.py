"""Cost of an inducing ResNet-18 compared with the deterministic network on the CPU: four draws, and a training step."""

import copy
import statistics
from collections.abc import Callable

import torch
import torch.nn.functional as F

import bayesify
from bayesify import models, posteriors

from .runs import parser
from .timing import adam_step, clock, elbo_step, passes, record


def alternate(baseline: Callable[[], None], candidate: Callable[[], None], rounds: int) -> float:
    """Median over rounds of the candidate's time divided by the baseline's, after one warm-up call of each."""
    baseline()
    candidate()
    times = [(clock(baseline), clock(candidate)) for _ in range(rounds)]
    return statistics.median(ours / base for base, ours in times)


def main() -> None:
    rounds = parser(__doc__, rounds=3).parse_args().rounds  # a round takes about 20 seconds
    torch.manual_seed(0)
    net = models.resnet18().eval()
    bnn = bayesify.bayesianize(net, posteriors.InducingWeights(rows=64, cols=64), likelihood="categorical")
    x = torch.randn(100, 3, 32, 32)
    with torch.no_grad():
        draws = alternate(passes(net, x, 4), lambda: bnn.draw(4)(x), rounds)
    x, y = torch.randn(64, 3, 32, 32), torch.randint(0, 10, (64,))
    plain = copy.deepcopy(net).train()
    training = alternate(
        adam_step(plain, lambda: F.cross_entropy(plain(x), y)), elbo_step(bnn.train(), x, y, 50_000), rounds
    )
    unit = "time as a ratio to the deterministic network: four forward passes, one Adam step"
    figures = {"resnet18_batch100_4_draws": draws, "resnet18_batch64_training_step": training}
    record("inducing_cpu", figures, digits=3, unit=unit)


if __name__ == "__main__":
    main()
