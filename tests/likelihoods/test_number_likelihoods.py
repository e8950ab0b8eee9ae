"""Likelihoods of numbers through training, storage, stacks of models, Laplace and the other users of a likelihood."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import bayesify
from bayesify import likelihoods, metrics, posteriors
from bayesify.baselines import TemperatureScaling
from bayesify.training.stack import ModelStack

KINDS: dict[str, dict[str, Any]] = {
    "heteroscedastic_gaussian": {},
    "student_t": {},
    "student_t row": {"scale": None},
    "poisson": {},
    "negative_binomial": {},
    "negative_binomial row": {"dispersion": None},
    "hurdle": {},
    "quantiles": {"levels": [0.05, 0.25, 0.5, 0.75, 0.95]},
}


def made(name: str) -> likelihoods.Likelihood:
    return likelihoods.REGISTRY[name.split()[0]](**KINDS[name])


def data(name: str, rows: int = 200) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = 2 * torch.rand(rows, 1, generator=generator) - 1
    noise = torch.randn(rows, 1, generator=generator)
    if name.startswith(("poisson", "negative")):
        return x, torch.poisson((1.5 * x + 0.7 * noise).exp(), generator=generator)
    if name == "hurdle":
        amount = (x + 0.5 * noise).exp()
        return x, torch.where(torch.rand(rows, 1, generator=generator) < torch.sigmoid(2 * x), 0.0, amount)
    return x, 2 * x + (0.1 + 0.4 * x.abs()) * noise


def network(name: str, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(1, 8), nn.Tanh(), nn.Linear(8, made(name).outputs_per_target))


def bayesian(name: str, seed: int = 0) -> bayesify.BayesianNetwork:
    return bayesify.bayesianize(network(name, seed), posteriors.Ensemble(2), likelihood=made(name))


@pytest.mark.parametrize("name", KINDS)
def test_trained_stored_and_scored(name: str, tmp_path: Path) -> None:
    """Training makes the data more probable than a fit without inputs; a file and a configuration give the same back."""
    x, y = data(name)
    bnn = bayesian(name)
    before = metrics.evaluate(bnn.predict(x), y)
    bayesify.fit(bnn, [(x, y)], epochs=40, learning_rate=0.1)
    after = metrics.evaluate(bnn.predict(x), y)
    assert after["nll"] < before["nll"]
    assert after["crps"] < before["crps"]
    assert after["rmse"] < float(y.std())
    assert abs(after["coverage_90"] - 0.9) < 0.1
    bayesify.save(bnn, tmp_path / "model.safetensors")
    again = bayesify.load(tmp_path / "model.safetensors", network(name))
    assert torch.equal(again.predict(x).quantile(0.3), bnn.predict(x).quantile(0.3))
    (tmp_path / "model.json").write_text(json.dumps(bnn.config()))
    configured = bayesify.bayesianize(network(name), tmp_path / "model.json")
    assert configured.likelihood is not None
    assert configured.likelihood.config() == made(name).config()


@pytest.mark.parametrize("name", KINDS)
def test_models_at_once_are_models_one_by_one(name: str) -> None:
    x, y = data(name, 40)
    alone = [bayesian(name, seed).double() for seed in range(2)]
    stack = ModelStack([bayesian(name, seed).double() for seed in range(2)])
    for bnn in alone:
        bayesify.fit(bnn, [(x.double(), y.double())], epochs=3, learning_rate=0.01)
    bayesify.fit(stack, [(x.double(), y.double())], epochs=3, learning_rate=0.01)
    for one, other in zip(stack.unstack(), alone, strict=True):
        for (key, value), expected in zip(one.state_dict().items(), other.state_dict().values(), strict=True):
            torch.testing.assert_close(value, expected, rtol=1e-8, atol=1e-10, msg=key)


@pytest.mark.parametrize("name", ["student_t", "student_t row", "poisson", "negative_binomial", "hurdle"])
def test_laplace(name: str) -> None:
    x, y = data(name, 60)
    laplace = bayesify.Laplace(network(name), made(name)).fit([(x, y)])
    for method in ("closed_form", "linearized_mc"):
        scores = metrics.evaluate(laplace.predict(x, method=method), y)  # type: ignore[arg-type]
        assert all(abs(value) < 1e4 for value in scores.values())


@pytest.mark.parametrize("name", ["quantiles", "negative_binomial row"])
def test_laplace_refuses_at_once(name: str) -> None:
    with pytest.raises(TypeError, match=r"Laplace: likelihoods\..*(no Hessian|no closed form).*'ensemble'"):
        bayesify.Laplace(network(name), made(name))


@pytest.mark.parametrize("name", ["student_t row", "quantiles", "poisson"])
def test_temperature_scaling(name: str) -> None:
    """A factor on the variance, where the variance is the model's own."""
    x, y = data(name)
    scaled = TemperatureScaling(bayesian(name))
    if name == "poisson":
        with pytest.raises(TypeError, match="variance cannot be scaled separately"):
            scaled.fit([(x, y)])
        return
    scaled.fit([(x, y)])
    nll = -scaled.predict(x).log_prob(y).mean()
    assert nll <= -scaled.model.predict(x).log_prob(y).mean() + 1e-5


def test_a_learned_variance_is_read_without_a_warning():
    noise, several = likelihoods.Gaussian(0.1).noise, likelihoods.Gaussian([0.1, 0.2]).noise
    assert noise.requires_grad  # float(noise) would warn
    assert noise.item() == pytest.approx(0.1)
    assert several.tolist() == pytest.approx([0.1, 0.2])
