"""Class probabilities from a Gaussian over logits: what every link keeps, and each one's own formula."""

import math
import pickle

import pytest
import torch
from torch import Tensor

from bayesify.likelihoods import Bernoulli, Categorical
from bayesify.predictive.gaussian import LINK_DRAWS, OutputGaussian, class_blocks

LINKS = ("mc", "probit", "bridge")
B, K = 40, 5


def gaussian(shape: tuple[int, ...] = (K,), scale: float = 1.0) -> OutputGaussian:
    generator = torch.Generator().manual_seed(0)
    size = math.prod(shape)
    root = scale * torch.randn(B, size, size, generator=generator, dtype=torch.float64) / math.sqrt(size)
    return OutputGaussian(3 * torch.randn(B, *shape, generator=generator, dtype=torch.float64), root @ root.mT, seed=1)


def expected(outputs: OutputGaussian, draws: int = 40_000) -> Tensor:
    """Probabilities by independent draws; the standard error of each is at most 0.5 / sqrt(draws) = 0.0025."""
    factor = torch.linalg.cholesky(outputs.covariance + 1e-9 * torch.eye(K, dtype=torch.float64))
    total = torch.zeros_like(outputs.mean)
    generator = torch.Generator().manual_seed(2)
    for _ in range(40):
        noise = torch.randn(B, K, draws // 40, generator=generator, dtype=torch.float64)
        total += (outputs.mean.unsqueeze(-1) + factor @ noise).softmax(1).sum(-1)
    return total / draws


def test_the_mean_over_draws_is_the_expectation() -> None:
    outputs = gaussian()
    found = Categorical().closed_form(outputs).probs
    # the standard error of a probability over S draws is at most 0.5 / sqrt(S), k = 5
    assert float((found - expected(outputs)).abs().max()) < 5 * 0.5 / math.sqrt(LINK_DRAWS)
    assert float((found - expected(outputs)).square().mean().sqrt()) < 0.01


@pytest.mark.parametrize("link", LINKS)
def test_what_is_added_to_all_logits_alike_changes_nothing(link: str) -> None:
    plain = gaussian()
    shifted = OutputGaussian(plain.mean + 7.0, plain.covariance + 130.0, seed=1)
    probs, others = (Categorical().closed_form(value, link).probs for value in (plain, shifted))  # type: ignore[arg-type]
    if link == "mc":  # other draws of the same distribution
        assert float((probs - others).square().mean().sqrt()) < 0.02
    else:
        torch.testing.assert_close(probs, others)


@pytest.mark.parametrize("link", LINKS)
def test_it_does_not_depend_on_the_other_examples(link: str) -> None:
    whole = gaussian()
    part = OutputGaussian(whole.mean[3:5], whole.covariance[3:5], seed=99)
    found, alone = (Categorical().closed_form(value, link) for value in (whole, part))  # type: ignore[arg-type]
    torch.testing.assert_close(found.probs[3:5], alone.probs)
    torch.testing.assert_close(found.mutual_information[3:5], alone.mutual_information)


def test_the_bridge_is_its_formula() -> None:
    outputs = gaussian()
    center = torch.eye(K, dtype=torch.float64) - 1 / K
    mean, covariance = outputs.mean @ center, center @ outputs.covariance @ center
    alpha = (1 - 2 / K + mean.exp() / K**2 * (-mean).exp().sum(1, keepdim=True)) / covariance.diagonal(dim1=1, dim2=2)
    torch.testing.assert_close(Categorical().closed_form(outputs, "bridge").probs, alpha / alpha.sum(1, keepdim=True))
    huge = OutputGaussian(1000 * outputs.mean, outputs.covariance, seed=1)
    assert bool(torch.isfinite(Categorical().closed_form(huge, "bridge").probs).all())


@pytest.mark.parametrize("link", ["mc", "probit"])
def test_two_classes_are_a_yes_or_no_of_their_difference(link: str) -> None:
    outputs = gaussian((2,))
    difference = outputs.mean[:, 1:] - outputs.mean[:, :1]
    signs = torch.tensor([-1.0, 1.0], dtype=torch.float64)
    variance = torch.einsum("i,bij,j->b", signs, outputs.covariance, signs).view(-1, 1, 1)
    found = Categorical().closed_form(outputs, link).probs[:, 1:]  # type: ignore[arg-type]
    binary = Bernoulli().closed_form(OutputGaussian(difference, variance, seed=1), link).probs  # type: ignore[arg-type]
    if link == "probit":
        torch.testing.assert_close(found, binary)
        torch.testing.assert_close(
            binary, (difference / (1 + math.pi / 8 * variance.squeeze(-1)).sqrt()).sigmoid(), rtol=1e-9, atol=1e-12
        )
    else:
        assert float((found - binary).abs().max()) < 5 * 0.5 / math.sqrt(LINK_DRAWS)


@pytest.mark.parametrize("link", LINKS)
def test_without_uncertainty_they_are_the_networks(link: str) -> None:
    outputs = gaussian(scale=1e-6)
    found = Categorical().closed_form(outputs, link)  # type: ignore[arg-type]
    if link != "bridge":  # a ratio of variances, whatever their size
        torch.testing.assert_close(found.probs, outputs.mean.softmax(1), rtol=1e-4, atol=1e-6)
    assert float(found.mutual_information.max()) < 1e-6


@pytest.mark.parametrize("link", LINKS)
@pytest.mark.parametrize("axis", [-1, 1])
def test_positions_are_each_their_own(link: str, axis: int) -> None:
    shape = (K, 3) if axis == 1 else (3, K)
    outputs, likelihood = gaussian(shape), Categorical(class_axis=axis)
    found = likelihood.closed_form(outputs, link)  # type: ignore[arg-type]
    assert found.probs.shape == (B, 3, K)
    blocks = class_blocks(outputs.covariance, outputs.mean.shape, likelihood.logit_axis(3))
    kept = likelihood.closed_form(OutputGaussian(outputs.mean, blocks, seed=1), link)  # type: ignore[arg-type]
    torch.testing.assert_close(found.probs, kept.probs)
    for place in range(3):
        mean = outputs.mean.movedim(axis, -1)[:, place]
        alone = Categorical().closed_form(OutputGaussian(mean, blocks[:, place], seed=1), link)  # type: ignore[arg-type]
        torch.testing.assert_close(found.probs[:, place], alone.probs)
        torch.testing.assert_close(found.mutual_information[:, place], alone.mutual_information)
    labels = torch.zeros(B, 3, dtype=torch.long)
    torch.testing.assert_close(found.log_prob(labels), found.probs[..., 0].log().sum(-1))


@pytest.mark.parametrize("link", LINKS)
def test_it_is_pickled_and_has_scores(link: str) -> None:
    found = Categorical().closed_form(gaussian(), link)  # type: ignore[arg-type]
    again = pickle.loads(pickle.dumps(found))
    torch.testing.assert_close(again.probs, found.probs)
    torch.testing.assert_close(found.probs.sum(1), torch.ones(B, dtype=torch.float64))
    assert bool((found.mutual_information >= 0).all())
    assert found.outputs.shape == (32, B, K)


def test_variances_alone_are_independent_outputs() -> None:
    variance = torch.rand(B, K, dtype=torch.float64)
    mean = gaussian().mean
    for link in LINKS:
        found, whole = (
            Categorical().closed_form(OutputGaussian(mean, value, seed=1), link).probs  # type: ignore[arg-type]
            for value in (variance, torch.diag_embed(variance))
        )
        torch.testing.assert_close(found, whole)
