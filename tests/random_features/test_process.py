"""Random-feature Gaussian processes against Bayesian linear regression and exact Gaussian process regression."""

from __future__ import annotations

import copy
import math
import pickle

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import bayesify
from bayesify import likelihoods, posteriors
from bayesify.datasets.toy import linear_posterior
from bayesify.random_features import RandomFeatureGP, RandomFeatureNetwork
from bayesify.random_features.process import linear_moments

POSTERIORS = {
    "mean_field": lambda: posteriors.MeanField(init_std=0.3),
    "k_tied": lambda: posteriors.KTied(init_std=0.3),
    "full_covariance": lambda: posteriors.FullCovariance(init_std=0.3),
    "walsh_hadamard": lambda: posteriors.WalshHadamard(init_std=0.3),
    "walsh_hadamard full": lambda: posteriors.WalshHadamard(covariance="full", init_std=0.3),
    "point": lambda: posteriors.Point(),
}


def data(n=40, num_inputs=2, seed=0):
    generator = torch.Generator().manual_seed(seed)
    x = torch.rand(n, num_inputs, generator=generator, dtype=torch.float64)
    y = torch.sin(5 * x[:, :1]) + x[:, -1:] + 0.1 * torch.randn(n, 1, generator=generator, dtype=torch.float64)
    return x, y


def stirred(gp, seed=1):
    """The same model with every parameter of its posterior moved at random."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in gp.posteriors.parameters():
            parameter.add_(0.2 * torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype))
    return gp


@pytest.mark.parametrize("name", POSTERIORS)
@pytest.mark.parametrize("num_features", [16, 10])
def test_moments_are_those_of_the_weights(name, num_features):
    """Against the covariance of the weights, found by pushing every direction of the noise through a draw."""
    gp = stirred(RandomFeatureGP(2, num_features, num_outputs=2, posterior=POSTERIORS[name](), seed=3).double())
    x, _ = data()
    mean, variance = gp.function_moments(x)
    features = gp.features(x)
    for output in range(2):
        weight = f"heads.{output}.weight"
        torch.testing.assert_close(mean[:, output], features @ gp.posterior.mean()[weight][0])
        factor = weight_factor(gp, output)
        torch.testing.assert_close(variance[:, output], (features @ factor).square().sum(-1))


def weight_factor(gp, output):
    """F with Cov(w) = F F^T, by definition of each posterior."""
    posterior, weight = gp.posterior, f"heads.{output}.weight"
    if isinstance(posterior, posteriors.WalshHadamard):
        ((size, parts),) = posterior.groups.items()
        part = parts[output]
        left, right = posterior.left[str(size)][part.start], posterior.right[str(size)][part.start]
        family = posterior.g[str(size)]
        factor = torch.diag(family.log_std.exp()[part.start])
        if posterior.covariance == "full":
            factor = family.factor()[part.start]
        from scipy.linalg import hadamard

        signs = torch.tensor(hadamard(size), dtype=torch.float64) / math.sqrt(size)
        columns = [(torch.diag(left) @ signs @ torch.diag(g) @ signs @ torch.diag(right)).flatten() for g in factor.T]
        return torch.stack(columns, -1)[: gp.features.num_features]
    if isinstance(posterior, posteriors.FullCovariance):
        return posterior.scale_tril(f"heads.{output}")
    return torch.diag(posterior.variance()[weight][0].sqrt())


@pytest.mark.parametrize("name", [name for name in POSTERIORS if name != "point"])
def test_bound_is_the_expectation_of_the_bound_by_draws(name):
    gp = stirred(
        RandomFeatureGP(
            2, 16, posterior=POSTERIORS[name](), likelihood=likelihoods.Gaussian(noise=0.5), seed=3
        ).double()
    )
    x, y = data()
    weights = torch.linspace(0.0, 4.0, len(x), dtype=torch.float64).square()
    n = 4000
    exact = gp.elbo(x, y, num_data=80, kl_weight=0.7, example_weights=weights)
    gp.exact_bound = False
    draws, kl = gp.elbo_terms(
        x, y, num_data=80, num_draws=n, example_weights=weights, generator=torch.Generator().manual_seed(0)
    )
    values = (draws - 0.7 * kl).detach()
    assert abs(float((exact - values.mean()).detach())) < 5 * float(values.std()) / math.sqrt(n)


def test_optimum_of_the_full_posterior_is_bayesian_linear_regression():
    x, y = data()
    likelihood = likelihoods.Gaussian(noise=0.5, learn=False)
    gp = RandomFeatureGP(2, 6, posterior="full_covariance", likelihood=likelihood, learn_kernel=False).double()
    exact = linear_posterior(gp.features(x), y, 1.0, 0.5)
    optimizer = torch.optim.LBFGS(
        [parameter for parameter in gp.parameters() if parameter.requires_grad],
        max_iter=500,
        tolerance_grad=1e-7,
        tolerance_change=1e-12,
        line_search_fn="strong_wolfe",
    )

    def loss():
        optimizer.zero_grad()
        value = -gp.elbo(x, y, num_data=len(x))
        value.backward()
        return value

    optimizer.step(loss)
    assert float(gp.elbo(x, y, num_data=len(x)).detach()) == pytest.approx(exact.log_evidence, abs=1e-4)
    torch.testing.assert_close(gp.posterior.mean()["heads.0.weight"][0].detach(), exact.mean, atol=1e-4, rtol=1e-3)
    factor = gp.posterior.scale_tril("heads.0").detach()
    torch.testing.assert_close(factor @ factor.T, exact.covariance, atol=1e-4, rtol=1e-3)


def test_condition_gives_that_optimum_at_once():
    x, y = data()
    gp = RandomFeatureGP(2, 20, posterior="full_covariance", likelihood=likelihoods.Gaussian(noise=0.04)).double()
    gp.condition(x, y, memory=1)  # one row at a time
    exact = linear_posterior(gp.features(x).detach(), y, 1.0, 0.04)
    assert float(gp.elbo(x, y, num_data=len(x)).detach()) == pytest.approx(exact.log_evidence, abs=1e-8)
    torch.testing.assert_close(gp.posterior.mean()["heads.0.weight"][0].detach(), exact.mean)
    factor = gp.posterior.scale_tril("heads.0").detach()
    torch.testing.assert_close(factor @ factor.T, exact.covariance)
    loss = -gp.elbo(x, y, num_data=len(x))
    gradients = torch.autograd.grad(loss, list(gp.posteriors.parameters()))
    assert max(float(gradient.abs().max()) for gradient in gradients) < 1e-6


def test_condition_with_a_noise_for_each_output():
    x, y = data()
    both = torch.cat((y, -2 * y), dim=1)
    likelihood = likelihoods.Gaussian(noise=[0.04, 0.5])
    gp = RandomFeatureGP(2, 8, num_outputs=2, posterior="full_covariance", likelihood=likelihood).double()
    gp.condition(x, both)
    evidence = sum(
        linear_posterior(gp.features(x).detach(), both[:, index], 1.0, noise).log_evidence
        for index, noise in enumerate((0.04, 0.5))
    )
    assert float(gp.elbo(x, both, num_data=len(x)).detach()) == pytest.approx(evidence, abs=1e-7)


def test_many_features_approach_exact_gaussian_process_regression():
    x, y = data(30)
    new = torch.rand(20, 2, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    noise = 0.09
    errors = []
    for num_features in (100, 400, 1600):
        gp = RandomFeatureGP(2, num_features, posterior="full_covariance", likelihood=likelihoods.Gaussian(noise=noise))
        gp.double().condition(x, y)
        with torch.no_grad():
            mean, variance = gp.function_moments(new)
            kernel = gp.features.kernel(x, x) + noise * torch.eye(len(x))
            across = gp.features.kernel(new, x)
            solved = torch.linalg.solve(kernel, torch.cat((y, across.T), dim=1))
            exact_mean = across @ solved[:, :1]
            exact_variance = gp.features.kernel(new, new).diagonal() - (across * solved[:, 1:].T).sum(-1)
        errors.append(float((mean - exact_mean).square().mean().sqrt()))
        spread = float((variance[:, 0] - exact_variance).abs().max())
        # Features err by at most 1 / sqrt(2 m) in each entry of the kernel (one standard error, a = 1).
        assert errors[-1] < 5 / math.sqrt(num_features)
        assert spread < 5 / math.sqrt(num_features)
    assert errors[-1] < errors[0]


def test_walsh_hadamard_takes_four_numbers_for_each_row_of_its_block():
    def counted(posterior, n):
        return bayesify.count_parameters(RandomFeatureGP(5, n, posterior=posterior)) - 5 - 1 - 1  # kernel and noise

    assert counted("walsh_hadamard", 4096) == 4 * 64
    assert counted("whvi", 1024) == 4 * 32
    assert counted(posteriors.WalshHadamard(covariance="full"), 1024) == 3 * 32 + 32 * 33 // 2
    assert counted("mean_field", 4096) == 2 * 4096
    assert counted("full_covariance", 32) == 32 + 32 * 33 // 2


def test_fit_predict_save_and_load_are_the_librarys(tmp_path):
    x, y = (tensor.float() for tensor in data(128))
    loader = DataLoader(TensorDataset(x, y), batch_size=64, shuffle=True)
    gp = RandomFeatureGP(2, 64, likelihood=likelihoods.Gaussian(noise=0.01), seed=1)
    before = float(gp.elbo(x, y, num_data=len(x)).detach())
    history = bayesify.fit(gp, loader, epochs=90, learning_rate=3e-2, seed=0, progress=False)
    assert history[-1]["elbo"] > before
    prediction = gp.predict(x, 64, generator=torch.Generator().manual_seed(0))
    closed = gp.predict(x, method="closed_form")
    assert float((closed.mean - y).square().mean().sqrt()) < 0.3 * float(y.std())
    error = prediction.epistemic.sqrt() / math.sqrt(64)
    assert bool(((prediction.mean - closed.mean).abs() < 5 * error + 1e-5).all())
    assert torch.isfinite(closed.log_prob(y)).all()
    draws = gp.draw(2).detach()
    torch.testing.assert_close(gp.predict(x, draws=draws).outputs, draws(x))

    bayesify.save(gp, tmp_path / "gp.safetensors")
    loaded = bayesify.load(tmp_path / "gp.safetensors", RandomFeatureNetwork(2, 64))
    assert type(loaded) is RandomFeatureGP
    torch.testing.assert_close(loaded.predict(x, method="closed_form").mean, closed.mean)
    assert loaded.config() == gp.config()
    with pytest.raises(ValueError, match="was made from another network"):
        bayesify.load(tmp_path / "gp.safetensors", RandomFeatureNetwork(2, 32))
    for again in (copy.deepcopy(gp), pickle.loads(pickle.dumps(gp))):
        torch.testing.assert_close(again.predict(x, method="closed_form").mean, closed.mean)


def test_large_inputs_go_in_chunks():
    gp = RandomFeatureGP(2, 16)
    x = torch.rand(50, 2)
    with torch.no_grad():
        whole, chunked = gp.function_moments(x), gp.function_moments(x, memory=1)
    for first, second in zip(whole, chunked, strict=True):
        torch.testing.assert_close(first, second)


def test_classification():
    x = data(100)[0].float()
    labels = (torch.sin(5 * x[:, 0]) + x[:, 1] > 0.8).long()
    gp = RandomFeatureGP(2, 64, num_outputs=2, likelihood=likelihoods.Categorical(), lengthscale=0.4, seed=0)
    assert not gp.has_exact_bound
    bayesify.fit(gp, [(x, labels)], epochs=200, learning_rate=5e-2, num_draws=4, seed=0, progress=False)
    for prediction in (gp.predict(x, generator=torch.Generator().manual_seed(0)), gp.predict(x, method="closed_form")):
        assert float((prediction.labels == labels).float().mean()) > 0.9


def test_same_seed_same_model():
    first, second, other = (RandomFeatureGP(2, 8, seed=seed) for seed in (4, 4, 5))
    state = torch.random.get_rng_state()
    assert all(
        torch.equal(a, b) for a, b in zip(first.state_dict().values(), second.state_dict().values(), strict=True)
    )
    assert not torch.equal(first.features.frequencies, other.features.frequencies)
    assert torch.equal(state, torch.random.get_rng_state())


def test_bad_use():
    x, y = (tensor.float() for tensor in data())
    with pytest.raises(ValueError, match="method='exact'; give 'draws', 'closed_form' or 'moments'"):
        RandomFeatureGP(2, 8).predict(x, method="exact")
    with pytest.raises(TypeError, match="only method='draws' and method='moments' accept"):
        RandomFeatureGP(2, 8).predict(x, method="closed_form", draws=None)
    with pytest.raises(ValueError, match="does not have both posterior='full_covariance'"):
        RandomFeatureGP(2, 8).condition(x, y)
    with pytest.raises(ValueError, match=r"x has shape \(40, 2\) and y has shape \(39, 1\)"):
        RandomFeatureGP(2, 8, posterior="full_covariance").condition(x, y[1:])
    with pytest.raises(ValueError, match="unknown method"):
        RandomFeatureGP(2, 8, posterior="nonsense")
    flow = RandomFeatureGP(2, 16, posterior=posteriors.WalshHadamard(covariance="flow"))
    assert not flow.has_exact_bound
    with pytest.raises(ValueError, match="the moments of WalshHadamard have no closed form"):
        linear_moments(flow.posterior, list(flow.weights), flow.features(x))
    with pytest.raises(ValueError, match="inputs"):
        RandomFeatureGP(2, 8).elbo(torch.full((1, 2), math.nan), torch.zeros(1, 1), num_data=1)
    broken = RandomFeatureGP(2, 8, posterior="mean_field")
    with torch.no_grad():
        broken.posterior.mean_value["heads.0.weight"].fill_(math.nan)
    with pytest.raises(ValueError, match=r"a draw of heads\.0\.weight is not finite"):
        broken.elbo(x, y, num_data=len(x))
