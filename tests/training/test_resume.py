"""Same seed, same result; a run that was stopped continues to the bit-identical result."""

import contextlib
import functools
import itertools
import multiprocessing
import os
import random
import signal
import sys
import threading
import time

import numpy as np
import pytest
import torch
from forks import forks
from runs import arguments, loader, network, numbers, same
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, TensorDataset

import bayesify
from bayesify import likelihoods, posteriors, priors
from bayesify.predictor import Batch
from bayesify.running import cuda_graphs
from bayesify.training import Checkpointing, Steps, captured_step
from bayesify.training.checkpoints import Checkpoint
from bayesify.training.step import Step

pytestmark = pytest.mark.usefixtures("few_kept_draws")


class Stop(Exception):
    pass


def stop_at(step):
    """A schedule of the KL that ends the run at a step, in the middle of an epoch."""
    calls = []

    def schedule(t):
        calls.append(t)
        if len(calls) == step:
            raise Stop
        return min(1.0, t)

    return schedule


def sgd(**changes):
    """The optimizer of `arguments`, with other options."""
    return lambda parameters: torch.optim.SGD(parameters, **{"lr": 0.05, "momentum": 0.9, "nesterov": True} | changes)


def free_schedule(t):
    return min(1.0, t)


def test_same_seed_same_bits_whatever_the_global_generators():
    results = []
    for global_seed in (0, 1):
        torch.manual_seed(global_seed)
        random.seed(global_seed)
        np.random.seed(global_seed)  # noqa: NPY002
        bnn = network()
        history = bayesify.fit(bnn, loader(), **arguments())
        results.append((bnn, numbers(history), torch.rand(()), random.random(), np.random.random()))  # noqa: NPY002
        torch.manual_seed(global_seed)
        random.seed(global_seed)
        np.random.seed(global_seed)  # noqa: NPY002
        fresh = torch.rand(()), random.random(), np.random.random()  # noqa: NPY002
        assert results[-1][2:] == fresh  # the run left them as they were
    assert same(results[0][0], results[1][0])
    assert results[0][1] == results[1][1]
    other = network()
    bayesify.fit(other, loader(), **arguments(seed=12))
    assert not same(other, results[0][0])


def test_without_a_seed_the_global_generator_decides():
    results = []
    for _ in range(2):
        torch.manual_seed(4)
        bnn = network()
        bayesify.fit(bnn, loader(), **arguments(seed=None, epochs=1))
        results.append(bnn)
    assert same(*results)


@functools.cache
def undisturbed(own_generator):
    bnn = network()
    return bnn, bayesify.fit(bnn, loader(own_generator), **arguments(kl_schedule=free_schedule))


@pytest.mark.thin(2)
@pytest.mark.parametrize(
    ("step", "own_generator"), [(1, False), (2, True), (3, False), (4, True), (7, False), (9, True)]
)
def test_resume_within_an_epoch_is_bit_identical(tmp_path, step, own_generator):
    """Three steps an epoch; the schedule is not asked in the MAP epoch, and once more at the end of each later one."""
    path = tmp_path / "run.safetensors"
    whole, expected = undisturbed(own_generator)

    class Named:
        def __init__(self, function):
            self.function = function
            self.__qualname__ = free_schedule.__qualname__

        def __call__(self, t):
            return self.function(t)

    stopped = network()
    with pytest.raises(Stop):
        bayesify.fit(
            stopped,
            loader(own_generator),
            **arguments(kl_schedule=Named(stop_at(step)), checkpoint=Checkpointing(path, 1)),
        )
    assert Checkpoint.read(path).position["steps"] == 3 + step - 1 - (step > 4) - (step > 8)
    torch.manual_seed(99)
    resumed = network()
    generator_moved = loader(own_generator)
    history = bayesify.fit(
        resumed, generator_moved, **arguments(kl_schedule=free_schedule, checkpoint=Checkpointing(path, 1), seed=None)
    )
    assert same(resumed, whole)
    assert numbers(history) == numbers(expected)


class Branching(nn.Module):
    """Cannot run under `vmap`."""

    def forward(self, x):
        return 2 * x if bool((x > 1e9).any()) else x


class Checkpointed(nn.Linear):
    def forward(self, x):
        return checkpoint(super().forward, x, use_reentrant=False)


@pytest.mark.filterwarnings("ignore:.*vmap refused")
@pytest.mark.parametrize("noise", [0.05, None])
@pytest.mark.parametrize("layer", [nn.Identity, Branching, lambda: Checkpointed(8, 8)])
def test_a_resumed_run_draws_the_same_dropout(tmp_path, layer, noise):
    """Neither the first look at the targets nor the notice that `vmap` does not work takes random numbers of the network."""
    x = torch.randn(40, 2)
    data = DataLoader(TensorDataset(x, x[:, :1]), 20, shuffle=True)

    def train(epochs, path=None):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(2, 8), nn.Dropout(0.5), layer(), nn.Linear(8, 1))
        bnn = bayesify.bayesianize(net, "mean_field", likelihood=likelihoods.Gaussian(noise))

        def stop(_, history):
            if len(history) == epochs:
                raise Stop

        with contextlib.suppress(Stop):
            bayesify.fit(bnn, data, epochs=3, num_draws=2, seed=0, checkpoint=path, progress=False, callbacks=[stop])
        return bnn

    path = tmp_path / "run.safetensors"
    train(2, path)
    assert path.is_file()
    assert same(train(3, path), train(3))


def test_a_pause_between_interruption_and_resumption_is_not_counted(tmp_path, monkeypatch):
    """By a clock that goes on by a thousandth of a second whenever it is asked, and by 1,000 seconds in the pause."""
    current, clock, history = [stop_at(6)], itertools.count(), []
    monkeypatch.setattr(time, "perf_counter", lambda: next(clock) / 1000)
    options = arguments(kl_schedule=lambda t: current[0](t), checkpoint=Checkpointing(tmp_path / "run.safetensors", 1))
    for _ in range(2):
        with contextlib.suppress(Stop):
            history = bayesify.fit(network(), loader(), **options)
        current[0], clock = free_schedule, itertools.count(next(clock) + 1_000_000)
    assert 0 < sum(row["seconds"] for row in history) < 100


def test_a_run_resumed_within_an_epoch_begins_it(tmp_path, monkeypatch):
    """What begins an epoch, such as the look where tensors of captured steps lie, belongs to a resumed part of one too."""
    path, begun, current = tmp_path / "run.safetensors", [], [stop_at(6)]
    options = arguments(kl_schedule=lambda t: current[0](t), checkpoint=Checkpointing(path, 1))
    with pytest.raises(Stop):
        bayesify.fit(network(), loader(), **options)
    position = Checkpoint.read(path).position
    assert position["batches"] > 0
    current[0] = free_schedule
    plain = Step.begin
    monkeypatch.setattr(Step, "begin", lambda step: begun.append(step.taken) or plain(step))
    bayesify.fit(network(), loader(), **options)
    assert begun[0] == position["steps"]


def test_graphs_of_moved_tensors_leave_their_memory_to_nobody(monkeypatch):
    """CUDA refuses a capture into memory whose graphs are all gone."""
    pools = itertools.count()
    monkeypatch.setattr(cuda_graphs, "_capture", lambda run, generators, pool: (Graph(), taken.append(pool)))
    monkeypatch.setattr(captured_step, "side_stream", contextlib.nullcontext)
    monkeypatch.setattr(captured_step, "watch_waits", lambda: contextlib.nullcontext([]))
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: next(pools))
    monkeypatch.setattr(torch.cuda, "get_rng_state", lambda device: None)

    class Graph:
        def replay(self):
            pass

    taken, module = [], torch.nn.Linear(2, 1)
    steps = captured_step.CapturedSteps(lambda phase, batch: None, module, torch.Generator())
    for moves in (0, 1, 1):
        if moves:
            module.weight.data = module.weight.data.clone()
        steps.begin()
        for rows in (3, 3, 3, 3, 3, 2, 2, 2, 2, 2):
            steps("variational", Batch(torch.zeros(rows, 2), torch.zeros(rows)))
    assert taken == [0, 0, 1, 1, 2, 2]
    assert steps.reason == ""


X = torch.randn(24, 3, generator=torch.Generator().manual_seed(0))
Y = (X.sum(1) > 0).long()


class OwnNumpy:
    """Batches in an order of its own."""

    def __init__(self):
        self.parts = {"order": [np.random.default_rng(3)]}

    def order(self):
        return self.parts["order"][0].permutation(len(X)).tolist()

    def __iter__(self):
        order = self.order()
        yield from ((X[order[i : i + 8]], Y[order[i : i + 8]]) for i in range(0, len(X), 8))


class OwnMersenne(OwnNumpy):
    def __init__(self):
        self.parts = {"order": [np.random.Generator(np.random.MT19937(3))]}


class OwnTorch(OwnNumpy):
    def __init__(self):
        self.source = torch.Generator().manual_seed(3)

    def order(self):
        return torch.randperm(len(X), generator=self.source).tolist()


class Stream(OwnTorch, torch.utils.data.IterableDataset):
    def __iter__(self):
        return ((X[i], Y[i]) for i in self.order())


class Noisy(torch.utils.data.Dataset):
    def __init__(self):
        self.noise = torch.Generator().manual_seed(3)

    def __len__(self):
        return len(X)

    def __getitem__(self, i):
        return X[i] + 0.1 * torch.randn(X[i].shape, generator=self.noise), Y[i]


class OwnState(OwnNumpy):
    def __init__(self):
        self.parts = {"order": [np.random.RandomState(3)]}
        self.parts["order"][0].normal()  # it keeps the second of a pair of normal numbers

    def order(self):
        self.parts["order"][0].normal()
        return super().order()


class OwnPython(OwnNumpy):
    """In a slot, and asked for an odd number of normal numbers, of which Python makes two at a time."""

    __slots__ = ("source",)

    def __init__(self):
        self.source = random.Random(3)

    def order(self):
        self.source.gauss(0, 1)
        return self.source.sample(range(len(X)), len(X))


class OfTheModule(OwnNumpy):
    source = np.random.default_rng(3)

    def __init__(self):
        OfTheModule.source.bit_generator.state = np.random.default_rng(3).bit_generator.state
        SHUFFLES.seed(3)

    def order(self):
        order = OfTheModule.source.permutation(len(X)).tolist()
        SHUFFLES.shuffle(order)
        return order


SHUFFLES = random.Random(3)


def with_transform(kind):
    """A loader whose way to make batches holds a generator: in a closure, an argument or an object with such a method."""
    source = np.random.RandomState(3)

    def close(rows):
        x, y = torch.utils.data.default_collate(rows)
        return x + torch.from_numpy(source.normal(size=x.shape)).float(), y

    class Maker:
        def __init__(self):
            self.inner = close

        def make(self, rows):
            return self.inner(rows)

    bound = functools.partial(lambda change, rows: change(rows), close)
    function = {"closure": close, "partial": bound, "method": Maker().make}[kind]
    return DataLoader(list(zip(X, Y, strict=True)), 8, shuffle=True, collate_fn=function)


@pytest.mark.thin(3)
@pytest.mark.parametrize(
    "make",
    [
        OwnNumpy,
        OwnMersenne,
        OwnTorch,
        OwnState,
        OwnPython,
        OfTheModule,
        lambda: DataLoader(Stream(), 8),
        lambda: DataLoader(Noisy(), 8, shuffle=True),
        lambda: DataLoader(list(zip(X, Y, strict=True)), batch_sampler=BatchSampler(OwnPython().order(), 8, False)),
        *(functools.partial(with_transform, kind) for kind in ("closure", "partial", "method")),
    ],
)
def test_generators_anywhere_in_a_loader_are_set_back(tmp_path, make):
    path = tmp_path / "run.safetensors"

    def run(stop=None, **options):
        bnn, calls = network(), itertools.count()

        def pause(*_):
            if next(calls) == stop:
                raise Stop

        bnn.network.register_forward_pre_hook(pause)
        bayesify.fit(bnn, make(), epochs=3, num_data=len(X), seed=4, progress=False, **options)
        return bnn

    with pytest.raises(Stop):
        run(stop=4, checkpoint=Checkpointing(path, 1))
    assert same(run(checkpoint=Checkpointing(path, 1)), run())


def test_resume_with_worker_processes(tmp_path):
    path = tmp_path / "run.safetensors"
    whole = network()
    bayesify.fit(whole, loader(workers=1), **arguments(epochs=1, map_epochs=0))
    resumed = network()

    def interrupt(bnn, history):
        raise Stop

    options = arguments(epochs=1, map_epochs=0, checkpoint=Checkpointing(path, 1), callbacks=[interrupt])
    with pytest.raises(Stop):
        bayesify.fit(network(), loader(workers=1), **options)
    assert Checkpoint.read(path).position["batches"] == 6  # all of them, before the epoch was closed
    history = bayesify.fit(resumed, loader(workers=1), **arguments(epochs=1, map_epochs=0, checkpoint=path))
    assert same(resumed, whole)
    assert len(history) == 1


def test_a_finished_run_is_read_and_a_longer_one_goes_on(tmp_path):
    path = tmp_path / "run.safetensors"
    short, again, longer, whole = (network() for _ in range(4))
    first = bayesify.fit(short, loader(), **arguments(epochs=2, checkpoint=path))
    second = bayesify.fit(again, loader(), **arguments(epochs=2, checkpoint=path))
    assert first == second  # also the seconds: nothing ran
    assert same(short, again)
    bayesify.fit(longer, loader(), **arguments(checkpoint=path))
    bayesify.fit(whole, loader(), **arguments())
    assert same(longer, whole)
    bayesify.fit(again, loader(), **arguments(epochs=1, checkpoint=Checkpointing(path, resume=False)))
    assert Checkpoint.read(path).position["epoch"] == 2


def test_early_stopping_survives_a_resume(tmp_path):
    """Divergence after the first good epochs: the best state, not the last, comes back, in both runs."""
    path = tmp_path / "run.safetensors"
    options = {"optimizer": lambda p: torch.optim.SGD(p, lr=0.3), "scheduler": None, "patience": 2, "epochs": 30}
    whole = network()
    expected = bayesify.fit(whole, loader(), **arguments(**options))
    assert len(expected) < 31
    stopped, resumed = network(), network()

    def interrupt(bnn, history):
        if len(history) == len(expected) - 1:
            raise Stop

    with pytest.raises(Stop):
        bayesify.fit(stopped, loader(), **arguments(**options, checkpoint=path, callbacks=[interrupt]))
    history = bayesify.fit(resumed, loader(), **arguments(**options, checkpoint=path))
    assert numbers(history) == numbers(expected)
    assert Checkpoint.read(path).position["waited"] == 2  # the best epoch was before the interruption
    assert same(resumed, whole)
    assert history.findings.codes == expected.findings.codes


def test_an_infinite_validation_score_survives_a_resume(tmp_path):
    """float32 has no finite square of 1e25; the score of such a target is infinite, and the run goes on."""
    path, x = tmp_path / "run.safetensors", torch.randn(8, 3, generator=torch.Generator().manual_seed(0))
    options = {"validation": [(x, torch.full((8, 1), 1e25))], "patience": 5, "checkpoint": path, "progress": False}
    for epochs in (1, 2):
        bnn = bayesify.bayesianize(
            torch.nn.Linear(3, 1), "mean_field", likelihood=likelihoods.Gaussian(0.01, learn=False)
        )
        history = bayesify.fit(bnn, [(x, x[:, :1])], epochs=epochs, seed=0, **options)
    assert [row["validation_nll"] for row in history] == [float("inf")] * 2


def run_in_child(path, connection):
    """The run, in a process of its own that asks for each batch."""

    class Telling:
        def __iter__(self):
            for batch in loader():
                connection.send("batch")
                connection.recv()
                yield batch

    try:
        bayesify.fit(network(), Telling(), **arguments(checkpoint=Checkpointing(path, 1), num_data=44))
    except KeyboardInterrupt as stop:
        connection.send(str(stop))


def start_child(path, batches):
    """Start the run and let it have some batches; it waits for more, however slow the machine is."""
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()
    process = context.Process(target=run_in_child, args=(path, theirs))
    process.start()
    theirs.close()  # so that the end of the child is the end of what it says
    for _ in range(batches):
        assert ours.recv() == "batch"
        ours.send("go on")
    return process, ours


@pytest.mark.skipif(sys.platform != "linux", reason="forks")
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
@forks
def test_killed_and_interrupted_runs_continue_to_the_same_bits(tmp_path):
    """Killed without warning at five moments and interrupted once; then the result of an undisturbed run."""
    whole = network()
    expected = bayesify.fit(whole, loader(), **arguments())
    path = tmp_path / "run.safetensors"
    delays = random.Random(0)
    for batches in (3, 3, 5, 9, 11):
        process, _ = start_child(path, batches)
        time.sleep(0.02 * delays.random())
        process.kill()
        process.join()
        assert process.exitcode == -signal.SIGKILL
    process, messages = start_child(path, 3)
    os.kill(process.pid, signal.SIGINT)
    for _ in range(20):  # more than it takes to come to where it was, and to finish a step
        messages.send("go on")
    process.join()
    assert process.exitcode == 0
    told = []
    with contextlib.suppress(EOFError, ConnectionResetError):  # it left "go on" unread
        while messages.poll():
            told.append(messages.recv())
    assert "it is stored in" in told[-1]
    assert len(told) < 6  # it did not run to the end
    resumed = network()
    history = bayesify.fit(resumed, loader(), **arguments(checkpoint=path, num_data=44))
    assert same(resumed, whole)
    assert numbers(history) == numbers(expected)
    assert [entry.name for entry in tmp_path.iterdir()] == ["run.safetensors"]


def test_ctrl_c_finishes_the_step_and_keeps_the_callers_handler(tmp_path):
    path = tmp_path / "run.safetensors"
    before = signal.getsignal(signal.SIGINT)

    class Interrupting:
        def __iter__(self):
            for index, batch in enumerate(loader()):
                if index == 3:
                    signal.raise_signal(signal.SIGINT)
                yield batch

    bnn = network().eval()
    with pytest.raises(KeyboardInterrupt, match="epoch 1"):
        bayesify.fit(bnn, Interrupting(), **arguments(num_data=44, checkpoint=path))
    assert signal.getsignal(signal.SIGINT) is before
    assert not bnn.training
    assert Checkpoint.read(path).position["batches"] == 4  # two steps of two batches
    resumed, whole = network(), network()
    bayesify.fit(resumed, loader(), **arguments(num_data=44, checkpoint=path))
    bayesify.fit(whole, loader(), **arguments())
    assert same(resumed, whole)


def test_a_second_ctrl_c_interrupts_at_once():
    class Twice:
        def __iter__(self):
            signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGINT)
            raise AssertionError("not reached")
            yield

    with pytest.raises(KeyboardInterrupt) as caught:
        bayesify.fit(network(), Twice(), **arguments(num_data=44))
    assert "fit" not in str(caught.value)


def test_fit_works_outside_the_main_thread():
    results = []
    thread = threading.Thread(target=lambda: results.append(bayesify.fit(network(), loader(), **arguments(epochs=1))))
    thread.start()
    thread.join()
    assert len(results[0]) == 2


@pytest.mark.thin(3)
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"seed": 12}, "seed=11, but this run has 12"),
        ({"steps": Steps(clip_norm=5.0)}, "accumulate=2"),
        ({"map_epochs": 0}, "map_epochs=1"),
        ({"kl_schedule": None}, "zero_epochs=1"),
        ({"optimizer": None}, "optimizer='SGD'"),
        ({"optimizer": sgd(lr=0.1)}, "learning_rate=0.05, but this run has 0.1"),
        ({"optimizer": sgd(momentum=0.8)}, "momentum=0.9, but this run has 0.8"),
        ({"optimizer": sgd(weight_decay=0.1)}, "weight_decay=0, but this run has 0.1"),
        ({"optimizer": lambda parameters: sgd()(list(parameters)[:-1])}, "parameters of the optimizer="),
    ],
)
def test_other_settings_are_refused_and_change_nothing(tmp_path, change, message):
    path = tmp_path / "run.safetensors"
    bayesify.fit(network(), loader(), **arguments(epochs=1, checkpoint=path))
    stored, bnn = path.read_bytes(), network()
    with pytest.raises(ValueError, match=message):
        bayesify.fit(bnn, loader(), **arguments(checkpoint=path) | change)
    assert same(bnn, network())
    assert path.read_bytes() == stored


def test_the_falling_rate_goes_on_where_it_was(tmp_path):
    """Stopped within an epoch and continued, and without a stop: bit-identical; the rate is a function of the step alone."""
    options = {"optimizer": None, "scheduler": None, "learning_rate": 0.1, "epochs": 3, "map_epochs": 0}
    path = tmp_path / "run.safetensors"
    whole, stopped = network(), network()
    expected = bayesify.fit(whole, loader(), **arguments(**options, kl_schedule=free_schedule))
    schedule = stop_at(5)
    schedule.__qualname__ = free_schedule.__qualname__
    checkpoint = Checkpointing(path, every=1)
    with pytest.raises(Stop):
        bayesify.fit(stopped, loader(), **arguments(**options, kl_schedule=schedule, checkpoint=checkpoint))
    history = bayesify.fit(stopped, loader(), **arguments(**options, kl_schedule=free_schedule, checkpoint=path))
    assert same(stopped, whole)
    assert history.column("learning_rate") == expected.column("learning_rate")
    assert expected.column("learning_rate")[-1] < 0.02


def test_another_rate_of_the_default_optimizer_is_refused(tmp_path):
    options = {"optimizer": None, "scheduler": "constant", "checkpoint": tmp_path / "run.safetensors"}
    bayesify.fit(network(), loader(), **arguments(epochs=1, learning_rate=0.1, **options))
    with pytest.raises(ValueError, match=r"learning_rate=0\.1, but this run has 0\.001"):
        bayesify.fit(network(), loader(), **arguments(**options))
    adam = lambda parameters: torch.optim.Adam(parameters, lr=0.1, betas=(0.8, 0.999))  # noqa: E731
    with pytest.raises(ValueError, match=r"betas=\[0\.9, 0\.999\], but this run has \[0\.8, 0\.999\]"):
        bayesify.fit(network(), loader(), **arguments(**options | {"optimizer": adam}))


@pytest.mark.parametrize("plateau", [False, True])
def test_an_optimizer_that_was_used_continues(tmp_path, plateau):
    """Interrupted and called again with the same objects: the learning rate that the scheduler made is not another one."""
    if plateau:
        make = lambda optimizer: torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=9)  # noqa: E731
    else:
        make = lambda optimizer: torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)  # noqa: E731
    whole, bnn = network(), network()
    expected = bayesify.fit(whole, loader(), **arguments(optimizer=sgd(), scheduler=make))
    optimizer = sgd()(bnn.parameters())
    scheduler = make(optimizer)
    options = arguments(optimizer=optimizer, scheduler=scheduler, checkpoint=tmp_path / "run.safetensors")

    def interrupt(bnn, history):
        if len(history) == 3:
            raise Stop

    with pytest.raises(Stop):
        bayesify.fit(bnn, loader(), **options | {"callbacks": [interrupt]})
    assert optimizer.param_groups[0]["lr"] < 0.05
    history = bayesify.fit(bnn, loader(), **options)
    assert numbers(history) == numbers(expected)
    assert same(bnn, whole)
    with pytest.raises(ValueError, match="learning_rate"):  # what was given first is still what is compared
        bayesify.fit(network(), loader(), **options | {"optimizer": sgd(lr=0.1), "scheduler": make})


def test_another_choice_of_prior_likelihood_or_posterior_is_refused(tmp_path):
    """Networks of the same tensors that are not the same model."""
    path = tmp_path / "run.safetensors"
    net = torch.nn.Linear(3, 2)

    def fit(posterior=None, likelihood=None, prior=None):
        bnn = bayesify.bayesianize(
            net,
            posterior or posteriors.MeanField(),
            likelihood=likelihood or likelihoods.Gaussian(0.1),
            prior=prior or priors.Neal(),
        )
        data = [(torch.zeros(4, 3), torch.zeros(4, 2))]
        return bayesify.fit(bnn, data, epochs=1, seed=0, progress=False, checkpoint=path)

    first = fit()
    assert fit() == first
    for other, message in (
        ({"prior": priors.Standard()}, "prior.name='neal', but this run has 'standard'"),
        ({"prior": priors.Neal(scale=2.0)}, "prior.scale=1.0, but this run has 2.0"),
        ({"likelihood": likelihoods.Gaussian(0.2)}, "likelihood.noise=0.1, but this run has 0.2"),
        ({"posterior": posteriors.MeanField(max_std=0.5)}, "posterior.max_std=None, but this run has 0.5"),
        ({"posterior": {"*": posteriors.MeanField()}}, "posterior"),
    ):
        with pytest.raises(ValueError, match=message):
            fit(**other)


def test_another_batch_size_is_refused(tmp_path):
    path = tmp_path / "run.safetensors"
    data = loader().dataset
    bayesify.fit(network(), loader(), **arguments(epochs=1, checkpoint=path))
    with pytest.raises(ValueError, match="batch_size=8, but this run has 11"):
        bayesify.fit(network(), DataLoader(data, batch_size=11, shuffle=True), **arguments(checkpoint=path))
    sampled = DataLoader(data, batch_sampler=BatchSampler(RandomSampler(data), 11, drop_last=False))
    with pytest.raises(ValueError, match="batch_size=8, but this run has 11"):
        bayesify.fit(network(), sampled, **arguments(checkpoint=path))


def test_fewer_epochs_than_are_stored_are_refused(tmp_path):
    path = tmp_path / "run.safetensors"
    bayesify.fit(network(), loader(), **arguments(epochs=2, checkpoint=path))
    bnn = network()
    with pytest.raises(ValueError, match=r"holds 3 epochs, but this run has 2 \(epochs= and map_epochs= together\)"):
        bayesify.fit(bnn, loader(), **arguments(epochs=1, checkpoint=path))
    assert same(bnn, network())

    def schedule(t):
        if t > 1:
            raise Stop
        return 1.0

    options = arguments(kl_schedule=schedule, checkpoint=Checkpointing(path, 1, resume=False))
    with pytest.raises(Stop):
        bayesify.fit(bnn, loader(), **options | {"map_epochs": 0})
    assert Checkpoint.read(path).position["batches"] == 2  # of the second epoch
    with pytest.raises(ValueError, match="holds 1 epochs and part of the next, but this run has 1"):
        bayesify.fit(bnn, loader(), **options | {"map_epochs": 0, "epochs": 1, "checkpoint": path})


def test_damaged_and_foreign_checkpoints_are_refused(tmp_path):
    path = tmp_path / "run.safetensors"
    bayesify.fit(network(), loader(), **arguments(epochs=1, checkpoint=path))
    whole = path.read_bytes()
    bnn = network()
    for content, message in (
        (whole[: len(whole) // 2], "truncated"),
        (b"", "truncated"),
        (whole[:-3] + b"abc", "checksum"),
        (b"not a checkpoint at all", "truncated"),
    ):
        path.write_bytes(content)
        with pytest.raises(ValueError, match=message):
            bayesify.fit(bnn, loader(), **arguments(checkpoint=path))
    bayesify.save(bnn, path)
    with pytest.raises(ValueError, match="contains a model, not a checkpoint"):
        bayesify.fit(bnn, loader(), **arguments(checkpoint=path))
    path.write_bytes(whole)
    other = bayesify.bayesianize(torch.nn.Linear(3, 2), "mean_field", likelihood="categorical")
    with pytest.raises(ValueError, match="another network"):
        bayesify.fit(other, loader(), **arguments(checkpoint=path))
    with pytest.raises(ValueError, match="does not exist"):
        bayesify.fit(bnn, loader(), **arguments(checkpoint=tmp_path / "nowhere" / "run.safetensors"))
    assert same(bnn, network())


def test_a_network_in_channels_last_resumes_with_its_optimizer(tmp_path):
    """Files hold contiguous numbers; fused Adam reads parameters and state in the order in which they lie in memory."""
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(12, 2, 6, 6, generator=generator), torch.randint(3, (12,), generator=generator)
    found = []
    for stops in ([4], [2, 4]):
        for epochs in stops:
            torch.manual_seed(0)
            net = torch.nn.Sequential(torch.nn.Conv2d(2, 3, 3), torch.nn.Flatten(), torch.nn.Linear(48, 3))
            net = net.to(memory_format=torch.channels_last)
            bnn = bayesify.bayesianize(net, "mean_field", likelihood=likelihoods.Categorical())
            path = tmp_path / f"{len(stops)}.safetensors"
            options = {"checkpoint": path, "seed": 0, "progress": False, "scheduler": "constant"}
            bayesify.fit(bnn, [(x, y)], num_data=12, epochs=epochs, learning_rate=0.1, **options)
        assert any(not value.is_contiguous() for value in bnn.parameters())
        found.append(bnn)
    assert same(*found)
