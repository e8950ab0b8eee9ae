"""Which aims the stored results of this machine meet.

python -m benchmarks.aims
"""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Any

import torch

from benchmarks.timing import MACHINE, RESULTS, folder_of

MACHINES = {"ARM": "aarch64", "x86-64": "x86_64"}
"""Processors whose figures are kept, by the name that people know."""


def aims() -> list[dict[str, Any]]:
    """The table of aims."""
    rows: list[dict[str, Any]] = tomllib.loads((Path(__file__).parent / "aims.toml").read_text())["aims"]
    return rows


def on_gpu(aim: dict[str, Any]) -> bool:
    """Whether a figure is a GPU's."""
    return str(aim["file"]).endswith("_gpu")


def stored(aim: dict[str, Any], machine: str, what: str = "figure") -> float | None:
    """A figure of an aim, or its floor, as it was measured on a kind of processor; `None` where it was not."""
    key = aim.get(what)
    if not isinstance(key, str):
        return key
    path = folder_of(RESULTS, aim["file"], machine) / f"{aim['file']}.json"
    found: float | None = json.loads(path.read_text())["figures"].get(key) if path.exists() else None
    return found


def is_met(aim: dict[str, Any], figure: float) -> bool:
    """Whether a figure, as the table shows it, is what was asked for."""
    shown = float(f"{figure:.3g}")
    return shown >= aim["aim"] if aim.get("more") else shown <= aim["aim"]


def main() -> None:
    rows = [aim for aim in aims() if torch.cuda.is_available() or not on_gpu(aim)]
    met = 0
    for aim in rows:
        figure, floor = stored(aim, MACHINE), stored(aim, MACHINE, "floor")
        verdict = "not measured" if figure is None else "met" if is_met(aim, figure) else "missed"
        met += verdict == "met"
        numbers = "" if figure is None else f"{figure:.3g}, "
        least = "" if floor is None else f", floor {floor:.3g}"
        print(f"{verdict:12} {aim['what']}: {numbers}asked {aim['aim']:g}{least}")
    print(f"{met} of {len(rows)} aims met")


if __name__ == "__main__":
    main()
