"""All benchmarks that this machine can run: those on the CPU, and those on a GPU where there is one."""

from __future__ import annotations

import subprocess
import sys

import torch

ON_CPU = [
    "benchmarks.foundation",
    "benchmarks.inducing_cpu",
    "benchmarks.function_space",
    "benchmarks.hadamard",
    "benchmarks.global_inducing",
    "benchmarks.profiles --cpu",
]
ON_GPU = [
    "benchmarks.resnets",
    "benchmarks.draws_gpu",
    "benchmarks.networks_gpu --profile",
    "benchmarks.captured_steps",
    "benchmarks.many_outputs",
    "benchmarks.profiles",
]


def main() -> None:
    for command in ON_CPU + (ON_GPU if torch.cuda.is_available() else []):
        subprocess.run([sys.executable, "-m", *command.split()], check=True)


if __name__ == "__main__":
    main()
