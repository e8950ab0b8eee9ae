"""Tests that fork and train in the child, in processes where torch refuses that."""

import functools
import os
import subprocess
import sys
import warnings
from pathlib import Path

import torch

ALONE = "BAYESIFY_TEST_ALONE"
"""Says that the process is the test's own."""


def forks(test):
    """Run a test that forks and trains in the child in a process of its own that sees no GPU, where torch asks for that.

    Once a backward pass ran in a process with threads for a device, torch refuses backward passes in forked children, and in a
    process of the suite one has run before.
    """

    @functools.wraps(test)
    def run(*args, **kwargs):
        if ALONE in os.environ or children_can_train():
            return test(*args, **kwargs)
        node = os.environ["PYTEST_CURRENT_TEST"].rpartition(" ")[0]
        environment = {key: value for key, value in os.environ.items() if not key.startswith("PYTEST")}
        command = [sys.executable, "-m", "pytest", "-q", "-m", "slow or not slow", "-p", "no:cacheprovider", node]
        done = subprocess.run(
            command,
            cwd=Path(__file__).parents[2],
            env=environment | {"CUDA_VISIBLE_DEVICES": "", ALONE: "1"},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return None

    return run


def children_can_train() -> bool:
    """Whether a backward pass works in a child that is forked after one here: tried, since what torch sees is no proof."""
    if torch.cuda.is_available():
        return False
    backward()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of threads
        child = os.fork()
    if child == 0:
        try:
            backward()
        except BaseException:
            os._exit(1)
        os._exit(0)
    return os.waitpid(child, 0)[1] == 0


def backward() -> None:
    torch.ones(1, requires_grad=True).sum().backward()
