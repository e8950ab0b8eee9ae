"""Reasons for predictions: how much each column contributes to the mean and to the width of the interval, and why a row is
unusual."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from bayesify.predictive.classification import ClassificationPredictive
from bayesify.predictive.regression import RegressionPredictive
from bayesify.sklearn.fitted import FittedTable, spread
from bayesify.sklearn.unusual import Neighbors
from bayesify.tables.written_numbers import shown, significant

MAX_GROUPS = 10
"""Maximum number of columns that explain a row. In a wider table, the nine most important columns stand alone, and all others
count as one column. Each row needs 2 x 10 - 1 predictions, and the typical row one more, so an explanation costs at most 20
times as much as a prediction."""
SCREENED_ROWS = 16
"""Number of training rows from which the columns of a wide table are ranked."""
CHUNK_ROWS = 500
"""Number of rows that are explained at a time."""
ROUNDING_SHARE = 1e-9
"""A contribution below this share of the largest intermediate value is a rounding error and counts as 0."""
NUM_TOLD, MIN_TOLD_SHARE = 3, 0.01
"""Maximum number of columns that a text lists, and minimum share of all contributions that each listed column must have."""
MAX_CELL_CHARACTERS = 40
EMPTY_CELL = "empty"

Measure = Callable[[np.ndarray], np.ndarray]
"""A function from inputs [K, E] to Q quantities that are explained, [K, Q]."""


@dataclass(frozen=True)
class Explanation:
    r"""Reasons for predictions: contributions of D columns to the predictions of N rows.

    To explain a row, the cells of a typical row are replaced by those of the explained row, one after the other. A column's
    contribution is the change of the prediction when the column's cell is replaced. It is averaged over two orders of the
    columns: the table's order and its reverse. The contributions of a row add up to its prediction minus the typical row's
    prediction. In an additive model, a contribution is the change of the column's term. If no term of the model joins more than
    two columns, the contributions equal the Shapley values (Shapley 1953; Mitchell et al. 2022), which average over all D! orders
    $\pi$ of the columns,

    $$ \phi_j = \frac{1}{D!} \sum_\pi v(\pi_{<j} \cup \{j\}) - v(\pi_{<j}), $$

    where v(S) is the prediction for the typical row after the cells in the set S have been replaced. A column that the model
    does not use contributes 0.

    Args:
        columns: Names of the D columns.
        typical: Cells of the typical row: the median of each column of numbers or dates, and the most frequent text of each
            text column.
        typical_value: Prediction for the typical row: the mean, [O], or the probability of each class, [C].
        typical_width: Width of the typical row's interval, [O], or its entropy in nats, [1].
        moves: Contributions to the mean; for classes, to the probability of the predicted class. The shape is [N, D], or
            [N, D, O] if y is [N, O]. Contributions are NaN for columns that are counted together in `others_move`.
        widens: Contributions to the width of the interval or, for classes, to the entropy. The shape is that of `moves`.
        others_move: Joint contribution of all columns that are NaN in `moves` to the mean or to the probability, [N] or [N, O]; 0
            if there are at most ten columns.
        others_widen: Like `others_move`, but for the width or the entropy.
        unusual: For each of the N rows, a text that says why the row is unusual; empty if the row is not unusual.
        cells: Cells of the rows as texts, [N, D].
    """

    columns: tuple[str, ...]
    typical: Mapping[str, str]
    typical_value: np.ndarray
    typical_width: np.ndarray
    moves: np.ndarray
    widens: np.ndarray
    others_move: np.ndarray
    others_widen: np.ndarray
    unusual: tuple[str, ...]
    cells: np.ndarray

    def __len__(self) -> int:
        return len(self.moves)

    def told(self, which: str = "moves") -> list[str]:
        """The strongest contributions of each row as a text such as `area=118 +38,000; town=east -4,900`.

        Args:
            which: `"moves"` for contributions to the prediction, or `"widens"` for contributions to the width of the interval.
                `"widens"` omits columns that narrow the interval.

        Raises:
            ValueError: If there are several targets.
        """
        values, others = (self.moves, self.others_move) if which == "moves" else (self.widens, self.others_widen)
        if values.ndim > 2:
            count = values.shape[2]
            raise ValueError(
                f"told: there are {count} targets, but a text can describe only one; use the attribute "
                f"`{which}` instead"
            )
        names = [*self.columns, "other columns"]
        every = np.nan_to_num(np.column_stack([values, others]))
        found = []
        for row, cells in zip(every, self.cells, strict=True):
            least, size = MIN_TOLD_SHARE * np.abs(row).sum(), np.abs(row) if which == "moves" else row
            order = [place for place in np.argsort(-size, kind="stable")[:NUM_TOLD] if size[place] > least]
            parts = (f"{names[one]}{f'={cells[one]}' if one < len(cells) else ''} {_signed(row[one])}" for one in order)
            found.append("; ".join(parts))
        return found


@dataclass(frozen=True)
class Groups:
    """The columns of the table, and which inputs of the network each column determines.

    Args:
        names: Names of the D columns.
        places: For each input, the index of its column in `names`, [E].
        texts: For each of the D columns, whether it contains texts.
    """

    names: tuple[str, ...]
    places: np.ndarray
    texts: tuple[bool, ...]

    @classmethod
    def of(cls, names: Sequence[str], owners: Sequence[str], kinds: Mapping[str, str]) -> Groups:
        """Make the groups from the names of the columns, the column that owns each input, and the kind of each column."""
        places = np.array([names.index(owner) for owner in owners])
        return cls(tuple(names), places, tuple(kinds.get(name) == "text" for name in names))

    def typical(self, neighbors: Neighbors) -> np.ndarray:
        """Inputs of the typical row, [E]. This row has the median in each column of numbers or dates, and the most frequent text
        in each text column."""
        rows = neighbors.rows.double()
        found = torch.zeros_like(neighbors.center)
        for group, text in enumerate(self.texts):
            own = torch.from_numpy(np.flatnonzero(self.places == group))
            if not len(own):
                continue
            part = rows[:, own]
            if text:
                patterns, counts = part.unique(dim=0, return_counts=True)
                found[own] = patterns[counts.argmax()]
                continue
            # Use only the number itself (or the days of a date) and the marks of empty cells, because seasons and weekdays
            # follow from the days.
            marks = (neighbors.center[own] == 0) & (neighbors.scale[own] == 1)
            marks[0] = True
            away = (part - part.median(0).values)[:, marks].abs().sum(1)
            found[own] = part[away.argmin()]
        return np.asarray(neighbors.center + neighbors.scale * found)

    def lengths(self, differences: np.ndarray) -> np.ndarray:
        """For each row and column, the Euclidean length of those entries of `differences` [N, E] that belong to the column: [N,
        D]."""
        squares = np.zeros((len(differences), len(self.names)))
        np.add.at(squares.T, self.places, np.square(differences).T)
        return np.asarray(np.sqrt(squares))


@dataclass(frozen=True)
class Cells:
    """Cells of rows in readable form.

    Args:
        groups: Columns, and the inputs of each column.
        texts: Cells of the rows as texts, [N, D].
        unseen: For each column, a mask [N] of the rows whose cell is unlike any cell in training, for example a new text.
        cut: For each column, a mask [N] of the rows whose number is so far outside the training range that it was clipped.
        of_inputs: Function that takes the inputs of one row and returns the row's cells. By default, the inputs themselves are
            the cells.
    """

    groups: Groups
    texts: np.ndarray
    unseen: Mapping[str, np.ndarray] = field(default_factory=dict)
    cut: Mapping[str, np.ndarray] = field(default_factory=dict)
    of_inputs: Callable[[np.ndarray], Mapping[str, str]] | None = None

    def named(self, row: int, column: int) -> str:
        """Name and content of a cell, such as `area=118`."""
        return f"{self.groups.names[column]}={self.texts[row, column]}"

    def of(self, inputs: np.ndarray) -> Mapping[str, str]:
        """Cells of one row of inputs, as texts."""
        if self.of_inputs is not None:
            return self.of_inputs(inputs)
        return dict(zip(self.groups.names, map(cell_text, inputs.tolist()), strict=True))


def explain_rows(
    fitted: FittedTable, inputs: np.ndarray, cells: Cells, *, level: float, share: float, num_draws: int
) -> Explanation:
    """Explain the predictions of rows [N, E]; see `Explanation`, and `BayesianEstimator.explain` for `level` and `share`."""
    neighbors, groups = fitted.neighbors, cells.groups
    assert neighbors is not None

    def measure(x: np.ndarray) -> np.ndarray:
        return _measure(fitted, x, level, num_draws)

    typical = groups.typical(neighbors)
    base = measure(typical[None])
    rank = _rank(measure, groups, neighbors, typical)
    parts = [
        _contributions(measure, rank(part), groups, part, typical, base)
        for part in (inputs[first : first + CHUNK_ROWS] for first in range(0, len(inputs), CHUNK_ROWS))
    ]
    effects, others, values = (np.concatenate([part[index] for part in parts]) for index in range(3))
    num_values = (base.shape[1] - 1) // 2 if fitted.classes is None else len(fitted.classes)
    moves, widens = effects[..., :num_values], effects[..., num_values:-1]
    others_move, others_widen = others[:, :num_values], others[:, num_values:-1]
    if fitted.classes is not None:
        guess = values[:, :num_values].argmax(1)[:, None]
        others_move = np.take_along_axis(others_move, guess, 1)
        moves = np.take_along_axis(moves, guess[:, None], 2)
    if fitted.flat:
        moves, widens, others_move, others_widen = (part[..., 0] for part in (moves, widens, others_move, others_widen))
    unusual = _why_unusual(neighbors, cells, inputs, values[:, -1], effects[..., -1], share)
    return Explanation(
        groups.names, cells.of(typical), base[0, :num_values], base[0, num_values:-1], moves, widens, others_move,
        others_widen, unusual, cells.texts,
    )  # fmt: skip


def _measure(fitted: FittedTable, x: np.ndarray, level: float, num_draws: int) -> np.ndarray:
    """Q quantities of each row, [K, Q]: the means and the interval widths (for classes, the probabilities and the entropy), then
    the epistemic uncertainty."""
    scaled = fitted.predict_scaled(x, num_draws)
    found = fitted.in_units(scaled, x)
    if isinstance(found, RegressionPredictive):
        lower, upper = found.interval(level)
        parts = [found.mean, upper - lower]
    else:
        assert isinstance(found, ClassificationPredictive)
        parts = [found.class_probs, found.entropy.unsqueeze(1)]
    return np.asarray(torch.cat([part.detach().double() for part in (*parts, spread(scaled).unsqueeze(1))], 1))


def _contributions(
    measure: Measure, rank: np.ndarray, groups: Groups, x: np.ndarray, typical: np.ndarray, base: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Three arrays: each column's own contributions [N, D, Q], the joint contribution [N, Q] of the columns that are replaced
    together, and the measured quantities [N, Q] of the rows x.

    `rank` [N, D] is the place of each column in the order of replacement. Columns that are replaced together all have the place
    `MAX_GROUPS` - 1. Replacements start from the typical row [E], whose measured quantities are `base` [1, Q].
    """
    num, last, place = len(x), int(rank.max()) + 1, rank[:, groups.places]
    steps = [place < step for step in range(1, last)] + [place >= last - step for step in range(1, last)]
    mixed = [np.where(own, x, typical) for own in steps]
    found = measure(np.concatenate([*mixed, x])).reshape(2 * last - 1, num, -1)
    start, end = np.broadcast_to(base, (1, num, base.shape[1])), found[-1:]
    forth = np.diff(np.concatenate([start, found[: last - 1], end]), axis=0)
    back = np.diff(np.concatenate([start, found[last - 1 : -1], end]), axis=0)[::-1]
    effect = 0.5 * (forth + back)  # [G, N, Q]
    effect[np.abs(effect) <= ROUNDING_SHARE * np.abs(found).max(0)] = 0.0
    each = effect[rank, np.arange(num)[:, None]]  # [N, D, Q]
    others = np.zeros_like(found[-1])
    if rank.shape[1] > MAX_GROUPS:
        hidden = rank == MAX_GROUPS - 1
        each[hidden], others = np.nan, effect[MAX_GROUPS - 1]
    return each, others, found[-1]


def _rank(
    measure: Measure, groups: Groups, neighbors: Neighbors, typical: np.ndarray
) -> Callable[[np.ndarray], np.ndarray]:
    """A function that takes rows [N, E] and returns the place [N, D] of each column in each row's order of replacement.

    In a wide table, the nine columns with the largest expected change in a row are replaced one by one, and the other columns are
    replaced together. The expected change is the distance between the row's cell and the typical cell, times the mean change per
    unit of distance, estimated from some training rows.
    """
    count = len(groups.names)
    if count <= MAX_GROUPS:
        return lambda x: np.broadcast_to(np.arange(count), (len(x), count))
    known = (neighbors.center + neighbors.scale * neighbors.rows.double()).numpy()

    def far(x: np.ndarray) -> np.ndarray:
        return groups.lengths((x - typical) / neighbors.scale.numpy())

    distance = far(known)
    chosen = []
    for column in distance.T:
        other = np.flatnonzero(column > 0)
        chosen.append(other[np.linspace(0, len(other) - 1, min(SCREENED_ROWS, len(other))).astype(int)])
    column = np.repeat(np.arange(count), [len(rows) for rows in chosen])
    rows = np.concatenate(chosen)
    replaced = np.where(groups.places == column[:, None], typical, known[rows])
    found, others = measure(known[rows]), measure(replaced)
    change = (np.abs(found - others) / np.abs(found).mean(0).clip(min=1e-300)).mean(1)
    slope = np.bincount(column, change, count) / np.bincount(column, distance[rows, column], count).clip(min=1e-300)

    def rank(x: np.ndarray) -> np.ndarray:
        order = np.argsort(-slope * far(x), axis=1, kind="stable")
        own = np.zeros((len(x), count), dtype=bool)
        np.put_along_axis(own, order[:, : MAX_GROUPS - 1], True, axis=1)
        return np.where(own, np.cumsum(own, axis=1) - 1, MAX_GROUPS - 1)

    return rank


# -- words -------------------------------------------------------------------------------------------------------------


def _why_unusual(
    neighbors: Neighbors, cells: Cells, inputs: np.ndarray, spreads: np.ndarray, effects: np.ndarray, share: float
) -> tuple[str, ...]:
    """For each row [N, E], a text that says why the row is unusual; empty for rows that are not unusual.

    `spreads` [N] are the epistemic uncertainties of the rows, and `effects` [N, D] are the columns' contributions to these
    uncertainties.
    """
    names = cells.groups.names
    far, unsure = neighbors.tails(inputs, torch.from_numpy(spreads.copy()))
    most = float(neighbors.spreads[min(len(neighbors.spreads) - 1, int((1 - share) * len(neighbors.spreads)))])
    found: list[list[str]] = [[] for _ in inputs]
    for name, rows in cells.unseen.items():
        for row in np.flatnonzero(rows).tolist():
            empty, cell = cells.texts[row, names.index(name)] == EMPTY_CELL, cells.named(row, names.index(name))
            new = f"{cell} is a text that did not occur in training"
            found[row].append(f"{name} is empty, but it was never empty in training" if empty else new)
    for row in np.flatnonzero(far <= share).tolist():
        found[row].append(_why_far(cells, row, cells.groups.lengths(np.sqrt(neighbors.gaps(inputs[[row]])))[0]))
    for row in np.flatnonzero(unsure <= share).tolist():
        best = int(np.nan_to_num(effects[row]).argmax())
        because = f", mostly because of {cells.named(row, best)}" if effects[row, best] > 0 else ""
        ratio = shown(float(f"{spreads[row] / max(most, 1e-300):.2g}"))
        words = f"{ratio} times as uncertain as {100 * (1 - share):g} % of training rows"
        found[row].append(f"the network's draws disagree: the row is {words}{because}")
    return tuple("; ".join(reasons) for reasons in found)


def _why_far(cells: Cells, row: int, lengths: np.ndarray) -> str:
    """Text that lists the columns in which a row is far from the nearest training rows, with distances in standard deviations."""
    part = np.square(lengths) / max(float(np.square(lengths).sum()), 1e-300)
    order = np.argsort(-part, kind="stable")
    count = min(NUM_TOLD, int(np.searchsorted(np.cumsum(part[order]), 0.75)) + 1)
    words = []
    for one in order[:count].tolist():
        rows = cells.cut.get(cells.groups.names[one])
        least = "more than " if rows is not None and rows[row] else ""
        how = "a different text" if cells.groups.texts[one] else f"{least}{lengths[one]:.1f} standard deviations away"
        words.append(f"{cells.named(row, one)} is {how}")
    return f"compared with the nearest training rows, {', '.join(words)}"


def cells_as_text(cells: np.ndarray) -> np.ndarray:
    """Cells as readable texts, in the same shape."""
    return np.array([[cell_text(cell) for cell in row] for row in cells.tolist()], dtype=object).reshape(cells.shape)


def cell_text(cell: Any) -> str:
    """A cell as readable text."""
    if cell is None or cell != cell:
        return EMPTY_CELL
    return shown(cell).removesuffix(" 00:00:00")[:MAX_CELL_CHARACTERS]


def _signed(value: float) -> str:
    return f"{'+' if value > 0 else ''}{significant(value)}"
