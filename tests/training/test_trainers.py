"""Every trainer goes by one loop: interrupted anywhere, it continues to the same bits, and never under other conditions."""

import contextlib
import os
import random
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import bayesify
from bayesify import baselines, deep_gp, likelihoods, posteriors
from bayesify.training import Checkpointing

ROWS, SIZE, EPOCHS = 24, 8, 3
STEPS = ROWS // SIZE * EPOCHS


def data(shift=0.0):
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(ROWS, 3, generator=generator)
    return x + shift, x.sum(1, keepdim=True).sin()


def loader(own=True, shift=0.0, size=SIZE):
    generator = torch.Generator().manual_seed(9) if own else None
    return DataLoader(TensorDataset(*data(shift)), batch_size=size, shuffle=True, generator=generator)


def net(width=4):
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(3, width), nn.BatchNorm1d(width), nn.Tanh(), nn.Dropout(0.1), nn.Linear(width, 1))


def bayesian(posterior, width=4):
    torch.manual_seed(4)
    return bayesify.bayesianize(net(width), posterior, likelihood=likelihoods.Gaussian(0.1))


def swag(batches, rate=0.05, width=4, **options):
    model = baselines.SWAG(net(width), likelihoods.Gaussian(0.1), rank=3)
    model.fit(batches, EPOCHS, rate, collect_every=2, **options)
    state = {f"network.{name}": value for name, value in model.network.state_dict().items()}
    moments = {"mean": model.mean, "squares": model.squared_deviations, "deviations": model.deviations}
    state |= {f"{kind}.{name}": value for kind, values in moments.items() for name, value in values.items()}
    return state, model.history


def vogn(batches, rate=0.05, width=4, **options):
    trainer = baselines.VOGN(bayesian({"Linear": posteriors.MeanField()}, width), learning_rate=rate)
    trainer.fit(batches, EPOCHS, schedule=lambda share: 1 - share, **options)
    return dict(trainer.bnn.state_dict()), trainer.history


def ivon(batches, rate=0.05, width=4, **options):
    trainer = baselines.IVON(bayesian({"Linear": posteriors.MeanField()}, width), learning_rate=rate, decay=0.9)
    trainer.fit(batches, EPOCHS, schedule=lambda share: 1 - share, **options)
    return dict(trainer.bnn.state_dict()), trainer.history


def nng(batches, rate=0.05, width=4, **options):
    made = bayesian({"Linear": posteriors.MatrixNormal()}, width)
    trainer = baselines.NoisyKFAC(made, learning_rate=rate, inverse_every=2)
    trainer.fit(batches, EPOCHS, **options)
    return dict(trainer.bnn.state_dict()), trainer.history


def members(batches, rate=0.05, width=4, **options):
    bnn = bayesian(posteriors.Ensemble(2), width)
    history = baselines.fit_members(bnn, batches, EPOCHS, learning_rate=rate, **options)
    return dict(bnn.state_dict()), history


def plain(batches, rate=0.05, width=4, **options):
    bnn = bayesian(posteriors.MeanField(local_reparameterization=True), width)
    history = bayesify.fit(bnn, batches, epochs=EPOCHS, learning_rate=rate, **options)
    return dict(bnn.state_dict()), history


def process(batches, rate=0.05, width=4, **options):
    gp = deep_gp.DeepGP(*data(), depth=2, width=width - 2, num_inducing=5)
    history = gp.fit(batches, epochs=EPOCHS, learning_rate=rate, **options)
    return dict(gp.state_dict()), history


def functions(batches, rate=0.05, width=4, **options):
    torch.manual_seed(4)
    smooth = nn.Sequential(nn.Linear(3, width), nn.Tanh(), nn.Linear(width, 1))
    bnn = bayesify.bayesianize(smooth, posteriors.MeanField(), likelihood=likelihoods.Gaussian(0.1))
    model = bayesify.FunctionSpaceVI(bnn, context=bayesify.Box(-torch.ones(3), torch.ones(3), 4))
    history = model.fit(batches, epochs=EPOCHS, learning_rate=rate, **options)
    return dict(bnn.state_dict()), history


TRAINERS = {
    "fit": plain,
    "SWAG": swag,
    "VOGN": vogn,
    "IVON": ivon,
    "NoisyKFAC": nng,
    "fit_members": members,
    "DeepGP": process,
    "FunctionSpaceVI": functions,
}


def run(name, batches=None, **options):
    return TRAINERS[name](batches if batches is not None else loader(), **{"seed": 1, "progress": False} | options)


def numbers(history):
    return [{key: value for key, value in row.items() if key != "seconds"} for row in history]


def same(first, second):
    states, rows = zip(first, second, strict=True)
    equal = all(torch.equal(value, states[1][name]) for name, value in states[0].items())
    return equal and states[0].keys() == states[1].keys() and numbers(rows[0]) == numbers(rows[1])


class Stop(BaseException):
    """No `Exception`: what `fit` reads after its last step may fail without ending it."""


class Stopping:
    """A loader that ends the run before one of its batches, with the generators of the one it stands for."""

    def __init__(self, batches, at):
        self.batches, self.left = batches, at
        self.dataset, self.batch_size, self.sampler = batches.dataset, batches.batch_size, batches.sampler
        self.generator = batches.generator

    def __len__(self):
        return len(self.batches)

    def __iter__(self):
        for batch in self.batches:
            self.left -= 1
            if self.left < 0:
                raise Stop
            yield batch


@pytest.mark.thin(2)
@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("name", TRAINERS)
def test_interrupted_twice_at_random_steps(tmp_path, name, own):
    """Stored after every step; the loader has its own generator, or not."""
    chance = random.Random(f"{name} {own}")
    path = Checkpointing(tmp_path / "run.safetensors", every=1)
    first = chance.randrange(1, STEPS - 1)
    for at in (first, first % (ROWS // SIZE) + chance.randrange(1, 3)):  # batches that were done are read once more
        with contextlib.suppress(Stop):
            run(name, Stopping(loader(own), at), checkpoint=path)
    assert same(run(name, loader(own), checkpoint=path), run(name, loader(own)))
    assert [entry.name for entry in tmp_path.iterdir()] == ["run.safetensors"]


@pytest.mark.thin(2)
@pytest.mark.parametrize("name", TRAINERS)
def test_other_conditions_are_refused(tmp_path, name):
    path = tmp_path / "run.safetensors"
    with pytest.raises(Stop):
        run(name, Stopping(loader(), 4), checkpoint=path)
    stored = path.read_bytes()
    for options, message in (
        ({"seed": 2}, "seed=1, but this run has 2"),
        ({"rate": 0.01}, r"learning_rate.*=0\.05, but this run has 0\.01"),
        ({"width": 5}, "another network|widths"),
        ({"batches": loader(shift=1.0)}, "different data"),
        ({"batches": loader(own=False)}, "generators of the loader=1, but this run has 0"),
        ({"batches": loader(size=6)}, "batch_size=8, but this run has 6"),
    ):
        with pytest.raises(ValueError, match=message):
            run(name, **{"checkpoint": path} | options)
    other = "VOGN" if name != "VOGN" else "SWAG"
    with pytest.raises(ValueError, match=r"another network|this run has"):
        run(other, checkpoint=path)
    assert path.read_bytes() == stored


@pytest.mark.thin(4)
@pytest.mark.parametrize("name", TRAINERS)
def test_a_seed_is_an_integer(name):
    assert same(run(name, seed=np.int64(1)), run(name, seed=1))
    for seed in (True, 1.0, "1", np.float64(1), [1]):
        with pytest.raises(TypeError, match=r"seed=.*; give an integer"):
            run(name, seed=seed)


def test_a_numpy_seed_is_continued_without_naming_it(tmp_path):
    path = tmp_path / "run.safetensors"
    with pytest.raises(Stop):
        run("fit", Stopping(loader(), 4), seed=np.int64(1), checkpoint=path)
    assert same(run("fit", seed=None, checkpoint=path), run("fit", seed=1))


def test_data_that_were_mended_in_one_row_are_the_same_data(tmp_path):
    path = tmp_path / "run.safetensors"
    with pytest.raises(Stop):
        run("fit", Stopping(loader(), 4), checkpoint=path)
    mended = loader()
    mended.dataset.tensors[0][0] += 1
    run("fit", mended, checkpoint=path)


class Stream:
    """Batches without indices."""

    def __init__(self, shift=0.0, noise=None):
        self.shift, self.noise = shift, noise

    def __iter__(self):
        x, y = data(self.shift)
        for start in range(0, ROWS, SIZE):
            rows = slice(start, start + SIZE)
            yield x[rows] + (self.noise.normal() if self.noise is not None else 0), y[rows]


def test_streams_are_known_by_their_first_batch_where_it_is_always_the_same(tmp_path):
    path = tmp_path / "run.safetensors"
    run("fit", Stream(), checkpoint=path)
    with pytest.raises(ValueError, match="different data"):
        run("fit", Stream(1.0), checkpoint=path)
    path = tmp_path / "other.safetensors"
    run("fit", Stream(noise=np.random.default_rng(0)), checkpoint=path)  # which is set back, so that the batch is known
    with pytest.raises(ValueError, match="different data"):
        run("fit", Stream(1.0, np.random.default_rng(0)), checkpoint=path)
    path = tmp_path / "old_kind.safetensors"
    run("fit", Stream(noise=np.random.RandomState(0)), checkpoint=path)  # and so is this one
    with pytest.raises(ValueError, match="different data"):
        run("fit", Stream(1.0, np.random.RandomState(0)), checkpoint=path)


def test_checkpoints_of_other_versions_and_with_other_fields(tmp_path):
    from bayesify.storage import tensor_files

    path = tmp_path / "run.safetensors"
    run("fit", checkpoint=path)
    header, tensors = tensor_files.read(path, "checkpoint")
    kind = header.pop("kind")
    for change in ({"extra": 1}, {"history": None}):
        changed = {key: value for key, value in (header["run"] | change).items() if value is not None}
        tensor_files.write(path, kind, {"library_version": "9.9", "run": changed}, tensors)
        message = f"written by bayesify 9.9, .*{next(iter(change))}.*; continue with the version that wrote it, or start again"
        with pytest.raises(ValueError, match=message):
            run("fit", checkpoint=path)
    name = next(name for name in tensors if name.endswith("mean_value.0/weight"))
    tensor_files.write(path, kind, header, {**tensors, name: tensors[name] * float("nan")})
    with pytest.raises(ValueError, match=r"is not finite; use an earlier copy of the file, or start again"):
        run("fit", checkpoint=path)


SCRIPT = """
import os, random, signal, sys, time
sys.path[:0] = [{tests!r}, {tests!r} + "/support"]
import torch
torch.set_num_threads(1)
from training import test_trainers as case
from bayesify.training import Checkpointing

class Slow(case.Stopping):
    def __iter__(self):
        for batch in self.batches:
            time.sleep(0.01)
            yield batch

def in_child(work, limit=None):
    child = os.fork()
    if child == 0:
        try:
            os._exit(0 if work() is not False else 1)
        except BaseException as error:
            print(error, flush=True)
            os._exit(2)
    if limit is not None:
        time.sleep(limit)
        os.kill(child, signal.SIGKILL)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

def train():
    case.run({name!r}, Slow(case.loader(), 0), checkpoint=Checkpointing({path!r}, every=1))

def is_the_same():
    return case.same(case.run({name!r}, checkpoint={path!r}), case.run({name!r}))

start = time.perf_counter()
assert in_child(train) == 0
whole, kills, chance = time.perf_counter() - start, 0, random.Random({name!r})
os.remove({path!r})
while kills < {kills}:
    code = in_child(train, whole * chance.random())
    kills += code == -signal.SIGKILL
    assert code in (0, -signal.SIGKILL), code
    if code == 0 or chance.random() < 0.2:
        assert in_child(is_the_same) == 0
        os.remove({path!r})
assert in_child(is_the_same) == 0
print("killed", kills, flush=True)
"""


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="forks")
@pytest.mark.parametrize("name", TRAINERS)
def test_killed_at_random(tmp_path, name):
    """Killed at once, at random moments, thirty times: what continues comes to the bits of what was never killed."""
    path = tmp_path / "run.safetensors"
    script = SCRIPT.format(tests=str(Path(__file__).parents[1]), name=name, path=str(path), kills=30)
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": ""}  # forked children cannot train where torch sees a GPU
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "killed 30" in done.stdout
    assert [entry.name for entry in tmp_path.iterdir()] == ["run.safetensors"]
