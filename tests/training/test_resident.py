"""Batches that are gathered on the device are the loader's own."""

import pytest
import torch
from torch.utils.data import DataLoader, SequentialSampler, TensorDataset, WeightedRandomSampler

from bayesify.training.batches import ResidentLoader, as_resident
from bayesify.training.random_streams import iterate_seeded

X, Y = torch.arange(46.0).view(23, 2), torch.arange(23)
LOADERS = {
    "shuffled": lambda: DataLoader(TensorDataset(X, Y), batch_size=5, shuffle=True),
    "in order": lambda: DataLoader(TensorDataset(X, Y), batch_size=4, sampler=SequentialSampler(X)),
    "last dropped": lambda: DataLoader(TensorDataset(X, Y), batch_size=4, shuffle=True, drop_last=True),
    "own generator": lambda: DataLoader(
        TensorDataset(X, Y), batch_size=5, shuffle=True, generator=torch.Generator().manual_seed(3)
    ),
    "weighted": lambda: DataLoader(
        TensorDataset(X, Y), batch_size=6, sampler=WeightedRandomSampler([1.0 + i for i in range(23)], 30)
    ),
}


@pytest.mark.parametrize("name", LOADERS)
def test_batches_are_those_of_the_loader_and_leave_its_generators_alike(name):
    plain, resident = LOADERS[name](), ResidentLoader(LOADERS[name](), torch.device("cpu"))
    for epoch in range(3):
        expected = list(iterate_seeded(plain, epoch))
        found = list(iterate_seeded(resident, epoch))
        assert len(found) == len(expected)
        for (x, y), (a, b) in zip(found, expected, strict=True):
            assert torch.equal(x, a)
            assert torch.equal(y, b)


def test_other_loaders_stay_as_they_are():
    for loader in (LOADERS["shuffled"](), [(X, Y)], DataLoader(X, batch_size=None)):
        assert as_resident(loader, torch.device("cpu")) is loader
