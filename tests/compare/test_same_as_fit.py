"""What a comparison prints for a method is what `bayesify fit --method NAME` gives on the same rows with the same seed."""

import numpy as np
import pandas
import pytest
import torch
from typer.testing import CliRunner

from bayesify import metrics
from bayesify.cli import app
from bayesify.compare import Question, compare
from bayesify.compare.compared_table import read_compared_table
from bayesify.compare.runs import seed_of
from bayesify.compare.winner import Winner
from bayesify.serving import ModelFolder

pytestmark = pytest.mark.usefixtures("brief")
METHODS = {
    "regression": ["auto", "laplace", "function_space"],
    "classification": ["auto", "temperature_scaled"],
}


def write_table(path):
    """Numbers with gaps, texts, dates, a target to predict and a label of it whose numbers have one and two digits."""
    generator = np.random.default_rng(0)
    frame = pandas.DataFrame({"a": generator.normal(size=120), "kind": generator.choice(["u", "v", "w"], 120)})
    frame["b"] = np.where(generator.random(120) < 0.1, np.nan, generator.normal(size=120))
    frame["day"] = pandas.date_range("2020-01-01", periods=120, freq="9D").strftime("%Y-%m-%d")
    frame["y"] = frame["a"] + 2 * (frame["kind"] == "u") + generator.normal(0, 0.3, 120)
    frame["label"] = np.where(frame["y"] > 0.5, "10", "9")
    frame.to_csv(path, index=False)
    return frame


@pytest.mark.parametrize(
    ("target", "other", "task"),
    [pytest.param("y", "label", "regression", marks=pytest.mark.slow), ("label", "y", "classification")],
)
def test_a_comparison_prints_what_fit_gives(target, other, task, tmp_path, monkeypatch):
    """The tolerance is for splits that train together: sums in another order change the last digits of a few steps."""
    monkeypatch.setattr("bayesify.compare.question.DEFAULT_RIVALS", ("constant",))
    monkeypatch.setattr("bayesify.compare.comparison.train_winner", lambda *given: Winner(given[3].network, "", ""))
    frame = write_table(tmp_path / "t.csv")
    question = Question(
        str(tmp_path / "t.csv"), target, task, methods=METHODS[task], ignore=[other], splits=2, quick=True, seed=3
    )
    found = compare(question, tmp_path / "out", workers=1)
    parts = read_compared_table(question).parts(1, question.seed)
    frame.drop(columns=other).iloc[parts.fit].to_csv(tmp_path / "fit.csv", index=False)
    new = frame.iloc[parts.test]
    for method in METHODS[task]:
        arguments = ["--target", target, "--task", task, "--method", method, "--seed", seed_of(question.seed, 1)]
        folder = tmp_path / method
        done = CliRunner().invoke(
            app, ["fit", str(tmp_path / "fit.csv"), *map(str, arguments), "--quick", "--out", str(folder)]
        )
        assert done.exit_code == 0, done.output
        estimator = ModelFolder.read(folder).estimator
        truth = new[target].to_numpy().copy()
        if task == "regression":
            wanted = metrics.evaluate(estimator.predictive(new), torch.from_numpy(truth)[:, None])
        else:
            codes = np.searchsorted(estimator.classes_, truth)
            wanted = metrics.evaluate(estimator.predictive(new), torch.from_numpy(codes))
        scores = found.summary.results[method, 1]["scores"]
        assert {name: scores[name] for name in wanted} == pytest.approx(wanted, rel=1e-4, abs=1e-6), method
        timed = ["predict_ms" in found.summary.results[method, split]["times"] for split in range(2)]
        assert timed == [True, False]  # on one split: it takes as long as all scores
