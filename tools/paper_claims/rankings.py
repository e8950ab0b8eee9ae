"""Rankings that a paper claims, judged on the numbers of a table. For example, one system is above another in every column.

The same rule judges our numbers and the paper's printed numbers.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tools.paper_claims.reading import Verdict

Key = tuple[str, ...]
MAX_LISTED = 6
"""Largest number of comparisons that are listed with their numbers. Failing comparisons come first."""


@dataclass(frozen=True)
class Comparison:
    """One pair of systems under the same setting."""

    place: str
    winner: str
    loser: str
    above: float
    below: float
    holds: bool

    def __str__(self) -> str:
        place = f"{self.place}: " if self.place else ""
        return f"{place}{self.winner} {_brief(self.above)}, {self.loser} {_brief(self.below)}"


@dataclass(frozen=True)
class Ranking:
    """A claim that some systems are better than others.

    Args:
        axis: The axis of the table whose values are compared.
        above: Values that are claimed to be better.
        below: Values that are claimed to be worse than each value of `above`.
        when: Settings of the numbers that the claim is about. A list has several values.
        share: Share of the comparisons that have to hold.
        slack: Amount by which `above` may be worse, in the table's unit. With 0, `above` must be strictly better.
    """

    axis: str
    above: Sequence[str]
    below: Sequence[str]
    when: Mapping[str, Any]
    share: float = 1.0
    slack: float = 0.0

    def compare(
        self, numbers: Mapping[Key, float], axes: Sequence[str], higher: Callable[[str], bool], names: Mapping[str, str]
    ) -> list[Comparison]:
        """All comparisons for which both numbers exist.

        Args:
            numbers: Numbers of a table by the values of its axes.
            axes: Names of these axes; one is `metric`.
            higher: Whether more is better, by the name of a metric.
            names: Displayed names of the values of axes.
        """
        return list(self._pairs(numbers, axes, higher, names))

    def _pairs(
        self, numbers: Mapping[Key, float], axes: Sequence[str], higher: Callable[[str], bool], names: Mapping[str, str]
    ) -> Iterator[Comparison]:
        at = axes.index(self.axis)
        for key, above in numbers.items():
            setting = dict(zip(axes, key, strict=True))
            if key[at] not in self.above or not fits(self.when, setting):
                continue
            shown = [names.get(value, value) for axis, value in setting.items() if axis != self.axis]
            for rival in self.below:
                below = numbers.get((*key[:at], rival, *key[at + 1 :]))
                if below is None or rival == key[at]:
                    continue
                ahead = (above - below) * (1 if higher(setting["metric"]) else -1)
                holds = ahead >= -self.slack - 1e-9 if self.slack else ahead > 0
                winner, loser = (names.get(one, one).replace("_", " ") for one in (key[at], rival))
                yield Comparison(" ".join(shown).replace("_", " "), winner, loser, above, below, holds)

    def holds(self, found: Sequence[Comparison]) -> bool | None:
        """Whether enough comparisons hold; `None` if there are none."""
        return sum(one.holds for one in found) >= self.share * len(found) - 1e-9 if found else None

    def missing(self, numbers: Mapping[Key, float], axes: Sequence[str], names: Mapping[str, str]) -> list[str]:
        """Names of the claim's values that have no number in its settings."""
        at = axes.index(self.axis)
        there = {key[at] for key in numbers if fits(self.when, dict(zip(axes, key, strict=True)))}
        lacking = [name for name in dict.fromkeys((*self.above, *self.below)) if name not in there]
        return [f"{self.axis} {name}" if name.isdigit() else names.get(name, name) for name in lacking]


def fits(case: Mapping[str, Any], setting: Mapping[str, str]) -> bool:
    """Whether a setting has the values of a case. A case may allow several values of an axis."""
    return all(setting[axis] in ([values] if isinstance(values, str) else values) for axis, values in case.items())


def told(ranking: Ranking, ours: Sequence[Comparison], missing: Sequence[str], about: str) -> Verdict:
    """Verdict on a ranking from our comparisons, and a sentence with their numbers.

    If systems are missing, our comparisons can refute the ranking but not show it.

    Args:
        ranking: The claim.
        ours: Comparisons of our numbers.
        missing: Systems of the claim that were not run.
        about: Description of the numbers, such as their seeds.
    """
    shown = ranking.holds(ours)
    lacking = f"not run: {', '.join(missing)}" if missing else ""
    if shown is None:
        return None, lacking or "not run"
    listed = sorted(ours, key=lambda one: one.holds)[:MAX_LISTED]
    rest = f"; {len(ours) - len(listed)} more" if len(ours) > len(listed) else ""
    rivals = list(dict.fromkeys(one.loser for one in ours))
    if ranking.share < 1 and len(rivals) > 1:
        by_rival = {name: [one.holds for one in ours if one.loser == name] for name in rivals}
        about += "".join(f"; against {name}: {sum(found)} of {len(found)}" for name, found in by_rival.items())
    words = f"{sum(one.holds for one in ours)} of {len(ours)} comparisons hold ({about}): " + "; ".join(
        map(str, listed)
    )
    return shown if not (shown and missing) else None, "; ".join(part for part in (f"{words}{rest}", lacking) if part)


def _brief(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1e4 else f"{value:.4g}"
