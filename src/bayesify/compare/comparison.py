"""A whole comparison: every method on every split, then the table and the verdict."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from bayesify.arguments.checks import Count, checked
from bayesify.compare.folder import drop_failed, open_folder
from bayesify.compare.problems import Problem, read_problem
from bayesify.compare.rivals import installed
from bayesify.compare.runs import estimate_noise, run_method
from bayesify.compare.summary import Results, Summary, summarize
from bayesify.compare.tuning import ALWAYS, BASELINES, PORTFOLIO, RIVALS, effort, trains_together
from bayesify.registry import METHODS, get_method
from bayesify.scale_out import ENGINES, JobsFailed, run_jobs
from bayesify.scale_out.result_files import check_folder, read_result
from bayesify.scale_out.workers import Function
from bayesify.tables.errors import InputError
from bayesify.tables.targets import Task

Progress = Callable[[str, int, int], None]
"""Is told the name of a finished run, and how many of how many are finished."""


@checked
@dataclass(frozen=True)
class Question:
    """What is to be compared.

    Args:
        data: A path, or the name of a data set.
        target: The column to predict; not needed for a name.
        task: `"regression"` or `"classification"`, if it is not to be detected.
        methods: Names from the registry, or `"all"` (default: a small portfolio). Baselines and rivals are added.
        ignore: Columns to leave out.
        ood: A table of out-of-distribution inputs.
        splits: How many; by `quick` if `None`.
        max_rows: More rows are thinned at random; by `quick` if `None`.
        quick: Whether to train briefly on fewer splits.
        seed: Of everything random.

    Raises:
        InputError: If a count is out of range or a method is unknown.
    """

    data: str
    target: str | None = None
    task: Task | None = None
    methods: Sequence[str] = ()
    ignore: Sequence[str] = ()
    ood: str | Path | None = None
    splits: int | None = None
    max_rows: int | None = None
    quick: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        if self.task not in (None, "regression", "classification"):
            raise InputError(f"--task {self.task}: give regression or classification")
        if self.splits is not None and self.splits < 1:
            raise InputError(f"--splits {self.splits}: give at least 1")
        if self.max_rows is not None and self.max_rows < 1:
            raise InputError(f"--max-rows {self.max_rows}: give at least 1")
        if self.seed < 0:
            raise InputError(f"--seed {self.seed}: give 0 or more")
        self.chosen()

    def chosen(self) -> list[str]:
        """The methods, baselines first.

        Raises:
            InputError: If a name is unknown; the message suggests the nearest.
        """
        wanted = list(METHODS) if "all" in self.methods else self.methods or PORTFOLIO
        try:
            names = [name if name in (*BASELINES, *RIVALS) else get_method(name).name for name in wanted]
        except ValueError as error:
            raise InputError(f"--methods: {error}") from error
        return list(dict.fromkeys((*ALWAYS, *installed(), *BASELINES, *names)))

    @property
    def name(self) -> str:
        """Of the file or data set, as folders may be called."""
        stem = Path(self.data).stem
        return "".join(sign if sign.isalnum() or sign in "-_." else "-" for sign in stem) or "table"


@dataclass(frozen=True)
class Comparison:
    """What a comparison found.

    Args:
        question: What was asked.
        problem: The data.
        methods: In the order in which they ran.
        num_splits: Splits that were asked for.
        results: Of finished runs, by method and split.
        summary: The table.
        unfinished: Names of methods with runs that are still to be done.
    """

    question: Question
    problem: Problem
    methods: tuple[str, ...]
    num_splits: int
    results: Results = field(repr=False)
    summary: Summary
    unfinished: tuple[str, ...] = ()


@checked
def compare(
    question: Question,
    folder: str | Path,
    *,
    resume: bool = False,
    engine: str = "local",
    workers: Count | None = None,
    progress: Progress | None = None,
    report: Callable[[Comparison], None] | None = None,
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
        report: Is called with the comparison while the folder is still held, to write into it.

    Returns:
        The comparison; after Ctrl-C, that of what is finished, with `unfinished` methods.

    Raises:
        InputError: If data, options or folder do not fit.
        OSError: If a result cannot be written; finished ones are kept.
        KeyboardInterrupt: If nothing was finished.
    """
    if engine not in ENGINES:
        raise InputError(f"--engine {engine}: choose from {', '.join(ENGINES)}")
    folder, amount = check_folder("compare", folder), effort(question.quick)
    problem = read_problem(
        question.data,
        target=question.target,
        task=question.task,
        ignore=question.ignore,
        ood=Path(question.ood) if question.ood is not None else None,
        max_rows=question.max_rows or amount.max_rows,
        seed=question.seed,
    )
    splits = question.splits or amount.splits
    if problem.standard and splits > len(problem.standard):
        raise InputError(f"--splits {splits}: {problem.name} comes with {len(problem.standard)} splits")
    settings = {"target": problem.target, "quick": question.quick, "seed": question.seed}
    with open_folder(folder, problem, settings, resume=resume) as data:
        drop_failed(folder)
        results = _results(question, problem, splits, folder, data, engine, workers, progress)
        methods = question.chosen()
        summary = summarize(results, methods, problem.task, BASELINES)
        unfinished = [method for method in methods if any((method, split) not in results for split in range(splits))]
        found = Comparison(question, problem, tuple(methods), splits, results, summary, tuple(unfinished))
        if report is not None:
            report(found)
    return found


def _results(
    question: Question,
    problem: Problem,
    splits: int,
    folder: Path,
    data: Path,
    engine: str,
    workers: int | None,
    progress: Progress | None,
) -> dict[tuple[str, int], Mapping[str, Any]]:
    """Of every method and split; after Ctrl-C, of those that are finished."""
    results: dict[tuple[str, int], Mapping[str, Any]] = {}
    shared = {"data": problem.fingerprint, "seed": question.seed, "quick": question.quick}
    options: dict[str, Any] = {"engine": engine, "workers": workers, "progress": progress}
    names = _job_names(question.chosen(), splits)
    try:
        noises: dict[str, dict[str, Any]] = {}
        if problem.task == "regression":
            first = {f"noise-{split}": {**shared, "split": split} for split in range(splits)}
            noises = _noises(partial(estimate_noise, str(data)), first, folder, options)
        jobs = {
            name: {**shared, "splits": own, "method": method, "noises": [_noise(noises, split) for split in own]}
            for name, (method, own) in names.items()
        }
        found = run_jobs(partial(run_method, str(data)), jobs, folder, **options)
        for name, result in found.items():
            results |= _by_split(names[name], result)
    except JobsFailed as failure:  # workers that died again and again, as for want of memory
        for name, result in failure.results.items():
            results |= _by_split(names[name], result)
        for name, reason in failure.reasons.items():
            results |= {(names[name][0], split): {"error": reason.splitlines()[-1]} for split in names[name][1]}
    except ImportError as error:
        raise InputError(f"--engine {engine}: {error}") from error
    except KeyboardInterrupt:
        for name, (method, own) in names.items():
            stored = read_result(folder, name)
            if stored is not None and {**shared, "splits": own, "method": method}.items() <= stored[0].items():
                results |= _by_split(names[name], stored[1])
        if not results:
            raise
    return results


def _job_names(methods: Sequence[str], splits: int) -> dict[str, tuple[str, list[int]]]:
    """Jobs with their method and splits: all splits of a posterior train together, those of other methods are jobs of their own."""
    every = list(range(splits))
    names = {method: (method, every) for method in methods if trains_together(method)}
    for split in every:
        names |= {f"{method}-{split}": (method, [split]) for method in methods if not trains_together(method)}
    return names


def _by_split(job: tuple[str, list[int]], result: Mapping[str, Any]) -> dict[tuple[str, int], Mapping[str, Any]]:
    return {(job[0], split): run for split, run in zip(job[1], result["runs"], strict=True)}


def _noises(
    function: Function, jobs: Mapping[str, Any], folder: Path, options: Mapping[str, Any]
) -> dict[str, dict[str, Any]]:
    try:
        return run_jobs(function, jobs, folder, **options)
    except (ArithmeticError, RuntimeError, ValueError) as error:
        if isinstance(error, InputError):
            raise
        raise InputError(
            f"a plain network cannot be trained on these data: {error}; look for extreme numbers in the columns"
        ) from error


def _noise(noises: Mapping[str, Mapping[str, Any]], split: int) -> float | None:
    return noises[f"noise-{split}"]["noise"] if noises else None
