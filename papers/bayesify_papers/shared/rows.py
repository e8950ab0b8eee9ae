"""Results of every experiment in one form: a setting, a score, our number and the published one.

A row is plain data:

    setting               what was run, such as {"dataset": "yacht", "model": "WHVI"}
    metric                the score's name
    runs, ours, error     number of seeds or splits, our mean, and its standard error
    published             the paper's number, None if it has none for this setting
    published_std         standard deviation of the paper's number
    difference            our number minus the published number
    deviations            the difference in published standard deviations, None if the paper prints none or 0.00
    seconds               seconds of training and fitting, if the experiment records them
    timing                True for measured times, which differ from run to run
"""

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from bayesify_papers.shared.scores import standard_error
from bayesify_papers.shared.tables import brief, number, table, with_spread

Row = dict[str, Any]
Published = tuple[float, float | None] | float | None


def row(setting: Mapping[str, Any], metric: str, values: float | Sequence[float], published: Published = None) -> Row:
    """One row of results.

    Args:
        metric: The score's name.
        values: Score of each run, or their mean, in the unit of the published number.
        published: Published mean and standard deviation, or the mean alone.
    """
    every = [float(value) for value in ([values] if isinstance(values, (int, float)) else values)]
    ours = statistics.fmean(every)
    mean, std = published if isinstance(published, tuple) else (published, None)
    difference = None if mean is None else ours - mean
    return {
        "setting": dict(setting),
        "metric": metric,
        "runs": len(every),
        "ours": ours,
        "error": standard_error(every),
        "published": mean,
        "published_std": std,
        "difference": difference,
        "deviations": difference / std if difference is not None and std else None,
    }


def grouped(
    entries: Iterable[Mapping[str, Any]],
    keys: Sequence[str],
    metrics: Sequence[str],
    published: Callable[[str, Mapping[str, Any]], Published] = lambda metric, setting: None,
) -> list[Row]:
    """A row for each score of each setting. It summarizes all entries with this setting."""
    groups: dict[tuple[Any, ...], list[Mapping[str, Any]]] = {}
    for entry in entries:
        groups.setdefault(tuple(entry[key] for key in keys), []).append(entry)
    rows = []
    for values, own in groups.items():
        setting = dict(zip(keys, values, strict=True))
        rows += [
            row(setting, metric, [one[metric] for one in own], published(metric, setting))
            for metric in metrics
            if own[0].get(metric) is not None
        ]
    return rows


def show(rows: Sequence[Row], title: str = "") -> str:
    """Rows as text: a table for each kind of setting, a line for each setting, each score next to the published one."""
    kinds: dict[tuple[str, ...], list[Row]] = {}
    for one in rows:
        kinds.setdefault(tuple(one["setting"]), []).append(one)
    return "\n\n".join([title] * bool(title) + [_table(keys, own) for keys, own in kinds.items()])


def _table(keys: Sequence[str], rows: Sequence[Row]) -> str:
    columns: list[tuple[str, str, Callable[[Row], str]]] = []  # metric, title, cell
    for metric in dict.fromkeys(one["metric"] for one in rows):
        own = [one for one in rows if one["metric"] == metric]
        columns.append((metric, metric, lambda one: with_spread(one["ours"], one["error"])))
        if any(one["published"] is not None for one in own):
            columns.append((metric, "paper", lambda one: with_spread(one["published"], one["published_std"])))
        if any(one["deviations"] is not None for one in own):
            columns.append((metric, "diff/sd", lambda one: number(one["deviations"], 1)))
    found: dict[tuple[Any, ...], dict[str, Row]] = {}
    for one in rows:
        found.setdefault(tuple(one["setting"].values()), {})[one["metric"]] = one
    lines = []
    for setting, scores in found.items():
        first = next(iter(scores.values()))
        cells = [cell(scores[metric]) if metric in scores else "-" for metric, _, cell in columns]
        lines.append([*map(str, setting), str(first["runs"]), *cells, brief(first.get("seconds"))])
    titles = [title for _, title, _ in columns]
    return table([*(key.replace("_", " ") for key in keys), "runs", *titles, "seconds"], lines)
