"""Checkpoints that somebody has changed are refused in plain words, or continue to the true result."""

import copy
import random
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from mutations import mutate
from torch import nn

import bayesify
from bayesify import likelihoods, posteriors
from bayesify.storage import tensor_files


def train(path: Path | None, epochs: int) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(2, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 1))
    bnn = bayesify.bayesianize(net, posteriors.MeanField(), likelihood=likelihoods.Gaussian(0.1))
    x = torch.linspace(-1, 1, 12).view(6, 2)
    bayesify.fit(bnn, [(x[:3], x[:3, :1]), (x[3:], x[3:, :1])], epochs=epochs, seed=1, checkpoint=path, progress=False)
    return dict(bnn.state_dict())


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Any:
    path = tmp_path_factory.mktemp("runs") / "run.safetensors"
    train(path, 2)
    return path.read_bytes(), tensor_files.read(path, "checkpoint"), train(None, 4)


def check(stored: Any, folder: Path, seed: int) -> None:
    raw, content, expected = stored
    chance, path = random.Random(seed), folder / "run.safetensors"
    if chance.random() < 0.3:
        damaged = bytearray(raw)
        for _ in range(chance.choice((1, 1, 5))):
            damaged[chance.randrange(len(damaged))] ^= 1 << chance.randrange(8)
        path.write_bytes(bytes(damaged[: chance.randrange(len(damaged))] if chance.random() < 0.3 else damaged))
    else:
        header, tensors = copy.deepcopy(content)
        mutate(chance, header, tensors, folder / "secret.json")
        tensor_files.write(path, "checkpoint", header, tensors)
    start = time.process_time()
    message = ""
    try:
        found = train(path, 4)
    except (ValueError, OSError) as error:
        message = str(error)
    assert time.process_time() - start < 5
    if message:
        assert str(path) in message or "fit:" in message
        assert len(message) < 1000
        return
    for name, value in found.items():
        assert value.shape == expected[name].shape
        assert bool(torch.isfinite(value).all()), name


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("seed", [*range(20), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(20, 140))])
def test_mutated_checkpoints(stored: Any, tmp_path: Path, seed: int) -> None:
    check(stored, tmp_path, seed)
