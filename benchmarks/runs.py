"""Command lines of benchmarks, and runs of many cells in processes, with a time limit, resumed from stored results."""

import argparse
import json
import multiprocessing
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch

from bayesify.storage import write_file

OPTIONS: dict[str, dict[str, Any]] = {
    "device": {"default": "cpu"},
    "limit": {"type": float, "default": float("inf"), "help": "seconds after which no new cell starts"},
    "no_summary": {"action": "store_true", "help": "do not overwrite the committed results"},
    "part": {
        "type": int,
        "nargs": 2,
        "default": (0, 1),
        "help": "index of this share of the rows, and number of shares",
    },
    "seconds": {"type": float, "default": 6.0, "help": "time of each comparison"},
    "small": {"action": "store_true", "help": "run a small problem on a CPU"},
    "workers": {"type": int, "default": 1, "help": "processes"},
}
"""Options that several benchmarks share."""

Row = dict[str, Any]


def parser(doc: str | None, *shared: str, **defaults: Any) -> argparse.ArgumentParser:
    """The command-line parser of a benchmark.

    Shared options come from `OPTIONS`. Other options get their type from their default; a list takes several values.

    Args:
        doc: `__doc__` of the module, which `--help` shows.
        shared: Names of `OPTIONS`.
        defaults: Defaults by name. For an option of `OPTIONS`, it replaces the default.
    """
    made = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in shared:
        made.add_argument(_flag(name), **OPTIONS[name])
    for name, value in defaults.items():
        if isinstance(value, bool):
            made.add_argument(_flag(name), action="store_true")
        elif isinstance(value, (list, tuple)):
            made.add_argument(_flag(name), nargs="+", type=type(value[0]), default=list(value))
        else:
            told = "" if "nargs" in OPTIONS.get(name, {}) else OPTIONS.get(name, {}).get("help", "")
            made.add_argument(_flag(name), type=type(value), default=value, help=told or None)
    return made


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def many(work: Callable[..., Row | None], jobs: Iterable[tuple[Any, ...]], workers: int) -> Iterator[Row | None]:
    """Results of jobs in their order. Each job runs in a process with one thread."""
    with multiprocessing.get_context("spawn").Pool(workers, torch.set_num_threads, (1,)) as pool:
        started = [pool.apply_async(work, job) for job in jobs]
        yield from (one.get() for one in started)


def cell(path: Path, make: Callable[[], Row], end: float = float("inf")) -> Row | None:
    """The row in a file. If there is no file, the row is made, written and printed, unless the time `end` is over."""
    if not path.exists():
        if time.time() > end:
            return None
        text = json.dumps(make())
        write_file(path, text + "\n")
        print(path.stem, text, flush=True)
    row: Row = json.loads(path.read_text())
    return row


def read_rows(path: Path) -> list[Row]:
    """The rows of a file, one per line; none if there is no file."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def add_row(path: Path, row: Row) -> None:
    """Append a row to a file immediately."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as lines:
        lines.write(json.dumps(row) + "\n")
