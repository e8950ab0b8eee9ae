"""Ranks and verdicts of known scores: ties, trivial differences, trees that win, majority labels, and what the words say."""

import itertools
import math

import numpy as np
import pytest
from run_results import label, noisy, result

from bayesify.compare.summary import BEHIND, LEADS, MIN_NAMED_NATS, UNCLEAR, summarize
from bayesify.compare.verdict import judge, recalls


def verdict_of(task="regression", classes=(), target="price", **methods):
    """The verdict of NLLs, or results, by method and split."""
    found = {}
    for name, values in methods.items():
        for split, value in enumerate(values):
            found[name, split] = result(value) if isinstance(value, float) else value
    summary = summarize(found, list(methods), task)
    return summary, judge(summary, target, classes)


# -- the situations ----------------------------------------------------------------------------------------------------


def test_a_tie_names_no_winner_but_who_is_tied_and_the_cheapest():
    summary, verdict = verdict_of(
        constant=[3.0, 3.1, 3.0], ensemble=[1.0, 1.5, 0.9], laplace=[1.1, 1.4, 0.95], boosted_trees=[1.06, 1.6, 0.85]
    )
    assert verdict.certainty == "tie"
    assert verdict.headline == "Ensemble, Laplace and boosted trees predict price equally well here."
    assert "Use " not in verdict.headline
    assert verdict.sentences[0] == "Use boosted trees, the cheapest of them."
    assert (verdict.pick, verdict.network) == ("boosted_trees", "ensemble")
    assert [row.name for row in summary.leading] == ["ensemble", "laplace", "boosted_trees"]


def test_of_tied_methods_a_cheap_one_with_wrong_uncertainty_is_not_taken():
    _, verdict = verdict_of(
        ensemble=[result(value, calibration=0.01) for value in (1.0, 1.5, 0.9)],
        point=[result(value, calibration=0.12) for value in (1.1, 1.4, 0.95)],
    )
    assert verdict.pick == "ensemble"
    assert verdict.sentences[:2] == (
        "The cheapest of these methods is a plain network, but its stated uncertainty is less accurate.",
        "Use Ensemble, the cheapest of the methods whose stated uncertainty is most accurate.",
    )


def test_a_trivial_difference_is_a_tie_however_certain_it_is():
    """0.004 nats on every split: the paired test is sure, and nobody would notice."""
    base = noisy(0.6, 0.02)
    summary, verdict = verdict_of(
        constant=[value + 0.5 for value in base], ensemble=base, point=[value + 0.004 for value in base]
    )
    assert summary.row("point").p < 1e-6
    assert verdict.certainty == "tie"
    assert verdict.headline == "Ensemble and a plain network predict price equally well here."
    assert (
        "The differences between these methods are real but too small to matter: the best one gives the true price at most "
        "0.4 % more probability than the others." in verdict.sentences
    )
    summary, verdict = verdict_of(
        constant=[value + 0.5 for value in base], ensemble=base, point=[value + 2 * MIN_NAMED_NATS for value in base]
    )
    assert (verdict.certainty, verdict.headline) == ("clear", "Use Ensemble.")


def test_what_lies_at_the_edge_of_the_test_changes_no_word():
    """Rounding moves the p of a method that is one nat behind across 0.05; the best stays the best, though not beyond doubt."""
    best = np.array([0.0, 0.1, -0.1, 0.2, -0.2])
    apart, found = np.array([1.1, -0.9, 0.6, -0.8, 0.0]), []
    for scale in (0.54, 0.58):
        scores = {"auto": best, "boosted_trees": best + 0.9 + 1.2 * scale * apart[::-1]}
        scores |= {"linear": best + 1 + scale * apart, "ensemble": best + 5, "constant": best + 9}
        found.append(verdict_of(**{name: values.tolist() for name, values in scores.items()}))
    assert [summary.row("linear").p < 0.05 for summary, _ in found] == [True, False]
    assert [row.standing for row in found[0][0].ranked[:3]] == [LEADS, UNCLEAR, BEHIND]
    assert found[0][1].sentences == found[1][1].sentences
    for _, verdict in found:
        assert (verdict.certainty, verdict.pick, verdict.network) == ("likely", "auto", "auto")
        assert verdict.headline == "Bayesify's default predicts price best here, but this is not certain."
        assert verdict.sentences[0] == "These splits cannot rule out that boosted trees predict price equally well."


@pytest.mark.parametrize("rounding", [1e-9, -1e-9])
def test_rounding_decides_no_tie(rounding):
    scores = noisy(1.0, 0.05)
    runs = {"laplace": scores, "ensemble": [value + rounding for value in scores], "constant": [3.0] * 5}
    summary, verdict = verdict_of(**runs)
    assert [row.name for row in summary.leading] == ["laplace", "ensemble"]
    assert verdict.headline == "Laplace and Ensemble predict price equally well here."
    assert verdict.details[1].startswith("Ensemble: NLL higher by 0.000 nats")


def test_trees_that_predict_better_are_said_to():
    base = noisy(1.0, 0.02)
    _, verdict = verdict_of(
        constant=[value + 1 for value in base],
        boosted_trees=base,
        linear=[value + 0.3 for value in base],
        ensemble=[value + 0.045 for value in base],
        point=[value + 0.06 for value in base],
    )
    assert verdict.headline == "Boosted trees predict price better here than any network."
    assert (verdict.certainty, verdict.pick, verdict.network) == ("clear", "boosted_trees", "ensemble")
    assert "Boosted trees give the true price of a new row 4.6 % more probability than Ensemble, the best network." in (
        verdict.sentences
    )
    _, verdict = verdict_of(linear=base, boosted_trees=base[::-1], ensemble=[value + 0.3 for value in base])
    assert verdict.headline == "A linear model and boosted trees predict price better here than any network."


def test_a_majority_label_is_named():
    """4 % fraud that no column tells of: 96 % accuracy is what always saying ok gives."""
    runs = {
        "constant": [label(0.168 + d, 0.96, [96, 0, 4, 0]) for d in (0.0, 0.01, 0.0)],
        "ensemble": [label(0.171 + d, 0.955, [95, 1, 4, 0]) for d in (0.0, 0.0, 0.01)],
        "linear": [label(0.17 + d, 0.96, [96, 0, 4, 0]) for d in (0.01, 0.0, 0.0)],
    }
    _, verdict = verdict_of("classification", ("ok", "fraud"), "fraud", **runs)
    assert verdict.certainty == "nothing"
    assert verdict.headline == "No method predicted fraud clearly better than always saying 'ok'."
    text = " ".join(verdict.sentences)
    assert "always saying 'ok' would be right in 96.0 %. This is no better than the constant answer." in text
    assert "recognizes 0 % of the rows of class 'fraud' (4 % of all rows)." in text


def test_nothing_is_better_than_the_mean():
    _, verdict = verdict_of(constant=[1.0, 1.1, 1.05], ensemble=[1.01, 1.08, 1.05], boosted_trees=[1.02, 1.2, 1.05])
    assert verdict.certainty == "nothing"
    assert verdict.headline == "No method predicted price clearly better than always guessing the mean."
    assert verdict.network == "ensemble"


def test_recall_by_class():
    runs = {"point": [label(0.3, 0.8, [70, 10, 10, 10])] * 2}
    found = {("point", split): run for split, run in enumerate(runs["point"])}
    summary = summarize(found, ["point"], "classification")
    assert recalls(summary.best, summary, ("no", "yes")) == [
        ("no", 0.8, 0.875, 0.875),
        ("yes", 0.2, 0.5, 0.5),
    ]


# -- ranks -------------------------------------------------------------------------------------------------------------


def test_methods_are_ranked_on_common_splits_and_failures_come_last():
    summary, _ = verdict_of(
        point=[1.0, 1.1, 1.2],
        temperature_scaled=[0.9, 1.0, 1.15],
        swag=[0.1, result(0, error="bad")],
        laplace=[0.5, 0.62, 0.7],
    )
    assert [row.name for row in summary.rows] == ["laplace", "temperature_scaled", "point", "swag"]
    assert summary.splits == (0, 1, 2)
    assert summary.rows[-1].failure == "failed on 1 of 2 splits, such as split 2: bad"
    assert summary.best.means["nll"] == pytest.approx(np.mean([0.5, 0.62, 0.7]))
    assert summary.best.errors["nll"] == pytest.approx(np.std([0.5, 0.62, 0.7], ddof=1) / math.sqrt(3))
    assert summary.difference("point", "laplace").mean == pytest.approx(np.mean([0.5, 0.48, 0.5]))
    assert summary.row("point").clearly_behind


def test_a_method_whose_scores_vary_too_much_to_tell_is_tied_and_not_taken():
    """Within its paired error of the best, though another method between them is clearly behind: nothing is clear."""
    base = noisy(1.0, 0.01)
    apart = [value + difference for value, difference in zip(base, [0.9, -0.6, 0.7, -0.5, 0.0], strict=True)]
    runs = {"constant": [value + 9 for value in base], "ensemble": base, "laplace": [value + 0.05 for value in base]}
    summary, verdict = verdict_of(**runs, point=apart)
    assert [row.name for row in summary.ranked] == ["ensemble", "laplace", "point", "constant"]
    assert [row.standing for row in summary.ranked] == [LEADS, BEHIND, LEADS, BEHIND]
    assert (verdict.certainty, verdict.pick) == ("tie", "ensemble")
    assert verdict.headline == "Ensemble and a plain network predict price equally well here."
    assert verdict.sentences[:2] == (
        "The scores of a plain network vary so much from split to split that they allow no conclusion.",
        "Use Ensemble, the best of them on average.",
    )
    _, verdict = verdict_of(**runs)
    assert (verdict.certainty, verdict.headline) == ("clear", "Use Ensemble.")


def test_order_and_standing_agree():
    """A method below one that is clearly behind is behind too, though its own scores vary too much for a test of its own."""
    base = noisy(1.0, 0.01)
    mean_field = [value + difference for value, difference in zip(base, [0.8, 0.1, 0.7, 0.1, 0.0], strict=True)]
    summary, _ = verdict_of(
        ensemble=base, point=[value + 0.1 for value in base], mean_field=mean_field, laplace=base[::-1]
    )
    assert not summary.row("mean_field").tied
    assert not summary.row("mean_field").clearly_behind
    assert [row.standing for row in summary.ranked] == [LEADS, LEADS, BEHIND, BEHIND]
    assert all(a.means["nll"] <= b.means["nll"] for a, b in itertools.pairwise(summary.rows))
    assert [row.behind is None for row in summary.rows] == [True, False, False, False]


def test_a_single_split_decides_nothing():
    summary, verdict = verdict_of(point=[1.0, 9.0], laplace=[2.0])
    assert summary.splits == (0,)
    assert verdict.certainty == "untested"
    assert verdict.headline == "A plain network did best, but on a single split, which is too little to decide."
    assert judge(summarize({}, ["point"], "regression"), "y") is None


def test_the_score_of_a_winner_is_that_of_rows_which_did_not_choose_it():
    """Two methods that win where the other loses: whichever is chosen by the other splits, it does badly on the last."""
    values = {"ensemble": [0.0, 1.0, 0.9], "laplace": [1.0, 0.0, 0.9]}
    runs = {name: [result(nll, rmse=10 + nll) for nll in nlls] for name, nlls in values.items()}
    summary, verdict = verdict_of(**runs)
    assert summary.chosen_elsewhere()[:2] == ["laplace", "ensemble"]
    text = " ".join(verdict.sentences)
    assert (
        "On rows that had no part in choosing the winner, its typical error is 11.0, not 10.6: the best of many methods "
        "always looks a little better than it is." in text
    )


# -- words -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("cover", "test", "words"),
    [
        (
            {},
            1000,
            "contained the true price in 50, 90 and 95 % of test rows: about right. The 90 % intervals have a mean width of 2.00",
        ),
        ({"50": 0.81}, 1000, "50 % wider than needed; 90 % about right; 95 % about right"),
        ({"50": 0.4, "90": 0.7, "95": 0.8}, 1000, "of test rows: too narrow. The 90 %"),
        ({"95": 1.0}, 1000, "95 % wider than needed"),
        ({"90": 1.0}, 20, "of test rows: no error visible with so few rows."),
    ],
)
def test_every_level_is_judged(cover, test, words):
    _, verdict = verdict_of(point=[result(0.5, cover=cover, test=test)])
    text = " ".join(verdict.sentences)
    assert words in text
    assert ("use these" in text) == ("90" in cover and test == 1000)


def test_intervals_are_judged_by_thirds_of_the_prediction():
    _, verdict = verdict_of(point=[result(0.5, thirds=(1.0, 1.0, 0.7), test=1000)])
    assert (
        "But the 90 % intervals do not fit all predictions: they contained 100, 100 and 70 % of the rows with low, middle and "
        "high predictions, so they are too wide for low, too wide for middle and too narrow for high predictions."
        in verdict.sentences
    )
    _, verdict = verdict_of(point=[result(0.5, thirds=(0.92, 0.9, 0.89), test=1000)])
    fitting = "The 90 % intervals fit the whole range: they contained 92, 90 and 89 %"
    assert any(sentence.startswith(fitting) for sentence in verdict.sentences)


def test_errors_stand_beside_those_of_a_constant_guess():
    runs = {"constant": [result(2.0, rmse=7.5)] * 2, "ensemble": [result(1.0, rmse=2.7)] * 2}
    _, verdict = verdict_of(**runs)
    told = "The typical error of Ensemble is 2.70. Always guessing the mean of price has a typical error of 7.50."
    assert told in verdict.sentences


@pytest.mark.parametrize("seconds", [1e-9, 1e4])
def test_measured_seconds_change_no_word(seconds):
    """They differ from run to run; the verdict of the same scores does not."""
    scores = (0.5, 0.52, 0.51)
    verdicts = [
        verdict_of(point=[1.0, 1.02, 1.0], laplace=[result(nll, seconds=s) for nll in scores], swag=[0.51, 0.51, 0.52])[
            1
        ]
        for s in (seconds, 1.0)
    ]
    assert verdicts[0] == verdicts[1]


def test_uncertain_rows_for_a_human():
    _, verdict = verdict_of(point=[result(0.5, fall=True)])
    assert any(
        "is left to a person, the error of the rest falls from 1.00" in sentence for sentence in verdict.sentences
    )
    _, verdict = verdict_of(point=[0.5, 0.6], laplace=[result(0.55, fall=True), result(0.58, fall=True)])
    assert any(
        "leaving out the least certain fifth does not help. The uncertainty of Laplace" in each
        for each in verdict.sentences
    )


def test_the_verdict_says_whether_rows_of_another_kind_are_noticed():
    entries = {name: result(nll) | {"ood": {"auroc_variance": auroc}} for name, nll, auroc in (
        ("point", 0.5, 0.5), ("laplace", 0.6, 0.97))}  # fmt: skip
    last = verdict_of(**{name: [entry] for name, entry in entries.items()})[1].sentences[-1]
    assert last.startswith("A plain network does not detect the unfamiliar (out-of-distribution) rows")
    assert last.endswith("in 50 of 100 pairs (50 would be chance). Laplace does, in 97 of 100 pairs.")
    entries["point"]["ood"]["auroc_variance"] = 0.9
    last = verdict_of(**{name: [entry] for name, entry in entries.items()})[1].sentences[-1]
    assert last.startswith("A plain network detects the unfamiliar (out-of-distribution) rows")


def test_the_numbers_are_in_the_details_and_plain_words_in_the_sentences():
    _, verdict = verdict_of(point=[1.0, 1.0001, 1.0], laplace=[0.5, 0.5, 0.5001])
    assert verdict.details == (
        "Laplace: NLL 0.500 ± 0.000 nats per row over 3 splits.",
        "Plain network: NLL higher by 0.500 nats, paired test p < 0.001; behind.",
    )
    assert not any(word in " ".join(verdict.sentences) for word in ("NLL", "nats", "paired", "conformal"))
