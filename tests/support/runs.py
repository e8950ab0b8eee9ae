"""One small training run that uses all sources of randomness, and functions that compare two of its results."""

import random

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

import bayesify
from bayesify import KLSchedule, likelihoods, posteriors
from bayesify.training import Steps


class Jittered(Dataset):
    """Data whose examples are transformed at random, by each of the three global generators."""

    def __init__(self, rows: int = 44) -> None:
        generator = torch.Generator().manual_seed(0)
        self.x = torch.randn(rows, 3, generator=generator)
        self.y = (self.x.sum(1) > 0).long()

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        shift = 0.1 * float(torch.randn(())) + 0.1 * random.random() + 0.1 * np.random.random()  # noqa: NPY002
        return self.x[index] + shift, self.y[index]


def network() -> bayesify.BayesianNetwork:
    """A network with its own randomness (dropout) and state (batch norm), two posteriors and one weight without a posterior."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        net = nn.Sequential(
            nn.Linear(3, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.2), nn.Linear(8, 6), nn.Tanh(), nn.Linear(6, 2)
        )
    choice = {"0": posteriors.MeanField(local_reparameterization=True), "6": posteriors.FullCovariance(init_std=0.05)}
    return bayesify.bayesianize(net, choice, likelihood=likelihoods.Categorical())


def arguments(**changes: object) -> dict:
    """Arguments of `fit` that need every part of a checkpoint."""
    data = Jittered(20)
    return {
        "epochs": 4,
        "map_epochs": 1,
        "optimizer": lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9, nesterov=True),
        "scheduler": lambda optimizer: torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 3], gamma=0.5),
        "kl_schedule": KLSchedule(zero_epochs=1, linear_epochs=1),
        "validation": DataLoader(TensorDataset(data.x, data.y), batch_size=12),
        "patience": 3,
        "num_draws": 2,
        "steps": Steps(accumulate=2, clip_norm=5.0),
        "seed": 11,
        "progress": False,
    } | changes


def loader(own_generator: bool = False, workers: int = 0) -> DataLoader:
    """Shuffled batches of 8; the last one has 4."""
    generator = torch.Generator().manual_seed(7) if own_generator else None
    return DataLoader(Jittered(), batch_size=8, shuffle=True, generator=generator, num_workers=workers)


def same(a: bayesify.BayesianNetwork, b: bayesify.BayesianNetwork) -> bool:
    """Whether every parameter and buffer is the same, bit for bit."""
    first, second = a.state_dict(), b.state_dict()
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


def numbers(history: bayesify.History) -> list[dict]:
    """A history without times."""
    return [{key: value for key, value in row.items() if key != "seconds"} for row in history]
