"""The source distribution and the wheel made from it, without network access; the wheel installed into an empty folder."""

import subprocess
import sys
import tarfile
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest

pytest.importorskip("hatchling")
pytestmark = pytest.mark.slow  # ten seconds; the job that makes the wheel runs them
ROOT = Path(__file__).parents[2]


def run(*command, cwd, **environment):
    done = subprocess.run(
        [str(part) for part in command],
        cwd=cwd,
        env={"PATH": "/usr/bin:/bin", "PIP_NO_INDEX": "1", "PIP_DISABLE_PIP_VERSION_CHECK": "1", **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


BUILD = """
import os, sys, tarfile, tomllib
from hatchling import build
folder, root = sys.argv[1:]
os.chdir(root)
assert tomllib.load(open("pyproject.toml", "rb"))["build-system"]["build-backend"] == build.__name__
source = os.path.join(folder, build.build_sdist(folder))
with tarfile.open(source) as content:
    content.extractall(os.path.join(folder, "unpacked"), filter="data")
os.chdir(os.path.join(folder, "unpacked", os.path.basename(source).removesuffix(".tar.gz")))
build.build_wheel(folder)
"""
"""What `python -m build` does in five processes: the source distribution, and the wheel from it."""


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    folder = tmp_path_factory.mktemp("built")
    run(sys.executable, "-c", BUILD, folder, ROOT, cwd=folder)
    return folder


@pytest.fixture(scope="module")
def wheel(built):
    (found,) = built.glob("*.whl")
    return found


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory):
    folder = tmp_path_factory.mktemp("installed")
    run(
        sys.executable,
        "-m",
        "pip",
        "install",
        "--quiet",
        "--no-deps",
        "--no-compile",
        "--target",
        folder,
        wheel,
        cwd=folder,
    )
    return folder


def test_wheel_holds_the_package_and_nothing_else(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    assert "bayesify/py.typed" in names
    assert "bayesify/posteriors/mean_field.py" in names
    tops = {name.split("/")[0] for name in names}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"bayesify"}
    files = (path for path in (ROOT / "src").rglob("*") if path.is_file() and "__pycache__" not in path.parts)
    assert {str(path.relative_to(ROOT / "src")) for path in files} == {
        name for name in names if name.startswith("bayesify/")
    }


def test_source_distribution_holds_the_repository(built):
    (archive,) = built.glob("*.tar.gz")
    with tarfile.open(archive) as content:
        names = {name.split("/", 1)[1] for name in content.getnames()}
    assert {"pyproject.toml", "README.md", "LICENSE", "tests/conftest.py", "papers/pyproject.toml"} <= names
    assert not [name for name in names if "__pycache__" in name or name.startswith((".venv", "site/"))]
    if (ROOT / ".git").exists():
        tracked = {name for name in run("git", "ls-files", cwd=ROOT).splitlines() if (ROOT / name).exists()}
        assert tracked - names == set()


def test_wheel_metadata(wheel):
    archive = zipfile.ZipFile(wheel)
    (entry_points,) = (name for name in archive.namelist() if name.endswith("entry_points.txt"))
    assert "bayesify = bayesify.cli:main" in archive.read(entry_points).decode()
    (name,) = (name for name in archive.namelist() if name.endswith("METADATA"))
    metadata = Parser().parsestr(archive.read(name).decode())
    required = [entry for entry in metadata.get_all("Requires-Dist") if "extra ==" not in entry]
    assert sorted(entry.split(">")[0] for entry in required) == ["numpy", "rich", "safetensors", "torch", "typer"]
    assert metadata["License-Expression"] == "MIT"
    assert any(name.endswith("licenses/LICENSE") for name in archive.namelist())


def test_installed_wheel_and_its_command_work(installed, tmp_path):
    program = """
import runpy, sys
import bayesify, torch
from bayesify import likelihoods, posteriors
bnn = bayesify.bayesianize(torch.nn.Linear(2, 1), posteriors.MeanField(), likelihood=likelihoods.Gaussian())
assert bnn.predict(torch.zeros(3, 2)).mean.shape == (3, 1)
print(bayesify.__file__, bayesify.__version__)
sys.argv = [sys.argv[1], "methods"]
runpy.run_path(sys.argv[0], run_name="__main__")
"""
    script = installed / "bin" / "bayesify"
    printed = run(sys.executable, "-c", program, script, cwd=tmp_path, PYTHONPATH=str(installed), COLUMNS="200")
    path, version, *listing = printed.split()
    assert Path(path).is_relative_to(installed)
    assert f"bayesify-{version}.dist-info" in {entry.name for entry in installed.iterdir()}
    assert "mean_field" in listing


def test_wheel_of_the_papers_holds_their_tables(tmp_path):
    papers = ROOT / "papers"
    program = "import sys; from hatchling import build; build.build_wheel(sys.argv[1])"
    run(sys.executable, "-c", program, tmp_path, cwd=papers)
    (wheel,) = tmp_path.glob("*.whl")
    names = {name for name in zipfile.ZipFile(wheel).namelist() if name.startswith("bayesify_papers/")}
    kept = (path for path in (papers / "bayesify_papers").rglob("*") if path.suffix in (".py", ".toml", ".txt"))
    wanted = {path.relative_to(papers).as_posix() for path in kept}
    assert names == {*wanted, "bayesify_papers/tables.json"}
