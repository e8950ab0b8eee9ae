"""Every class that trains, through one protocol: facts, the two terms of its objective, one step of `fit`, clipped gradients."""

import abc
import importlib
import math
import pkgutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import bayesify
from bayesify import baselines, deep_gp, likelihoods, posteriors, priors, random_features
from bayesify.baselines import swag
from bayesify.predictor import Batch, Phase, Trainable
from bayesify.storage.tensor_files import pack
from bayesify.training import fit
from bayesify.training.batches import StackedBatch
from bayesify.training.random_streams import derive_seed
from bayesify.training.stack import ModelStack

B, N, NOISE, DRAWS = 6, 30, 0.1, 3
MEMBERS = {"terms", "training_draws", "config", "module", "phases", "check_ready", "clip_gradients"}
MEMBERS |= {"keeps_mode", "noise_per_example", "num_models"}
"""What the contract asks for."""
SEEDS = [5, 6]


def rows(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def net(start: int = 0) -> nn.Sequential:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(start)
        return nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 1)).double()


def gaussian() -> likelihoods.Gaussian:
    return likelihoods.Gaussian(NOISE)


def network(posterior: Any = "mean_field", start: int = 0, ready: bool = True) -> bayesify.BayesianNetwork:
    return bayesify.bayesianize(net(start), posterior, likelihood=gaussian() if ready else None)


def local() -> posteriors.Posterior:
    return posteriors.MeanField(local_reparameterization=True)


def function_space(ready: bool = True) -> bayesify.FunctionSpaceVI:
    return bayesify.FunctionSpaceVI(network(ready=ready), context=bayesify.Box(-torch.ones(2), torch.ones(2), 4))


def stack(kind: Any = "mean_field", seeds: list[int] | None = SEEDS, ready: bool = True) -> ModelStack:
    return ModelStack([network(kind, start, ready) for start in range(2)], seeds=seeds)


def iterating() -> Trainable:
    return swag._Iterating(baselines.SWAG(net(), gaussian(), rank=2))


def points() -> ModelStack:
    return stack(posteriors.Point())


def members() -> ModelStack:
    made = [bayesify.bayesianize(net(start), posteriors.Point(), prior=priors.Neal(2.0)) for start in range(2)]
    return ModelStack(made, likelihoods=[gaussian().double()])


# -- the objective of each, by another way than `terms` ---------------------------------------------------------------


def log_likelihood(outputs: Tensor, batch: Batch) -> Tensor:
    """Of the whole data, from a batch [..., B, 1]."""
    density = -0.5 * ((batch.y - outputs).square() / NOISE + math.log(2 * math.pi * NOISE))
    return N / B * (density.squeeze(-1) * (1.0 if batch.weights is None else batch.weights)).sum(-1)


def of_network(model: Any, batch: Batch, phase: Phase, options: dict[str, Any]) -> Tensor:
    common = {"num_data": N, "example_weights": batch.weights}
    if phase == "map":
        return model.map_objective(batch.x, batch.y, **common)
    return model.elbo(batch.x, batch.y, **common, **options)


def of_function_space(model: Any, batch: Batch, phase: Phase, options: dict[str, Any]) -> Tensor:
    if phase == "map":
        return of_network(model.bnn, batch, phase, options)
    return model.objective(batch.x, batch.y, num_data=N, example_weights=batch.weights, **options)


def of_process(model: Any, batch: Batch, phase: Phase, options: dict[str, Any]) -> Tensor:
    moments = model.function_moments(batch.x)
    return (
        log_likelihood(moments[0], batch) - 0.5 * N / B / NOISE * (moments[1][:, 0] * weight(batch)).sum() - model.kl()
    )


def weight(batch: Batch) -> Tensor | float:
    return 1.0 if batch.weights is None else batch.weights


def of_stack(model: Any, batch: Any, phase: Phase, options: dict[str, Any]) -> Tensor:
    """Each model alone with its own random numbers, [R]."""
    found = []
    for index, (own, seed) in enumerate(zip(model.unstack(), SEEDS, strict=True)):
        generator = torch.Generator().manual_seed(seed)
        found.append(of_network(own, batch.model(index), phase, {**options, "generator": generator}))
    return torch.stack(found)


def of_members(model: Any, batch: Any, phase: Phase, options: dict[str, Any]) -> Tensor:
    """Log-likelihood and log-prior of the networks that were given, [R]."""
    found = []
    for index in range(2):
        own, part = net(index), batch.model(index)
        prior = sum(
            torch.distributions.Normal(0.0, 2.0 / layer.in_features**0.5).log_prob(p).sum()
            for layer in (own[0], own[2])
            for p in layer.parameters()
        )
        found.append(log_likelihood(own(part.x), part) + prior)
    return torch.stack(found)


def of_iterates(model: Any, batch: Batch, phase: Phase, options: dict[str, Any]) -> Tensor:
    return log_likelihood(model.swag.network(batch.x), batch)


@dataclass(frozen=True)
class Case:
    """A trainable, its objective computed in another way, and what it says of itself."""

    kind: type[Trainable]
    make: Callable[[], Trainable]
    objective: Callable[[Any, Any, Phase, dict[str, Any]], Tensor]
    draws: int = 1
    phases: tuple[Phase, ...] = ("variational",)
    models: bool = False
    keeps_mode: bool = False
    noise_per_example: bool = False
    without_likelihood: Callable[[], Trainable] | None = None


BOTH: tuple[Phase, ...] = ("map", "variational")
NETWORK = bayesify.BayesianNetwork
CASES = {
    "BayesianNetwork": Case(NETWORK, network, of_network, 1, BOTH, without_likelihood=lambda: network(ready=False)),
    "Ensemble": Case(NETWORK, lambda: network(posteriors.Ensemble(3)), of_network, 3, BOTH),
    "local noise": Case(NETWORK, lambda: network(local()), of_network, 1, BOTH, noise_per_example=True),
    "RandomFeatureGP": Case(
        random_features.RandomFeatureGP, lambda: random_features.RandomFeatureGP(2, 16).double(), of_network, 1, BOTH
    ),
    "DeepGP": Case(
        deep_gp.DeepGP,
        lambda: deep_gp.DeepGP(rows(8, 2), rows(8, 1), num_inducing=5).double(),
        of_network,
        4,
        noise_per_example=True,
    ),
    "FunctionSpaceVI": Case(
        bayesify.FunctionSpaceVI,
        function_space,
        of_function_space,
        1,
        BOTH,
        keeps_mode=True,
        without_likelihood=lambda: function_space(ready=False),
    ),
    "InducingPointGP": Case(
        random_features.InducingPointGP, lambda: random_features.InducingPointGP(rows(5, 2), noise=NOISE), of_process
    ),
    "ModelStack": Case(
        ModelStack, stack, of_stack, 1, BOTH, models=True, without_likelihood=lambda: stack(ready=False)
    ),
    "ModelStack of ensembles": Case(ModelStack, lambda: stack(posteriors.Ensemble(3)), of_stack, 3, BOTH, models=True),
    "ModelStack, local noise": Case(
        ModelStack, lambda: stack(local()), of_stack, 1, BOTH, models=True, noise_per_example=True
    ),
    "ModelStack of points": Case(ModelStack, points, of_stack, 1, BOTH, models=True),
    "ModelStack, shared likelihood": Case(ModelStack, members, of_members, 1, BOTH, models=True),
    "SWAG": Case(swag._Iterating, iterating, of_iterates),
}


def make(case: Case) -> Any:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        return case.make()


def batch_of(case: Case, factor: float | None = None) -> Batch:
    shape = (2, B) if case.models else (B,)
    weights = None if factor is None else torch.full(shape, factor, dtype=torch.float64)
    return (StackedBatch if case.models else Batch)(rows(*shape, 2), rows(*shape, 1, seed=1), weights)


def options_of(seed: int = 0) -> dict[str, Any]:
    return {"num_draws": DRAWS, "generator": torch.Generator().manual_seed(seed)}


def check_facts(case: Case) -> None:
    model = make(case)
    assert isinstance(model, Trainable)
    assert isinstance(model.module, nn.Module)
    assert any(parameter.requires_grad for parameter in model.module.parameters())
    assert (model.training_draws, model.phases) == (case.draws, case.phases)
    assert (model.keeps_mode, model.noise_per_example) == (case.keeps_mode, case.noise_per_example)
    assert model.num_models == (2 if isinstance(model, ModelStack) and not hasattr(model, "likelihoods") else None)
    pack(model.config())  # plain data and tensors, or an error that names the place
    model.check_ready()
    if case.without_likelihood is not None:
        with pytest.raises(ValueError, match="no likelihood"):
            case.without_likelihood().check_ready()


def check_terms(case: Case) -> None:
    """The first minus the second is the objective; the first is that of the whole data, and counts examples by their weights."""
    for phase in case.phases:
        for factor in (None, 0.5):
            batch = batch_of(case, factor)
            data, penalty = make(case).terms(batch, phase=phase, num_data=N, **options_of())
            for term in (data, penalty):
                assert term.shape[:-1] == ((2,) if case.models else ())
                assert term.shape[-1] in (1, DRAWS)
            expected = case.objective(make(case), batch, phase, options_of())
            torch.testing.assert_close((data - penalty).mean(-1), expected)
        doubled, same = make(case).terms(batch_of(case), phase=phase, num_data=2 * N, **options_of())
        torch.testing.assert_close(doubled, 4 * data)  # twice the data, twice the weights
        torch.testing.assert_close(same, penalty)


def check_a_step_of_fit(case: Case) -> None:
    """Gradient descent by `fit` goes along the gradient of the terms, with the phase and the number of draws of the model."""
    for phase in case.phases:
        model, alone = make(case), make(case)
        epochs = {"epochs": int(phase == "variational"), "map_epochs": int(phase == "map")}
        chosen: Any = {**epochs, "num_data": N, "seed": 7, "progress": False}
        alone.module.train(alone.module.training if case.keeps_mode else True)
        fit(model, [batch_of(case)], optimizer=lambda values: torch.optim.SGD(values, 0.1), **chosen)
        generator = torch.Generator().manual_seed(derive_seed(7, "draws", 0))
        options = {"num_data": N, "num_draws": case.draws, "generator": generator}
        data, penalty = alone.terms(batch_of(case), phase=phase, **options)
        ((penalty.mean(-1) - data.mean(-1)) / N).sum().backward()
        moved = False
        for name, value in alone.module.named_parameters():
            step = 0.0 if value.grad is None else 0.1 * value.grad
            torch.testing.assert_close(model.module.get_parameter(name).detach(), (value - step).detach())
            moved = moved or (value.grad is not None and bool(value.grad.any()))
        assert moved


def check_clipped_gradients(case: Case) -> None:
    """The gradient is as long as allowed, that of every model of a stack for itself, and points where it pointed."""
    model = make(case)
    found = [parameter for parameter in model.module.parameters() if parameter.requires_grad]
    for parameter in found:
        parameter.grad = rows(*parameter.shape, seed=parameter.numel())
    before = torch.cat([parameter.grad.flatten() for parameter in found])  # type: ignore[union-attr]
    model.clip_gradients(0.01, before.norm())
    after = torch.cat([parameter.grad.flatten() for parameter in found])  # type: ignore[union-attr]
    if model.num_models is not None:
        for index in range(2):
            own = torch.cat([parameter.grad[index].flatten() for parameter in found])  # type: ignore[index]
            torch.testing.assert_close(own.norm(), torch.tensor(0.01, dtype=own.dtype), rtol=1e-3, atol=0.0)
    else:
        torch.testing.assert_close(after, 0.01 * before / before.norm(), rtol=1e-3, atol=1e-9)


CHECKS = (check_facts, check_terms, check_a_step_of_fit, check_clipped_gradients)


@pytest.fixture(params=CASES)
def case(request: pytest.FixtureRequest) -> Case:
    if request.param == "InducingPointGP" and find_spec("gpytorch") is None:
        pytest.skip("gpytorch is not installed")
    return CASES[request.param]


@pytest.mark.parametrize("check", CHECKS)
def test_the_contract(case: Case, check: Callable[[Case], None]) -> None:
    check(case)


def subclasses(kind: type) -> Iterator[type]:
    for found in kind.__subclasses__():
        yield found
        yield from subclasses(found)


def test_every_trainable_is_here() -> None:
    """A class that trains, of the package or of the papers, and is not in the list above is found."""
    for name in ("bayesify", "bayesify_papers"):
        package = importlib.import_module(name)
        for info in pkgutil.walk_packages(package.__path__, f"{name}."):
            try:
                importlib.import_module(info.name)
            except ImportError:
                continue  # an optional dependency
    found = {kind for kind in subclasses(Trainable) if kind.__module__.startswith("bayesify")}
    assert found == {case.kind for case in CASES.values()}
    assert {name for name in vars(Trainable) if not name.startswith("_")} == MEMBERS | {"remedy"}


def defined() -> Iterator[tuple[type[Trainable], str]]:
    """What each class defines of the contract, except in place of another trainable's, which would do."""
    for kind in dict.fromkeys(case.kind for case in CASES.values()):
        others = [vars(base) for base in kind.__mro__[1:] if issubclass(base, Trainable) and base is not Trainable]
        for member in sorted(MEMBERS & vars(kind).keys()):
            if not any(member in other for other in others):
                yield kind, member


@pytest.mark.parametrize(
    ("kind", "member"), [pytest.param(*pair, id=f"{pair[0].__name__}.{pair[1]}") for pair in defined()]
)
def test_removing_a_method_breaks_the_contract(kind: Any, member: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def check_all() -> None:
        for case in CASES.values():
            for check in CHECKS if case.kind is kind else ():
                check(case)

    monkeypatch.delattr(kind, member)
    abc.update_abstractmethods(kind)
    try:
        with pytest.raises((AssertionError, TypeError, ValueError, pytest.fail.Exception)):
            check_all()
    finally:
        monkeypatch.undo()
        abc.update_abstractmethods(kind)
