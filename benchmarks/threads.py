"""Cost of thread safety for a single thread: a light copy of the network for each pass compared with one shared network.

python -m benchmarks.threads
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch import nn

import bayesify
from bayesify import likelihoods, models, posteriors
from bayesify.running.inputs_and_outputs import Untouched
from bayesify.running.modes import modes_kept
from bayesify.running.runner import Pass, Runner
from benchmarks.timing import ratios, record

NETWORKS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "MLP 784-256-256-10": (lambda: models.mlp([784, 256, 256, 10]), (784,)),
    "CNN 1-8-16, 14 x 14": (
        lambda: nn.Sequential(
            *(nn.Conv2d(1, 8, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(8, 16, 3), nn.ReLU()),
            *(nn.Flatten(), nn.Linear(256, 10)),
        ),
        (1, 14, 14),
    ),
}
NUM_REPEATS = 20


@contextmanager
def _alone(self: Runner, **_: bool) -> Iterator[Runner]:
    with modes_kept(self.network.modules(), evaluate=self.evaluate):
        yield Pass(self, None)


def _call(self: Pass, values: Any, args: Any, kwargs: Any, **_: Any) -> Any:
    named = {**self.point_values, **values}
    return torch.func.functional_call(self.network, named, args, dict(kwargs), tie_weights=False)


def shared(function: Callable[[], Any]) -> Callable[[], Any]:
    """The function with one shared network and inputs without a copy, which is not thread-safe."""

    def run() -> Any:
        with ExitStack() as stack:
            for owner, name, other in (
                (Runner, "alone", _alone),
                (Pass, "call", _call),
                (Untouched, "take", lambda self, **_: self._given),
            ):
                stack.enter_context(mock.patch.object(owner, name, other))
            return repeated(function)()

    return run


def repeated(function: Callable[[], Any]) -> Callable[[], Any]:
    def run() -> Any:
        for _ in range(NUM_REPEATS):
            found = function()
        return found

    return run


def main() -> None:
    torch.set_num_threads(1)
    figures = {}
    for name, (make, shape) in NETWORKS.items():
        torch.manual_seed(0)
        bnn = bayesify.bayesianize(make(), posteriors.MeanField(0.01), likelihood=likelihoods.Categorical()).eval()
        x = torch.randn(1, *shape)
        draws = bnn.draw(16).detach()
        with torch.no_grad():
            for what, function in (
                ("predict, 16 draws", lambda bnn=bnn, x=x: bnn.predict(x, 16).probs),
                ("16 draws that are held", partial(draws, x)),
                ("one draw that is held", partial(draws[0], x)),
            ):
                (ratio,) = ratios(shared(function), repeated(function), seconds=10.0)
                figures[f"{name}, batch of one: {what}, a copy for each pass / one shared network"] = round(ratio, 3)
    record("threads_cpu", figures)


if __name__ == "__main__":
    main()
