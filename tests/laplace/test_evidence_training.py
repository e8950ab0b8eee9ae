"""Training with precisions by the evidence, against the exact evidence of a linear model and a fixed weak prior."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

import bayesify
from bayesify import likelihoods, posteriors, priors
from bayesify.laplace import fit_with_evidence
from bayesify.laplace.evidence_training import NUM_FIXED_POINT_STEPS


def linear_data(noise: float) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    x = torch.randn(40, 4, dtype=torch.float64)
    y = x @ torch.tensor([[0.5], [0.1], [-0.3], [0.2]], dtype=torch.float64) + 0.1
    return x, y + math.sqrt(noise) * torch.randn_like(y), torch.cat([x, torch.ones_like(y)], 1)


@pytest.mark.parametrize("covariance", ["full", "kronecker"])
def test_a_linear_model_has_the_precision_of_the_largest_evidence(covariance: str) -> None:
    x, y, features = linear_data(0.25)
    values, vectors = torch.linalg.eigh(features @ features.T)

    def evidence(precision: Tensor) -> Tensor:
        """Of precisions [n], by the law of the targets."""
        variances = 0.25 + values / precision.unsqueeze(-1)
        return -0.5 * ((2 * math.pi * variances).log() + (vectors.T @ y)[:, 0].square() / variances).sum(-1)

    grid = torch.logspace(-1, 3, 2000, dtype=torch.float64)
    best = float(grid[evidence(grid).argmax()])
    laplace = fit_with_evidence(
        nn.Linear(4, 1).double(), likelihoods.Gaussian(noise=0.25, learn=False), [(x, y)],
        epochs=160, every=20, covariance=covariance, learning_rate=0.05,  # type: ignore[arg-type]
    )  # fmt: skip
    found = laplace.prior_precision
    assert isinstance(found, dict)
    # The evidence is flat at its maximum, and the weights are within 1e-3 of the maximum a posteriori.
    assert found["weight"] == pytest.approx(best, rel=0.02)
    assert float(laplace.log_evidence()) == pytest.approx(float(evidence(torch.tensor(best))), abs=1e-2)


def test_noise_that_was_not_given_follows_the_evidence() -> None:
    x, y, features = linear_data(0.25)
    laplace = fit_with_evidence(
        nn.Linear(4, 1).double(), likelihoods.Gaussian(), [(x, y)],
        epochs=200, every=20, covariance="full", learning_rate=0.05,
    )  # fmt: skip
    precision = laplace.prior_precision["weight"]  # type: ignore[index]
    variance = float(laplace.likelihood.noise.detach())
    values = torch.linalg.eigvalsh(features.T @ features) / variance
    gamma = float((values / (values + precision)).sum())
    weights = torch.cat([part.detach().flatten() for part in laplace.network.parameters()])
    residual = float((y[:, 0] - features @ weights).square().sum())
    assert precision == pytest.approx(gamma / float(weights.square().sum()), rel=0.03)
    assert variance == pytest.approx(residual / (len(x) - gamma), rel=0.1)  # the last epochs train it by its gradient


@pytest.mark.parametrize("trained", [False, True])
@pytest.mark.parametrize("noise", [0.04, 4.0])
def test_a_given_noise_variance_stays_fixed(noise: float, trained: bool) -> None:
    x, y, _ = linear_data(0.25)
    likelihood = likelihoods.Gaussian() if trained else likelihoods.Gaussian(noise=noise)
    likelihood.set_noise(noise)  # a variance that training found counts as given, as for `Laplace.fit`
    laplace = fit_with_evidence(nn.Linear(4, 1).double(), likelihood, [(x, y)], epochs=6, every=3)
    kept = bayesify.Laplace(nn.Linear(4, 1).double(), likelihood).fit([(x, y)])
    for one in (laplace.likelihood, kept.likelihood, likelihood):
        assert float(one.noise.detach()) == pytest.approx(noise, rel=1e-6)
    assert laplace.likelihood.config() == likelihood.config()


def test_a_vector_of_noise_variances_stays_fixed() -> None:
    x, y, _ = linear_data(0.25)
    likelihood = likelihoods.Gaussian(noise=[0.3, 2.0])
    laplace = fit_with_evidence(nn.Linear(4, 2).double(), likelihood, [(x, y.repeat(1, 2))], epochs=4, every=2)
    assert laplace.likelihood.noise.tolist() == pytest.approx([0.3, 2.0], rel=1e-6)


@pytest.mark.parametrize("epochs", [1, 5, 10])
def test_few_epochs_use_the_evidence_once(epochs: int) -> None:
    x, y, features = linear_data(0.25)
    likelihood = likelihoods.Gaussian(noise=0.25)
    laplace = fit_with_evidence(
        nn.Linear(4, 1).double(), likelihood, [(x, y)], epochs=epochs, covariance="full", learning_rate=0.05
    )
    weights = torch.cat([part.detach().flatten() for part in laplace.network.parameters()])
    values, precision = torch.linalg.eigvalsh(features.T @ features) / 0.25, 4.0
    for _ in range(NUM_FIXED_POINT_STEPS):  # MacKay's update at the trained weights
        precision = float((values / (values + precision)).sum()) / float(weights.square().sum())
    assert laplace.prior_precision["weight"] == pytest.approx(precision, rel=1e-6)  # type: ignore[index]
    wanted = torch.linalg.inv(features.T @ features / 0.25 + precision * torch.eye(5, dtype=torch.float64))
    torch.testing.assert_close(laplace.covariance_matrix(), wanted, rtol=1e-6, atol=1e-9)


class PartlyDead(nn.Module):
    """A network with a ReLU layer whose units are 0 on all data."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.dead, self.head = nn.Linear(4, 3), nn.Linear(4, 3), nn.Linear(6, 1)
        with torch.no_grad():
            self.dead.bias.fill_(-50.0)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.cat([self.used(x).tanh(), self.dead(x).relu()], 1))


@pytest.mark.parametrize("covariance", ["full", "kronecker", "diagonal"])
def test_a_layer_without_curvature_keeps_its_precision(covariance: str) -> None:
    x, y, _ = linear_data(0.25)
    torch.manual_seed(0)
    data = [(x.float(), y.float())]
    laplace = fit_with_evidence(PartlyDead(), likelihoods.Gaussian(), data, epochs=9, every=3, covariance=covariance)  # type: ignore[arg-type]
    found = laplace.prior_precision
    assert isinstance(found, dict)
    assert found["dead.weight"] == found["dead.bias"] == 4.0  # the number of inputs
    assert found["used.weight"] != 4.0
    assert found["head.weight"] != 6.0


@pytest.mark.slow
def test_irrelevant_inputs_are_found_without_validation_data() -> None:
    better = []
    for seed in range(5):
        torch.manual_seed(seed)
        x = torch.randn(1060, 12)
        y = (x[:, :1] * 2).sin() + 0.3 * torch.randn(1060, 1)
        net, likelihood = (
            nn.Sequential(nn.Linear(12, 50), nn.Tanh(), nn.Linear(50, 1)),
            likelihoods.Gaussian(0.09, False),
        )
        data = [(x[:60], y[:60])]
        found = fit_with_evidence(net, likelihood, data, epochs=300, every=20)
        weak = bayesify.bayesianize(net, posteriors.Point(), likelihood=likelihood, prior=priors.Gaussian(3.0))
        bayesify.fit(weak, data, epochs=300, learning_rate=1e-2, seed=0, progress=False)
        fixed = bayesify.Laplace(weak.mean_network().eval(), likelihood, "all", "kronecker", 1 / 9).fit(data)
        scores = [float(one.predict(x[60:]).log_prob(y[60:]).mean()) for one in (found, fixed)]
        better.append(scores[0] - scores[1])
    assert min(better) > 0
