"""Report of the aims that this machine meets, and of the stored figures of other machines.

python -m benchmarks.aims
"""

import json
import tomllib
from collections import Counter
from pathlib import Path
from typing import Any

from benchmarks.run import commands
from benchmarks.timing import MACHINE, RESULTS, folder_of, hardware

MACHINES = {"ARM": "aarch64", "x86-64": "x86_64"}
"""Processors whose figures are stored, by their common name."""


def aims() -> list[dict[str, Any]]:
    """The table of aims."""
    rows: list[dict[str, Any]] = tomllib.loads((Path(__file__).parent / "aims.toml").read_text())["aims"]
    return rows


def on_gpu(aim: dict[str, Any]) -> bool:
    """Whether an aim is for a GPU."""
    return str(aim["file"]).endswith("_gpu")


def stored(aim: dict[str, Any], machine: str, what: str = "figure") -> float | None:
    """The stored figure or floor of an aim on a kind of processor; `None` if it was not measured."""
    key = aim.get(what)
    return _find(_content(aim, machine).get("figures", {}), key) if isinstance(key, str) else key


def run_of(aim: dict[str, Any], machine: str) -> dict[str, Any]:
    """The run of a figure: its date, command, hardware and versions."""
    content = _content(aim, machine)
    later = [run for run in content.get("later_runs", []) if any(aim["figure"].startswith(row) for row in run["rows"])]
    return later[-1] if later else content


def _content(aim: dict[str, Any], machine: str) -> dict[str, Any]:
    path = folder_of(RESULTS, aim["file"], machine) / f"{aim['file']}.json"
    return json.loads(path.read_text()) if path.exists() else {}


def _find(figures: Any, key: str) -> Any:
    """A figure by its key. The text after a colon selects a part of the figure by name or number."""
    if isinstance(figures, list):
        return figures[int(key)]
    if key in figures or ":" not in key:
        return figures.get(key)
    whole, _, part = key.rpartition(":")
    found = _find(figures, whole)
    return None if found is None else _find(found, part)


def is_met(aim: dict[str, Any], figure: float) -> bool:
    """Whether a figure, rounded as in the table, meets its aim."""
    shown = float(f"{figure:.3g}")
    return shown >= aim["aim"] if aim.get("more") else shown <= aim["aim"]


def main() -> None:
    counts, here = Counter[str](), hardware()
    for aim in aims():
        figure, floor = stored(aim, MACHINE), stored(aim, MACHINE, "floor")
        run = run_of(aim, MACHINE)
        verdict = "not measured" if figure is None else "met" if is_met(aim, figure) else "missed"
        part = "gpu" if on_gpu(aim) else "cpu"
        if figure is not None and run["hardware"][part] != here[part]:
            verdict = f"({verdict})"
        counts[verdict] += 1
        numbers = "" if figure is None else f"{figure:.3g}, "
        least = "" if floor is None else f", floor {floor:.3g}"
        print(f"{verdict:12} {aim['what']}: {numbers}asked {aim['aim']:g}{least}{_origin(run) if run else ''}")
    print(
        f"{counts['met']} of {counts['met'] + counts['missed']} aims that were measured on this kind of hardware are met"
    )
    print("Verdicts in parentheses are for other hardware. `make bench` measures the figures of these commands again:")
    print("  " + "; ".join(commands()))


def _origin(run: dict[str, Any]) -> str:
    place = run["hardware"]["gpu"] or f"{run['hardware']['threads']} threads of {run['hardware']['cpu']}"
    return f" [{place}, {run['date']}, {run['versions'].get('revision') or 'revision unknown'}; {run['command']}]"


if __name__ == "__main__":
    main()
