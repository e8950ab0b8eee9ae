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
]
ON_GPU = ["benchmarks.resnets", "benchmarks.draws_gpu", "benchmarks.many_outputs"]


def main() -> None:
    for module in ON_CPU + (ON_GPU if torch.cuda.is_available() else []):
        subprocess.run([sys.executable, "-m", module], check=True)


if __name__ == "__main__":
    main()
