"""Runs side by side in worker processes, with results that outlive an interruption."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from bayesify.compare.errors import InputError
from bayesify.compare.folder import write_bytes

Result = dict[str, Any]


def run_jobs(
    function: Callable[[Any], Result],
    jobs: Mapping[str, Any],
    folder: Path,
    *,
    engine: str = "local",
    workers: int | None = None,
    progress: Callable[[str, int, int], None] | None = None,
) -> dict[str, Result]:
    """Results of all jobs; finished ones are read from `folder/jobs/NAME.json`.

    Args:
        function: From a job to plain data, at the top of a module.
        jobs: By name.
        folder: Of the results.
        engine: `"local"`.
        workers: Processes; as many as processor cores if left out. 1 works in this one.
        progress: Is told the name of a finished job, and how many of how many are finished.

    Raises:
        InputError: If there is no such engine.
        OSError: If a result cannot be written; finished ones are kept.
    """
    if engine != "local":
        raise InputError(f"--engine {engine}: only 'local' is there")
    (folder / "jobs").mkdir(parents=True, exist_ok=True)
    done = {name: found for name in jobs if (found := _read(folder / "jobs" / f"{name}.json")) is not None}
    wanted = [name for name in jobs if name not in done]
    count = min(workers or len(os.sched_getaffinity(0)), len(wanted))
    if count > 1:
        from joblib import Parallel, delayed

        pairs: Iterable[tuple[str, Result]] = Parallel(n_jobs=count, return_as="generator_unordered", batch_size=1)(
            delayed(_perform)(function, name, jobs[name], folder) for name in wanted
        )
    else:
        pairs = (_perform(function, name, jobs[name], folder) for name in wanted)
    for name, result in pairs:
        done[name] = result
        if progress is not None:
            progress(name, len(done), len(jobs))
    return {name: done[name] for name in jobs}


def _perform(function: Callable[[Any], Result], name: str, job: Any, folder: Path) -> tuple[str, Result]:
    result = function(job)
    write_bytes(folder / "jobs" / f"{name}.json", json.dumps({"job": job, "result": result}).encode())
    return name, result


def _read(path: Path) -> Result | None:
    try:
        result: Result = json.loads(path.read_text())["result"]
    except (OSError, ValueError, KeyError):
        return None
    return result
