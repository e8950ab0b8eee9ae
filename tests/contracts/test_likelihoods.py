"""Every likelihood through one protocol: densities, Fisher, shapes, bad targets, plain data."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import Tensor
from torch.distributions import Bernoulli, Categorical, Normal

from bayesify import likelihoods
from bayesify.configuration import make_likelihood
from bayesify.likelihoods import Likelihood

B, K, S = 5, 3, 4
NOISE = [0.1, 0.5, 2.0]


def outputs(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def made(name: str) -> Likelihood:
    kinds: dict[str, Likelihood] = {
        "gaussian": likelihoods.Gaussian(noise=0.3),
        "gaussian_per_output": likelihoods.Gaussian(noise=NOISE, learn=False),
        "heteroscedastic_gaussian": likelihoods.HeteroscedasticGaussian(),
        "categorical": likelihoods.Categorical(),
        "bernoulli": likelihoods.Bernoulli(),
    }
    return kinds[name].double()


def reference(name: str, f: Tensor) -> torch.distributions.Distribution:
    if name.startswith("gaussian"):
        noise = torch.tensor(0.3 if name == "gaussian" else NOISE, dtype=torch.float64)
        return Normal(f, noise.sqrt())
    if name == "heteroscedastic_gaussian":
        mean, log_variance = f.chunk(2, -1)
        return Normal(mean, (0.5 * log_variance).exp())
    return Categorical(logits=f) if name == "categorical" else Bernoulli(logits=f)


NAMES = ["gaussian", "gaussian_per_output", "heteroscedastic_gaussian", "categorical", "bernoulli"]


def width(name: str) -> int:
    return 2 * K if name.startswith("hetero") else K


def test_every_registered_likelihood_is_here() -> None:
    assert set(likelihoods.REGISTRY) <= set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_log_prob_is_that_of_torch(name: str) -> None:
    likelihood, f = made(name), outputs(S, B, width(name))
    with torch.no_grad():
        noise_is_exact = name.startswith("gaussian")
        distribution = reference(name, f)
        y = reference(name, f[0]).sample()
        expected = distribution.log_prob(y)
        expected = expected if name == "categorical" else expected.sum(-1)
        tolerance = 1e-6 if noise_is_exact else 1e-10  # a raw variance is made in float32
        torch.testing.assert_close(likelihood.log_prob(f, y, has_draws=True), expected, rtol=tolerance, atol=1e-9)
        torch.testing.assert_close(likelihood.log_prob(f[0], y), expected[0], rtol=tolerance, atol=1e-9)
        assert likelihood.log_prob(f, y).shape == (S, B)


@pytest.mark.parametrize("name", [name for name in NAMES if name not in ("gaussian_per_output", "categorical")])
def test_one_column_may_be_missing(name: str) -> None:
    """[B] against [B, 1] is never broadcast to [B, B]; the others have no single column."""
    likelihood = made(name)
    f = outputs(B, 2 if name.startswith("hetero") else 1)
    y = torch.ones(B, dtype=torch.float64)
    both = likelihood.log_prob(f, y.unsqueeze(1))
    assert both.shape == (B,)
    assert torch.equal(likelihood.log_prob(f, y), both)
    if not name.startswith("hetero"):
        assert torch.equal(likelihood.log_prob(f[:, 0], y), both)
        assert torch.equal(likelihood.log_prob(f[:, 0], y.unsqueeze(1)), both)
        assert torch.equal(likelihood.log_prob(f[:, 0].expand(S, B), y, has_draws=True), both.expand(S, B))


def test_categorical_column_of_labels() -> None:
    likelihood, f = made("categorical"), outputs(B, K)
    y = torch.arange(B) % K
    assert torch.equal(likelihood.log_prob(f, y.unsqueeze(1)), likelihood.log_prob(f, y))


def enumerated_fisher(name: str, f: Tensor) -> Tensor:
    """E_y of the autograd Hessian of -log p(y | f): every y for labels, Gauss-Hermite nodes for numbers."""
    likelihood = made(name)

    def hessian(y: Tensor) -> Tensor:
        return torch.autograd.functional.hessian(
            lambda f: -likelihood.log_prob(f[None], y[None], has_draws=False).sum(), f
        )

    total = torch.zeros(len(f), len(f), dtype=torch.float64)
    if name == "categorical":
        for label, probability in enumerate(f.softmax(-1)):
            total += probability * hessian(torch.tensor(label))
        return total
    if name == "bernoulli":
        for bits in itertools.product((0.0, 1.0), repeat=len(f)):
            y = torch.tensor(bits, dtype=torch.float64)
            total += torch.exp(Bernoulli(logits=f).log_prob(y).sum()) * hessian(y)
        return total
    import numpy as np

    nodes, weights = np.polynomial.hermite_e.hermegauss(3)  # exact for the quadratics that occur
    distribution = reference(name, f)
    assert isinstance(distribution, Normal)
    for point in itertools.product(range(3), repeat=K):
        y = distribution.mean + distribution.stddev * torch.tensor(nodes[list(point)])
        total += math.prod(weights[list(point)] / math.sqrt(2 * math.pi)) * hessian(y.detach())
    return total


@pytest.mark.parametrize("name", NAMES)
def test_fisher_is_the_expected_hessian(name: str) -> None:
    likelihood = made(name)
    f = outputs(2, width(name))
    with torch.no_grad():
        fisher = likelihood.fisher(f)
    assert fisher.shape == (2, width(name), width(name))
    for one, example in zip(fisher, f, strict=True):
        torch.testing.assert_close(one, enumerated_fisher(name, example).detach(), rtol=1e-6, atol=1e-8)
        assert float(torch.linalg.eigvalsh(one).min()) > -1e-12


@pytest.mark.parametrize("name", ["categorical", "bernoulli", "heteroscedastic_gaussian"])
def test_fisher_to_full_precision(name: str) -> None:
    f = outputs(width(name))
    torch.testing.assert_close(made(name).fisher(f), enumerated_fisher(name, f).detach(), rtol=1e-8, atol=1e-10)


def test_class_axis() -> None:
    """Images segmented in torch's order [B, C, H, W], with and without draws."""
    likelihood = likelihoods.Categorical(class_axis=1)
    f, y = outputs(S, B, K, 2, 3), torch.randint(K, (B, 2, 3))
    expected = -torch.nn.functional.cross_entropy(f[1], y, reduction="none").flatten(1).sum(-1)
    torch.testing.assert_close(likelihood.log_prob(f[1], y), expected)
    torch.testing.assert_close(likelihood.log_prob(f, y)[1], expected)
    last = likelihoods.Categorical().log_prob(f[1].movedim(1, -1), y)
    torch.testing.assert_close(last, expected)


def test_ignore_index() -> None:
    likelihood = likelihoods.Categorical(ignore_index=-1)
    f, y = outputs(B, 4, K), torch.randint(K, (B, 4))
    full = likelihood.log_prob(f, y)
    some = y.clone()
    some[:, 2] = -1
    torch.testing.assert_close(likelihood.log_prob(f, some), full - f[:, 2].log_softmax(-1).gather(1, y[:, 2:3])[:, 0])
    y[0] = -1
    assert likelihood.log_prob(f, y)[0] == 0


def test_half_precision_outputs_are_scored_in_single() -> None:
    f = torch.randn(B, K).bfloat16()
    y = torch.arange(B) % K
    expected = likelihoods.Categorical().log_prob(f.float(), y)
    actual = likelihoods.Categorical().log_prob(f, y)
    assert actual.dtype == torch.float32
    assert torch.equal(actual, expected)


@pytest.mark.parametrize("name", NAMES)
def test_plain_data_round_trip(name: str) -> None:
    likelihood = made(name)
    again = make_likelihood(likelihood.config())
    assert type(again) is type(likelihood)
    assert again.config() == likelihood.config()
    assert again.state_dict().keys() == likelihood.state_dict().keys()


def test_noise_is_learned_or_fixed() -> None:
    assert [name for name, _ in likelihoods.Gaussian(0.1).named_parameters()] == ["raw_noise"]
    assert not list(likelihoods.Gaussian(0.1, learn=False).parameters())
    assert likelihoods.Gaussian([0.1, 0.2]).noise.tolist() == pytest.approx([0.1, 0.2])


# -- bad targets -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("shape", [(B + 1,), (B, K + 1), (B, K, 1, 1), ()])
def test_wrong_shapes(name: str, shape: tuple[int, ...]) -> None:
    y = torch.zeros(shape, dtype=torch.long if name == "categorical" else torch.float64)
    with pytest.raises(ValueError, match=r"targets of shape .* do not fit outputs of shape .*; "):
        made(name).log_prob(outputs(B, width(name)), y)


@pytest.mark.parametrize("name", NAMES[:3])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_targets_that_are_not_finite(name: str, value: float) -> None:
    y = torch.zeros(B, K, dtype=torch.float64)
    y[2, 1] = value
    with pytest.raises(ValueError, match=r"targets hold (nan|inf) at index \[2, 1\]; remove"):
        made(name).log_prob(outputs(B, width(name)), y)


@pytest.mark.parametrize("label", [K, -1, 17])
def test_labels_out_of_range(label: int) -> None:
    with pytest.raises(ValueError, match=rf"label {label} is out of range for 3 outputs; labels go from 0 to 2"):
        made("categorical").log_prob(outputs(2, K), torch.tensor([0, label]))


def test_float_labels() -> None:
    with pytest.raises(ValueError, match=r"targets are torch.float32; give integer labels"):
        made("categorical").log_prob(outputs(2, K), torch.tensor([0.0, 1.0]))


@pytest.mark.parametrize("value", [0.5, -1.0, math.nan, 2.0])
def test_targets_that_are_neither_yes_nor_no(value: float) -> None:
    with pytest.raises(ValueError, match=r"Bernoulli: target .*; give 0 or 1"):
        made("bernoulli").log_prob(outputs(1, 1), torch.tensor([value]))


@pytest.mark.parametrize("noise", [-0.1, 0.0, math.nan, math.inf, [0.1, -0.2], []])
def test_bad_noise(noise: float | list[float]) -> None:
    with pytest.raises(
        ValueError,
        match=r"likelihoods.Gaussian: noise=.*give a( list, each entry a)? positive number|give at least one",
    ):
        likelihoods.Gaussian(noise=noise)


def test_noise_of_the_wrong_length() -> None:
    with pytest.raises(ValueError, match=r"2 noise variances for 3 outputs; give one per output"):
        likelihoods.Gaussian([0.1, 0.2]).log_prob(torch.zeros(B, 3), torch.zeros(B, 3))


def test_odd_outputs_of_the_heteroscedastic_network() -> None:
    with pytest.raises(ValueError, match=r"3 outputs; the network's last layer needs a mean and a log-variance"):
        likelihoods.HeteroscedasticGaussian().log_prob(torch.zeros(B, 3), torch.zeros(B, 1))


def test_classes_on_the_axis_of_examples() -> None:
    with pytest.raises(ValueError, match=r"class_axis=0 is the examples"):
        likelihoods.Categorical(class_axis=0)
