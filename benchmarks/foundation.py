"""What a draw, a prediction and a training step cost next to a deterministic network, on the CPU."""

from __future__ import annotations

import argparse

import torch
import torch.nn.functional as F
from torch import nn

import bayesify
from bayesify import likelihoods, models, posteriors

from .timing import adam_step, ratios, record


def mlp_figures(seconds: float) -> dict[str, float]:
    net = models.mlp([784, 256, 256, 10])
    x, y = torch.randn(128, 784), torch.randint(0, 10, (128,))
    bnn = bayesify.bayesianize(net, posteriors.MeanField(), likelihood=likelihoods.Categorical())
    with torch.no_grad():
        draws = bnn.draw(16)

        def deterministic() -> None:
            for _ in range(16):
                net(x)

        existing, fresh, pairs = ratios(
            deterministic,
            lambda: draws(x),
            lambda: bnn.draw(16)(x),
            lambda: bnn.draw(16, antithetic=True)(x),
            seconds=seconds,
        )
    weight_step, local_step = ratios(
        adam_step(net, lambda: F.cross_entropy(net(x), y)),
        *(
            adam_step(other, lambda other=other: -other.elbo(x, y, num_data=60_000) / 60_000)
            for other in (
                bnn,
                bayesify.bayesianize(
                    net, posteriors.MeanField(local_reparameterization=True), likelihood=likelihoods.Categorical()
                ),
            )
        ),
        seconds=seconds,
    )
    return {
        "mlp_16_existing_draws": existing,
        "mlp_16_fresh_draws": fresh,
        "mlp_16_fresh_draws_antithetic": pairs,
        "mlp_mean_field_step": weight_step,
        "mlp_mean_field_step_local": local_step,
    }


def conv_figures(seconds: float) -> dict[str, float]:
    net = nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(32 * 49, 10),
    )  # fmt: skip
    x = torch.randn(64, 1, 28, 28)
    bnn = bayesify.bayesianize(net, posteriors.MeanField(), likelihood=likelihoods.Categorical())
    with torch.no_grad():
        draws = bnn.draw(16)

        def deterministic() -> None:
            for _ in range(16):
                net(x)

        existing, fresh = ratios(deterministic, lambda: draws(x), lambda: bnn.draw(16)(x), seconds=seconds)
    return {"conv_16_existing_draws": existing, "conv_16_fresh_draws": fresh}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=6.0, help="time per comparison")
    seconds = parser.parse_args().seconds
    torch.manual_seed(0)
    figures = {**mlp_figures(seconds), **conv_figures(seconds)}
    record(
        "foundation_cpu",
        {key: round(value, 3) for key, value in figures.items()},
        unit="time as a ratio to the deterministic network: 16 passes for draws, one Adam step for steps",
    )


if __name__ == "__main__":
    main()
