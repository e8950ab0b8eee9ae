"""Time of a training step of the CIFAR-10 recipe on a GPU: alone, with its kernels by group, and with several runs at once.

    python -m benchmarks.training_steps [--systems deterministic ffg_u] [--inducing-by-stage 64,64,96,45] [--together 3]

A ResNet-18 is trained on random images with the recipe of docs/experiments/inducing-weights.md. `--together` starts several
processes that train the first system at the same time. It shows what the NVIDIA multi-process service
(`nvidia-cuda-mps-control -d`) gains if the service is started before the command. Kernels draw a U of at most 64 rows and columns;
`--largest-u 128 --warps 8` measures whether they should draw a larger one.
"""

import argparse
import statistics
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import torch
from bayesify_papers.inducing_weights import systems
from torch.profiler import ProfilerActivity, profile

from bayesify.maths import fused_matheron
from bayesify.posteriors.inducing_weights import noise
from benchmarks.profiles import group_of, launched
from benchmarks.timing import record

BATCH_SIZE, STEPS, EPOCHS, PROFILED_EPOCH = 256, 60, 6, 5


def train(system: str, changes: dict[str, str], epochs: int, callback: Any = None) -> list[float]:
    """Milliseconds per step of each epoch, with changes of the recipe."""
    images = torch.randn(BATCH_SIZE * STEPS, 3, 32, 32, device="cuda")
    given: Any = SimpleNamespace(x=images, y=torch.randint(0, 10, (len(images),), device="cuda"), num_classes=10)
    recipe = systems.Recipe(
        epochs, BATCH_SIZE, 5e-3, 5e-3, 0.05, depth=2, width=64, augment=True, cutout=16,
        schedule="one_cycle", point_optimizer="sgd", precision="bf16", kl_weight=0.5, **changes,
    )  # fmt: skip
    callbacks = [callback] if callback else []
    _, history = systems.train(systems.SYSTEMS[system], recipe, given, 0, callbacks=callbacks)
    return [1e3 * row["seconds"] / STEPS for row in history]


def alone(system: str, changes: dict[str, str]) -> dict[str, Any]:
    """Milliseconds per step, and the milliseconds of its kernels by group."""
    trace = profile(activities=[ProfilerActivity.CUDA])

    def watch(_: Any, history: Any) -> None:
        torch.cuda.synchronize()
        if history[-1]["epoch"] == PROFILED_EPOCH - 1:
            trace.__enter__()
        elif history[-1]["epoch"] == PROFILED_EPOCH:
            trace.__exit__(None, None, None)

    times = train(system, changes, EPOCHS, watch)
    kernels = launched(trace)
    groups: dict[str, float] = {}
    for event in kernels:
        group = group_of(event.name)
        groups[group] = groups.get(group, 0.0) + event.device_time_total / 1e3 / STEPS
    # The first epoch contains the capture of the step, and later epochs the profiler.
    return {
        "ms": statistics.median(times[1 : PROFILED_EPOCH - 1]),
        "kernels": len(kernels) / STEPS,
        "kernels_ms": sum(groups.values()),
        **dict(sorted(groups.items(), key=lambda item: -item[1])),
    }


def together(count: int) -> list[float]:
    """Milliseconds per step of runs that train at the same time, each in its own process."""
    command = [sys.executable, "-m", "benchmarks.training_steps", *sys.argv[1:], "--child"]
    runs = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(count)]
    return [float(run.communicate()[0].split()[-1]) for run in runs]


def main() -> None:
    parser = argparse.ArgumentParser(description="time of a training step of the CIFAR-10 recipe")
    parser.add_argument("--systems", nargs="+", default=["deterministic", "ffg_u"], choices=systems.SYSTEMS)
    parser.add_argument("--inducing-by-stage", default="", help="rows and columns of U in the four stages")
    parser.add_argument("--inducing-optimizer", default="adam", choices=["adam", "sgd"], help="optimizer of FFG-U")
    parser.add_argument("--together", type=int, default=0, metavar="N", help="train N networks at the same time")
    parser.add_argument("--largest-u", type=int, help="largest rows and columns of U that kernels draw")
    parser.add_argument("--warps", type=int, help="warps of the kernels of FFG-U")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    changes = {"inducing_by_stage": chosen.inducing_by_stage, "inducing_optimizer": chosen.inducing_optimizer}
    end = f" {chosen.inducing_by_stage}" if chosen.inducing_by_stage else ""
    end += ", SGD" if chosen.inducing_optimizer == "sgd" else ""
    if chosen.largest_u:
        noise.MAX_INDUCING_SIZE = chosen.largest_u
        end += f", kernels up to {chosen.largest_u}"
    if chosen.warps:
        fused_matheron.OPTIONS["num_warps"] = chosen.warps
        end += f", {chosen.warps} warps"
    if chosen.child:
        print(statistics.median(train(chosen.systems[0], changes, 2 * EPOCHS)[1:]))
        return
    if chosen.together:
        times = together(chosen.together)
        found: dict[str, Any] = {f"{chosen.systems[0]}{end} x {chosen.together}": {"ms": statistics.median(times)}}
    else:
        found = {f"{name}{end}": alone(name, changes) for name in chosen.systems}
    record("training_steps_gpu", found, keep=True, digits=3, batch=BATCH_SIZE, network="ResNet-18, bfloat16")


if __name__ == "__main__":
    main()
