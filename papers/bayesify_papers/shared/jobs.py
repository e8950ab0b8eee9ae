"""Training runs as jobs: several at a time on one device, stored as files, resumed after an interruption."""

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
    workers: int = 1,
) -> dict[str, Result]:
    """Run jobs by `bayesify.scale_out.run_jobs` and print a line for each finished job.

    Args:
        work: Function from a job (a dataclass) and the folder to a result. It is defined at the top level of a module.
        jobs: Jobs by name, or a plan that makes them from earlier results.
        folder: Folder of the results and of all files that `work` writes.
        workers: Number of simultaneous jobs; see `count_workers`.
    """
    threads = max(1, torch.get_num_threads() // workers)
    function: Callable[[Any], Result] = partial(_call, work, folder)
    return run_jobs(function, jobs, folder, workers=workers, threads=threads, retries=0, progress=_tell)


def count_workers(workers: int | None, device: str, on_gpu: int = 6) -> int:
    """Number of simultaneous training runs: `workers` if given, otherwise `on_gpu` on a GPU and 1 on a CPU.

    On a GPU, a step of a small network waits for kernel launches, so that several processes together take hardly longer than one.
    """
    return workers or (on_gpu if torch.device(device).type == "cuda" else 1)


def _call(work: Callable[[Any, Path], Result], folder: Path, job: Any) -> Result:
    return work(job, folder)


def _tell(name: str, done: int, total: int) -> None:
    print(f"{done} of {total}: {name}", flush=True)
