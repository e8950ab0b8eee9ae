"""A whole comparison: every method on every split, then the table and the verdict."""

from __future__ import annotations

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
from bayesify.compare.question import Question
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
"""Seconds between reports of what is finished, while runs go on."""


Progress = Callable[[str, int, int, float], None]
"""Is told of every finished run: its name in words, how many are finished, how many there are, and the share of the work done."""
Report = Callable[["Comparison", str], None]
"""Is given what is finished and, while runs go on, how far they are."""


@dataclass(frozen=True)
class Comparison:
    """What a comparison found.

    Args:
        question: What was asked.
        table: The data.
        methods: In the order in which they ran.
        num_splits: Splits that were asked for.
        summary: The table, with the results of finished runs.
        unfinished: Names of methods with runs that are still to be done.
        winner: What was trained on all rows; `None` before that, and where nothing could be.
        commands: What to type next.
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
        """What it recommends; `None` if no method finished."""
        return judge(self.summary, self.table.target, self.table.classes)

    def record(self) -> dict[str, Any]:
        """The table, the verdict and what they were made from, as plain data.

        Numbers that are not known are `None`. `times` differ from run to run; all else is the same for the same seed.
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
        """The record as text, for files and other programs."""
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
    """Run a comparison; every finished run is on disk at once.

    A run is known by its data, settings, split and method, not by where the folder lies: a folder may be moved. No other process
    can use the folder meanwhile.

    Args:
        question: What to compare.
        folder: Where data and results of runs lie.
        resume: Whether to go on with the runs that are there.
        engine: Where runs are done; see `bayesify.scale_out.run_jobs`.
        workers: How many at a time.
        progress: Is told of finished runs.
        report: Is called with the comparison while the folder is still held, to write into it: now and then while runs go on, and
            at the end.

    Returns:
        The comparison; after Ctrl-C, that of what is finished, with `unfinished` methods.

    Raises:
        InputError: If data, options or folder do not fit.
        OSError: If a result cannot be written; finished ones are kept.
        KeyboardInterrupt: If nothing was finished.
    """
    if engine not in ENGINES:
        raise InputError(f"--engine {engine}: choose from {', '.join(ENGINES)}")
    folder, table, usual = check_folder("compare", folder), read_compared_table(question), question.usual_splits
    most = len(table.standard) or (count_folds(len(table)) if table.times is not None else usual)
    splits = question.splits or min(usual if len(table) < MAX_SMALL_ROWS else -(-usual // 2), most)
    if table.standard and splits > most:
        raise InputError(f"--splits {splits}: {table.name} comes with {most} splits")
    settings = {"target": table.target, "quick": question.quick, "seed": question.seed}
    with open_folder(folder, table, settings, resume=resume) as data:
        drop_failed(folder)
        plan = _Runs(question, table, splits, folder, progress, report)
        found = plan.comparison(plan.run(data, engine, workers))
        if not found.unfinished:
            if report is not None:
                report(found, "the recommended method is trained on all rows")
            found = _with_winner(found, folder)
        if report is not None:
            report(found, "")
    return found


def _with_winner(found: Comparison, folder: Path) -> Comparison:
    """With the recommended method trained on all rows, in the folder, and what to type next."""
    if found.verdict is None:
        return found
    winner = train_winner(found.question, found.table, found.summary, found.verdict, folder)
    if winner is None:
        return found
    return replace(
        found, winner=winner, commands=tuple(commands(winner, found.summary, found.table, found.question, folder))
    )


@dataclass
class _Runs:
    """The runs of a comparison: which there are, how far they are, and what came of them."""

    question: Question
    table: ComparedTable
    splits: int
    folder: Path
    progress: Progress | None
    report: Report | None

    def __post_init__(self) -> None:
        self._shared = {"data": self.table.fingerprint, "seed": self.question.seed, "quick": self.question.quick}
        self._names = _job_names(self.question.chosen(), self.splits)
        self._done: set[str] = set()
        self._reported = monotonic()

    def comparison(self, results: Results) -> Comparison:
        """What the results of runs say."""
        methods = self.question.chosen()
        summary = summarize(results, methods, self.table.task)
        unfinished = [name for name in methods for split in range(self.splits) if (name, split) not in results]
        about = self.question, self.table, tuple(methods), self.splits
        return Comparison(*about, summary, tuple(dict.fromkeys(unfinished)))

    def run(self, data: Path, engine: str, workers: int | None) -> Results:
        """Of every method and split; after Ctrl-C, of those that are finished."""
        jobs = {name: {**self._shared, "splits": own, "method": method} for name, (method, own) in self._names.items()}
        try:
            done = run_jobs(
                partial(run_method, str(data)), jobs, self.folder, engine=engine, workers=workers, progress=self._tell
            )
            return self._by_split(done)
        except JobsFailed as failure:  # workers that died again and again
            results = self._by_split(failure.results)
            for name, reason in failure.reasons.items():
                method, own = self._names[name]
                results |= {(method, split): {"error": reason.splitlines()[-1]} for split in own}
            return results
        except ImportError as error:
            raise InputError(f"--engine {engine}: {error}") from error
        except KeyboardInterrupt:
            results = self._stored()
            if not results:
                raise
            return results

    def _stored(self) -> dict[tuple[str, int], Mapping[str, Any]]:
        """Results of this comparison's runs that are on disk."""
        found = {}
        for name, (method, own) in self._names.items():
            stored = read_result(self.folder, name)
            if stored is not None and {**self._shared, "splits": own, "method": method}.items() <= stored[0].items():
                found[name] = stored[1]
        return self._by_split(found)

    def _by_split(self, found: Mapping[str, Any]) -> dict[tuple[str, int], Mapping[str, Any]]:
        return {
            (self._names[name][0], split): run
            for name, result in found.items()
            if name in self._names
            for split, run in zip(self._names[name][1], result["runs"], strict=True)
        }

    def _tell(self, name: str, done: int, total: int) -> None:
        self._done.add(name)
        if self.progress is not None:
            work = {job: _work(*about) for job, about in self._names.items()}
            method, own = self._names[name]
            words = title_of(method) + (f", split {own[0] + 1}" if len(own) == 1 else "")
            self.progress(words, done, total, sum(work[job] for job in self._done) / sum(work.values()))
        if self.report is not None and monotonic() - self._reported > MIN_REPORT_SECONDS:
            self._reported = monotonic()
            results = self._stored()
            if len({method for method, _ in results}) > 1:
                self.report(self.comparison(results), f"{done} of {total} runs are finished")


def _job_names(methods: Sequence[str], splits: int) -> dict[str, tuple[str, list[int]]]:
    """Jobs with their method and splits: all splits of a posterior train together, those of other methods are jobs of their own.

    Rivals come first because a first report needs them. The longest runs follow, so that no worker is left with one at the end.
    """
    every = list(range(splits))
    names = {method: (method, every) for method in methods if trains_together(method)}
    for split in every:
        names |= {f"{method}-{split}": (method, [split]) for method in methods if not trains_together(method)}
    return dict(sorted(names.items(), key=lambda job: 0 if job[1][0] in RIVALS else 1 / _work(*job[1])))


def _work(method: str, splits: Sequence[int]) -> float:
    return work_of(method) * len(splits)
