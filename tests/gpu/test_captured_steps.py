"""Training by captured steps is training without them, to the bit. Run with `-m gpu`."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import bayesify
from bayesify import baselines, likelihoods, posteriors
from bayesify.training.arguments import Checkpointing, Steps
from bayesify.training.average import Average
from bayesify.training.batches import StackedBatches
from bayesify.training.stack import ModelStack

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
POSTERIORS = {
    "point": lambda: posteriors.Point(),
    "mean_field": lambda: posteriors.MeanField(),
    "k_tied": lambda: posteriors.KTied(),
    "rank_one": lambda: posteriors.RankOne(),
    "matrix_normal": lambda: posteriors.MatrixNormal(),
    "inducing": lambda: posteriors.InducingWeights(8, 8),
    "walsh_hadamard": lambda: posteriors.WalshHadamard(),
    "dropout": lambda: posteriors.Dropout(),
    "ensemble": lambda: posteriors.Ensemble(3),
}


def data(rows=150, bad=None, label=None, value=torch.nan):
    x = torch.randn(rows, 6, generator=torch.Generator().manual_seed(0))
    y = (x[:, 0] > 0).long() + (x[:, 1] > 0).long()
    if bad is not None:
        x[bad] = value
    if label is not None:
        y[label] = 7
    return TensorDataset(x, y)


def network(posterior, seed=0, middle=nn.ReLU):
    torch.manual_seed(seed)
    net = nn.Sequential(nn.Linear(6, 16), middle(), nn.Linear(16, 3)).cuda()
    return bayesify.bayesianize(net, posterior, likelihood=likelihoods.Categorical())


def fit(bnn, dataset=None, capture=True, epochs=5, batch_size=32, **options):
    loader = DataLoader(dataset or data(), batch_size=batch_size, shuffle=options.pop("shuffle", True))
    steps = Steps(capture=capture, **options.pop("steps", {}))
    return bayesify.fit(bnn, loader, epochs=epochs, seed=3, steps=steps, progress=False, **options)


def same(one, other):
    for (name, a), (_, b) in zip(one.state_dict().items(), other.state_dict().items(), strict=True):
        assert torch.equal(a, b), name


@pytest.mark.parametrize("name", POSTERIORS)
def test_captured_steps_are_the_steps(name):
    captured, plain = network(POSTERIORS[name]()), network(POSTERIORS[name]())
    history, other = fit(captured), fit(plain, capture=False)
    assert history.notes["capture"] == "steps were captured"
    assert other.notes["capture"] == "steps were not captured: Steps(capture=False)"
    same(captured, plain)
    for row, expected in zip(history, other, strict=True):
        assert {**row, "seconds": 0} == {**expected, "seconds": 0}


@pytest.mark.parametrize("precision", ["float32", "bf16"])
@pytest.mark.parametrize("name", ["mean_field", "inducing"])
def test_steps_of_a_pruned_network_are_captured(name, precision):
    captured, plain = (bayesify.prune(network(POSTERIORS[name]()), 0.5) for _ in range(2))
    options = {"learning_rate": 1e-2, "scheduler": "constant", "precision": precision}
    assert fit(captured, **options).notes["capture"] == "steps were captured"
    fit(plain, capture=False, **options)
    same(captured, plain)


def test_with_phases_schedules_clipping_and_batch_norm():
    class Middle(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.drop = nn.BatchNorm1d(16), nn.Dropout(0.2)

        def forward(self, x):
            return self.drop(self.norm(x)).relu()

    options = {
        "map_epochs": 5,
        "kl_schedule": bayesify.KLSchedule(linear_epochs=3),
        "scheduler": lambda optimizer: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 50),
        "steps": {"clip_norm": 1.0, "scheduler": "step"},
    }
    captured, plain = (network(posteriors.MeanField(), middle=Middle) for _ in range(2))
    assert fit(captured, **options).notes["capture"] == "steps were captured"
    fit(plain, capture=False, **options)
    same(captured, plain)


def test_resumed_runs_are_those_that_were_not_interrupted(tmp_path):
    whole, parts = network(posteriors.MeanField()), network(posteriors.MeanField())
    constant = {"scheduler": "constant"}  # a rate that falls knows how many epochs there are
    fit(whole, epochs=6, **constant)
    path = Checkpointing(tmp_path / "run.safetensors")
    fit(parts, epochs=3, checkpoint=path, **constant)
    resumed = network(posteriors.MeanField(), seed=1)
    fit(resumed, epochs=6, checkpoint=path, **constant)
    same(resumed, whole)


def test_runs_resumed_within_an_epoch_are_captured_to_their_end(tmp_path):
    """Fifteen steps an epoch, the run is cut in the second."""
    last = [1.6]

    def schedule(epoch):
        if epoch >= last[0]:
            raise KeyboardInterrupt
        return 1.0

    options = {"epochs": 6, "kl_schedule": schedule, "scheduler": "constant", "batch_size": 10}
    options["checkpoint"] = Checkpointing(tmp_path / "run.safetensors", every=7)
    whole, cut, resumed = (network(posteriors.MeanField(), seed) for seed in (0, 0, 1))
    with pytest.raises(KeyboardInterrupt):
        fit(cut, **options)
    last[0] = 100.0
    history = fit(resumed, **options)
    assert history.notes["capture"] == "steps were captured"
    fit(whole, **{**options, "checkpoint": None})
    same(resumed, whole)


def test_a_bad_row_changes_nothing_and_is_named():
    """The fifth batch of each epoch of twelve is bad: it is met when steps are captured already."""
    broken, sound = network(posteriors.MeanField()), network(posteriors.MeanField())
    with pytest.raises(
        ValueError, match=r"epoch 1, batch 9: the gradient of .* is not finite.*steps taken before this error: 8"
    ):
        fit(broken, data(120, bad=85), epochs=1, batch_size=10, shuffle=False, scheduler="constant")
    fit(sound, data(80), epochs=1, batch_size=10, shuffle=False, num_data=120, scheduler="constant")
    same(broken, sound)


def test_a_label_out_of_range_is_no_crash_of_the_device():
    bnn = network(posteriors.MeanField())
    with pytest.raises(ValueError, match="epoch 1, batch 9"):
        fit(bnn, data(120, label=85), epochs=1, batch_size=10, shuffle=False)
    assert torch.isfinite(bnn.predict(torch.randn(3, 6, device="cuda")).probs).all()


def test_a_network_that_waits_trains_as_it_is():
    class Waiting(nn.Module):
        def forward(self, x):
            return x.relu() if float(x.detach().sum()) > -1e9 else x

    bnn = network(posteriors.MeanField(), middle=Waiting)
    history = fit(bnn)
    assert "a step waits for the GPU" in history.notes["capture"]
    assert history[-1]["nll"] < history[0]["nll"]


def test_the_optimizer_comes_back_as_it_was():
    bnn = network(posteriors.MeanField())
    optimizer = torch.optim.Adam(bnn.parameters(), lr=0.01, fused=True)
    assert fit(bnn, optimizer=optimizer).notes["capture"] == "steps were captured"
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.01, rel=1e-6)
    assert isinstance(optimizer.param_groups[0]["lr"], float)
    assert optimizer.param_groups[0]["capturable"] is False
    history = fit(bnn, optimizer=torch.optim.Adam(bnn.parameters(), lr=0.01, foreach=True))
    assert "give a fused optimizer" in history.notes["capture"]


def test_predictions_between_epochs_see_the_new_weights():
    """Replayed graphs do not raise the version of parameters, by which results are cached."""
    bnn, x = network(posteriors.InducingWeights(8, 8)), torch.randn(4, 6, device="cuda")
    seen = []

    def look(model, history):
        seen.append(model.predict(x, 4, generator=torch.Generator("cuda").manual_seed(0)).probs)

    fit(bnn, epochs=6, learning_rate=0.05, callbacks=[look])
    for before, after in itertools.pairwise(seen):
        assert not torch.equal(before, after)


def norm_and_dropout():
    return nn.Sequential(nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.2))


@pytest.mark.parametrize("name", ["mean_field", "inducing"])
def test_averages_of_captured_steps(name, tmp_path):
    """Captured, without a graph, and resumed within an epoch, with validation and batch statistics: the same bits."""
    average = Average(0.9, start=0.3)
    options = {"epochs": 6, "average": average, "validation": DataLoader(data(), batch_size=50), "batch_size": 10}
    captured, plain, cut, resumed = (network(POSTERIORS[name](), middle=norm_and_dropout) for _ in range(4))
    history = fit(captured, **options)
    assert history.notes["capture"] == "steps were captured"
    other = fit(plain, capture=False, **options)
    same(captured, plain)
    assert history.column("validation_nll") == other.column("validation_nll")
    last = [3.5]

    def schedule(epoch):
        if epoch >= last[0]:
            raise KeyboardInterrupt
        return 1.0

    stored = {**options, "kl_schedule": schedule, "checkpoint": Checkpointing(tmp_path / "run.safetensors", every=4)}
    with pytest.raises(KeyboardInterrupt):
        fit(cut, **stored)
    last[0] = 100.0
    fit(resumed, **stored)
    same(resumed, captured)


class WithLength(nn.Module):
    """Inputs and their scaled length, whose gradient is not finite where all inputs are 0."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(6))

    def forward(self, x):
        return torch.cat([x, (x * self.scale).square().sum(1, keepdim=True).sqrt()], 1)


def test_an_average_takes_no_step_that_is_not_taken():
    """The gradient of the ninth batch, met when steps are captured, is not finite."""
    models, histories = [], []
    options = {"epochs": 2, "batch_size": 10, "shuffle": False, "average": 1.0, "steps": {"skip_not_finite": True}}
    for capture in (True, False):
        torch.manual_seed(0)
        net = nn.Sequential(WithLength(), nn.Linear(7, 3)).cuda()
        bnn = bayesify.bayesianize(net, {"1": posteriors.MeanField()}, likelihood=likelihoods.Categorical())
        histories.append(fit(bnn, data(120, bad=85, value=0.0), capture=capture, **options))
        models.append(bnn)
    assert histories[0].notes["capture"] == "steps were captured"
    assert [history.column("skipped_steps") for history in histories] == [[1, 1], [1, 1]]
    same(*models)


def ivon(capture, dataset=None, shuffle=True, **options):
    torch.manual_seed(0)
    middle = nn.Sequential(nn.BatchNorm1d(16), nn.ReLU())
    trainer = baselines.IVON(network(posteriors.MeanField(), middle=lambda: middle), decay=0.99, clip=1.0, num_data=150)
    loader = DataLoader(dataset or data(), batch_size=10, shuffle=shuffle)
    given = {
        "schedule": lambda share: 1 - share,
        "steps": Steps(capture=capture),
        "seed": 3,
        "progress": False,
    } | options
    return trainer, lambda: trainer.fit(loader, given.pop("epochs", 5), **given)


@pytest.mark.parametrize("precision", ["float32", "bf16"])
def test_steps_of_ivon_are_captured(precision, tmp_path):
    """To the bit, with BatchNorm, points, a schedule and a run that is continued."""
    captured, run = ivon(True, precision=precision)
    assert run().history.notes["capture"] == "steps were captured"
    plain, run = ivon(False, precision=precision)
    run()
    same(captured.bnn, plain.bnn)
    stops = [2]
    options = {"checkpoint": tmp_path / "run.safetensors", "precision": precision}
    options["callbacks"] = [
        lambda _, history: (_ for _ in ()).throw(KeyboardInterrupt) if len(history) in stops else None
    ]
    with pytest.raises(KeyboardInterrupt):
        ivon(True, **options)[1]()
    stops.clear()
    resumed, run = ivon(True, **options)
    run()
    same(captured.bnn, resumed.bnn)


def test_a_captured_step_of_ivon_that_is_not_finite_changes_nothing():
    options = {"shuffle": False, "epochs": 1, "schedule": None}
    broken, run = ivon(True, data(120, bad=85), **options)
    with pytest.raises(
        ValueError, match=r"batch 9: the gradient of .* is not finite.*steps taken before this error: 8"
    ):
        run()
    sound, run = ivon(True, data(80), **options)
    run()
    same(broken.bnn, sound.bnn)


def cosine(optimizer):
    return torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 50)


PLAIN_OPTIMIZERS = {
    "sgd": lambda p, **form: torch.optim.SGD(p, lr=0.05, **form),
    "momentum": lambda p, **form: torch.optim.SGD(p, lr=0.05, momentum=0.9, weight_decay=1e-3, **form),
    "nesterov": lambda p, **form: torch.optim.SGD(p, lr=0.05, momentum=0.9, nesterov=True, weight_decay=1e-3, **form),
    "adam": lambda p, **form: torch.optim.Adam(p, lr=0.01, **form),
    "adamw": lambda p, **form: torch.optim.AdamW(p, lr=0.01, weight_decay=0.1, **form),
}


def near(one, other):
    for (name, a), (_, b) in zip(one.state_dict().items(), other.state_dict().items(), strict=True):
        torch.testing.assert_close(a, b, atol=2e-4, rtol=2e-3, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize("scheduled", ["step", "epoch"])
@pytest.mark.parametrize("name", PLAIN_OPTIMIZERS)
def test_plain_optimizers_are_captured(name, scheduled):
    """A MAP phase leaves scales without gradients at first. With `foreach=True` steps are eager and unfused: equal to rounding."""
    results = []
    for capture, form in ((True, {}), (False, {}), (True, {"foreach": True})):
        bnn = network(posteriors.MeanField())
        optimizer = PLAIN_OPTIMIZERS[name](list(bnn.parameters()), **form)
        options = {"map_epochs": 2, "epochs": 4, "scheduler": cosine(optimizer), "steps": {"scheduler": scheduled}}
        history = fit(bnn, capture=capture, optimizer=optimizer, **options)
        results.append((bnn, history.notes["capture"], optimizer))
    (captured, note, optimizer), (plain, _, _), (eager, refusal, other) = results
    assert note == "steps were captured"
    assert "give a fused optimizer" in refusal
    same(captured, plain)
    near(captured, eager)
    assert not hasattr(optimizer, "_step_supports_amp_scaling")
    assert optimizer.param_groups[0]["fused"] is None
    assert optimizer.param_groups[0]["lr"] == pytest.approx(other.param_groups[0]["lr"], rel=1e-4)
    again = PLAIN_OPTIMIZERS[name](list(captured.parameters()), foreach=True)
    again.load_state_dict(optimizer.state_dict())
    fit(captured, optimizer=again, epochs=1)
    fit(eager, optimizer=other, epochs=1)
    near(captured, eager)


@pytest.mark.parametrize("name", ["nesterov", "adamw"])
def test_a_bad_row_changes_neither_weights_nor_momenta_of_plain_optimizers(name):
    broken, sound = network(posteriors.MeanField()), network(posteriors.MeanField())
    ours, theirs = (PLAIN_OPTIMIZERS[name](list(bnn.parameters())) for bnn in (broken, sound))
    options = {"epochs": 1, "batch_size": 10, "shuffle": False}
    with pytest.raises(ValueError, match=r"epoch 1, batch 9: the gradient of .* is not finite"):
        fit(broken, data(120, bad=85), optimizer=ours, **options)
    fit(sound, data(80), optimizer=theirs, num_data=120, **options)
    same(broken, sound)
    for one, other in zip(ours.state.values(), theirs.state.values(), strict=True):
        assert one.keys() == other.keys()
        assert all(torch.equal(one[key], other[key]) for key in one)


def test_momenta_of_a_first_step_that_is_not_taken_are_zero():
    class NoGradient(nn.Module):
        def forward(self, x):
            return x + (x - x.detach()).abs().sqrt()  # 0, with a gradient that is NaN

    bnn = network(posteriors.MeanField(), middle=NoGradient)
    optimizer = PLAIN_OPTIMIZERS["nesterov"](list(bnn.parameters()))
    before = [value.detach().clone() for value in bnn.parameters()]
    with pytest.raises(ValueError, match="epoch 1, batch 1: the gradient of"):
        fit(bnn, optimizer=optimizer)
    assert all(torch.equal(a, b) for a, b in zip(before, bnn.parameters(), strict=True))
    assert all(not state["momentum_buffer"].any() for state in optimizer.state.values())


@pytest.mark.parametrize("name", ["nesterov", "adamw"])
def test_runs_of_plain_optimizers_resume_to_the_same_bits(name, tmp_path):
    """Fifteen steps an epoch, the run is cut in the second."""
    last = [1.6]

    def schedule(epoch):
        if epoch >= last[0]:
            raise KeyboardInterrupt
        return 1.0

    options = {
        "epochs": 5,
        "kl_schedule": schedule,
        "batch_size": 10,
        "scheduler": cosine,
        "steps": {"scheduler": "step"},
    }
    options |= {"checkpoint": Checkpointing(tmp_path / "run.safetensors", every=7)}
    options |= {"optimizer": lambda parameters: PLAIN_OPTIMIZERS[name](list(parameters)), "map_epochs": 1}
    whole, cut, resumed = (network(posteriors.MeanField(), seed) for seed in (0, 0, 1))
    with pytest.raises(KeyboardInterrupt):
        fit(cut, **options)
    last[0] = 100.0
    assert fit(resumed, **options).notes["capture"] == "steps were captured"
    fit(whole, **{**options, "checkpoint": None})
    same(resumed, whole)


@pytest.mark.parametrize("form", [{"fused": True}, {}])
def test_options_that_somebody_changes_reach_captured_steps(form):
    """A callback assigns rate and decay; a graph holds one in a tensor and the other as a number."""

    def change(model, history, optimizer):
        optimizer.param_groups[0]["lr"] = 0.02 / len(history)
        optimizer.param_groups[0]["weight_decay"] = 0.1 * len(history)

    results = []
    for chosen in (form, {"foreach": True}):
        bnn = network(posteriors.Point())
        optimizer = torch.optim.AdamW(bnn.parameters(), lr=0.05, **chosen)
        callback = [lambda model, history, optimizer=optimizer: change(model, history, optimizer)]
        results.append((bnn, fit(bnn, optimizer=optimizer, callbacks=callback, batch_size=10).notes["capture"]))
    assert results[0][1] == "steps were captured"
    near(results[0][0], results[1][0])


def test_momenta_that_change_from_step_to_step_are_not_captured():
    results = []
    for form in ({}, {"foreach": True}):
        bnn = network(posteriors.Point())
        optimizer = torch.optim.SGD(bnn.parameters(), lr=0.05, momentum=0.9, **form)
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=26)
        history = fit(bnn, optimizer=optimizer, scheduler=scheduler, steps={"scheduler": "step"})
        results.append((bnn, history.notes["capture"]))
    assert "cycle_momentum=False" in results[0][1]
    near(results[0][0], results[1][0])


STACKED = {
    "walsh_hadamard": posteriors.WalshHadamard,
    "mean_field": posteriors.MeanField,
    "dropout": lambda: posteriors.Dropout(0.1),
    "matrix_normal": posteriors.MatrixNormal,
}


@pytest.mark.parametrize("name", STACKED)
def test_steps_of_a_stack_are_captured(name):
    """A step of a stack waits for nothing: no check of values, and no constants copied from the host."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2, 64, 5, generator=generator).cuda()
    bounds = []
    for capture in (True, False):
        models = []
        for seed in range(2):
            torch.manual_seed(seed)
            net = nn.Sequential(nn.Linear(5, 16), nn.ReLU(), nn.Linear(16, 1))
            models.append(bayesify.bayesianize(net, STACKED[name](), likelihood=likelihoods.Gaussian(0.1)).cuda())
        history = bayesify.fit(
            ModelStack(models), StackedBatches(x, x[..., :1].sin(), 16, 20), epochs=2, num_data=64,
            steps=Steps(capture=capture), seed=1, progress=False,
        )  # fmt: skip
        bounds.append(torch.tensor(history.column("elbo")))
        assert (history.notes["capture"] == "steps were captured") == capture
    torch.testing.assert_close(*bounds, rtol=1e-3, atol=1e-2)
