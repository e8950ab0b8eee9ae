"""A trained network on rotated digits, before and after a Laplace posterior.

The network is trained as usual and does not change. A posterior over 300 of its
weights makes its predictions less certain where they are wrong.
"""

import math
import sys

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import bayesify
from bayesify import likelihoods, metrics, posteriors, subnetwork


def rotated(images: Tensor, degrees: float) -> Tensor:
    """Images of 64 pixels, turned about their center."""
    angle = math.radians(degrees)
    turn = torch.tensor(
        [[math.cos(angle), -math.sin(angle), 0], [math.sin(angle), math.cos(angle), 0]]
    )
    grid = nn.functional.affine_grid(
        turn.expand(len(images), 2, 3), [len(images), 1, 8, 8], align_corners=False
    )
    square = images.view(-1, 1, 8, 8)
    return nn.functional.grid_sample(square, grid, align_corners=False).flatten(1)


def main(figure: str | None = None) -> None:
    torch.manual_seed(0)
    images, labels = load_digits(return_X_y=True)
    order = torch.randperm(len(labels))
    x = torch.tensor(images, dtype=torch.float32)[order] / 16
    y = torch.tensor(labels)[order]
    loader = DataLoader(TensorDataset(x[:1200], y[:1200]), batch_size=100, shuffle=True)
    net = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-2)
    for _ in range(20):  # any training of your own
        for batch_x, batch_y in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(net(batch_x), batch_y).backward()
            optimizer.step()

    plain = bayesify.bayesianize(
        net, posteriors.Point(), likelihood=likelihoods.Categorical()
    )
    few = subnetwork.largest_variance(300, skip_flat=True)
    laplace = bayesify.Laplace(net, likelihoods.Categorical(), subset=few).fit(loader)
    laplace.tune_prior_precision(method="evidence")
    angles = (0, 15, 30, 45, 60, 75, 90)
    nll: dict[str, list[float]] = {"plain network": [], "Laplace": []}
    print("degrees   accuracy   NLL, plain   NLL, Laplace")
    for angle in angles:
        turned = rotated(x[1200:], angle)
        for name, model in (("plain network", plain), ("Laplace", laplace)):
            scores = metrics.evaluate(model.predict(turned), y[1200:])
            nll[name].append(scores["nll"])
        print(
            f"{angle:>7} {scores['accuracy']:>10.3f}"
            f" {nll['plain network'][-1]:>12.3f} {nll['Laplace'][-1]:>14.3f}"
        )
    assert nll["Laplace"][-1] < nll["plain network"][-1]

    if figure:
        from matplotlib import pyplot as plt

        _, axes = plt.subplots(figsize=(6, 3))
        for name, values in nll.items():
            axes.plot(angles, values, "o-", label=name)
        axes.set(xlabel="rotation, degrees", ylabel="NLL, nats per image")
        axes.legend()
        plt.savefig(figure)


if __name__ == "__main__":
    main(*sys.argv[1:2])
