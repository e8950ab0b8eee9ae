"""Runs that are killed at any moment and resumed end with the table of an undisturbed run."""

import json
import signal
import subprocess
import sys
import time

import numpy as np
import pandas
import pytest

KILLS = 20
PROGRAM = """
from bayesify.compare import comparison
comparison.NUM_QUICK_SPLITS = 3
from bayesify.sklearn.settings import EFFORTS, Effort
EFFORTS["quick"] = EFFORTS["full"] = Effort(4, 30, 30, 1, 2, 30, 2)
from bayesify.cli import main
main()
"""


def without_times(folder):
    record = json.loads((folder / "results.json").read_text())
    return {**record, "methods": [{**entry, "times": None} for entry in record["methods"]]}


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_twenty_kills(tmp_path):
    generator = np.random.default_rng(0)
    frame = pandas.DataFrame({"a": generator.normal(size=80), "b": generator.choice(["u", "v"], 80)})
    frame["y"] = 2 * frame["a"] + generator.normal(0, 0.3, 80)
    frame.to_csv(tmp_path / "t.csv", index=False)
    arguments = [sys.executable, "-c", PROGRAM, "compare", "t.csv", "--target", "y", "--quick", "--methods", "mean_field,laplace",
                 "--workers", "1"]  # fmt: skip
    start = time.monotonic()
    subprocess.run([*arguments, "--out", "whole"], cwd=tmp_path, check=True, capture_output=True)
    whole = time.monotonic() - start
    killed = 0
    while killed < KILLS:
        process = subprocess.Popen(
            [*arguments, "--out", "parts", "--resume"],
            cwd=tmp_path,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        # From the first import to a little more than a kill's share of the whole after it.
        try:
            process.wait(generator.uniform(0.05, 0.75) * whole)
            whole *= 0.9  # done before the kill: the machine is less busy than it was, or there was little to do
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGKILL)
            killed += 1
        process.wait()
        jobs = tmp_path / "parts" / "jobs"
        if (
            killed >= KILLS // 2 and jobs.exists()
        ):  # go on with the kills although the work is done: some runs are to do again
            for path in sorted(jobs.glob("*.json"))[:: generator.integers(2, 4)]:
                path.unlink()
    subprocess.run([*arguments, "--out", "parts", "--resume"], cwd=tmp_path, check=True, capture_output=True)
    assert without_times(tmp_path / "parts") == without_times(tmp_path / "whole")
    assert [path.name for path in (tmp_path / "parts").iterdir() if path.name.endswith(".tmp")] == []
