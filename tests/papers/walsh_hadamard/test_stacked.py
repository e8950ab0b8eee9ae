"""A stack of networks is those networks: the same bound, the same training, the same state after an interruption."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from bayesify_papers.walsh_hadamard.stacked import Stack
from bayesify_papers.walsh_hadamard.stacked_training import CHUNK, Recipe, Trainer, train
from torch import Tensor

from bayesify.conversion import bayesianize
from bayesify.likelihoods import Categorical, Gaussian, HeteroscedasticGaussian
from bayesify.maths.noise import NoiseSource
from bayesify.models import mlp
from bayesify.network import BayesianNetwork
from bayesify.posteriors import Dropout, FullCovariance, MeanField, WalshHadamard
from bayesify.posteriors.base import DrawRequest, Posterior
from bayesify.priors import Neal

NETWORKS, ROWS, BATCH = 3, 23, 8

CASES: dict[str, tuple[Callable[[], Posterior], list[int]]] = {
    "walsh_hadamard": (lambda: WalshHadamard(init_std=0.1), [5, 12, 1]),
    "two layers of one block size": (lambda: WalshHadamard(init_std=0.1), [5, 12, 6, 1]),
    "a wide layer, blocks along columns": (lambda: WalshHadamard(init_std=0.1), [5, 4, 37, 3, 1]),
    "unformed": (lambda: WalshHadamard(init_std=0.1), [260, 300, 1]),
    "full": (lambda: WalshHadamard("full", init_std=0.1), [5, 12, 1]),
    "full, biases as points": (lambda: WalshHadamard("full", init_std=0.1), [5, 12, 6, 1]),
    "tanh": (lambda: WalshHadamard(init_std=0.1), [5, 12, 6, 1]),
    "mean_field": (lambda: MeanField(init_std=0.1), [5, 12, 1]),
    "biases as points": (lambda: WalshHadamard(init_std=0.1), [5, 12, 1]),
    "unformed, biases as points": (lambda: WalshHadamard(init_std=0.1), [257, 258, 1]),
    "mean_field, biases as points": (lambda: MeanField(init_std=0.1), [5, 12, 1]),
    "dropout": (lambda: Dropout(0.2), [5, 12, 7, 1]),
}


def make(case: str, classes: int = 0) -> list[BayesianNetwork]:
    """Double precision networks with different starts and different priors."""
    posterior, sizes = CASES[case]
    made = []
    for index in range(NETWORKS):
        torch.manual_seed(index)
        activation = torch.nn.Tanh if "tanh" in case else torch.nn.ReLU
        net = mlp([*sizes[:-1], classes or sizes[-1]], activation).double()
        likelihood = Categorical() if classes else Gaussian(noise=0.3)
        choice = {"*.weight": posterior()} if "points" in case else posterior()
        made.append(bayesianize(net, choice, likelihood=likelihood, prior=Neal(1.0 + index)))
        for name, parameter in made[-1].named_parameters():
            if name.endswith("lower_value"):  # zeros, at the start
                torch.nn.init.normal_(parameter, std=0.3)
    return made


def data(case: str, classes: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(7)
    x = torch.randn(NETWORKS, ROWS, CASES[case][1][0], generator=generator, dtype=torch.float64)
    if classes:
        return x, torch.randint(classes, (NETWORKS, ROWS), generator=generator)
    return x, x[..., :1].sin() + 0.1 * torch.randn(NETWORKS, ROWS, 1, generator=generator, dtype=torch.float64)


class Given:
    """Stands in for the sources of noise that a posterior asks, and gives it one prepared row, piece by piece."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.rest = torch.empty(0)
        monkeypatch.setattr(DrawRequest, "normals", self.normals)
        monkeypatch.setattr(NoiseSource, "uniform", self.uniform)

    def take(self, count: int) -> Tensor:
        taken, self.rest = self.rest[:count], self.rest[count:]
        return taken

    def normals(self, sizes: list[int], like: Tensor, tile: int = 1) -> list[Tensor]:
        return [self.take(size).view(1, size) for size in sizes]

    def uniform(self, count: int, device: Any) -> Tensor:
        return self.take(count)


def noise_for(stack: Stack, steps: int) -> Tensor:
    generator = torch.Generator().manual_seed(3)
    kind = torch.rand if stack.uniform else torch.randn
    return kind(steps, len(stack), stack.noise_size, generator=generator, dtype=torch.float64)


@pytest.mark.parametrize("classes", [0, 4])
@pytest.mark.parametrize("case", CASES)
def test_the_bound_is_the_sum_of_the_networks_bounds(case: str, classes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    networks = make(case, classes)
    stack, (x, y) = Stack(networks), data(case, classes)
    noise = noise_for(stack, 1)[0]
    given, total = Given(monkeypatch), 0.0
    for index, network in enumerate(networks):
        given.rest = noise[index]
        total += network.elbo(x[index], y[index], num_data=100).item()
        assert given.rest.numel() == 0
    assert stack.bound(x, y, noise, 100).item() == pytest.approx(total, rel=1e-10)


@pytest.mark.parametrize("case", CASES)
def test_training_side_by_side_is_training_apart(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Twelve steps, the noise variance learned after five; `torch.optim.Adam` for the networks apart."""
    steps, recipe = 12, Recipe(fixed_noise_steps=5, steps=7, batch=BATCH, learning_rate=0.01, decay=0.1, power=0.5)
    stack, (x, y) = Stack(make(case)), data(case)
    trainer = Trainer(stack, x, y, recipe)
    rows = torch.randint(ROWS, (steps, NETWORKS, BATCH), generator=torch.Generator().manual_seed(1))
    noise = noise_for(stack, steps)
    for step in range(steps):
        trainer.update((rows[step] + torch.arange(NETWORKS).unsqueeze(-1) * ROWS).flatten(), noise[step])
    together = stack.hand_back()

    given = Given(monkeypatch)
    for index, network in enumerate(make(case)):
        assert isinstance(network.likelihood, Gaussian)
        optimizer = torch.optim.Adam(network.parameters())
        for step in range(steps):
            given.rest = noise[step, index]
            optimizer.zero_grad()
            chosen = rows[step, index]
            (-network.elbo(x[index, chosen], y[index, chosen], num_data=ROWS)).backward()
            if step < recipe.fixed_noise_steps:
                network.likelihood.raw_noise.grad = None
            for group in optimizer.param_groups:
                group["lr"] = recipe.rate(step)
            optimizer.step()
        apart = dict(network.named_parameters())
        for name, value in together[index].named_parameters():
            torch.testing.assert_close(value, apart[name], rtol=1e-6, atol=1e-8, msg=f"{case}: {name}")


def test_the_rate_falls_as_the_paper_says() -> None:
    recipe = Recipe()
    assert recipe.total == 50_500
    assert recipe.rate(0) == 1e-3
    assert recipe.rate(50_000) == pytest.approx(1e-3 * 26**-0.3)


def test_an_interrupted_training_goes_on_to_the_same_result(tmp_path: Path) -> None:
    recipe = Recipe(fixed_noise_steps=50, steps=3 * CHUNK, batch=BATCH)
    x, y = data("walsh_hadamard")
    whole, first, second = (Trainer(Stack(make("walsh_hadamard")), x, y, recipe, seed=5) for _ in range(3))
    train(whole)
    first.run(2 * CHUNK)
    first.save(tmp_path / "checkpoint.pt", 1.0)
    seen: list[int] = []
    seconds = train(second, tmp_path / "checkpoint.pt", every=CHUNK, report=lambda step, _: seen.append(step))
    assert seconds > 1
    assert seen == [3 * CHUNK, 350]
    for one, other in zip(whole.stack.networks, second.stack.networks, strict=True):
        for value, expected in zip(other.parameters(), one.parameters(), strict=True):
            assert torch.equal(value, expected)
    other_recipe = Trainer(Stack(make("walsh_hadamard")), x, y, Recipe(steps=7), seed=5)
    with pytest.raises(ValueError, match="another recipe"):
        other_recipe.load(tmp_path / "checkpoint.pt")


def test_every_example_is_seen_once_before_any_is_seen_twice() -> None:
    x, y = data("walsh_hadamard")
    trainer = Trainer(Stack(make("walsh_hadamard")), x, y, Recipe(batch=BATCH))
    seen = trainer._rows(ROWS).view(ROWS, NETWORKS, BATCH).transpose(0, 1).reshape(NETWORKS, BATCH, ROWS)
    for network, epochs in enumerate(seen):
        for epoch in epochs:
            assert sorted(epoch.tolist()) == list(range(network * ROWS, (network + 1) * ROWS))


def test_what_cannot_be_stacked_says_so() -> None:
    with pytest.raises(ValueError, match="at least one"):
        Stack([])
    with pytest.raises(ValueError, match="FullCovariance is not stacked"):
        Stack([bayesianize(mlp([2, 3, 1]), FullCovariance(), likelihood=Gaussian())])
    with pytest.raises(ValueError, match="Gaussian with one variance"):
        Stack([bayesianize(mlp([2, 3, 2]), WalshHadamard(), likelihood=HeteroscedasticGaussian())])
    with pytest.raises(ValueError, match="different shapes"):
        Stack([bayesianize(mlp([2, h, 1]), WalshHadamard(), likelihood=Gaussian()) for h in (3, 9)])
    kernel = bayesianize(torch.nn.Sequential(torch.nn.Conv2d(1, 1, 1)), WalshHadamard(), likelihood=Gaussian())
    with pytest.raises(ValueError, match="no perceptron"):
        Stack([kernel])
    with pytest.raises(ValueError, match="at least one step"):
        Recipe(steps=0, fixed_noise_steps=0)
    with pytest.raises(ValueError, match="learning_rate=0"):
        Recipe(learning_rate=0)
