"""papers/tables.json and docs/experiments/every-table.md: what the five papers published, with our numbers beside theirs.

python -m tools.every_table     # from tools/every_table.toml, tools/paper_claims, the papers' published.toml and papers/results
"""

import importlib
import json
import shutil
import statistics
import tomllib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from bayesify_papers import status
from bayesify_papers.catalog import PAPERS
from bayesify_papers.shared.published import published
from bayesify_papers.shared.scores import standard_error

from tools.paper_claims import verdict

ROOT = Path(__file__).parents[1]
FILE = ROOT / "papers" / "tables.json"
PAGE = ROOT / "docs" / "experiments" / "every-table.md"
TABLES = ROOT / "tools" / "every_table.toml"
HIGHER_IS_BETTER = ("accuracy", "ll", "log_likelihood", "elbo", "auroc", "aupr")
"""Starts of the names of scores of which more is better; of the others less is."""

INTRO = """---
hide: [navigation, toc]
---

# Every table

What the five papers printed, and what came out here: **ours** ± its standard error, in parentheses the published number ± its
spread. Ours is shown in the paper's digits and compared with all of its own. Bold is no worse than the published number by more
than its spread, or by more than 1 % of it where none is printed; in italics it is not compared; `–` was not run. After an arrow:
the published number corrected, which ours is then compared with. After a slash: ours of the mixture of draws, where the paper, and
with it the number before, is of single draws. Below the tables of an experiment: why cells are missing, not compared, or not met,
and the command of the first one. A claim is what a paper shows in a figure without numbers, or what was tried on other data than
the paper's.

Made by `python -m tools.every_table` from `papers/tables.json`, which has the command, the date and the hardware of each number
too; `bayesify reproduce --status` prints it. How the runs were made, and what was chosen on which rows: the pages of the
papers.
"""
BY_ROUNDING = (
    "Ours agrees within the spread in the printed digits, not with all of its own; a printed spread of 0 is taken as 0."
)
MIXTURE_ONLY = "Of the mixture of draws: the score over single draws, the authors', which is no better, was not kept."
MAX_COLUMNS = 6
"""Columns of a table on the page, unless it has more rows; wider ones are turned."""

NO_BREAK_SPACE = "\N{NO-BREAK SPACE}"
Key = tuple[str, ...]
Cell = dict[str, Any]


def main() -> None:
    """Write the file, and the page from it."""
    FILE.write_text(text(content()))
    PAGE.write_text(page(status.load()))


def text(content: Mapping[str, list[Cell]]) -> str:
    """The file's text, an entry a line."""
    lists = [f'"{key}": [\n' + ",\n".join(map(json.dumps, entries)) + "\n]" for key, entries in content.items()]
    return "{" + ",\n".join(lists) + "}\n"


# -- the file -----------------------------------------------------------------------------------------------------------


def content() -> dict[str, list[Cell]]:
    """All cells and all claims, in the order of the papers' experiments."""
    listed = tomllib.loads(TABLES.read_text())
    made = {
        "cells": [cell for table in listed["tables"] for cell in cells(table)],
        "figures": [claim(figure) for figure in listed["figures"]],
    }
    order = [(paper, experiment) for paper in PAPERS for experiment in status.EXPERIMENTS[paper]]
    return {
        key: sorted(entries, key=lambda entry: order.index((entry["paper"], entry["experiment"])))
        for key, entries in made.items()
    }


def claim(figure: Mapping[str, Any]) -> Cell:
    """The entry of a claim of `every_table.toml`."""
    shown, numbers = verdict(figure, ROOT)
    entry = {key: figure[key] for key in ("paper", "experiment", "figure", "claim")}
    return {**entry, "shown": shown, "command": figure["command"], "reason": f"{numbers}."}


def cells(table: Mapping[str, Any]) -> list[Cell]:
    """The entries of a table of `every_table.toml`."""
    theirs, mine = theirs_of(table), ours_of(table)
    axes: list[str] = table["axes"]
    split, columns = table.get("split"), table.get("columns")
    kinds = list(dict.fromkeys(key[axes.index(split)] for key in theirs)) if split else []
    digits = max(_decimals(part) for numbers in theirs.values() for part in numbers if part is not None)
    found = []
    for key, (value, spread) in theirs.items():
        setting = {**dict(zip(axes, key, strict=True)), **table.get("fixed", {})}
        names = {axis: table.get("labels", {}).get(name, name) for axis, name in setting.items()}
        place = kinds.index(setting[split]) if split else 0
        down = [names[axis].replace("_", " ") for axis in axes if axis not in (split, columns)]
        across = names[columns] if columns else setting["metric"]
        mixture = mine.get(key, {})
        single = (
            mine.get(tuple(table.get("single", {}).get(part, part) for part in key), {}) if "single" in table else {}
        )
        ours = single or mixture
        change = _first(table.get("corrections", ()), setting, True)
        cell = {
            "paper": table["paper"],
            "experiment": table["experiment"],
            "table": table["title"].format(number=table.get("first", 0) + place, kind=names.get(split, "")),
            "row": ", ".join(down),
            "column": across.replace("_", " "),
            "published": value,
            "published_spread": spread,
            "spread_is": None
            if spread is None
            else _first(table.get("spreads", ()), setting, True).get("is", table["spread_is"]),
            "corrected": round(value + change["add"], 6) if change else None,
            "correction": change.get("text"),
            "ours": ours.get("ours"),
            "ours_spread": ours.get("error"),
            "ours_mixture": mixture.get("ours") if single else None,
            "seeds": ours.get("runs"),
            "better": "higher" if setting["metric"].startswith(HIGHER_IS_BETTER) else "lower",
        }
        ran = cell["ours"] is not None
        apart = _first(table.get("not_compared", ()), setting, ran) if ran else {}
        cell["met"] = None if apart else status.met(cell)
        again = any(_fits(case, setting) for case in table.get("no_command", ()))
        layers, _, width = setting.get("network", "").partition("x")
        words = {"layers": layers, "width": width, **setting}
        command = _first(table.get("commands", ()), setting, True).get("text", table["command"])
        cell["command"] = None if again else command.format(**words)
        cell |= {fact: ours.get(fact) if ran else None for fact in ("date", "hardware", "seconds")}
        why = "" if cell["met"] else (apart or _first(table["reasons"], setting, ran))["text"]
        if cell["met"] is False and status.met({**cell, "ours": round(cell["ours"], digits)}):
            why = BY_ROUNDING
        note = _first(table.get("notes", ()), setting, ran).get("text", "") if ran else ""
        kept = MIXTURE_ONLY if ran and "single" in table and not single else ""
        cell["reason"] = " ".join(part for part in (why, note, kept) if part) or None
        found.append(cell)
    return found


def _fits(case: Mapping[str, Any], setting: Mapping[str, str]) -> bool:
    """Whether a setting has the values of a case, of which there may be several for an axis."""
    return all(setting[axis] in ([values] if isinstance(values, str) else values) for axis, values in case.items())


def _first(cases: Any, setting: Mapping[str, str], ran: bool) -> dict[str, Any]:
    """The first of some cases that fits; `ran` in a case restricts it to cells that were run, or were not."""
    fitting = (case for case in cases if case.get("ran", ran) == ran and _fits(case.get("when", {}), setting))
    return next(fitting, {})


def theirs_of(table: Mapping[str, Any]) -> dict[Key, tuple[float, float | None]]:
    """Published numbers and their spreads, by the values of the table's axes."""
    paper = published(table["paper"].replace("-", "_"))
    names = table.get("names", ())
    labels = [str(name) for name in (paper[names] if isinstance(names, str) else names)]

    def leaves(path: str) -> dict[Key, Any]:
        return dict(_leaves(paper.find(*path.split(".")), (), labels, bool(table.get("pairs"))))

    flat = leaves(table["path"])
    if "spread_path" in table:
        spreads = leaves(table["spread_path"])
        return {key: (value, spreads.get(key)) for key, value in flat.items()}
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


def ours_of(table: Mapping[str, Any]) -> dict[Key, Cell]:
    """Our rows by the values of the table's axes, with date and hardware of the files that they are from.

    Several files may have a seed each; a table's `results` are of one setting.
    """
    if "read" not in table:
        return {}
    module, _, function = table["read"].partition(".")
    read = getattr(importlib.import_module(f"bayesify_papers.{module}.rows"), function)
    found = _read(table, read, table["results"])
    for pattern in table.get("instead", ()):
        found |= _read(table, read, [pattern])
    return found


def _read(table: Mapping[str, Any], read: Any, patterns: Iterable[str]) -> dict[Key, Cell]:
    found: dict[Key, list[Cell]] = {}
    for pattern in patterns:
        for path in sorted(ROOT.glob(pattern)):
            facts = json.loads(path.with_suffix(".json").read_text())
            where = facts["hardware"]
            about = {"date": facts["date"], "hardware": where["gpu"] or f"{where['cpu']}, {where['threads']} threads"}
            for row in _rows(read, path, table.get("file", "results.json")):
                setting = {**table.get("known", {}), **row["setting"], "metric": row["metric"]}
                if "hidden_layers" in setting:
                    setting["network"] = f"{setting['hidden_layers']}x{setting['width']}"
                wanted = table.get("where", {})
                if all(axis in setting for axis in table["axes"]) and wanted.items() <= setting.items():
                    key = tuple(str(setting[axis]) for axis in table["axes"])
                    found.setdefault(key, []).append({"seconds": facts.get("processor_seconds"), **row, **about})
    return {key: _together(rows) for key, rows in found.items()}


def _together(rows: list[Cell]) -> Cell:
    """One row of several, which are a seed each."""
    if len(rows) == 1:
        return rows[0]
    values = [row["ours"] for row in rows]
    every = [row["seconds"] for row in rows if row["seconds"] is not None]
    spread = {"ours": statistics.fmean(values), "error": standard_error(values), "runs": len(values)}
    return {**rows[-1], **spread, "seconds": round(statistics.fmean(every), 1) if every else None}


def _rows(read: Any, path: Path, name: str) -> list[Cell]:
    """Rows of one file: readers take the folder that an experiment wrote."""
    with TemporaryDirectory() as folder:
        shutil.copy(path, Path(folder) / (path.name if path.suffix == ".jsonl" else name))
        rows: list[Cell] = read(Path(folder))
        return rows


# -- the page -----------------------------------------------------------------------------------------------------------


def page(content: Mapping[str, list[Cell]]) -> str:
    """The whole page, from what `tables.json` holds."""
    parts = [INTRO, "```text\n" + status.summary(content) + "\n```\n", _contents()]
    for paper, title in PAPERS.items():
        parts.append(f"## {title}: {paper.replace('-', ' ')}\n\n[How it was run]({paper}.md).\n")
        for experiment in status.EXPERIMENTS[paper]:
            own = {
                key: [one for one in content[key] if (one["paper"], one["experiment"]) == (paper, experiment)]
                for key in content
            }
            parts.append(f"### {experiment[0].upper()}{experiment[1:]}\n")
            for name in dict.fromkeys(cell["table"] for cell in own["cells"]):
                parts.append(_table(name, [cell for cell in own["cells"] if cell["table"] == name]))
            if own["cells"]:
                parts.append(_below(own["cells"]))
            parts += [_claim(one) for one in own["figures"]]
    return "\n".join(parts)


def _contents() -> str:
    """Links to the experiments, since the page has no menus beside it; a heading that comes again has a number in its address."""
    lines, seen = [], Counter[str]()
    for paper, title in PAPERS.items():
        links = []
        for experiment in status.EXPERIMENTS[paper]:
            place = experiment.lower().replace(" ", "-")
            links.append(f"[{experiment}](#{place}{f'_{seen[place]}' if seen[place] else ''})")
            seen[place] += 1
        lines.append(f"- {title}: {', '.join(links)}")
    return "\n".join(lines) + "\n"


def _table(name: str, own: list[Cell]) -> str:
    heads = list(dict.fromkeys(cell["column"] for cell in own))
    places = {(cell["row"], cell["column"]): cell for cell in own}
    digits = {head: max(map(_printed, (cell for cell in own if cell["column"] == head))) for head in heads}
    lines = [["", *heads]]
    for row in dict.fromkeys(cell["row"] for cell in own):
        found = ((places.get((row, head)), digits[head]) for head in heads)
        lines.append([row, *("" if cell is None else _text(cell, many) for cell, many in found)])
    if len(heads) > max(MAX_COLUMNS, len(lines)):
        lines = [list(line) for line in zip(*lines, strict=True)]
    lines.insert(1, ["---"] * len(lines[0]))
    return f"**{name}**\n\n" + "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"


def _below(own: list[Cell]) -> str:
    """What is said of the cells of an experiment's tables: reasons, corrections, and the command of the first."""
    text = [f"- {_which(reason, own)}{reason}" for reason in _several(own, "reason")]
    text += [f"- Corrected: {note}" for note in _several(own, "correction")]
    if commands := _several(own, "command"):
        first = next(cell for cell in own if cell["command"])
        place = f" of {first['row']}, {first['column']}" if len(commands) > 1 else ""
        text.append(f"- Command{place}: `{commands[0]}`")
    return "\n".join(text) + "\n"


def _several(own: list[Cell], key: str) -> list[str]:
    """What cells have for a key, each once."""
    return list(dict.fromkeys(cell[key] for cell in own if cell[key]))


def _which(reason: str, own: list[Cell]) -> str:
    """The cells that a reason is about, in words; nothing where it is about all of them."""
    about = [cell for cell in own if cell["reason"] == reason]
    if len(about) == len(own):
        return ""
    for axis in ("column", "row"):
        names = _several(about, axis)
        if sum(cell[axis] in names for cell in own) == len(about):
            return f"{'; '.join(names)}: "
    places = list(dict.fromkeys(f"{cell['row']} of {cell['column']}" for cell in about))
    if len(places) <= 4:
        return f"{'; '.join(places)}: "
    if all(cell["ours"] is None for cell in about):
        return "Other cells without a number: "
    return f"{'; '.join(min((_several(about, axis) for axis in ('column', 'row')), key=len))}: "


def _printed(cell: Cell) -> int:
    """Decimals of a published number and its spread, without zeros at the end."""
    return max(_decimals(part) for part in (cell["published"], cell["published_spread"]) if part is not None)


def _decimals(number: float) -> int:
    return len(f"{number:g}".partition(".")[2]) if abs(number) < 1e5 else 0


def _claim(one: Cell) -> str:
    verdict = {True: "**Shown**", False: "Not shown", None: "Not run"}[one["shown"]]
    return f"*{one['figure']}: {one['claim']}.* {verdict}: {one['reason']}\n"


def _text(cell: Cell, digits: int) -> str:
    paper, ours = (
        f"{NO_BREAK_SPACE}±{NO_BREAK_SPACE}".join(f"{part:,.{digits}f}" for part in number if part is not None)
        for number in ((cell["published"], cell["published_spread"]), (cell["ours"], cell["ours_spread"]))
    )
    if cell["corrected"] is not None:
        paper += f"{NO_BREAK_SPACE}→{NO_BREAK_SPACE}{cell['corrected']:,.{digits}f}"
    if cell["ours"] is None:
        return f"– ({paper})"
    mixture = "" if cell["ours_mixture"] is None else f" / {cell['ours_mixture']:,.{digits}f}"
    mark = {True: "**", False: "", None: "*"}[cell["met"]]
    return f"{mark}{ours}{mark}{mixture} ({paper})"


if __name__ == "__main__":
    main()
