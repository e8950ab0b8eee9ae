"""The verdict of a comparison in plain language."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from bayesify.compare.contestants import BASELINES, RIVALS, cost_rank
from bayesify.compare.scores import NUM_POINTS, THIRDS
from bayesify.compare.summary import BEHIND, MIN_NAMED_NATS, SIGNIFICANCE_LEVEL, UNCLEAR, MethodRow, Summary, is_clear
from bayesify.sklearn.scores import LEVELS
from bayesify.sklearn.settings import AUTO, TEMPERATURE
from bayesify.tables.targets import Task
from bayesify.tables.written_numbers import significant

REJECTED_POINT = 4 * NUM_POINTS // 20
"""Position in a rejection curve at which a fifth of the rows is left out."""
GOOD_CALIBRATION_ERROR, TIED_CALIBRATION_GAP = 0.05, 0.02
"""A calibration error is good enough up to the first value, or up to the smallest error of the tied methods plus the second."""
MAX_COVERAGE_ERROR = 0.06
"""If twice the standard error of a coverage exceeds this value, there are too few test rows to judge the coverage."""
MIN_COVERAGE_GAP = 0.015
"""A coverage that deviates from its level by less than this value is never called wrong."""
MIN_THIRD_GAP = 0.08
"""A third of the predictions is reported if the coverage of its 90 % intervals deviates from 90 % by at least this value."""
MIN_DETECTION_AUROC = 0.8
"""Out-of-distribution rows count as detected if the AUROC is at least this value."""
MAX_NAMES = 4
RIVAL_WORDS = {
    "constant": "a constant guess",
    "linear": "a linear model",
    "boosted_trees": "boosted trees",
    AUTO: "bayesify's default",
    "point": "a plain network",
    TEMPERATURE: "a plain network with temperature scaling",
}
PLURAL_NAMES = ("boosted_trees",)


@dataclass(frozen=True)
class Verdict:
    """Recommendation of a comparison, with its reasons.

    The certainty is `"clear"` if one method is better than all others according to a paired test, and by enough to matter;
    `"tie"` if some methods are within a standard error of the best; `"likely"` if no other method is within a standard error of
    the best, but at least one is not clearly worse according to the test; `"nothing"` if no method is clearly better than a
    constant guess; and `"untested"` for a single split. If bayesify cannot fit `pick`, `network` is the best Bayesian method that
    is tied with it, or the best network if there is no such method.
    """

    headline: str  # sentence that names the best method or the tied methods
    certainty: str
    pick: str  # the best method or, in a tie, the cheapest of the tied methods whose uncertainty is accurate
    network: str | None  # network to use; `None` if no network was ranked
    sentences: tuple[str, ...]  # reasons in plain words, each a sentence or two
    details: tuple[str, ...]  # reasons in numbers


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
        *_after_choosing(summary),
        *_sureness(shown, summary, target),
        *_rejection(shown, summary),
        *_rare_classes(shown, summary, classes),
        *_outside(shown, summary),
    ]
    headline = _headline(certainty, tied, summary, target, classes)
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
    """Words that give the reason for a choice among tied methods."""
    rows = _no_guesses(summary.contenders)
    if len(rows) == 1:
        return "the best of them on average"
    cheapest = pick is min(rows, key=lambda row: cost_rank(row.name))
    return f"the cheapest of {'them' if cheapest else 'the methods whose stated uncertainty is most accurate'}"


def _pick(rows: Sequence[MethodRow], task: Task, num_rows: int) -> MethodRow:
    """The cheapest method whose stated uncertainty is accurate, or nearly as accurate as the best method's."""
    key = "calibration" if task == "regression" else "ece"
    errors = {row.name: row.means.get(key) for row in rows}
    least = min((error for error in errors.values() if error is not None), default=0.0)
    # With few rows, smaller errors cannot be distinguished.
    enough = max(GOOD_CALIBRATION_ERROR, least + TIED_CALIBRATION_GAP, 1 / math.sqrt(max(1, num_rows)))
    close = [row for row in rows if (errors[row.name] or 0.0) <= enough]
    return min(close, key=lambda row: cost_rank(row.name))


def _headline(certainty: str, tied: Sequence[MethodRow], summary: Summary, target: str, classes: Sequence[str]) -> str:
    best, majority = summary.ranked[0], _majority(summary, classes)
    if certainty == "untested":
        return f"{capital(best)} did best, but on a single split, which is too little to decide."
    if certainty == "nothing":
        guess = "always guessing the mean" if majority is None else f"always saying {majority[0]!r}"
        return f"No method predicted {target} clearly better than {guess}."
    if all(row.name in RIVALS or row.standing == BEHIND for row in summary.ranked):
        names = _list([words_of(row) for row in tied])
        verb = "predicts" if len(tied) == 1 and tied[0].name not in PLURAL_NAMES else "predict"
        return f"{capital(names)} {verb} {target} better here than any network."
    if certainty == "clear":
        return f"Use {words_of(best)}."
    if certainty == "likely":
        return f"{capital(best)} {_verb(best, 'predicts', 'predict')} {target} best here, but this is not certain."
    names = _list([words_of(row) for row in tied])
    if len(tied) > MAX_NAMES:
        names = f"{len(tied)} of {len(summary.ranked)} methods"
    return f"{capital(names)} predict {target} equally well here."


def _choice(
    certainty: str, pick: MethodRow, network: MethodRow | None, tied: Sequence[MethodRow], summary: Summary, target: str
) -> list[str]:
    """Sentences that say which method to use, and how the best network compares with the best method that is not a network."""
    told = []
    if certainty == "tie":
        if len(tied) > MAX_NAMES:
            told.append(f"The scores of {_list([words_of(row) for row in tied])} are too close to say which is best.")
        uneven = [words_of(row) for row in tied if row not in summary.contenders]
        if uneven:
            told.append(
                f"The scores of {_list(uneven)} vary so much from split to split that they allow no conclusion."
            )
        cheapest = min(_no_guesses(summary.contenders), key=lambda row: cost_rank(row.name))
        if pick is not cheapest:
            told.append(
                f"The cheapest of these methods is {words_of(cheapest)}, but its stated uncertainty is less accurate."
            )
        told.append(f"Use {words_of(pick)}, {why_picked(pick, summary)}.")
        widest = summary.difference(tied[-1].name, tied[0].name)
        if 0 < widest.mean < MIN_NAMED_NATS and widest.p < SIGNIFICANCE_LEVEL:
            told.append(
                "The differences between these methods are real but too small to matter: "
                f"the best one gives the true {target} at most {_more(widest.mean)} the others."
            )
    if certainty == "likely":
        near = next(row for row in summary.ranked if row.standing == UNCLEAR)
        told.append(
            f"These splits cannot rule out that {words_of(near)} {_verb(near, 'predicts', 'predict')} {target} equally well."
        )
    judged = certainty in ("clear", "likely", "tie")
    rival = next((row for row in summary.ranked if row.name in RIVALS and row.name != "constant"), None)
    if rival is not None and network is not None and judged:
        first, second = sorted((network, rival), key=summary.ranked.index)
        if not (first.leads and second.leads):
            gain = _more(summary.difference(second.name, first.name).mean)
            told.append(
                f"{capital(first)} {_verb(first, 'gives', 'give')} the true {target} of a new row {gain} {words_of(second)}, "
                f"the best {'network' if second is network else 'method that is not a network'}."
            )
    if judged and not any(row.name not in (*RIVALS, *BASELINES) for row in summary.ranked):
        told.append("No Bayesian method was compared.")
    return told


def _more(nats: float) -> str:
    """Words such as "12 % more probability than", made from a difference in NLL. The name of a method must follow these words."""
    ratio = math.exp(min(nats, 50.0))
    more = f"{100 * (ratio - 1):.2g} % more probability than"
    return more if ratio < 2 else f"{ratio:.2g} times as much probability as"


def _size_of_error(row: MethodRow, summary: Summary, target: str, classes: Sequence[str]) -> list[str]:
    constant = summary.row("constant")
    if summary.task == "regression":
        told = f"The typical error of {words_of(row)} is {significant(row.means['rmse'] or 0.0)}"
        if constant is not None and row is not constant:
            told += f". Always guessing the mean of {target} has a typical error of {significant(constant.means['rmse'] or 0.0)}"
        return [f"{told}."]
    accuracy = row.means["accuracy"] or 0.0
    told = f"{capital(row)} {_verb(row, 'is', 'are')} right in {100 * accuracy:.1f} % of test rows"
    majority = _majority(summary, classes)
    if majority is None or row is constant:
        return [f"{told}."]
    label, share = majority
    told += f"; always saying {label!r} would be right in {100 * share:.1f} %."
    if accuracy <= share + 0.005:
        told += " This is no better than the constant answer."
    return [told]


def _majority(summary: Summary, classes: Sequence[str]) -> tuple[str, float] | None:
    """The most frequent class among the test rows and its share; `None` for a regression, or if the share is unknown."""
    if summary.task == "regression" or not classes or summary.best is None:
        return None
    counts = _confusion(summary.best, summary, len(classes)).sum(1)
    if not counts.sum():
        return None
    return classes[int(counts.argmax())], float(counts.max() / counts.sum())


def _confusion(row: MethodRow, summary: Summary, number: int) -> np.ndarray:
    """Number of test rows for each true class and each predicted class, over all splits, [C, C]."""
    tables = [table or [0] * number**2 for table in summary.of_splits(row.name, "curves", "confusion")]
    return np.asarray(np.sum(tables, axis=0)).reshape(number, number)


def recalls(
    row: MethodRow, summary: Summary, classes: Sequence[str]
) -> list[tuple[str, float, float | None, float | None]]:
    """For each class, its label, its share of the rows, its recall, and its precision (`None` if the class is never predicted)."""
    counts = _confusion(row, summary, len(classes))
    total, each = max(1, counts.sum()), zip(classes, counts.diagonal(), counts.sum(1), counts.sum(0), strict=True)
    return [
        (label, float(own / total), float(right / own) if own else None, float(right / said) if said else None)
        for label, right, own, said in each
    ]


def _rare_classes(row: MethodRow, summary: Summary, classes: Sequence[str]) -> list[str]:
    if summary.task == "regression" or not classes:
        return []
    found = [(recall, label, share) for label, share, recall, _ in recalls(row, summary, classes) if recall is not None]
    missed = [entry for entry in found if entry[0] < 0.5]
    if not missed:
        return []
    recall, label, share = min(missed)
    others = f", and less than half of the rows of {len(missed) - 1} other classes" if len(missed) > 1 else ""
    rows = f"{100 * recall:.0f} % of the rows of class {label!r} ({100 * share:.0f} % of all rows)"
    return [f"{capital(row)} {_verb(row, 'recognizes', 'recognize')} {rows}{others}."]


def _after_choosing(summary: Summary) -> list[str]:
    """The winner's score on rows that had no part in choosing the winner."""
    names, best = summary.chosen_elsewhere(), summary.best
    if not names or best is None or len(summary.ranked) < 2:
        return []
    key = "rmse" if summary.task == "regression" else "accuracy"
    scores = [summary.results[name, split]["scores"][key] for name, split in zip(names, summary.splits, strict=True)]
    honest, shown = float(np.mean(scores)), best.means[key] or 0.0
    if summary.task == "regression":
        values, what = (significant(honest), significant(shown)), "typical error"
    else:
        values, what = (f"{100 * honest:.1f} %", f"{100 * shown:.1f} %"), "accuracy"
    told = f"On rows that had no part in choosing the winner, its {what} is"
    if values[0] == values[1]:
        return [f"{told} the same ({values[0]})."]
    why = "the best of many methods always looks a little better than it is"
    return [f"{told} {values[0]}, not {values[1]}: {why}."]


def _sureness(row: MethodRow, summary: Summary, target: str) -> list[str]:
    """Sentences that say whether intervals or sets can be trusted, at every level and over the range of predictions."""
    regression = summary.task == "regression"
    what = "intervals" if regression else "sets of classes"
    tested = sum(summary.of_splits(row.name, "rows", "test"))
    names = [f"{100 * level:.0f}" for level in LEVELS]
    covers = [row.means[f"coverage_{name}"] or 0.0 for name in names]
    fits = [_fit(row, level, cover, tested, regression) for level, cover in zip(LEVELS, covers, strict=True)]
    observed = _list([f"{100 * cover:.0f}" for cover in covers])
    each = "; ".join(f"{name} % {fit}" for name, fit in zip(names, fits, strict=True))
    shown = fits[0] if len(set(fits)) == 1 else each
    told = [
        f"The {_list(names)} % {what} of {words_of(row)} contained the true {target} in {observed} % of test rows: "
        f"{shown}. The 90 % {what} {_size(row.means['width_90'] or 0.0, regression)}."
    ]
    told += _thirds(row, tested) if regression else []
    after, narrow = row.means["conformal_coverage_90"], row.means["conformal_width_90"]
    if after is None or narrow is None:
        return [*told, f"There were too few calibration rows to recalibrate 90 % {what}."]
    if fits[1] not in ("too narrow", "too small", "wider than needed"):
        return told
    return [
        *told,
        f"After recalibration on rows that were set aside, the 90 % {what} {_size(narrow, regression)} and contained the true "
        f"{target} in {100 * after:.0f} % of test rows: use these.",
    ]


def _size(width: float, regression: bool) -> str:
    return f"have a mean width of {significant(width)}" if regression else f"hold {width:.2f} classes on average"


def _fit(row: MethodRow, level: float, cover: float, tested: int, regression: bool) -> str:
    error = row.errors.get(f"coverage_{100 * level:.0f}") or 0.0
    chance = 2 * max(error, math.sqrt(level * (1 - level) / tested) if tested else 0.0)
    if abs(cover - level) > chance + MIN_COVERAGE_GAP:
        if cover < level:
            return "too narrow" if regression else "too small"
        if regression:
            return "wider than needed"  # sets consist of whole classes, so their coverage exceeds the stated level
    return "about right" if chance <= MAX_COVERAGE_ERROR else "no error visible with so few rows"


def _thirds(row: MethodRow, tested: int) -> list[str]:
    """Sentences that say whether the 90 % intervals are right in each third of the predictions: low, middle and high."""
    covers = [row.means.get(f"coverage_90_{name}") for name in THIRDS]
    known = [cover for cover in covers if cover is not None]
    if len(known) < len(covers) or not tested:
        return []
    slack = max(MIN_THIRD_GAP, 3 * math.sqrt(0.9 * 0.1 / (tested / 3)))
    wrong = [place for place, cover in enumerate(known) if abs(cover - 0.9) > slack]
    shown = f"{_list([f'{100 * cover:.0f}' for cover in known])} % of the rows with low, middle and high predictions"
    if not wrong:
        fit = "fit the whole range: they " if slack < 2 * MIN_THIRD_GAP else ""
        return [f"The 90 % intervals {fit}contained {shown}."]
    words = [f"{'too narrow' if known[place] < 0.9 else 'too wide'} for {THIRDS[place]}" for place in wrong]
    return [
        f"But the 90 % intervals do not fit all predictions: they contained {shown}, so they are {_list(words)} predictions."
    ]


def _rejection(row: MethodRow, summary: Summary) -> list[str]:
    """A sentence that says whether this method's uncertainty, or that of an equally good method, shows which rows to check."""
    if effect := _effect(row, summary):
        return [f"If the least certain fifth of the rows is left to a person, {effect}."]
    if summary.task == "classification" and row.means["accuracy"] == 1:
        return []
    told = (
        f"The uncertainty of {words_of(row)} does not show which rows are wrong: leaving out the least certain fifth does not "
        "help."
    )
    for other in summary.contenders:
        if other is not row and (effect := _effect(other, summary)):
            predicts = _verb(other, "predicts", "predict")
            return [f"{told} The uncertainty of {words_of(other)}, which {predicts} equally well, does: {effect}."]
    return [told]


def _effect(row: MethodRow, summary: Summary) -> str:
    """Words about the better error or accuracy without the least certain fifth of the rows; empty if it is not better."""
    curves = summary.of_splits(row.name, "curves", "rejection")
    start, after = (float(np.mean([curve[place] for curve in curves])) for place in (0, REJECTED_POINT))
    if summary.task == "regression":
        told = f"the error of the rest falls from {significant(start)} to {significant(after)}"
        return told if after < 0.97 * start else ""
    told = f"accuracy on the rest rises from {100 * start:.1f} % to {100 * after:.1f} %"
    return told if after > start + 0.005 else ""


def _outside(row: MethodRow, summary: Summary) -> list[str]:
    """Sentences that say whether this method detects out-of-distribution rows, if there are any, and which method does best."""
    found: dict[str, float | None] = {}  # highest AUROC of each method's measures of uncertainty
    for other in summary.ranked:
        known = [value for key, value in other.means.items() if key.startswith("auroc_") and value is not None]
        found[other.name] = max(known, default=None)
    mine = found[row.name]
    if mine is None:
        return []
    pairs = f"its uncertainty is higher for such a row than for a test row in {100 * mine:.0f} of 100 pairs (50 would be chance)"
    one, many = ("detects", "detect") if mine >= MIN_DETECTION_AUROC else ("does not detect", "do not detect")
    told = f"{capital(row)} {_verb(row, one, many)} the unfamiliar (out-of-distribution) rows of --ood: {pairs}."
    most = max(summary.ranked, key=lambda other: found[other.name] or 0.0)
    highest = found[most.name] or 0.0
    if mine < MIN_DETECTION_AUROC <= highest:
        told += f" {capital(most)} {_verb(most, 'does', 'do')}, in {100 * highest:.0f} of 100 pairs."
    return [told]


def _details(summary: Summary) -> list[str]:
    """Sentences with negative log-likelihoods and tests, for readers who know statistics."""
    best, number = summary.ranked[0], len(summary.splits)
    error = best.errors.get("nll")
    over = f"over {number} splits" if number > 1 else "on one split"
    spread = "" if error is None else f" ± {error:.3f}"
    told = [f"{best.title}: NLL {round(best.means['nll'] or 0.0, 3) + 0.0:.3f}{spread} nats per row {over}."]
    for row in summary.ranked[1:]:
        assert row.behind is not None
        p = "< 0.001" if row.p < 0.001 else f"= {row.p:.3f}" if row.p < 0.1 else f"= {row.p:.2f}"
        test = "" if math.isnan(row.p) else f", paired test p {p}"
        told.append(f"{row.title}: NLL higher by {round(row.behind.mean, 3) + 0.0:.3f} nats{test}; {row.standing}.")
    return told


def words_of(row: MethodRow) -> str:
    """A method's name inside a sentence."""
    return RIVAL_WORDS.get(row.name, row.title)


def capital(words: str | MethodRow) -> str:
    """The words, or a method's name, with a capital first letter, for the start of a sentence."""
    found = words if isinstance(words, str) else words_of(words)
    return f"{found[0].upper()}{found[1:]}"


def _verb(row: MethodRow, one: str, many: str) -> str:
    return many if row.name in PLURAL_NAMES else one


def _list(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"
