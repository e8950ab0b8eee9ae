"""What a comparison trains at its end: which method, with which scores, and what it says about it."""

from types import SimpleNamespace

import numpy as np
import pandas
import pytest
from run_results import label, noisy, result

from bayesify.compare import Question, winner
from bayesify.compare.compared_table import ComparedTable
from bayesify.compare.summary import summarize
from bayesify.compare.verdict import judge
from bayesify.compare.winner import commands, train_winner
from bayesify.tables.columns import read_features
from bayesify.tables.files import Reading


def train(monkeypatch, tmp_path, task="regression", classes=(), **methods):
    """The winner of NLLs, or results, by method and split, and what was asked of `fit_table`."""
    found = {
        (name, split): result(value) if isinstance(value, float) else value
        for name, values in methods.items()
        for split, value in enumerate(values)
    }
    frame = pandas.DataFrame({"a": np.arange(6.0), "price": [1.0, 3.0] * 3})
    problem = ComparedTable(
        "houses", task, "price", read_features(frame[["a"]]), frame["price"].to_numpy(), classes, frame=frame,
        notes=("A note.",), cautions=("Copies.",),
    )  # fmt: skip
    summary = summarize(found, list(methods), task)
    asked = {}

    def fit_table(table, target, **options):
        asked.update(options, rows=len(table))
        return SimpleNamespace(write=lambda folder: asked.update(folder=folder))

    monkeypatch.setattr(winner, "fit_table", fit_table)
    verdict = judge(summary, "price", classes)
    made = train_winner(Question("-", seed=3), problem, summary, verdict, tmp_path)
    return made, asked, (summary, problem)


def test_a_clear_winner_has_the_scores_of_the_comparison(monkeypatch, tmp_path):
    made, asked, _ = train(monkeypatch, tmp_path, laplace=[1.0, 1.01], point=[1.5, 1.51], constant=[3.0, 3.0])
    assert (made.method, made.folder, made.words) == ("laplace", "model", "The model is Laplace.")
    assert (asked["method"], asked["seed"], asked["rows"]) == ("laplace", 3, 6)
    assert asked["folder"] == tmp_path / "model"
    assert asked["scored"].scores["rmse"] == pytest.approx(1.005)
    assert [asked["scored"].scores[f"coverage_{level}"] for level in (50, 90, 95)] == pytest.approx([0.5, 0.9, 0.95])
    assert (
        "2 splits of a comparison, predicted by models that were each trained on 800 other rows"
        in asked["scored"].where
    )
    assert asked["notes"] == ["bayesify compare: Use Laplace. The model is Laplace.", "A note.", "Copies."]


def test_of_tied_methods_the_cheapest_or_best_calibrated_is_kept(monkeypatch, tmp_path):
    tied = {"ensemble": noisy(1.0, 0.05), "laplace": noisy(1.0, 0.05, seed=1), "constant": [3.0] * 5}
    made, _, _ = train(monkeypatch, tmp_path, **tied)
    assert made.words == "2 methods are tied; the model is Laplace, the cheapest of them."
    tied["laplace"] = [result(value, calibration=0.2) for value in tied["laplace"]]
    made, _, _ = train(monkeypatch, tmp_path, **tied)
    assert made.words.endswith(
        "the model is Ensemble, the cheapest of the methods whose stated uncertainty is most accurate."
    )


def test_where_trees_win_the_best_network_is_kept_and_that_is_said(monkeypatch, tmp_path):
    made, asked, (summary, problem) = train(
        monkeypatch, tmp_path, boosted_trees=[1.0, 1.2], laplace=[1.2, 1.4], swag=[1.4, 1.6], constant=[3.0, 3.0]
    )
    assert made.words == (
        "Boosted trees cannot be stored, because they are not one of bayesify's networks. The stored model is bayesify's best "
        "method here, Laplace, with a typical error of 1.30 (boosted trees: a typical error of 1.10)."
    )
    assert asked["method"] == "laplace"
    question = Question("my houses.csv", "price", ignore=["b"], group="who", reading=Reading(missing=["none", "?"]))
    assert commands(made, summary, problem, question, tmp_path) == [
        f"bayesify predict {tmp_path / 'model'} new.csv --out predictions.csv",
        "bayesify fit 'my houses.csv' --target price --method swag --ignore b,who --missing 'none,?' --out houses-swag",
    ]


def test_nothing_better_than_a_constant_guess(monkeypatch, tmp_path):
    made, _, _ = train(monkeypatch, tmp_path, constant=noisy(1.0, 0.1), laplace=noisy(1.0, 0.1, seed=1))
    assert (
        made.words
        == "The model is Laplace, but it does not predict clearly better than a constant guess: do not rely on it."
    )


def test_classes_have_scores_of_classes(monkeypatch, tmp_path):
    runs = [label(0.3, 0.9, [45, 5, 5, 45])] * 2
    _, asked, _ = train(
        monkeypatch,
        tmp_path,
        "classification",
        ("no", "yes"),
        laplace=runs,
        constant=[label(0.7, 0.5, [50, 0, 50, 0])] * 2,
    )
    assert {"accuracy": 0.9, "log_loss": 0.3, "sets_90": 0.9, "size_90": 2.0}.items() <= asked["scored"].scores.items()


def test_a_training_that_fails_is_told(monkeypatch, tmp_path):
    def fail(*_, **__):
        raise ValueError("the table is odd")

    _, _, (summary, problem) = train(monkeypatch, tmp_path, laplace=[1.0, 1.01], constant=[3.0, 3.0])
    monkeypatch.setattr(winner, "fit_table", fail)
    question = Question("-", "price")
    made = train_winner(question, problem, summary, judge(summary, "price"), tmp_path)
    assert (made.folder, made.words) == (
        "",
        "The model is Laplace. It could not be trained on all rows: the table is odd",
    )
    assert commands(made, summary, problem, question, tmp_path) == [
        "bayesify fit table.csv --target price --method ensemble --out houses-ensemble"
    ]
