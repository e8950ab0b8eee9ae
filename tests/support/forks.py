"""Tests that fork after autograd was used, on machines where torch sees a GPU."""

import functools
import os
import subprocess
import sys
from pathlib import Path

import torch


def forks(test):
    """Run a test that forks and trains in the child in a process of its own that sees no GPU, where there is one.

    Once a backward pass ran on a machine with a GPU, torch refuses backward passes in forked children, and in a process of the
    suite one has run before.
    """

    @functools.wraps(test)
    def run(*args, **kwargs):
        if not torch.cuda.is_available():
            return test(*args, **kwargs)
        node = os.environ["PYTEST_CURRENT_TEST"].rpartition(" ")[0]
        environment = {key: value for key, value in os.environ.items() if not key.startswith("PYTEST")}
        command = [sys.executable, "-m", "pytest", "-q", "-m", "slow or not slow", "-p", "no:cacheprovider", node]
        done = subprocess.run(
            command,
            cwd=Path(__file__).parents[2],
            env=environment | {"CUDA_VISIBLE_DEVICES": ""},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return None

    return run
