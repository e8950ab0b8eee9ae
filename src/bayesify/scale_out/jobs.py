"""Many independent runs on processes of this machine, a Dask or a Ray cluster.

A run is a job, plain data, and a function of it. A finished run is a file, so that nothing that is finished is lost when a
worker, a machine or the whole program stops.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, is_dataclass
from functools import partial
from pathlib import Path
from typing import Any

from bayesify.arguments.checks import Count, CountOrZero, checked
from bayesify.running.progress import Display
from bayesify.scale_out.engines import ENGINES, Run, open_engine
from bayesify.scale_out.result_files import check_folder, read_result, result_path, write_result
from bayesify.scale_out.workers import Finished, Function, work

Result = dict[str, Any]
Tell = Callable[[str, int, int], None]
"""Told the name of a finished job, how many are finished, and how many there are."""

Plan = Callable[[Mapping[str, Result]], Mapping[str, Any]]
"""From the results so far to the jobs that are known, finished ones among them."""

_NAME = re.compile(r"[A-Za-z0-9_=+,-][A-Za-z0-9._=+,-]*(/[A-Za-z0-9_=+,-][A-Za-z0-9._=+,-]*)*")


class JobsFailed(RuntimeError):
    """Some jobs failed as often as they were allowed to; the others are finished and kept.

    Attributes:
        reasons: Why, by name of the job: the traceback of its last attempt.
        results: The results of the other jobs.
    """

    def __init__(self, reasons: Mapping[str, str], results: Mapping[str, Result]) -> None:
        self.reasons, self.results = dict(reasons), dict(results)
        name, reason = next(iter(self.reasons.items()))
        last = reason.strip().splitlines()[-1]
        others = f" and {len(self.reasons) - 1} more" if len(self.reasons) > 1 else ""
        super().__init__(f"job {name}{others} failed: {last}; the other {len(self.results)} are finished and kept")


@checked
def run_jobs(
    function: Function,
    jobs: Mapping[str, Any] | Plan,
    folder: Path | str,
    *,
    engine: str = "local",
    workers: Count | None = None,
    threads: Count = 1,
    retries: CountOrZero = 2,
    progress: bool | Tell | None = True,
) -> dict[str, Result]:
    """Run every job, several at a time, and keep each result as a file.

    The result of a job is written to `folder/jobs/NAME.json` with the job that made it, at once and whole, as soon as it is
    there. A later call with an equal job of that name reads the file in its place, unless it was altered. A job that raises
    or whose worker dies is run again; one whose worker died is run alone then, so that it cannot take others with it.

    Results do not depend on the engine or on the number of workers: each job starts with the global generators of Python,
    NumPy and torch seeded by its name, and computes with the same number of threads.

    Args:
        function: From a job to its result, a dictionary that JSON can hold. Defined at the top of a module; what a result
            does not depend on, such as the place of a file, is bound by `functools.partial` and is no part of the job.
        jobs: By name: what JSON can hold, or a dataclass of it. A name is a file name, or several with `/` between. Where later
            jobs depend on results, a plan: from the results so far to the jobs, asked again whenever all its jobs are finished.
        folder: Where results lie.
        engine: `"local"`, processes of this machine; `"dask"`, the cluster of the present `distributed.Client`, of
            `DASK_SCHEDULER_ADDRESS`, or a new one on this machine; `"ray"`, likewise, with `RAY_ADDRESS`.
        workers: Jobs at a time; as many as this machine has cores, or the cluster has, by default. One `"local"` worker is
            this process itself.
        threads: Of each job, for torch and the libraries beneath it.
        retries: How often a job that failed is run again.
        progress: A bar where standard error is a terminal, or a function that is told of every finished job.

    Returns:
        The results by name, in the order of `jobs`, as they are in the files.

    Raises:
        ValueError: If the engine, a name, or a count is not allowed, or a job is not plain data.
        ImportError: If the engine is not installed; the message names the extra.
        OSError: If a result could not be written.
        JobsFailed: If jobs failed more than `retries` times, after all others were finished.
        KeyboardInterrupt: After Ctrl-C; what is finished is kept.
    """
    if engine not in ENGINES:
        raise ValueError(f"run_jobs: engine={engine!r}; choose from {', '.join(ENGINES)}")
    plan: Plan = jobs if callable(jobs) else lambda results: jobs
    folder = check_folder("run_jobs", folder)
    records = _Records(folder)
    known = records.take(plan)
    (folder / "jobs").mkdir(parents=True, exist_ok=True)
    if records.open_jobs():
        with _teller(progress, len(known), records) as tell, open_engine(engine, workers, threads) as run:
            while waiting := records.open_jobs():
                _run_rounds(run, partial(work, function, str(folder), threads), known, waiting, records, retries, tell)
                known = records.take(plan)
    results = {name: records.results[name] for name in known if name in records.results}
    if len(results) < len(known):
        raise JobsFailed({name: records.reasons[name] for name in known if name not in results}, results)
    return results


class _Records:
    """Results on disk and in memory, and why jobs have none yet."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.jobs: dict[str, Any] = {}
        self.results: dict[str, Result] = {}
        self.reasons: dict[str, str] = {}

    def take(self, plan: Plan) -> Mapping[str, Any]:
        """The jobs that a plan has now; those whose results are in files are finished, and the plan may go on from them."""
        while True:
            jobs = plan(self.results)
            if not isinstance(jobs, Mapping):
                raise TypeError(f"run_jobs: jobs is a plan that returned {type(jobs).__name__}; return a dictionary")
            new = [name for name in jobs if name not in self.jobs]
            self.jobs |= {name: _plain(name, jobs[name]) for name in new}
            found = [name for name in new if self.look(name)]
            if not found:
                return jobs

    def open_jobs(self) -> list[str]:
        """Jobs that have neither a result nor failed too often."""
        return [name for name in self.jobs if name not in self.results and name not in self.reasons]

    def look(self, name: str) -> bool:
        """Whether the file of an equal job is there."""
        found = read_result(self.folder, name)
        if found is None or found[0] != self.jobs[name]:
            return False
        self.results[name] = found[1]
        return True

    def keep(self, finished: Finished) -> None:
        if not self.look(finished.name):
            write_result(self.folder, finished.name, self.jobs[finished.name], finished.result or {})
        if not self.look(finished.name):
            raise OSError(f"{result_path(self.folder, finished.name)} was written but cannot be read")


def _run_rounds(
    run: Run,
    call: Callable[..., Finished],
    jobs: Mapping[str, Any],
    waiting: list[str],
    records: _Records,
    retries: int,
    tell: Tell,
) -> None:
    """Rounds of all that is not finished; what was in the hands of a worker that died is run alone, after all others."""
    attempts = dict.fromkeys(waiting, 0)
    alone: list[str] = []
    while waiting or alone:
        batch = waiting or [alone.pop(0)]
        waiting = []
        for finished in run(call, [(name, jobs[name], records.jobs[name]) for name in batch]):
            name = finished.name
            # A result that was on its way when a worker died may be in the worker's own file.
            if finished.reason is None or (finished.lost and records.look(name)):
                records.keep(finished)
                tell(name, len(records.results), len(records.jobs))
                continue
            records.reasons[name] = finished.reason
            attempts[name] += not finished.lost or len(batch) == 1  # among others, another may have killed the worker
            if attempts[name] <= retries:
                (alone if finished.lost else waiting).append(name)


def _plain(name: str, job: Any) -> Any:
    if not _NAME.fullmatch(name):
        raise ValueError(f"run_jobs: name {name!r}; give letters, digits and ._=+,- with / between folders")
    try:
        return json.loads(json.dumps(asdict(job) if is_dataclass(job) and not isinstance(job, type) else job))
    except (TypeError, ValueError) as error:
        raise ValueError(f"run_jobs: job {name} is not plain data: {error}") from error


@contextmanager
def _teller(progress: bool | Tell | None, total: int, records: _Records) -> Iterator[Tell]:
    """What is told of each finished job: the caller's function, a bar, or nobody."""
    if callable(progress):
        yield progress
        return
    columns = ("bar", "count", "elapsed", "{task.description}")
    with Display(*columns, show=bool(progress), total=total, completed=len(records.results)) as bar:
        yield lambda name, done, total: bar.update(completed=done, description=name)
