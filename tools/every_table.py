"""docs/experiments/every-table.md: every table that the five papers published, with our numbers beside theirs.

python -m tools.every_table     # from tools/every_table.toml, the papers' published.toml and papers/results
"""

from __future__ import annotations

import importlib
import shutil
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from bayesify_papers.shared.published import published

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "experiments" / "every-table.md"
TABLES = ROOT / "tools" / "every_table.toml"
PAPERS = {
    "inducing-weights": "Ritter et al. 2021, inducing weights",
    "subnetwork": "Daxberger et al. 2021, subnetwork inference",
    "function-space": "Rudner et al. 2022, function space",
    "walsh-hadamard": "Rossi et al. 2020, Walsh-Hadamard",
    "global-inducing": "Ober & Aitchison 2021, global inducing points",
}
INTRO = """# Every table

The tables of the five papers, as far as they are in the repository, with what came out here: **ours** in bold, the published number
in parentheses, with its standard deviation where the paper has one. A dash is a cell that was not run. What the numbers are, how
they were made and where they differ: the pages of the papers. Figures without numbers are on those pages too. Made by
`python -m tools.every_table` from `tools/every_table.toml`, the files `published.toml` and `papers/results`.
"""
Key = tuple[str, ...]


def page() -> str:
    """The whole page."""
    tables: list[dict[str, Any]] = tomllib.loads(TABLES.read_text())["tables"]
    parts = [INTRO]
    for paper, title in PAPERS.items():
        own = [table for table in tables if table["paper"] == paper]
        cells = [counted(table) for table in own]
        ran, total = (sum(counts) for counts in zip(*cells, strict=True))
        parts.append(f"## {title}\n\n{ran:,} of {total:,} cells were run. [The page]({paper}.md).\n")
        parts += [section(table) for table in own]
    return "\n".join(parts)


def counted(table: Mapping[str, Any]) -> tuple[int, int]:
    """How many of its published cells have a number of ours, and how many there are."""
    theirs, mine = theirs_of(table), ours_of(table)
    return len(theirs.keys() & mine.keys()), len(theirs)


def theirs_of(table: Mapping[str, Any]) -> dict[Key, tuple[float, float | None]]:
    """Published numbers and their standard deviations, by the values of the table's axes."""
    paper = published(table["paper"].replace("-", "_"))
    names = table.get("names", ())
    labels = [str(name) for name in (paper[names] if isinstance(names, str) else names)]
    flat = dict(_leaves(paper.find(*table["path"].split(".")), (), labels, bool(table.get("pairs"))))
    if not table.get("spread"):
        return {key: value if isinstance(value, tuple) else (value, None) for key, value in flat.items()}
    place = table["axes"].index("metric")
    found = {}
    for key, value in flat.items():
        if not key[place].endswith("_std"):
            spread = flat.get((*key[:place], f"{key[place]}_std", *key[place + 1 :]))
            found[key] = (value, spread)
    return found


def _leaves(value: Any, key: Key, labels: list[str], pairs: bool) -> Iterator[tuple[Key, Any]]:
    if isinstance(value, dict):
        for name, inner in value.items():
            yield from _leaves(inner, (*key, name), labels, pairs)
    elif isinstance(value, tuple) and not pairs:
        for name, inner in zip(labels, value, strict=True):
            yield (*key, name), inner
    else:
        yield key, value


def ours_of(table: Mapping[str, Any]) -> dict[Key, tuple[float, float | None]]:
    """Our means and standard errors, by the values of the table's axes."""
    if "read" not in table:
        return {}
    module, _, function = table["read"].partition(".")
    read = getattr(importlib.import_module(f"bayesify_papers.{module}.rows"), function)
    found = {}
    for path in table["results"]:
        for row in _rows(read, ROOT / path):
            setting = {**row["setting"], "metric": row["metric"]}
            wanted = table.get("where", {})
            if all(axis in setting for axis in table["axes"]) and wanted.items() <= setting.items():
                found[tuple(str(setting[axis]) for axis in table["axes"])] = (row["ours"], row["error"])
    return found


def _rows(read: Any, path: Path) -> list[dict[str, Any]]:
    """Rows of a folder; a single file is read as the results.json of one, since readers take what an experiment wrote."""
    if path.is_dir():
        rows: list[dict[str, Any]] = read(path)
        return rows
    with TemporaryDirectory() as folder:
        shutil.copy(path, Path(folder) / "results.json")
        rows = read(Path(folder))
        return rows


def section(table: Mapping[str, Any]) -> str:
    """A table, or several where an axis splits it."""
    theirs, mine = theirs_of(table), ours_of(table)
    axes = table["axes"]
    split = axes.index(table["split"]) if "split" in table else None
    kinds = list(dict.fromkeys(key[split] for key in theirs)) if split is not None else [None]
    text = [f"### {table['title']}\n", f"{table['note']}\n"]
    for kind in kinds:
        keys = [key for key in theirs if split is None or key[split] == kind]
        text += [f"{kind.replace('_', ' ')}:\n"] if kind else []
        text.append(_markdown(keys, theirs, mine, axes, table.get("columns"), split) + "\n")
    return "\n".join(text)


def _markdown(keys: list[Key], theirs: Any, mine: Any, axes: list[str], columns: str | None, split: int | None) -> str:
    across = axes.index(columns) if columns else None
    down = [place for place in range(len(axes)) if place not in (across, split)]
    heads = list(dict.fromkeys(key[across] for key in keys)) if across is not None else ["ours (published)"]
    names = dict.fromkeys(tuple(key[place] for place in down) for key in keys)
    cells = {(tuple(key[place] for place in down), heads[0] if across is None else key[across]): key for key in keys}
    lines = [[*(axes[place] for place in down), *(head.replace("_", " ") for head in heads)]]
    lines.append(["---"] * len(lines[0]))
    digits = {head: max(_digits(theirs[key]) for (_, column), key in cells.items() if column == head) for head in heads}
    for name in names:
        shown = [(cells.get((name, head)), digits[head]) for head in heads]
        lines.append([*name, *("" if key is None else _cell(theirs[key], mine.get(key), many) for key, many in shown)])
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _digits(number: tuple[float, float | None]) -> int:
    """Decimals that the paper printed, at least; trailing zeros are not in the file."""
    return max(len(f"{part:g}".partition(".")[2]) for part in number if part is not None)


def _cell(theirs: tuple[float, float | None], mine: tuple[float, float | None] | None, digits: int) -> str:
    paper, ours = (
        None if number is None else " ± ".join(f"{part:.{digits}f}" for part in number if part is not None)
        for number in (theirs, mine)
    )
    return f"– ({paper})" if ours is None else f"**{ours}** ({paper})"


if __name__ == "__main__":
    PAGE.write_text(page())
