"""Many small trainings at once: worker processes that share a device, and results that outlive an interruption.

A step of a small network on a GPU waits for its launches, so that several processes train in hardly more time than one.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import time
from collections.abc import Callable, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from bayesify_papers import records

Result = dict[str, Any]
Plan = Callable[[Mapping[str, Result]], Mapping[str, Any]]
"""From the results so far to the jobs that can be run, in order of urgency; finished ones are among them."""


def run_jobs(work: Callable[[Any, Path], Result], plan: Plan, folder: Path, workers: int) -> dict[str, Result]:
    """Run every job of a plan, several at a time.

    A result is written to `folder/jobs/name.json` as soon as it is there, with the job that made it. A later call reads it
    in place of running an equal job again, so that what was interrupted goes on.

    Args:
        work: From a job, a dataclass, and `folder` to its result, which must be plain data. Defined at the top of a module.
        plan: Asked again after every result, so that later jobs may depend on earlier ones.
        folder: Where results lie; what `work` writes beside them is its own.
        workers: Processes; 1 works in this one.

    Returns:
        The results by name.

    Raises:
        ValueError: If `workers` is below 1.
        RuntimeError: If jobs failed, with the first reason; the others were finished before.
    """
    if workers < 1:
        raise ValueError(f"workers={workers}; give at least 1")
    (folder / "jobs").mkdir(parents=True, exist_ok=True)
    progress = _Progress()
    done: dict[str, Result] = {}
    failed: dict[str, BaseException] = {}
    running: dict[Future[Result], str] = {}
    pool = _pool(workers) if workers > 1 else None
    try:
        while True:
            for name, job in plan(done).items():
                if name in done or name in failed or name in running.values():
                    continue
                if (known := _read(folder, name, job)) is not None:
                    done[name] = known
                    break
                if len(running) >= workers:
                    continue
                if pool is None:
                    done[name] = progress.tell(name, _timed(work, job, folder, name))
                    break
                running[pool.submit(_timed, work, job, folder, name)] = name
            else:
                if not running:
                    break
                finished, _ = wait(running, return_when=FIRST_COMPLETED)
                for future in finished:
                    name = running.pop(future)
                    error = future.exception()
                    if error is None:
                        done[name] = progress.tell(name, future.result())
                    else:
                        failed[name] = error
                        print(f"{name} failed: {error}", flush=True)
    finally:
        if pool is not None:
            pool.shutdown(wait=True, cancel_futures=True)
    if failed:
        name, error = next(iter(failed.items()))
        raise RuntimeError(f"{len(failed)} jobs failed, {name} because of: {error}") from error
    return done


def read_results(folder: Path) -> dict[str, Result]:
    """All results that `run_jobs` wrote to a folder, by name."""
    files = sorted((folder / "jobs").glob("*.json"))
    return {file.stem: json.loads(file.read_text())["result"] for file in files}


def usable_cores() -> int:
    """Processor cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _pool(workers: int) -> ProcessPoolExecutor:
    """Processes started anew: one forked from a process that used a GPU could not use it."""
    context = multiprocessing.get_context("spawn")
    return ProcessPoolExecutor(workers, context, _start, (max(1, usable_cores() // workers),))


def _start(threads: int) -> None:
    torch.set_num_threads(threads)


def _timed(work: Callable[[Any, Path], Result], job: Any, folder: Path, name: str) -> Result:
    start = time.perf_counter()
    result = work(job, folder)
    result["total_seconds"] = round(time.perf_counter() - start, 1)
    records.write(folder / "jobs" / f"{name}.json", {"job": asdict(job), "result": result})
    return result


def _read(folder: Path, name: str, job: Any) -> Result | None:
    path = folder / "jobs" / f"{name}.json"
    if not path.is_file():
        return None
    content = json.loads(path.read_text())
    same = content["job"] == json.loads(json.dumps(asdict(job)))
    result: Result = content["result"]
    return result if same else None


class _Progress:
    def __init__(self) -> None:
        self.start = time.perf_counter()

    def tell(self, name: str, result: Result) -> Result:
        scores = ", ".join(f"{key} {result[key]:.4f}" for key in ("accuracy", "nll", "ece") if key in result)
        print(
            f"{time.perf_counter() - self.start:6.0f} s  {name}: {scores or 'done'} ({result['total_seconds']:.0f} s)",
            flush=True,
        )
        return result
