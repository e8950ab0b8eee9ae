"""Jobs, and files with their results. No finished job is lost when a worker or a machine stops."""

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
"""Called with the name of a finished job, the number of finished jobs, and the total number of jobs."""

Plan = Callable[[Mapping[str, Result]], Mapping[str, Any]]
"""Function from the results so far to all known jobs, including finished ones."""

_NAME = re.compile(r"[A-Za-z0-9_=+,-][A-Za-z0-9._=+,-]*(/[A-Za-z0-9_=+,-][A-Za-z0-9._=+,-]*)*")


class JobsFailed(RuntimeError):
    """Raised if some jobs failed more often than allowed. The results of the other jobs are not lost.

    Attributes:
        reasons: Traceback of the last attempt, by name of the job.
        results: Results of the other jobs.
    """

    def __init__(self, reasons: Mapping[str, str], results: Mapping[str, Result]) -> None:
        self.reasons, self.results = dict(reasons), dict(results)
        name, reason = next(iter(self.reasons.items()))
        last = reason.strip().splitlines()[-1]
        others = f" and {len(self.reasons) - 1} more" if len(self.reasons) > 1 else ""
        super().__init__(
            f"job {name}{others} failed: {last}; the other {len(self.results)} jobs are finished and their results are kept"
        )


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
    """Run every job, several at a time, and write each result to a file.

    As soon as a job ends, the job and its result are written to `folder/jobs/NAME.json`. A later call with an equal job of
    this name reads this file, unless the file was changed. A failed job is run again; if its worker died, the job is run alone.

    Results do not depend on the engine or on the number of workers. Before each job, the global generators of Python, NumPy and
    torch are seeded by the job's name. All jobs compute with the same number of threads.

    Args:
        function: Function from a job to its result. The result is a dictionary that can be written as JSON. Define the function
            at module level. Use `functools.partial` to bind settings that do not affect the result, such as the path of a file.
        jobs: Jobs by name. A job is any data that can be written as JSON, or a dataclass of such data. A name is a file name, or
            several file names separated by `/`. If jobs depend on the results of other jobs, give a plan: a function that returns
            jobs and is called again when these jobs are done.
        folder: Folder for the results.
        engine: `"local"`: processes of this machine. `"dask"`: the cluster of the current `distributed.Client` or of
            `DASK_SCHEDULER_ADDRESS`, otherwise a new cluster on this machine. `"ray"`: the same for Ray, with `RAY_ADDRESS`.
        workers: Number of simultaneous jobs; by default the number of cores of this machine or of the cluster. With
            `"local"` and one worker, jobs run in this process.
        threads: Number of threads of each job, for torch and the libraries that it uses.
        retries: Number of times that a failed job is run again.
        progress: `True` for a bar in a terminal, `False` for no bar, or a function that is called after every finished job.

    Returns:
        The results by name, in the order of `jobs`, as stored in the files.

    Raises:
        ValueError: If the engine, a name or a count is invalid, or if a job cannot be written as JSON.
        ImportError: If the engine is not installed; the message names the extra to install.
        OSError: If a result could not be written.
        JobsFailed: If jobs failed more than `retries` times. The error is raised after all other jobs are finished.
        KeyboardInterrupt: After Ctrl-C. The results of finished jobs stay in their files.
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
            while records.open_jobs():
                records.run(run, partial(work, function, str(folder), threads), known, retries, tell)
                known = records.take(plan)
    results = {name: records.results[name] for name in known if name in records.results}
    if len(results) < len(known):
        raise JobsFailed({name: records.reasons[name] for name in known if name not in results}, results)
    return results


class _Records:
    """Results on disk and in memory, and the reasons why jobs have no result yet."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.jobs: dict[str, Any] = {}
        self.results: dict[str, Result] = {}
        self.reasons: dict[str, str] = {}

    def take(self, plan: Plan) -> Mapping[str, Any]:
        """The current jobs of a plan. A job whose result is in a file counts as finished; the plan may then give further jobs."""
        while True:
            jobs = plan(self.results)
            if not isinstance(jobs, Mapping):
                raise TypeError(
                    f"run_jobs: the function given as jobs returned {type(jobs).__name__}; it must return a dictionary"
                )
            new = [name for name in jobs if name not in self.jobs]
            self.jobs |= {name: _plain(name, jobs[name]) for name in new}
            found = [name for name in new if self.look(name)]
            if not found:
                return jobs

    def open_jobs(self) -> list[str]:
        """Jobs that have no result and have not failed too often."""
        return [name for name in self.jobs if name not in self.results and name not in self.reasons]

    def look(self, name: str) -> bool:
        """Whether the job's file contains the result of an equal job. If so, the result is added to `results`."""
        found = read_result(self.folder, name)
        if found is None or found[0] != self.jobs[name]:
            return False
        self.results[name] = found[1]
        return True

    def keep(self, finished: Finished) -> None:
        if not self.look(finished.name):
            write_result(self.folder, finished.name, self.jobs[finished.name], finished.result or {})
        if not self.look(finished.name):
            raise OSError(
                f"run_jobs: {result_path(self.folder, finished.name)} was written but cannot be read; check the disk "
                "of the folder"
            )

    def run(self, run: Run, call: Callable[..., Finished], jobs: Mapping[str, Any], retries: int, tell: Tell) -> None:
        """Run all open jobs in rounds. A job whose worker died is run alone, after all other jobs."""
        waiting = self.open_jobs()
        attempts = dict.fromkeys(waiting, 0)
        alone: list[str] = []
        while waiting or alone:
            batch = waiting or [alone.pop(0)]
            waiting = []
            for finished in run(call, [(name, jobs[name], self.jobs[name]) for name in batch]):
                name = finished.name
                # When a worker died, the result may already be in the file that the worker wrote.
                if finished.reason is None or (finished.lost and self.look(name)):
                    self.keep(finished)
                    tell(name, len(self.results), len(self.jobs))
                    continue
                self.reasons[name] = finished.reason
                # In a larger batch, another job may have killed the worker.
                attempts[name] += not finished.lost or len(batch) == 1
                if attempts[name] <= retries:
                    (alone if finished.lost else waiting).append(name)


def _plain(name: str, job: Any) -> Any:
    if not _NAME.fullmatch(name):
        raise ValueError(
            f"run_jobs: name={name!r}; use only letters, digits and the characters '._=+,-', and '/' between folders"
        )
    try:
        return json.loads(json.dumps(asdict(job) if is_dataclass(job) and not isinstance(job, type) else job))
    except (TypeError, ValueError) as error:
        raise ValueError(f"run_jobs: job {name} cannot be written as JSON: {error}") from error


@contextmanager
def _teller(progress: bool | Tell | None, total: int, records: _Records) -> Iterator[Tell]:
    """The function to call after each finished job: the caller's function, a bar's update, or nothing."""
    if callable(progress):
        yield progress
        return
    columns = ("bar", "count", "elapsed", "{task.description}")
    with Display(*columns, show=bool(progress), total=total, completed=len(records.results)) as bar:
        yield lambda name, done, total: bar.update(completed=done, description=name)
