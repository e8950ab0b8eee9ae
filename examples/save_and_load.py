"""Train, write to one file, read it back into a fresh network, and predict the same."""

from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import bayesify
from bayesify import likelihoods, posteriors
from bayesify.datasets import toy


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 32), nn.ReLU(), nn.Linear(32, 2))


def main() -> None:
    torch.manual_seed(0)
    problem = toy.two_moons(seed=0)
    bnn = bayesify.bayesianize(
        network(),
        posteriors.KTied(rank=2, init_std=1e-2),
        likelihood=likelihoods.Categorical(),
    )
    loader = DataLoader(
        TensorDataset(problem.x, problem.y), batch_size=50, shuffle=True
    )
    bayesify.fit(bnn, loader, epochs=30, learning_rate=1e-2, seed=0, progress=False)

    with TemporaryDirectory() as folder:
        path = Path(folder) / "moons.safetensors"
        bayesify.save(bnn, path)
        print(
            f"{path.name}: {path.stat().st_size:,} bytes for"
            f" {bayesify.count_parameters(bnn):,} parameters"
        )
        loaded = bayesify.load(
            path, network()
        )  # the architecture; every number comes from the file

    before = bnn.predict(
        problem.x_test, generator=torch.Generator().manual_seed(1)
    ).probs
    after = loaded.predict(
        problem.x_test, generator=torch.Generator().manual_seed(1)
    ).probs
    assert torch.equal(before, after)
    print("the loaded network predicts the same, bit for bit")


if __name__ == "__main__":
    main()
