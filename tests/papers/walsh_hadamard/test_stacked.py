"""Training of all splits at once: Adam on the bound, and the same state after an interruption."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from bayesify_papers.walsh_hadamard.stacked_training import Recipe, train
from torch import Tensor

from bayesify.conversion import bayesianize
from bayesify.likelihoods import Gaussian
from bayesify.models import mlp
from bayesify.network import BayesianNetwork
from bayesify.posteriors import Dropout, WalshHadamard
from bayesify.posteriors.common.base import Posterior
from bayesify.priors import Neal
from bayesify.training import ModelStack, StackedBatch, StackedBatches
from bayesify.training.random_streams import derive_seed

NETWORKS, ROWS, BATCH = 3, 23, 8

CASES: dict[str, tuple[Callable[[], Posterior], list[int]]] = {
    "walsh_hadamard": (lambda: WalshHadamard(init_std=0.1), [5, 12, 1]),
    "full, biases as points": (lambda: WalshHadamard("full", init_std=0.1), [5, 12, 6, 1]),
    "dropout": (lambda: Dropout(0.2), [5, 12, 7, 1]),
}


def make(case: str) -> list[BayesianNetwork]:
    """Double precision networks with different starts and different priors."""
    posterior, sizes = CASES[case]
    made = []
    for index in range(NETWORKS):
        torch.manual_seed(index)
        choice = {"*.weight": posterior()} if "points" in case else posterior()
        made.append(bayesianize(mlp(sizes).double(), choice, likelihood=Gaussian(noise=0.3), prior=Neal(1.0 + index)))
        for name, parameter in made[-1].named_parameters():
            if name.endswith("lower_value"):  # zeros, at the start
                torch.nn.init.normal_(parameter, std=0.3)
    return made


def data(case: str) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(7)
    x = torch.randn(NETWORKS, ROWS, CASES[case][1][0], generator=generator, dtype=torch.float64)
    return x, x[..., :1].sin() + 0.1 * torch.randn(NETWORKS, ROWS, 1, generator=generator, dtype=torch.float64)


@pytest.mark.parametrize("case", CASES)
def test_training_is_adam_on_the_bound_of_all_examples(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Twelve steps, the noise variance learned after five at half the rate, against a loop over the same batches."""
    recipe = Recipe(5, 7, batch=BATCH, learning_rate=0.01, decay=0.1, power=0.5, noise_rate=0.5)
    seen: list[StackedBatch] = []
    batches = StackedBatches.__iter__
    monkeypatch.setattr(StackedBatches, "__iter__", lambda self: (seen.append(one) or one for one in batches(self)))
    networks = make(case)
    train(ModelStack(networks), *data(case), recipe, seed=2, every=6)

    stack = ModelStack(make(case))
    noise = stack.stacked("likelihood.raw_noise")
    weights = [value for value in stack.parameters() if value is not noise]
    optimizer = torch.optim.Adam([{"params": weights}, {"params": [noise]}])
    generator = torch.Generator().manual_seed(derive_seed(2, "draws", 0))
    assert len(seen) == recipe.total
    for step, batch in enumerate(seen):
        optimizer.zero_grad()
        log_likelihood, kl = stack.terms(batch, num_data=ROWS, generator=generator)
        (kl - log_likelihood).sum().backward()
        if step < recipe.fixed_noise_steps:
            noise.grad = None
        for group, factor in zip(optimizer.param_groups, (1.0, 0.5), strict=True):
            group["lr"] = factor * recipe.learning_rate * recipe.factor(step)
        optimizer.step()
    for trained, expected in zip(networks, stack.unstack(), strict=True):
        for (name, value), other in zip(trained.named_parameters(), expected.parameters(), strict=True):
            torch.testing.assert_close(value, other, rtol=1e-6, atol=1e-8, msg=f"{case}: {name}")


def test_the_rate_falls_as_the_paper_says() -> None:
    recipe = Recipe()
    assert recipe.total == 50_500
    assert recipe.factor(0) == 1
    assert recipe.factor(50_000) == pytest.approx(26**-0.3)


@pytest.mark.slow
def test_an_interrupted_training_goes_on_to_the_same_result(tmp_path: Path) -> None:
    recipe = Recipe(fixed_noise_steps=25, steps=35, batch=BATCH)
    x, y = data("walsh_hadamard")
    whole, broken = make("walsh_hadamard"), make("walsh_hadamard")
    train(ModelStack(whole), x, y, recipe, seed=5, every=20)

    def stop(step: int, seconds: float) -> None:
        if step == 40:
            raise RuntimeError("power cut")

    path, seen = tmp_path / "run.safetensors", []
    with pytest.raises(RuntimeError, match="power cut"):
        train(ModelStack(broken), x, y, recipe, path, seed=5, every=20, report=stop)
    train(ModelStack(broken), x, y, recipe, path, seed=5, every=20, report=lambda step, _: seen.append(step))
    assert seen == [40, 45, 50, 55, 60]  # the greatest common divisor of 25, 60 and `every`
    for one, other in zip(whole, broken, strict=True):
        for value, expected in zip(other.parameters(), one.parameters(), strict=True):
            assert torch.equal(value, expected)
    with pytest.raises(ValueError, match=r"recipe\.power"):
        train(ModelStack(make("walsh_hadamard")), x, y, Recipe(25, 35, BATCH, power=1.0), path, seed=5, every=20)


def test_a_recipe_without_steps_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one step"):
        Recipe(steps=0, fixed_noise_steps=0)
    with pytest.raises(ValueError, match="learning_rate=0"):
        Recipe(learning_rate=0)
