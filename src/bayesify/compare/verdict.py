"""What a comparison says, in plain language."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from bayesify.compare.contestants import BASELINES, RIVALS, cost_rank, title_of
from bayesify.compare.scores import LEVELS, NUM_POINTS, THIRDS
from bayesify.compare.summary import (
    BEHIND,
    MIN_NAMED_NATS,
    RANKING_SCORE,
    SIGNIFICANCE_LEVEL,
    UNCLEAR,
    MethodRow,
    Summary,
    is_clear,
)
from bayesify.sklearn.settings import AUTO, TEMPERATURE
from bayesify.tables.targets import Task
from bayesify.tables.written_numbers import significant

REJECTED_POINT = 4 * NUM_POINTS // 20
"""Position in a rejection curve: a fifth of the rows is turned away."""
GOOD_CALIBRATION_ERROR, TIED_CALIBRATION_GAP = 0.05, 0.02
"""Calibration error up to which uncertainty is good enough, and beyond the least among tied methods up to which it is as good."""
MAX_COVERAGE_ERROR = 0.06
"""Two standard errors of a coverage above which test rows are too few to judge it."""
MIN_COVERAGE_GAP = 0.015
"""Deviation of a coverage from what is stated that is never called wrong."""
MIN_THIRD_GAP = 0.08
"""Deviation of a third's coverage from 90 % that is named."""
MIN_DETECTION_AUROC = 0.8
"""AUROC from which on out-of-distribution rows count as detected."""
MAX_NAMES = 4
WORDS = {
    "constant": "a constant guess",
    "linear": "a linear model",
    "boosted_trees": "boosted trees",
    AUTO: "bayesify's default",
    "point": "a plain network",
    TEMPERATURE: "a plain network with temperature scaling",
}
PLURAL = ("boosted_trees",)


@dataclass(frozen=True)
class Verdict:
    """An answer.

    Args:
        headline: Which method to use, or what is tied.
        certainty: `"clear"`, one method is better than all others by a paired test and by as much as is worth naming; `"tie"`, some
            are within a standard error of the best; `"likely"`, none is, but the test is not sure of all;
            `"nothing"`, no method is clearly better than a constant guess; or `"untested"`, a single split.
        pick: The method to use: the best; of tied ones the cheapest of those whose uncertainty is about as accurate as that of any.
        network: The same where bayesify can fit it, else the best Bayesian method that is tied with it, else the best network;
            `None` where none was ranked.
        sentences: The reasons in plain words, each a sentence or two.
        details: The same in numbers.
    """

    headline: str
    certainty: str
    pick: str
    network: str | None
    sentences: tuple[str, ...]
    details: tuple[str, ...]


def judge(summary: Summary, target: str, classes: Sequence[str] = ()) -> Verdict | None:
    """The verdict; `None` if no method finished."""
    best = summary.best
    if best is None:
        return None
    certainty = _certainty(summary)
    tied = _no_guesses(summary.leading)
    pick = _pick(_no_guesses(summary.contenders), summary.task, summary.num_rows) if certainty == "tie" else best
    networks = [row for row in summary.ranked if row.name not in RIVALS]
    bayesian = [row for row in networks if row in summary.contenders and row.name not in BASELINES]
    network = pick if pick in networks else next(iter([*bayesian, *networks]), None)
    shown = pick if certainty != "nothing" or pick.name != "constant" or network is None else network
    sentences = [
        *_choice(certainty, pick, network, tied, summary, target),
        *_size_of_error(shown, summary, target, classes),
        *_after_choosing(summary, target),
        *_sureness(shown, summary, target),
        *_rejection(shown, summary),
        *_rare_classes(shown, summary, classes),
        *_outside(shown, summary),
    ]
    headline = _headline(certainty, best, tied, summary, target, _majority(summary, classes))
    network_name = None if network is None else network.name
    return Verdict(headline, certainty, pick.name, network_name, tuple(sentences), tuple(_details(summary)))


def _certainty(summary: Summary) -> str:
    ranked, constant = summary.ranked, summary.row("constant")
    if len(summary.splits) < 2:
        return "untested"
    if constant is not None and len(ranked) > 1:
        others = [row for row in ranked if row is not constant]
        if not any(is_clear(summary.difference(constant.name, row.name)) for row in others):
            return "nothing"
    if len(summary.leading) > 1:
        return "tie"
    return "clear" if all(row.standing == BEHIND for row in ranked[1:]) else "likely"


def _no_guesses(rows: Sequence[MethodRow]) -> list[MethodRow]:
    return [row for row in rows if row.name != "constant"] or list(rows)


def why_picked(pick: MethodRow, summary: Summary) -> str:
    """Why a method is taken among tied ones, in words."""
    rows = _no_guesses(summary.contenders)
    if len(rows) == 1:
        return "the best of them on average"
    cheapest = pick is min(rows, key=lambda row: cost_rank(row.name))
    return f"the cheapest of {'them' if cheapest else 'those whose stated uncertainty is most accurate'}"


def _pick(rows: Sequence[MethodRow], task: Task, num_rows: int) -> MethodRow:
    """The cheapest of those whose stated uncertainty is accurate, or about as accurate as that of any."""
    key = "calibration" if task == "regression" else "ece"
    errors = {row.name: row.means.get(key) for row in rows}
    least = min((error for error in errors.values() if error is not None), default=0.0)
    enough = max(
        GOOD_CALIBRATION_ERROR, least + TIED_CALIBRATION_GAP, 1 / math.sqrt(max(1, num_rows))
    )  # few rows cannot tell
    close = [row for row in rows if (errors[row.name] or 0.0) <= enough]
    return min(close, key=lambda row: cost_rank(row.name))


# -- headline and reasons ----------------------------------------------------------------------------------------------


def _headline(
    certainty: str,
    best: MethodRow,
    tied: Sequence[MethodRow],
    summary: Summary,
    target: str,
    majority: tuple[str, float] | None,
) -> str:
    if certainty == "untested":
        return f"{_capital(best)} did best on a single split, which decides nothing yet."
    if certainty == "nothing":
        guess = "its mean" if majority is None else f"always saying {majority[0]!r}"
        return f"No method predicted {target} clearly better than {guess}."
    if all(row.name in RIVALS or row.standing == BEHIND for row in summary.ranked):
        names = _list([_words(row) for row in tied])
        verb = "predicts" if len(tied) == 1 and tied[0].name not in PLURAL else "predict"
        return f"{capital(names)} {verb} {target} better here than any network."
    if certainty == "clear":
        return f"Use {_words(best)}."
    if certainty == "likely":
        return f"{_capital(best)} {_verb(best, 'predicts', 'predict')} {target} best here, though not beyond doubt."
    names = _list([_words(row) for row in tied])
    if len(tied) > MAX_NAMES:
        names = f"{len(tied)} of {len(summary.ranked)} methods"
    return f"{capital(names)} predict {target} equally well here."


def _choice(
    certainty: str, pick: MethodRow, network: MethodRow | None, tied: Sequence[MethodRow], summary: Summary, target: str
) -> list[str]:
    """Which one to take, and how the best network and the best rival stand to each other."""
    told = []
    if certainty == "tie":
        if len(tied) > MAX_NAMES:
            told.append(f"These splits cannot tell {_list([_words(row) for row in tied])} apart.")
        uneven = [_words(row) for row in tied if row not in summary.contenders]
        if uneven:
            told.append(f"Scores of {_list(uneven)} vary so much from split to split that nothing can be said of them.")
        cheapest = min(_no_guesses(summary.contenders), key=lambda row: cost_rank(row.name))
        if pick is not cheapest:
            told.append(f"The cheapest of them is {_words(cheapest)}, but its stated uncertainty is less accurate.")
        told.append(f"Take {_words(pick)}: {why_picked(pick, summary)}.")
        widest = summary.difference(tied[-1].name, tied[0].name)
        if 0 < widest.mean < MIN_NAMED_NATS and widest.p < SIGNIFICANCE_LEVEL:
            told.append(f"Differences between them are real but too small to matter: at most {_more(widest.mean)}.")
    if certainty == "likely":
        near = next(row for row in summary.ranked if row.standing == UNCLEAR)
        told.append(
            f"These splits cannot rule out that {_words(near)} {_verb(near, 'predicts', 'predict')} it as well."
        )
    judged = certainty in ("clear", "likely", "tie")
    rival = next((row for row in summary.ranked if row.name in RIVALS and row.name != "constant"), None)
    if rival is not None and network is not None and judged:
        first, second = sorted((network, rival), key=summary.ranked.index)
        if not (first.leads and second.leads):
            gain = _more(summary.difference(second.name, first.name).mean)
            told.append(
                f"{_capital(first)} {_verb(first, 'gives', 'give')} the true {target} of a new row {gain} than {_words(second)}, "
                f"the best {'network' if second is network else 'rival'}."
            )
    if judged and not any(row.name not in (*RIVALS, *BASELINES) for row in summary.ranked):
        told.append("No Bayesian method was among those compared.")
    return told


def _more(nats: float) -> str:
    """A difference in NLL as a ratio of probabilities."""
    ratio = math.exp(min(nats, 50.0))
    return f"{100 * (ratio - 1):.2g} % more probability" if ratio < 2 else f"{ratio:.2g} times the probability"


def _size_of_error(row: MethodRow, summary: Summary, target: str, classes: Sequence[str]) -> list[str]:
    """What errors are like, beside those of a constant guess."""
    constant = summary.row("constant")
    if summary.task == "regression":
        told = f"The typical error of {_words(row)} is {significant(row.means['rmse'] or 0.0)}"
        if constant is not None and row is not constant:
            told += f"; always guessing the mean of {target} errs by {significant(constant.means['rmse'] or 0.0)}"
        return [f"{told}."]
    accuracy = row.means["accuracy"] or 0.0
    told = f"{_capital(row)} {_verb(row, 'is', 'are')} right in {100 * accuracy:.1f} % of test rows"
    majority = _majority(summary, classes)
    if majority is None or row is constant:
        return [f"{told}."]
    label, share = majority
    told += f"; always saying {label!r} gives {100 * share:.1f} %."
    if accuracy <= share + 0.005:
        told += " Its answers are no better than that."
    return [told]


def _majority(summary: Summary, classes: Sequence[str]) -> tuple[str, float] | None:
    """The most frequent class of test rows and its share, where it is known."""
    if summary.task == "regression" or not classes or summary.best is None:
        return None
    counts = _confusion(summary.best, summary, len(classes)).sum(1)
    if not counts.sum():
        return None
    return classes[int(counts.argmax())], float(counts.max() / counts.sum())


def _confusion(row: MethodRow, summary: Summary, number: int) -> np.ndarray:
    """Counts by true and by predicted class over all splits, [C, C]."""
    tables = [table or [0] * number**2 for table in summary.of_splits(row.name, "curves", "confusion")]
    found: np.ndarray = np.sum(tables, axis=0).reshape(number, number)
    return found


def recalls(
    row: MethodRow, summary: Summary, classes: Sequence[str]
) -> list[tuple[str, float, float | None, float | None]]:
    """Of each class its label, share of the rows, how often it is found, and how often it is right when said (`None`: never)."""
    counts = _confusion(row, summary, len(classes))
    found = []
    for place, label in enumerate(classes):
        own, said = counts[place].sum(), counts[:, place].sum()
        found.append((
            label,
            float(own / max(1, counts.sum())),
            float(counts[place, place] / own) if own else None,
            float(counts[place, place] / said) if said else None,
        ))  # fmt: skip
    return found


def _rare_classes(row: MethodRow, summary: Summary, classes: Sequence[str]) -> list[str]:
    if summary.task == "regression" or not classes:
        return []
    missed = [entry for entry in recalls(row, summary, classes) if entry[2] is not None and entry[2] < 0.5]
    if not missed:
        return []
    label, share, recall, _ = min(missed, key=lambda entry: (entry[2], entry[0]))
    others = f", and less than half of {len(missed) - 1} other classes" if len(missed) > 1 else ""
    return [
        f"It finds {100 * (recall or 0.0):.0f} % of the rows that are {label!r} ({100 * share:.0f} % of all){others}."
    ]


def _after_choosing(summary: Summary, target: str) -> list[str]:
    """The score of a winner that was chosen without the rows it is scored on."""
    names, best = summary.chosen_elsewhere(), summary.best
    if not names or best is None or len(summary.ranked) < 2:
        return []
    key = "rmse" if summary.task == "regression" else "accuracy"
    honest = float(
        np.mean(
            [summary.results[name, split]["scores"][key] for name, split in zip(names, summary.splits, strict=True)]
        )
    )
    shown = best.means[key] or 0.0
    if summary.task == "regression":
        values, what = (significant(honest), significant(shown)), "typical error"
    else:
        values, what = (f"{100 * honest:.1f} %", f"{100 * shown:.1f} %"), "accuracy"
    if values[0] == values[1]:
        return [f"Chosen without the rows it is scored on, the winner's {what} is the same ({values[0]})."]
    return [
        f"A winner looks better than it is: chosen without the rows it is scored on, its {what} is {values[0]}, not {values[1]}."
    ]


# -- uncertainty -------------------------------------------------------------------------------------------------------


def _sureness(row: MethodRow, summary: Summary, target: str) -> list[str]:
    """How far to trust stated intervals or sets, at every level and over the range of predictions."""
    regression = summary.task == "regression"
    what = "intervals" if regression else "sets of classes"
    tested = sum(summary.of_splits(row.name, "rows", "test"))
    names = [f"{100 * level:.0f}" for level in LEVELS]
    covers = [row.means[f"coverage_{name}"] or 0.0 for name in names]
    fits = [_fit(row, level, cover, tested, regression) for level, cover in zip(LEVELS, covers, strict=True)]
    width = row.means["width_90"] or 0.0
    size = f"{significant(width)} wide in {target}" if regression else f"of {width:.2f} classes"
    observed = _list([f"{100 * cover:.0f}" for cover in covers])
    told = [
        f"Its {_list(names)} % {what} held the truth in {observed} % of test rows ({size} at 90 %): {_joined(names, fits)}."
    ]
    told += _thirds(row, summary, tested) if regression else []
    after, narrow = row.means["conformal_coverage_90"], row.means["conformal_width_90"]
    if after is None or narrow is None:
        return [*told, f"There were too few calibration rows to recalibrate 90 % {what}."]
    if fits[1] not in ("too narrow", "wider than needed"):
        return told
    size = f"{significant(narrow)} wide" if regression else f"of {narrow:.2f} classes"
    return [
        *told,
        f"Recalibrated on rows set aside, 90 % {what} are {size} and held it in {100 * after:.0f} %: use these.",
    ]


def _fit(row: MethodRow, level: float, cover: float, tested: int, regression: bool) -> str:
    name = f"{100 * level:.0f}"
    chance = 2 * max(
        row.errors.get(f"coverage_{name}") or 0.0, math.sqrt(level * (1 - level) / tested) if tested else 0.0
    )
    if abs(cover - level) > chance + MIN_COVERAGE_GAP:
        if cover < level:
            return "too narrow"
        if regression:
            return "wider than needed"  # sets of whole classes hold more than they state
    return "about right" if chance <= MAX_COVERAGE_ERROR else "not wrong as far as these few rows can tell"


def _joined(names: Sequence[str], fits: Sequence[str]) -> str:
    if len(set(fits)) == 1:
        return fits[0]
    return "; ".join(f"{name} % {fit}" for name, fit in zip(names, fits, strict=True))


def _thirds(row: MethodRow, summary: Summary, tested: int) -> list[str]:
    """Whether 90 % intervals hold 90 % for low, middle and high predictions too."""
    covers = [row.means.get(f"coverage_90_{name}") for name in THIRDS]
    if any(cover is None for cover in covers) or not tested:
        return []
    known = [cover or 0.0 for cover in covers]
    slack = max(MIN_THIRD_GAP, 3 * math.sqrt(0.9 * 0.1 / (tested / 3)))
    wrong = [place for place, cover in enumerate(known) if abs(cover - 0.9) > slack]
    shown = f"{_list([f'{100 * cover:.0f}' for cover in known])} % for low, middle and high predictions"
    if not wrong:
        return [
            f"They hold over the whole range: {shown}." if slack < 2 * MIN_THIRD_GAP else f"At 90 % they held {shown}."
        ]
    words = [f"{'too narrow' if known[place] < 0.9 else 'too wide'} for {THIRDS[place]} ones" for place in wrong]
    return [f"But they do not fit every prediction: 90 % ones held {shown}, {_list(words)}."]


def _rejection(row: MethodRow, summary: Summary) -> list[str]:
    """Whether uncertainty says which rows to look at, of this method or else of one that is as good."""
    if effect := _effect(row, summary):
        return [f"If the least certain fifth of rows goes to a human, {effect}."]
    if summary.task == "classification" and row.means["accuracy"] == 1:
        return []
    told = "Its uncertainty does not tell which rows it errs on: turning away the least certain fifth does not help."
    for other in summary.contenders:
        if other is not row and (effect := _effect(other, summary)):
            return [f"{told} That of {_words(other)}, which predicts as well, does: {effect}."]
    return [told]


def _effect(row: MethodRow, summary: Summary) -> str:
    """What becomes of the error or accuracy of the rest when the least certain fifth goes; empty where that does not help."""
    curves = summary.of_splits(row.name, "curves", "rejection")
    start, after = (float(np.mean([curve[place] for curve in curves])) for place in (0, REJECTED_POINT))
    if summary.task == "regression":
        told, helps = (
            f"the error of the rest falls from {significant(start)} to {significant(after)}",
            0.97 * start > after,
        )
    else:
        told, helps = (
            f"accuracy on the rest rises from {100 * start:.1f} % to {100 * after:.1f} %",
            after > start + 0.005,
        )
    return told if helps else ""


def _outside(row: MethodRow, summary: Summary) -> list[str]:
    """Whether out-of-distribution rows are detected, where there were some: by this method, and by which one most."""
    found = {other.name: _noticed(other) for other in summary.ranked}
    mine = found[row.name]
    if mine is None:
        return []
    pairs = f"its uncertainty there is higher than on a test row in {100 * mine:.0f} of 100 pairs (50 are chance)"
    told = f"{'It detects' if mine >= MIN_DETECTION_AUROC else 'It does not detect'} out-of-distribution rows (--ood): {pairs}."
    most = max(summary.ranked, key=lambda other: found[other.name] or 0.0)
    highest = found[most.name] or 0.0
    if mine < MIN_DETECTION_AUROC <= highest:
        told += f" {most.title} does, in {100 * highest:.0f} of 100."
    return [told]


def _noticed(row: MethodRow) -> float | None:
    """The highest AUROC of a method's measures of uncertainty."""
    known = [value for key, value in row.means.items() if key.startswith("auroc_") and value is not None]
    return max(known) if known else None


# -- numbers and words -------------------------------------------------------------------------------------------------


def _details(summary: Summary) -> list[str]:
    """Negative log-likelihoods and tests, for readers who know them."""
    best, number = summary.ranked[0], len(summary.splits)
    error = best.errors.get(RANKING_SCORE)
    over = f"over {number} splits" if number > 1 else "on one split"
    spread = "" if error is None else f" ± {error:.3f}"
    told = [f"{best.title}: NLL {round(best.means[RANKING_SCORE] or 0.0, 3) + 0.0:.3f}{spread} nats per row {over}."]
    for row in summary.ranked[1:]:
        assert row.behind is not None
        test = "" if math.isnan(row.p) else f", paired test p {_p(row.p)}"
        told.append(f"{row.title}: NLL higher by {round(row.behind.mean, 3) + 0.0:.3f} nats{test}; {row.standing}.")
    return told


def _p(value: float) -> str:
    return "< 0.001" if value < 0.001 else f"= {value:.3f}" if value < 0.1 else f"= {value:.2f}"


def words_of(name: str) -> str:
    """A method in a sentence."""
    return WORDS.get(name, title_of(name))


def _words(row: MethodRow) -> str:
    return words_of(row.name)


def capital(words: str) -> str:
    """Words at the start of a sentence."""
    return f"{words[0].upper()}{words[1:]}"


def _capital(row: MethodRow) -> str:
    return capital(_words(row))


def _verb(row: MethodRow, one: str, many: str) -> str:
    return many if row.name in PLURAL else one


def _list(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"
