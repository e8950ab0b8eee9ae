"""Two machines, played by two launchers on this one: training and curvature are those of one process."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from bayesify.training.distributed import count_nodes

PROGRAM = """
import os, sys
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
import bayesify
from bayesify import likelihoods, posteriors

torch.manual_seed(0)
x = torch.linspace(-1, 1, 40, dtype=torch.float64)[:, None]
y = torch.sin(3 * x)
net = nn.Sequential(nn.Linear(1, 5), nn.Tanh(), nn.Linear(5, 1)).double()
bnn = bayesify.bayesianize(net, posteriors.MeanField(), likelihood=likelihoods.Gaussian(0.1))
loader = DataLoader(TensorDataset(x, y), batch_size=10, shuffle=True)
history = bayesify.fit(bnn, loader, epochs=2, seed=0, progress=False)
rank, count = (int(os.environ.get(name, default)) for name, default in (("RANK", 0), ("WORLD_SIZE", 1)))
part = DataLoader(TensorDataset(x[rank::count], y[rank::count]), batch_size=10)
laplace = bayesify.Laplace(bnn.mean_network(), likelihoods.Gaussian(0.1)).fit(part)
print("RESULT", history[-1]["nll"], float(laplace.covariance_matrix().trace()))
"""


def test_nodes_are_those_of_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    assert count_nodes() == 1
    monkeypatch.setenv("GROUP_WORLD_SIZE", "3")
    assert count_nodes() == 1
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    assert count_nodes() == 3


def result(text: str) -> list[float]:
    (line,) = (line for line in text.splitlines() if "RESULT" in line)
    return [float(word) for word in line.split("RESULT")[1].split()]


@pytest.mark.slow
def test_two_nodes_give_the_result_of_one_process(tmp_path: Path) -> None:
    pytest.importorskip("lightning_fabric")
    script = tmp_path / "program.py"
    script.write_text(PROGRAM)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    launch = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc_per_node", "1"]
    launch += ["--master_addr", "127.0.0.1", "--master_port", port]
    nodes = [
        subprocess.Popen(
            [*launch, "--node_rank", str(rank), str(script)], env=environment, text=True, stdout=subprocess.PIPE
        )
        for rank in range(2)
    ]
    printed = [node.communicate(timeout=250)[0] for node in nodes]
    assert [node.returncode for node in nodes] == [0, 0], printed
    alone = subprocess.run([sys.executable, str(script)], env=environment, text=True, capture_output=True, check=True)
    for text in printed:
        assert result(text) == pytest.approx(result(alone.stdout), rel=1e-9)
