"""Handwritten digits that a network never saw: do they look uncertain to it?

The network is trained on the digits 0 to 7 of scikit-learn's 8 x 8 images. It then
predicts images of 8 and 9.
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
    x, y = torch.tensor(images, dtype=torch.float32), torch.tensor(labels)
    x = (x - x.mean()) / x.std()
    known = (y < 8).nonzero().squeeze(-1)
    known = known[torch.randperm(len(known))]
    train, test = known[:1000], known[1000:]
    unfamiliar = x[y >= 8]

    net = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 8))
    bnn = bayesify.bayesianize(
        net,
        posteriors.Ensemble(members=5),
        likelihood=likelihoods.Categorical(),
        prior=priors.Neal(scale=2.0),
    )
    loader = DataLoader(TensorDataset(x[train], y[train]), batch_size=100, shuffle=True)
    bayesify.fit(bnn, loader, epochs=15, learning_rate=1e-2, seed=0, progress=False)

    seen, unseen = bnn.predict(x[test]), bnn.predict(unfamiliar)
    scores = metrics.evaluate(seen, y[test])
    print(f"digits 0 to 7: accuracy {scores['accuracy']:.3f}, ECE {scores['ece']:.3f}")
    found = metrics.ood(seen, unseen)
    for score in ("max_probability", "entropy", "mutual_information"):
        print(
            f"telling 8 and 9 from them by {score}: AUROC {found[f'auroc_{score}']:.3f}"
        )
    assert found["auroc_entropy"] > 0.8

    if figure:
        from matplotlib import pyplot as plt

        _, axes = plt.subplots(figsize=(6, 3))
        bins = torch.linspace(0, 2, 31).numpy()
        axes.hist(seen.entropy.numpy(), bins, density=True, alpha=0.6, label="0 to 7")
        axes.hist(
            unseen.entropy.numpy(), bins, density=True, alpha=0.6, label="8 and 9"
        )
        axes.set(xlabel="entropy of the prediction, nats", ylabel="density")
        axes.legend()
        plt.savefig(figure)


if __name__ == "__main__":
    main(*sys.argv[1:2])
