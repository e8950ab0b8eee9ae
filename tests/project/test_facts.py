"""What the project's files say about themselves and each other is true."""

import re
import sys
import tomllib
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.version import Version
from torch import nn

import bayesify
from bayesify import posteriors
from bayesify.methods import METHODS

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
MAKEFILE = (ROOT / "Makefile").read_text()
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def test_continuous_integration_runs_the_readmes_command():
    lines = [line for line in (ROOT / ".ci" / "run").read_text().splitlines() if line and not line.startswith("#")]
    assert lines == ["set -eu", "exec make test"]
    assert "make test" in README


def test_files_for_the_public_host_are_valid_and_run_targets_that_exist():
    yaml = pytest.importorskip("yaml")
    files = [*(ROOT / ".github").rglob("*.yml"), ROOT / ".pre-commit-config.yaml"]
    contents = {path.name: yaml.safe_load(path.read_text()) for path in files}
    assert {"lint", "test", "lowest", "coverage", "docs", "package"} == set(contents["ci.yml"]["jobs"])
    runners = {entry["runner"] for entry in contents["ci.yml"]["jobs"]["test"]["strategy"]["matrix"]["include"]}
    assert runners == {"ubuntu-24.04", "ubuntu-24.04-arm"}
    pythons = {entry["python"] for entry in contents["ci.yml"]["jobs"]["test"]["strategy"]["matrix"]["include"]}
    assert {f"Programming Language :: Python :: {python}" for python in pythons} < set(
        PROJECT["project"]["classifiers"]
    )
    assert contents["elsewhere.yml"]["jobs"]["test"]["continue-on-error"] is True
    assert contents["publish.yml"]["jobs"]["publish"]["environment"] == "pypi"
    assert contents["publish.yml"]["jobs"]["publish"]["permissions"] == {"id-token": "write"}
    targets = set(re.findall(r"^([a-z-]+):", MAKEFILE, re.MULTILINE))
    commands = re.findall(r"run: make ([a-z-]+)", "".join(path.read_text() for path in files))
    assert len(commands) >= 5
    assert set(commands) <= targets
    for name in ("bug.yml", "feature.yml", "numbers.yml"):
        assert {"name", "description", "body"} <= set(contents[name])


@pytest.mark.skipif(not (Path(sys.prefix) / ".installed").exists(), reason="not the environment of `make install`")
def test_no_test_of_the_installed_environment_skips_for_want_of_a_package():
    """Elsewhere tests of a package that is not there skip; `make install` brings every package of `all` and `dev`."""
    extras = PROJECT["project"]["optional-dependencies"]
    asked, missing = [*extras["all"], *extras["dev"]], []
    while asked:
        requirement = Requirement(asked.pop())
        if requirement.name == "bayesify":
            asked += [entry for extra in requirement.extras for entry in extras[extra]]
        elif not list(metadata.distributions(name=requirement.name)):
            missing.append(requirement.name)
    assert missing == []


def test_all_tests_bring_the_extras_that_all_leaves_out():
    rule = re.search(r"^test-all: install\n(.*?)\n\n", MAKEFILE, re.MULTILINE | re.DOTALL)[1]
    assert "'.[lora,botorch,dask,ray]'" in rule
    assert "-m 'not gpu'" in rule


@pytest.mark.parametrize("target", ["install", "demo", "test", "lint", "bench", "docs"])
def test_every_target_installs_first(target):
    rule = re.search(rf"^{target}:(.*)$", MAKEFILE, re.MULTILINE)
    assert rule is not None
    assert rule[1].strip() == ("$(VENV)/.installed" if target == "install" else "install")


def test_every_install_is_constrained():
    assert re.search(r"^torch==2\.13\.0$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    assert MAKEFILE.count("pip install") == 1
    assert "CONSTRAINTS := constraints.txt\n" in MAKEFILE
    assert "-c $(CONSTRAINTS)" in next(line for line in MAKEFILE.splitlines() if "pip install" in line)
    for page in (ROOT / "README.md", ROOT / "docs" / "getting-started.md"):
        for block in re.findall(r"^```bash\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL):
            for line in block.splitlines():
                released = line.startswith("pip install bayesify ")
                assert not line.startswith("pip install") or released or "-c constraints.txt" in line, line


def pins(name):
    """Versions that a file of constraints pins."""
    lines = (ROOT / name).read_text().splitlines()
    return dict(line.split("==") for line in lines if "==" in line and not line.startswith("#"))


def test_lowest_versions_are_those_that_the_project_allows():
    project, lowest = PROJECT["project"], pins("constraints-lowest.txt")
    extras = project["optional-dependencies"]
    apart = ("dev", "dask", "ray", "rivals", "transformers", "lora", "botorch")  # not in the environment of the tests
    asked = [*project["dependencies"], *(entry for name in extras if name not in apart for entry in extras[name])]
    for requirement in map(Requirement, asked):
        if requirement.name != "bayesify":
            bound = next(one.version for one in requirement.specifier if one.operator == ">=")
            assert Version(bound) == Version(lowest[requirement.name]), requirement.name


def test_linters_have_one_version():
    hooks = (ROOT / ".pre-commit-config.yaml").read_text()
    assert set(re.findall(r"ruff==([\d.]+)", hooks)) == {pins("constraints.txt")["ruff"]}
    assert pins("constraints.txt")["ruff"] == pins("constraints-lowest.txt")["ruff"]


def test_every_extra_has_a_smoke_test():
    from tools.smoke_checks import CHECKS

    assert set(CHECKS) == set(PROJECT["project"]["optional-dependencies"]) - {"all", "dev"}


def test_commands_in_the_documentation_exist():
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")]
    targets = set(re.findall(r"^([a-z-]+):", MAKEFILE, re.MULTILINE))
    for page in pages:
        for target in re.findall(r"(?:`|^)make ([a-z-]+)", page.read_text(), re.MULTILINE):
            assert target in targets, f"{page.name}: make {target}"


def test_links_between_files_lead_somewhere():
    for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md", "CODE_OF_CONDUCT.md"):
        for target in re.findall(r"\]\(([^)#]+)\)", (ROOT / name).read_text()):
            assert target.startswith("https://") or (ROOT / target).exists(), f"{name}: {target}"


def test_the_readme_is_short_and_counts_the_methods_that_its_link_shows():
    assert len(README.encode()) <= 8_000
    assert f"[all {len(METHODS)} methods](docs/methods/index.md)" in README


def test_pages_and_figures_have_names_in_kebab_case():
    shown = [path for path in (ROOT / "docs").rglob("*") if path.suffix in (".md", ".png", ".svg", ".css")]
    assert [path.name for path in shown if not re.fullmatch(r"[a-z0-9-]+\.\w+", path.name)] == []


def test_the_map_in_contributing_is_true():
    """What is beside the package; tests/project/test_architecture_page.py is about the package."""
    text = (ROOT / "CONTRIBUTING.md").read_text().split("## Where things are")[1].split("## Add a posterior")[0]
    table = [line.split("|")[1] for line in text.splitlines() if line.startswith("| `")]
    named = {name for cell in table for name in re.findall(r"`(\w+)/`", cell)}
    assert named == {"papers", "tools", "docs", "examples", "benchmarks", "tests"}
    rooms = {path.name for path in (ROOT / "src" / "bayesify").iterdir()} | {"papers"}
    folders = {path.name for path in (ROOT / "tests").iterdir() if path.is_dir() and path.name != "__pycache__"}
    assert folders - rooms == set(re.findall(r"`tests/(\w+)`", text))


def test_version_is_the_same_everywhere():
    assert f"version: {bayesify.__version__}\n" in (ROOT / "CITATION.cff").read_text()
    assert f"## {bayesify.__version__} " in (ROOT / "CHANGELOG.md").read_text()


def test_sizes_in_the_table_of_posteriors():
    page = (ROOT / "docs" / "methods" / "index.md").read_text()
    rows = re.findall(r"^\| `(\w+)(\([^`]*\))?` \|.*?\| ([\d,]+) \|", page, re.MULTILINE)
    assert {row[0] for row in rows} == {method.posterior.__name__ for method in METHODS.values() if method.posterior}
    for name, arguments, size in rows:
        posterior = eval(f"posteriors.{name}{arguments or '()'}", {"posteriors": posteriors})
        bnn = bayesify.bayesianize(nn.Linear(100, 50), posterior)
        assert bayesify.count_parameters(bnn) == int(size.replace(",", "")), name


def test_speed_on_its_page_is_what_was_measured():
    from tools.speed_table import END, PAGE, START, tables

    page = PAGE.read_text()
    shown = page.split(START)[1].split(END)[0]
    assert shown.strip() == tables(), "run python -m tools.speed_table"
    assert shown.split("why the figures")[0].count("| ResNet") == 13
    assert "overwrites the committed files" in " ".join(page.split())
    assert "Overwrites the committed benchmarks/results" in MAKEFILE


def test_page_of_the_guides_shows_what_was_measured():
    from tools.guide_tables import PAGE, tables

    page = PAGE.read_text()
    assert all(table in page for table in tables()), "run python -m tools.guide_tables"


def test_what_is_not_released_has_no_date_of_release():
    unreleased = f"## {bayesify.__version__} (not released)" in (ROOT / "CHANGELOG.md").read_text()
    assert ("date-released" in (ROOT / "CITATION.cff").read_text()) != unreleased


def test_workflows_run_targets_of_the_makefile():
    runs = {path.name: path.read_text() for path in (ROOT / ".github" / "workflows").glob("*.yml")}
    targets = {target for text in runs.values() for target in re.findall(r"run: make ([\w-]+)", text)}
    assert {"lint", "test", "test-lowest", "coverage", "docs", "smoke", "test-all"} <= targets
    for target in targets:
        assert re.search(rf"^{target}:", MAKEFILE, re.MULTILINE), target
    supported = re.findall(r"Python :: (3\.\d+)", " ".join(PROJECT["project"]["classifiers"]))
    assert set(re.findall(r'python: "(3\.\d+)"', runs["ci.yml"])) == set(supported)
    assert all(
        what in runs["elsewhere.yml"] for what in ("Python 3.14", "macOS", "Windows", "torch nightly", "(not run yet)")
    )


def test_required_dependencies_are_as_many_as_the_readme_says():
    count = len(PROJECT["project"]["dependencies"])
    assert f"{count} required dependencies" in README


def test_extras_name_what_they_bring():
    extras = PROJECT["project"]["optional-dependencies"]
    # clusters are few; rivals are for comparisons; transformers slows every import of torchmetrics, botorch its own
    apart = ("all", "dev", "dask", "ray", "rivals", "transformers", "lora", "botorch")
    assert extras["all"] == [f"bayesify[{','.join(name for name in extras if name not in apart)}]"]


def test_the_page_of_choices_is_that_of_the_results():
    from tools.choices_page import PAGE, page

    text = PAGE.read_text()
    assert page(text) == text, "run python -m tools.choices_page"
