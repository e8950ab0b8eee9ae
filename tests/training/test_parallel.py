"""Several processes against one: the same result up to rounding, whatever the batch sizes."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from forks import forks
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import bayesify
from bayesify import likelihoods, posteriors
from bayesify.training import Checkpointing, Devices, Steps
from bayesify.training.checkpoints import Checkpoint
from bayesify.training.distributed import Processes

pytest.importorskip("lightning_fabric")
TWO, FORKED = Steps(accumulate=2, clip_norm=1.0), Devices(2, "cpu", launch="fork")
X = torch.randn(22, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
Y = X.sum(1, keepdim=True).tanh()
W = torch.rand(22, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def network(local=False):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        net = nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 1)).double()
    choice = posteriors.MeanField(init_std=0.2, local_reparameterization=local)
    return bayesify.bayesianize(net, choice, likelihood=likelihoods.Gaussian(0.1))


def loader(size=7):
    """Batches of 7, 7, 7 and 1: uneven halves, and a last batch that leaves one process without an example."""
    return DataLoader(TensorDataset(X, Y, W), batch_size=size, shuffle=True)


def options(**changes):
    defaults = {"epochs": 2, "map_epochs": 1, "learning_rate": 0.05, "seed": 3, "progress": False, "num_draws": 2}
    defaults["scheduler"] = "constant"  # runs are continued to more epochs
    return defaults | {"validation": [(X, Y)], "steps": Steps(clip_norm=1.0)} | changes


def close(a, b):
    for name, value in b.named_parameters():
        torch.testing.assert_close(a.get_parameter(name), value, rtol=1e-7, atol=1e-9)


class Stream(IterableDataset):
    def __iter__(self):
        yield from zip(X, Y, strict=True)


@pytest.mark.skipif(sys.platform != "linux", reason="forks")
@pytest.mark.filterwarnings("ignore")  # of Fabric, about forking and about networks without unused parameters
@forks
def test_two_processes_give_the_result_of_one(tmp_path):
    """Float64: the parts of a batch are added in another order, nothing else differs. Then the same over a checkpoint."""
    one, two = network(), network()
    expected = bayesify.fit(one, loader(), **options(average=0.8, steps=TWO))
    path = tmp_path / "run.safetensors"
    bayesify.fit(two, loader(), **options(average=0.8, steps=TWO, device=FORKED, checkpoint=path, epochs=1))
    resumed = network()
    history = bayesify.fit(resumed, loader(), **options(average=0.8, steps=TWO, device=FORKED, checkpoint=path))
    close(resumed, one)
    for ours, theirs in zip(history, expected, strict=True):
        for key in ("nll", "kl", "elbo", "validation_nll", "validation_rmse"):
            assert ours[key] == pytest.approx(theirs[key], rel=1e-7)


@pytest.mark.skipif(sys.platform != "linux", reason="forks")
@pytest.mark.filterwarnings("ignore")  # of Fabric
@forks
def test_the_first_process_scores_the_start_alone():
    """Enough steps for `fit` to look at the given network, on validation data, which the other process does not wait for."""
    history = bayesify.fit(network(), loader(), **options(device=FORKED, epochs=3))
    assert "validation_nll" in history[-1]


SCRIPT = """
import json, os, sys, warnings
import torch
torch.set_num_threads(1)
sys.path[:0] = [{tests!r}, {tests!r} + "/support"]
from training import test_parallel as case
import bayesify
bnn = case.network(local={local})
history = bayesify.fit(bnn, {loader}, **case.options(device=case.Devices(2, "cpu"), num_data=22))
name = os.path.join({folder!r}, "rank" + os.environ.get("LOCAL_RANK", "0"))
bayesify.save(bnn, name + ".safetensors")
with open(name + ".json", "w") as file:
    json.dump(history, file)
"""


def run_script(folder: Path, **fields: object) -> list:
    script = folder / "train.py"
    tests = str(Path(__file__).parents[1])
    script.write_text(SCRIPT.format(tests=tests, folder=str(folder), **fields))
    environment = {key: value for key, value in os.environ.items() if key not in ("LOCAL_RANK", "NODE_RANK")}
    subprocess.run([sys.executable, str(script)], check=True, timeout=200, env=environment | {"OMP_NUM_THREADS": "1"})
    plain = network().mean_network()
    return [
        (
            bayesify.load(folder / f"rank{rank}.safetensors", plain),
            json.loads((folder / f"rank{rank}.json").read_text()),
        )
        for rank in (0, 1)
    ]


@pytest.mark.slow
@pytest.mark.parametrize("source", ["case.loader()", "case.DataLoader(case.Stream(), batch_size=7)"])
def test_a_script_started_once_per_device(tmp_path, source):
    """Each process ends with the same network, that of one process; streams are cut after loading."""
    (first, rows), (second, same_rows) = run_script(tmp_path, local=False, loader=source)
    for name, value in first.named_parameters():
        assert torch.equal(value, second.get_parameter(name))
    assert [row["nll"] for row in rows] == [row["nll"] for row in same_rows]
    one = network()
    ours = loader() if "Stream" not in source else DataLoader(Stream(), batch_size=7)
    expected = bayesify.fit(one, ours, **options(num_data=22))
    close(first, one)
    assert rows[-1]["nll"] == pytest.approx(expected[-1]["nll"], rel=1e-7)


@pytest.mark.slow
def test_local_noise_differs_between_processes(tmp_path):
    """Both processes hold the same network afterwards, though each drew noise of its own."""
    (first, _), (second, _) = run_script(tmp_path, local=True, loader="case.loader()")
    for name, value in first.named_parameters():
        assert torch.equal(value, second.get_parameter(name))


class Fake:
    """Stands in for Fabric: one of three processes, without the others."""

    def __init__(self, rank):
        self.global_rank, self.world_size, self.device = rank, 3, torch.device("cpu")


@pytest.mark.parametrize("workers", [0, 1])
def test_parts_of_a_batch_make_up_the_batch(workers):
    data = TensorDataset(torch.arange(11.0), torch.arange(11))
    for source in (
        DataLoader(data, batch_size=4, num_workers=workers),
        [(torch.arange(start, min(11.0, start + 4)), torch.arange(start, min(11, start + 4))) for start in (0, 4, 8)],
    ):
        parts = [list(Processes(Fake(rank)).batches(source, iter, None)) for rank in range(3)]
        for index, size in enumerate((4, 4, 3)):
            assert [part[index][2] for part in parts] == [size] * 3
            kept = torch.cat([part[index][0].y[: part[index][1]] for part in parts])
            assert kept.sort().values.tolist() == list(range(4 * index, 4 * index + size))
    single = [(torch.arange(1.0), torch.arange(1))]
    assert [next(Processes(Fake(rank)).batches(single, iter, None))[1] for rank in range(3)] == [1, 0, 0]


def test_generators_of_draws_differ_between_processes_for_local_noise_only():
    from bayesify.training.arguments import Run, Settings
    from bayesify.training.loop import TrainingLoop
    from bayesify.training.schedules import KLSchedule

    class Rank(Processes):
        def wrap(self, module):
            return module

    settings = Settings(22, 1, 0, 1.0, KLSchedule(), 1, "float32", None, 1)
    for local in (False, True):
        states = []
        for rank in (0, 1):
            bnn = network(local)
            optimizer = torch.optim.SGD(bnn.parameters(), lr=0.1)
            loop = TrainingLoop(bnn, loader(), optimizer, None, Run(settings, 0), Rank(Fake(rank)))
            states.append(loop.step.generator.get_state())
        assert torch.equal(*states) != local


def test_without_fabric_the_error_says_how_to_install_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "lightning_fabric", None)
    with pytest.raises(ImportError, match=r"pip install 'lightning-fabric>=.*extra 'train'"):
        bayesify.fit(network(), loader(), **options(device=Devices(2)))
    assert len(bayesify.fit(network(), loader(), **options())) == 3  # one process does not need it


@pytest.mark.skipif(sys.platform != "linux", reason="forks")
@pytest.mark.filterwarnings("ignore")
@forks
def test_gradients_that_are_not_finite_end_all_processes(tmp_path):
    """The bad row is in one process's part; both hear of it in the same step, and nothing after it is stored."""
    from training import test_guard as guard

    path, bnn = tmp_path / "run.safetensors", guard.network(norm=False)
    options = {"epochs": 1, "num_data": 48, "seed": 0, "progress": False, "device": FORKED}
    with pytest.raises(Exception, match=r"epoch 1, batch 3: the gradient of .*first/weight.* is not finite"):
        bayesify.fit(bnn, guard.batches(2), checkpoint=Checkpointing(path, 1), **options)
    assert Checkpoint.read(path).position["batches"] == 2


@pytest.mark.skipif(sys.platform != "linux", reason="forks")
@pytest.mark.filterwarnings("ignore")
@forks
def test_processes_that_cannot_train_where_torch_sees_a_gpu_say_what_to_do():
    """What torch says in a forked child on a machine with a GPU once a backward pass ran there, said on any machine."""
    bnn = network()

    def refuse(grad):
        raise RuntimeError("Unable to handle autograd's threading ... pytorch/wiki/Autograd-and-Fork")

    next(bnn.parameters()).register_hook(refuse)
    with pytest.raises(
        RuntimeError, match=r"^fit: Devices\(launch='fork'\): .* CUDA_VISIBLE_DEVICES= .* launch='script'"
    ):
        bayesify.fit(bnn, loader(), **options(device=FORKED))
