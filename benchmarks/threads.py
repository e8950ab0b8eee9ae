"""Host time of a pass that one network can serve several threads: copy of its tree of modules, slots of a draw, writing back.

    python -m benchmarks.threads

Networks have the modules of large ones and hand their input on, so that nothing else takes time. Passes whose copies served others
before stand beside passes that make theirs, least of many, in one run.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

import bayesify
from bayesify import models, posteriors
from bayesify.running import runner as runners
from benchmarks.draws_gpu import Block
from benchmarks.timing import clock, record


class Idle(nn.Module):
    """A network that does not run."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, x: Tensor) -> Tensor:
        return x


NETWORKS: dict[str, Callable[[], nn.Module]] = {
    "MLP of 3 layers": lambda: models.mlp([8, 8, 8, 8]),
    "ResNet-50": lambda: models.resnet50(width=2),
    "ViT-B/16": lambda: nn.Sequential(
        nn.Conv2d(3, 8, 1),
        *[nn.TransformerEncoderLayer(8, 2, 8, batch_first=True, norm_first=True) for _ in range(12)],
        nn.Linear(8, 8),
    ),
    "GPT-2": lambda: nn.Sequential(
        nn.Embedding(8, 8), nn.Embedding(8, 8), *[Block(8, 2) for _ in range(12)], nn.LayerNorm(8), nn.Linear(8, 8)
    ),
}


def forget(run: Callable[[], Any]) -> Any:
    """A pass that makes its copy of the network."""
    with mock.patch.object(runners, "_IDLE", weakref.WeakKeyDictionary()):
        return run()


@torch.no_grad()
def measure(make: Callable[[], nn.Module]) -> dict[str, float]:
    """Microseconds a pass, less the plain network's."""
    net, x = Idle(make()).eval(), torch.zeros(1, 8)
    bnn = bayesify.bayesianize(net, posteriors.MeanField(0.01)).eval()
    draws = bnn.draw(5)
    one, fixed = draws[0], draws[:1].detach()
    calls: dict[str, tuple[Callable[[], Any], int]] = {
        "one draw": (lambda: one(x), 1),
        "one detached draw": (lambda: fixed(x), 1),
        "five draws in a loop": (lambda: draws.runner.run(draws.weights, (x,), {}, mode="loop"), 5),
    }
    runs = {"plain": (lambda: net(x), 1), **calls}
    runs |= {f"{name}, a new copy": (partial(forget, call), count) for name, (call, count) in calls.items()}
    least = dict.fromkeys(runs, float("inf"))
    for _ in range(300):
        for name, (call, _) in runs.items():
            least[name] = min(least[name], clock(call, time.thread_time))
    plain = least.pop("plain")
    return {name: round(1e6 * (seconds / runs[name][1] - plain), 1) for name, seconds in least.items()} | {
        "modules": len(list(net.modules())),
        "weights": len(bnn.weights),
    }


def main() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    record("threads_cpu", {name: measure(make) for name, make in NETWORKS.items()}, unit="microseconds of a pass")


if __name__ == "__main__":
    main()
