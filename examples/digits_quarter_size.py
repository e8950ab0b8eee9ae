"""A trained network becomes a Bayesian one with a quarter of its numbers.

Inducing weights start at a low-rank approximation of the trained weights and need
a few epochs. The table compares storage, accuracy and calibration.
"""

import sys

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import bayesify
from bayesify import likelihoods, metrics, posteriors, priors


def main(figure: str | None = None) -> None:
    torch.manual_seed(0)
    images, labels = load_digits(return_X_y=True)
    order = torch.randperm(len(labels))
    x, y = torch.tensor(images, dtype=torch.float32)[order], torch.tensor(labels)[order]
    x = (x - x.mean()) / x.std()
    loader = DataLoader(TensorDataset(x[:1200], y[:1200]), batch_size=100, shuffle=True)
    net = nn.Sequential(
        nn.Linear(64, 256),
        nn.ReLU(),
        nn.Linear(256, 256),
        nn.ReLU(),
        nn.Linear(256, 10),
    )
    optimizer = torch.optim.Adam(net.parameters(), lr=2e-3)
    for _ in range(10):  # any training of your own
        for batch_x, batch_y in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(net(batch_x), batch_y).backward()
            optimizer.step()
    plain = bayesify.bayesianize(
        net, posteriors.Point(), likelihood=likelihoods.Categorical()
    )
    small = bayesify.bayesianize(
        net,
        posteriors.InducingWeights(rows=16, cols=16, init="network", fit_to_layer=True),
        likelihood=likelihoods.Categorical(),
        prior=priors.Neal(scale=2.0),
    )
    bayesify.fit(small, loader, epochs=10, learning_rate=3e-3, seed=0, progress=False)

    numbers = {}
    print(f"{'':<18} {'numbers':>8} {'accuracy':>9} {'NLL':>6} {'ECE':>6}")
    for name, model in (("plain network", plain), ("inducing weights", small)):
        prediction = model.predict(x[1200:])
        scores = metrics.evaluate(prediction, y[1200:])
        numbers[name] = bayesify.count_parameters(model)
        print(
            f"{name:<18} {numbers[name]:>8,} {scores['accuracy']:>9.3f}"
            f" {scores['nll']:>6.3f} {scores['ece']:>6.3f}"
        )
        assert scores["accuracy"] > 0.93
    assert numbers["inducing weights"] < numbers["plain network"] / 3

    if figure:
        from matplotlib import pyplot as plt

        _, axes = plt.subplots(figsize=(6, 3))
        axes.bar(list(numbers), list(numbers.values()), width=0.5)
        axes.set(ylabel="numbers stored")
        plt.savefig(figure)


if __name__ == "__main__":
    main(*sys.argv[1:2])
