"""The table of a comparison: means and standard errors over splits, ranks, and tests."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np

from bayesify.compare.contestants import cost_rank, title_of
from bayesify.compare.paired import Difference, adjusted, paired_difference
from bayesify.tables.targets import Task
from bayesify.tables.written_numbers import significant

Results = Mapping[tuple[str, int], Mapping[str, Any]]
"""Mapping from pairs (method, split) to the results of finished runs."""
SIGNIFICANCE_LEVEL = 0.05
RANKING_SCORE = "nll"
"""The score by which methods are ranked."""
DATA_PARTS = ("fit", "calibration", "test")
MIN_NAMED_NATS = 0.02
"""Minimum difference that matters, in nats per row. It means 2 % more probability for the truth, or 2 % narrower intervals."""
LEADS, UNCLEAR, BEHIND = "tied with the best", "not clearly behind", "behind"


@dataclass(frozen=True)
class Column:
    """A column of the table."""

    key: str  # key in `MethodRow.means`
    heading: str
    unit: str = ""
    factor: float = 1.0  # factor by which the stored number is multiplied before it is shown
    digits: int | None = None  # digits after the decimal point; `None` for three significant digits
    better: str | float = "low"  # `"low"` or `"high"` if such values are better, or the best value itself

    @property
    def label(self) -> str:
        """Heading and unit."""
        return f"{self.heading}, {self.unit}" if self.unit else self.heading


COSTS = (
    Column("train_seconds", "Training", "s", 1, 1),
    Column("predict_ms", "Prediction", "ms / 1,000 rows", 1, 0),
    Column("parameters", "Parameters", "", 1, 0),
    Column("kilobytes", "File", "kB", 1, 0),
)
SCORES: dict[Task, tuple[Column, ...]] = {
    "regression": (
        Column("rmse", "RMSE"),
        Column("crps", "CRPS"),
        Column("calibration", "Calibration error", "%", 100, 1),
    ),
    "classification": (
        Column("accuracy", "Accuracy", "%", 100, 1, "high"),
        Column("brier", "Brier", "", 1, 3),
        Column("ece", "Calibration error", "%", 100, 1),
    ),
}
COVERAGES = tuple(Column(f"coverage_{level}", f"{level} % cover", "%", 100, 0, level / 100) for level in (50, 90, 95))
COLUMNS: dict[Task, tuple[Column, ...]] = {
    task: (Column("nll", "NLL", "nats", 1, 3), *own, *COVERAGES, *COSTS) for task, own in SCORES.items()
}
"""Columns of the table for each task."""


@dataclass(frozen=True)
class MethodRow:
    """One method in the table.

    Args:
        name: Name in code and on the command line.
        title: Name for readers.
        splits: Splits from which the means are computed.
        means: Mean of every score and cost; `None` if a mean is unknown.
        errors: Standard errors of the means; `None` for a single split.
        failure: Reason why some or all runs failed; empty if no run failed.
        behind: Difference of this method's NLL from the NLL of the best method; `None` for the best method and for methods
            without a rank.
        p: p-value of this difference, adjusted for the number of methods; NaN if the difference cannot be tested.
        standing: `LEADS` if the method is tied with the best method. `BEHIND` if this method, or a method ranked above
            it, is clearly behind the best method. Otherwise `UNCLEAR`.
    """

    name: str
    title: str
    splits: tuple[int, ...]
    means: Mapping[str, float | None]
    errors: Mapping[str, float | None]
    failure: str = ""
    behind: Difference | None = None
    p: float = math.nan
    standing: str = ""

    @property
    def leads(self) -> bool:
        """Whether this is the best method, or tied with the best method."""
        return self.standing == LEADS

    @property
    def clearly_behind(self) -> bool:
        """Whether the best method is better according to the paired test, and by enough to matter."""
        return self.behind is not None and is_clear(self.behind, self.p)

    @property
    def tied(self) -> bool:
        """Whether the method is tied with the best: within a standard error of it, too little behind to matter, or not tested."""
        return self.behind is None or not (
            self.behind.mean > max(MIN_NAMED_NATS, self.behind.error) or self.clearly_behind
        )


def is_clear(difference: Difference, p: float | None = None) -> bool:
    """Whether a difference is neither due to chance nor too small to matter. If an adjusted p-value `p` is given, it
    replaces the difference's own p-value."""
    return (difference.p if p is None else p) < SIGNIFICANCE_LEVEL and difference.mean >= MIN_NAMED_NATS


@dataclass(frozen=True)
class Summary:
    """A comparison in numbers.

    Args:
        task: Task of the target.
        rows: Ranked methods from best to worst, then methods that failed.
        splits: Splits that all ranked methods have finished.
        results: Results of all finished runs.
    """

    task: Task
    rows: tuple[MethodRow, ...]
    splits: tuple[int, ...]
    results: Results = field(repr=False, compare=False)

    @property
    def ranked(self) -> list[MethodRow]:
        """Methods without a failure, from best to worst."""
        return [row for row in self.rows if not row.failure and row.means]

    @property
    def best(self) -> MethodRow | None:
        """The method with the lowest mean NLL."""
        return self.ranked[0] if self.ranked else None

    @property
    def leading(self) -> list[MethodRow]:
        """The best method and the methods that are tied with it."""
        return [row for row in self.ranked if row.leads]

    @property
    def contenders(self) -> list[MethodRow]:
        """Methods in `leading` that rank above all methods outside `leading`. The other methods in `leading` are tied only
        because their scores vary.
        """
        return list(itertools.takewhile(lambda row: row.leads, self.ranked))

    def of_splits(self, name: str, part: str, key: str) -> list[Any]:
        """One entry per split from a method's runs, found by two keys such as `"scores"` and `"nll"`."""
        return [self.results[name, split][part].get(key) for split in self.splits]

    @cached_property
    def num_rows(self) -> int:
        """Number of different rows that the splits test."""
        known = {split: entry["rows"] for (_, split), entry in self.results.items() if "rows" in entry}
        counts: list[dict[str, int]] = [rows for split, rows in known.items() if split in self.splits]
        tested = sum(rows["test"] for rows in counts)
        return min([tested, *(sum(rows.get(part, 0) for part in DATA_PARTS) for rows in counts)])

    @cached_property
    def test_share(self) -> float:
        """Number of test rows per training row."""
        counts = [entry["rows"] for entry in self.results.values() if "rows" in entry]
        return float(np.mean([rows["test"] / rows["fit"] for rows in counts])) if counts else 0.0

    def difference(self, worse: str, better: str) -> Difference:
        """Difference between the NLLs of two ranked methods. It uses the NLLs of single rows if they are known."""
        first, second = (self.of_splits(name, "scores", RANKING_SCORE) for name in (worse, better))
        losses = [self.of_splits(name, "curves", "losses") for name in (worse, better)]
        if any(loss is None for part in losses for loss in part):
            return paired_difference(first, second, self.test_share)
        rows = [np.subtract(*pair) for pair in zip(*losses, strict=True)]
        return paired_difference(first, second, self.test_share, rows, self.num_rows)

    def chosen_elsewhere(self) -> list[str]:
        """For each split, the method with the lowest mean NLL on all other splits; empty for a single split.

        The left-out split does not influence the choice, so the chosen method's score on this split is not optimistic.
        """
        names = [row.name for row in self.ranked]
        table = np.array([self.of_splits(name, "scores", RANKING_SCORE) for name in names])
        if len(self.splits) < 2:
            return []
        return [names[int(np.delete(table, split, 1).mean(1).argmin())] for split in range(table.shape[1])]

    def row(self, name: str) -> MethodRow | None:
        """The row of a ranked method; `None` if the method is not ranked."""
        return next((row for row in self.ranked if row.name == name), None)


def summarize(results: Results, methods: Sequence[str], task: Task) -> Summary:
    """Summarize the results of runs as a table.

    A method is ranked if none of its runs failed. The ranking uses the splits that all ranked methods have finished. Methods are
    ordered by their mean NLL, rounded to three decimals as in the table. Among methods with the same rounded NLL, the cheapest
    comes first.
    """
    finished = {name: [split for other, split in results if other == name] for name in methods}
    failures = {name: _failure(name, splits, results) for name, splits in finished.items()}
    sound = [name for name in methods if finished[name] and not failures[name]]
    common = sorted(set.intersection(*(set(finished[name]) for name in sound))) if sound else []
    found = Summary(task, (), tuple(common), results)

    def place(name: str) -> tuple[float, int]:
        return round(float(np.mean(found.of_splits(name, "scores", RANKING_SCORE))), 3), cost_rank(name)

    order = sorted(sound, key=place) if common else []
    behind = {name: found.difference(name, order[0]) for name in order[1:]}
    p = adjusted({name: difference.p for name, difference in behind.items()})
    rows: list[MethodRow] = []
    for name in order:
        row = _row(name, common, results, behind=behind.get(name), p=p.get(name, math.nan))
        behind_too = row.clearly_behind or any(above.standing == BEHIND for above in rows)
        rows.append(replace(row, standing=LEADS if row.tied else BEHIND if behind_too else UNCLEAR))
    for name in methods:
        if name not in order and (finished[name] or failures[name]):
            good = [split for split in finished[name] if "error" not in results[name, split]]
            rows.append(_row(name, good, results, failure=failures[name]))
    return replace(found, rows=tuple(rows))


def _failure(name: str, splits: Sequence[int], results: Results) -> str:
    wrong = {split: str(results[name, split]["error"]) for split in splits if "error" in results[name, split]}
    if not wrong:
        return ""
    split, reason = min(wrong.items())
    if len(wrong) == len(splits):
        return reason if reason.startswith("left out") else f"failed: {reason}"
    return f"failed on {len(wrong)} of {len(splits)} splits, such as split {split + 1}: {reason}"


def _row(name: str, splits: Sequence[int], results: Results, **more: Any) -> MethodRow:
    means: dict[str, float | None] = {}
    errors: dict[str, float | None] = {}
    found = [_flat(results[name, split]) for split in splits]
    for key in dict.fromkeys(key for entry in found for key in entry):
        values = [entry[key] for entry in found if key in entry]  # some entries exist only for one split
        known = all(value is not None for value in values)
        means[key] = float(np.mean(values)) if known else None
        errors[key] = float(np.std(values, ddof=1) / math.sqrt(len(values))) if known and len(values) > 1 else None
    return MethodRow(name, title_of(name), tuple(splits), means, errors, **more)


def _flat(result: Mapping[str, Any]) -> dict[str, Any]:
    size = result["bytes"]
    return {
        **result["scores"],
        **result["times"],
        "parameters": result["parameters"],
        "kilobytes": None if size is None else size / 1000,
        **result.get("ood", {}),
    }


# -- numbers as text ---------------------------------------------------------------------------------------------------

MISSING_MARK = "–"
MIN_HUGE_SCORE = 1e5
"""Scores of at least this size come from a method that failed. They are shown as powers of ten."""


def show(value: float | None, column: Column) -> str:
    """A number of a column as text."""
    if value is None or math.isnan(value):
        return MISSING_MARK
    shown = value * column.factor
    if abs(shown) >= MIN_HUGE_SCORE and column not in COSTS:
        return f"{shown:.1e}"
    if column.digits is not None:
        return f"{shown:,.{column.digits}f}".replace("-0.000", "0.000")
    return significant(shown)


def cell(row: MethodRow, column: Column, *, spread: bool = True) -> str:
    """Mean and standard error of a row as text."""
    mean, error = row.means.get(column.key), row.errors.get(column.key)
    text = show(mean, column)
    if text == MISSING_MARK or not spread or error is None or column in COSTS or "e+" in text:
        return text
    return f"{text} ± {error * column.factor:,.{len(text.partition('.')[2])}f}"
