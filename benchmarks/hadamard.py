"""The Walsh-Hadamard transform compared with the dense product, and a Walsh-Hadamard layer with a mean-field layer."""

import statistics
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import bayesify
from bayesify import posteriors
from bayesify.transforms import hadamard

from .runs import parser
from .timing import ratios, record

BATCH_SIZE = 512


@torch.no_grad()
def transform_on_cpu(seconds: float) -> dict[str, float]:
    """Time of the transform divided by the time of the dense product, by size."""
    found = {}
    for size in (512, 4096, 16384):
        x, dense = torch.randn(BATCH_SIZE, size), torch.randn(size, size)
        (ratio,) = ratios(lambda x=x, dense=dense: x @ dense, lambda x=x: hadamard(x), seconds=seconds)
        found[f"transform_{size}_over_dense"] = ratio
    return found


def layer_on_cpu(seconds: float, width: int = 4096, batch: int = 128) -> dict[str, float]:
    """Time of one fresh draw, forward and backward pass of a mean-field layer divided by a Walsh-Hadamard layer's."""
    net, x = nn.Linear(width, width), torch.randn(batch, width)

    def step(posterior: posteriors.Posterior) -> Callable[[], Any]:
        bnn = bayesify.bayesianize(net, posterior)

        def run() -> None:
            draw = bnn.draw()[0]
            (draw(x).square().mean() + draw.kl).backward()

        return run

    (ratio,) = ratios(step(posteriors.WalshHadamard()), step(posteriors.MeanField()), seconds=seconds)
    return {f"mean_field_layer_{width}_over_walsh_hadamard": ratio}


def convolution_on_cpu(seconds: float, channels: int = 128, side: int = 16, batch: int = 32) -> dict[str, float]:
    """Time of a convolution by transformed patches divided by the time with a materialized kernel, forward and backward."""
    net, x = nn.Conv2d(channels, channels, 3, padding=1), torch.randn(batch, channels, side, side, requires_grad=True)
    bnn = bayesify.bayesianize(net, posteriors.WalshHadamard())
    part: Any = bnn.posterior
    (size, (member,)) = next(iter(part.groups.items()))

    def materialize() -> None:
        bnn(x).square().mean().backward()

    def patches() -> None:
        columns = F.unfold(x, 3, padding=1).mT  # [B, positions, inputs x kernel]
        family = part.g[str(size)]
        g = family.mean_value + family.log_std.exp() * torch.randn_like(family.mean_value)
        y = member.blocks.multiply(columns, part.left[str(size)], g, part.right[str(size)])
        y.square().mean().backward()

    (ratio,) = ratios(materialize, patches, seconds=seconds)
    return {"convolution_by_patches_over_formed": ratio}


@torch.no_grad()
def transform_on_gpu() -> dict[str, float]:
    """Time of the transform on a GPU divided by the dense product's with tf32: calls timed by events, and in a captured graph."""
    torch.backends.cuda.matmul.allow_tf32 = True
    found = {}
    for size in (512, 4096, 16384):
        x, dense = torch.randn(BATCH_SIZE, size, device="cuda"), torch.randn(size, size, device="cuda")
        copy = torch.empty_like(x)
        functions = {
            "dense": lambda x=x, dense=dense: x @ dense,
            "copy": lambda x=x, copy=copy: copy.copy_(x),
            "transform": lambda x=x: hadamard(x),
        }
        for kind, prepare in (("", _in_a_row), ("recorded_", _recorded)):
            runs = {name: prepare(function) for name, function in functions.items()}
            rounds = [{name: _milliseconds(run) for name, run in runs.items()} for _ in range(15)]
            for name in ("copy", "transform"):
                ratio = statistics.median(times[name] / times["dense"] for times in rounds)
                found[f"{kind}{name}_{size}_over_dense"] = ratio
    return found


def _in_a_row(function: Callable[[], Any]) -> Callable[[], None]:
    def run() -> None:
        for _ in range(20):
            function()

    run()
    return run


def _recorded(function: Callable[[], Any]) -> Callable[[], None]:
    function()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(20):
            function()
    return graph.replay


def _milliseconds(run: Callable[[], None]) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    start.record()
    run()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end)


def main() -> None:
    given = parser(__doc__, seconds=8.0, threads=torch.get_num_threads()).parse_args()
    torch.set_num_threads(given.threads)  # one thread gives steady ratios on a busy machine
    torch.manual_seed(0)
    if torch.cuda.is_available():
        unit = f"time as a ratio to the dense product with tf32, batch {BATCH_SIZE}, float32"
        record("hadamard_gpu", transform_on_gpu(), digits=4, unit=unit)
        return
    figures = transform_on_cpu(given.seconds) | layer_on_cpu(given.seconds) | convolution_on_cpu(given.seconds)
    unit = f"ratios of times; transforms at batch {BATCH_SIZE}, layers with one draw, forward and backward pass"
    record("hadamard_cpu", figures, digits=4, unit=unit)


if __name__ == "__main__":
    main()
