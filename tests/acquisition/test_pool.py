"""The pool loop: what it asks, and that a killed run goes on."""

import multiprocessing
import os
import signal
import sys

import pytest
import torch
from forks import forks
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import bayesify
from bayesify import likelihoods, posteriors
from bayesify.acquisition import at_random, bald, by_batch_bald, by_score, label_pool

X = torch.randn(60, 2, generator=torch.Generator().manual_seed(0))
LABELS = (X[:, 0] > 0).long()


def train(x, y, seed):
    torch.manual_seed(seed)
    net = nn.Linear(2, 2)
    bnn = bayesify.bayesianize(net, posteriors.MeanField(init_std=0.5), likelihood=likelihoods.Categorical())
    bayesify.fit(
        bnn, DataLoader(TensorDataset(x, y), batch_size=64), epochs=3, learning_rate=0.1, seed=seed, progress=False
    )
    return bnn


class Oracle:
    """Answers, and remembers what it was asked; stops answering after some calls."""

    def __init__(self, last=100):
        self.asked, self.last = [], last

    def __call__(self, indices):
        if len(self.asked) == self.last:
            raise KeyboardInterrupt
        self.asked.append(indices.tolist())
        return LABELS[indices]


def score(model):
    return {
        "accuracy": float(
            (model.predict(X, generator=torch.Generator().manual_seed(0)).labels == LABELS).float().mean()
        )
    }


def run(oracle, path, choose, rounds=4):
    return label_pool(
        train, oracle, X, choose, start=[0, 1, 2], size=5, rounds=rounds, evaluate=score, path=path, seed=7
    )


@pytest.mark.parametrize(
    "choose", [at_random, by_score(bald, num_draws=16), by_batch_bald(8)], ids=["random", "bald", "batch"]
)
def test_a_run_that_stops_goes_on_to_the_same_result(choose, tmp_path):
    whole = run(Oracle(), None, choose)
    for last in (1, 3):
        path = tmp_path / f"{last}.safetensors"
        stopped, second = Oracle(last), Oracle()
        with pytest.raises(KeyboardInterrupt):
            run(stopped, path, choose)
        again = run(second, path, choose)
        assert torch.equal(again.indices, whole.indices)
        assert again.rounds == whole.rounds
        asked = [index for answer in stopped.asked + second.asked for index in answer]
        assert asked == whole.indices.tolist()  # nobody is asked twice
    assert [entry["labels"] for entry in whole.rounds] == [3, 8, 13, 18, 23]
    assert torch.equal(whole.labels, LABELS[whole.indices])
    assert len(whole.indices.unique()) == 23


def test_a_finished_run_asks_nothing_and_goes_on_to_more_rounds(tmp_path):
    path = tmp_path / "pool.safetensors"
    run(Oracle(), path, at_random, rounds=2)
    oracle = Oracle()
    assert len(run(oracle, path, at_random, rounds=2).rounds) == 3
    assert oracle.asked == []
    assert len(run(oracle, path, at_random, rounds=3).rounds) == 4
    assert len(oracle.asked) == 1


class Killed(Oracle):
    def __call__(self, indices):
        if len(self.asked) == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().__call__(indices)


@pytest.mark.skipif(sys.platform != "linux", reason="forks")
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
@forks
def test_a_killed_process_leaves_a_run_that_goes_on(tmp_path):
    path = tmp_path / "pool.safetensors"
    child = multiprocessing.get_context("fork").Process(target=run, args=(Killed(), path, at_random))
    child.start()
    child.join()
    assert child.exitcode == -signal.SIGKILL
    oracle = Oracle()
    assert torch.equal(run(oracle, path, at_random).indices, run(Oracle(), None, at_random).indices)
    assert len(oracle.asked) == 3
    assert [entry.name for entry in tmp_path.iterdir()] == ["pool.safetensors"]


def test_the_pool_ends():
    found = label_pool(train, Oracle(), X, at_random, start=range(50), size=7, rounds=9)
    assert [entry["labels"] for entry in found.rounds] == [50, 57, 60]
    assert sorted(found.indices.tolist()) == list(range(60))
    assert by_score(bald, num_draws=4)(found.model, X, 3, None).shape == (3,)


def test_labels_to_reach(tmp_path):
    found = run(Oracle(), None, at_random, rounds=1)
    assert found.labels_to_reach("accuracy", 0.0) == 3
    assert found.labels_to_reach("accuracy", 1.1) is None
    with pytest.raises(ValueError, match=r"no score 'acc' \(the scores are: labels, accuracy\)"):
        found.labels_to_reach("acc", 0.5)


def test_what_does_not_fit_is_named(tmp_path):
    path = tmp_path / "pool.safetensors"
    run(Oracle(), path, at_random, rounds=0)
    with pytest.raises(ValueError, match="a different size"):
        label_pool(train, Oracle(), X, at_random, start=[0, 1, 2], size=6, rounds=1, path=path, seed=7)
    for start in ([], [0, 0], [60]):
        with pytest.raises(ValueError, match="start= holds"):
            label_pool(train, Oracle(), X, at_random, start=start, size=6, rounds=1)
    with pytest.raises(ValueError, match="choose= returned"):
        label_pool(train, Oracle(), X, lambda *_: torch.tensor([3, 3]), start=[0], size=2, rounds=1)
    with pytest.raises(ValueError, match="for 2 examples; return a tensor with one label per example"):
        label_pool(train, lambda indices: LABELS[:1], X, at_random, start=[0, 1], size=2, rounds=1)
