"""Every likelihood through one protocol: densities, Fisher, shapes, bad targets, plain data."""

import itertools
import math
from collections.abc import Callable

import numpy as np
import pytest
import scipy.stats
import torch
from torch import Tensor
from torch.distributions import (
    Bernoulli,
    Categorical,
    Distribution,
    LogNormal,
    NegativeBinomial,
    Normal,
    Poisson,
    StudentT,
)

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
        "student_t": likelihoods.StudentT(0.7, 4.5),
        "student_t_row_scale": likelihoods.StudentT(None, 3.0, learn=False),
        "poisson": likelihoods.Poisson(),
        "negative_binomial": likelihoods.NegativeBinomial(NOISE),
        "negative_binomial_row_dispersion": likelihoods.NegativeBinomial(None),
        "hurdle": likelihoods.Hurdle(),
        "quantiles": likelihoods.Quantiles([0.1, 0.4, 0.8]),
        "categorical": likelihoods.Categorical(),
        "bernoulli": likelihoods.Bernoulli(),
    }
    return kinds[name].double()


class HurdleReference(Distribution):
    """Zero with a probability, and otherwise torch's log-normal distribution."""

    def __init__(self, f: Tensor) -> None:
        location, log_variance, logit = f.chunk(3, -1)
        self.zero, self.amount = Bernoulli(logits=logit), LogNormal(location, (0.5 * log_variance).exp())

    def sample(self, sample_shape: torch.Size = torch.Size()) -> Tensor:  # noqa: B008
        return (1 - self.zero.sample(sample_shape)) * self.amount.sample(sample_shape)

    def log_prob(self, value: Tensor) -> Tensor:
        zero = value == 0
        above = self.amount.log_prob(torch.where(zero, 1.0, value))
        return self.zero.log_prob(zero.double()) + torch.where(zero, 0.0, above)


def reference(name: str, f: Tensor) -> torch.distributions.Distribution:
    if name == "hurdle":
        return HurdleReference(f)
    if name.startswith("gaussian"):
        noise = torch.tensor(0.3 if name == "gaussian" else NOISE, dtype=torch.float64)
        return Normal(f, noise.sqrt())
    if name == "heteroscedastic_gaussian":
        mean, log_variance = f.chunk(2, -1)
        return Normal(mean, (0.5 * log_variance).exp())
    if name == "student_t":
        return StudentT(4.5, f, 0.7)
    if name == "student_t_row_scale":
        location, log_square = f.chunk(2, -1)
        return StudentT(3.0, location, (0.5 * log_square).exp())
    if name == "poisson":
        return Poisson(f.exp())
    if name.startswith("negative_binomial"):
        log_mean, log_dispersion = (
            f.chunk(2, -1) if "row" in name else (f, torch.tensor(NOISE, dtype=torch.float64).log())
        )
        return NegativeBinomial((-log_dispersion).exp(), logits=log_mean + log_dispersion)
    return Categorical(logits=f) if name == "categorical" else Bernoulli(logits=f)


NAMES = [
    "gaussian",
    "gaussian_per_output",
    "heteroscedastic_gaussian",
    "student_t",
    "student_t_row_scale",
    "quantiles",
    "poisson",
    "negative_binomial",
    "negative_binomial_row_dispersion",
    "hurdle",
    "categorical",
    "bernoulli",
]
NUMBERS = NAMES[:10]
CURVED = [name for name in NAMES if name not in ("quantiles", "negative_binomial_row_dispersion")]


def width(name: str) -> int:
    return K * made(name).outputs_per_target


def test_every_registered_likelihood_is_here() -> None:
    assert set(likelihoods.REGISTRY) <= set(NAMES)


@pytest.mark.parametrize("name", [name for name in NAMES if name != "quantiles"])  # which has a test of its own
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


SINGLE = [name for name in NAMES if name not in ("gaussian_per_output", "negative_binomial", "categorical")]


@pytest.mark.parametrize("name", SINGLE)
def test_one_column_may_be_missing(name: str) -> None:
    """[B] against [B, 1] is never broadcast to [B, B]; the others have no single column."""
    likelihood = made(name)
    f = outputs(B, likelihood.outputs_per_target)
    y = torch.ones(B, dtype=torch.float64)
    both = likelihood.log_prob(f, y.unsqueeze(1))
    assert both.shape == (B,)
    assert torch.equal(likelihood.log_prob(f, y), both)
    if likelihood.outputs_per_target == 1:
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
        negative = lambda f: -likelihood.log_prob(f[None], y[None], has_draws=False).sum()  # noqa: E731
        return torch.func.jacrev(torch.func.jacrev(negative))(f)  # type: ignore[no-any-return]

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
    if not isinstance(distribution := reference(name, f), Normal):
        return summed_fisher(hessian, distribution)
    nodes, weights = np.polynomial.hermite_e.hermegauss(3)  # exact for the quadratics that occur
    for point in itertools.product(range(3), repeat=K):
        y = distribution.mean + distribution.stddev * torch.tensor(nodes[list(point)])
        total += math.prod(weights[list(point)] / math.sqrt(2 * math.pi)) * hessian(y.detach())
    return total


def summed_fisher(hessian: Callable[[Tensor], Tensor], distribution: Distribution) -> Tensor:
    """The expected Hessian, output by output, which are independent: over all counts, or 4,000 equally probable values."""
    if isinstance(distribution, StudentT):
        levels = (np.arange(4000) + 0.5) / 4000
        standard = torch.tensor(scipy.stats.t(float(distribution.df.reshape(-1)[0])).ppf(levels)).unsqueeze(-1)
        values = distribution.loc + distribution.scale * standard
        weights = torch.full_like(values, 1 / 4000)
    elif isinstance(
        distribution, HurdleReference
    ):  # zero, and normal quantiles of log amounts by Gauss and Hermite's rule
        nodes, shares = (torch.tensor(part).unsqueeze(-1) for part in np.polynomial.hermite_e.hermegauss(3))
        amounts = (distribution.amount.loc + distribution.amount.scale * nodes).exp()
        values = torch.cat((torch.zeros(1, K, dtype=torch.float64), amounts))
        zero = distribution.zero.probs
        weights = torch.cat((zero.unsqueeze(0), (1 - zero) * shares / math.sqrt(2 * math.pi)))
    else:
        values = torch.arange(400, dtype=torch.float64).unsqueeze(-1).expand(-1, K)
        weights = distribution.log_prob(values).exp()
    hessians = torch.func.vmap(hessian)(values)  # [J, P, P]
    weights = weights.repeat(1, hessians.shape[-1] // K)  # that of each output's own target
    return (weights.unsqueeze(-1) * hessians).sum(0)


@pytest.mark.parametrize("name", CURVED)
def test_fisher_is_the_expected_hessian(name: str) -> None:
    likelihood = made(name)
    f = outputs(2, width(name))
    with torch.no_grad():
        fisher = likelihood.fisher(f)
    assert fisher.shape == (2, width(name), width(name))
    for one, example in zip(fisher, f, strict=True):
        coarse = name.startswith("student")  # what 4,000 values leave out
        expected = enumerated_fisher(name, example).detach()
        torch.testing.assert_close(one, expected, rtol=1e-3 if coarse else 1e-6, atol=1e-3 if coarse else 1e-8)
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
    among = likelihoods.Categorical(ignore_index=1).log_prob(f[0], torch.tensor([0, 1, 2, 0]))
    assert (among == 0).tolist() == [False, True, False, False]


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


@pytest.mark.parametrize("name", ["quantiles", "negative_binomial_row_dispersion"])
def test_no_curvature_is_said(name: str) -> None:
    f = outputs(B, width(name))
    for ask in (made(name).fisher, made(name).fisher_factor):
        with pytest.raises(TypeError, match=r"likelihoods.*(no Hessian|no closed form).*ensemble"):
            ask(f)


@pytest.mark.parametrize("name", ["poisson", "negative_binomial"])
@pytest.mark.parametrize("value", [-1.0, 0.5])
def test_targets_that_are_no_counts(name: str, value: float) -> None:
    with pytest.raises(ValueError, match=rf"targets hold {value}, but counts are whole numbers of at least 0"):
        made(name).log_prob(outputs(1, K), torch.tensor([[0.0, value, 1.0]]))


def test_targets_that_are_no_amounts() -> None:
    with pytest.raises(ValueError, match=r"targets hold -0.5, but amounts are at least 0; use likelihoods.StudentT"):
        made("hurdle").log_prob(outputs(1, 3 * K), torch.tensor([[0.0, -0.5, 1.0]]))


@pytest.mark.parametrize(
    "make", [likelihoods.HeteroscedasticGaussian, lambda beta: likelihoods.StudentT(None, 4.0, beta=beta)]
)
@pytest.mark.parametrize("beta", [0.0, 0.5, 1.0])
def test_rows_with_little_noise_do_not_rule(make: Callable[..., Likelihood], beta: float) -> None:
    """Values are the log-likelihood's; gradients are weighted by variance over that of the residuals, which is learned."""
    likelihood, f = make(beta=beta).double(), outputs(B, 2).requires_grad_()
    y = torch.randn(B, 1, dtype=torch.float64)
    exact, found = likelihood.log_prob(f, y), likelihood.objective(f, y)
    torch.testing.assert_close(found, exact)
    (wanted,), (got,) = torch.autograd.grad(exact.sum(), f), torch.autograd.grad(found.sum(), f, retain_graph=True)
    torch.testing.assert_close(got, wanted * f.detach()[:, 1:].exp() ** beta)  # the shared variance starts at 1
    if beta and isinstance(likelihood, likelihoods.HeteroscedasticGaussian):
        (slope,) = torch.autograd.grad(found.sum(), likelihood.raw_noise)
        residual = (y - f.detach()[:, :1]).square()
        torch.testing.assert_close(slope, (0.5 * (residual - 1)).sum() * torch.sigmoid(likelihood.raw_noise))


def test_mean_first_keeps_the_mean() -> None:
    """With beta = 1 the means' gradients are those of squared errors, whatever the rows' variances."""
    likelihood = likelihoods.HeteroscedasticGaussian(beta=1.0).double()
    f = torch.tensor([[0.2, -8.0], [0.7, 3.0]], dtype=torch.float64, requires_grad=True)
    y = torch.tensor([[1.0], [1.0]], dtype=torch.float64)
    (gradient,) = torch.autograd.grad(likelihood.objective(f, y).sum(), f)
    torch.testing.assert_close(gradient[:, 0], (y - f.detach()[:, :1])[:, 0])


@pytest.mark.parametrize("name", NUMBERS)
def test_under_vmap(name: str) -> None:
    likelihood, f = made(name), outputs(S, B, width(name))
    y = torch.ones(B, K, dtype=torch.float64)
    one_by_one = torch.func.vmap(lambda f: likelihood.log_prob(f, y, has_draws=False))(f)
    torch.testing.assert_close(one_by_one, likelihood.log_prob(f, y))
    one_by_one = torch.func.vmap(lambda f: likelihood.objective(f, y, has_draws=False))(f)
    torch.testing.assert_close(one_by_one, likelihood.objective(f, y))


@pytest.mark.parametrize("name", NUMBERS)
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
    with pytest.raises(
        ValueError,
        match=r"targets have type torch.float32, but labels must be integers.*use Gaussian for targets that are amounts",
    ):
        made("categorical").log_prob(outputs(2, K), torch.tensor([0.0, 1.0]))


def test_one_output_for_two_classes() -> None:
    with pytest.raises(ValueError, match=r"label 1 is out of range for 1 outputs; .*use Bernoulli"):
        made("categorical").log_prob(outputs(2, 1), torch.tensor([0, 1]))


def test_one_hot_rows() -> None:
    with pytest.raises(ValueError, match=r"targets of shape \(2, 3\) do not fit .*y\.argmax\(-1\) for one-hot rows"):
        made("categorical").log_prob(outputs(2, K), torch.eye(K, dtype=torch.long)[:2])


@pytest.mark.parametrize("value", [0.5, -1.0, math.nan, 2.0])
def test_targets_that_are_neither_yes_nor_no(value: float) -> None:
    with pytest.raises(ValueError, match=r"Bernoulli: a target is .*; give targets that are 0 or 1"):
        made("bernoulli").log_prob(outputs(1, 1), torch.tensor([value]))


@pytest.mark.parametrize("noise", [-0.1, 0.0, math.nan, math.inf, [0.1, -0.2], []])
def test_bad_noise(noise: float | list[float]) -> None:
    with pytest.raises(
        ValueError,
        match=r"likelihoods.Gaussian: noise=.*give a( list, each entry a)? (positive|finite) number|give at least one",
    ):
        likelihoods.Gaussian(noise=noise)


def test_noise_of_the_wrong_length() -> None:
    with pytest.raises(ValueError, match=r"there are 2 values of noise, but 3 outputs; give one value per output"):
        likelihoods.Gaussian([0.1, 0.2]).log_prob(torch.zeros(B, 3), torch.zeros(B, 3))


def test_odd_outputs_of_the_heteroscedastic_network() -> None:
    with pytest.raises(ValueError, match=r"has 3 outputs, but needs a mean and a log-variance"):
        likelihoods.HeteroscedasticGaussian().log_prob(torch.zeros(B, 3), torch.zeros(B, 1))


def test_classes_on_the_axis_of_examples() -> None:
    with pytest.raises(ValueError, match=r"class_axis=0 is the axis of the examples"):
        likelihoods.Categorical(class_axis=0)
