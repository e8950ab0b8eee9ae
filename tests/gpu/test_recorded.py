"""Training by recorded steps is training without them. Run with `-m gpu`."""

from dataclasses import replace

import pytest
import torch
from bayesify_papers.inducing_weights.classification import SMOKE, SMOKE_SOURCE
from bayesify_papers.inducing_weights.systems import SYSTEMS, train
from bayesify_papers.shared import recorded
from bayesify_papers.shared.image_problems import Problem

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


@pytest.mark.parametrize("name", [name for name, system in SYSTEMS.items() if not system.apart])
def test_recorded_steps_reach_the_same_network(name, monkeypatch):
    problem, recipe, found = Problem(SMOKE_SOURCE, "cuda"), replace(SMOKE, epochs=6), []
    for warm_up in (3, 10**9):
        monkeypatch.setattr(recorded, "WARM_UP", warm_up)
        network, history = train(SYSTEMS[name], recipe, problem, seed=0)
        made = problem.predict_one([network], "test", 5, seed=0)
        found.append((torch.tensor([row["nll"] for row in history]), made.probs))
    (nll, probs), (plain_nll, plain_probs) = found
    assert nll[-1] < nll[0]
    torch.testing.assert_close(
        nll, plain_nll, rtol=0.05, atol=0.02
    )  # atomic additions and other kernels round differently
    assert (probs - plain_probs).abs().mean() < 0.02
