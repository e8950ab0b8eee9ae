"""Same seed, same result; a run that was stopped continues to the bit-identical result."""

from __future__ import annotations

import contextlib
import functools
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
from training.runs import arguments, loader, network, numbers, same

import bayesify
from bayesify.checkpoints import Checkpoint


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


@pytest.mark.parametrize("own_generator", [False, True])
@pytest.mark.parametrize("step", [1, 2, 3, 4, 7, 9])
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
            **arguments(kl_schedule=Named(stop_at(step)), checkpoint=path, checkpoint_every=1),
        )
    assert Checkpoint.read(path).position["steps"] == 3 + step - 1 - (step > 4) - (step > 8)
    torch.manual_seed(99)
    resumed = network()
    generator_moved = loader(own_generator)
    history = bayesify.fit(
        resumed, generator_moved, **arguments(kl_schedule=free_schedule, checkpoint=path, checkpoint_every=1, seed=None)
    )
    assert same(resumed, whole)
    assert numbers(history) == numbers(expected)


def test_resume_with_worker_processes(tmp_path):
    path = tmp_path / "run.safetensors"
    whole = network()
    bayesify.fit(whole, loader(workers=1), **arguments(epochs=1, map_epochs=0))
    resumed = network()

    def interrupt(bnn, history):
        raise Stop

    options = arguments(epochs=1, map_epochs=0, checkpoint=path, checkpoint_every=1, callbacks=[interrupt])
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
    bayesify.fit(again, loader(), **arguments(epochs=1, checkpoint=path, resume=False))
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


def run_in_child(path, pause, connection):
    """The run, in a process of its own that tells of each batch."""

    class Telling:
        def __iter__(self):
            for batch in loader():
                time.sleep(pause)
                connection.send("batch")
                yield batch

    try:
        bayesify.fit(network(), Telling(), **arguments(checkpoint=path, checkpoint_every=1, num_data=44))
    except KeyboardInterrupt as stop:
        connection.send(str(stop))


def start_child(path, pause, batches):
    """Start the run and wait until some batches were asked for."""
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()
    process = context.Process(target=run_in_child, args=(path, pause, theirs))
    process.start()
    for _ in range(batches):
        assert ours.poll(60)
        assert ours.recv() == "batch"
    return process, ours


@pytest.mark.skipif(sys.platform != "linux", reason="forks")
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_killed_and_interrupted_runs_continue_to_the_same_bits(tmp_path):
    """Killed without warning at five moments and interrupted once; then the result of an undisturbed run."""
    whole = network()
    expected = bayesify.fit(whole, loader(), **arguments())
    path = tmp_path / "run.safetensors"
    delays = random.Random(0)
    for batches, pause in ((3, 0.02), (3, 0.0), (5, 0.001), (9, 0.0), (11, 0.0)):
        process, _ = start_child(path, pause, batches)
        time.sleep(0.02 * delays.random())
        process.kill()
        process.join()
        assert process.exitcode == -signal.SIGKILL
    process, messages = start_child(path, 0.05, 3)
    os.kill(process.pid, signal.SIGINT)
    process.join()
    assert process.exitcode == 0
    told = []
    with contextlib.suppress(EOFError):
        while messages.poll():
            told.append(messages.recv())
    assert "the run is stored in" in told[-1]
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


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"seed": 12}, "seed=11, this run has 12"),
        ({"accumulate": 1}, "accumulate=2"),
        ({"map_epochs": 0}, "map_epochs=1"),
        ({"kl_schedule": None}, "zero_epochs=1"),
        ({"optimizer": None}, "optimizer='SGD'"),
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


def test_damaged_and_foreign_checkpoints_are_refused(tmp_path):
    path = tmp_path / "run.safetensors"
    bayesify.fit(network(), loader(), **arguments(epochs=1, checkpoint=path))
    whole = path.read_bytes()
    bnn = network()
    for content, message in (
        (whole[: len(whole) // 2], "cut short"),
        (b"", "cut short"),
        (whole[:-3] + b"abc", "checksum"),
        (b"not a checkpoint at all", "cut short"),
    ):
        path.write_bytes(content)
        with pytest.raises(ValueError, match=message):
            bayesify.fit(bnn, loader(), **arguments(checkpoint=path))
    bayesify.save(bnn, path)
    with pytest.raises(ValueError, match="holds a model, not a checkpoint"):
        bayesify.fit(bnn, loader(), **arguments(checkpoint=path))
    path.write_bytes(whole)
    other = bayesify.bayesianize(torch.nn.Linear(3, 2), "mean_field", likelihood="categorical")
    with pytest.raises(ValueError, match="another network"):
        bayesify.fit(other, loader(), **arguments(checkpoint=path))
    with pytest.raises(ValueError, match="does not exist"):
        bayesify.fit(bnn, loader(), **arguments(checkpoint=tmp_path / "nowhere" / "run.safetensors"))
    assert same(bnn, network())
