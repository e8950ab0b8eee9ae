"""The KL of every posterior with a density is that of a dense normal; what stands in for it elsewhere is as documented."""

import math

import pytest
import torch
from cases import CASES, POSTERIORS, convert, generator, has_density
from dense_reference import gaussian, kl_normals
from torch import Tensor, nn

import bayesify
from bayesify import BayesianNetwork, posteriors, priors

DENSE = ["mean_field", "full_covariance", "matrix_normal", "k_tied"]
LEAVES = [
    "linear", "linear_no_bias", "bilinear", "conv1d", "conv2d_depthwise", "transposed1d", "transposed3d", "embedding",
    "layer_norm", "custom", "tied", "lstm_cell", "attention_kdim",
]  # fmt: skip


def prior_covariance(bnn: BayesianNetwork) -> Tensor:
    std = [
        torch.full((weight.numel,), bnn.prior.std_of(weight), dtype=torch.float64) for weight in bnn.posterior.weights
    ]
    return torch.diag(torch.cat(std) ** 2)


def negative_log_prior(bnn: BayesianNetwork, weights: dict[str, Tensor]) -> Tensor:
    total = torch.zeros((), dtype=torch.float64)
    for name, value in weights.items():
        std = torch.tensor(bnn.prior.std_of(bnn.weights[name]), dtype=torch.float64)
        total -= torch.distributions.Normal(torch.zeros_like(std), std).log_prob(value).sum()
    return total


def test_every_posterior_with_a_density_is_here() -> None:
    """A new Gaussian posterior needs a dense reference."""
    parts = {name: convert(name, CASES["linear"]).posterior for name in POSTERIORS}
    found = {name for name, part in parts.items() if has_density(part) and not part.runs_network}
    assert found <= {*DENSE, "local_inducing"}  # which has its own, in test_global_inducing


@pytest.mark.parametrize("leaf", LEAVES)
@pytest.mark.parametrize("name", DENSE)
def test_kl_and_moments_are_the_dense_ones(name: str, leaf: str) -> None:
    bnn = convert(name, CASES[leaf], torch.float64, init_std=0.8)  # the dense determinant needs a good condition
    part = bnn.posterior
    mean, covariance = gaussian(part)
    expected = kl_normals(mean, covariance, torch.zeros_like(mean), prior_covariance(bnn)).item()
    assert bnn.kl().item() == pytest.approx(expected, rel=1e-8)
    assert bnn.draw(2, generator=generator()).kl.tolist() == pytest.approx([expected] * 2, rel=1e-8)
    ours = torch.cat([part.mean()[weight.name].flatten() for weight in part.weights])
    torch.testing.assert_close(ours.detach(), mean, rtol=1e-8, atol=1e-10)
    ours = torch.cat([part.variance()[weight.name].flatten() for weight in part.weights])
    torch.testing.assert_close(ours.detach(), covariance.diagonal(), rtol=1e-8, atol=1e-12)


def test_kl_under_a_cap() -> None:
    bnn = convert("mean_field", CASES["linear"], torch.float64, max_std=0.4)
    mean, covariance = gaussian(bnn.posterior)
    assert float(covariance.diagonal().max()) < 0.16
    expected = kl_normals(mean, covariance, torch.zeros_like(mean), prior_covariance(bnn)).item()
    assert bnn.kl().item() == pytest.approx(expected, rel=1e-8)


@pytest.mark.parametrize("prior", [priors.Gaussian(0.3), priors.Standard(), priors.Neal(2.0)], ids=lambda p: p.name)
def test_prior_scales(prior: priors.Prior) -> None:
    """Neal: 1 / fan_in with the layer's fan-in for the bias; 1 for embeddings, norms and custom parameters."""
    net = nn.ModuleDict(
        {"conv": nn.Conv2d(4, 6, 3, groups=2), "up": nn.ConvTranspose2d(4, 6, 3, groups=2), "words": nn.Embedding(5, 3),
         "mix": nn.Bilinear(2, 3, 4), "norm": nn.LayerNorm(3), "core": nn.LSTM(3, 5)}
    ).double()  # fmt: skip
    bnn = bayesify.bayesianize(net, {"norm": "mean_field", "*": "mean_field"}, prior=prior)
    fan_in = {"conv": 18, "up": 18, "words": 1, "mix": 6, "norm": 1}
    for name, weight in bnn.weights.items():
        module, leaf = name.split(".")
        fan = {"ih": 3, "hh": 5}[leaf.split("_")[1]] if module == "core" else fan_in[module]
        expected = {"gaussian": 0.3, "standard": 1.0, "neal": 2 / math.sqrt(fan)}[prior.name]
        assert bnn.prior.std_of(weight) == pytest.approx(expected), name


def test_kl_adds_over_posteriors() -> None:
    """Two posteriors on two layers: the KL is the sum, averaged over nothing."""
    net = CASES["linear"].network(torch.float64)
    both = bayesify.bayesianize(net, {"0": posteriors.MeanField(0.1), "2": posteriors.FullCovariance(0.2)})
    alone = [
        bayesify.bayesianize(net, {"0": posteriors.MeanField(0.1)}).kl(),
        bayesify.bayesianize(net, {"2": posteriors.FullCovariance(0.2)}).kl(),
    ]
    torch.testing.assert_close(both.kl(), alone[0] + alone[1], rtol=1e-12, atol=0)


@pytest.mark.parametrize("leaf", LEAVES)
def test_point_stands_in_minus_log_prior(leaf: str) -> None:
    bnn = convert("point", CASES[leaf], torch.float64)
    torch.testing.assert_close(bnn.kl(), negative_log_prior(bnn, bnn.posterior.mean()), rtol=1e-10, atol=0)


@pytest.mark.parametrize("leaf", LEAVES)
def test_ensemble_stands_in_the_mean_over_members(leaf: str) -> None:
    bnn = convert("ensemble", CASES[leaf], torch.float64)
    value = dict(bnn.posterior.value.items())  # type: ignore[union-attr]
    members = [negative_log_prior(bnn, {name: v[k] for name, v in value.items()}) for k in range(bnn.posterior.members)]
    torch.testing.assert_close(bnn.kl(), torch.stack(members).mean(), rtol=1e-10, atol=0)


@pytest.mark.parametrize("leaf", ["linear", "conv1d", "conv2d_depthwise", "transposed1d"])
def test_dropout_stands_in_the_expected_minus_log_prior(leaf: str) -> None:
    """By enumeration over the 2^n masks."""
    bnn = convert("dropout", CASES[leaf], torch.float64, first_layer=True, rate=0.3)
    part = bnn.posterior
    total = torch.zeros((), dtype=torch.float64)
    for weight in part.weights:
        value = part.mean()[weight.name]
        if weight.is_bias:
            total += negative_log_prior(bnn, {weight.name: value})
            continue
        units = weight.shape[0] if weight.transposed else weight.shape[1]  # groups share masks' distribution
        for mask in range(2**units):
            keep = torch.tensor([(mask >> bit) & 1 for bit in range(units)], dtype=torch.float64)
            probability = 0.7 ** float(keep.sum()) * 0.3 ** float((1 - keep).sum())
            axis = 0 if weight.transposed else 1
            shape = [-1 if dim == axis else 1 for dim in range(len(weight.shape))]
            total += probability * negative_log_prior(bnn, {weight.name: value * keep.view(shape) / 0.7})
    torch.testing.assert_close(bnn.kl(), total, rtol=1e-10, atol=0)


def test_dropout_without_dropping_is_point() -> None:
    dropped, point = (convert(name, CASES["linear"], torch.float64, **more) for name, more in
                      (("dropout", {"rate": 0.0}), ("point", {})))  # fmt: skip
    torch.testing.assert_close(dropped.kl(), point.kl(), rtol=1e-12, atol=0)
    x = CASES["linear"].batch(dtype=torch.float64)[0]
    torch.testing.assert_close(dropped(x), point(x))


@pytest.mark.parametrize("leaf", LEAVES)
def test_rank_one_stands_in_shared_weights_and_factors(leaf: str) -> None:
    """-log p of the shared weights plus the mean over components of the factors' KL to N(1, 0.1^2)."""
    bnn = convert("rank_one", CASES[leaf], torch.float64, components=3)
    part = bnn.posterior
    assert isinstance(part, posteriors.RankOne)
    shared: dict[str, Tensor] = {}
    total = torch.zeros((), dtype=torch.float64)
    for layer in part.layers:
        shared.update(layer.from_matrix(part.value[layer.name]))
        for mean, raw in (
            (part.row_mean[layer.name], part.row_raw_std[layer.name]),
            (part.col_mean[layer.name], part.col_raw_std[layer.name]),
        ):
            std = torch.log1p(raw.exp())
            for k in range(3):
                ones = torch.ones_like(mean[k])
                total += kl_normals(mean[k], torch.diag(std[k] ** 2), ones, torch.diag(0.01 * ones)) / 3
    torch.testing.assert_close(bnn.kl(), total + negative_log_prior(bnn, shared), rtol=1e-8, atol=0)
