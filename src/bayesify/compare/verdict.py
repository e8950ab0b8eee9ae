"""What a comparison says, in plain language."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from bayesify.compare.paired import Difference
from bayesify.compare.scores import POINTS
from bayesify.compare.summary import SIGNIFICANCE, Results, Row, Summary, significant
from bayesify.compare.tuning import BASELINES, TEMPERATURE

TURNED_AWAY = 4 * POINTS // 20
"""Position in a rejection curve: a fifth of the rows is turned away."""
NOTABLY_SMALLER = 2
"""Times as few parameters from which on a method that is as good is named for it; measured times would differ between runs."""
NOTICED = 0.8
"""AUROC from which on out-of-distribution rows count as detected."""


@dataclass(frozen=True)
class Verdict:
    """An answer.

    Args:
        headline: Which method to use.
        certainty: `"clear"`, `"open"` or `"untested"`: whether the best method beats both baselines by the paired test.
        sentences: The reasons, each a sentence or two.
    """

    headline: str
    certainty: str
    sentences: tuple[str, ...]


def judge(summary: Summary, results: Results, target: str) -> Verdict | None:
    """The verdict; `None` if no method finished.

    Args:
        summary: The table.
        results: Of the runs behind it.
        target: Name of the target.
    """
    best = summary.best
    if best is None:
        return None
    sentences = [_first(best, summary)]
    sentences += [_against(best, summary, name) for name in BASELINES if name != best.name and summary.row(name)]
    sentences += _ties(best, summary)
    sentences += _sureness(best, summary, results, target)
    sentences += _rejection(best, summary, results)
    sentences += _outside(best, summary)
    return Verdict(_headline(best, summary), _certainty(best, summary), tuple(sentences))


def _certainty(best: Row, summary: Summary) -> str:
    tests = [difference.p for difference in summary.against.values()]
    if len(summary.splits) < 2:
        return "untested"
    if best.name in BASELINES:
        return "clear" if all(row.clearly_behind for row in summary.ranked[1:]) else "open"
    return "clear" if tests and max(tests) < SIGNIFICANCE else "open"


def _headline(best: Row, summary: Summary) -> str:
    words = {
        "clear": f"Use {best.title}.",
        "untested": f"{best.title} did best, on a single split.",
    }
    if best.name in BASELINES:
        plain = "a plain network with temperature scaling" if best.name == TEMPERATURE else "a plain network"
        if len(summary.splits) < 2:
            return (
                f"{plain[0].upper()}{plain[1:]} did best, on a single split: no Bayesian method predicted better there."
            )
        return f"Use {plain}: no Bayesian method predicted better here."
    return words.get(_certainty(best, summary), f"{best.title} did best, but not clearly better than a plain network.")


def _first(best: Row, summary: Summary) -> str:
    error = best.errors.get("nll")
    spread = "" if error is None else f" ± {error:.3f}"
    number = len(summary.splits)
    over = f"Averaged over {number} splits" if number > 1 else "On one split"
    return (
        f"{over}, {best.title} gave the held-out rows the highest probability of {len(summary.ranked)} methods: "
        f"NLL {round(best.means['nll'] or 0.0, 3) + 0.0:.3f}{spread} nats per row."
    )


def _against(best: Row, summary: Summary, name: str) -> str:
    other = summary.row(name)
    assert other is not None
    title = "the same network with temperature scaling" if name == TEMPERATURE else "a plain (deterministic) network"
    difference = summary.against[name]
    gain = f"{difference.mean:.3f}"
    key, words = ("rmse", "root mean squared error") if summary.task == "regression" else ("accuracy", "accuracy")
    mine, theirs = best.means[key], other.means[key]
    assert mine is not None
    assert theirs is not None
    if summary.task == "regression":
        point = f"its {words} is {significant(mine)} against {significant(theirs)}"
    else:
        point = f"its {words} is {100 * mine:.1f} % against {100 * theirs:.1f} %"
    return f"Against {title}: NLL lower by {gain} nats, {_clear(difference)}; {point}."


def _clear(difference: Difference) -> str:
    if math.isnan(difference.p):
        return "which one split cannot test"
    if difference.p < SIGNIFICANCE:
        return f"a clear difference (paired test, p {_p(difference.p)})"
    return f"which may be chance (paired test, p {_p(difference.p)})"


def _p(value: float) -> str:
    return "< 0.001" if value < 0.001 else f"= {value:.3f}" if value < 0.1 else f"= {value:.2f}"


def _ties(best: Row, summary: Summary) -> list[str]:
    tied = [row for row in summary.ranked[1:] if not row.clearly_behind and not math.isnan(row.p)]
    if not tied:
        return []
    names = _list([row.title for row in tied[:4]]) + (f" and {len(tied) - 4} more" if len(tied) > 4 else "")
    plural = "methods" if len(tied) > 1 else "method"
    told = f"These splits cannot tell {len(tied)} other {plural} from it: {names}."
    size = best.means.get("parameters") or 0
    smaller = [row for row in tied if 0 < (row.means.get("parameters") or 0) * NOTABLY_SMALLER <= size]
    if smaller:
        pick = min(smaller, key=lambda row: (row.means["nll"], row.name))
        told += f" Of these {pick.title} has {size / (pick.means['parameters'] or 1):.0f} times fewer parameters."
    return [told]


def _sureness(best: Row, summary: Summary, results: Results, target: str) -> list[str]:
    """How far to trust stated intervals or sets; a share of so few rows may differ from 90 % by chance."""
    what = "intervals" if summary.task == "regression" else "sets of classes"
    cover, error = best.means["coverage_90"], best.errors.get("coverage_90")
    width = best.means["width_90"]
    assert cover is not None
    assert width is not None
    tested = sum(results[best.name, split].get("rows", {}).get("test", 0) for split in summary.splits)
    chance = math.sqrt(0.9 * 0.1 / tested) if tested else 0.0
    slack = 2 * max(error or 0.0, chance) + 0.015
    if abs(cover - 0.9) <= slack:
        fit = "about right"
    elif cover < 0.9:
        fit = "too narrow: it is too sure"
    elif summary.task == "classification" and width < 1.1:
        fit = "since one class is nearly always enough"
    else:
        fit = "wider than needed"
    size = f"{significant(width)} wide in {target}" if summary.task == "regression" else f"of {width:.2f} classes"
    told = [
        f"How sure to be: its 90 % {what} ({size} on average) held the truth in {100 * cover:.0f} % of test rows, {fit}."
    ]
    after, narrow = best.means["conformal_coverage_90"], best.means["conformal_width_90"]
    if after is None or narrow is None:
        told.append(f"There were too few calibration rows to recalibrate 90 % {what}.")
        return told
    size = f"{significant(narrow)} wide" if summary.task == "regression" else f"of {narrow:.2f} classes"
    told.append(f"Recalibrated on rows set aside (split conformal) they are {size} and held it in {100 * after:.0f} %.")
    return told


def _rejection(best: Row, summary: Summary, results: Results) -> list[str]:
    """Whether uncertainty says which rows to look at, of the best method or else of one that is as good."""
    if _helps(best, summary, results):
        return [f"If the least certain fifth of rows goes to a human, {_effect(best, summary, results)}."]
    if summary.task == "classification" and best.means["accuracy"] == 1:
        return []
    told = "Its uncertainty does not tell which rows it errs on: turning away the least certain fifth does not help."
    tied = [row for row in summary.ranked[1:] if not row.clearly_behind and not math.isnan(row.p)]
    other = next((row for row in tied if _helps(row, summary, results)), None)
    if other is not None:
        told += (
            f" That of {other.title}, which these splits cannot tell from it, does: {_effect(other, summary, results)}."
        )
    return [told]


def _ends(row: Row, summary: Summary, results: Results) -> tuple[float, float]:
    """Error or accuracy of all rows, and of the most certain four fifths."""
    curves = [results[row.name, split]["curves"]["rejection"] for split in summary.splits]
    start, after = (float(np.mean([curve[place] for curve in curves])) for place in (0, TURNED_AWAY))
    return start, after


def _helps(row: Row, summary: Summary, results: Results) -> bool:
    start, after = _ends(row, summary, results)
    return after < 0.97 * start if summary.task == "regression" else after > start + 0.005


def _effect(row: Row, summary: Summary, results: Results) -> str:
    start, after = _ends(row, summary, results)
    if summary.task == "regression":
        return f"the error of the rest falls from {significant(start)} to {significant(after)}"
    return f"accuracy on the rest rises from {100 * start:.1f} % to {100 * after:.1f} %"


def _outside(best: Row, summary: Summary) -> list[str]:
    """Whether out-of-distribution rows are detected, where there were some: by the best method, and by which one most."""
    found = {row.name: _noticed(row) for row in summary.ranked}
    mine = found[best.name]
    if mine is None:
        return []
    pairs = f"its uncertainty there is higher than on a test row in {100 * mine:.0f} of 100 pairs (50 are chance)"
    told = f"{'It detects' if mine >= NOTICED else 'It does not detect'} out-of-distribution rows (--ood): {pairs}."
    most = max(summary.ranked, key=lambda row: found[row.name] or 0.0)
    highest = found[most.name] or 0.0
    if mine < NOTICED <= highest:
        told += f" {most.title} does, in {100 * highest:.0f} of 100."
    return [told]


def _noticed(row: Row) -> float | None:
    """The highest AUROC of a method's measures of uncertainty."""
    known = [value for key, value in row.means.items() if key.startswith("auroc_") and value is not None]
    return max(known) if known else None


def _list(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else ", ".join(names)
