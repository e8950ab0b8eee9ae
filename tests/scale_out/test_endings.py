"""Worker processes end without a trace: nothing on standard error, no process and no semaphore left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from bayesify.scale_out import read_results

PROGRAM = """
import multiprocessing, sys, time
from bayesify.scale_out import run_jobs

def hold(job):
    if job["lock"]:
        sys.held = multiprocessing.RLock()  # this module's own variables do not outlive the job in a worker
    try:
        from tqdm import tqdm
    except ImportError:
        tqdm = list
    tqdm([], disable=True)
    open(job["mark"], "w").close()
    time.sleep(job["seconds"])
    return {"slept": job["seconds"]}

if __name__ == "__main__":
    lock, *seconds = map(int, sys.argv[2:])
    mark = sys.argv[1] + "/started"
    jobs = {f"j{i}": {"seconds": each, "lock": bool(lock), "mark": f"{mark}{i}"} for i, each in enumerate(seconds)}
    run_jobs(hold, jobs, sys.argv[1], workers=2)
    print("last line")
"""
"""Each job holds what multiprocessing tracks: a lock that its worker keeps, the lock of a progress bar."""


def start(folder: Path, lock: bool, *seconds: int) -> subprocess.Popen[str]:
    script = folder / "program.py"
    script.write_text(PROGRAM)
    return subprocess.Popen(
        [sys.executable, script, folder, str(int(lock)), *map(str, seconds)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def test_nothing_follows_the_last_line(tmp_path: Path) -> None:
    pytest.importorskip("joblib")
    program = start(tmp_path, True, 0, 0, 0)
    output, errors = program.communicate(timeout=120)
    assert (program.returncode, output, errors) == (0, "last line\n", "")


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="signals a group of processes")
def test_an_interruption_at_the_terminal_says_nothing_else(tmp_path: Path) -> None:
    """Ctrl-C there reaches the workers too."""
    pytest.importorskip("joblib")
    program = start(tmp_path, False, 0, 60, 60)
    deadline = time.monotonic() + 100
    awaited = [tmp_path / "jobs" / "j0.json", tmp_path / "started1", tmp_path / "started2"]
    while not all(path.exists() for path in awaited) and time.monotonic() < deadline:
        time.sleep(0.1)
    os.killpg(program.pid, signal.SIGINT)
    output, errors = program.communicate(timeout=120)
    assert output == ""
    assert errors.count("Traceback") == 1
    assert errors.endswith("KeyboardInterrupt\n")
    assert read_results(tmp_path) == {"j0": {"slept": 0}}
