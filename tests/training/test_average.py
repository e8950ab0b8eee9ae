"""The average of the parameters: against loops by hand, with batch statistics of its own, in checkpoints, and without a trace."""

import math
import signal

import pytest
import torch
from runs import arguments, loader, network, numbers, same
from torch import nn
from torch.utils.data import DataLoader

import bayesify
from bayesify import likelihoods, posteriors
from bayesify.training import Average, Checkpointing, ModelStack, Steps, Update
from bayesify.training.batches import parse_batch
from bayesify.training.checkpoints import Checkpoint
from bayesify.training.noise import new_rows_ratio

X = torch.randn(44, 3, generator=torch.Generator().manual_seed(0))
Y = (X.sum(1) > 0).long()
BATCHES = list(zip(X.split(8), Y.split(8), strict=True))


class Recording(Update):
    """Keeps the parameters after each step."""

    def __init__(self, bnn):
        self.bnn, self.seen = bnn, []

    def after_step(self):
        self.seen.append([value.detach().double().clone() for value in self.bnn.parameters() if value.requires_grad])


def plain(posterior=None, norm=False, seed=3):
    torch.manual_seed(seed)
    middle = [nn.BatchNorm1d(8)] if norm else []
    net = nn.Sequential(nn.Linear(3, 8), *middle, nn.ReLU(), nn.Dropout(0.3), nn.Linear(8, 2))
    return bayesify.bayesianize(net, posterior or posteriors.MeanField(), likelihood=likelihoods.Categorical())


def fit(bnn, batches=BATCHES, **options):
    defaults = {"epochs": 4, "learning_rate": 0.05, "seed": 1, "progress": False}
    return bayesify.fit(bnn, batches, **defaults | options)


def by_hand(seen, decay):
    """Sum of weights times iterates: each step's weight is its own share times what later steps leave of it."""
    shares = [max(1 - decay, 1 / (index + 1)) for index in range(len(seen))]
    weights = [share * math.prod(1 - later for later in shares[index + 1 :]) for index, share in enumerate(shares)]
    assert sum(weights) == pytest.approx(1.0)
    return [
        sum(weight * step[place] for weight, step in zip(weights, seen, strict=True)) for place in range(len(seen[0]))
    ]


@pytest.mark.parametrize(
    ("average", "decay", "first"),
    [(0.9, 0.9, 0), (Average(1.0, 0.5), 1.0, 12), (Average(0.8, start=0.3), 0.8, 8), (0, 0.0, 23)],
)
def test_the_average_is_that_of_a_loop_by_hand(average, decay, first):
    """24 steps; the share that is done before step k, counted from 0, is k / 24."""
    bnn = plain()
    recording = Recording(bnn)
    fit(bnn, average=average, update=recording)
    expected = by_hand(recording.seen[first:], decay)
    for value, right in zip((p for p in bnn.parameters() if p.requires_grad), expected, strict=True):
        torch.testing.assert_close(value.detach().double(), right, atol=1e-6, rtol=1e-5)


def test_it_begins_after_a_map_phase_and_takes_no_step_that_was_not_taken():
    class Length(nn.Module):
        """Inputs and their length, whose gradient is NaN at 0."""

        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.ones(3))

        def forward(self, x):
            return torch.cat([x, (x * self.scale).square().sum(1, keepdim=True).sqrt()], 1)

    torch.manual_seed(0)
    net = nn.Sequential(Length(), nn.Linear(4, 2))
    bnn = bayesify.bayesianize(net, {"1": posteriors.MeanField()}, likelihood=likelihoods.Categorical())
    batches = list(BATCHES)
    batches[2] = torch.zeros(8, 3), batches[2][1]
    recording = Recording(bnn)
    options = {"map_epochs": 1, "epochs": 2, "learning_rate": 1e-3, "steps": Steps(skip_not_finite=True)}
    history = fit(bnn, batches, average=1.0, update=recording, **options)
    assert history.column("skipped_steps") == [1, 1, 1]
    taken = [step for index, step in enumerate(recording.seen) if index >= 6 and index % 6 != 2]
    for value, right in zip(bnn.parameters(), by_hand(taken, 1.0), strict=True):
        torch.testing.assert_close(value.detach().double(), right, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("members", [None, 3])
def test_batch_statistics_are_those_of_a_pass_with_the_average(members):
    """By hand: the mean and the unbiased variance of the first layer's outputs in each batch, batches by size."""
    bnn = plain(posteriors.Point() if members is None else posteriors.Ensemble(members), norm=True)
    fit(bnn, average=0.9)
    draws = bnn.draw(members or 1, generator=torch.Generator().manual_seed(0)).materialize()
    sizes = torch.tensor([float(len(y)) for _, y in BATCHES])
    norm = dict(bnn.network.named_buffers())
    for index in range(members or 1):
        weight, bias = (draws.weights[name][index].detach() for name in ("0.weight", "0.bias"))
        outputs = [x @ weight.T + bias for x, _ in BATCHES]
        mean = sum(size * output.mean(0) for size, output in zip(sizes, outputs, strict=True)) / sizes.sum()
        variance = sum(size * output.var(0) for size, output in zip(sizes, outputs, strict=True)) / sizes.sum()
        found = draws.buffers[index] if members else {name: norm[name] for name in ("1.running_mean", "1.running_var")}
        torch.testing.assert_close(found["1.running_mean"], mean, atol=1e-5, rtol=1e-4)
        torch.testing.assert_close(found["1.running_var"], variance, atol=1e-5, rtol=1e-4)
    assert all(layer.momentum == 0.1 for layer in bnn.modules() if isinstance(layer, nn.BatchNorm1d))


def test_statistics_of_random_weights_are_means_over_draws():
    """One draw a batch; with the large data set they are near those of the mean weights, whose spread is small."""
    net = nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2))
    bnn = bayesify.bayesianize(net, posteriors.MeanField(init_std=1e-4), likelihood=likelihoods.Categorical())
    fit(bnn, average=0.9, epochs=2, learning_rate=1e-3)
    mean = bnn.posterior.mean_given({})
    outputs = X @ mean["0.weight"].detach().T + mean["0.bias"].detach()
    torch.testing.assert_close(bnn.network[1].running_mean, outputs.mean(0), atol=1e-2, rtol=0)


def test_frozen_statistics_stay():
    bnn = bayesify.bayesianize(
        nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)),
        posteriors.Point(), likelihood=likelihoods.Categorical(), batch_statistics="frozen",
    )  # fmt: skip
    fit(bnn, average=0.9, epochs=1)
    assert torch.equal(bnn.network[1].running_mean, torch.zeros(4))


def test_the_steps_are_those_of_a_run_without_it():
    """Callbacks see the parameters and statistics of the run, also where each epoch is validated with the average."""
    seen = {}
    for average in (None, Average(0.9, 0.2)):
        kept = seen.setdefault(average is None, [])

        def look(model, _, kept=kept):
            kept.append({name: value.clone() for name, value in model.state_dict().items()})

        bnn = network()
        bayesify.fit(bnn, loader(), average=average, **arguments(callbacks=[look], patience=None))
        look(bnn, None)
    for one, other in zip(seen[True][:-1], seen[False][:-1], strict=True):
        assert all(torch.equal(one[name], other[name]) for name in one)
    assert all(torch.equal(seen[True][-1][name], seen[True][-2][name]) for name in seen[True][-1])
    assert not all(torch.equal(seen[False][-1][name], seen[False][-2][name]) for name, _ in bnn.named_parameters())


@pytest.mark.parametrize("patience", [None, 2])
def test_validation_and_patience_judge_the_average(patience):
    """The last validation NLL, or with patience the best, is that of the network that comes back."""
    bnn = plain(posteriors.Point(), norm=True)
    history = fit(bnn, average=0.9, epochs=8, learning_rate=0.3, validation=BATCHES, patience=patience)
    scores = history.column("validation_nll")
    nll = -bnn.predict(X).log_prob(Y).mean()
    assert float(nll) == pytest.approx(min(scores) if patience else scores[-1], rel=1e-5)


class Interrupting:
    """Validation batches of `arguments` in which Ctrl-C is pressed once, in an epoch."""

    def __init__(self, epoch):
        self.batches, self.passes, self.epoch = list(arguments()["validation"]), 0, epoch

    def __iter__(self):
        self.passes += 1
        for batch in self.batches:
            if self.passes == self.epoch + 1:  # the first pass is that of the starting network
                self.passes += 100
                signal.raise_signal(signal.SIGINT)
            yield batch


@pytest.mark.thin(2)
@pytest.mark.parametrize("epoch", [1, 3, 5])
def test_resume_is_bit_identical(tmp_path, epoch):
    """Ctrl-C comes while the network has the average; in epoch 1 there is none yet."""
    path, average = tmp_path / "run.safetensors", Average(0.8, 0.3)
    options = {"average": average, "num_data": 44, "patience": None}
    whole, stopped, resumed = network(), network(), network()
    expected = bayesify.fit(whole, loader(), **arguments(**options))
    with pytest.raises(KeyboardInterrupt, match=f"epoch {epoch}"):
        bayesify.fit(stopped, loader(), **arguments(**options, checkpoint=path, validation=Interrupting(epoch)))
    assert Checkpoint.read(path).position["batches"] == 6
    history = bayesify.fit(resumed, loader(), **arguments(**options, checkpoint=path))
    assert same(resumed, whole)
    assert numbers(history) == numbers(expected)
    again = network()
    bayesify.fit(again, loader(), **arguments(**options, checkpoint=path))  # of a finished run
    assert same(again, whole)


@pytest.mark.parametrize("start", [0.0, 0.5])
def test_a_run_that_is_continued_to_more_epochs_has_the_average_of_the_longer_one(tmp_path, start):
    """Two epochs of two, then of six: the average that had begun halfway begins anew."""
    path, options = tmp_path / "run.safetensors", {"average": Average(1.0, start), "scheduler": "constant"}
    whole, parts = plain(norm=True), plain(norm=True)
    fit(whole, epochs=6, **options)
    fit(plain(norm=True), epochs=2, checkpoint=path, **options)
    fit(parts, epochs=6, checkpoint=path, **options)
    torch.testing.assert_close(parts.state_dict(), whole.state_dict(), atol=0 if start == 0 else 1e-6, rtol=0)


def test_checkpoints_with_and_without_an_average(tmp_path):
    """One from before averages continues without one; another average, or one that was altered, is refused."""
    path = tmp_path / "run.safetensors"
    fit(plain(), epochs=1, checkpoint=path, scheduler="constant")
    stored = Checkpoint.read(path)
    del stored.settings["average"]
    stored.write(path)
    fit(plain(), epochs=2, checkpoint=path, scheduler="constant")
    with pytest.raises(ValueError, match="written with average=None, but this run has"):
        fit(plain(), epochs=3, checkpoint=path, scheduler="constant", average=0.9)
    fit(plain(), epochs=1, checkpoint=Checkpointing(path, resume=False), average=0.9, scheduler="constant")
    stored = Checkpoint.read(path)
    name = next(iter(stored.steps["average"]["values"]))
    stored.steps["average"]["values"][name] = torch.zeros(())
    stored.write(path)
    with pytest.raises(ValueError, match=r"was altered \(the averaged parameters in the checkpoint do not match"):
        fit(plain(), epochs=2, checkpoint=path, average=0.9, scheduler="constant")


def test_the_average_of_a_low_precision_parameter_is_held_in_float32():
    """A hundredth of a change is lost in bfloat16, which has three digits."""
    net = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)).bfloat16()
    bnn = bayesify.bayesianize(net, {"1": posteriors.MeanField()}, likelihood=likelihoods.Categorical())
    recording = Recording(bnn)
    batches = [(x.bfloat16(), y) for x, y in BATCHES]
    fit(bnn, batches, average=1.0, update=recording, epochs=20, optimizer=lambda p: torch.optim.SGD(p, lr=0.05))
    for value, right in zip(bnn.parameters(), by_hand(recording.seen, 1.0), strict=True):
        torch.testing.assert_close(value.detach().double(), right, atol=0, rtol=2**-8)


def test_noise_of_a_regression_is_that_of_the_average():
    """Dropout makes `fit` find the last variance by predictions: those of the network that comes back."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Dropout(0.3), nn.Linear(8, 1))
    bnn = bayesify.bayesianize(net, posteriors.Point(), likelihood=likelihoods.Gaussian())
    targets = X.sum(1, keepdim=True)
    fit(bnn, list(zip(X.split(8), targets.split(8), strict=True)), average=0.9, epochs=6)
    residual = float((bnn.predict(X).mean - targets).square().mean())
    ratio = new_rows_ratio(bnn.mean_network(), [parse_batch((X, targets))], residual, len(X), None)
    assert float(bnn.likelihood.noise.detach()) == pytest.approx(ratio * residual, rel=1e-4)


def test_what_cannot_be_averaged_is_refused():
    with pytest.raises(
        ValueError, match=r"average= works for a single model, but ModelStack has 2 models; leave out average="
    ):
        fit(ModelStack([plain(), plain()]), average=0.9)
    with pytest.raises(ValueError, match=r"average=1\.5"):
        fit(plain(), average=1.5)
    with pytest.raises(ValueError, match=r"start=1\.0"):
        Average(0.9, start=1.0)


def test_a_loader_that_shuffles_is_left_where_it_was():
    """The pass for statistics takes no number of the loader's generator: the second run sees what it would have seen."""
    orders = []
    for average in (None, 0.9):
        generator = torch.Generator().manual_seed(0)
        data = DataLoader(list(zip(X, Y, strict=True)), batch_size=8, shuffle=True, generator=generator)
        fit(plain(norm=True), data, average=average, validation=BATCHES)
        orders.append(generator.get_state())
    assert torch.equal(*orders)
