"""Decorator for tests that fork and train in the child, which torch refuses in some processes."""

import functools
import os
import subprocess
import sys
import warnings
from pathlib import Path

import torch

ALONE = "BAYESIFY_TEST_ALONE"
"""Environment variable that marks the separate process of a test."""


def forks(test):
    """Run a test that forks and trains in the child in a separate process without a GPU, if torch requires it.

    Once a backward pass has run in a process with threads for a device, torch refuses backward passes in forked children. In a
    process of the test suite, an earlier test has run one.
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
    """Whether a backward pass works in a child that is forked after a backward pass here. Only a trial can show this."""
    if torch.cuda.is_available():
        return False
    backward()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # about threads
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
