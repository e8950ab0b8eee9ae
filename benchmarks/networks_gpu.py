"""Draws and training steps of whole networks on a GPU, each next to the plain network: ViT-B/16, GPT-2's shape, ResNets, an MLP.

python -m benchmarks.networks_gpu [--seconds 1.5] [--rows GLOB ...]
"""

from __future__ import annotations

import argparse
import fnmatch
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import bayesify
from bayesify import likelihoods, models, posteriors
from benchmarks.draws_gpu import Transformer, captured_step, least_ms
from benchmarks.resnets import per_draw
from benchmarks.timing import adam_step, clock, ratios, record

Figures = dict[str, float]

POSTERIORS: dict[str, Callable[[], Any]] = {
    "mean_field": posteriors.MeanField,
    "inducing": lambda: posteriors.InducingWeights(64, 64),
    "k_tied": posteriors.KTied,
    "walsh_hadamard": posteriors.WalshHadamard,
}


def vit() -> tuple[nn.Module, Tensor, Tensor]:
    from torchvision.models import vit_b_16

    with torch.device("cuda"):
        return vit_b_16(), torch.randn(64, 3, 224, 224), torch.randint(0, 1000, (64,))


def gpt2() -> tuple[nn.Module, Tensor, Tensor]:
    with torch.device("cuda"):
        text = torch.randint(0, 50257, (8, 513))
        return Transformer(), text[:, :-1].contiguous(), text[:, 1:].contiguous()


def resnet50() -> tuple[nn.Module, Tensor, Tensor]:
    from torchvision.models import resnet50 as make

    with torch.device("cuda"):
        net, x = make(), torch.randn(64, 3, 224, 224)
    return *(part.to(memory_format=torch.channels_last) for part in (net, x)), torch.randint(0, 1000, (64,)).cuda()


def resnet18() -> tuple[nn.Module, Tensor, Tensor]:
    with torch.device("cuda"):
        return models.resnet18(variant="cifar"), torch.randn(128, 3, 32, 32), torch.randint(0, 10, (128,))


def mlp() -> tuple[nn.Module, Tensor, Tensor]:
    with torch.device("cuda"):
        return models.mlp([784, 512, 512, 10]), torch.randn(128, 784), torch.randint(0, 10, (128,))


def loss_of(net: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(net(x).flatten(0, -2), y.flatten())


def draws(make: Callable[[], Any], kind: str, seconds: float) -> Figures:
    """A fresh draw and its pass, five at a time, one at a time, and passes of draws that exist, in bfloat16 / plain passes."""
    net, x, _ = make()
    half = x.bfloat16() if x.is_floating_point() else x
    net = net.bfloat16().eval()
    with torch.no_grad():
        plain = least_ms(lambda: net(half), 5)
    found = per_draw(net, POSTERIORS[kind](), half, 5, seconds)
    return {"fresh": found["5_draws"], "alone": found["one_at_a_time"], "existing": found["existing_draws"]} | {
        "plain_ms": plain
    }


def step(make: Callable[[], Any], kind: str, seconds: float) -> Figures:
    """A training step under autocast by fused Adam / the plain network's."""
    net, x, y = make()
    bnn = bayesify.bayesianize(net, POSTERIORS[kind](), likelihood=likelihoods.Categorical()).train()

    def cast(run: Callable[[], Tensor]) -> Callable[[], Tensor]:
        def inside() -> Tensor:
            with torch.autocast("cuda", torch.bfloat16):
                return run()

        return inside

    plain = adam_step(net.train(), cast(lambda: loss_of(net, x, y)))
    ours = adam_step(bnn, cast(lambda: -bnn.elbo(x, y, num_data=50_000) / 50_000))
    (found,) = ratios(plain, ours, seconds=seconds)
    return {"ratio": found, "plain_ms": 1e3 * min(clock(plain) for _ in range(3))}


def captured(make: Callable[[], Any], kind: str, seconds: float, half: bool = False) -> Figures:
    """A whole step as a CUDA graph / the plain network's; `half`: bfloat16 autocast and channels last."""

    def graph(kind: str | None) -> Callable[[], None]:
        net, x, y = make()
        if half:
            net, x = (part.to(memory_format=torch.channels_last) for part in (net, x))
        bnn = kind and bayesify.bayesianize(net, POSTERIORS[kind](), likelihood=likelihoods.Categorical())

        def loss() -> Tensor:
            with torch.autocast("cuda", torch.bfloat16, enabled=half):
                return -bnn.elbo(x, y, num_data=60_000) / 60_000 if bnn else loss_of(net, x, y)

        return captured_step(bnn or net, loss)

    plain, ours = graph(None), graph(kind)
    times = [1e3 * min(clock(each) for _ in range(int(20 * seconds))) for each in (plain, ours, plain, ours)]
    least = [min(times[at::2]) for at in (0, 1)]
    return {"ratio": least[1] / least[0], "ms": least[1], "plain_ms": least[0]}


ROWS: dict[str, Callable[[float], Figures]] = {
    "gpt2/mean_field/draws": lambda s: draws(gpt2, "mean_field", s),
    "vit/mean_field/draws": lambda s: draws(vit, "mean_field", s),
    "vit/inducing/draws": lambda s: draws(vit, "inducing", s),
    "resnet50/inducing/draws": lambda s: draws(resnet50, "inducing", s),
    "resnet50/k_tied/draws": lambda s: draws(resnet50, "k_tied", s),
    **{f"mlp/{kind}/captured": lambda s, kind=kind: captured(mlp, kind, s) for kind in list(POSTERIORS)[:3]},
    **{f"resnet18/{kind}/captured": lambda s, kind=kind: captured(resnet18, kind, s) for kind in list(POSTERIORS)[:3]},
    **{
        f"resnet18/{kind}/captured_bf16": lambda s, kind=kind: captured(resnet18, kind, s, half=True)
        for kind in list(POSTERIORS)[:3]
    },
    **{f"gpt2/{kind}/step": lambda s, kind=kind: step(gpt2, kind, s) for kind in ("mean_field", "inducing")},
    **{
        f"vit/{kind}/step": lambda s, kind=kind: step(vit, kind, s)
        for kind in ("mean_field", "inducing", "walsh_hadamard")
    },
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=1.5, help="time per comparison")
    parser.add_argument("--rows", nargs="+", default=["*"], help="patterns of the rows to measure")
    options = parser.parse_args()
    torch.manual_seed(0)
    figures: Figures = {}
    for name, measure in ROWS.items():
        if not any(fnmatch.fnmatch(name, pattern) for pattern in options.rows):
            continue
        begin = time.perf_counter()
        try:
            found = measure(options.seconds)
        except Exception as error:  # one row must not take the others with it
            print(name, repr(error)[:300], flush=True)
            continue
        figures |= {f"{name}/{key}": round(value, 3) for key, value in found.items()}
        print(f"{name}: {found}, {time.perf_counter() - begin:.1f} s", flush=True)
        torch.cuda.empty_cache()
    record("networks_gpu", figures, seconds=options.seconds)


if __name__ == "__main__":
    main()
