"""Effect of `MeanField` training on a trained ResNet with BatchNorm: `fit` by default, fast scales, a cap, IVON.

    python -m benchmarks.mean_field_resnets [--seeds 4 5]

A ResNet-18 of width 8 (175,000 weights) is trained on 1,000 noisy digits of scikit-learn and scored on the other 797. Settings were
chosen on seed 0. `scales at 2e-2` gives the scales a learning rate 20 times as high, so their logarithms move in 320 steps as far
as in 6,400 steps at the default rate. A seed takes about three minutes on one core.
"""

import argparse
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import bayesify
from bayesify import baselines, likelihoods, metrics, models, posteriors
from bayesify.training import Steps
from bayesify.training.schedules import cosine

from .timing import record

EPOCHS, BATCH_SIZE, TRAINING_ROWS, NOISE_STD, WIDTH = 20, 64, 1000, 4.0, 8
SCALE_RATE = 2e-2
RELATIVE_CAP = 0.15
"""Upper bound on the standard deviations, relative to the median root mean square of the convolutions."""


def digits(seed: int) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Noisy digits, [N, 1, 8, 8], and their labels: training rows and test rows."""
    from sklearn.datasets import load_digits

    images, labels = (torch.tensor(part) for part in (load_digits().images, load_digits().target))
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(len(labels), generator=generator)
    noisy = images.float().unsqueeze(1) + NOISE_STD * torch.randn(len(labels), 1, 8, 8, generator=generator)
    x, y = (noisy[order] - 8) / 6, labels[order]
    return (x[:TRAINING_ROWS], y[:TRAINING_ROWS]), (x[TRAINING_ROWS:], y[TRAINING_ROWS:])


def train(bnn: Any, loader: DataLoader[Any], scale_rate: float, rate: float = 1e-3, **options: Any) -> None:
    """Train by Adam with a cosine schedule and a separate rate for the scales."""
    scales = [value for name, value in bnn.named_parameters() if "raw_std" in name]
    others = [value for name, value in bnn.named_parameters() if "raw_std" not in name]
    groups = [{"params": others, "lr": rate}] + ([{"params": scales, "lr": scale_rate}] if scales else [])
    optimizer, steps = torch.optim.Adam(groups, fused=True), EPOCHS * len(loader)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    options |= {"steps": Steps(scheduler="step"), "seed": 0, "progress": False}
    bayesify.fit(bnn, loader, epochs=EPOCHS, optimizer=optimizer, scheduler=scheduler, **options)


def systems(net: nn.Module, loader: DataLoader[Any]) -> Iterator[tuple[str, Callable[[Any], object], Any]]:
    """Names, training functions and networks."""

    def bayesian(max_std: float | None = None) -> Any:
        return bayesify.bayesianize(net, posteriors.MeanField(max_std=max_std), likelihood=likelihoods.Categorical())

    def ivon(bnn: Any, **options: Any) -> object:
        return baselines.IVON(bnn, **options).fit(loader, EPOCHS, schedule=cosine, seed=0, progress=False)

    sizes = [float(value.detach().square().mean().sqrt()) for value in net.parameters() if value.ndim == 4]
    cap = RELATIVE_CAP * float(torch.tensor(sizes).median())
    point = bayesify.bayesianize(net, posteriors.Point(), likelihood=likelihoods.Categorical())
    yield "the network", lambda bnn: None, point
    for epochs in (3, 10):
        options = {"epochs": epochs, "seed": 0, "progress": False}
        yield f"fit, {epochs} epochs", lambda bnn, given=options: bayesify.fit(bnn, loader, **given), bayesian()
    yield "fit, scales at 2e-2", lambda bnn: train(bnn, loader, SCALE_RATE), bayesian()
    yield "the same, max_std 0.15 of the weights", lambda bnn: train(bnn, loader, SCALE_RATE), bayesian(cap)
    yield "IVON", lambda bnn: ivon(bnn), bayesian()
    yield "IVON, decay 0.99", lambda bnn: ivon(bnn, decay=0.99), bayesian()
    yield (
        "IVON, init_curvature 0.9, rate 0.05",
        lambda bnn: ivon(bnn, init_curvature=0.9, learning_rate=0.05),
        bayesian(),
    )


def main() -> None:
    """Run all systems and store the scores."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[4, 5])
    found: dict[str, Any] = {}
    for seed in parser.parse_args().seeds:
        rows, (x, y) = digits(seed)
        loader = DataLoader(TensorDataset(*rows), BATCH_SIZE, shuffle=True)
        torch.manual_seed(seed)
        net = models.resnet18(in_channels=1, width=WIDTH)
        point = bayesify.bayesianize(net, posteriors.Point(), likelihood=likelihoods.Categorical())
        train(point, loader, 0.0, rate=4e-3, kl_weight=0.0)
        for name, fit, bnn in systems(point.mean_network().eval(), loader):
            fit(bnn)
            scores = metrics.evaluate(bnn.eval().predict(x, 16, generator=torch.Generator().manual_seed(0)), y)
            found.setdefault(name, {})[str(seed)] = {key: round(scores[key], 4) for key in ("accuracy", "nll", "ece")}
            print(seed, name, found[name][str(seed)], flush=True)
    record("mean_field_resnets", found)


if __name__ == "__main__":
    main()
