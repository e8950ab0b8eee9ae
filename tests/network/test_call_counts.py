"""The main road is short: calls of functions and files of the package that a prediction and a step of `fit` visit on a CPU."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from torch import nn

import bayesify
from bayesify import BayesianNetwork

PACKAGE = str(Path(bayesify.__file__).parent)

LIMITS = {
    "inducing": {"predict": 300, "files": 22, "step": 450},
    "mean_field": {"predict": 337, "files": 31, "step": 302},
}
"""Calls of a third prediction, files that it visits, and calls of a further step. Before the road was straightened, this way of
counting gave 441 calls in 36 files and 693 calls under `inducing`, 337 calls in 31 files and 302 calls under `mean_field`."""


def count(function: Callable[[], Any]) -> Counter[str]:
    """Calls of Python functions in the package, by file; comprehensions and steps of generators count as Python calls them."""
    calls: Counter[str] = Counter()

    def note(frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(PACKAGE):
            calls[frame.f_code.co_filename] += 1

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        function()
    finally:
        sys.setprofile(before)
    return calls


def network(name: str) -> BayesianNetwork[Any]:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 1))
    return bayesify.bayesianize(net, name, likelihood=bayesify.likelihoods.Gaussian(0.1))


@pytest.mark.parametrize("name", LIMITS)
def test_a_third_prediction(name: str) -> None:
    bnn, x = network(name), torch.randn(8, 4)
    for _ in range(2):
        bnn.predict(x)
    calls = count(lambda: bnn.predict(x))
    assert calls.total() <= LIMITS[name]["predict"], calls
    assert len(calls) <= LIMITS[name]["files"], calls


@pytest.mark.parametrize("name", LIMITS)
def test_a_further_step(name: str) -> None:
    batch = torch.randn(8, 4), torch.randn(8, 1)

    def fit(steps: int) -> int:
        bnn = network(name)
        return count(lambda: bayesify.fit(bnn, [batch] * steps, epochs=1, progress=False)).total()

    fit(12)  # what is done once for all
    assert (fit(22) - fit(12)) / 10 <= LIMITS[name]["step"]
