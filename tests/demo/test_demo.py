"""The demonstration: its report, methods that fail, interrupts, and what it shows."""

import os
import re
import signal
import threading
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from bayesify import posteriors
from bayesify.baselines import FixedDraws
from bayesify.cli import app
from bayesify.demo import exact, method_facts
from bayesify.demo import run as experiment
from bayesify.methods import METHODS, Method

runner = CliRunner()


@pytest.fixture
def brief(monkeypatch):
    """A demonstration of a few steps."""
    monkeypatch.setattr(experiment, "QUICK_EPOCHS", 4)


def last_line(result):
    return result.stdout.splitlines()[-1]


class Broken(posteriors.Point):
    name = "broken"

    def draw(self, request):
        raise RuntimeError("the draw went wrong\nsecond line")


class NotANumber(posteriors.Point):
    name = "not_a_number"

    def draw(self, request):
        weights, kl = super().draw(request)
        return {
            name: weight + (torch.nan if not torch.is_grad_enabled() else 0.0) for name, weight in weights.items()
        }, kl


def test_demo_writes_a_report_and_ends_with_its_path(brief, tmp_path):
    folder = (
        tmp_path / "a folder whose name is much longer than eighty characters" / "so that a wrapped line would show"
    )
    result = runner.invoke(app, ["demo", "--quick", "--methods", "point,mfvi", "--out", str(folder)])
    assert result.exit_code == 0, result.output
    path = Path(last_line(result))
    assert path == folder / "report.html"
    page = path.read_text(encoding="utf-8")
    assert page.count("<figure") == 6
    assert page.count("data:image/svg+xml;base64,") == page.count("data:image/png;base64,") == 3
    for text in ("Point (MAP)", "Mean-field", "Blundell et al. 2015", "97 / 162", "194 / 324"):
        assert text in page
    assert "This was a quick look" in page
    assert "<code>bayesify demo --seed 0 --quick --methods point,mfvi</code>" in page
    assert not re.search(r"https?://", page)
    assert not re.search(r"""(src|href)=["'](?!data:)""", page)
    assert [entry.name for entry in folder.iterdir()] == ["report.html"]
    assert "Point (MAP)" in result.stdout
    assert "194 / 324" in result.stdout


def test_demo_runs_any_method_by_its_entry(brief, tmp_path, add_method, monkeypatch):
    seen = {}

    def recipe(problem, *, color):
        likelihood = problem.likelihood
        shapes = [tuple(x.shape) for x, _ in problem.loader]
        seen[likelihood.name] = (problem.num_data, problem.epochs, problem.seed, shapes, problem.prior.name, color)

        class Constant(FixedDraws):
            def __init__(self):
                self.likelihood = likelihood

            num_distinct_draws = 1

            def predict(self, x, num_draws=None, *, generator=None, memory=None):
                from bayesify.predictive.base import Outputs

                with torch.no_grad():
                    return likelihood.predictive(Outputs(problem.net(x).unsqueeze(0)))

        return Constant()

    monkeypatch.setitem(method_facts.OPTIONS, "own_recipe", {"classification": {"color": "blue"}})
    monkeypatch.setitem(method_facts.EPOCH_FACTORS, "own_recipe", {"regression": 2.5})
    add_method(Method("own_recipe", "Own recipe", "Nobody 2099", "P", fit=recipe, options={"color": "red"}))
    result = runner.invoke(app, ["demo", "--quick", "--methods", "own_recipe", "--seed", "3", "--out", str(tmp_path)])
    assert result.exit_code == 0, result.output
    assert seen == {
        "gaussian": (60, 10, 3, [(60, 1)], "neal", "red"),
        "categorical": (200, 2, 3, [(200, 2)], "neal", "blue"),
    }
    assert Path(last_line(result)).read_text().count("<figure>") == 2


def test_what_methods_need_on_a_problem_names_the_problem():
    tables = (method_facts.OPTIONS, method_facts.EPOCH_FACTORS)
    assert {name for table in tables for name in table} <= set(METHODS)
    assert {name for table in tables for entry in table.values() for name in entry} == {
        problem.name for problem in experiment.problems()
    }


def test_a_posterior_has_its_options_for_a_problem(add_method, monkeypatch):
    monkeypatch.setitem(method_facts.OPTIONS, "dropped", {"regression": {"rate": 0.0}})
    method = add_method(Method("dropped", "Dropped", "Nobody 2099", "P", posteriors.Dropout, options={"rate": 0.5}))
    assert experiment.run(method, experiment.problems()[0], epochs=2).scores["std_gap"] == 0  # nothing is dropped


def test_a_method_that_fails_is_named_and_the_others_go_on(brief, tmp_path, add_method):
    add_method(Method("broken", "Broken", "Nobody 2099", "P", Broken))
    add_method(Method("not_a_number", "Not a number", "Nobody 2099", "P", NotANumber))
    result = runner.invoke(app, ["demo", "--quick", "--methods", "broken,not_a_number,point", "--out", str(tmp_path)])
    assert result.exit_code == 0, result.output
    page = Path(last_line(result)).read_text()
    output = " ".join(result.stdout.split())
    assert re.search("Broken failed on the 1-D problem: RuntimeError: .*the draw went wrong", output)
    assert re.search("Broken failed on two moons: RuntimeError: .*the draw went wrong", page)
    assert "second line" not in page
    assert "Not a number failed on the 1-D problem: ValueError: the score nll is nan" in page
    assert page.count("<figure>") == 2


def test_demo_says_so_if_all_methods_fail(brief, tmp_path, add_method):
    add_method(Method("broken", "Broken", "Nobody 2099", "P", Broken))
    result = runner.invoke(app, ["demo", "--quick", "--methods", "broken", "--out", str(tmp_path)])
    assert result.exit_code == 1
    assert Path(last_line(result)).exists()


def test_a_method_stops_at_its_time_budget():
    problem = experiment.problems()[0]
    outcome = experiment.run(METHODS["point"], problem, epochs=1000, budget=0.0)
    assert outcome.note == "stopped at the limit of 0 s after 1 of 1250 steps"
    assert not outcome.failed


def test_slow_methods_run_only_when_asked_for(add_method):
    slow = add_method(Method("sluggish", "Sluggish", "Nobody 2099", "P", posteriors.Point, slow=True))
    assert slow not in experiment.chosen_methods()
    assert experiment.chosen_methods(everything=True) == list(METHODS.values())


@pytest.mark.parametrize("name", ["ensemble", "function_space"])
def test_same_seed_same_outcome_whatever_ran_before(name):
    """1e-4: sums of float32 may depend on where in memory numbers lie, a few steps do not make that much larger."""
    problem = experiment.problems(1)[0]
    first = experiment.run(METHODS[name], problem, seed=1, epochs=4)
    torch.rand(7)
    for other in ("swag", "laplace"):
        experiment.run(METHODS[other], problem, seed=3, epochs=2)
    state = torch.get_rng_state()
    again = experiment.run(METHODS[name], problem, seed=1, epochs=4)
    assert torch.equal(state, torch.get_rng_state())
    assert again.scores == pytest.approx(first.scores, rel=1e-4)
    torch.testing.assert_close(first.figure["mean"], again.figure["mean"], rtol=1e-4, atol=1e-4)
    assert experiment.run(METHODS[name], problem, seed=2, epochs=4).scores != first.scores


def test_ctrl_c_keeps_what_is_finished(brief, tmp_path, monkeypatch):
    original = experiment.run

    def run(method, problem, **options):
        if method.name == "mean_field" and problem.name == "classification":
            raise KeyboardInterrupt
        return original(method, problem, **options)

    monkeypatch.setattr(experiment, "run", run)
    result = runner.invoke(app, ["demo", "--quick", "--methods", "point,mean_field,dropout", "--out", str(tmp_path)])
    assert result.exit_code == 130
    page = Path(last_line(result)).read_text()
    assert "Not finished: Mean-field, MC dropout." in page
    assert page.count("<figure>") == 3


def test_a_real_ctrl_c_ends_with_a_report(tmp_path, monkeypatch):
    """The signal comes in the middle of a training that would not end by itself."""
    original = experiment.run

    def run(method, problem, **options):
        if method.name == "mean_field":
            threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start()
            return original(method, problem, **{**options, "epochs": 10**6, "budget": None})
        return original(method, problem, **{**options, "epochs": 4})

    monkeypatch.setattr(experiment, "run", run)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        result = runner.invoke(app, ["demo", "--methods", "point,mean_field", "--out", str(tmp_path)])
    finally:
        signal.signal(signal.SIGINT, before)
    assert result.exit_code == 130
    page = Path(last_line(result)).read_text()
    assert "Not finished: Mean-field." in page
    assert page.count("<figure>") == 2


def test_ctrl_c_before_anything_is_finished_writes_nothing(tmp_path, monkeypatch):
    def run(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(experiment, "run", run)
    result = runner.invoke(app, ["demo", "--methods", "point", "--out", str(tmp_path)])
    assert result.exit_code == 130
    assert list(tmp_path.iterdir()) == []


def test_an_old_report_survives_a_failed_write(tmp_path, monkeypatch):
    from bayesify.storage import write_file

    path = write_file(tmp_path / "report.html", "old")

    def refuse(*_):
        raise OSError("disk full")

    monkeypatch.setattr(os, "replace", refuse)
    with pytest.raises(OSError, match="disk full"):
        write_file(path, "new")
    assert path.read_text() == "old"
    assert [entry.name for entry in tmp_path.iterdir()] == ["report.html"]


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1])
def test_trained_posteriors_fit_and_widen_away_from_data(seed):
    problem = experiment.problems(seed)[0]
    point = experiment.run(METHODS["point"], problem, seed=seed, budget=None)
    assert point.scores["std_gap"] == pytest.approx(0, abs=1e-6)
    for name in ("mean_field", "full_covariance", "matrix_normal", "k_tied", "ensemble"):
        outcome = experiment.run(METHODS[name], problem, seed=seed, budget=None)
        assert outcome.scores["rmse"] < 0.2, name  # the noise alone is 0.1, the data's own spread 0.35
        assert outcome.scores["std_gap"] > 0.03, name


def test_panels_say_how_far_they_are_from_the_exact_answer():
    right = exact.exact_outcomes(exact.SEED)
    assert exact.exact_outcomes(exact.SEED + 1) == {}
    for problem in experiment.problems(exact.SEED):
        own = right[problem.name]
        assert all(values.shape == (len(problem.grid),) for values in own.figure.values())
        assert exact.distance(own, own, problem).startswith("nearly exact: ")
        off = {name: values + 1 for name, values in own.figure.items()}
        moved = experiment.Outcome(own.method, problem.name, own.scores, figure=off)
        assert exact.distance(moved, own, problem).startswith("far off: ")
    assert right["regression"].scores["nll"] < -0.6
    assert "1.0 times as wide" in exact.distance(right["regression"], right["regression"], experiment.problems(0)[0])
