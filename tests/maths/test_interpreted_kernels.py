"""Kernels of draws without a GPU: Triton's interpreter runs them on the CPU, in a process of its own."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from bayesify.maths.fused_matheron import has_products

GPU = Path(__file__).parents[1] / "gpu"
TESTS = [GPU / "test_fused_draws_cuda.py", GPU / "test_matheron_cuda.py"]


@pytest.mark.slow
@pytest.mark.skipif(find_spec("triton") is None, reason="needs triton")
def test_kernels_are_their_reference() -> None:
    """Numbers, draws, KL, gradients and second derivatives; what needs CUDA graphs is left out."""
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-m",
        "gpu",
        "-p",
        "no:cacheprovider",
        "-p",
        "no:xdist",
        *map(str, TESTS),
    ]
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    found = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    assert found.returncode == 0, found.stdout[-3000:]
    passed = re.search(r"(\d+) passed", found.stdout)
    assert passed is not None
    assert int(passed[1]) > 30, "kernels did not run"


@pytest.mark.parametrize(
    ("capability", "hip", "runs"),
    [((9, 0), None, True), ((8, 0), None, True), ((7, 5), None, False), ((9, 4), "7", False)],
)
def test_products_are_made_by_kernels_where_the_device_has_them(
    capability: tuple[int, int], hip: str | None, runs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.version, "hip", hip)
    assert has_products.__wrapped__(torch.device("cuda")) == runs
    assert has_products.__wrapped__(torch.device("cpu"))  # Triton's interpreter
