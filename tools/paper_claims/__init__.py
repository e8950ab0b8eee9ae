"""Claims that the papers show in figures without numbers, or on data that we did not have, checked against committed results.

The claims are in `every_table.toml`. Each function, in the module of its paper, takes the folder of the paper's results and returns
whether a claim is shown, with a sentence of numbers.
"""

from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

from tools.paper_claims.reading import Verdict

NO_FILE = "the command was not run"
"""Reason of a check whose result file does not exist, unless the entry has its own reason."""


def verdict(figure: Mapping[str, Any], root: Path) -> Verdict:
    """Whether a claim of `every_table.toml` is shown, and the numbers.

    Args:
        figure: The entry. `check` names a function in the module of the paper; `not_run` says why there is no check or no file for
            it; `note` is printed after the numbers.
        root: Root folder of the repository.
    """
    if "check" not in figure:
        return None, figure["not_run"]
    paper = figure["paper"].replace("-", "_")
    try:
        check = getattr(import_module(f"{__name__}.{paper}"), figure["check"])
        found: Verdict = check(root / "papers" / "results" / paper)
    except FileNotFoundError:
        return None, figure.get("not_run", NO_FILE)
    shown, numbers = found
    return shown, f"{numbers}. {figure['note']}" if "note" in figure else numbers


def facts(block: Mapping[str, Any], root: Path) -> str:
    """Numbers that several claims of an experiment share, as Markdown; `facts` of the entry names the function."""
    paper = block["paper"].replace("-", "_")
    text: str = getattr(import_module(f"{__name__}.{paper}"), block["facts"])(root / "papers" / "results" / paper)
    return text
