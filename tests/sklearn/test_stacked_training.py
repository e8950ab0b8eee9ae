"""Networks that an estimator trains together are those that it trains one by one, and the start that it gives them."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.base import clone
from torch import nn

from bayesify.likelihoods import Categorical, Gaussian
from bayesify.methods import METHODS, Method
from bayesify.predictive.base import Outputs
from bayesify.predictor import Predictor
from bayesify.sklearn import BayesianClassifier, BayesianRegressor, recipe
from bayesify.sklearn.fitted import predict_scaled
from bayesify.sklearn.networks import NetworkShape
from bayesify.sklearn.recalibration import Recalibration
from bayesify.sklearn.rows import Rows, stacked
from bayesify.sklearn.settings import Settings
from bayesify.sklearn.settling import settle
from bayesify.sklearn.training import Start, out_of_fold, train_methods
from bayesify.training.task import TrainingTask


def make_network(num_inputs: int, hidden: tuple[int, ...], num_outputs: int = 1, seed: int = 0) -> nn.Module:
    return NetworkShape(num_inputs, hidden, "tanh", num_outputs).make(seed)


def make(method: str, alike: bool = False, classes: bool = False) -> list[Start]:
    """Three tables with different rows, priors, noise and seeds, and unless `alike` different numbers of rows, and weights."""
    starts = []
    for index in range(3):
        random = np.random.default_rng(index)
        x = random.normal(size=(20 if alike else 20 + index, 2))
        weights = np.ones(len(x)) if alike else 1.0 + random.random(len(x))
        y = (x[:, 0] > 0).astype(np.int64) if classes else x[:, :1] + 0.1 * random.normal(size=(len(x), 1))
        likelihood = Categorical() if classes else Gaussian(0.1 * (index + 1)).double()
        settings = Settings(METHODS[method], prior_scale=1.0 + index, epochs=3, seed=index)
        starts.append(Start(make_network(2, (5,), 1 + classes, index), likelihood, Rows(x, y, weights), settings))
    return starts


@pytest.mark.thin(2)
@pytest.mark.parametrize(
    ("method", "alike", "tolerance"),
    [
        ("point", False, 1e-5),
        ("mean_field", False, 1e-5),
        ("rank_one", False, 1e-5),
        ("ensemble", False, 1e-5),
        ("global_inducing", False, 1e-12),
        ("mean_field", True, 1e-9),
        ("full_covariance", True, 1e-9),
        ("inducing", True, 1e-9),
        ("global_inducing", True, 1e-9),
        ("walsh_hadamard", True, 1e-9),
        ("laplace", False, 1e-5),
        ("subnetwork", True, 1e-9),
        ("swag", True, 1e-9),
        ("deep_gp", True, 1e-4),
        ("deep_gp", False, 0.0),
        ("vogn", True, 0.0),
    ],
)
def test_together_as_one_by_one(method: str, alike: bool, tolerance: float) -> None:
    """1e-5 where Adam's epsilon of 1e-8 stands beside gradients whose scale differs by the number of rows; global inducing inputs
    of different number are not stacked. 1e-4 for deep Gaussian processes: rows that differ by 1e-15 of
    themselves already change what they learn by 2e-5, since kernel matrices of rows close together are badly conditioned."""
    check_together(method, alike, tolerance)


@pytest.mark.parametrize(("method", "tolerance"), [("laplace", 1e-9), ("swag", 1e-9), ("deep_gp", 1e-4)])
def test_classes_together_as_one_by_one(method: str, tolerance: float) -> None:
    check_together(method, True, tolerance, classes=True)


def check_together(method: str, alike: bool, tolerance: float, classes: bool = False) -> None:
    together = train_methods(make(method, alike, classes))
    for mine, start in zip(together, make(method, alike, classes), strict=True):
        (plain,) = train_methods([start])
        assert getattr(mine, "training", False) == getattr(plain, "training", False)
        found, wanted = (
            model.state_dict() if isinstance(model, nn.Module) else model.state() for model in (mine, plain)
        )
        for name, value in wanted.items():
            if isinstance(value, torch.Tensor):
                torch.testing.assert_close(found[name], value, rtol=tolerance, atol=tolerance, msg=name)


@pytest.mark.thin(2)
@pytest.mark.parametrize("method", ["auto", "laplace", "mean_field", "temperature_scaled"])
def test_estimators_together_as_one_by_one(method: str) -> None:
    """From noise that is settled to recalibrated quantiles. The tolerance is that of the plain networks above."""
    tables = [(curve(40 + index, 0.2).x, curve(40 + index, 0.2).y[:, 0]) for index in range(2)]
    parameters = {"hidden": (5,), "epochs": 4}
    numbers = [BayesianRegressor(method, random_state=seed, **parameters) for seed in (0, 1)]
    for one, (x, y) in zip(BayesianRegressor.fit_several(numbers, tables), tables, strict=True):
        alone = clone(one).fit(x, y)
        np.testing.assert_allclose(one.predict_quantiles(x), alone.predict_quantiles(x), rtol=1e-3, atol=1e-3)
    labels = [(x, y > 0) for x, y in tables]
    classes = [BayesianClassifier(method, random_state=seed, **parameters) for seed in (0, 1)]
    for other, (x, label) in zip(BayesianClassifier.fit_several(classes, labels), labels, strict=True):
        np.testing.assert_allclose(other.predict_proba(x), clone(other).fit(x, label).predict_proba(x), atol=1e-4)


def test_padded_rows_have_no_weight() -> None:
    rows = [start.rows for start in make("point")]
    batch = stacked(rows)
    assert batch.x.shape == (3, 22, 2)
    assert len(batch) == 22
    assert batch.weights is not None
    assert batch.weights[0, 20:].tolist() == [0, 0]
    assert torch.equal(batch.weights[2], torch.from_numpy(rows[2].weights))


def curve(num_rows: int, noise: float) -> Rows:
    """Rows of a curve of variance 1 with noise of a given variance."""
    random = np.random.default_rng(0)
    x = random.uniform(-1.7, 1.7, (num_rows, 2))
    y = x[:, :1] + np.sin(2 * x[:, 1:])
    return Rows(x, y / y.std() + math.sqrt(noise) * random.normal(size=y.shape), np.ones(num_rows))


def settled(net: nn.Module, rows: Rows, **settings: Any) -> Start:
    return settle([Start(net, Gaussian(1.0), rows, Settings(METHODS["laplace"], **settings))])[0]


@pytest.mark.thin(2)
@pytest.mark.parametrize(("noise", "epochs"), [(0.01, 400), (0.5, 200)])
def test_noise_is_settled(noise: float, epochs: int) -> None:
    """Within a factor of 2: 120 rows leave 13 % by themselves, and a short training some of the curve."""
    start = settled(make_network(2, (20,)), curve(120, noise), epochs=epochs)
    assert isinstance(start.likelihood, Gaussian)
    assert 0.5 * noise < float(start.likelihood.noise.detach()) < 2 * noise


@pytest.mark.slow
def test_more_weights_than_rows_do_not_take_noise_for_signal() -> None:
    """From little noise alone 120 rows of noise in 12 columns are settled at 0.4; the evidence knows better."""
    random = np.random.default_rng(0)
    x, y = random.normal(size=(120, 12)), random.normal(size=(120, 1))
    start = settled(make_network(12, (50,)), Rows(x, y, np.ones(120)), epochs=300)
    assert isinstance(start.likelihood, Gaussian)
    assert float(start.likelihood.noise.detach()) > 0.5


def test_leverage_counts_the_fitted_parameters() -> None:
    """Of a linear network under a wide prior h is the hat matrix of least squares with an intercept, and the noise what these leave
    over the rows less the parameters."""
    rows = curve(40, 0.5)
    start = settled(make_network(2, ()), rows, prior_scale=100.0, epochs=150)
    design = np.column_stack((rows.x, np.ones(40)))
    hat = np.diag(design @ np.linalg.solve(design.T @ design, design.T))
    assert start.leverage is not None
    np.testing.assert_allclose(start.leverage[:, 0].numpy(), hat, rtol=0.02)  # the prior is not infinitely wide
    left = rows.y - design @ np.linalg.lstsq(design, rows.y, rcond=None)[0]
    assert isinstance(start.likelihood, Gaussian)
    assert float(start.likelihood.noise.detach()) == pytest.approx((left**2).sum() / (40 - 3), rel=0.02)


class Nearest(Predictor):
    """A model that repeats the target of the nearest training row, with too little noise."""

    def __init__(self, task: TrainingTask) -> None:
        ((self.x, self.y, _),) = task.loader
        self.likelihood, self.output = Gaussian(0.25, learn=False).double(), None

    def predict(self, x: torch.Tensor, *_: Any, **__: Any) -> Any:
        return self.likelihood.predictive(Outputs(kept=self.y[torch.cdist(x, self.x).argmin(1)][None]))

    def config(self) -> Any:
        raise NotImplementedError

    state = restore = config


@pytest.mark.usefixtures("one_round")
@pytest.mark.parametrize(("num_rows", "weight"), [(150, 1.0), (450, 1.0), (150, 3.0), (1100, 1.0)])
def test_a_method_that_repeats_its_training_rows_is_recalibrated(
    num_rows: int, weight: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Intervals come from rows that the method has not seen. Bounds: five standard errors of a level that rows of a fold estimate,
    plus the share of the identity map among the fitted rows."""
    monkeypatch.setitem(METHODS, "nearest", Method("nearest", "Nearest row", "", "N", fit=Nearest))
    random = np.random.default_rng(0)
    x, y = random.normal(size=(num_rows + 1000, 2)), random.normal(size=num_rows + 1000)
    model = BayesianRegressor("nearest", hidden=(2,), epochs=5, random_state=0, batch_size=2000)
    model.fit(x[:num_rows], y[:num_rows], np.full(num_rows, weight))
    lower, upper = model.predict_interval(x[num_rows:], 0.9)
    assert 0.78 < np.mean((lower <= y[num_rows:]) & (y[num_rows:] <= upper)) < 0.97


def test_rows_stay_in_their_folds_if_rows_are_added() -> None:
    rows = curve(300, 0.1)
    mixed = Rows.of((curve(60, 0.3), rows))[np.random.default_rng(1).permutation(360)]
    settings = Settings(METHODS["laplace"])
    before, after = (Start(nn.Identity(), Gaussian(1.0), part, settings) for part in (rows, mixed))
    assert len(before.folds()) == 3
    held = [before.rows[before.holds_out(fold)] for fold in before.folds()]
    assert sum(len(part) for part in held) == 300
    assert min(len(part) for part in held) > 100 - 5 * math.sqrt(300 * 2 / 9)
    for fold, part in zip(before.folds(), held, strict=True):
        rest = before.without(fold).rows
        assert len(rest) + len(part) == 300
        assert not set(part.y[:, 0]) & set(rest.y[:, 0])
        assert not set(part.y[:, 0]) & set(after.without(fold).rows.y[:, 0])
    assert before.without(None) is before


@pytest.mark.usefixtures("one_round")
def test_folds_begin_when_there_are_enough_rows() -> None:
    rows = curve(150, 0.2)
    model = BayesianRegressor("mean_field", hidden=(3,), epochs=4, random_state=0)
    model.partial_fit(rows.x[:30], rows.y[:30])
    assert [part.fold for part in model.fitted_.settled] == [None]
    assert model.fitted_.units.recalibration == Recalibration()
    for start in (30, 90):
        model.partial_fit(rows.x[start : start + 60], rows.y[start : start + 60])
        assert [part.fold for part in model.fitted_.settled] == [None, *((index, 6) for index in range(6))]
    assert model.fitted_.settled[0].model is model.model_
    assert model.fitted_.units.recalibration != Recalibration()


class RunningMean(nn.Module):
    """Subtracts a running mean of its inputs, which it updates in training."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.mean.mul_(0.9).add_(0.1 * x.detach().mean(0))
        return x - self.mean


LAYERS_WITH_BUFFERS = {
    "running mean": lambda: (RunningMean(), nn.Linear(2, 3)),
    "batch norm": lambda: (nn.Linear(2, 3), nn.BatchNorm1d(3)),
    "spectral norm": lambda: (nn.utils.parametrizations.spectral_norm(nn.Linear(2, 3)),),
}


@pytest.mark.usefixtures("one_round")
@pytest.mark.filterwarnings("ignore:.*vmap refused", "ignore:.*have their own batch statistics")
@pytest.mark.parametrize("method", ["laplace", "mean_field"])
@pytest.mark.parametrize("kind", LAYERS_WITH_BUFFERS)
def test_models_of_folds_do_not_change_a_network_with_buffers(
    method: str, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The model of all rows predicts the same with and without folds. In a stack, it would share its buffers with other models."""
    rows, x = curve(70, 0.3), torch.zeros(1, 2, dtype=torch.float64)
    torch.manual_seed(0)
    net = nn.Sequential(*LAYERS_WITH_BUFFERS[kind](), nn.Tanh(), nn.Linear(3, 1))
    model = BayesianRegressor(method, network=net, epochs=4, random_state=0).fit(rows.x, rows.y[:, 0])
    assert model.fitted_.units.recalibration != Recalibration()
    monkeypatch.setattr(recipe, "_list_folds", lambda *_: [])
    alone = clone(model).fit(rows.x, rows.y[:, 0])
    found = [predict_scaled(one.model_, x, 4, 0) for one in (model, alone)]
    torch.testing.assert_close(found[0].mean, found[1].mean, rtol=1e-9, atol=0)
    torch.testing.assert_close(found[0].std, found[1].std, rtol=1e-9, atol=0)


@pytest.mark.usefixtures("one_round")
def test_folds_stay_when_rows_are_added_or_forgotten() -> None:
    rows = curve(260, 0.2)
    model = BayesianRegressor("mean_field", hidden=(3,), epochs=2, random_state=0)
    for start, end in ((0, 150), (150, 260)):  # 3 folds suffice for so many rows, but the 6 that there are stay
        model.partial_fit(rows.x[start:end], rows.y[start:end])
    whole = Start(nn.Identity(), Gaussian(1.0), rows, Settings(METHODS["mean_field"]))
    assert sum(len(part) for _, part in out_of_fold(model.fitted_.settled, whole)) == len(rows)
    few = BayesianRegressor("mean_field", hidden=(3,), epochs=2, random_state=0, memory_rows=1)
    for start, end in ((0, 100), *((row, row + 1) for row in range(100, 125))):  # at times both rows are in one fold
        few.partial_fit(rows.x[start:end], rows.y[start:end])


def test_copies_of_a_row_go_to_the_folds_in_turn() -> None:
    x = np.random.default_rng(0).choice([0.0, 1.0], size=(50, 2))
    rows = [Rows(part, np.zeros((50, 1)), np.ones(50)) for part in (x, np.where(x == 0, -0.0, x))]
    found = rows[0].folds(3, 1)
    np.testing.assert_array_equal(found, rows[1].folds(3, 1))
    for kind in np.unique(x, axis=0):
        counts = np.bincount(found[(x == kind).all(1)], minlength=3)
        assert counts.max() - counts.min() <= 1


@pytest.mark.parametrize(("num_rows", "batch_size"), [(1236, None), (120, 100), (300, None), (2000, 64)])
def test_a_fold_trains_with_as_many_steps(num_rows: int, batch_size: int | None) -> None:
    start = Start(
        nn.Identity(), Gaussian(1.0), curve(num_rows, 0.1), Settings(METHODS["laplace"], batch_size=batch_size)
    )
    part = start.without((0, 3))
    assert len(part.settings.batches(part.rows)) == len(start.settings.batches(start.rows))


@pytest.mark.usefixtures("one_round")
def test_later_calls_train_every_fold_with_as_many_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    rows, counts = curve(120, 0.2), list[int]()
    model = BayesianRegressor("mean_field", hidden=(3,), epochs=2, random_state=0, batch_size=105)
    model.partial_fit(rows.x[:80], rows.y[:80])

    def train(bnns: Any, parts: Any, settings: Any, **_: Any) -> None:
        counts.extend(len(own.batches(part)) for part, own in zip(parts, settings, strict=True))

    monkeypatch.setattr(recipe, "train_posteriors", train)
    model.partial_fit(rows.x[80:], rows.y[80:])
    assert counts == [2] * 7


@pytest.mark.usefixtures("one_round")
@pytest.mark.parametrize("num_rows", [100, 300])
def test_chains_train_on_one_fold(num_rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    runs = list[int]()

    def fit(task: TrainingTask) -> Nearest:
        runs.append(len(task.batches()[0]))
        return Nearest(task)

    monkeypatch.setitem(METHODS, "chain", Method("chain", "Chain", "", "N", fit=fit, is_chain=True))
    rows = curve(num_rows, 1.0)
    model = BayesianRegressor("chain", hidden=(2,), epochs=5, random_state=0).fit(rows.x, rows.y[:, 0])
    assert runs[0] == num_rows
    assert len(runs) == 2
    assert runs[1] == pytest.approx(2 / 3 * num_rows, abs=5 * math.sqrt(num_rows * 2 / 9))
    assert model.fitted_.units.recalibration.said[0] < -2  # wider than the identity, -1.96
