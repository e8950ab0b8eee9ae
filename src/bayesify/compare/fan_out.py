"""Runs one after the other, with results that outlive an interruption."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

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
    """Results of all jobs; finished ones are read from `folder/jobs/NAME.json`."""
    (folder / "jobs").mkdir(parents=True, exist_ok=True)
    done: dict[str, Result] = {}
    for name, job in jobs.items():
        path = folder / "jobs" / f"{name}.json"
        if path.exists():
            done[name] = json.loads(path.read_text())["result"]
            continue
        done[name] = function(job)
        write_bytes(path, json.dumps({"job": job, "result": done[name]}).encode())
        if progress is not None:
            progress(name, len(done), len(jobs))
    return done
