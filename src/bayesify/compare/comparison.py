"""A whole comparison: it runs every method on every split, and then ranks the methods and recommends one."""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from time import monotonic
from typing import Any

from bayesify.arguments.checks import Count, checked
from bayesify.compare.compared_table import ComparedTable, read_compared_table
from bayesify.compare.contestants import RIVALS, title_of, trains_together, work_of
from bayesify.compare.folder import drop_failed, open_folder
from bayesify.compare.question import NUM_QUICK_SPLITS, NUM_SPLITS, Question
from bayesify.compare.runs import TIMES, run_method
from bayesify.compare.splits import MAX_SMALL_ROWS, count_folds
from bayesify.compare.summary import Results, Summary, summarize
from bayesify.compare.verdict import Verdict, judge
from bayesify.compare.winner import Winner, commands, train_winner
from bayesify.scale_out import ENGINES, JobsFailed, run_jobs
from bayesify.scale_out.result_files import check_folder, read_result
from bayesify.tables.errors import InputError
from bayesify.version import __version__

MIN_REPORT_SECONDS = 10.0
"""Minimum number of seconds between two reports while runs are in progress."""


Progress = Callable[[str, int, int, float], None]
"""Function called after every run with the run's name in words, the numbers of finished and of all runs, and the finished share."""
Report = Callable[["Comparison", str], None]
"""Function called with the finished part of a comparison and the progress in words; the text is empty at the end."""


@dataclass(frozen=True)
class Comparison:
    """The result of a comparison.

    Args:
        question: Settings of the comparison.
        table: Table of the comparison.
        methods: Methods in the order in which they ran.
        num_splits: Requested number of splits.
        summary: Ranked methods, with the results of finished runs.
        unfinished: Names of methods for which Ctrl-C prevented a run, or the training on all rows, from finishing.
        winner: Recommended method, trained on all rows. `None` before this training, or if no method could be trained.
        commands: Commands to type next.
    """

    question: Question
    table: ComparedTable
    methods: tuple[str, ...]
    num_splits: int
    summary: Summary
    unfinished: tuple[str, ...] = ()
    winner: Winner | None = None
    commands: tuple[str, ...] = ()

    @cached_property
    def verdict(self) -> Verdict | None:
        """The recommendation; `None` if no method finished."""
        return judge(self.summary, self.table.target, self.table.classes)

    def record(self) -> dict[str, Any]:
        """The ranking, the verdict and their inputs as plain data.

        Unknown numbers are `None`. The entry `times` differs from run to run; everything else depends only on the data, the
        settings and the seed.
        """
        summary, table, question = self.summary, self.table, self.question
        verdict = self.verdict
        return {
            "bayesify": __version__,
            "data": table.name,
            "target": table.target,
            "task": summary.task,
            "classes": list(table.classes),
            "rows": len(table),
            "seed": question.seed,
            "quick": question.quick,
            "splits": len(summary.splits),
            "unfinished": list(self.unfinished),
            "verdict": None if verdict is None else asdict(verdict),
            "winner": None if self.winner is None else asdict(self.winner),
            "methods": [
                {
                    "name": row.name,
                    "title": row.title,
                    "splits": len(row.splits),
                    "mean": _finite({key: value for key, value in row.means.items() if key not in TIMES}),
                    "standard_error": _finite({key: value for key, value in row.errors.items() if key not in TIMES}),
                    "times": _finite({key: row.means.get(key) for key in TIMES}),
                    "behind_best": None if row.behind is None else row.behind.mean,
                    "p": None if math.isnan(row.p) else row.p,
                    "leads": row.leads,
                    "failure": row.failure or None,
                }
                for row in summary.rows
            ],
            "cautions": list(table.cautions),
            "notes": list(table.notes),
        }

    def to_json(self) -> str:
        """The record as JSON text, for files and other programs."""
        return json.dumps(self.record(), indent=1, ensure_ascii=False, allow_nan=False)


def _finite(values: dict[str, float | None]) -> dict[str, float | None]:
    return {key: value if value is not None and math.isfinite(value) else None for key, value in values.items()}


@checked
def compare(
    question: Question,
    folder: str | Path,
    *,
    resume: bool = False,
    engine: str = "local",
    workers: Count | None = None,
    progress: Progress | None = None,
    report: Report | None = None,
) -> Comparison:
    """Run a comparison; the result of every run is stored as soon as the run is finished.

    A run is identified by its data, settings, split and method, but not by its folder, so the folder may be moved.
    While a comparison runs, no other process can use its folder.

    Args:
        question: Settings of the comparison.
        folder: Folder for the data and the results of runs.
        resume: Whether to continue a comparison and keep the finished runs in the folder.
        engine: Engine that executes the runs; see `bayesify.scale_out.run_jobs`.
        workers: Number of simultaneous runs.
        progress: Function that is called after every finished run.
        report: Function that is called with the comparison from time to time while runs are in progress, and at the end. The
            folder is locked during the call, so the function can safely write there.

    Returns:
        The comparison. After Ctrl-C, it contains the finished runs, and `unfinished` names the methods that were not finished.

    Raises:
        InputError: If the data, the options or the folder cannot be used.
        OSError: If a result cannot be written; finished results are kept.
        KeyboardInterrupt: If Ctrl-C is pressed before any run is finished.
    """
    if engine not in ENGINES:
        raise InputError(f"--engine {engine}: choose from {', '.join(ENGINES)}")
    folder, table = check_folder("compare", folder), read_compared_table(question)
    usual = NUM_QUICK_SPLITS if question.quick else NUM_SPLITS
    most = len(table.standard) or (count_folds(len(table)) if table.times is not None else usual)
    splits = question.splits or min(usual if len(table) < MAX_SMALL_ROWS else -(-usual // 2), most)
    if table.standard and splits > most:
        raise InputError(
            f"--splits {splits}: the data set {table.name} defines its own {most} splits; give at most {most}"
        )
    settings = {"target": table.target, "quick": question.quick, "seed": question.seed}
    with open_folder(folder, table, settings, resume=resume) as data:
        drop_failed(folder)
        plan = _Runs(question, table, splits, folder, progress, report)
        found = plan.comparison(plan.run(data, engine, workers))
        if not found.unfinished:
            if report is not None:
                report(found, "training the recommended method on all rows")
            found = _with_winner(found, folder)
        if report is not None:
            report(found, "")
    return found


def _with_winner(found: Comparison, folder: Path) -> Comparison:
    """The comparison after training its recommended method on all rows. After Ctrl-C, this method is in `unfinished`."""
    verdict = found.verdict
    if verdict is None or verdict.network is None:
        return found
    try:
        winner = train_winner(found.question, found.table, found.summary, verdict, folder)
    except KeyboardInterrupt:
        return replace(found, unfinished=(verdict.network,))
    next_steps = commands(winner, found.summary, found.table, found.question, folder)
    return replace(found, winner=winner, commands=tuple(next_steps))


@dataclass
class _Runs:
    question: Question
    table: ComparedTable
    splits: int
    folder: Path
    progress: Progress | None
    report: Report | None

    def __post_init__(self) -> None:
        shared = {"data": self.table.fingerprint, "seed": self.question.seed, "quick": self.question.quick}
        jobs = _order_jobs(self.question.chosen(), self.splits)
        self._jobs = {name: {**shared, **job} for name, job in jobs.items()}
        self._done: set[str] = set()
        self._reported = monotonic()

    def comparison(self, results: Results) -> Comparison:
        methods = self.question.chosen()
        summary = summarize(results, methods, self.table.task)
        unfinished = [name for name in methods if any((name, split) not in results for split in range(self.splits))]
        return Comparison(self.question, self.table, tuple(methods), self.splits, summary, tuple(unfinished))

    def run(self, data: Path, engine: str, workers: int | None) -> Results:
        """Results of every method and split. After Ctrl-C, only the results of finished runs are returned."""
        run = partial(run_method, str(data))
        try:
            found = run_jobs(run, self._jobs, self.folder, engine=engine, workers=workers, progress=self._tell)
            return self._by_split(found)
        except JobsFailed as failure:  # workers died repeatedly
            results = self._by_split(failure.results)
            for name, reason in failure.reasons.items():
                job = self._jobs[name]
                results |= {(job["method"], split): {"error": reason.splitlines()[-1]} for split in job["splits"]}
            return results
        except ImportError as error:
            raise InputError(f"--engine {engine}: {error}") from error
        except KeyboardInterrupt:
            results = self._stored()
            if not results:
                raise
            return results

    def _stored(self) -> dict[tuple[str, int], Mapping[str, Any]]:
        stored = {name: read_result(self.folder, name) for name in self._jobs}
        return self._by_split({name: one[1] for name, one in stored.items() if one and one[0] == self._jobs[name]})

    def _by_split(self, found: Mapping[str, Any]) -> dict[tuple[str, int], Mapping[str, Any]]:
        return {
            (self._jobs[name]["method"], split): run
            for name, result in found.items()
            for split, run in zip(self._jobs[name]["splits"], result["runs"], strict=True)
        }

    def _tell(self, name: str, done: int, total: int) -> None:
        self._done.add(name)
        if self.progress is not None:
            work, own = {other: _work(job) for other, job in self._jobs.items()}, self._jobs[name]["splits"]
            words = title_of(self._jobs[name]["method"]) + (f", split {own[0] + 1}" if len(own) == 1 else "")
            self.progress(words, done, total, sum(work[job] for job in self._done) / sum(work.values()))
        if self.report is not None and monotonic() - self._reported > MIN_REPORT_SECONDS:
            self._reported = monotonic()
            results = self._stored()
            if len({method for method, _ in results}) > 1:
                self.report(self.comparison(results), f"{done} of {total} runs are finished")


def _order_jobs(methods: Sequence[str], splits: int) -> dict[str, dict[str, Any]]:
    """The method and the splits of each job: one job for a method that trains all splits together, otherwise one per split.

    Rivals come first, because the first report needs them. The longest runs come next, so that none is left for the end.
    """
    every = list(range(splits))
    jobs = {method: {"method": method, "splits": every} for method in methods if trains_together(method)}
    alone = [method for method in methods if not trains_together(method)]
    jobs |= {f"{method}-{split}": {"method": method, "splits": [split]} for split in every for method in alone}
    return dict(sorted(jobs.items(), key=lambda job: 0 if job[1]["method"] in RIVALS else 1 / _work(job[1])))


def _work(job: Mapping[str, Any]) -> float:
    return work_of(job["method"]) * len(job["splits"])
