"""The command line answers what needs no training before torch is read."""

import subprocess
import sys

import pytest

PROGRAM = """
import sys
from bayesify.cli import main
try:
    main()
except SystemExit as end:
    print(end.code, sorted({"torch", "numpy", "pandas"} & set(sys.modules)))
"""


@pytest.mark.parametrize(
    "words", [["--help"], ["--version"], ["nothing"], ["compare", "--help"], ["compare", "--nothing"]]
)
def test_help_and_mistakes_do_not_wait_for_torch(words):
    done = subprocess.run([sys.executable, "-c", PROGRAM, *words], capture_output=True, text=True, check=True)
    code, loaded = done.stdout.splitlines()[-1].split(maxsplit=1)
    assert (code in "02", loaded) == (True, "[]"), done.stdout + done.stderr


@pytest.mark.parametrize(
    "words",
    [
        ["fit", "nofile.csv", "--target", "y"],
        ["fit", "table.csv", "--target", "z"],
        ["predict", "nofolder", "table.csv"],
    ],
)
def test_mistakes_about_files_do_not_wait_for_torch(words, tmp_path):
    (tmp_path / "table.csv").write_text("x,y\n1,2\n3,4\n")
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, *words], capture_output=True, text=True, check=True, cwd=tmp_path
    )
    code, loaded = done.stdout.split(maxsplit=1)
    assert (code, "torch" in loaded) == ("2", False), done.stdout + done.stderr
    assert words[1] in done.stderr or "no column is called 'z'" in done.stderr


def test_names_are_loaded_when_asked_for():
    program = (
        "import sys, bayesify; assert 'torch' not in sys.modules; bayesify.__version__; assert 'torch' not in sys.modules\n"
        "from bayesify.registry import METHODS; assert 'torch' not in sys.modules\n"
        "assert not hasattr(bayesify, '__path_of_nothing__'); assert 'torch' not in sys.modules\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
