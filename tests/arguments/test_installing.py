"""Messages about missing packages name a pip command that works without an upload to PyPI."""

import re
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

from bayesify.arguments.installing import how_to_install

REQUIREMENTS = [
    "numpy>=1.26",
    "jinja2>=3.1; extra == 'report'",
    "matplotlib>=3.9; extra == 'report'",
    "reports-of-nobody; extra == 'reports'",
    'arviz<1,>=0.23.4; extra == "arviz"',
    "transformers[torch]>=5; extra == 'lora'",
]


@pytest.fixture
def installed(monkeypatch):
    """The set of installed packages, empty at first, next to the requirements above."""
    packages: set[str] = set()

    monkeypatch.setattr(metadata, "requires", lambda name: REQUIREMENTS)
    monkeypatch.setattr(metadata, "distributions", lambda name: [name] if name in packages else [])
    return packages


def test_the_command_names_the_packages_that_are_missing(installed):
    assert how_to_install("report") == "pip install 'jinja2>=3.1' 'matplotlib>=3.9' (bayesify's extra 'report')"
    installed.add("jinja2")
    assert how_to_install("report") == "pip install 'matplotlib>=3.9' (bayesify's extra 'report')"
    installed.add("matplotlib")  # an import that fails all the same: too old, or broken
    assert how_to_install("report") == "pip install 'jinja2>=3.1' 'matplotlib>=3.9' (bayesify's extra 'report')"


def test_bounds_and_extras_of_packages_are_kept(installed):
    assert how_to_install("arviz") == "pip install 'arviz<1,>=0.23.4' (bayesify's extra 'arviz')"
    assert how_to_install("lora") == "pip install 'transformers[torch]>=5' (bayesify's extra 'lora')"
    installed.add("transformers")
    installed.add("reports-of-nobody")
    assert how_to_install("reports") == "pip install reports-of-nobody (bayesify's extra 'reports')"


def test_without_metadata_the_readme_helps(monkeypatch):
    def missing(name):
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "requires", missing)
    assert how_to_install("gp") == "install bayesify with its extra 'gp', as its README says"


def test_every_extra_that_the_package_names_exists():
    root = Path(__file__).parents[2]
    source = "\n".join(path.read_text() for path in (root / "src").rglob("*.py"))
    assert "pip install 'bayesify[" not in source
    assert "pip install bayesify" not in source
    named = {*re.findall(r"how_to_install\(['\"](\w+)", source), *re.findall(r"\bextra=\"(\w+)\", owner", source)}
    assert len(named) >= 8
    for extra in named:
        assert how_to_install(extra).startswith("pip install "), extra


def test_naming_a_command_needs_no_other_package():
    code = "import sys; from bayesify.arguments.installing import how_to_install as f; f('gp'); assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_estimators_without_scikit_learn_say_how_to_install_it():
    code = "import sys; sys.modules['sklearn'] = None; import bayesify.sklearn"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert "ImportError: bayesify.sklearn needs scikit-learn; pip install 'scikit-learn>=" in done.stderr
