"""Experiments of the five papers, read from `catalog.toml`: name, module, cost and reader of the results."""

import importlib
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from importlib import resources
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from typing import Any

from bayesify_papers.shared.rows import Row


@dataclass(frozen=True)
class Experiment:
    """One experiment of a paper: an entry of `catalog.toml`.

    Args:
        name: Name of the form `paper/experiment`.
        about: Description in one line.
        module: Module below `bayesify_papers`. Its `main(arguments)` writes to the folder given by `--out`.
        reader: Function of the paper's `rows.py` that reads this folder and returns rows.
        arguments: Arguments of the real run. They come after the module's defaults.
        each: Values of options. Every combination of values is a separate run.
        smoke: Arguments of the quick run; empty if another experiment has the same quick run.
        cost: Hardware and time of the real run.
        results: Path of our own results in the repository; empty if there are none yet.
    """

    name: str
    about: str
    module: str
    reader: str
    arguments: Sequence[str] = ()
    each: Mapping[str, Sequence[str]] = field(default_factory=dict)
    smoke: Sequence[str] = ("--smoke",)
    cost: str = ""
    results: str = ""

    @property
    def paper(self) -> str:
        """Authors and year of the paper."""
        return PAPERS[self.name.partition("/")[0]]

    @property
    def target(self) -> str:
        """Dotted name of the module."""
        return f"bayesify_papers.{self.module}"

    @property
    def available(self) -> bool:
        """Whether the module is installed."""
        try:
            return find_spec(self.target) is not None
        except ImportError:
            return False

    def main(self, arguments: list[str]) -> int:
        """Run the experiment and return its exit status."""
        status: int = importlib.import_module(self.target).main(arguments)
        return status

    def read(self, folder: Path) -> list[Row]:
        """Rows of the results that a run wrote to a folder."""
        rows = importlib.import_module(f"bayesify_papers.{self.module.partition('.')[0]}.rows")
        found: list[Row] = getattr(rows, self.reader)(folder)
        return found

    def runs(self, smoke: bool) -> dict[str, tuple[str, ...]]:
        """Arguments of each run by the name of its part. The name is empty if there is only one run."""
        if smoke:
            return {"": tuple(self.smoke)} if self.smoke else {}
        found = {}
        for values in product(*self.each.values()):
            pairs = [word for pair in zip(self.each, values, strict=True) for word in pair]
            found["-".join(values)] = (*self.arguments, *pairs)
        return found


def _load() -> tuple[dict[str, str], dict[str, Experiment]]:
    text = resources.files("bayesify_papers").joinpath("catalog.toml").read_text("utf-8")
    content: dict[str, Any] = tomllib.loads(text)
    experiments = {
        name: Experiment(name, reader=entry.pop("read"), **entry) for name, entry in content["experiments"].items()
    }
    return content["papers"], experiments


PAPERS, CATALOG = _load()


def select(patterns: list[str]) -> list[Experiment]:
    """Experiments by name, by paper, or by a pattern such as `*/uci`, in the order of the catalog.

    Raises:
        ValueError: If a pattern matches no experiment; the message suggests the nearest name.
    """
    chosen: set[str] = set()
    for pattern in patterns:
        found = {name for name in CATALOG if fnmatchcase(name, pattern) or name.partition("/")[0] == pattern}
        if not found:
            from difflib import get_close_matches

            near = get_close_matches(pattern, [*CATALOG, *PAPERS], n=1, cutoff=0.3)
            hint = f"did you mean {near[0]}? " if near else ""
            raise ValueError(f"there is no experiment {pattern!r}; {hint}see bayesify reproduce --list")
        chosen |= found
    return [experiment for name, experiment in CATALOG.items() if name in chosen]
