"""Runs fan out, survive dead workers and interruptions, and give the same results on every engine."""

from __future__ import annotations

import errno
import importlib.util
import json
import random
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from job_functions import mortal, mortal_noise, noise

from bayesify.scale_out import JobsFailed, engines, jobs, read_results, run_jobs


def make(folder: Path, count: int, **special: dict[str, int]) -> dict[str, dict[str, Any]]:
    return {f"j{i}": {"x": i, "count": str(folder / f"count{i}"), **special.get(f"j{i}", {})} for i in range(count)}


def attempts(folder: Path) -> list[int]:
    return [len(path.read_text()) for path in sorted(folder.glob("count*"))]


INPUTS = {f"group/x={i}": {"x": i} for i in range(3)}


@dataclass
class Job:
    x: int
    sizes: tuple[int, ...] = (1, 2)


def on_dataclass(job: Job) -> dict[str, Any]:
    return {"x": job.x, "last": job.sizes[-1]}


def test_results_are_files_and_are_not_made_again(tmp_path: Path) -> None:
    given = make(tmp_path, 3)
    told: list[tuple[str, int, int]] = []
    first = run_jobs(mortal, given, tmp_path, workers=1, progress=lambda *each: told.append(each))
    assert first == {"j0": {"x": 0}, "j1": {"x": 1}, "j2": {"x": 2}} == read_results(tmp_path)
    assert told == [("j0", 1, 3), ("j1", 2, 3), ("j2", 3, 3)]
    stored = json.loads((tmp_path / "jobs" / "j1.json").read_text())
    assert {key: stored[key] for key in ("job", "result")} == {"job": given["j1"], "result": {"x": 1}}
    assert not list(tmp_path.rglob(".*.tmp"))
    assert run_jobs(mortal, given, tmp_path, workers=1) == first
    assert attempts(tmp_path) == [1, 1, 1]


def test_a_plan_grows_with_results(tmp_path: Path) -> None:
    def plan(results: Mapping[str, Any]) -> dict[str, Any]:
        first = make(tmp_path, 2)
        if not {"j0", "j1"} <= results.keys():
            return first
        best = max(results[name]["x"] for name in first)
        return {**first, "best": {**first["j0"], "x": best}}

    expected = {"j0": {"x": 0}, "j1": {"x": 1}, "best": {"x": 1}}
    assert run_jobs(mortal, plan, tmp_path, workers=1) == expected
    (tmp_path / "jobs" / "best.json").unlink()
    assert run_jobs(mortal, plan, tmp_path, workers=1) == expected  # goes on from the results in files


def test_other_jobs_and_unreadable_files_are_run_again(tmp_path: Path) -> None:
    given = make(tmp_path, 3)
    run_jobs(mortal, given, tmp_path, workers=1)
    (tmp_path / "jobs" / "j0.json").write_text('{"job": {')
    given["j1"]["x"] = 7
    assert run_jobs(mortal, given, tmp_path, workers=1) == {"j0": {"x": 0}, "j1": {"x": 7}, "j2": {"x": 2}}
    assert attempts(tmp_path) == [2, 2, 1]


@pytest.mark.parametrize("text", ["[1, 2]", "3", "null", '{"job": {}}', "[" * 10_000, "\x00"])
def test_files_that_hold_something_else_are_run_again(tmp_path: Path, text: str) -> None:
    given = make(tmp_path, 2)
    first = run_jobs(mortal, given, tmp_path, workers=1)
    (tmp_path / "jobs" / "j0.json").write_text(text)
    assert list(read_results(tmp_path)) == ["j1"]
    assert run_jobs(mortal, given, tmp_path, workers=1) == first
    assert attempts(tmp_path) == [2, 1]


def test_a_result_that_was_altered_is_not_used(tmp_path: Path) -> None:
    given = make(tmp_path, 2)
    first = run_jobs(mortal, given, tmp_path, workers=1)
    path = tmp_path / "jobs" / "j1.json"
    stored = json.loads(path.read_text())
    path.write_text(json.dumps(stored))  # other spaces, the same content
    assert read_results(tmp_path) == first
    stored["result"]["x"] = 5
    path.write_text(json.dumps(stored))
    assert list(read_results(tmp_path)) == ["j0"]
    assert run_jobs(mortal, given, tmp_path, workers=1) == first
    assert attempts(tmp_path) == [1, 2]


def test_dataclasses_reach_the_function_as_they_are(tmp_path: Path) -> None:
    for _ in range(2):
        assert run_jobs(on_dataclass, {"a": Job(3)}, tmp_path, workers=1) == {"a": {"x": 3, "last": 2}}


def test_errors_are_tried_again_and_cost_no_other_job(tmp_path: Path) -> None:
    given = make(tmp_path, 3, j0={"errors": 2}, j1={"errors": 9})
    with pytest.raises(JobsFailed, match="job j1 failed: ValueError: not yet; the other 2 jobs are finished") as caught:
        run_jobs(mortal, given, tmp_path, workers=1)
    assert list(caught.value.reasons) == ["j1"]
    assert "Traceback" in caught.value.reasons["j1"]
    assert caught.value.results == {"j0": {"x": 0}, "j2": {"x": 2}} == read_results(tmp_path)
    assert attempts(tmp_path) == [3, 3, 1]


def test_global_state_is_fixed_for_a_job_and_kept_for_the_caller(tmp_path: Path) -> None:
    before = torch.get_rng_state(), random.getstate(), torch.get_num_threads()
    first = run_jobs(noise, INPUTS, tmp_path / "a", workers=1)
    assert torch.equal(before[0], torch.get_rng_state())
    assert before[1:] == (random.getstate(), torch.get_num_threads())
    torch.randn(3)
    backwards = run_jobs(noise, dict(reversed(INPUTS.items())), tmp_path / "b", workers=1)
    assert backwards == first
    assert len({result["torch"] for result in first.values()}) == 3
    assert {result["threads"] for result in first.values()} == {1}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"engine": "slurm"}, "engine='slurm'; choose from local, dask, ray"),
        ({"workers": 0}, "workers=0; give an integer of at least 1"),
        ({"threads": 0}, "threads=0; give an integer of at least 1"),
        ({"retries": -1}, "retries=-1; give an integer of at least 0"),
    ],
)
def test_bad_options(tmp_path: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        run_jobs(noise, INPUTS, tmp_path, **options)


@pytest.mark.parametrize("name", ["", "../up", "a//b", "/root", "a b", ".hidden", "a/"])
def test_bad_names(tmp_path: Path, name: str) -> None:
    with pytest.raises(ValueError, match="use only letters, digits"):
        run_jobs(noise, {name: {"x": 1}}, tmp_path, workers=1)
    assert not list(tmp_path.iterdir())


def test_jobs_must_be_plain_data(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="job a cannot be written as JSON"):
        run_jobs(noise, {"a": {"x": torch.ones(1)}}, tmp_path, workers=1)


def nothing(job: Any) -> Any:
    return None


def test_results_must_be_dictionaries(tmp_path: Path) -> None:
    with pytest.raises(JobsFailed, match="nothing returned NoneType; return a dictionary"):
        run_jobs(nothing, {"a": 1}, tmp_path, workers=1, retries=0)


@pytest.mark.parametrize("engine", ["local", "dask", "ray"])
def test_a_missing_engine_names_its_extra(tmp_path: Path, engine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engines, "find_spec", lambda name: None)
    with pytest.raises(
        ImportError,
        match=r"pip install '?{}.*extra '{}'".format(*engines.PACKAGES_AND_EXTRAS[engine]),
    ):
        run_jobs(noise, INPUTS, tmp_path, engine=engine, workers=2)


def test_a_full_disk_is_an_error_and_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_jobs(noise, {"a": {"x": 1}}, tmp_path, workers=1)

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("bayesify.scale_out.workers.write_result", full)
    monkeypatch.setattr(jobs, "write_result", full)
    with pytest.raises(OSError, match="No space left"):
        run_jobs(noise, {"a": {"x": 1}, "b": {"x": 2}}, tmp_path, workers=1)
    assert list(read_results(tmp_path)) == ["a"]


PROGRAM = """
import os, sys, time
from bayesify.scale_out import run_jobs

def slowly(job):
    time.sleep(job)
    return {"slept": job}

if __name__ == "__main__":
    run_jobs(slowly, {"a": 0, "b": 60, "c": 60}, sys.argv[1], workers=int(sys.argv[2]))
"""


NOTE = """
    if job:
        with open(os.path.join(os.path.dirname(__file__), "worker"), "w") as file:
            file.write(str(os.getpid()))
    time.sleep(job)
"""
"""In place of the sleep: says who sleeps."""


def interrupted(job: int) -> dict[str, Any]:
    if job:
        signal.raise_signal(signal.SIGINT)
    return {"job": job}


def test_an_interruption_keeps_what_is_finished(tmp_path: Path) -> None:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            run_jobs(interrupted, {"a": 0, "b": 1, "c": 2}, tmp_path, workers=1)
    finally:
        signal.signal(signal.SIGINT, before)
    assert read_results(tmp_path) == {"a": {"job": 0}}


@pytest.mark.slow
def test_an_interruption_of_workers_keeps_what_is_finished(tmp_path: Path) -> None:
    script = tmp_path / "program.py"
    script.write_text(PROGRAM)
    done = subprocess.Popen([sys.executable, script, tmp_path, "2"], stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 100
    while not (tmp_path / "jobs" / "a.json").exists() and time.monotonic() < deadline:
        time.sleep(0.1)
    done.send_signal(signal.SIGINT)
    _, errors = done.communicate(timeout=120)
    assert done.returncode == -signal.SIGINT, errors
    assert "KeyboardInterrupt" in errors
    assert read_results(tmp_path) == {"a": {"slept": 0}}


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_workers_end_with_a_killed_parent(tmp_path: Path) -> None:
    """Those of a run that was killed would work beside those of the run that goes on."""
    script = tmp_path / "program.py"
    script.write_text(PROGRAM.replace("time.sleep(job)", NOTE))
    parent = subprocess.Popen([sys.executable, script, tmp_path, "2"])
    mark = tmp_path / "worker"
    deadline = time.monotonic() + 100
    while not (mark.exists() and mark.read_text()) and time.monotonic() < deadline:
        time.sleep(0.1)
    worker = int(mark.read_text())
    parent.kill()
    parent.wait()
    deadline = time.monotonic() + 100
    while Path(f"/proc/{worker}").exists() and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not Path(f"/proc/{worker}").exists()


@pytest.mark.slow  # clusters take about 20 s to start
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("engine", ["local", "dask", "ray"])
def test_a_job_that_kills_every_worker_costs_no_other_job(tmp_path: Path, engine: str) -> None:
    if importlib.util.find_spec(engines.PACKAGES_AND_EXTRAS[engine][0]) is None:
        pytest.skip(f"{engine} is not installed")
    if engine == "ray":
        import ray.cloudpickle

        ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])
    given = make(tmp_path, 4, j1={"deaths": 1}, j2={"deaths": 99}, j3={"errors": 1})
    with pytest.raises(JobsFailed, match="job j2 failed: its worker died") as caught:
        run_jobs(mortal_noise, given, tmp_path, engine=engine, workers=2, retries=1)
    assert attempts(tmp_path)[2] >= 2
    del given["j2"]
    assert caught.value.results == run_jobs(noise, given, tmp_path / "expected", workers=1)
