"""Rankings that a paper claims, judged on the numbers of a table. For example, one system is above another in every column.

The same rule judges our numbers and the paper's printed numbers.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Key = tuple[str, ...]
Words = Callable[[str, str], str]
MAX_LISTED = 5
"""Largest number of comparisons whose numbers are listed. Failing comparisons are chosen first."""

MAX_LISTED_IF_ALL_HOLD = 3
"""The same, for a claim whose comparisons all hold."""


@dataclass(frozen=True)
class Comparison:
    """Numbers of two systems under the same setting: their metric, the rest of the setting, and whether the claim holds."""

    metric: str
    place: str
    winner: str
    loser: str
    above: float
    below: float
    holds: bool


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
        self, numbers: Mapping[Key, float], axes: Sequence[str], higher: Callable[[str], bool], words: Words
    ) -> list[Comparison]:
        """All comparisons for which both numbers exist.

        Args:
            numbers: Numbers of a table by the values of its axes.
            axes: Names of these axes; one is `metric`.
            higher: Whether more is better, by the name of a metric.
            words: Displayed text of an axis and its value.
        """
        return list(self._pairs(numbers, axes, higher, words))

    def _pairs(
        self, numbers: Mapping[Key, float], axes: Sequence[str], higher: Callable[[str], bool], words: Words
    ) -> Iterator[Comparison]:
        at = axes.index(self.axis)
        for key, above in numbers.items():
            setting = dict(zip(axes, key, strict=True))
            if key[at] not in self.above or not fits(self.when, setting):
                continue
            varied = (axis for axis in axes if axis not in (self.axis, "metric") and not self._fixes(axis))
            place = " ".join(words(axis, setting[axis]) for axis in varied)
            for rival in self.below:
                below = numbers.get((*key[:at], rival, *key[at + 1 :]))
                if below is None or rival == key[at]:
                    continue
                ahead = (above - below) * (1 if higher(setting["metric"]) else -1)
                holds = ahead >= -self.slack - 1e-9 if self.slack else ahead > 0
                winner, loser = words(self.axis, key[at]), words(self.axis, rival)
                yield Comparison(words("metric", setting["metric"]), place, winner, loser, above, below, holds)

    def uses(self, key: Key, axes: Sequence[str]) -> bool:
        """Whether the claim compares the number with these values of the axes."""
        named = key[axes.index(self.axis)] in (*self.above, *self.below)
        return named and fits(self.when, dict(zip(axes, key, strict=True)))

    def compared(self, numbers: Mapping[Key, float], axes: Sequence[str]) -> set[Key]:
        """Keys of the numbers that take part in a comparison."""
        at = axes.index(self.axis)
        found = set()
        for key in numbers:
            rivals = {(*key[:at], rival, *key[at + 1 :]) for rival in self.below if rival != key[at]} & set(numbers)
            if rivals and key[at] in self.above and fits(self.when, dict(zip(axes, key, strict=True))):
                found |= {key, *rivals}
        return found

    def _fixes(self, axis: str) -> bool:
        """Whether the claim is about a single value of an axis, which its text then names."""
        return isinstance(self.when.get(axis), str)

    def holds(self, found: Sequence[Comparison]) -> bool | None:
        """Whether enough comparisons hold; `None` if there are none."""
        return sum(one.holds for one in found) >= self.share * len(found) - 1e-9 if found else None

    def missing(self, numbers: Mapping[Key, float], axes: Sequence[str], words: Words) -> list[str]:
        """Names of the claim's values that have no number in its settings."""
        at = axes.index(self.axis)
        there = {key[at] for key in numbers if fits(self.when, dict(zip(axes, key, strict=True)))}
        lacking = [name for name in dict.fromkeys((*self.above, *self.below)) if name not in there]
        return [words(self.axis, name) for name in lacking]


def fits(case: Mapping[str, Any], setting: Mapping[str, str]) -> bool:
    """Whether a setting has the values of a case. A case may allow several values of an axis."""
    return all(setting[axis] in ([values] if isinstance(values, str) else values) for axis, values in case.items())


def told(
    ranking: Ranking, ours: Sequence[Comparison], missing: Sequence[str], runs: str, unrun: Sequence[Comparison] = ()
) -> tuple[bool | None, list[str]]:
    """Verdict on a ranking from our comparisons, and sentences with their numbers.

    If systems are missing, our comparisons can refute the ranking but not show it. Comparisons that we did not run count as failing
    before a ranking is shown.

    Args:
        ranking: The claim.
        ours: Comparisons of our numbers.
        missing: Systems of the claim that were not run.
        runs: Number of seeds or splits of the numbers, in words; empty if they have none.
        unrun: Comparisons that the paper's numbers allow and ours do not.
    """
    shown = ranking.holds(ours)
    lacking = [f"We did not run {' or '.join(missing)}"] if missing else []
    if places := left_out(unrun, ours):
        lacking.append(f"At least one run is missing {places}")
    if shown is None:
        return None, lacking or ["Not run"]
    rivals = list(dict.fromkeys(one.loser for one in ours))
    count = f"{counted(ours)} ({runs})" if runs else counted(ours)
    if ranking.share < 1 and len(rivals) > 1:
        by_rival = {name: [one.holds for one in ours if one.loser == name] for name in rivals}
        parts = (f"{sum(found)} of {len(found)} against {name}" for name, found in by_rival.items())
        count += f": {' and '.join(parts)}"
    enough = sum(one.holds for one in ours) >= ranking.share * (len(ours) + len(unrun)) - 1e-9
    return None if shown and (missing or not enough) else shown, [count, *_numbers(ours), *lacking]


def left_out(unrun: Sequence[Comparison], ours: Sequence[Comparison]) -> str | None:
    """Places at which we ran no comparison; `None` if there are none or too many to list, or if nothing was run."""
    places = list(dict.fromkeys(one.place for one in unrun if one.place not in {own.place for own in ours}))
    return _together(places, places) if ours and 0 < len(places) <= MAX_LISTED else None


def in_brief(ours: Sequence[Comparison], missing: Sequence[str]) -> dict[str, str | None]:
    """Our comparisons in brief, for a page that has the numbers in a table.

    ours: number of comparisons that hold, and of all. fails: systems, metrics and places of failing comparisons, if others hold.
    not_run: systems that we did not run. Each is `None` if there is nothing to say.
    """
    failing = [one for one in ours if not one.holds]
    return {
        "ours": share(ours),
        "fails": _where(failing, ours) if 0 < len(failing) < len(ours) else None,
        "not_run": _listed(missing, "or") if missing else None,
    }


def share(found: Sequence[Comparison]) -> str | None:
    """Number of comparisons that hold, and of all; `None` if there are none."""
    return f"{sum(one.holds for one in found)} of {len(found)}" if found else None


def _where(failing: Sequence[Comparison], every: Sequence[Comparison]) -> str:
    """Systems, metrics and places of failing comparisons. What all comparisons of the claim share is left out."""
    order = list(dict.fromkeys(one.place for one in every))
    places: dict[tuple[str, str, str], list[str]] = {}
    for one in failing:
        places.setdefault((one.winner, one.loser, one.metric), []).append(one.place)
    rows = [((winner,), (loser,), (metric,), _together(own, order)) for (winner, loser, metric), own in places.items()]
    for field in (1, 0, 2):  # join rows that differ only in their losers, then in their winners, then in their metrics
        joined: dict[Any, list[str]] = {}
        for row in rows:
            joined.setdefault((*row[:field], *row[field + 1 :]), []).extend(row[field])
        rows = [(*key[:field], tuple(names), *key[field:]) for key, names in joined.items()]
    several = [len({getattr(one, key) for one in every}) > 1 for key in ("winner", "loser", "metric")]
    clauses = []
    for winners, losers, metrics, place in rows:
        words = (f"for {_listed(winners)}", f"against {_listed(losers)}", f"in {_listed(metrics)}")
        clauses.append(" ".join([*(word for word, told in zip(words, several, strict=True) if told), place]).strip())
    return ", and ".join(clauses) if len(clauses) < 3 else "; ".join(clauses)


def _together(places: Sequence[str], order: Sequence[str]) -> str:
    """Places as one text. For example, "at severity 1" and "at severity 2" become "at severities 1 and 2"."""
    if len(places) == 1:
        return places[0]
    split = [place.split() for place in places]
    shortest = min(map(len, split))
    before = next((n for n in range(shortest) if len({one[n] for one in split}) > 1), shortest)
    after = next((n for n in range(shortest - before) if len({one[-1 - n] for one in split}) > 1), 0)
    middles = [" ".join(one[before : len(one) - after]) for one in split]
    first = order.index(places[0])
    if len(places) > 2 and middles[0].isdigit() and list(places) == list(order[first : first + len(places)]):
        text = f"{middles[0]} to {middles[-1]}"
    else:
        text = _listed(middles)
    head = " ".join(PLURALS.get(word, word) for word in split[0][:before])
    return " ".join(part for part in (head, text, *split[0][len(split[0]) - after :]) if part)


PLURALS = {"severity": "severities", "level": "levels"}


def _listed(names: Sequence[str], last: str = "and") -> str:
    return f" {last} ".join(part for part in (", ".join(names[:-1]), names[-1]) if part)


def counted(found: Sequence[Comparison]) -> str:
    """A clause that counts the comparisons that hold."""
    holding = sum(one.holds for one in found)
    if len(found) == 1:
        return f"The comparison {'holds' if holding else 'does not hold'}"
    if holding == len(found):
        return "Both comparisons hold" if holding == 2 else f"All {holding} comparisons hold"
    return f"{holding} of {len(found)} comparisons hold{'s' if holding == 1 else ''}"


def _numbers(ours: Sequence[Comparison]) -> list[str]:
    """Sentences of numbers for each metric and pair of systems. Failing comparisons are marked if others hold."""
    limit = MAX_LISTED_IF_ALL_HOLD if all(one.holds for one in ours) else MAX_LISTED
    most = len(ours) if len(ours) == limit + 1 else limit
    listed = sorted(sorted(ours, key=lambda one: one.holds)[:most], key=ours.index)
    mixed = len({one.holds for one in ours}) == 2
    text = []
    for metric in dict.fromkeys(one.metric for one in listed):
        groups: dict[str, list[str]] = {}
        own = [one for one in listed if one.metric == metric]
        by_pair = len({one.place for one in own}) > 1
        for one in own:
            mark = " (fails)" if mixed and not one.holds else ""
            if by_pair:
                head = f"{metric} of {one.winner} against {one.loser}: "
                part = f"{brief_number(one.above)} against {brief_number(one.below)} {one.place}{mark}"
            else:
                head = f"{metric}{' ' * bool(one.place)}{one.place}: {one.winner} {brief_number(one.above)} against "
                part = f"{one.loser} {brief_number(one.below)}{mark}"
            groups.setdefault(head, []).append(part)
        text += [f"{head}{', '.join(parts)}" for head, parts in groups.items()]
    if len(ours) > len(listed):
        text.append(f"The other {len(ours) - len(listed)} comparisons are not listed")
    return text


def brief_number(value: float) -> str:
    """A number with four digits."""
    return f"{value:,.0f}" if abs(value) >= 1e4 else f"{value:.4g}"
