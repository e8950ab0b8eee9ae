"""Trainings as jobs: several at a time on one device, kept as files, gone on with after an interruption."""

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch

from bayesify.scale_out import run_jobs

Result = dict[str, Any]


def run_trainings(
    work: Callable[[Any, Path], Result],
    jobs: Mapping[str, Any] | Callable[[Mapping[str, Result]], Mapping[str, Any]],
    folder: Path,
    *,
    workers: int | None = None,
    device: str = "cpu",
    on_gpu: int = 6,
) -> dict[str, Result]:
    """Run jobs by `bayesify.scale_out.run_jobs`, telling of each that is finished.

    Args:
        work: From a job, a dataclass, and the folder to its result. Defined at the top of a module.
        jobs: By name, or a plan.
        folder: Of the results and of what `work` writes.
        workers: Jobs at a time; default: `count_workers`.
        device: Where they train. A step of a small network on a GPU waits for its launches, so that several processes train in
            hardly more time than one.
        on_gpu: Default of `workers` on a GPU.
    """
    count = count_workers(workers, device, on_gpu)
    threads = max(1, torch.get_num_threads() // count)
    function: Callable[[Any], Result] = partial(_call, work, folder)
    return run_jobs(function, jobs, folder, workers=count, threads=threads, retries=0, progress=_tell)


def count_workers(workers: int | None, device: str, on_gpu: int = 6) -> int:
    """Trainings at a time: what was asked for, else several on a GPU and 1 on a CPU."""
    return workers or (on_gpu if torch.device(device).type == "cuda" else 1)


def _call(work: Callable[[Any, Path], Result], folder: Path, job: Any) -> Result:
    return work(job, folder)


def _tell(name: str, done: int, total: int) -> None:
    print(f"{done} of {total}: {name}", flush=True)
