"""Writer of papers/tables.json, docs/experiments/every-table.md and claims.md: published numbers of five papers next to ours.

python -m tools.every_table     # from tools/every_table.toml, tools/paper_claims, the papers' published.toml and papers/results
"""

import importlib
import json
import shutil
import statistics
import tomllib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from bayesify_papers import status
from bayesify_papers.catalog import PAPERS
from bayesify_papers.shared.published import published
from bayesify_papers.shared.scores import standard_error

from tools.markdown import table as markdown_table
from tools.paper_claims import NO_FILE, facts, verdict
from tools.paper_claims.page import claims_page
from tools.paper_claims.rankings import (
    Comparison,
    Key,
    Ranking,
    Words,
    brief_number,
    counted,
    fits,
    in_brief,
    left_out,
    share,
    told,
)
from tools.paper_claims.reading import prose

ROOT = Path(__file__).parents[1]
FILE = ROOT / "papers" / "tables.json"
PAGE = ROOT / "docs" / "experiments" / "every-table.md"
CLAIMS_PAGE = ROOT / "docs" / "experiments" / "claims.md"
TABLES = ROOT / "tools" / "every_table.toml"
HIGHER_IS_BETTER = ("accuracy", "ll", "log_likelihood", "elbo", "auroc", "aupr")
"""Prefixes of the names of scores for which higher is better. For all other scores, lower is better."""

INTRO = """---
hide: [navigation, toc]
---

# Every table

*For readers who check our reproduction number by number.* Each cell has our number ± its standard error, and in parentheses
the published number ± its spread. Our number is rounded to the decimals that the paper prints.

- A **bold** number meets the published one or is better. Our number may be worse by the published spread, or by 1 % where the paper
  prints no spread.
- The sign **≈** means that our number agrees with the published one: it is within the spread in either direction. Counts must be
  equal.
- The sign `–` means that we did not run the cell.
- The number after an arrow is the corrected published number, with which we compare ours.
- The number after a slash is a second number of ours, which is not compared. A remark below the tables describes it.

The remarks below the tables say why cells are missing or not met. Each remark begins with the names of its cells, in bold. The last
remark gives the command of the first cell. The claims of the papers have [their own page](claims.md).

`python -m tools.every_table` writes this page from `papers/tables.json`. For each result, `tables.json` gives the command, the
date, the hardware and the number of seeds. `bayesify reproduce --status` prints a summary of `tables.json`.
"""
MAX_COLUMNS = 6
"""Largest number of columns of a table on the page. Wider tables are transposed unless they have more rows than columns."""

MAX_NAMED = 6
"""Largest number of rows, columns or tables that the heading of a note names."""

NO_BREAK_SPACE = "\N{NO-BREAK SPACE}"
Cell = dict[str, Any]


def main() -> None:
    """Write the file, and the pages from it."""
    FILE.write_text(text(content()))
    PAGE.write_text(page(status.load()))
    CLAIMS_PAGE.write_text(claims_page(status.load(), above_claims()))


def text(content: Mapping[str, list[Cell]]) -> str:
    """Text of the file, one entry per line."""
    lists = [f'"{key}": [\n' + ",\n".join(map(json.dumps, entries)) + "\n]" for key, entries in content.items()]
    return "{" + ",\n".join(lists) + "}\n"


# -- the file -----------------------------------------------------------------------------------------------------------


def content() -> dict[str, list[Cell]]:
    """All cells and all claims, in the order of the papers' experiments."""
    listed = tomllib.loads(TABLES.read_text())
    grids = {one["id"]: one for one in (*listed["tables"], *listed["problems"]) if "id" in one}
    made = {
        "cells": [cell for table in listed["tables"] for cell in cells(table)],
        "figures": [entry for figure in listed["figures"] for entry in claims(figure, grids)],
    }
    order = [(paper, experiment) for paper in PAPERS for experiment in status.EXPERIMENTS[paper]]
    return {
        key: sorted(entries, key=lambda entry: order.index((entry["paper"], entry["experiment"])))
        for key, entries in made.items()
    }


def claims(figure: Mapping[str, Any], grids: Mapping[str, Mapping[str, Any]]) -> list[Cell]:
    """Entries of a claim of `every_table.toml`. A ranking has one entry for each table on which it is judged."""
    entry = {key: figure[key] for key in ("paper", "experiment", "figure", "claim")}
    if "ranking" not in figure:
        shown, numbers = verdict(figure, ROOT)
        cause = figure.get("cause") if shown is False else None
        place = {"title": figure.get("title", figure["claim"]), "setting": figure.get("setting")}
        place["variant"] = figure.get("variant", False)
        place["ran"] = "check" in figure and numbers != figure.get("not_run", NO_FILE)
        facts = {"shown": shown, "printed": None, "command": figure["command"], "reason": prose(numbers)}
        return [{**entry, **place, **facts, "brief": None, "cause": cause}]
    found = []
    for name, changes in figure["on"].items():
        table, ranking = grids[name], Ranking(**{"when": {}, **figure["ranking"], **changes.get("ranking", {})})
        shown, printed, sentences, brief = ranked(ranking, table)
        given = {**figure, **changes}
        if shown is None and "not_run" in given:
            sentences.append(given["not_run"])
        about = given.get("about", table.get("about"))
        found.append(
            {
                **entry,
                "claim": f"{entry['claim']} ({about})" if about else entry["claim"],
                "title": given.get("title", given["claim"]),
                "setting": given.get("setting", table.get("label")),
                "variant": "path" not in table,
                "ran": brief["ours"] is not None,
                "shown": shown,
                "printed": printed,
                "command": given.get("command", table.get("claim_command", "")),
                "reason": prose(*sentences),
                "brief": {**brief, "remark": given.get("remark", given.get("not_run"))},
                "cause": given.get("cause") if shown is False else None,
            }
        )
    return found


def ranked(ranking: Ranking, table: Mapping[str, Any]) -> tuple[bool | None, bool | None, list[str], dict[str, Any]]:
    """Whether our numbers of a table show a ranking, whether the published numbers do, sentences of our numbers, and a brief."""
    axes, more = _all_axes(table)
    rows, every = _judged(table), ours_of(table)
    mine = {key: float(row["ours"]) for key, row in rows.items()}
    usual = {(*key, *more): float(row["ours"]) for key, row in every.items()}
    theirs = {(*key, *more): value for key, value in _corrected(table).items()} if "path" in table else {}

    def words(axis: str, value: str) -> str:
        text = _place(table, axis, value)
        return text.removeprefix("with ") if axis == ranking.axis else text

    def short(axis: str, value: str) -> str:
        return f"with {_short(table, axis, value)}" if axis == "network" != ranking.axis else words(axis, value)

    def pairs(numbers: Mapping[Key, float], words: Words = words) -> list[Comparison]:
        return ranking.compare(numbers, axes, _more_is_better, words)

    about = {key: row for key, row in rows.items() if ranking.uses(key, axes)}
    runs = _runs(table, about.values(), " each")
    missing = ranking.missing(mine, axes, words)
    ran = pairs({key: theirs[key] for key in mine if key in theirs})
    unrun = [one for one in pairs(theirs) if one not in ran]
    shown, text = told(ranking, pairs(mine), missing, runs, unrun)
    sizes = any("(M=128)" in name for name in missing)
    names = sorted(name if sizes else name.removesuffix(" (M=64)") for name in missing)
    if ranking.axis == "width":
        names = [f"{ranking.when['model']} with {name}" for name in names]
    brief: dict[str, Any] = {**in_brief(pairs(mine, short), names), "unrun": left_out(unrun, pairs(mine))}
    brief |= {"other": None, "paper": None}
    if "rank_other" in table and (others := pairs(usual)):
        text.append(f"{table['rank_other']}, {counted(others).lower()}")
        brief["other"] = [table["rank_brief"], share(others)]
    if printed := pairs(theirs):
        judged = "show" if ranking.holds(printed) else "do not show"
        partly = 0 < len(ran) < len(printed) and not all(one.holds for one in printed)
        holding = sum(one.holds for one in ran)
        part = f", among them {holding} of the {len(ran)} comparisons that we ran" if partly else ""
        text.append(f"The paper's own numbers {judged} the claim: {counted(printed).lower()}{part}")
        short_of_it = not ranking.holds(printed) and any(one.holds for one in printed)
        brief["paper"] = f"{'only ' if short_of_it else ''}{share(printed)}"
        brief["paper"] += f" ({holding} of the {len(ran)} that we ran)" if partly else ""
    recipes: dict[str, list[str]] = {}
    for key, row in about.items():
        if "recipe" in row:
            recipes.setdefault(row["recipe"], []).append(words(ranking.axis, key[axes.index(ranking.axis)]))
    return shown, ranking.holds(printed), text + _training(recipes) if shown is not None else text, brief


def _all_axes(table: Mapping[str, Any]) -> tuple[list[str], Key]:
    """Names of the axes of a table with its fixed ones, and the values of the fixed ones."""
    fixed = table.get("fixed", {})
    return [*table["axes"], *fixed], tuple(fixed.values())


def _judged(table: Mapping[str, Any]) -> dict[Key, Cell]:
    """Our rows that rankings are judged by, by the values of all axes of a table."""
    every, (axes, more) = ours_of(table), _all_axes(table)
    found = {(*key, *more): _both(table, every, key)[0] for key in every}
    return {key: row for key, row in found.items() if not _excluded(table, dict(zip(axes, key, strict=True)))}


def _excluded(table: Mapping[str, Any], setting: Mapping[str, str]) -> bool:
    """Whether rankings leave out a number: it is a misprint, or its score is not defined."""
    cases = [case["when"] for case in table.get("misprints", ())] + table.get("undefined", [])
    return any(fits(case, setting) for case in cases)


def _runs(table: Mapping[str, Any], rows: Iterable[Cell], each: str = "") -> str:
    """Numbers of seeds or splits of rows in words; empty if the table has none."""
    runs, kind = sorted({row["runs"] for row in rows}), table.get("runs_are", "seeds")
    spread = " to ".join(map(str, dict.fromkeys((runs[0], runs[-1])))) if runs else ""
    return f"{spread} {kind.removesuffix('s') if spread == '1' else kind}{each * (len(runs) > 1)}" if kind else ""


def _training(recipes: Mapping[str, list[str]]) -> list[str]:
    """Sentences about the training of systems, from comma-separated recipes and the systems of each."""
    parts = {recipe: recipe.split(", ") for recipe in recipes}
    if len(recipes) < 2:
        return [f"Training: {recipe}" for recipe in recipes]
    common = [part for part in next(iter(parts.values())) if all(part in own for own in parts.values())]
    own = [
        f"Training of {' and '.join(dict.fromkeys(systems))}: {', '.join(part for part in parts[recipe] if part not in common)}"
        for recipe, systems in recipes.items()
    ]
    return [f"Training of all systems: {', '.join(common)}", *own]


METRICS = {
    "ece": "ECE",
    "nll": "NLL",
    "brier": "Brier score",
    "auroc": "AUROC",
    "aupr": "AUPR",
    "ll": "log-likelihood",
    "log_likelihood": "log-likelihood",
    "elbo": "bound",
    "rmse": "RMSE",
    "mnll": "MNLL",
    "auroc_mutual_information": "AUROC by mutual information",
    "auroc_entropy": "AUROC by entropy",
    "auroc_mutual_information_fashion_mnist": "AUROC by mutual information",
    "auroc_entropy_fashion_mnist": "AUROC by entropy",
}
"""Displayed names of metrics. Other metrics are displayed as they are stored."""

DATASETS = {"mnist": "MNIST", "fashion_mnist": "Fashion-MNIST", "notmnist": "notMNIST"}

PLACES = {
    "severity": "at severity {}",
    "dataset": "on {}",
    "width": "with {} units",
    "outside": "on {}",
}
"""Displayed text of the value of an axis in a sentence, unless the table's `places` has its own text."""


def _place(table: Mapping[str, Any], axis: str, value: str) -> str:
    """Text of an axis and its value in a sentence, for example "at severity 1"."""
    if axis == "metric":
        return METRICS.get(value, value.replace("_", " "))
    name = _label(table, axis, value, DATASETS) or value.replace("_", " ")
    if axis == "network":
        layers, _, width = value.partition("x")
        return f"with {layers} layers of {width} units"
    return str({**PLACES, **table.get("places", {})}.get(axis, "{}").format(name))


def _label(table: Mapping[str, Any], axis: str, value: str, usual: Mapping[str, str]) -> str:
    """Displayed text of the value of an axis; empty if it has none. The labels of a table may have a dictionary for one axis."""
    labels = table.get("labels", {})
    own = labels.get(axis)
    return str({**usual, **(own if isinstance(own, dict) else labels)}.get(value, ""))


def _more_is_better(metric: str) -> bool:
    return metric.startswith(HIGHER_IS_BETTER)


def cells(table: Mapping[str, Any]) -> list[Cell]:
    """Entries of a table of `every_table.toml`."""
    theirs, mine = theirs_of(table), ours_of(table)
    axes: list[str] = table["axes"]
    split, columns = table.get("split"), table.get("columns")
    kinds = list(dict.fromkeys(key[axes.index(split)] for key in theirs)) if split else []
    printed = _printed_decimals(table, theirs)
    found = []
    for key, (value, spread) in theirs.items():
        setting = {**dict(zip(axes, key, strict=True)), **table.get("fixed", {})}
        names = {axis: _label(table, axis, name, METRICS) or name for axis, name in setting.items()}
        place = kinds.index(setting[split]) if split else 0
        down = [
            f"{names[axis]} units" if axis == "width" else names[axis].replace("_", " ")
            for axis in axes
            if axis not in (split, columns)
        ]
        across = names[columns] if columns else names["metric"]
        across = f"severity {across}" if columns == "severity" else across
        first, other = _both(table, mine, key)
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
            "digits": printed[key],
            "exact": table.get("exact", False),
            "corrected": round(value + change["add"], 6) if change else None,
            "correction": change.get("text"),
            "misprint": _first(table.get("misprints", ()), setting, True).get("text"),
            "ours": first.get("ours"),
            "ours_spread": first.get("error"),
            "ours_other": other.get("ours"),
            "other_is": table["other_is"] if other else None,
            "seeds": first.get("runs"),
            "better": "higher" if _more_is_better(setting["metric"]) else "lower",
            **{kind: any(fits(case, setting) for case in table.get(kind, ())) for kind in ("corrupted", "repeated")},
        }
        found.append({**cell, **_outcome(table, cell, setting, first)})
    return found


def _both(table: Mapping[str, Any], mine: Mapping[Key, Cell], key: Key) -> tuple[Cell, Cell]:
    """Our compared number, and our number next to it, such as the score of the mixture if single draws are compared."""
    usual = mine.get(key, {})
    compared = tuple(table.get("compared", {}).get(part, part) for part in key)
    return (mine[compared], usual) if compared != key and compared in mine else (usual, {})


def _outcome(table: Mapping[str, Any], cell: Cell, setting: Mapping[str, str], first: Cell) -> Cell:
    """Outcome of a cell: verdicts, the command that runs it again, and the reason if it is missing or not met."""
    ran = cell["ours"] is not None
    judged = {rule: None if cell["misprint"] else getattr(status, rule)(cell) for rule in ("met", "agrees")}
    layers, _, width = setting.get("network", "").partition("x")
    words = {"layers": layers, "width": width, **setting}
    command = _first(table.get("commands", ()), setting, True).get("text", table["command"])
    again = any(fits(case, setting) for case in table.get("no_command", ()))
    why = "" if judged["met"] else _first(table["reasons"], setting, ran)["text"]
    note = _first(table.get("notes", ()), setting, ran).get("text", "") if ran else ""
    replaced = any(value in table.get("compared", {}) for value in setting.values())
    kept = table["only_other"] if ran and replaced and "only_other" in table and cell["ours_other"] is None else ""
    return {
        **judged,
        "command": None if again else command.format(**words),
        **{fact: first.get(fact) if ran else None for fact in ("date", "hardware", "seconds")},
        "reason": why or None,
        "note": " ".join(part for part in (note, kept) if part) or None,
        "training": f"We used this training recipe: {first['recipe']}." if "recipe" in first else None,
    }


def _printed_decimals(table: Mapping[str, Any], theirs: Mapping[Key, tuple[float, float | None]]) -> dict[Key, int]:
    """Decimals of each published number: the largest number of decimals that its table has for the same metric.

    Trailing zeros are not stored. Counts and shares of counts have their own decimals.
    """
    own = {
        key: max(_decimals(part) for part in (numbers[:1] if table.get("exact") else numbers) if part is not None)
        for key, numbers in theirs.items()
    }
    if table.get("exact") or "metric" not in table["axes"]:
        return own if table.get("exact") else dict.fromkeys(own, max(own.values()))
    at = table["axes"].index("metric")
    most: dict[str, int] = {}
    for key, many in own.items():
        most[key[at]] = max(many, most.get(key[at], 0))
    return {key: most[key[at]] for key in own}


def _first(cases: Any, setting: Mapping[str, str], ran: bool) -> dict[str, Any]:
    """The first matching case. `ran` in a case restricts it to cells that were run, or were not run."""
    fitting = (case for case in cases if case.get("ran", ran) == ran and fits(case.get("when", {}), setting))
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


def _corrected(table: Mapping[str, Any]) -> dict[Key, float]:
    """Published numbers that rankings compare, after their corrections, by the values of the table's axes."""
    cases, axes = table.get("corrections", ()), table["axes"]
    found = {key: (value, dict(zip(axes, key, strict=True))) for key, (value, _) in theirs_of(table).items()}
    return {
        key: value + _first(cases, setting, True).get("add", 0)
        for key, (value, setting) in found.items()
        if not _excluded(table, setting)
    }


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
    """Our rows by the values of the table's axes, with date and hardware of their files.

    Several files may have one seed each. A table's `results` have one setting.
    """
    if "read" not in table:
        return {}
    module, _, function = table["read"].partition(".")
    read = getattr(importlib.import_module(f"bayesify_papers.{module}.rows"), function)
    found = _read(table, read, table["results"])
    for entry in table.get("instead", ()):
        case = {"files": entry} if isinstance(entry, str) else entry
        names = case.get("names", {})
        read_rows = _read(table, read, [case["files"]])
        rows = {tuple(names.get(part, part) for part in key): row for key, row in read_rows.items()}
        wanted = (key for key in rows if fits(case.get("when", {}), dict(zip(table["axes"], key, strict=True))))
        found |= {key: rows[key] for key in wanted}
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
    return {key: _together(rows) for key, rows in _alike(table, found).items()}


def _alike(table: Mapping[str, Any], found: Mapping[Key, list[Cell]]) -> dict[Key, list[Cell]]:
    """Rows of one recipe for each system, if rows name their recipe: the recipe with the most seeds, then the most
    epochs, then the newest.

    Seeds of different recipes are never averaged. Systems may have different recipes, as in the paper.
    """
    if not any("recipe" in row for rows in found.values() for row in rows):
        return dict(found)
    at = table["axes"].index("system")
    seeds: dict[tuple[str, str], set[Any]] = {}
    age: dict[tuple[str, str], tuple[int, str]] = {}  # epochs and date
    for key, rows in found.items():
        for row in rows:
            pair = key[at], row["recipe"]
            seeds.setdefault(pair, set()).add(row.get("seed"))
            age[pair] = max(age.get(pair, (0, "")), (row.get("epochs") or 0, row["date"]))
    chosen = dict(
        sorted(seeds, key=lambda pair: (len(seeds[pair]), age[pair], pair))
    )  # the last recipe of a system stays
    kept = {key: [row for row in rows if row["recipe"] == chosen[key[at]]] for key, rows in found.items()}
    return {key: rows for key, rows in kept.items() if rows}


def _together(rows: list[Cell]) -> Cell:
    """One row that summarizes rows of one seed each. Of several rows with the same seed, the last one counts."""
    own = list({row["seed"] if row.get("seed") is not None else place: row for place, row in enumerate(rows)}.values())
    if len(own) == 1:
        return own[0]
    values = [row["ours"] for row in own]
    every = [row["seconds"] for row in own if row["seconds"] is not None]
    spread = {"ours": statistics.fmean(values), "error": standard_error(values), "runs": len(values)}
    return {**own[-1], **spread, "seconds": round(statistics.fmean(every), 1) if every else None}


@cache
def _rows(read: Any, path: Path, name: str) -> list[Cell]:
    """Rows of one file. The file is copied to a folder, because readers take the folder that an experiment wrote.

    Each file is read once, because many tables and claims share their files.
    """
    with TemporaryDirectory() as folder:
        shutil.copy(path, Path(folder) / (path.name if path.suffix == ".jsonl" else name))
        rows: list[Cell] = read(Path(folder))
        return rows


# -- numbers of the claims ----------------------------------------------------------------------------------------------


def above_claims() -> dict[tuple[str, str], str]:
    """Text above the claims of each paper and experiment: settings, and the numbers that the claims compare."""
    listed = tomllib.loads(TABLES.read_text())
    grids = {one["id"]: one for one in (*listed["tables"], *listed["problems"]) if "id" in one}
    found = {}
    for block in listed["experiments"]:
        parts = [_settings(grids, block["settings"])] if "settings" in block else []
        if "about" in block:
            parts.insert(0, block["about"])
        if "facts" in block:
            parts.append(facts(block, ROOT))
        parts += [_scores(one, grids, listed["figures"]) for one in block.get("scores", ())]
        found[block["paper"], block.get("experiment", "")] = "\n\n".join(parts)
    return found


def _settings(grids: Mapping[str, Mapping[str, Any]], names: Iterable[str]) -> str:
    """A list of settings that claims name, with their training."""
    lines = []
    for name in names:
        table = grids[name]
        recipes: dict[str, list[str]] = {}
        for key, row in _judged(table).items():
            if "recipe" in row and key[0] in table["labels"]:
                recipes.setdefault(row["recipe"], []).append(_short(table, "system", key[0]))
        common, *own = _training(recipes) or [""]
        parts = [
            common.partition(": ")[2],
            *(one.removeprefix("Training of ").replace(":", " for") for one in own),
        ]
        training = f" Training: {'; '.join(parts)}." if common else ""
        lines.append(f"- **{_capital(table['label'])}**: {table['about'].partition(', ')[0]}.{training}")
    return "\n".join(lines)


def _scores(block: Mapping[str, Any], grids: Mapping[str, Mapping[str, Any]], figures: Iterable[Any]) -> str:
    """A table of the numbers of ours that rankings compare.

    Args:
        block: `on`: tables of the numbers; `down`, `across`: axes of the rows and of the columns; `when`: settings of the numbers;
            `title`: title with {runs} for the number of seeds or splits.
        grids: All tables by their ids.
        figures: All claims.
    """
    lines: dict[Key, dict[str, str]] = {}
    runs: dict[Key, set[int]] = {}
    figures = [one for one in figures if "ranking" in one]
    for name in block["on"]:
        table, (axes, _) = grids[name], _all_axes(grids[name])
        rankings = [
            Ranking(**{"when": {}, **one["ranking"], **one["on"][name].get("ranking", {})})
            for one in figures
            if name in one["on"]
        ]
        judged = _judged(table)
        wanted = set().union(
            *(one.compared({key: row["ours"] for key, row in judged.items()}, axes) for one in rankings)
        )
        for key, row in judged.items():
            setting = dict(zip(axes, key, strict=True))
            if key not in wanted or not fits(block.get("when", {}), setting):
                continue
            place = tuple(
                table["label"] if axis == "network" and axis not in axes else _short(table, axis, setting[axis])
                for axis in block["down"]
            )
            across = " ".join(_short(table, axis, setting[axis]) for axis in block["across"])
            lines.setdefault(place, {})[across] = brief_number(row["ours"])
            runs.setdefault(place, set()).add(row["runs"])
    heads = list(dict.fromkeys(across for own in lines.values() for across in own))
    every = sorted({one for own in runs.values() for one in own})
    told = len(every) > 1 and all(len(own) == 1 for own in runs.values())
    first = [block.get("names", {}).get(axis, axis) for axis in block["down"]]
    seen = [list(dict.fromkeys(place[at] for place in lines)) for at in range(len(first))]
    rows, above = [], tuple("" for _ in first)
    for place in sorted(lines, key=lambda place: [_rank(name, names) for name, names in zip(place, seen, strict=True)]):
        shared = next((at for at, (one, other) in enumerate(zip(place, above, strict=True)) if one != other), 0)
        count = [str(*runs[place])] if told else []
        rows.append([*([""] * shared), *place[shared:], *count, *(lines[place].get(head, "") for head in heads)])
        above = place
    spread = " to ".join(map(str, dict.fromkeys((every[0], every[-1]))))
    header = [*first, *(["seeds"] if told else []), *heads]
    return f"{block['title'].format(runs=spread)}\n\n{markdown_table(header, rows)}"


def _rank(name: str, names: list[str]) -> int:
    """Order of a row: numbers by their size, and other names in the order of the results."""
    return int(name) if name.isdigit() else names.index(name)


def _short(table: Mapping[str, Any], axis: str, value: str) -> str:
    """Name of the value of an axis in a table of numbers."""
    if axis == "metric":
        return METRICS.get(value, value.replace("_", " "))
    if axis == "network":
        return value.replace("x", " x ")
    return (_label(table, axis, value, DATASETS) or value.replace("_", " ")).partition(" (")[0]


def _capital(text: str) -> str:
    return text[0].upper() + text[1:]


# -- the page -----------------------------------------------------------------------------------------------------------


def page(content: Mapping[str, list[Cell]]) -> str:
    """The whole page, from the content of `tables.json`."""
    parts = [INTRO, "```text\n" + status.summary(content) + "\n```\n", _contents()]
    for paper, title in PAPERS.items():
        run = f"The page of this paper describes [how the experiments were run]({paper}.md)."
        parts.append(f"## {title}: {paper.replace('-', ' ')}\n\n{run}\n")
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
            if own["figures"]:
                parts.append(_claims(own["figures"]))
    return "\n".join(parts)


def _contents() -> str:
    """Links to the experiments, because the page has no menus. A repeated heading has a number in its address."""
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
    lines = [["", *heads]]
    for row in dict.fromkeys(cell["row"] for cell in own):
        lines.append([row, *(_text(places[row, head]) if (row, head) in places else "" for head in heads)])
    if len(heads) > max(MAX_COLUMNS, len(lines)):
        lines = [list(line) for line in zip(*lines, strict=True)]
    return f"**{name}**\n\n{markdown_table(lines[0], lines[1:])}\n"


def _below(own: list[Cell]) -> str:
    """Text about the cells of an experiment's tables: reasons, corrections, and the command of the first cell."""
    text = [
        f"- {_which(key, note, own)}{note}" for key in ("reason", "note", "training") for note in _several(own, key)
    ]
    text += [f"- **Correction of published numbers**: {note}" for note in _several(own, "correction")]
    text += [f"- The number after the slash is {note}." for note in _several(own, "other_is")]
    text += [f"- **Misprint in the paper**: {note}" for note in _several(own, "misprint")]
    if commands := _several(own, "command"):
        first = next(cell for cell in own if cell["command"])
        place = f" of the cell *{first['row']}, {first['column']}*" if len(commands) > 1 else ""
        text.append(f"- The command{place} is `{commands[0]}`")
    return "\n".join(text) + "\n"


def _several(own: list[Cell], key: str) -> list[str]:
    """The different values that cells have for a key."""
    return list(dict.fromkeys(cell[key] for cell in own if cell[key]))


def _which(key: str, note: str, own: list[Cell]) -> str:
    """A heading for the cells that a note is about. It is empty if these are all cells."""
    about = [cell for cell in own if cell[key] == note]
    ran = about[0]["ours"] is not None
    alike = [
        cell for cell in own if (cell["ours"] is not None) == ran and (not ran or key != "reason" or not cell["met"])
    ]
    if len(about) == len(own):
        return ""
    if not ran and len(about) == len(alike):
        return "**Cells without a number**: "
    for axis in ("column", "row"):
        names = _several(about, axis)
        if len(names) <= MAX_NAMED and sum(cell[axis] in names for cell in own) == len(about):
            return f"**{'; '.join(names)}**: "
    tables = _several(about, "table")
    if len(tables) <= MAX_NAMED and sum(cell["table"] in tables for cell in alike) == len(about) < len(alike):
        return f"**{'; '.join(dict.fromkeys(name.partition(':')[0] for name in tables))}**: "
    if len(about) == len(alike):
        return "**Cells where we miss the paper's number**: " if key == "reason" else "**Cells with a number**: "
    return f"**{_grouped(about, own) or 'Other cells without a number'}**: "


def _grouped(about: list[Cell], own: list[Cell]) -> str:
    """Names of cells, grouped by row or by column; empty if there are too many cells without a number.

    A row or column stands alone if the note is about all its cells that were run, or about all that were not run.
    """
    ran = about[0]["ours"] is not None
    alike = [cell for cell in own if (cell["ours"] is not None) == ran]
    named, every = (_places(cells) for cells in (about, alike))
    axis = min((0, 1), key=lambda one: len(named[one]))
    groups = named[axis]
    if sum(map(len, groups.values())) > 2 * MAX_NAMED:
        return "; ".join(groups) if ran else ""
    between = "; " if any("," in place for places in groups.values() for place in places) else ", "
    return "; ".join(
        name if places.keys() == every[axis][name].keys() else f"{name} ({between.join(places)})"
        for name, places in groups.items()
    )


def _places(cells: list[Cell]) -> tuple[dict[str, dict[str, None]], dict[str, dict[str, None]]]:
    """The columns of each row, and the rows of each column, in which cells are."""
    by_row: dict[str, dict[str, None]] = {}
    by_column: dict[str, dict[str, None]] = {}
    for cell in cells:
        by_row.setdefault(cell["row"], {})[cell["column"]] = None
        by_column.setdefault(cell["column"], {})[cell["row"]] = None
    return by_row, by_column


def _decimals(number: float) -> int:
    return len(f"{number:g}".partition(".")[2]) if abs(number) < 1e5 else 0


def _claims(own: list[Cell]) -> str:
    told = []
    for variant in (False, True):
        counts = Counter(one["shown"] for one in own if one["variant"] == variant)
        told.append(", ".join(f"{counts[shown]} {word}" for shown, word in status.VERDICTS.items() if counts[shown]))
    ours = f" With our settings: {told[1]}." if told[1] else ""
    return f"[Claims](claims.md) of this experiment: {told[0]}.{ours}\n"


def _number(value: float, digits: int) -> str:
    """A number as it is judged, see `status.rounded`."""
    return f"{status.rounded(value, digits):,f}"


def _text(cell: Cell) -> str:
    digits = cell["digits"]
    paper, ours = (
        f"{NO_BREAK_SPACE}±{NO_BREAK_SPACE}".join(_number(part, digits) for part in number if part is not None)
        for number in ((cell["published"], cell["published_spread"]), (cell["ours"], cell["ours_spread"]))
    )
    if cell["corrected"] is not None:
        paper += f"{NO_BREAK_SPACE}→{NO_BREAK_SPACE}{_number(cell['corrected'], digits)}"
    if cell["misprint"]:
        paper += ", a misprint"
    if cell["ours"] is None:
        return f"– ({paper})"
    other = "" if cell["ours_other"] is None else f" / {_number(cell['ours_other'], digits)}"
    mark = "**" if cell["met"] else ""
    return f"{mark}{ours}{mark}{'≈' if cell['agrees'] else ''}{other} ({paper})"


if __name__ == "__main__":
    main()
