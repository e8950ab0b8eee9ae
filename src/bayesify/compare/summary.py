"""The table of a comparison: ranks, tests, and means and standard errors over splits."""

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np

from bayesify.compare.contestants import cost_rank, title_of
from bayesify.tables.targets import Task
from bayesify.tables.written_numbers import significant


@dataclass(frozen=True)
class Difference:
    """Difference between the scores of two methods on the same splits."""

    mean: float  # mean of the differences
    error: float  # standard error of the mean, corrected for splits that share rows
    p: float  # probability of at least this difference if the methods were equally good; NaN for a single split


def paired_difference(
    first: Sequence[float],
    second: Sequence[float],
    test_share: float,
    rows: Sequence[np.ndarray] | None = None,
    num_rows: int = 0,
) -> Difference:
    r"""The corrected resampled t-test (Nadeau & Bengio 2003), which also uses the scores of single rows if they are given.

    On row i of split j, the scores differ by $d_{ij} = \delta + b_j + e_{ij}$, where $b_j$ varies with the training run and
    $e_{ij}$ with the row. Let $\sigma_e^2$ be the variance within splits, let $\sigma_b^2$ be the variance of the J means
    $\bar d_j$, reduced by $\sigma_e^2 / n_j$, and let N be the number of different rows. Then

    $$ t = \frac{\bar d}{\sqrt{(\frac1J + \rho) \sigma_b^2 + \sigma_e^2 / N}}, \qquad \rho = n_\text{test} / n_\text{train}, $$

    with J - 1 degrees of freedom, or N - 1 if $\sigma_b^2$ is 0. Training runs share nearly all rows. Without $\rho$, the test
    would treat the runs as independent and find differences that do not exist.

    `first` and `second` are the scores of two methods, one per split, `test_share` is $\rho$, `rows` are the differences $d_{ij}$
    on single rows, as J arrays $[n_j]$, and `num_rows` is N. Without `rows`, all variance is attributed to the splits.
    """
    if len(first) != len(second) or not first:
        remedy = "give scores of the same splits for both methods"
        raise ValueError(f"paired_difference: the methods have {len(first)} and {len(second)} splits; {remedy}")
    differences = np.subtract(first, second)
    count, mean = len(differences), float(differences.mean())
    if count == 1:
        return Difference(mean, math.nan, math.nan)
    between, within = float(differences.var(ddof=1)), 0.0
    if rows is not None:
        sizes = np.array([len(row) for row in rows])
        row_variance = sum(float(np.square(row - row.mean()).sum()) for row in rows) / max(1, sizes.sum() - count)
        between = max(0.0, between - row_variance * float((1 / sizes).mean()))
        within = row_variance / num_rows
    splits = (1 / count + test_share) * between
    error = math.sqrt(splits + within)
    if error == 0:
        return Difference(mean, 0.0, 1.0 if mean == 0 else 0.0)
    from scipy.stats import t

    freedom = count - 1 if splits > 0 else num_rows - 1
    return Difference(mean, error, float(2 * t.sf(abs(mean) / error, freedom)))


def adjusted(values: Mapping[str, float]) -> dict[str, float]:
    r"""The p-values adjusted for the number m of tests, $\min_{j \ge i} p_{(j)} m / j$ (Benjamini & Hochberg 1995). NaN stays NaN.

    If differences with an adjusted p-value below 0.05 are called clear, at most 5 % of them are expected to be due to chance.
    """
    known = {name: value for name, value in values.items() if not math.isnan(value)}
    if not known:
        return dict(values)
    from scipy.stats import false_discovery_control

    return {**values, **dict(zip(known, false_discovery_control(list(known.values())).tolist(), strict=True))}


Results = Mapping[tuple[str, int], Mapping[str, Any]]
"""Mapping from pairs (method, split) to the results of finished runs."""
SIGNIFICANCE_LEVEL = 0.05
RANKING_SCORE = "nll"
"""The score by which methods are ranked."""
MIN_NAMED_NATS = 0.02
"""Minimum difference that matters, in nats per row. It means 2 % more probability for the truth, or 2 % narrower intervals."""
LEADS, UNCLEAR, BEHIND = "tied with the best", "not clearly behind", "behind"


@dataclass(frozen=True)
class Column:
    """A column of the comparison's table."""

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
    """One row of the comparison's table: a method and its results.

    Args:
        name: Name in code and on the command line.
        title: Name for readers.
        splits: Splits from which the means are computed.
        means: Mean of every score and cost; `None` if a mean is unknown.
        errors: Standard errors of the means; `None` for a single split.
        failure: Reason why some or all runs failed; empty if no run failed.
        behind: Difference of this method's NLL from the NLL of the best method; `None` for the best method and for methods
            without a rank.
        p: p-value of the difference `behind`, adjusted for the number of methods; NaN if the difference cannot be tested.
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
        """Whether the best method is better than this method by enough to matter, and the paired test confirms it."""
        return self.behind is not None and is_clear(self.behind, self.p)

    @property
    def tied(self) -> bool:
        """Whether the method is tied with the best method. A method is tied if its NLL is within a standard error of the best
        NLL, if the difference is too small to matter, or if `behind` is `None`."""
        return self.behind is None or not (
            self.behind.mean > max(MIN_NAMED_NATS, self.behind.error) or self.clearly_behind
        )


def is_clear(difference: Difference, p: float | None = None) -> bool:
    """Whether a difference is statistically significant (by the adjusted p-value `p`, if given) and large enough to matter."""
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
        """Methods in `leading` that rank above all others. The rest of `leading` is tied only because its scores vary much."""
        return list(itertools.takewhile(lambda row: row.leads, self.ranked))

    def of_splits(self, name: str, part: str, key: str) -> list[Any]:
        """The values of one entry of a method's results, one per split; for example `part="scores"` and `key="nll"`."""
        return [self.results[name, split][part].get(key) for split in self.splits]

    @cached_property
    def num_rows(self) -> int:
        """Number of different rows that are test rows in at least one split."""
        known = {split: entry["rows"] for (_, split), entry in self.results.items() if "rows" in entry}
        counts: list[dict[str, int]] = [rows for split, rows in known.items() if split in self.splits]
        return min([sum(rows["test"] for rows in counts), *(sum(rows.values()) for rows in counts)])

    @cached_property
    def test_share(self) -> float:
        """Number of test rows divided by the number of training rows."""
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
    ordered by their mean NLL, rounded to three decimals as in the table, and then from cheap to expensive.
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


MISSING_MARK = "–"
MIN_HUGE_SCORE = 1e5
"""Scores of at least this size come from a method that failed. They are shown as powers of ten."""


def show(value: float | None, column: Column) -> str:
    """A number as text, in the format of a column."""
    if value is None or math.isnan(value):
        return MISSING_MARK
    shown = value * column.factor
    if abs(shown) >= MIN_HUGE_SCORE and column not in COSTS:
        return f"{shown:.1e}"
    if column.digits is not None:
        return f"{shown:,.{column.digits}f}".replace("-0.000", "0.000")
    return significant(shown)


def cell(row: MethodRow, column: Column, *, spread: bool = True) -> str:
    """Mean and standard error of a method in one column, as text."""
    mean, error = row.means.get(column.key), row.errors.get(column.key)
    text = show(mean, column)
    if text == MISSING_MARK or not spread or error is None or column in COSTS or "e+" in text:
        return text
    return f"{text} ± {error * column.factor:,.{len(text.partition('.')[2])}f}"
