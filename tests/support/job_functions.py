"""Functions that jobs run. They do not import pytest, so that worker processes load only what they need."""

from __future__ import annotations

import os
import random
import signal
from pathlib import Path
from typing import Any

import numpy as np
import torch


def noise(job: dict[str, Any]) -> dict[str, Any]:
    """The state that a job sees: its data, the global generators, the threads."""
    x = torch.linspace(0, 1, 1 << 16).square().sum()
    return {
        "twice": 2 * job["x"],
        "torch": torch.randn(()).item(),
        "numpy": float(np.random.rand()),  # noqa: NPY002
        "python": random.random(),
        "sum": x.item(),
        "threads": torch.get_num_threads(),
    }


def mortal(job: dict[str, Any]) -> dict[str, Any]:
    """Count the attempts in a file, and kill the process in the first attempt."""
    count = Path(job["count"])
    with count.open("a") as file:
        file.write(".")
    if len(count.read_text()) <= job.get("deaths", 0):
        os.kill(os.getpid(), signal.SIGKILL)
    if len(count.read_text()) <= job.get("errors", 0):
        raise ValueError("not yet")
    return {"x": job["x"]}


def mortal_noise(job: dict[str, Any]) -> dict[str, Any]:
    """Result of `noise` after the failure of `mortal`."""
    mortal(job)
    return noise(job)
