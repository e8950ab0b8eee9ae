"""Priors with hyperparameters of their own: Gamma and Wishart against quadrature and scipy, and every posterior under them."""

from __future__ import annotations

import copy
import math
import pickle
from pathlib import Path
from typing import Any

import pytest
import scipy.integrate
import scipy.special
import scipy.stats
import torch
from cases import CASES, POSTERIORS, Case, disturb, generator, posterior
from dense_reference import gaussian, kl_normals
from torch import Tensor, nn

import bayesify
from bayesify import BayesianNetwork, likelihoods, posteriors, priors
from bayesify.maths.gamma import bartlett, bartlett_mean, draw_gamma, gamma_kl, inverse_root_moments, wishart_kl
from bayesify.maths.noise import NoiseSource
from bayesify.posteriors import DrawRequest
from bayesify.priors import PriorDraw

HIERARCHICAL = [priors.Scale, priors.SpatialInverseWishart]
DENSE = ["mean_field", "full_covariance", "matrix_normal", "k_tied"]
LEAVES = ["linear", "conv1d", "conv2d", "conv2d_depthwise", "transposed1d", "transposed3d", "tied"]
EVERY = [name for name in POSTERIORS if not POSTERIORS[name].posterior.runs_network]  # type: ignore[union-attr]


def make(name: str, case: Case, prior: priors.Prior, **more: Any) -> BayesianNetwork:
    """A network under a hierarchical prior, everything away from where it starts."""
    choice: Any = posterior(name, case, **more)
    choice = choice if case.selector is None else {case.selector: choice}
    net = case.network(torch.float64)
    bnn = bayesify.bayesianize(net, choice, likelihood=likelihoods.Gaussian(noise=0.5), prior=prior)
    disturb(bnn)
    with torch.no_grad():
        for index, parameter in enumerate(bnn.prior.parameters()):
            noise = torch.randn(parameter.shape, generator=generator(index), dtype=torch.float64)
            parameter.copy_(0.3 * parameter + 0.2 * noise)
    return bnn


def number(value: Any) -> float:
    return value.detach().item() if isinstance(value, Tensor) else float(value)


def one_of(drawn: PriorDraw, index: int) -> PriorDraw:
    """One draw of the hyperparameters, its scales as numbers."""
    std = {name: number(value[index]) if isinstance(value, Tensor) else value for name, value in drawn.std.items()}
    return PriorDraw(std, 0.0, {name: factor[index : index + 1] for name, factor in drawn.factor.items()})


def hyper_kl(prior: Any) -> float:
    """KL of the hyperparameters' posterior, by torch's Gamma distributions or by the Wishart formula that is tested above."""
    if isinstance(prior, priors.Scale):
        gamma = torch.distributions.Gamma
        two = torch.tensor(2.0, dtype=torch.float64)
        return number(torch.distributions.kl_divergence(gamma(prior.shape, prior.rate), gamma(two, two)).sum())
    parts = [wishart_kl(prior.scale_matrix(k), prior.dof(k), k + 1, k + 1).sum() for k in prior.groups]
    return sum(number(part) for part in parts)


def covariance(drawn: PriorDraw, bnn: BayesianNetwork) -> Tensor:
    """Covariance of all weights under one draw of the prior, dense, filter by filter."""
    blocks = []
    for weight in bnn.posterior.weights:
        std, block = number(drawn.std[weight.name]), torch.ones(1, 1, dtype=torch.float64)
        if weight.name in drawn.factor:
            factor = drawn.factor[weight.name][0].detach()
            block = factor @ factor.T
        blocks.append(std**2 * torch.kron(torch.eye(weight.numel // len(block), dtype=torch.float64), block))
    return torch.block_diag(*blocks)


# -- the distributions -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("shape", "rate"), [(2.0, 2.0), (2.7, 3.9), (40.0, 25.0)])
def test_gamma_kl_and_moments_are_integrals(shape: float, rate: float) -> None:
    q, p = scipy.stats.gamma(shape, scale=1 / rate), scipy.stats.gamma(2.0, scale=0.5)

    def integral(function: Any) -> float:
        return scipy.integrate.quad(lambda x: q.pdf(x) * function(x), 0, q.ppf(1 - 1e-15), epsabs=1e-12, limit=200)[0]

    a, b = torch.tensor(shape, dtype=torch.float64), torch.tensor(rate, dtype=torch.float64)
    assert gamma_kl(a, b, 2.0, 2.0).item() == pytest.approx(
        integral(lambda x: q.logpdf(x) - p.logpdf(x)), rel=1e-8, abs=1e-9
    )
    mean, variance = inverse_root_moments(a, b)
    first = integral(lambda x: x**-0.5)
    assert mean.item() == pytest.approx(first, rel=1e-7)
    assert variance.item() == pytest.approx(integral(lambda x: 1 / x) - first**2, rel=1e-5)


def test_gamma_kl_of_a_large_layer_in_single_precision() -> None:
    """Terms of ten million nats cancel to a few; float32 alone would be off by nats."""
    a, b = torch.tensor(1.2e6), torch.tensor(1.2e6)
    exact = gamma_kl(a.double(), b.double(), 2.0, 2.0).item()
    assert gamma_kl(a, b, 2.0, 2.0).item() == pytest.approx(exact, rel=1e-6)
    assert 0 < exact < 10


@pytest.mark.parametrize("shape", [2.0, 7.5, 300.0])
def test_gamma_draws_have_the_implicit_gradient(shape: float) -> None:
    """dx/da = -(dF/da) / p(x), with F by scipy and its derivative by central differences; torch's has a relative error of 5e-4."""
    a = torch.tensor([shape], dtype=torch.float64, requires_grad=True)
    x = draw_gamma(a, 6, generator())
    for value in x[:, 0]:
        (slope,) = torch.autograd.grad(value, a, retain_graph=True)
        point, step = value.item(), 1e-5 * shape
        by_shape = (scipy.special.gammainc(shape + step, point) - scipy.special.gammainc(shape - step, point)) / (
            2 * step
        )
        assert slope.item() == pytest.approx(-by_shape / scipy.stats.gamma(shape).pdf(point), rel=5e-4)


def test_bartlett_draws_are_wishart() -> None:
    """n = 20000 draws: E[A A^T] = n I and E[A] within 5 standard errors of each entry."""
    dof, size, n = torch.tensor([4.3], dtype=torch.float64), 3, 20_000
    roots = bartlett(dof, size, n, generator())[:, 0]
    for found, expected in (
        (roots @ roots.mT, dof * torch.eye(size, dtype=torch.float64)),
        (roots, bartlett_mean(dof, size)[0]),
    ):
        error = found.std(0) / math.sqrt(n)
        assert bool(((found.mean(0) - expected).abs() <= 5 * error + 1e-12).all())


def test_wishart_kl_is_that_of_both_wisharts() -> None:
    """Monte Carlo with scipy's densities, n = 4000: of the Wisharts and of the inverse Wisharts, within 5 standard errors."""
    size, prior_dof, dof = 3, 4.0, 7.6
    root = torch.tensor([[1.2, 0, 0], [0.4, 0.9, 0], [-0.3, 0.5, 1.4]], dtype=torch.float64)
    psi = (size + 1) * torch.eye(size, dtype=torch.float64) + root @ root.T
    exact = wishart_kl(psi[None], torch.tensor([dof], dtype=torch.float64), size + 1, prior_dof).item()
    roots = torch.linalg.cholesky(torch.linalg.inv(psi)) @ bartlett(
        torch.tensor([dof], dtype=torch.float64), size, 4000, generator()
    )
    x = (roots @ roots.mT)[:, 0]
    pairs = {
        scipy.stats.wishart: (torch.linalg.inv(psi).numpy(), torch.eye(size).numpy() / (size + 1), x),
        scipy.stats.invwishart: (psi.numpy(), (size + 1) * torch.eye(size).numpy(), torch.linalg.inv(x)),
    }
    for family, (scale, prior_scale, draws) in pairs.items():
        given = draws.permute(1, 2, 0).numpy()
        ratio = family(dof, scale).logpdf(given) - family(prior_dof, prior_scale).logpdf(given)
        error = ratio.std() / math.sqrt(len(ratio))
        assert abs(ratio.mean() - exact) <= 5 * error, family
    same = (size + 1) * torch.eye(size, dtype=torch.float64)[None]
    assert wishart_kl(same, torch.tensor([4.0], dtype=torch.float64), size + 1, 4.0).item() == pytest.approx(
        0, abs=1e-12
    )


# -- the priors ------------------------------------------------------------------------------------------------------


def test_spatial_prior_is_neals_on_average() -> None:
    """At the prior and at the start, E[L^-1] = I: n = 20000, within 5 standard errors of each entry."""
    bnn = make("mean_field", CASES["conv2d"], priors.SpatialInverseWishart())
    start = bayesify.bayesianize(CASES["conv2d"].network(torch.float64), "mean_field", prior=bnn.prior)
    bnn.prior.set_to_prior()
    assert number(bnn.prior.draw(1).kl) == pytest.approx(0, abs=1e-10)
    for prior in (bnn.prior, start.prior):
        factor = prior.draw(20_000, generator()).factor["weight"].detach()
        correlation = factor @ factor.mT
        error = correlation.std(0) / math.sqrt(len(correlation))
        assert bool(((correlation.mean(0) - torch.eye(6)).abs() <= 5 * error).all())
    drawn = bnn.prior.draw(1)
    assert drawn.std == {"weight": 1 / math.sqrt(12), "bias": 1 / math.sqrt(12)}
    assert list(drawn.factor) == ["weight"]


def test_scale_is_gamma_per_layer() -> None:
    """At the prior, s ~ Gamma(2, 2): moments of n = 20000 draws within 5 standard errors; weight and bias share it."""
    bnn = make("mean_field", CASES["linear"], priors.Scale())
    bnn.prior.set_to_prior()
    assert number(bnn.prior.draw(1).kl) == pytest.approx(0, abs=1e-12)
    drawn = bnn.prior.draw(20_000, generator())
    s = {name: 1 / (std**2 * bnn.weights[name].fan_in) for name, std in drawn.std.items()}  # type: ignore[operator]
    assert torch.equal(drawn.std["0.weight"], drawn.std["0.bias"])  # type: ignore[arg-type]
    assert not torch.equal(s["0.weight"], s["2.weight"])
    for value in (s["0.weight"].detach(), s["2.weight"].detach()):
        for power, moment in ((1, 1.0), (2, 1.5)):
            draws = value**power
            assert abs(draws.mean().item() - moment) <= 5 * draws.std().item() / math.sqrt(len(draws))


@pytest.mark.parametrize("kind", HIERARCHICAL)
def test_typical_scales_are_means(kind: type[priors.Prior]) -> None:
    """n = 20000 draws; within 5 standard errors."""
    prior = make("mean_field", CASES["conv1d"], kind()).prior
    drawn, typical = prior.draw(20_000, generator()), prior.typical()
    pairs = [(drawn.std[name], typical.std[name]) for name in drawn.std if isinstance(drawn.std[name], Tensor)]
    pairs += [(drawn.factor[name], typical.factor[name]) for name in drawn.factor]
    assert pairs
    for values, mean in pairs:
        error = values.detach().std(0) / math.sqrt(len(values))  # type: ignore[union-attr]
        assert bool(((values.detach().mean(0) - mean.detach()[0]).abs() <= 5 * error + 1e-12).all())  # type: ignore[union-attr, index]
    for name, variance in typical.std_variance.items():
        values = drawn.std[name].detach()  # type: ignore[union-attr]
        squares = (values - values.mean()).square()
        assert abs(squares.mean() - variance.item()) <= 5 * squares.std() / math.sqrt(len(values))


@pytest.mark.parametrize("kind", HIERARCHICAL)
def test_same_generator_same_draws(kind: type[priors.Prior]) -> None:
    bnn = make("mean_field", CASES["conv2d"], kind())
    first, second = bnn.draw(3, generator=generator()), bnn.draw(3, generator=generator())
    assert torch.equal(first.kl, second.kl)
    assert not torch.equal(first.kl, bnn.draw(3, generator=generator(9)).kl)
    state = torch.get_rng_state()
    bnn.draw(2, generator=generator())
    bayesify.bayesianize(CASES["linear"].network(), "mean_field", prior=kind())
    assert torch.equal(state, torch.get_rng_state())


# -- posteriors under them -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("leaf", LEAVES)
@pytest.mark.parametrize("kind", HIERARCHICAL)
@pytest.mark.parametrize("name", DENSE)
def test_kl_of_the_joint_is_the_dense_one(name: str, kind: type[priors.Prior], leaf: str) -> None:
    """Per draw of the hyperparameters: KL(q(w) || p(w | s)) by dense matrices, plus KL(q(s) || p(s))."""
    bnn = make(name, CASES[leaf], kind(), init_std=0.8)
    mean, spread = gaussian(bnn.posterior)
    prior = bnn.prior.draw(3, generator())
    expected = []
    for index in range(3):
        expected.append(kl_normals(mean, spread, torch.zeros_like(mean), covariance(one_of(prior, index), bnn)).item())
    assert bnn.draw(3, generator=generator()).kl.tolist() == pytest.approx(
        [value + hyper_kl(bnn.prior) for value in expected], rel=1e-8
    )
    with torch.no_grad():
        assert bnn.draw(3, generator=generator()).kl.tolist() == pytest.approx(
            [value + hyper_kl(bnn.prior) for value in expected], rel=1e-8
        )
    if leaf.startswith("conv") and kind is priors.SpatialInverseWishart:
        neal = kl_normals(
            mean, spread, torch.zeros_like(mean), covariance(priors.Neal().bind(bnn.weights).draw(1), bnn)
        )
        assert abs(neal.item() - expected[0]) > 1e-3


def test_mean_field_locally_has_the_same_kl() -> None:
    for kind in HIERARCHICAL:
        plain = make("mean_field", CASES["conv2d"], kind())
        local = make("mean_field", CASES["conv2d"], kind(), local_reparameterization=True)
        (x,) = CASES["conv2d"].batch(dtype=torch.float64)
        y = torch.zeros_like(plain(x))
        kls = [b.elbo_terms(x, y, num_data=3, num_draws=2, generator=generator())[1] for b in (plain, local)]
        torch.testing.assert_close(*kls)


@pytest.mark.parametrize("kind", HIERARCHICAL)
@pytest.mark.parametrize("name", EVERY)
@pytest.mark.parametrize("leaf", ["linear", "conv2d"])
def test_every_posterior_under_every_draw(name: str, kind: type[priors.Prior], leaf: str) -> None:
    """S draws under S scales are S draws under one scale each; gradients reach prior and posterior alike."""
    case = CASES[leaf]
    if (name, kind, leaf) == ("walsh_hadamard", priors.SpatialInverseWishart, "conv2d"):
        with pytest.raises(ValueError, match=r"kernel \(weight\); use .* MeanField"):
            make(name, case, kind())
        return
    bnn = make(name, case, kind())
    prior = bnn.prior.draw(3, generator())
    together, kl = bnn.posterior.draw(DrawRequest(num_draws=3, prior=prior, noise=NoiseSource(generator(5))))
    kl = kl.expand(3)
    for index in range(3):
        alone = bnn.posterior.kl(one_of(prior, index)).detach()
        assert number(alone.mean()) == pytest.approx(number(kl[index]), rel=1e-10)
    (x,) = case.batch(dtype=torch.float64)
    outputs = bnn.draw(3, generator=generator())(x)
    assert outputs.shape[0] == 3
    bnn.elbo(x, torch.zeros_like(outputs[0]), num_data=9, num_draws=2, generator=generator()).backward()
    dead = {key for key, value in bnn.named_parameters() if value.requires_grad and value.grad is None}
    assert not dead
    slopes = [value.grad.abs().sum() for value in bnn.prior.parameters()]  # type: ignore[union-attr]
    assert all(bool(torch.isfinite(slope)) and bool(slope > 0) for slope in slopes)
    assert bnn.predict(x, generator=generator()).mean.shape == outputs.shape[1:]
    assert together.keys() == bnn.weights.keys()
    bnn.map_objective(x, torch.zeros_like(outputs[0]), num_data=9).backward()


@pytest.mark.parametrize("leaf", ["conv1d", "conv2d_depthwise", "transposed1d"])
@pytest.mark.parametrize("name", ["point", "ensemble", "dropout"])
def test_stand_ins_are_the_expected_minus_log_prior(name: str, leaf: str) -> None:
    """Against a dense normal: of the point, the mean over members, and for dropout n = 4000 masks within 5 standard errors."""
    more = {"first_layer": True} if name == "dropout" else {}
    bnn = make(name, CASES[leaf], priors.SpatialInverseWishart(), **more)
    prior = bnn.prior.draw(1, generator())
    dense = torch.distributions.MultivariateNormal(
        torch.zeros(sum(weight.numel for weight in bnn.posterior.weights), dtype=torch.float64), covariance(prior, bnn)
    )
    count = {"point": 1, "ensemble": 5, "dropout": 4000}[name]
    weights, kl = bnn.posterior.draw(DrawRequest(num_draws=count, prior=prior, noise=NoiseSource(generator(3))))
    flat = torch.cat([weights[weight.name].detach().flatten(1) for weight in bnn.posterior.weights], dim=1)
    penalties = -dense.log_prob(flat)
    error = (
        5 * penalties.std().item() / math.sqrt(count) if name == "dropout" else 1e-8 * abs(number(kl.detach().mean()))
    )
    assert abs(penalties.mean().item() - number(kl.detach().mean())) <= error


@pytest.mark.parametrize("kind", HIERARCHICAL)
def test_inducing_weights_follow_the_prior(kind: type[priors.Prior]) -> None:
    """Draws are those under Neal's prior times the scale, or times the factor; the KL is that of the whitened joint."""
    bnn = make("inducing", CASES["conv2d"], kind())
    prior = bnn.prior.draw(4, generator())
    neal = priors.Neal().bind(bnn.weights).draw(1)
    ours, kl = bnn.posterior.draw(DrawRequest(num_draws=4, prior=prior, noise=NoiseSource(generator(5))))
    plain, plain_kl = bnn.posterior.draw(DrawRequest(num_draws=4, prior=neal, noise=NoiseSource(generator(5))))
    for name, value in plain.items():
        if kind is priors.Scale:
            expected = value * (prior.std[name] / neal.std[name]).reshape(4, *(1,) * (value.ndim - 1))  # type: ignore[operator, union-attr]
        elif name == "weight":
            expected = torch.einsum("sjk,socxk->socxj", prior.factor[name], value.flatten(3).unsqueeze(3)).view_as(
                value
            )
        else:
            expected = value
        torch.testing.assert_close(ours[name], expected)
    torch.testing.assert_close(kl, plain_kl)
    bnn.set_to_prior()
    assert number(bnn.kl()) == pytest.approx(0, abs=1e-9)


@pytest.mark.parametrize("kind", HIERARCHICAL)
def test_inducing_weights_start_at_the_network_under_a_drawn_prior(kind: type[priors.Prior]) -> None:
    """With as many inducing rows and columns as a layer has, E[W] before training is the network's own W."""
    net = CASES["conv2d"].network(torch.float64)
    choice = posterior("inducing", CASES["conv2d"])
    bnn = bayesify.bayesianize(net, choice, likelihood=likelihoods.Gaussian(noise=0.5), prior=kind())
    for name, value in bnn.posterior.mean().items():
        torch.testing.assert_close(value, net.get_parameter(name))


def test_inducing_moments_under_a_drawn_scale() -> None:
    """n = 20000 draws: mean and variance of each entry within 5 standard errors (of a variance: by fourth moments)."""
    bnn = make("inducing", CASES["linear"], priors.Scale())
    with torch.no_grad():
        drawn = bnn.draw(20_000, generator=generator()).weights
        for name, value in drawn.items():
            centered = (value - value.mean(0)).square()
            for found, expected in ((value, bnn.posterior.mean()[name]), (centered, bnn.posterior.variance()[name])):
                assert bool(((found.mean(0) - expected).abs() <= 5 * found.std(0) / math.sqrt(len(found))).all()), name
    spatial = make("inducing", CASES["conv2d"], priors.SpatialInverseWishart())
    with torch.no_grad():
        value = spatial.draw(20_000, generator=generator()).weights["weight"]
        error = 5 * value.std(0) / math.sqrt(len(value))
        assert bool(((value.mean(0) - spatial.posterior.mean()["weight"]).abs() <= error).all())
    with pytest.raises(ValueError, match="estimate them from draws"):
        spatial.posterior.variance()


@pytest.mark.parametrize("kind", HIERARCHICAL)
@pytest.mark.parametrize("name", [*DENSE, "walsh_hadamard"])
def test_families_without_the_scale_cannot_be_the_prior(name: str, kind: type[priors.Prior]) -> None:
    leaf = "linear" if name == "walsh_hadamard" else "conv2d"
    bnn = make(name, CASES[leaf], kind())
    if kind is priors.SpatialInverseWishart and leaf == "linear":
        bnn.set_to_prior()  # no kernels: Neal's prior
        assert number(bnn.kl()) == pytest.approx(0, abs=1e-9)
        return
    before = copy.deepcopy(bnn.state_dict())
    with pytest.raises(ValueError, match="has random scales"):
        bnn.set_to_prior()
    assert all(torch.equal(value, before[key]) for key, value in bnn.state_dict().items())


def test_pruning_needs_independent_entries() -> None:
    bnn = make("mean_field", CASES["conv2d"], priors.SpatialInverseWishart())
    with pytest.raises(ValueError, match="fixed prior"):
        bayesify.prune(bnn, keep=0.5)


# -- the bound -------------------------------------------------------------------------------------------------------


def test_the_bound_lies_below_the_evidence_and_near_it() -> None:
    """Bayesian linear regression with a Gamma scale: coordinate ascent in closed form, evidence by quadrature over s."""
    torch.manual_seed(0)
    size, count, noise = 4, 30, 0.5
    x = torch.randn(count, size, dtype=torch.float64)
    y = x @ torch.randn(size, 1, dtype=torch.float64) + math.sqrt(noise) * torch.randn(count, 1, dtype=torch.float64)

    def evidence_given(s: float) -> float:
        total = x @ x.T / (size * s) + noise * torch.eye(count, dtype=torch.float64)
        return torch.distributions.MultivariateNormal(torch.zeros(count).double(), total).log_prob(y[:, 0]).item()

    top = max(evidence_given(s) for s in (0.1, 0.3, 1.0, 3.0))
    mass = scipy.integrate.quad(
        lambda s: math.exp(evidence_given(s) - top) * scipy.stats.gamma(2, scale=0.5).pdf(s), 1e-9, 30, limit=200
    )[0]
    evidence = top + math.log(mass)
    mean_s = 1.0
    for _ in range(200):
        spread = torch.linalg.inv(x.T @ x / noise + mean_s * size * torch.eye(size, dtype=torch.float64))
        mean = spread @ x.T @ y / noise
        alpha, beta = size / 2, 0.5 * size * number(mean.square().sum() + spread.trace())
        mean_s = (2 + alpha) / (2 + beta)
    net = nn.Linear(size, 1, bias=False).double()
    bnn = bayesify.bayesianize(
        net, posteriors.FullCovariance(), likelihood=likelihoods.Gaussian(noise, learn=False), prior=priors.Scale()
    )
    part = bnn.posterior
    factor = torch.linalg.cholesky(spread)
    with torch.no_grad():
        rows, cols = torch.tril_indices(size, size, -1)
        part.mean_value[""].copy_(mean[:, 0])  # type: ignore[index, union-attr, operator]
        part.lower[""].copy_((factor / factor.diagonal()[:, None])[rows, cols])  # type: ignore[index, union-attr, operator]
        part.raw_diagonal[""].copy_(factor.diagonal().expm1().log())  # type: ignore[index, union-attr, operator]
        bnn.prior.log_alpha.fill_(math.log(alpha))  # type: ignore[operator, union-attr]
        bnn.prior.log_beta.fill_(math.log(beta))  # type: ignore[operator, union-attr]
        data, kl = bnn.elbo_terms(x, y, num_data=count, num_draws=20_000, generator=generator())
    bounds = data - kl
    error = 5 * bounds.std().item() / math.sqrt(len(bounds))
    assert bounds.mean().item() <= evidence + error
    assert bounds.mean().item() >= evidence - 0.5 - error  # what a q without correlation between w and s loses here


# -- as objects ------------------------------------------------------------------------------------------------------


@pytest.fixture(params=HIERARCHICAL, ids=lambda kind: kind.name)
def trained(request: pytest.FixtureRequest) -> BayesianNetwork:
    return make("mean_field", CASES["conv2d"], request.param()).float()


def test_config_pickle_copy_and_file(trained: BayesianNetwork, tmp_path: Path) -> None:
    net = CASES["conv2d"].network()
    again = bayesify.bayesianize(net, trained.config())
    assert type(again.prior) is type(trained.prior)
    again.load_state_dict(trained.state_dict())
    bayesify.save(trained, tmp_path / "model.safetensors")
    loaded = bayesify.load(tmp_path / "model.safetensors", net)
    expected = trained.draw(2, generator=generator())
    for other in (again, copy.deepcopy(trained), pickle.loads(pickle.dumps(trained)), loaded):
        drawn = other.draw(2, generator=generator())
        assert torch.equal(drawn.kl, expected.kl)
        assert torch.equal(drawn.weights["weight"], expected.weights["weight"])


def test_copies_follow_their_own_prior() -> None:
    """A posterior that reads the prior's scale reads that of its own network, after a copy and after training."""
    bnn = make("inducing", CASES["linear"], priors.Scale())
    twin = copy.deepcopy(bnn)
    with torch.no_grad():
        twin.prior.log_beta.add_(1.0)  # type: ignore[operator, union-attr]
    first, second = bnn.posterior.mean()["0.weight"], twin.posterior.mean()["0.weight"]
    ratio = twin.prior.typical().std["0.weight"] / bnn.prior.typical().std["0.weight"]  # type: ignore[operator]
    torch.testing.assert_close(second, first * ratio)


def test_fit_trains_the_prior(trained: BayesianNetwork) -> None:
    """With a phase of maximum a posteriori and without; the same seed gives the same result."""
    (x,) = CASES["conv2d"].batch()
    y = torch.zeros_like(trained(x))
    runs = []
    for _ in range(2):
        bnn = copy.deepcopy(trained)
        history = bayesify.fit(bnn, [(x, y)], epochs=2, map_epochs=1, num_data=3, seed=1, progress=False)
        runs.append([row["elbo"] for row in history])
        for key, value in bnn.prior.named_parameters():
            assert not torch.equal(value, trained.prior.get_parameter(key))
    assert runs[0] == runs[1]


def test_methods_that_need_a_fixed_prior_say_so(trained: BayesianNetwork) -> None:
    with pytest.raises(ValueError, match="fixed prior"):
        bayesify.baselines.VOGN(trained, num_data=3)
    with pytest.raises(ValueError, match="fixed prior"):
        bayesify.FunctionSpaceVI(trained)
