"""Deep Gaussian processes with their defaults on small problems: short trainings with a known goal."""

from __future__ import annotations

import copy
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from bayesify import likelihoods
from bayesify.deep_gp import DeepGP


def wave(count: int, seed: int) -> tuple[Tensor, Tensor]:
    """A sine with noise of variance 0.01, inputs standardized."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, 1, generator=generator)
    return x, torch.sin(2 * x) + 0.1 * torch.randn(count, 1, generator=generator)


def exact_nll(gp: DeepGP, x: Tensor, y: Tensor, new: Tensor, targets: Tensor) -> float:
    """Negative log predictive density of the exact process with the kernel and noise of a trained layer."""
    kernel: Any = gp.layers[0].kernel
    noise: Any = gp.likelihood.noise
    with torch.no_grad():
        x, new = x.double(), new.double()
        total = kernel(x, x) + float(noise) * torch.eye(len(x), dtype=torch.float64)
        cross = kernel(new, x)
        mean = cross @ torch.linalg.solve(total, y.double())
        variance = kernel.diagonal(new) - (cross * torch.linalg.solve(total, cross.T).T).sum(1) + float(noise)
        return -torch.distributions.Normal(mean[:, 0], variance.sqrt()).log_prob(targets[:, 0].double()).mean().item()


@pytest.mark.parametrize("inducing", ["global", "local"])
def test_one_layer_trained_by_batches_reaches_the_exact_process(inducing: str) -> None:
    """12 inducing points hold a sine on 150 points: within 0.02 nats of the exact predictive with the same kernel."""
    x, y = wave(150, 0)
    new, targets = wave(200, 1)
    gp = DeepGP(x, y, depth=1, num_inducing=12, inducing=inducing)  # type: ignore[arg-type]
    gp.fit((x, y), epochs=80, learning_rate=0.05, seed=0, progress=False)
    nll = -gp.predict(new).log_prob(targets).mean().item()
    assert nll == pytest.approx(exact_nll(gp, x, y, new, targets), abs=0.02)
    assert nll < 0.5 * math.log(2 * math.pi * math.e * 0.01) + 0.15  # the noise's entropy is the floor


@pytest.mark.parametrize("inducing", ["global", "local"])
def test_two_layers_with_defaults_fit_a_step(inducing: str) -> None:
    """A step, which one stationary process cannot hold: the bound rises, and the error is near the noise's 0.05."""
    generator = torch.Generator().manual_seed(0)
    x = torch.linspace(-1.7, 1.7, 100).unsqueeze(1)
    y = torch.sign(x) + 0.05 * torch.randn(100, 1, generator=generator)
    gp = DeepGP(x, y, num_inducing=25, inducing=inducing)  # type: ignore[arg-type]
    history = gp.fit((x, y), epochs=55, seed=0, progress=False)
    assert history[-1]["elbo"] > history[0]["elbo"] + 30
    prediction: Any = gp.predict(x, generator=torch.Generator().manual_seed(0))
    away = (x[:, 0].abs() > 0.2).nonzero()[:, 0]
    assert float((prediction.mean - torch.sign(x))[away].square().mean().sqrt()) < 0.15


def test_global_inducing_points_have_the_better_bound() -> None:
    """Same data, start and steps: the correlated posterior loses less to depth."""
    x, y = wave(100, 0)
    bounds = {}
    for inducing in ("global", "local"):
        gp = DeepGP(x, y, depth=3, num_inducing=20, inducing=inducing)  # type: ignore[arg-type]
        bounds[inducing] = gp.fit((x, y), epochs=25, seed=0, progress=False)[-1]["elbo"]
    assert bounds["global"] > bounds["local"] + 5


def test_classes() -> None:
    """Two rings, which no linear map separates."""
    generator = torch.Generator().manual_seed(0)
    angle = 2 * math.pi * torch.rand(200, generator=generator)
    labels = torch.arange(200) % 2
    radius = 0.5 + labels + 0.1 * torch.randn(200, generator=generator)
    x = torch.stack((radius * angle.cos(), radius * angle.sin()), dim=1)
    gp = DeepGP(x, labels, num_inducing=30, likelihood=likelihoods.Categorical())
    gp.fit((x, labels), epochs=60, learning_rate=0.05, seed=0, progress=False)
    prediction: Any = gp.predict(x, generator=torch.Generator().manual_seed(0))
    assert float((prediction.labels == labels).float().mean()) > 0.97
    far: Any = gp.predict(torch.tensor([[30.0, 30.0]]), generator=torch.Generator().manual_seed(0))
    assert float(far.confidence[0]) < float(prediction.confidence.mean())


def test_fit_is_the_librarys(tmp_path: Path) -> None:
    """Validation, checkpoints that continue, early stopping and the same seed: all of `bayesify.fit` works."""
    x, y = wave(40, 0)
    options: dict[str, Any] = {"learning_rate": 0.05, "seed": 3, "progress": False, "validation": [wave(20, 1)]}
    start = DeepGP(x, y, num_inducing=8)
    whole = copy.deepcopy(start)
    history = whole.fit((x, y), epochs=6, **options)
    assert {"elbo", "nll", "kl", "validation_nll", "validation_rmse"} <= set(history[-1])
    stopped = copy.deepcopy(start)
    path = tmp_path / "run.safetensors"

    def stop(_: Any, rows: Any) -> None:
        if len(rows) == 3:
            raise RuntimeError("interrupted")

    shared = {**options, "scheduler": lambda opt: torch.optim.lr_scheduler.CosineAnnealingLR(opt, 6)}
    with pytest.raises(RuntimeError, match="interrupted"):
        stopped.fit((x, y), epochs=6, checkpoint=path, callbacks=[stop], **shared)
    again = copy.deepcopy(start)
    again.fit((x, y), epochs=6, checkpoint=path, **shared)
    for name, value in whole.state_dict().items():
        assert torch.equal(value, again.state_dict()[name]), name


@pytest.mark.slow
def test_defaults_on_500_rows() -> None:
    """Friedman's function with noise of 0.2 in units of the target: within a tenth of the best error, honest intervals."""

    def friedman(count: int, seed: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(seed)
        x = torch.rand(count, 5, generator=generator)
        f = 10 * torch.sin(math.pi * x[:, 0] * x[:, 1]) + 20 * (x[:, 2] - 0.5) ** 2 + 10 * x[:, 3] + 5 * x[:, 4]
        return (x - 0.5) * math.sqrt(12), (f + torch.randn(count, generator=generator) - 14.4) / 5

    x, y = friedman(500, 0)
    new, targets = friedman(1000, 1)
    gp = DeepGP(x, y)
    gp.fit((x, y), seed=0, progress=False)
    prediction: Any = gp.predict(new, generator=torch.Generator().manual_seed(0))
    assert float((prediction.mean[:, 0] - targets).square().mean().sqrt()) < 0.23
    low, high = prediction.interval(0.9)
    inside = ((low[:, 0] < targets) & (targets < high[:, 0])).float().mean()
    assert 0.85 < float(inside) < 0.95
