"""BoTorch models: joint draws, exact acquisition values for a Gaussian, gradients, units, paths, further training."""

import importlib.util
import math
import warnings

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

if importlib.util.find_spec("botorch") is None:  # its import warns, which is an error here
    pytest.skip("botorch is not installed", allow_module_level=True)

import bayesify
from bayesify import baselines, likelihoods, posteriors
from bayesify.adapters import BoTorchModel
from bayesify.arguments.installing import load
from bayesify.predictive import TargetTransform
from bayesify.random_features import RandomFeatureGP

load("botorch", extra="botorch", owner="the tests")
from botorch.acquisition import (  # noqa: E402
    LogExpectedImprovement,
    PosteriorMean,
    qExpectedImprovement,
    qLogNoisyExpectedImprovement,
    qUpperConfidenceBound,
)
from botorch.models.model import Model  # noqa: E402
from botorch.optim import optimize_acqf  # noqa: E402
from botorch.sampling.get_sampler import get_sampler  # noqa: E402

BOUNDS = torch.tensor([[0.0, 0.0], [1.0, 1.0]], dtype=torch.float64)


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def points(*shape, seed=0):
    return torch.rand(*shape, generator=seeded(seed), dtype=torch.float64)


def network(outputs=1, posterior=None, likelihood=None):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(2, 16), nn.Tanh(), nn.Dropout(0.5), nn.Linear(16, outputs))
    posterior = posterior or posteriors.MeanField(init_std=0.3)
    return bayesify.bayesianize(net, posterior, likelihood=likelihood or likelihoods.Gaussian(0.01))


@pytest.fixture(scope="module")
def linear():
    """Bayesian linear regression: a Laplace approximation at the mean of the posterior, which is exact, and that Gaussian."""
    x = points(12, 2)
    y = x @ torch.tensor([[1.0], [-2.0]], dtype=torch.float64) + 0.3 * torch.randn(12, 1, generator=seeded(1)).double()
    features = torch.cat((x, torch.ones(12, 1)), 1)
    covariance = torch.linalg.inv(features.T @ features / 0.09 + torch.eye(3))
    mean = covariance @ features.T @ y / 0.09
    net = nn.Linear(2, 1).double()
    with torch.no_grad():
        net.weight.copy_(mean[:2].T)
        net.bias.copy_(mean[2])
    laplace = bayesify.Laplace(net, likelihoods.Gaussian(0.09, learn=False), prior_precision=1.0).fit([(x, y)])
    return laplace, mean, covariance, y


def gaussian(linear, at):
    """Mean [q] and covariance [q, q] of f at points [q, 2], in closed form."""
    features = torch.cat((at, torch.ones(len(at), 1)), 1)
    return (features @ linear[1])[:, 0], features @ linear[2] @ features.T


@pytest.mark.filterwarnings("ignore:qExpectedImprovement has known numerical issues")
def test_acquisition_values_are_those_of_the_gaussian(linear):
    """S = 20,000 draws. Improvement and deviation have standard deviations of at most that of f: 5 of sigma / sqrt(S)."""
    draws, at = 20_000, points(5, 2, seed=3)
    model = BoTorchModel(linear[0], draws, generator=seeded())
    best = float(linear[3].max()) - 0.5
    mean, covariance = gaussian(linear, at)
    std = covariance.diagonal().sqrt()
    z = (mean - best) / std
    improvement = std * (z * torch.special.ndtr(z) + torch.exp(-0.5 * z**2) / math.sqrt(2 * math.pi))
    allowed = 5 * std / math.sqrt(draws)
    assert (improvement > 10 * allowed).any()  # else there is nothing to see
    found = qExpectedImprovement(model, best, sampler=model.sampler())(at[:, None])
    assert ((found - improvement).abs() < allowed).all()
    bound = qUpperConfidenceBound(model, beta=0.5, sampler=model.sampler())(at[:, None])
    assert ((bound - mean - math.sqrt(0.5) * std).abs() < (1 + math.sqrt(0.5)) * allowed).all()
    analytic = LogExpectedImprovement(model, best)(at[:, None]).exp()
    assert ((analytic - improvement).abs() < allowed).all()


@pytest.mark.filterwarnings("ignore:qExpectedImprovement has known numerical issues")
def test_improvement_over_several_points_is_joint(linear):
    """200,000 samples of the exact Gaussian over 4 points beside 20,000 draws."""
    draws, at = 20_000, 0.5 + 0.02 * points(4, 2, seed=4)  # next to each other: one improvement, not four
    model = BoTorchModel(linear[0], draws, generator=seeded())
    mean, covariance = gaussian(linear, at)
    best = float(mean.max())
    root = torch.linalg.cholesky(covariance + 1e-12 * torch.eye(4))
    exact = mean + torch.randn(200_000, 4, generator=seeded(), dtype=torch.float64) @ root.T
    wanted = (exact.amax(1) - best).clamp_min(0)
    found = float(qExpectedImprovement(model, best, sampler=model.sampler())(at))
    assert abs(found - float(wanted.mean())) < 5 * float(wanted.std()) * math.sqrt(1 / draws + 1 / 200_000)
    apart = mean + exact.std(0) * torch.randn(200_000, 4, generator=seeded(1), dtype=torch.float64)
    independent = float((apart.amax(1) - best).clamp_min(0).mean())
    assert abs(found - independent) > 10 * float(wanted.std()) / math.sqrt(draws)  # the correlations are seen


def train(model):
    loader = DataLoader(TensorDataset(points(8, 2).float(), points(8, 1, seed=1).float()), batch_size=8)
    bayesify.fit(model, loader, epochs=1, progress=False, seed=0)
    return model


def predictors():
    loader = [(points(8, 2).float(), points(8, 1, seed=1).float())]
    plain = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 1))
    law = likelihoods.Gaussian(0.1)
    yield "mean_field", network
    yield "ensemble", lambda: network(posterior=posteriors.Ensemble(3))
    yield "inducing", lambda: network(posterior=posteriors.InducingWeights(4, 4))
    yield "walsh_hadamard", lambda: network(posterior=posteriors.WalshHadamard())
    yield "global_inducing", lambda: network(posterior=posteriors.GlobalInducing(points(6, 2).float()))
    yield "heteroscedastic", lambda: network(2, likelihood=likelihoods.HeteroscedasticGaussian())
    yield "counts", lambda: network(likelihood=likelihoods.Poisson())
    yield "process", lambda: RandomFeatureGP(2, 32)
    yield "laplace", lambda: bayesify.Laplace(plain, law).fit(loader)
    yield "swag", lambda: baselines.SWAG(plain, law, rank=2).fit(loader, 3, 0.01, num_data=8, progress=False)
    yield "chain", lambda: baselines.FixedDraws(network().draw(5, generator=seeded()).detach(), law)
    yield (
        "function_space",
        lambda: bayesify.FunctionSpaceVI(network().eval(), context=bayesify.Box([0.0] * 2, [1.0] * 2, 4)),
    )


PREDICTORS = dict(predictors())


@pytest.mark.parametrize("kind", PREDICTORS)
def test_every_predictor_with_draws(kind):
    predictor = PREDICTORS[kind]()
    model = BoTorchModel(predictor, None if kind in ("ensemble", "chain") else 6, generator=seeded())
    assert isinstance(model, Model)
    at = points(3, 2, 2).requires_grad_()
    found = model.posterior(at)
    count = {"ensemble": 3, "chain": 5}.get(kind, 6)
    assert found.values.shape == (3, count, 2, 1)
    assert found.values.dtype == torch.float64
    if kind != "laplace":
        draws = predictor.draw(count, generator=seeded())
        outputs = baselines.FixedDraws(draws, predictor.likelihood).predict(at.detach().float().flatten(0, 1))
        torch.testing.assert_close(found.mean.flatten(0, 1), outputs.mean.double(), rtol=1e-4, atol=1e-5)
    gradient = torch.autograd.grad(found.mean.sum(), at)[0]
    assert bool(gradient.abs().sum() > 0)
    assert torch.isfinite(gradient).all()
    assert not any(value.requires_grad for value in model.draws.weights.values())


def test_functions_of_laplace_are_those_of_its_predictions():
    """S = 20,000 draws: mean and joint covariance over three points of the linearized network, within 5 standard errors."""
    laplace, at, count = PREDICTORS["laplace"](), points(3, 2), 20_000
    values = BoTorchModel(laplace, count, generator=seeded()).posterior(at).values[..., 0]
    exact, mean = (
        laplace.output_covariance(at.float(), joint=True).double().view(3, 3),
        laplace.predict(at.float()).mean,
    )
    std = exact.diagonal().sqrt()
    assert ((values.mean(0) - mean[:, 0]).abs() < 5 * std / math.sqrt(count) + 1e-5).all()
    assert ((torch.cov(values.T) - exact).abs() < 5 * std[:, None] * std * math.sqrt(2 / count)).all()


def test_draws_are_the_same_functions_for_every_point_batch_and_call():
    model = BoTorchModel(network(), 7, generator=seeded())
    at = points(4, 3, 2)
    whole = model.posterior(at).values
    for batch in range(4):
        torch.testing.assert_close(model.posterior(at[batch]).values, whole[batch], rtol=1e-5, atol=1e-6)
    assert torch.equal(model.posterior(at).values, whole)
    torch.testing.assert_close(model.posterior(at.view(2, 2, 3, 2)).values, whole.view(2, 2, 7, 3, 1))


def test_samples_are_the_draws_in_order():
    model = BoTorchModel(network(), 8, generator=seeded())
    found = model.posterior(points(5, 3, 2))
    sampler = get_sampler(found, torch.Size([24]))
    samples = sampler(found)
    assert samples.shape == (24, 5, 3, 1)
    assert torch.equal(samples[:8], found.values.movedim(1, 0))
    assert torch.equal(samples[8:16], samples[:8])
    torch.testing.assert_close(samples.mean(0), found.mean)
    assert sampler(model.posterior(points(2, 2))).shape == (24, 2, 1)  # another batch
    assert found.rsample(torch.Size([4])).shape == (4, 5, 3, 1)


def test_gradients_by_x_are_those_of_finite_differences():
    bnn = network().double()
    model = BoTorchModel(bnn, 5, generator=seeded())
    acquisition = qLogNoisyExpectedImprovement(
        model, points(6, 2, seed=2), sampler=model.sampler(), prune_baseline=False
    )
    assert torch.autograd.gradcheck(acquisition, points(2, 3, 2).requires_grad_(), eps=1e-6, atol=1e-5)


def test_values_are_in_the_targets_units():
    y = points(20, 1).exp()
    transform = TargetTransform.fit("log", y)
    bnn = network().double()
    at = points(4, 2)
    plain = BoTorchModel(bnn, 6, generator=seeded()).posterior(2 * at - 1).values
    model = BoTorchModel(bnn, 6, inputs=lambda x: 2 * x - 1, targets=transform, generator=seeded())
    torch.testing.assert_close(model.posterior(at).values, torch.exp(transform.shift + transform.scale * plain))


def test_noise_is_added_when_asked_for():
    """S = 20,000 draws of variance at most 10: the variance of their sum with noise of 4, within 5 standard errors."""
    model = BoTorchModel(network(likelihood=likelihoods.Gaussian(4.0)), 20_000, generator=seeded())
    at = points(2, 2)
    plain, noisy = (model.posterior(at, observation_noise=flag) for flag in (False, True))
    torch.testing.assert_close(noisy.variance, plain.variance + 4, rtol=0, atol=5 * 14 * math.sqrt(2 / 20_000))
    torch.testing.assert_close(noisy.values, model.posterior(at, observation_noise=True).values)
    added = (noisy.values - plain.values)[..., 0]
    assert abs(float(torch.corrcoef(added.T)[0, 1])) < 5 / math.sqrt(20_000)


def test_several_outputs():
    model = BoTorchModel(network(3), 4, num_outputs=3, generator=seeded())
    assert model.num_outputs == 3
    assert model.batch_shape == torch.Size()
    at = points(5, 2)
    whole = model.posterior(at).values
    assert torch.equal(model.posterior(at, output_indices=[2, 0]).values, whole[..., [2, 0]])


def test_a_thompson_path_is_a_function_that_an_optimizer_climbs(linear):
    model = BoTorchModel(linear[0], 16, generator=seeded())
    path = model.thompson_path(seeded(5))
    weights = linear[0].draw(1, generator=seeded(5)).weights
    at = points(3, 4, 2)
    torch.testing.assert_close(path.posterior(at).mean, at @ weights["weight"][0].T + weights["bias"][0])
    found, value = optimize_acqf(PosteriorMean(path), BOUNDS, q=1, num_restarts=2, raw_samples=8)
    assert torch.equal(found[0], (weights["weight"][0, 0] > 0).double())  # a linear function is highest in a corner
    torch.testing.assert_close(value, path.posterior(found).mean[0, 0])
    chain = BoTorchModel(model.draws)
    assert (chain.posterior(at).values - chain.thompson_path(seeded()).posterior(at).mean[:, None]).abs().amin() == 0


def test_acquisition_functions_are_optimized():
    bnn = train(network())
    x, y = points(8, 2), points(8, 1, seed=1)
    model = BoTorchModel(bnn, 16, data=(x, y), generator=seeded())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        acquisition = qLogNoisyExpectedImprovement(model, x, sampler=model.sampler())
        found, value = optimize_acqf(acquisition, BOUNDS, q=2, num_restarts=2, raw_samples=16, options={"maxiter": 20})
    assert found.shape == (2, 2)
    assert float(value) >= float(acquisition(points(64, 2, 2, seed=9)).max()) - 0.1


def test_conditioning_goes_on_from_the_trained_model():
    x = points(8, 2)
    y = x.sum(-1, keepdim=True)
    bnn = network()
    model = BoTorchModel(train(bnn), 16, data=(x, y), generator=seeded())
    before = {name: value.clone() for name, value in bnn.state_dict().items()}
    new_x, new_y = torch.tensor([[0.5, 0.5]], dtype=torch.float64), torch.tensor([[4.0]], dtype=torch.float64)
    after = model.condition_on_observations(new_x.repeat(4, 1), new_y.repeat(4, 1), epochs=60, learning_rate=0.02)
    near, far = float(after.posterior(new_x).mean), float(model.posterior(new_x).mean)
    assert abs(near - 4) < abs(far - 4) - 0.5
    assert all(torch.equal(value, before[name]) for name, value in bnn.state_dict().items())
    once_more = after.condition_on_observations(new_x, new_y, epochs=1)
    assert once_more.num_outputs == 1


def test_what_does_not_fit_is_named(linear):
    classes = network(3, likelihood=likelihoods.Categorical())
    with pytest.raises(TypeError, match="Categorical is not a likelihood for numeric targets"):
        BoTorchModel(classes)
    with pytest.raises(TypeError, match="has no draws"):
        BoTorchModel(nn.Linear(1, 1))
    with pytest.raises(ValueError, match=r"give points \[N, D\]"):
        BoTorchModel(network(), data=(points(3, 2), points(4, 1)))
    x, y = points(3, 2), points(3, 1)
    with pytest.raises(TypeError, match="Laplace cannot be trained further"):
        BoTorchModel(linear[0], 2, data=(x, y)).condition_on_observations(x, y)
    with pytest.raises(ValueError, match="training data are unknown"):
        BoTorchModel(network(), 2).condition_on_observations(x, y)
    for given in ((x[None], y[None]), (x, y[:, 0]), (x, y[:2])):
        with pytest.raises(ValueError, match=r"give \[N, D\] and \[N, O\]"):
            BoTorchModel(network(), 2, data=(x, y)).condition_on_observations(*given)
    with pytest.raises(ValueError, match=r"points \(2,\).*x.unsqueeze\(0\)"):
        BoTorchModel(network(), 2).posterior(x[0])
    with pytest.raises(TypeError, match="observation_noise= is neither True nor False"):
        BoTorchModel(network(), 2).posterior(x, observation_noise=torch.ones(1))
