"""Evaluation of predictions of unseen rows: by group, class by class, and in figures."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from bayesify.arguments.plain import Plain
from bayesify.conformal import credible_sets
from bayesify.serving.plots import FAINT, Plot, side_by_side
from bayesify.sklearn.fitted import HeldOut
from bayesify.tables.written_numbers import shown, significant

if TYPE_CHECKING:
    from pandas import DataFrame

MIN_GROUP_ROWS = 20
"""Groups with fewer rows are not listed."""
MAX_GROUPS, MAX_GROUP_COLUMNS = 8, 5
"""Maximum number of groups that are listed for one column, and maximum number of text columns with groups."""
MAX_CONFUSED_CLASSES = 10
MAX_POINTS = 500
"""Maximum number of rows in the figure of predictions against the truth."""
NUM_BINS = 10


@dataclass(frozen=True)
class Group(Plain):
    """Statistics of a group of rows, for example of all rows with the same text in one column."""

    name: str  # words for what the rows have in common
    num_rows: int
    coverage: float  # share of rows whose target is inside the 90 % interval, or whose class is in the 90 % set
    size: float  # mean width of the intervals, or share of rows with the right class

    @property
    def error(self) -> float:
        """Standard error of the coverage, with one more covered and one more uncovered row, so that the error is never 0."""
        share = (self.coverage * self.num_rows + 1) / (self.num_rows + 2)
        return float(np.sqrt(share * (1 - share) / self.num_rows))


@dataclass(frozen=True)
class Judged:
    """Predictions of rows that the predicting models had not seen."""

    held_out: HeldOut
    frame: DataFrame  # cells of the predicted rows
    classes: Sequence[str] = ()  # labels of the classes; empty for a numeric target

    def groups(self, texts: Sequence[str]) -> tuple[Group, ...]:
        """Groups of rows with similar predictions (thirds of the predicted numbers, or equal predicted classes), and groups of
        rows with the same text in one of the columns `texts`."""
        held = self.held_out
        if len(held.probs):
            values, guess = held.values.astype(int), held.probs.argmax(1)
            sets = credible_sets(torch.from_numpy(held.probs), 0.9).numpy()
            inside, size = sets[np.arange(len(values)), values], guess == values
            found = self._by("predicted", np.array(self.classes, dtype=object)[guess], inside, size)
        else:
            inside, size = (held.lower <= held.values) & (held.values <= held.upper), held.upper - held.lower
            first, second = np.quantile(held.mean, [1 / 3, 2 / 3])
            low, high = significant(first), significant(second)
            names = f"up to {low}", f"{low} to {high}", f"above {high}"
            third = np.array(names, dtype=object)[np.searchsorted([first, second], held.mean)]
            found = sorted(self._by("predicted", third, inside, size), key=lambda group: names.index(group.name[10:]))
        for name in texts[:MAX_GROUP_COLUMNS]:
            cells = self.frame[name].astype(object).where(self.frame[name].notna(), "empty").astype(str)
            found += self._by(f"{name} =", cells.to_numpy(object), inside, size)
        return tuple(found)

    def _by(self, what: str, labels: np.ndarray, inside: np.ndarray, size: np.ndarray) -> list[Group]:
        found, (names, counts) = [], np.unique(labels.astype(str), return_counts=True)
        for place in np.argsort(-counts, kind="stable")[:MAX_GROUPS]:
            if counts[place] >= MIN_GROUP_ROWS:
                own, name = labels.astype(str) == names[place], f"{what} {shown(str(names[place]))[:40]}"
                found.append(Group(name, int(counts[place]), float(inside[own].mean()), float(size[own].mean())))
        return found

    def confusion(self, labels: Sequence[str]) -> tuple[tuple[int, ...], ...]:
        """Number of rows for each true and each predicted class, in the order of `labels`; empty for numbers or many classes."""
        count = len(self.classes)
        if not 0 < count <= MAX_CONFUSED_CLASSES:
            return ()
        place = np.array([labels.index(label) for label in self.classes])
        both = place[self.held_out.values.astype(int)] * count + place[self.held_out.probs.argmax(1)]
        return tuple(map(tuple, np.bincount(both, minlength=count * count).reshape(count, count).tolist()))

    def figure(self, target: str) -> str:
        """Plots as SVG: truth against prediction and coverage against stated level, or for classes accuracy against confidence."""
        if len(self.held_out.probs):
            return side_by_side([self._reliability()])
        return side_by_side([self._against_truth(target), self._coverage()])

    def _against_truth(self, target: str) -> Plot:
        held = self.held_out
        rows = np.random.default_rng(0).permutation(len(held.values))[:MAX_POINTS]
        both = np.concatenate([held.mean, held.values])
        low, high = np.quantile(both, [0.002, 0.998]) if len(both) > 1_000 else (both.min(), both.max())
        plot = Plot((low, high), (low, high), "predicted mean", f"true {target[:30]}", "Truth against prediction")
        guess, truth = (np.clip(values[rows], low, high) for values in (held.mean, held.values))
        return plot.points(guess, truth, radius=2).line([low, high], [low, high], FAINT, dash="4 3", width=1.5)

    def _coverage(self) -> Plot:
        levels = np.linspace(0, 1, 21)
        observed = [float((self.held_out.centrality <= level).mean()) for level in levels]
        plot = Plot((0, 1), (0, 1), "stated level of intervals, %", "rows inside, %", "Coverage of intervals", "xy")
        return plot.line([0, 1], [0, 1], FAINT, dash="4 3", width=1.5).line(levels, observed)

    def _reliability(self) -> Plot:
        held = self.held_out
        confidence, right = held.probs.max(1), held.probs.argmax(1) == held.values
        place = np.minimum((NUM_BINS * confidence).astype(int), NUM_BINS - 1)
        counts = np.bincount(place, minlength=NUM_BINS)
        full = counts > 0
        stated, observed = (np.bincount(place, part, NUM_BINS)[full] / counts[full] for part in (confidence, right))
        edges = np.linspace(0, 1, NUM_BINS + 1).tolist()
        plot = Plot((0, 1), (0, 1), "stated confidence, %", "right class, %", "Right classes against confidence", "xy")
        plot.bars(edges, (counts / counts.sum()).tolist(), FAINT).line([0, 1], [0, 1], FAINT, dash="4 3", width=1.5)
        return plot.line(stated, observed).points(stated, observed)
