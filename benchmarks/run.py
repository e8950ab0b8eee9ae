"""All benchmarks that this machine can run: on the CPU and, if there is one, on a GPU."""

import subprocess
import sys
from importlib.util import find_spec

import torch

ON_CPU = [
    "benchmarks.foundation",
    "benchmarks.inducing_cpu",
    "benchmarks.function_space",
    "benchmarks.hadamard",
    "benchmarks.global_inducing",
    "benchmarks.laplace_cpu",
    "benchmarks.last_layer --small",
    "benchmarks.profiles --cpu",
]
ON_GPU = [
    "benchmarks.resnets",
    "benchmarks.draws_gpu",
    "benchmarks.networks_gpu --profile",
    "benchmarks.captured_steps",
    "benchmarks.many_outputs",
    "benchmarks.last_layer",
    "benchmarks.global_inducing --device cuda",
    "benchmarks.profiles",
]
WITH_PACKAGES = {"benchmarks.deep_gp": "gpytorch"}
"""Benchmarks that compare with another package."""


def commands() -> list[str]:
    """Commands that run here. `make bench-peers` and `benchmarks.lora` have separate environments."""
    beside = [command for command, package in WITH_PACKAGES.items() if find_spec(package)]
    return ON_CPU + beside + (ON_GPU if torch.cuda.is_available() else [])


def main() -> None:
    for command in commands():
        subprocess.run([sys.executable, "-m", *command.split()], check=True)


if __name__ == "__main__":
    main()
