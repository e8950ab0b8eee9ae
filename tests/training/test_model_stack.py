"""Models of a stack train exactly as each of them alone with the same random numbers."""

import copy
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from torch import Tensor, nn

from bayesify import bayesianize, posteriors, priors
from bayesify.deep_gp import DeepGP
from bayesify.likelihoods import Categorical, Gaussian, HeteroscedasticGaussian, Likelihood
from bayesify.network import BayesianNetwork
from bayesify.predictor import Batch, Phase
from bayesify.sklearn.networks import SiLUReLU
from bayesify.training import fit
from bayesify.training.arguments import Steps
from bayesify.training.batches import StackedBatch, StackedBatches
from bayesify.training.stack import ModelStack

MODELS, ROWS, INPUTS, STEPS = 3, 12, 3, 4


def inducing_inputs() -> Tensor:
    return torch.randn(7, INPUTS, dtype=torch.float64)


FAMILIES: dict[str, tuple[Callable[[], posteriors.Posterior], int]] = {
    "point": (posteriors.Point, 1),
    "mean_field": (lambda: posteriors.MeanField(init_std=0.05), 1),
    "mean_field, draws": (lambda: posteriors.MeanField(init_std=0.05), 3),
    "mean_field, cap": (lambda: posteriors.MeanField(init_std=0.05, max_std=0.3), 1),
    "mean_field, local": (lambda: posteriors.MeanField(init_std=0.05, local_reparameterization=True), 2),
    "k_tied": (lambda: posteriors.KTied(init_std=0.05), 2),
    "rank_one": (posteriors.RankOne, 4),
    "matrix_normal": (lambda: posteriors.MatrixNormal(init_std=0.05), 1),
    "full_covariance": (lambda: posteriors.FullCovariance(init_std=0.05), 2),
    "inducing": (lambda: posteriors.InducingWeights(4, 3), 2),
    "inducing, matrix": (lambda: posteriors.InducingWeights(4, 3, q="matrix", whiten=False), 1),
    "inducing, full": (lambda: posteriors.InducingWeights(2, 3, q="full", function_space_kl=True), 1),
    "inducing, ensemble": (lambda: posteriors.InducingWeights(4, 3, q="ensemble"), 2),
    "global_inducing": (lambda: posteriors.GlobalInducing(inducing_inputs()), 1),
    "global_inducing, draws": (lambda: posteriors.GlobalInducing(inducing_inputs(), covariance="full"), 2),
    "local_inducing": (lambda: posteriors.LocalInducing(6), 2),
    "walsh_hadamard": (lambda: posteriors.WalshHadamard(init_std=0.05), 1),
    "walsh_hadamard, full": (lambda: posteriors.WalshHadamard(covariance="full", init_std=0.05), 2),
    "walsh_hadamard, flow": (lambda: posteriors.WalshHadamard(covariance="flow", init_std=0.05), 1),
    "walsh_hadamard, local": (lambda: posteriors.WalshHadamard(init_std=0.05, local_reparameterization=True), 1),
    "dropout": (lambda: posteriors.Dropout(0.2), 2),
    "ensemble": (lambda: posteriors.Ensemble(3), 3),
}


def make_models(
    posterior: Callable[[], posteriors.Posterior],
    dtype: torch.dtype = torch.float64,
    prior: Callable[[int], priors.Prior] = lambda index: priors.Neal(1.0 + index),
    net: Callable[[], nn.Module] = lambda: nn.Sequential(nn.Linear(INPUTS, 5), nn.Tanh(), nn.Linear(5, 2)),
) -> list[BayesianNetwork]:
    """Models with different starts, priors and noise."""
    made = []
    for index in range(MODELS):
        torch.manual_seed(index)
        made.append(
            bayesianize(net().to(dtype), posterior(), likelihood=Gaussian(noise=0.1 * (index + 1)), prior=prior(index))
        )
    return made


def make_batches(dtype: torch.dtype, shape: tuple[int, ...] = (INPUTS,)) -> list[StackedBatch]:
    generator = torch.Generator().manual_seed(9)
    x = torch.randn(STEPS, MODELS, ROWS, *shape, generator=generator, dtype=torch.float64).to(dtype)
    y = torch.randn(STEPS, MODELS, ROWS, 2, generator=generator, dtype=torch.float64).to(dtype)
    return [StackedBatch(*pair) for pair in zip(x, y, strict=True)]


def train_stack(stack: ModelStack, batches: list[StackedBatch], num_draws: int) -> None:
    optimizer = torch.optim.Adam(stack.parameters(), lr=0.01)
    for batch in batches:
        optimizer.zero_grad()
        data, kl = stack.terms(batch, num_data=40, num_draws=num_draws)
        assert data.shape == kl.shape == (MODELS, num_draws)
        (kl - data).mean(-1).sum().div(40).backward()
        optimizer.step()


def train_alone(model: nn.Module, batches: list[Batch], num_draws: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for batch in batches:
        optimizer.zero_grad()
        (-model.elbo(batch.x, batch.y, num_data=40, num_draws=num_draws, generator=generator) / 40).backward()  # type: ignore[operator]
        optimizer.step()


def check_equal(
    models: list[nn.Module],
    batches: list[StackedBatch],
    num_draws: int = 1,
    tolerance: float = 1e-10,
    vectorize: bool = True,
) -> ModelStack:
    """Train a stack and copies of its models apart, and compare every parameter and buffer."""
    alone = [copy.deepcopy(model) for model in models]
    stack = ModelStack(models, seeds=range(50, 50 + len(models)), vectorize=vectorize)
    train_stack(stack, batches, num_draws)
    back = stack.unstack()
    assert all(given is mine for given, mine in zip(models, back, strict=True))
    for index, (mine, plain) in enumerate(zip(back, alone, strict=True)):
        train_alone(plain, [batch.model(index) for batch in batches], num_draws, 50 + index)
        expected = plain.state_dict()
        for name, value in mine.state_dict().items():
            torch.testing.assert_close(
                value, expected[name], rtol=tolerance, atol=tolerance, msg=lambda text, name=name: f"{name}: {text}"
            )
    return stack


@pytest.mark.thin(2)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_stack_trains_each_model_as_alone(family: str) -> None:
    """Different starts, priors, noise, rows and seeds; four steps of Adam."""
    posterior, num_draws = FAMILIES[family]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        stack = check_equal(make_models(posterior), make_batches(torch.float64), num_draws)
    assert stack.loop_reason is None


@pytest.mark.thin(2)
@pytest.mark.parametrize("family", FAMILIES)
def test_terms_and_gradients_in_single_precision(family: str) -> None:
    """1e-5 of the terms, and of each parameter's largest gradient 1e-4: sums of float32 in another order, factorized."""
    posterior, num_draws = FAMILIES[family]
    models, batch = make_models(posterior, torch.float32), make_batches(torch.float32)[0]
    stack = ModelStack(models, seeds=range(MODELS))
    found = stack.terms(batch, num_data=40, num_draws=num_draws)
    (found[0] - found[1]).sum().backward()
    for index, model in enumerate(models):
        own, generator = batch.model(index), torch.Generator().manual_seed(index)
        expected = model.elbo_terms(own.x, own.y, num_data=40, num_draws=num_draws, generator=generator)
        for mine, plain in zip(found, expected, strict=True):
            torch.testing.assert_close(mine[index], plain, rtol=1e-5, atol=1e-5)
        (expected[0] - expected[1]).sum().backward()
        for name, parameter in model.named_parameters():
            assert parameter.grad is not None
            mine = stack.stacked(name).grad[index]  # type: ignore[index]
            largest = float(parameter.grad.abs().max())
            torch.testing.assert_close(mine, parameter.grad, rtol=1e-4, atol=1e-4 * largest + 1e-6)


@pytest.mark.thin(2)
@pytest.mark.parametrize(
    ("family", "prior"),
    [
        pytest.param(family, prior, marks=[pytest.mark.slow] if "," in family or repeats else [])
        for family in FAMILIES
        for prior, repeats in ((priors.Scale, False), (priors.Neal, family != "mean_field"))
    ],
)
def test_priors_that_learn_and_priors_that_are_alike(family: str, prior: type[priors.Prior]) -> None:
    """Neal's that differ are in every test above."""
    posterior, num_draws = FAMILIES[family]
    models = make_models(posterior, prior=lambda index: prior())
    assert check_equal(models, make_batches(torch.float64), num_draws).loop_reason is None


@pytest.mark.parametrize("likelihood", [Categorical(), HeteroscedasticGaussian(), Gaussian([0.1, 0.2], learn=False)])
def test_other_likelihoods(likelihood: Likelihood) -> None:
    models = make_models(FAMILIES["mean_field"][0])
    for model in models:
        model.likelihood = copy.deepcopy(likelihood).double()
    batches = make_batches(torch.float64)
    if isinstance(likelihood, Categorical):
        batches = [StackedBatch(batch.x, (batch.y[..., 0] > 0).long()) for batch in batches]
    elif isinstance(likelihood, HeteroscedasticGaussian):
        batches = [StackedBatch(batch.x, batch.y[..., :1]) for batch in batches]
    assert check_equal(models, batches).loop_reason is None


@pytest.mark.parametrize("inducing", ["global", "local"])
def test_deep_gaussian_processes(inducing: Literal["global", "local"]) -> None:
    batches = make_batches(torch.float64)
    models = [
        DeepGP(batches[0].x[index], batches[0].y[index], depth=2, num_inducing=5, inducing=inducing, seed=index)
        for index in range(MODELS)
    ]
    assert check_equal(models, batches, 2).loop_reason is None


def test_clipping_is_by_model() -> None:
    """The second model's gradient is far above the limit, the others' below."""
    models, batches = make_models(posteriors.Point), make_batches(torch.float64)
    for batch in batches:
        batch.y[1] *= 30
    alone = copy.deepcopy(models)
    options: dict[str, Any] = {
        "epochs": 1,
        "num_data": ROWS * STEPS,
        "learning_rate": 0.01,
        "seed": 3,
        "progress": False,
    }
    steps = Steps(clip_norm=15.0)
    stack = ModelStack(models)
    fit(stack, batches, steps=steps, **options)
    stack.unstack()
    for index, plain in enumerate(alone):
        fit(plain, [batch.model(index) for batch in batches], steps=steps, **options)
        for name, value in plain.state_dict().items():
            torch.testing.assert_close(models[index].state_dict()[name], value, rtol=1e-9, atol=1e-9, msg=name)


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rnn, self.out = nn.GRU(INPUTS, 4, batch_first=True), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.rnn(x.unsqueeze(1))[0][:, 0])


class Branching(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(INPUTS, 2)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.out(x)
        return y if y.sum().item() > 0 else -y


class Averaging(nn.Module):
    """Subtracts a running mean of its inputs. It changes the mean in place or assigns a new one."""

    def __init__(self, assigns: bool) -> None:
        super().__init__()
        self.assigns = assigns
        self.register_buffer("mean", torch.zeros(INPUTS))
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        if self.assigns:
            self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
        else:
            self.mean.mul_(0.9).add_(0.1 * x.detach().mean(0))
        return x - self.mean


@pytest.mark.filterwarnings("ignore:.*changes its own attributes")
@pytest.mark.parametrize("family", ["mean_field", "point", "ensemble"])
def test_each_model_has_its_own_buffers(family: str) -> None:
    """A running mean, with one or more draws per step."""
    posterior, num_draws = FAMILIES[family]
    net = lambda: nn.Sequential(Averaging(assigns=False), nn.Linear(INPUTS, 4), nn.Tanh(), nn.Linear(4, 2))  # noqa: E731
    stack = check_equal(make_models(posterior, net=net), make_batches(torch.float64), num_draws)
    assert "change their buffers" in str(stack.loop_reason)


@pytest.mark.parametrize(
    ("net", "reason"),
    [
        (
            lambda: nn.Sequential(Averaging(assigns=True), nn.Linear(INPUTS, 4), nn.Tanh(), nn.Linear(4, 2)),
            "change their buffers",
        ),
        (
            lambda: nn.Sequential(nn.utils.parametrizations.spectral_norm(nn.Linear(INPUTS, 4)), nn.Linear(4, 2)),
            "change their buffers",
        ),
        (lambda: nn.Sequential(nn.Linear(INPUTS, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 2)), "BatchNorm1d"),
        (Recurrent, "GRU"),
        (Branching, "vmap refused"),
    ],
)
@pytest.mark.filterwarnings("ignore:ModelStack. vmap refused")
def test_what_vmap_cannot_run_is_trained_one_by_one(net: Callable[[], nn.Module], reason: str) -> None:
    """Running statistics of BatchNorm among what is compared; the numbers of a refused first attempt are drawn once."""
    stack = check_equal(make_models(FAMILIES["mean_field"][0], net=net), make_batches(torch.float64))
    assert reason in str(stack.loop_reason)


def test_convolutions_run_one_by_one() -> None:
    def net() -> nn.Module:
        return nn.Sequential(nn.Unflatten(1, (1, INPUTS)), nn.Conv1d(1, 2, 2), nn.Flatten(), nn.Linear(4, 2))

    stack = check_equal(make_models(FAMILIES["mean_field"][0], net=net), make_batches(torch.float64))
    assert "Conv1d" in str(stack.loop_reason)


def test_the_loop_gives_the_same() -> None:
    assert check_equal(make_models(FAMILIES["rank_one"][0]), make_batches(torch.float64), 4, vectorize=False)


def test_a_factor_that_fails_is_handled_as_in_the_model_alone() -> None:
    """Where the terms are not finite the models run one by one, which jitters or names what is wrong."""
    models = make_models(FAMILIES["global_inducing"][0])
    with torch.no_grad():
        next(value for name, value in models[1].named_parameters() if "log_precision" in name).fill_(2000.0)
    stack = ModelStack(models, seeds=range(MODELS))
    with pytest.raises(ValueError, match="GlobalInducing: the precision of layer 0"):
        stack.terms(make_batches(torch.float64)[0], num_data=40)


def test_shared_rows_shared_randomness_and_own_numbers_of_data() -> None:
    models, batch = make_models(FAMILIES["mean_field"][0]), make_batches(torch.float64)[0].model(0)
    stack = ModelStack(models, num_data=[20, 40, 60])
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        data, kl = stack.terms(batch, num_data=40, num_draws=2, generator=generator)
    assert data.shape == kl.shape == (MODELS, 2)
    assert not data.requires_grad
    plain = [model.elbo_terms(batch.x, batch.y, num_data=40, num_draws=2)[1] for model in models]
    torch.testing.assert_close(kl, torch.stack(plain))
    again = ModelStack(models).terms(batch, num_data=40, num_draws=2, generator=torch.Generator().manual_seed(1))[0]
    torch.testing.assert_close(data, again * torch.tensor([[0.5], [1.0], [1.5]]))


def test_the_phase_of_the_mean() -> None:
    models, batch = make_models(FAMILIES["inducing"][0]), make_batches(torch.float64)[0]
    data, penalty = ModelStack(models).terms(batch, phase="map", num_data=40, num_draws=1)
    plain = [model.map_terms(batch.x[index], batch.y[index], num_data=40) for index, model in enumerate(models)]
    torch.testing.assert_close(data, torch.stack([one[0] for one in plain]))
    torch.testing.assert_close(penalty, torch.stack([one[1] for one in plain]))


def test_random_numbers_continue_from_a_stored_state() -> None:
    batch = make_batches(torch.float64)[0]
    stack = ModelStack(make_models(FAMILIES["mean_field"][0]), seeds=range(MODELS))
    state = copy.deepcopy(stack.state_dict())
    first = stack.terms(batch, num_data=40)[0]
    second = stack.terms(batch, num_data=40)[0]
    assert not torch.equal(first, second)
    stack.load_state_dict(state)
    assert torch.equal(stack.terms(batch, num_data=40)[0], first)


def test_models_that_cannot_be_stacked() -> None:
    mean_field, point = make_models(FAMILIES["mean_field"][0]), make_models(posteriors.Point)
    with pytest.raises(ValueError, match="no models"):
        ModelStack([])
    with pytest.raises(ValueError, match="model 1 differs from model 0 in architecture, posterior or likelihood"):
        ModelStack([mean_field[0], point[1]])
    wide = make_models(posteriors.Point, net=lambda: nn.Sequential(nn.Linear(INPUTS, 6), nn.Tanh(), nn.Linear(6, 2)))
    with pytest.raises(ValueError, match="model 2 differs"):
        ModelStack([*point[:2], wide[2]])
    with pytest.raises(ValueError, match="2 seeds for 3 models"):
        ModelStack(point, seeds=[1, 2])
    point[1].network.requires_grad_(False)
    for parameter in point[1].parameters():
        parameter.requires_grad_(False)
    with pytest.raises(ValueError, match="in model 1 and"):
        ModelStack(point)


def test_a_mistake_in_the_rows_is_named_as_by_a_model() -> None:
    stack = ModelStack(make_models(posteriors.Point))
    with pytest.raises(ValueError, match="do not fit the network"):
        stack.terms(StackedBatch(torch.randn(MODELS, 4, 7), torch.randn(MODELS, 4, 2)), num_data=40)
    assert stack.loop_reason is None


def test_fit_trains_a_stack_and_continues_it(tmp_path: Path) -> None:
    """The same as each model alone by `fit`, with full batches; a run that stops half way and continues is an undisturbed one."""
    models, batches = make_models(posteriors.Point), make_batches(torch.float64)
    alone = [copy.deepcopy(model) for model in models]
    stack = ModelStack(copy.deepcopy(models))
    history = fit(stack, batches, epochs=4, num_data=ROWS * STEPS, learning_rate=0.01, seed=3, progress=False)
    plain = []
    for index, model in enumerate(alone):
        rows = [batch.model(index) for batch in batches]
        plain.append(fit(model, rows, epochs=4, num_data=ROWS * STEPS, learning_rate=0.01, seed=3, progress=False))
    expected = sum(one.column("nll")[-1] for one in plain) / MODELS
    assert history.column("nll")[-1] == pytest.approx(expected, rel=1e-10)
    for mine, plain_model in zip(stack.unstack(), alone, strict=True):
        for name, value in mine.state_dict().items():
            torch.testing.assert_close(value, plain_model.state_dict()[name], rtol=1e-10, atol=1e-10)
    first, second = (ModelStack(make_models(FAMILIES["mean_field"][0]), seeds=range(MODELS)) for _ in range(2))
    options = {"num_data": ROWS * STEPS, "seed": 5, "progress": False, "scheduler": "constant"}
    fit(first, batches, epochs=2, **options)  # type: ignore[arg-type]
    fit(second, batches, epochs=1, checkpoint=tmp_path / "run", **options)  # type: ignore[arg-type]
    fit(second, batches, epochs=2, checkpoint=tmp_path / "run", **options)  # type: ignore[arg-type]
    for name, value in first.state_dict().items():
        assert torch.equal(value, second.state_dict()[name]), name


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("phase", ["variational", "map"])
def test_perceptrons_by_matrices_have_the_numbers_of_vmap(phase: Phase, shared: bool) -> None:
    """Models with priors and noise of their own, rows of their own or the same ones, with example weights."""
    batch = make_batches(torch.float64)[0]
    batch = StackedBatch(batch.x, batch.y, torch.rand(MODELS, ROWS, dtype=torch.float64))
    part = batch.model(0) if shared else batch
    found = []
    for fast in (True, False):
        stack = ModelStack(make_models(posteriors.Point))
        assert stack._perceptrons is not None
        stack._perceptrons = stack._perceptrons if fast else None
        data, kl = stack.terms(part, phase=phase, num_data=40)
        (data - 0.7 * kl).sum().backward()
        assert stack.loop_reason is None
        found.append([data, kl, *(value.grad for value in stack.parameters())])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize(
    "activation", [nn.SiLU, partial(nn.SiLU, inplace=True), partial(nn.ReLU, inplace=True), SiLUReLU]
)
def test_gradients_of_activations_are_those_of_vmap(activation: Callable[[], nn.Module]) -> None:
    """Backward passes written out for one activation, for one that works in place, and for one of the estimators."""

    def net() -> nn.Module:
        layers = [nn.Linear(INPUTS, 5), activation(), nn.Linear(5, 4), activation(), nn.Linear(4, 2), nn.Tanh()]
        return nn.Sequential(nn.Dropout(0.0), nn.Tanh(), *layers)

    batch, found = make_batches(torch.float64)[0], []
    for fast in (True, False):
        stack = ModelStack(make_models(posteriors.Point, net=net))
        assert stack._perceptrons is not None
        stack._perceptrons = stack._perceptrons if fast else None
        data, kl = stack.terms(batch, num_data=40)
        (data - 0.7 * kl).sum().backward()
        found.append([data, kl, *(value.grad for value in stack.parameters())])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("numbers", [1, 2**22])
def test_each_model_sees_all_its_rows_before_any_row_again(monkeypatch: pytest.MonkeyPatch, numbers: int) -> None:
    """Three passes over 6 and 7 rows in batches of 4; gathering one batch at a time gives the same batches."""
    monkeypatch.setattr("bayesify.training.batches.MAX_GATHERED_NUMBERS", numbers)
    used = [torch.arange(6), torch.arange(3, 10)]
    names = torch.arange(10.0).expand(2, 10)
    torch.manual_seed(0)
    batches = list(StackedBatches(names.unsqueeze(-1), names, 4, 5, names, used))
    assert len(batches) == 5
    seen = torch.cat([batch.y for batch in batches], dim=1)
    torch.testing.assert_close(torch.cat([batch.x[..., 0] for batch in batches], dim=1), seen)
    torch.testing.assert_close(torch.cat([batch.weights for batch in batches], dim=1), seen)
    passes = [own[: 2 * len(rows)].view(2, -1) for own, rows in zip(seen, used, strict=True)]
    for own, rows in zip(passes, used, strict=True):
        assert own.sort(1).values.tolist() == [rows.tolist()] * 2
    assert any(not torch.equal(*own) for own in passes)


@pytest.mark.parametrize(
    "last",
    [
        lambda: nn.Softmax(0),  # along the rows of a batch
        lambda: nn.Flatten(0),
        lambda: nn.PReLU(),
        lambda: nn.LayerNorm(5),
    ],
)
def test_other_layers_than_activations_have_no_fast_path(last: Callable[[], nn.Module]) -> None:
    models = make_models(posteriors.Point, net=lambda: nn.Sequential(nn.Linear(INPUTS, 5), last(), nn.Linear(5, 2)))
    assert ModelStack(models)._perceptrons is None


def test_hooks_and_other_posteriors_have_no_fast_path() -> None:
    models = make_models(posteriors.Point)
    models[0].network[0].register_forward_hook(lambda *_: None)
    assert ModelStack(models)._perceptrons is None
    assert ModelStack(make_models(posteriors.MeanField))._perceptrons is None


def test_inputs_of_more_axes_run_by_vmap() -> None:
    stack = ModelStack(make_models(posteriors.Point))
    x, y = torch.randn(MODELS, 4, 3, INPUTS, dtype=torch.float64), torch.randn(MODELS, 4, 3, 2, dtype=torch.float64)
    assert stack.terms(StackedBatch(x, y), num_data=4)[0].shape == (MODELS, 1)
    assert stack.loop_reason is None
