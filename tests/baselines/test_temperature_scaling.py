"""Temperature scaling against a fine grid and a closed form; what it leaves alone."""

import math

import pytest
import torch
from cases import logits_network
from torch import nn

import bayesify
from bayesify import baselines, likelihoods, posteriors
from bayesify.predictive.base import Outputs
from bayesify.predictor import Predictor


def problem(n=300, classes=4, sharpness=3.0):
    """Logits three times too large for labels drawn from their softmax."""
    torch.manual_seed(0)
    net = logits_network(3, classes).double()
    with torch.no_grad():
        for parameter in net[2].parameters():
            parameter.mul_(4.0)
    x = 2 * torch.randn(n, 3, dtype=torch.float64)
    with torch.no_grad():
        y = torch.distributions.Categorical(logits=net(x)).sample()
        for parameter in net[2].parameters():
            parameter.mul_(sharpness)
    return net, x, y


def fine_grid(nll, center):
    grid = [center * math.exp(step) for step in torch.linspace(-0.02, 0.02, 401, dtype=torch.float64).tolist()]
    return min(grid, key=nll)


def test_optimum_is_that_of_a_fine_grid_and_labels_stay():
    net, x, y = problem()
    scaled = baselines.TemperatureScaling(net, "categorical").fit([(x[:100], y[:100]), (x[100:], y[100:])])
    with torch.no_grad():
        logits = net(x)
    best = fine_grid(lambda t: float(nn.functional.cross_entropy(logits / t, y)), scaled.temperature)
    assert scaled.temperature == pytest.approx(best, rel=1.1e-4)  # the grid's step
    assert 2.0 < scaled.temperature < 4.5
    t = torch.tensor(scaled.temperature, dtype=torch.float64, requires_grad=True)
    (slope,) = torch.autograd.grad(nn.functional.cross_entropy(logits / t, y), t)
    assert abs(float(slope)) < 1e-10
    prediction = scaled.predict(x)
    torch.testing.assert_close(prediction.probs, (logits / scaled.temperature).softmax(-1))
    assert torch.equal(prediction.labels, logits.argmax(-1))
    chunked = scaled.predict(x, keep_outputs=False)
    torch.testing.assert_close(chunked.probs, prediction.probs)


def test_a_bayesian_network_has_each_draws_logits_divided():
    net, x, y = problem(sharpness=4.0)
    bnn = bayesify.bayesianize(net, posteriors.MeanField(init_std=0.2), likelihood="categorical")
    scaled = baselines.TemperatureScaling(bnn).fit([(x, y)], num_draws=8, seed=5)
    outputs = bnn.predict(x, 8, generator=torch.Generator().manual_seed(5)).outputs

    def nll(t):
        log_probs = (outputs / t).log_softmax(-1).logsumexp(0) - math.log(8)
        return float(nn.functional.nll_loss(log_probs, y))

    assert scaled.temperature == pytest.approx(fine_grid(nll, scaled.temperature), rel=1.1e-4)
    prediction = scaled.predict(x, 8, generator=torch.Generator().manual_seed(5))
    torch.testing.assert_close(prediction.probs, (outputs / scaled.temperature).softmax(-1).mean(0))
    assert float(-prediction.log_prob(y).mean()) == pytest.approx(nll(scaled.temperature), rel=1e-9)
    assert nll(scaled.temperature) < nll(1.0)


def test_yes_or_no_outputs():
    net, x, y = problem(classes=1)
    with torch.no_grad():
        y = torch.bernoulli((net(x) / 3).sigmoid())
    scaled = baselines.TemperatureScaling(net, "bernoulli").fit([(x, y)])
    with torch.no_grad():
        logits = net(x)
    loss = nn.functional.binary_cross_entropy_with_logits
    assert scaled.temperature == pytest.approx(
        fine_grid(lambda t: float(loss(logits / t, y)), scaled.temperature), rel=1.1e-4
    )
    torch.testing.assert_close(scaled.predict(x).probs, (logits / scaled.temperature).sigmoid())


def test_one_gaussian_has_the_closed_form():
    torch.manual_seed(0)
    net = nn.Linear(3, 2).double()
    x = torch.randn(50, 3, dtype=torch.float64)
    y = net(x).detach() + 0.5 * torch.randn(50, 2, dtype=torch.float64)
    likelihood = likelihoods.Gaussian([0.01, 0.1], learn=False)
    scaled = baselines.TemperatureScaling(net, likelihood).fit([(x[:20], y[:20]), (x[20:], y[20:])])
    variance = scaled.likelihood.noise
    wanted = ((y - net(x).detach()).square() / variance).mean()
    assert scaled.variance_scale == pytest.approx(float(wanted), rel=1e-12)
    prediction = scaled.predict(x)
    torch.testing.assert_close(prediction.variance, (wanted * variance).expand(50, 2))

    def nll(c):
        return float(0.5 * ((y - net(x).detach()).square() / (c * variance) + (c * variance).log()).sum(1).mean())

    assert scaled.variance_scale == pytest.approx(fine_grid(nll, scaled.variance_scale), rel=1.1e-4)


def test_several_draws_of_a_regression_are_solved_in_one_dimension():
    torch.manual_seed(0)
    bnn = bayesify.bayesianize(
        nn.Linear(3, 1).double(), posteriors.MeanField(init_std=0.05), likelihood=likelihoods.Gaussian(0.01)
    )
    x = torch.randn(60, 3, dtype=torch.float64)
    with torch.no_grad():
        y = bnn.mean_network()(x) + 0.4 * torch.randn(60, 1, dtype=torch.float64)
    scaled = baselines.TemperatureScaling(bnn).fit([(x, y)], num_draws=6)
    mean = bnn.predict(x, 6, generator=torch.Generator().manual_seed(0)).outputs
    noise = bnn.likelihood.noise.detach()

    def nll(c):
        terms = -0.5 * ((y - mean).square() / (c * noise) + (c * noise).log() + math.log(2 * math.pi))
        return float(-(terms.squeeze(-1).logsumexp(0) - math.log(6)).mean())

    assert scaled.variance_scale == pytest.approx(fine_grid(nll, scaled.variance_scale), rel=1.1e-4)
    assert scaled.variance_scale > 5


def test_save_and_load(tmp_path):
    net, x, y = problem()
    bnn = bayesify.bayesianize(net, "mean_field", likelihood="categorical")
    for model in (
        baselines.TemperatureScaling(net, "categorical").fit([(x, y)]),
        baselines.TemperatureScaling(bnn).fit([(x, y)], num_draws=3),
    ):
        bayesify.save(model, tmp_path / "scaled.safetensors")
        loaded = bayesify.load(tmp_path / "scaled.safetensors", logits_network(3, 4).double())
        assert isinstance(loaded, baselines.TemperatureScaling)
        found, expected = (each.predict(x, generator=torch.Generator().manual_seed(0)) for each in (loaded, model))
        assert torch.equal(found.probs, expected.probs)


def test_bad_input():
    net, x, y = problem()
    with pytest.raises(ValueError, match="needs a likelihood"):
        baselines.TemperatureScaling(net)
    with pytest.raises(TypeError, match="does not predict"):
        baselines.TemperatureScaling("net")
    bnn = bayesify.bayesianize(net, "mean_field", likelihood="categorical")
    with pytest.raises(ValueError, match="has its own likelihood"):
        baselines.TemperatureScaling(bnn, "categorical")
    with pytest.raises(ValueError, match="yields no example"):
        baselines.TemperatureScaling(net, "categorical").fit([])
    with pytest.raises(ValueError, match=r"label [4-7] is not one of the 4 classes"):
        baselines.TemperatureScaling(net, "categorical").fit([(x, y + 4)])
    with torch.no_grad():
        right = net(x).argmax(-1)
    with pytest.warns(UserWarning, match="reached its bound 0.001, because probabilities as extreme as possible fit"):
        baselines.TemperatureScaling(net, "categorical").fit([(x, right)])


class Constant(Predictor):
    """A predictor without tensors."""

    likelihood, output, num_distinct_draws = likelihoods.Categorical(), None, 1

    def predict(self, x, num_draws=None, *, generator=None, memory=None, **options):
        return self.likelihood.predictive(Outputs(kept=torch.tensor([2.0, 0.0]).expand(1, len(x), 2)))

    def config(self):
        return {}

    def state(self):
        return {}

    @classmethod
    def restore(cls, net, config, state):
        return cls()


def test_a_predictor_without_tensors_is_scaled():
    """3 of 4 labels are 0 at a logit of 2, so that T = 2 / log 3."""
    y = torch.tensor([0, 0, 0, 1])
    scaled = baselines.TemperatureScaling(Constant()).fit([(torch.zeros(4, 1), y)])
    assert scaled.temperature == pytest.approx(2 / math.log(3), rel=1e-3)


def test_laplace_is_scaled_by_default_with_draws_of_the_linearized_network(tmp_path):
    net, x, y = problem(n=60)
    laplace = bayesify.Laplace(net, "categorical", covariance="diagonal").fit([(x, y)])

    def predict(model, **options):
        return model.predict(x, 8, generator=torch.Generator().manual_seed(0), **options)

    scaled = baselines.TemperatureScaling(laplace).fit([(x, y)], num_draws=8)
    outputs = predict(laplace, method="linearized_mc").outputs
    torch.testing.assert_close(predict(scaled).probs, (outputs / scaled.temperature).softmax(-1).mean(0))

    def nll(t):
        return float(nn.functional.nll_loss((outputs / t).log_softmax(-1).logsumexp(0) - math.log(8), y))

    assert scaled.temperature == pytest.approx(fine_grid(nll, scaled.temperature), rel=1.1e-4)
    scaled.fit([(x, y)], num_draws=8, method="network_mc")
    bayesify.save(scaled, tmp_path / "scaled.safetensors")
    outputs = predict(laplace, method="network_mc").outputs
    for model in (scaled, bayesify.load(tmp_path / "scaled.safetensors", net)):
        torch.testing.assert_close(predict(model).probs, (outputs / scaled.temperature).softmax(-1).mean(0))
    assert scaled.fit([(x, y)]).method == "linearized_mc"
    remedy = r"predict with method='draws' \(for Laplace, with method='linearized_mc' or 'network_mc'\)"
    for call in (scaled.predict, lambda x, method: scaled.fit([(x, y)], method=method)):
        with pytest.raises(TypeError, match=f"GaussianClassPredictive is not a mixture over draws; {remedy}"):
            call(x, method="closed_form")
