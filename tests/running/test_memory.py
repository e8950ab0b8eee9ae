"""Predicting any number of rows stays within a budget of memory, without being asked."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

PROGRAM = """
import json, resource, sys, time
import torch
import bayesify
from bayesify import likelihoods, posteriors
from torch import nn

rows, inputs, draws, task, memory = json.loads(sys.argv[1])
net = nn.Sequential(nn.Linear(inputs, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10))
likelihood = likelihoods.Categorical() if task == "classification" else likelihoods.Gaussian(0.1)
bnn = bayesify.bayesianize(net, posteriors.MeanField(1e-2), likelihood=likelihood)
x = torch.zeros(1, inputs).expand(rows, -1)
bnn.predict(x[:8], draws)  # what a first call loads and allocates is not the prediction's
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
start = time.perf_counter()
prediction = bnn.predict(x, draws, memory=memory)
if task == "classification":
    prediction.probs, prediction.mutual_information
else:
    prediction.mean, prediction.variance, prediction.quantile(0.9)
assert prediction._source.kept is None or memory is None
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
print(json.dumps({"peak_mib": peak / 1024, "seconds": time.perf_counter() - start}))
"""


def measure(rows: int, inputs: int, draws: int, task: str, memory: int | None, timeout: int = 280) -> dict[str, float]:
    """Peak of resident memory above the model and the inputs, in MiB, and seconds."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, json.dumps([rows, inputs, draws, task, memory])],
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    measured: dict[str, float] = json.loads(done.stdout)
    return measured


@pytest.mark.parametrize("task", ["classification", "regression"])
def test_a_small_budget_is_kept(task: str) -> None:
    """8,000 rows x 8 draws hold 62 MiB in one layer's activations; under a budget of 1 MiB the whole takes less than 32.

    Besides the budget there are results (1 MiB) and what the allocator keeps."""
    measured = measure(8_000, 16, 8, task, 2**20)
    assert measured["peak_mib"] < 32, measured


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("task", ["classification", "regression"])
def test_a_million_rows(task: str) -> None:
    """1,000,000 rows x 32 draws through the MLP 784-256-256-10, less than 1 GiB above the model and the inputs."""
    measured = measure(1_000_000, 784, 32, task, None, timeout=1700)
    print(measured)
    assert measured["peak_mib"] < 1024, measured
