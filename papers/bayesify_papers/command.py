"""The command `bayesify reproduce`: it runs experiments by name on any engine and writes all results to one file."""

import contextlib
import io
import os
import shlex
import sys
import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TextIO

from bayesify.scale_out import ENGINES, JobsFailed, read_results, run_jobs
from bayesify_papers import status as status_file
from bayesify_papers.catalog import CATALOG, Experiment, select
from bayesify_papers.shared import records
from bayesify_papers.shared.rows import Row, show
from bayesify_papers.shared.tables import table

ROWS_FILE = "results.jsonl"
ABOUT_FILE = "reproduce.json"
MAX_PRINTED_ROWS = 40
"""Largest number of rows that is printed in full. With more rows, only a summary is printed."""


def listing(smoke: bool = False) -> str:
    """The catalog as text: all experiments whose module is installed; with `smoke`, only those with a quick run."""
    shown = [one for one in CATALOG.values() if one.available and (one.smoke or not smoke)]
    name, cost = (max(len(getattr(one, key)) for one in shown) for key in ("name", "cost"))
    lines: list[str] = []
    for paper in dict.fromkeys(one.paper for one in shown):
        lines += ["", paper]
        lines += [f"  {one.name:{name}}  {one.cost:{cost}}  {one.about}" for one in shown if one.paper == paper]
    lines += ["", "Costs are for the whole experiment. Our own results are in the repository's folder papers/results."]
    return "\n".join(lines[1:])


def plan(
    experiments: Sequence[Experiment],
    *,
    smoke: bool = False,
    only: Sequence[str] = (),
    extra: Sequence[str] = (),
) -> dict[str, dict[str, Any]]:
    """Jobs by name. A name is `paper/experiment` or `paper/experiment/part`.

    Raises:
        ValueError: If a part does not exist.
    """
    jobs: dict[str, dict[str, Any]] = {}
    parts: dict[str, None] = {}
    for one in experiments:
        for part, arguments in one.runs(smoke).items():
            parts[part] = None
            if only and part not in only:
                continue
            name = f"{one.name}/{part}" if part else one.name
            jobs[name] = {"experiment": one.name, "part": part, "arguments": [*arguments, *extra]}
    if unknown := [part for part in only if part not in parts]:
        raise ValueError(
            f"there is no part {', '.join(unknown)}; choose from {', '.join(part for part in parts if part) or 'none'}"
        )
    return jobs


def work(job: dict[str, Any], *, folder: str, data: str | None = None, echo: bool = False) -> dict[str, Any]:
    """Run one job: call the experiment's program and read its results as rows.

    The program's output goes to `log.txt` in the job's folder.

    Args:
        job: A job from `plan`.
        folder: Folder of all jobs. The job works in the subfolder with its name.
        data: Folder of the data sets.
        echo: Whether the program also prints to standard output.

    Raises:
        RuntimeError: If the program ends with a status other than 0.
    """
    experiment, out = CATALOG[job["experiment"]], Path(folder, job["experiment"], job["part"])
    out.mkdir(parents=True, exist_ok=True)
    start = time.perf_counter()
    with (
        (out / "log.txt").open("a") as log,
        _environment(data),
        contextlib.redirect_stdout(_Both(log, sys.stdout) if echo else log),
    ):
        try:
            status = experiment.main([*job["arguments"], "--out", str(out)])
        except SystemExit as left:  # argparse
            status = left.code if isinstance(left.code, int) else 1
    if status:
        raise RuntimeError(f"{job['experiment']} ended with status {status}; see {out / 'log.txt'}")
    return {"rows": experiment.read(out), "seconds": round(time.perf_counter() - start, 1)}


def reproduce(
    experiments: Sequence[Experiment],
    folder: Path,
    *,
    smoke: bool = False,
    engine: str = "local",
    workers: int | None = None,
    data: str | None = None,
    command: Sequence[str] = (),
    **options: Any,
) -> list[Row]:
    """Run or resume experiments, and write `results.jsonl` and `reproduce.json`.

    Args:
        experiments: Experiments of the catalog.
        folder: Folder for all files. The results file keeps earlier results of other experiments.
        smoke: Whether to do the quick runs.
        engine: Engine of `scale_out.run_jobs`.
        workers: Number of simultaneous runs. A single local run prints its progress.
        data: Folder of the data sets; by default the one in the environment variable `BAYESIFY_DATA`.
        command: Command-line arguments, for the record.
        options: Further arguments of `plan`.

    Returns:
        All rows of the file.

    Raises:
        ValueError: If the engine is unknown, or quick and real results would be mixed in one folder.
        JobsFailed: If runs failed. The results of the other runs are in the file.
    """
    if engine not in ENGINES:
        raise ValueError(f"engine={engine!r}; choose from {', '.join(ENGINES)}")
    about = folder / ABOUT_FILE
    if about.is_file() and records.read(about).get("smoke") != smoke:
        raise ValueError(f"{folder} holds {'real' if smoke else 'smoke'} results; give another --out")
    jobs = plan(experiments, smoke=smoke, **options)
    folder.mkdir(parents=True, exist_ok=True)
    facts = records.facts("bayesify", list(command))
    facts["command"] = shlex.join(["bayesify", "reproduce", *command])
    records.write(about, {**facts, "smoke": smoke, "engine": engine})
    echo = engine == "local" and (workers == 1 or len(jobs) == 1) and not smoke
    function = partial(work, folder=str(folder.absolute()), data=data, echo=echo)
    workers = 1 if engine == "local" and len(jobs) == 1 else workers
    try:
        run_jobs(function, jobs, folder, engine=engine, workers=workers, progress=not echo, retries=0 if smoke else 2)
    finally:
        rows = collect(folder)
    return rows


def run_command(
    names: Sequence[str],
    *,
    show: bool,
    status: bool,
    everything: bool,
    smoke: bool,
    out: Path | None,
    engine: str,
    workers: int | None,
    only: Sequence[str],
    data: str | None,
    arguments: str,
) -> int:
    """Run `bayesify reproduce` with its options and return the exit status."""
    if status:
        return print_status(names)
    if show or not (names or everything):
        print(listing(smoke))
        if not show:
            print("\nName an experiment (bayesify reproduce walsh-hadamard/table2) or add --all.", file=sys.stderr)
        return 0 if show else 2
    folder = out or Path("bayesify-reproduce-smoke" if smoke else "bayesify-reproduce")
    try:
        chosen = [one for one in (CATALOG.values() if everything else select(list(names))) if one.available]
        options: dict[str, Any] = {"only": only, "extra": shlex.split(arguments), "command": sys.argv[2:]}
        rows = reproduce(chosen, folder, smoke=smoke, engine=engine, workers=workers, data=data, **options)
    except JobsFailed as failed:
        print(failures(failed, folder), file=sys.stderr)
        return 1
    except (ValueError, OSError, ImportError) as error:
        print(f"bayesify reproduce: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"Interrupted. Finished runs are in {folder}; run the same command again to resume.", file=sys.stderr)
        return 130
    print(summarize([row for row in rows if row["experiment"] in {one.name for one in chosen}]))
    print(folder / ROWS_FILE)
    return 0


def print_status(names: Sequence[str]) -> int:
    """Print the summary of `tables.json`, or all entries of the named papers and experiments. Return the exit status."""
    try:
        content = status_file.load()
        text = status_file.details(content, names) if names else status_file.summary(content)
    except (ValueError, OSError) as error:
        print(f"bayesify reproduce: {error}", file=sys.stderr)
        return 2
    print(text)
    if not names:
        print(
            "\nTo see every number of a paper or an experiment: "
            "bayesify reproduce --status subnetwork walsh-hadamard/table2"
        )
    return 0


def collect(folder: Path) -> list[Row]:
    """Rows of all finished runs, in the order of the catalog. They are also written to `results.jsonl`."""
    found = read_results(folder)
    rows: list[Row] = []
    for name in sorted(found, key=lambda name: (list(CATALOG).index(_experiment(name)), name)):
        part = name.removeprefix(_experiment(name)).strip("/")
        rows += [{"experiment": _experiment(name), "part": part, **row} for row in found[name]["rows"]]
    records.write_lines(folder / ROWS_FILE, rows)
    return rows


def summarize(rows: Sequence[Row]) -> str:
    """Rows next to the published numbers. For many rows, a count of rows and of agreements per experiment."""
    if len(rows) > MAX_PRINTED_ROWS:
        lines = []
        for name in dict.fromkeys(row["experiment"] for row in rows):
            own = [row for row in rows if row["experiment"] == name]
            apart = [abs(row["deviations"]) for row in own if row["deviations"] is not None]
            within = f"{sum(value <= 1 for value in apart)} of {len(apart)}" if apart else "-"
            lines.append([name, str(len(own)), str(sum(row["published"] is not None for row in own)), within])
        return table(["experiment", "rows", "published", "within 1 sd"], lines)
    names = dict.fromkeys(row["experiment"] for row in rows)
    return "\n\n".join(show([row for row in rows if row["experiment"] == name], name) for name in names)


def failures(failed: JobsFailed, folder: Path) -> str:
    """One line per failed run: its error and its log file."""
    return "\n".join(
        f"{name}: {reason.strip().splitlines()[-1]} ({folder / name / 'log.txt'})"
        for name, reason in failed.reasons.items()
    )


def _experiment(name: str) -> str:
    return "/".join(name.split("/")[:2])


@contextlib.contextmanager
def _environment(data: str | None) -> Iterator[None]:
    """Set `BAYESIFY_DATA`, where every experiment looks for its data, inside the `with` block."""
    before = os.environ.get("BAYESIFY_DATA")
    if data is not None:
        os.environ["BAYESIFY_DATA"] = data
    try:
        yield
    finally:
        if data is not None:
            os.environ.pop("BAYESIFY_DATA")
            if before is not None:
                os.environ["BAYESIFY_DATA"] = before


class _Both(io.TextIOBase):
    """A text file that writes to several files."""

    def __init__(self, *files: TextIO) -> None:
        self._files = files

    def write(self, text: str) -> int:
        for file in self._files:
            file.write(text)
        return len(text)

    def flush(self) -> None:
        for file in self._files:
            file.flush()
