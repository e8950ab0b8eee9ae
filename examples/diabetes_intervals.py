"""Intervals for the progression of diabetes: do nine of ten patients lie in theirs?

The data are 442 patients from scikit-learn, with ten measurements each. The noise of
a heteroscedastic network depends on the patient.
"""

import sys

import torch
from sklearn.datasets import load_diabetes
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import bayesify
from bayesify import likelihoods, metrics, posteriors


def main(figure: str | None = None) -> None:
    torch.manual_seed(0)
    table, target = load_diabetes(return_X_y=True)
    order = torch.randperm(len(target))
    x = torch.tensor(table, dtype=torch.float32)[order]
    y = torch.tensor(target, dtype=torch.float32)[order].unsqueeze(-1)
    x, y = (x - x[:300].mean(0)) / x[:300].std(0), (y - y[:300].mean()) / y[:300].std()
    loader = DataLoader(TensorDataset(x[:300], y[:300]), batch_size=50, shuffle=True)

    models = {
        "one noise": (likelihoods.Gaussian(noise=0.5), 1),
        "noise by patient": (likelihoods.HeteroscedasticGaussian(), 2),
    }
    print(f"{'':<18} {'NLL':>6} {'RMSE':>6} {'in 50 %':>8} {'in 90 %':>8} {'width':>6}")
    for name, (likelihood, outputs) in models.items():
        net = nn.Sequential(nn.Linear(10, 20), nn.Tanh(), nn.Linear(20, outputs))
        bnn = bayesify.bayesianize(
            net, posteriors.Ensemble(members=5), likelihood=likelihood
        )
        bayesify.fit(bnn, loader, epochs=40, learning_rate=5e-3, seed=0, progress=False)
        prediction = bnn.predict(x[300:])
        scores = metrics.evaluate(prediction, y[300:])
        lower, upper = prediction.interval(0.9)
        print(
            f"{name:<18} {scores['nll']:>6.3f} {scores['rmse']:>6.3f}"
            f" {scores['coverage_50']:>8.2f} {scores['coverage_90']:>8.2f}"
            f" {(upper - lower).mean():>6.2f}"
        )
        assert 0.8 < scores["coverage_90"] < 0.98

    if figure:
        from matplotlib import pyplot as plt

        _, axes = plt.subplots(figsize=(6, 3))
        rank = prediction.mean.squeeze(-1).argsort()
        place = torch.arange(len(rank))
        low, high = (end[rank].squeeze(-1).numpy() for end in (lower, upper))
        axes.fill_between(place, low, high, alpha=0.3, label="90 % interval")
        axes.plot(place, prediction.mean[rank], label="mean")
        axes.plot(place, y[300:][rank], ".", markersize=4, label="patients")
        axes.set(xlabel="test patients, by predicted mean", ylabel="progression")
        axes.legend(loc="upper left")
        plt.savefig(figure)


if __name__ == "__main__":
    main(*sys.argv[1:2])
