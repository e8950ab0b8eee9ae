"""The command line of an experiment."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable
from dataclasses import fields
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any, TypeVar

import torch

from bayesify_papers.shared import records

OPTIONS: dict[str, dict[str, Any]] = {
    "corrupted_images": {"type": int, "help": "corrupt only the first N test images", "metavar": "N"},
    "data": {"help": "folder of the data; default: the environment variable BAYESIFY_DATA"},
    "device": {"default": "cuda" if torch.cuda.is_available() else "cpu"},
    "evaluate": {"type": Path, "metavar": "DIR", "help": "only score the results that a run wrote to DIR"},
    "num_train": {"type": int, "metavar": "N", "help": "only the first N training images"},
    "seed": {"type": int, "default": 0},
    "splits": {"type": int, "metavar": "N", "help": "only the first N splits"},
    "table": {"action": "store_true", "help": "only print the table of the results in the folder"},
    "validation": {"type": int, "default": 0, "metavar": "N", "help": "hold out and score the last N training images"},
    "workers": {"type": int, "help": "simultaneous training runs; default: several on a GPU and 1 on a CPU"},
}
"""Options that several programs share."""

Kind = TypeVar("Kind")


class Program(argparse.ArgumentParser):
    """Options of a program. Every program has `--out` and `--smoke`.

    Args:
        doc: `__doc__` of the module; its first line is the description.
        spec: `__spec__` of the module, for the record of the command.
        out: Name of the folder of results, below `bayesify-report`.
        smoke: What a quick run does.
        small: Whether to use one thread on a CPU, because the networks are too small for a second thread to help.
    """

    def __init__(
        self,
        doc: str | None,
        spec: ModuleSpec | None,
        out: str,
        *,
        smoke: str = "tiny synthetic data, seconds on a CPU",
        small: bool = False,
    ) -> None:
        super().__init__(description=(doc or "").splitlines()[0])
        self.module, self.small = spec.name if spec else "", small
        self.add_argument("--out", type=Path, default=Path("bayesify-report") / out, help="folder of the results")
        self.add_argument("--smoke", action="store_true", help=smoke)

    def option(self, *shared: str, **defaults: Any) -> Program:
        """Add options: those in `OPTIONS` by name, others by their default, which sets their type."""
        for name in shared:
            self.add_argument(_flag(name), **OPTIONS[name])
        for name, value in defaults.items():
            if name in OPTIONS:
                self.add_argument(_flag(name), **{**OPTIONS[name], "default": value})
            elif isinstance(value, bool):
                self.add_argument(_flag(name), action=argparse.BooleanOptionalAction, default=value)
            elif isinstance(value, (tuple, list)):
                self.add_argument(_flag(name), nargs="+", type=type(value[0]), default=list(value))
            else:
                self.add_argument(_flag(name), type=type(value), default=value)
        return self

    def choice(self, name: str, known: Iterable[Any], default: Any = None) -> Program:
        """Add an option that takes one of the known values, or several if its default is a list. All values are the default."""
        known = list(known)
        default = known if default is None else default
        several = {"nargs": "+"} if isinstance(default, list) else {}
        self.add_argument(_flag(name), choices=known, type=type(known[0]), default=default, **several)  # type: ignore[arg-type]
        return self

    def settings(self, *defaults: Any) -> Program:
        """Add an option for each field of some dataclasses."""
        for default in defaults:
            self.option(**{field.name: getattr(default, field.name) for field in fields(default)})
        return self

    def read(self, arguments: Iterable[str] | None = None) -> argparse.Namespace:
        """The chosen options. Their attribute `facts` is the record of the run."""
        given = list(sys.argv[1:] if arguments is None else arguments)
        chosen = self.parse_args(given)
        if self.small and getattr(chosen, "device", "cpu") == "cpu":
            torch.set_num_threads(1)
        chosen.facts = records.facts(self.module, given)
        return chosen


def fill(kind: type[Kind], chosen: argparse.Namespace, **other: Any) -> Kind:
    """A dataclass whose fields come from the chosen options and from the given values, which take precedence."""
    named = [field.name for field in fields(kind) if hasattr(chosen, field.name)]  # type: ignore[arg-type]
    return kind(**{**{name: getattr(chosen, name) for name in named}, **other})


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"
