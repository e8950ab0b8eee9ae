"""The command line answers what needs no training before torch is read."""

import json
import subprocess
import sys

PROGRAM = """
import contextlib, io, json, sys
from bayesify.cli import main
for words in json.loads(sys.argv[1]):
    sys.argv[1:] = words
    told = io.StringIO()
    with contextlib.redirect_stdout(told), contextlib.redirect_stderr(told):
        try:
            main()
        except SystemExit as end:
            code = end.code
    print(json.dumps([code, sorted({"torch", "numpy", "pandas"} & set(sys.modules)), told.getvalue()]))
"""


def answers(*commands, cwd=None):
    """For each command, in one process, its exit code, what was loaded by then of what takes long, and what it told."""
    program = [sys.executable, "-c", PROGRAM, json.dumps(commands)]
    done = subprocess.run(program, capture_output=True, text=True, check=True, cwd=cwd)
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(found) == len(commands)
    return found


def test_help_and_mistakes_do_not_wait_for_torch():
    commands = [["--help"], ["--version"], ["nothing"], ["compare", "--help"], ["compare", "--nothing"]]
    found = answers(*commands)
    assert [(code, loaded) for code, loaded, _ in found] == [(code, []) for code in (0, 0, 2, 0, 2)], found


def test_mistakes_about_files_do_not_wait_for_torch(tmp_path):
    (tmp_path / "table.csv").write_text("x,y\n1,2\n3,4\n")
    told = {
        "nofile.csv": ["fit", "nofile.csv", "--target", "y"],
        "there is no column 'z'": ["fit", "table.csv", "--target", "z"],
        "nofolder": ["predict", "nofolder", "table.csv"],
    }
    for wanted, (code, loaded, text) in zip(told, answers(*told.values(), cwd=tmp_path), strict=True):
        assert (code, "torch" in loaded) == (2, False), text
        assert wanted in text


def test_names_are_loaded_when_asked_for():
    program = (
        "import sys, bayesify; assert 'torch' not in sys.modules; bayesify.__version__; assert 'torch' not in sys.modules\n"
        "assert not hasattr(bayesify, '__path_of_nothing__'); assert 'torch' not in sys.modules\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
