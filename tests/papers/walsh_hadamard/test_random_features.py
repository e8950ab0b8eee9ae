"""The comparison of Gaussian processes: sizes that match, a run that resumes, the table."""

import json
from importlib.util import find_spec

import pytest
import torch
from bayesify_papers.walsh_hadamard import random_features
from bayesify_papers.walsh_hadamard.random_features import FUNCTIONS, SMOKE, Job, Training, jobs, make, prepare, run

from bayesify import count_parameters

SYSTEMS = ("walsh_hadamard", "fourier", "inducing_points")
HERE = SYSTEMS if find_spec("gpytorch") is not None else SYSTEMS[:2]


@pytest.mark.parametrize("covariance", ["diagonal", "full"])
@pytest.mark.parametrize("system", HERE)
def test_models_have_the_parameters_that_the_table_says(system, covariance):
    job = Job("otl_circuit", system, covariance, 16)
    model = make(job, torch.rand(200, 6))
    # Six lengthscales, amplitude and noise besides; gpytorch stores the whole square of a full factor.
    square = job.size * (job.size - 1) // 2 if (system, covariance) == ("inducing_points", "full") else 0
    assert count_parameters(model) == job.parameters + 8 + square


def test_sizes_match_the_budget():
    whole = [Job("borehole", system, "diagonal", 32) for system in SYSTEMS]
    assert [job.size for job in whole] == [1024, 64, 13]  # 13 (8 + 2) = 130 is the first above 128
    assert [job.parameters for job in whole] == [128, 128, 130]
    whole = [Job("borehole", system, "full", 32) for system in SYSTEMS]
    assert [job.parameters for job in whole] == [624, 34 + 34 * 35 // 2, 28 * 9 + 28 * 29 // 2]
    for job in whole:
        assert job.parameters >= job.budget


def test_schedule_and_rates_are_the_papers():
    assert (Training().steps, Training().fixed_noise) == (12_000, 10_000)
    assert dict.fromkeys(FUNCTIONS, 6e-4) | {"hartmann6": 5e-3} == random_features.LEARNING_RATES


def test_a_fifth_trains_and_outputs_are_standardized():
    problem = prepare("rastrigin5", Training(), seed=0)
    assert (len(problem.x), len(problem.x_test)) == (2000, 8000)
    assert abs(float(problem.y.mean())) < 1e-5
    assert float(problem.y.std(unbiased=False)) == pytest.approx(1.0, abs=1e-5)
    assert 0 <= float(problem.x.min()) <= float(problem.x.max()) <= 1


@pytest.mark.parametrize("fixed", [3, 6])
def test_noise_stays_for_the_first_steps(fixed):
    job = Job("otl_circuit", "fourier", "diagonal", 4)
    problem = prepare(job.function, SMOKE, 0)
    model = make(job, problem.x)
    random_features.train(model, problem, Training(6, fixed, 32, 200), 1e-2, seed=0)
    moved = float(model.likelihood.noise.detach()) != pytest.approx(0.02**2, rel=1e-6)
    assert moved == (fixed < 6)


def test_training_lowers_the_error():
    job = Job("otl_circuit", "walsh_hadamard", "diagonal", 8)
    problem = prepare(job.function, Training(num_points=1000), 0)
    model = make(job, problem.x)
    before = random_features.judge(job, model, problem, 0.0)["rmse"]
    random_features.train(model, problem, Training(steps=150, fixed_noise=150), 2e-2, seed=0)
    after = random_features.judge(job, model, problem, 0.0)["rmse"]
    assert after < 0.5 * before


@pytest.mark.slow
def test_smoke_run_resumes_and_prints(smoke, capsys):
    done = smoke("walsh-hadamard/random-features")
    tmp_path = done.folder
    assert "The paper shows a figure without numbers" in done.printed
    count = 2 * len(HERE) * 2  # functions, systems, covariances
    assert done.printed.count(" of ") >= count
    stored = json.loads((tmp_path / "random_features.json").read_text())
    assert len(stored["rows"]) == count
    assert stored["command"].startswith("python -m bayesify_papers.walsh_hadamard.random_features --smoke")
    assert random_features.main(["--smoke", "--out", str(tmp_path)]) == 0
    assert "rmse" not in capsys.readouterr().out.splitlines()[0]  # nothing was trained again
    assert json.loads((tmp_path / "random_features.json").read_text()) == stored
    with pytest.raises(ValueError, match="was written with other settings"):
        run(jobs(["otl_circuit"], ["fourier"], ["diagonal"], [4], 1), Training(), tmp_path / "random_features.json")


@pytest.mark.slow
def test_runs_that_shared_the_work_are_merged(tmp_path):
    parts = []
    for name in ("otl_circuit", "rastrigin5"):
        parts.append(tmp_path / name / "random_features.json")
        run(jobs([name], ["fourier"], ["diagonal"], [4], 1), SMOKE, parts[-1])
    whole = tmp_path / "whole"
    arguments = ["--smoke", "--out", str(whole), "--merge", *map(str, parts), str(parts[0])]
    assert random_features.main(arguments) == 0
    rows = json.loads((whole / "random_features.json").read_text())["rows"]
    assert [row["function"] for row in rows] == ["otl_circuit", "rastrigin5"]


def test_the_papers_claims_are_counted():
    row = {"function": "borehole", "covariance": "diagonal", "block": 32, "parameters": 128}
    rows = [{**row, "system": system, "rmse": rmse} for system, rmse in zip(SYSTEMS, (0.2, 0.3, 0.1), strict=True)]
    text = random_features.claims(rows)
    assert "here in 1 of 1 comparisons" in text
    assert "here in 1 of 1)" in text
    assert "here in 0 of 0 comparisons" in random_features.claims(rows[:2])
