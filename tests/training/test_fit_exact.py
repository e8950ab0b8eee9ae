"""`fit` against exact answers: conjugate regression, ridge regression, sums that must not depend on how data is cut."""

import copy

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import bayesify
from bayesify import KLSchedule, likelihoods, posteriors, priors
from bayesify.training import Steps

NOISE = 0.25


def regression(rows=40, features=3, seed=0):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, features, dtype=torch.float64, generator=generator)
    x[:, 1] += 0.8 * x[:, 0]
    y = x @ torch.tensor([[0.7], [-1.2], [0.4]], dtype=torch.float64) + 0.3
    y = y + NOISE**0.5 * torch.randn(y.shape, dtype=torch.float64, generator=generator)
    return x, y


def linear(posterior, seed=0):
    torch.manual_seed(seed)
    net = nn.Linear(3, 1).double()
    likelihood = likelihoods.Gaussian(noise=NOISE, learn=False)
    return bayesify.bayesianize(net, posterior, likelihood=likelihood, prior=priors.Standard())


def exact_posterior(x, y):
    """Mean and covariance of [w, b] under a standard normal prior."""
    design = torch.cat((x, torch.ones(len(x), 1, dtype=x.dtype)), dim=1)
    precision = design.T @ design / NOISE + torch.eye(4, dtype=x.dtype)
    covariance = torch.linalg.inv(precision)
    return (covariance @ design.T @ y / NOISE).squeeze(-1), covariance


def decay(optimizer):
    """A learning rate that falls to a hundredth in 500 epochs, so that the noise of the draws averages out."""
    return torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.01 ** (1 / 500))


@pytest.mark.slow
def test_full_covariance_reaches_the_exact_posterior():
    x, y = regression()
    bnn = linear(posteriors.FullCovariance(init_std=0.1))
    bayesify.fit(bnn, [(x, y)], epochs=250, learning_rate=0.1, scheduler=decay, num_draws=32, seed=1, progress=False)
    mean, covariance = exact_posterior(x, y)
    posterior = bnn.posterior
    factor = posterior.scale_tril("")
    found = posterior.mean_value[""]
    # What is left is the noise of the draws in the last steps. Over 12 pairs of seeds the largest distance of a mean, in units
    # of its posterior standard deviation, was 0.053, and that of a covariance, relative to the largest variance, 0.066.
    assert ((found - mean).abs() / covariance.diagonal().sqrt()).max() < 0.15
    assert (factor @ factor.T - covariance).abs().max() < 0.15 * covariance.diagonal().max()


def test_map_phase_reaches_ridge_regression():
    x, y = regression()
    bnn = linear(posteriors.MeanField(init_std=0.3))
    stds = {name: value.clone() for name, value in bnn.posterior.raw_std.items()}
    history = bayesify.fit(
        bnn, [(x, y)], epochs=0, map_epochs=300, learning_rate=0.15, scheduler=decay, seed=0, progress=False
    )
    mean, _ = exact_posterior(x, y)  # the mode of a Gaussian is its mean
    found = torch.cat([value.flatten() for value in bnn.posterior.mean().values()])
    torch.testing.assert_close(found, mean, rtol=0, atol=1e-6)
    for name, value in bnn.posterior.raw_std.items():
        assert torch.equal(value, stds[name])
    assert set(history.column("phase")) == {"map"}


def test_a_step_follows_the_gradient_of_the_negative_elbo_per_example():
    x, y = regression()
    bnn = linear(posteriors.MeanField(init_std=0.3))
    reference = copy.deepcopy(bnn)
    seen = {}

    class Record(torch.optim.SGD):
        def step(self, closure=None):
            seen.update({index: p.grad.clone() for index, p in enumerate(self.param_groups[0]["params"])})

    bayesify.fit(
        bnn,
        [(x, y)],
        epochs=1,
        optimizer=lambda parameters: Record(parameters, lr=1.0),
        kl_weight=0.5,
        num_draws=3,
        num_data=80,
        seed=5,
        progress=False,
    )
    from bayesify.training.random_streams import derive_seed

    generator = torch.Generator().manual_seed(derive_seed(5, "draws", 0))
    elbo = reference.elbo(x, y, num_data=80, num_draws=3, kl_weight=0.5, generator=generator)
    (-elbo / 80).backward()
    for index, parameter in enumerate(reference.parameters()):
        torch.testing.assert_close(seen[index], parameter.grad, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("size", "accumulate"), [(10, 4), (20, 2), (16, 3)])
def test_accumulated_batches_equal_one_large_batch(size, accumulate):
    x, y = regression()  # 40 rows; 16 leaves a short last batch
    weights = torch.rand(40, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    results = []
    for batch_size, times in ((40, 1), (size, accumulate)):
        bnn = linear(posteriors.MeanField(init_std=0.3))
        loader = DataLoader(TensorDataset(x, y, weights), batch_size=batch_size)
        history = bayesify.fit(
            bnn, loader, epochs=5, steps=Steps(times, clip_norm=1.0), learning_rate=0.1, seed=2, progress=False
        )
        results.append((dict(bnn.named_parameters()), history))
    (one, one_history), (many, many_history) = results
    for name, value in one.items():
        torch.testing.assert_close(many[name], value, rtol=1e-10, atol=1e-12)
    for a, b in zip(one_history, many_history, strict=True):
        assert a["nll"] == pytest.approx(b["nll"], rel=1e-10)
        assert a["kl"] == pytest.approx(b["kl"], rel=1e-10)
        assert a["elbo"] == pytest.approx(b["elbo"], rel=1e-10)


def test_history_adds_up_batches_of_different_size():
    """With a learning rate that changes nothing and draws of no spread, the epoch's numbers are those of the whole data."""
    x, y = regression()
    bnn = linear(posteriors.MeanField(init_std=1e-12))
    frozen = copy.deepcopy(bnn)
    loader = DataLoader(TensorDataset(x, y), batch_size=16)
    row = bayesify.fit(bnn, loader, epochs=1, learning_rate=1e-300, seed=0, progress=False)[0]
    data, kl = frozen.elbo_terms(x, y, num_data=40)
    assert row["nll"] == pytest.approx(-data.item() / 40, rel=1e-9)
    assert row["kl"] == pytest.approx(kl.item(), rel=1e-12)


def test_kl_schedule_is_zero_then_linear_then_one():
    schedule = KLSchedule(zero_epochs=2, linear_epochs=4)
    assert [schedule(t) for t in (0, 1.9, 2, 3, 4, 6, 9)] == [0, 0, 0, 0.25, 0.5, 1, 1]
    assert [KLSchedule(zero_epochs=1)(t) for t in (0.5, 1)] == [0, 1]
    with pytest.raises(ValueError, match="linear_epochs=-1"):
        KLSchedule(linear_epochs=-1)


def test_kl_schedule_counts_fractions_of_variational_epochs():
    x, y = regression()
    seen = []

    def schedule(t):
        seen.append(t)
        return min(1.0, t)

    loader = DataLoader(TensorDataset(x, y), batch_size=10)
    bnn = linear(posteriors.MeanField())
    history = bayesify.fit(
        bnn, loader, epochs=2, map_epochs=1, kl_schedule=schedule, kl_weight=0.5, seed=0, progress=False
    )
    steps = [t for t in seen if t not in (1.0, 2.0)] + [1.0]
    assert sorted(steps) == [0, 0.25, 0.5, 0.75, 1, 1.25, 1.5, 1.75]
    assert history.column("kl_weight") == [0.5, 0.375, 0.5]
