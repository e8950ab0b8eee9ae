"""Runs on two worker processes that are killed at several moments and resumed end with the table of an undisturbed run."""

import json
import os
import re
import signal
import subprocess
import sys
import time

import numpy as np
import pandas
import pytest

COMMAND = [sys.executable, "-c", "from bayesify.cli import main; main()", "compare", "t.csv", "--target", "y", "--quick",
           "--splits", "2", "--methods", "laplace", "--workers", "2"]  # fmt: skip
MOMENTS = (0, 1, 2, 4)
"""Finished runs, of six, at which the program is killed the next time; workers die with it or are killed with it in turn."""


def without_times(folder):
    record = json.loads((folder / "results.json").read_text())
    return {**record, "methods": [{**entry, "times": None} for entry in record["methods"]]}


def finished(folder):
    return len(list((folder / "jobs").glob("*.json")))


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.skipif(sys.platform == "win32", reason="kills a group of processes")
def test_killed_with_two_workers(tmp_path):
    pytest.importorskip("joblib")
    generator = np.random.default_rng(0)
    frame = pandas.DataFrame({"a": generator.normal(size=60), "b": generator.choice(["u", "v"], 60)})
    frame["y"] = np.where(frame["a"] + generator.normal(0, 0.3, 60) > 0, "high", "low")
    frame.to_csv(tmp_path / "t.csv", index=False)
    done = subprocess.run([*COMMAND, "--out", "whole"], cwd=tmp_path, check=True, capture_output=True, text=True)
    assert done.stdout.splitlines()[-1] == str(tmp_path / "whole" / "report.html")
    assert all(re.match(r"\d+ of \d+ runs finished", line) for line in done.stderr.splitlines())  # on a slow machine
    parts, kills = tmp_path / "parts", 0
    for turn, moment in enumerate(MOMENTS):
        program = subprocess.Popen(
            [*COMMAND, "--out", "parts", "--resume"],
            cwd=tmp_path,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        while program.poll() is None and not ((parts / "settings.json").exists() and finished(parts) >= moment):
            time.sleep(0.05)
        seen, until = finished(parts), time.monotonic() + generator.uniform(0, 2)
        while program.poll() is None and finished(parts) <= seen and time.monotonic() < until:
            time.sleep(0.01)  # within the next run, or right after it on a fast machine
        if program.poll() is None:
            kills += 1
            if turn % 2:
                os.killpg(program.pid, signal.SIGKILL)
            else:
                program.kill()
        program.wait()
    assert kills >= 2
    done = subprocess.run(
        [*COMMAND, "--out", "parts", "--resume"], cwd=tmp_path, check=True, capture_output=True, text=True
    )
    assert all(re.match(r"\d+ of \d+ runs finished", line) for line in done.stderr.splitlines())  # on a slow machine
    assert without_times(parts) == without_times(tmp_path / "whole")
