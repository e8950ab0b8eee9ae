"""How far each posterior opens its interval between two clusters of data."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import bayesify
from bayesify import likelihoods, metrics, posteriors, priors
from bayesify.datasets import toy

POSTERIORS = {
    "point": posteriors.Point(),
    "mean field": posteriors.MeanField(init_std=1e-2, local_reparameterization=True),
    "ensemble of 5": posteriors.Ensemble(members=5),
}


def main() -> None:
    problem = toy.cosine(seed=0)
    loader = DataLoader(
        TensorDataset(problem.x, problem.y), batch_size=100, shuffle=True
    )
    assert problem.gap is not None
    middle = torch.tensor([[sum(problem.gap) / 2]])
    print(
        f"{'posterior':<14} {'parameters':>10} {'nll':>7} {'in 90 %':>8} {'gap std':>8}"
    )
    for name, posterior in POSTERIORS.items():
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(1, 50), nn.Tanh(), nn.Linear(50, 1))
        bnn = bayesify.bayesianize(
            net,
            posterior,
            likelihood=likelihoods.Gaussian(noise=problem.noise, learn=False),
            prior=priors.Neal(scale=4.0),
        )
        bayesify.fit(
            bnn, loader, epochs=250, learning_rate=2e-2, seed=0, progress=False
        )
        scores = metrics.evaluate(
            bnn.predict(problem.x_test, num_draws=64), problem.y_test
        )
        in_gap = bnn.predict(middle, num_draws=64).epistemic.sqrt().item()
        count = bayesify.count_parameters(bnn)
        print(
            f"{name:<14} {count:>10,} {scores['nll']:>7.2f}"
            f" {scores['coverage_90']:>8.2f} {in_gap:>8.3f}"
        )


if __name__ == "__main__":
    main()
