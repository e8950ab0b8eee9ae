"""Refer the uncertain cases to a doctor: what accuracy remains for the others?

The data are 569 tumors from scikit-learn, benign or malignant. The weights have a
mean-field posterior.
"""

import sys

import torch
from sklearn.datasets import load_breast_cancer
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import bayesify
from bayesify import likelihoods, metrics, posteriors


def main(figure: str | None = None) -> None:
    torch.manual_seed(0)
    table, labels = load_breast_cancer(return_X_y=True)
    order = torch.randperm(len(labels))
    x = torch.tensor(table, dtype=torch.float32)[order]
    y = torch.tensor(labels)[order]
    x = (x - x[:200].mean(0)) / x[:200].std(0)
    loader = DataLoader(TensorDataset(x[:200], y[:200]), batch_size=50, shuffle=True)

    net = nn.Sequential(nn.Linear(30, 20), nn.ReLU(), nn.Linear(20, 2))
    bnn = bayesify.bayesianize(
        net, posteriors.MeanField(init_std=0.05), likelihood=likelihoods.Categorical()
    )
    bayesify.fit(bnn, loader, epochs=100, learning_rate=1e-2, seed=0, progress=False)

    prediction = bnn.predict(x[200:], num_draws=64)
    scores = metrics.evaluate(prediction, y[200:])
    print(f"all cases: accuracy {scores['accuracy']:.3f}, NLL {scores['nll']:.3f}")
    right = (prediction.labels == y[200:])[prediction.entropy.argsort()].float()
    shares = (0.0, 0.05, 0.1, 0.2, 0.3)
    kept = [right[: round((1 - share) * len(right))].mean().item() for share in shares]
    for share, accuracy in zip(shares, kept, strict=True):
        print(f"the most uncertain {share:4.0%} referred: accuracy {accuracy:.3f}")
    assert kept[-1] > kept[0]

    if figure:
        from matplotlib import pyplot as plt

        _, axes = plt.subplots(figsize=(6, 3))
        number = torch.arange(1, len(right) + 1)
        axes.plot(100 * (1 - number / len(right)), 100 * right.cumsum(0) / number)
        axes.set(xlim=(0, 50), ylim=(94, 100.2), xlabel="referred, %")
        axes.set(ylabel="accuracy of the others, %")
        plt.savefig(figure)


if __name__ == "__main__":
    main(*sys.argv[1:2])
