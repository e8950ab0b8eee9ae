"""Worker processes end without a trace: nothing on standard error, no process and no semaphore left behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import job_functions
import pytest

from bayesify.scale_out import read_results, run_jobs

PROGRAM = """
import json, multiprocessing, os, sys, time
from job_functions import mortal_noise
from bayesify.scale_out import run_jobs

def hold(job):
    if job.get("lock"):
        sys.held = multiprocessing.RLock()  # this module's own variables do not outlive the job in a worker
    try:
        from tqdm import tqdm
    except ImportError:
        tqdm = list
    tqdm([], disable=True)
    while "after" in job and not os.path.exists(job["after"]):
        time.sleep(0.05)
    if job.get("seconds") and not os.path.exists(job["count"]):
        open(job["count"], "w").write(".")
        time.sleep(job["seconds"])
    return mortal_noise(job)

if __name__ == "__main__":
    run_jobs(hold, json.loads(sys.argv[2]), sys.argv[1], workers=2, retries=1)
    print("last line")
"""
"""Jobs hold what multiprocessing tracks: a lock that the worker keeps, the lock of a progress bar; a first attempt may sleep."""


def start(folder: Path, jobs: dict[str, dict[str, Any]]) -> subprocess.Popen[str]:
    script = folder / "program.py"
    script.write_text(PROGRAM)
    path = os.pathsep.join([str(Path(job_functions.__file__).parent), os.environ.get("PYTHONPATH", "")])
    return subprocess.Popen(
        [sys.executable, script, folder, json.dumps(jobs)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env={**os.environ, "PYTHONPATH": path},
    )


def test_two_processes_equal_one_outlive_a_killed_worker_and_leave_nothing_behind(tmp_path: Path) -> None:
    """The first job kills its worker and with it that of the second, which sleeps; those that come after them keep locks."""
    pytest.importorskip("joblib")
    first, second = {"deaths": 1, "after": str(tmp_path / "count1")}, {"seconds": 60}
    special: list[dict[str, Any]] = [first, second, {"lock": True}, {"lock": True, "errors": 1}]
    jobs = {f"j{i}": {"x": i, "count": str(tmp_path / f"count{i}"), **each} for i, each in enumerate(special)}
    program = start(tmp_path, jobs)
    output, errors = program.communicate(timeout=120)
    assert (program.returncode, output, errors) == (0, "last line\n", "")
    assert read_results(tmp_path) == run_jobs(job_functions.noise, jobs, tmp_path / "expected", workers=1)
    assert [len(path.read_text()) for path in sorted(tmp_path.glob("count*"))] == [2, 2, 1, 2]


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="signals a group of processes")
def test_an_interruption_at_the_terminal_says_nothing_else(tmp_path: Path) -> None:
    """Ctrl-C there reaches the workers too."""
    pytest.importorskip("joblib")
    jobs = {f"j{i}": {"x": i, "count": str(tmp_path / f"count{i}"), "seconds": 60 * (i > 0)} for i in range(3)}
    program = start(tmp_path, jobs)
    deadline = time.monotonic() + 100
    awaited = [tmp_path / "jobs" / "j0.json", tmp_path / "count1", tmp_path / "count2"]
    while not all(path.exists() for path in awaited) and time.monotonic() < deadline:
        time.sleep(0.1)
    os.killpg(program.pid, signal.SIGINT)
    output, errors = program.communicate(timeout=120)
    assert output == ""
    assert errors.count("Traceback") == 1
    assert errors.endswith("KeyboardInterrupt\n")
    assert list(read_results(tmp_path)) == ["j0"]
