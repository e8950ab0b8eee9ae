"""What draws and training steps of Bayesian ResNets cost next to the deterministic networks, on a GPU."""

from __future__ import annotations

import argparse
import copy
from collections.abc import Callable
from contextlib import redirect_stdout
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import bayesify
from bayesify import likelihoods, models, posteriors

from .timing import adam_step, ratios, record

POSTERIORS: dict[str, Callable[[], Any]] = {
    "inducing": lambda: posteriors.InducingWeights(rows=64, cols=64),
    "mean_field": lambda: posteriors.MeanField(),
}


def draw_calls(net: nn.Module, posterior: Any, x: Tensor, num_draws: int) -> list[Callable[[], Any]]:
    """Passes of the deterministic network, draws with their passes, together and one at a time, and passes of draws that exist."""
    bnn = bayesify.bayesianize(net, posterior, likelihood=likelihoods.Categorical()).eval()
    net.eval()

    def deterministic() -> None:
        for _ in range(num_draws):
            net(x)

    def singly() -> None:
        for _ in range(num_draws):
            bnn.draw(1)(x)

    with torch.no_grad():
        existing = bnn.draw(num_draws)
    calls = (deterministic, lambda: bnn.draw(num_draws)(x), singly, lambda: existing(x))
    return [torch.no_grad()(call) for call in calls]


def per_draw(net: nn.Module, posterior: Any, x: Tensor, num_draws: int, seconds: float) -> dict[str, float]:
    """One draw and its forward pass over one deterministic forward pass."""
    together, alone, given = ratios(*draw_calls(net, posterior, x, num_draws), seconds=seconds)
    return {f"{num_draws}_draws": together, "one_at_a_time": alone, "existing_draws": given}


def training_step(net: nn.Module, posterior: Any, x: Tensor, y: Tensor, seconds: float) -> float:
    bnn = bayesify.bayesianize(net, posterior, likelihood=likelihoods.Categorical()).train()
    plain = copy.deepcopy(net).train()
    return ratios(
        adam_step(plain, lambda: F.cross_entropy(plain(x), y)),
        adam_step(bnn, lambda: -bnn.elbo(x, y, num_data=50_000) / 50_000),
        seconds=seconds,
    )[0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=6.0, help="time per comparison")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--batch", type=int, default=500)
    parser.add_argument("--step-batch", type=int, default=128)
    parser.add_argument("--draws", type=int, default=5)
    parser.add_argument("--networks", nargs="+", default=["resnet18", "resnet50"])
    parser.add_argument("--posteriors", nargs="+", default=list(POSTERIORS), choices=list(POSTERIORS))
    parser.add_argument("--name", default="resnets_gpu")
    options = parser.parse_args()
    torch.manual_seed(0)
    torch.backends.cudnn.benchmark = True
    figures: dict[str, float] = {}
    for network in options.networks:
        for kind in options.posteriors:
            make = POSTERIORS[kind]
            net = getattr(models, network)().to(options.device)
            x = torch.randn(options.batch, 3, 32, 32, device=options.device)
            for key, value in per_draw(net, make(), x, options.draws, options.seconds).items():
                figures[f"{network}/{kind}/{key}"] = value
            if options.device == "cuda":
                half = net.to(torch.bfloat16).to(memory_format=torch.channels_last)
                images = x.to(torch.bfloat16).to(memory_format=torch.channels_last)
                for key, value in per_draw(half, make(), images, options.draws, options.seconds).items():
                    figures[f"{network}/{kind}/bf16/{key}"] = value
            if network == "resnet18":
                small = torch.randn(options.step_batch, 3, 32, 32, device=options.device)
                y = torch.randint(0, 10, (options.step_batch,), device=options.device)
                net = models.resnet18().to(options.device)
                figures[f"{network}/{kind}/training_step"] = training_step(net, make(), small, y, options.seconds)
            print(
                {key: round(value, 3) for key, value in figures.items() if key.startswith(f"{network}/{kind}")},
                flush=True,
            )
            with redirect_stdout(None):  # what is done stays if the run is cut
                record(
                    options.name,
                    {key: round(value, 3) for key, value in figures.items()},
                    unit="time as a ratio to the deterministic network: a forward pass for draws, an Adam step for training_step",
                    batch=options.batch,
                    step_batch=options.step_batch,
                )


if __name__ == "__main__":
    main()
