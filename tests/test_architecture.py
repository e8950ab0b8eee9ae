"""The shape of the package: imports point one way, the core loads only torch and numpy, every public name says what it is."""

from __future__ import annotations

import ast
import functools
import importlib
import inspect
import json
import pkgutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

import bayesify
from bayesify.methods import METHODS

ROOT = Path(bayesify.__file__).parent

ROOMS = [
    ["version", "arguments", "maths", "transforms"],
    ["weights", "predictive"],
    ["priors", "likelihoods", "running", "models"],
    ["draws", "posteriors"],
    ["configuration", "jacobians", "moments"],
    ["predictor"],
    ["network"],
    ["conversion"],
    ["storage"],
    ["training", "datasets", "tables"],
    ["laplace", "subnetwork", "function_space", "deep_gp", "random_features", "baselines"],
    ["methods"],
    ["metrics", "conformal", "acquisition"],
    ["public"],
    ["scale_out", "sklearn", "adapters"],
    ["serving"],
    ["compare", "demo"],
    ["cli"],
]
"""From what stands on nothing to what stands on it. A room imports from its own row's modules or from earlier rows;
rooms that are not listed are above all of these."""

LATE = {
    ("bayesify.storage.serializers", "bayesify.sklearn"),  # a file may hold an estimator, which needs scikit-learn
}
"""Imports against the order, by name, when something is asked for: whoever asks need not know who registers."""

CORE = next(position for position, rooms in enumerate(ROOMS) if "metrics" in rooms)
LEAVES = {"datasets", "models"}
"""Rooms that the core must not import."""

OPTIONAL = [
    "safetensors",
    "rich",
    "typer",
    "torchmetrics",
    "lightning_fabric",
    "matplotlib",
    "jinja2",
    "scipy",
    "sklearn",
    "lightning",
    "transformers",
    "arviz",
    "onnx",
    "onnxruntime",
    "botorch",
]


def modules() -> dict[str, Path]:
    """Every module of the package by dotted name."""
    found = {}
    for path in sorted(ROOT.rglob("*.py")):
        parts = ("bayesify", *path.relative_to(ROOT).with_suffix("").parts)
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def imports(path: Path, known: dict[str, Path]) -> set[str]:
    """Modules of the package that a file imports, inside functions too; those for types alone are left out.

    In a file that calls `import_module` or `__import__`, every text that names a module counts as imported.
    """
    found: set[str] = set()
    tree = ast.parse(path.read_text())
    names = {
        getattr(node.func, "id", getattr(node.func, "attr", ""))
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
    }
    if names & {"import_module", "__import__"}:
        texts = [
            node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)
        ]
        found.update(text.rstrip(".") for text in texts if text.startswith("bayesify."))

    def visit(node: ast.AST) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.expr):  # no import stands in one
                continue
            if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
                continue
            if isinstance(child, ast.Import):
                found.update(alias.name for alias in child.names)
            elif isinstance(child, ast.ImportFrom):
                assert child.level == 0, f"{path.name}: a relative import; write the full name"
                base = child.module or ""
                for alias in child.names:
                    whole = f"{base}.{alias.name}"
                    found.add(whole if whole in known else base)
            visit(child)

    visit(tree)
    return {name for name in found if name in known}


@functools.cache
def graph() -> dict[str, set[str]]:
    """What each module of the package imports from it."""
    known = modules()
    return {name: imports(path, known) - {name} for name, path in known.items()}


def room(name: str) -> str:
    return name.split(".")[1] if "." in name else ""


def rank(name: str) -> int:
    for position, rooms in enumerate(ROOMS):
        if room(name) in rooms:
            return position
    return len(ROOMS)


def wrong_imports(name: str, others: set[str]) -> list[str]:
    """What a module imports against the order of the rooms."""
    found = []
    for other in others:
        if other == "bayesify":
            found.append(f"{name} imports the whole package; import the module it needs")
        elif (name, other) in LATE:
            continue
        elif rank(other) > rank(name):
            found.append(f"{name} imports {other}, which stands above it")
        elif rank(name) < CORE and room(name) not in LEAVES and room(other) in LEAVES:
            found.append(f"{name} imports the leaf {other}")
    return found


def test_imports_point_one_way() -> None:
    modules = {name: others for name, others in graph().items() if name != "bayesify"}  # it collects what users see
    assert [line for name, others in modules.items() for line in wrong_imports(name, others)] == []


def test_imports_that_point_the_other_way_are_found() -> None:
    for other in ("bayesify", "bayesify.cli", "bayesify.models.mlp"):
        assert wrong_imports("bayesify.draws", {other})


@pytest.mark.parametrize(
    "program",
    [
        "def f():\n    from bayesify import cli",
        "import_module('bayesify.cli')",
        "importlib.import_module(f'bayesify.compare.{name}')",
        "__import__('bayesify.cli')",
        "HOMES = {'a': 'bayesify.cli'}\nimport_module(HOMES['a'])",
    ],
)
def test_imports_of_every_form_are_found(program: str, tmp_path: Path) -> None:
    path = tmp_path / "draws.py"
    path.write_text(program)
    assert wrong_imports("bayesify.draws", imports(path, modules()))


def test_no_cycles() -> None:
    done: set[str] = set()

    def walk(name: str, path: tuple[str, ...]) -> None:
        assert name not in path, f"cycle: {' -> '.join((*path[path.index(name) :], name))}"
        if name in done:
            return
        for other in graph()[name]:
            if (name, other) not in LATE:
                walk(other, (*path, name))
        done.add(name)

    for name in graph():
        walk(name, ())


def test_no_cycles_between_rooms() -> None:
    """A folder is one room: its files may import each other, but two rooms never import each other."""
    edges = {
        (room(name), room(other))
        for name, others in graph().items()
        for other in others
        if name != "bayesify" and (name, other) not in LATE
    }
    both = {pair for pair in edges if pair[0] != pair[1] and (pair[1], pair[0]) in edges}
    assert not both


def test_the_graph_is_read() -> None:
    """The reader of imports sees what is there."""
    assert "bayesify.draws" in graph()["bayesify.network"]
    assert "bayesify.posteriors.common.base" in graph()["bayesify.posteriors.mean_field"]


def test_few_files_stand_outside_the_rooms() -> None:
    assert len(list(ROOT.glob("*.py"))) <= 10


def test_tests_mirror_the_package() -> None:
    rooms = {path.name for path in ROOT.iterdir() if (path / "__init__.py").is_file()}
    assert rooms - {path.name for path in Path(__file__).parent.iterdir() if any(path.glob("test_*.py"))} == set()


def test_the_folder_of_posteriors_lists_the_methods() -> None:
    """One file or package per family; what they share is in `common`."""
    files = {path.stem for path in (ROOT / "posteriors").iterdir() if path.suffix == ".py" or path.is_dir()}
    families = {
        method.posterior.__module__.split(".")[2] for method in METHODS.values() if method.posterior is not None
    }
    assert files - {"__init__", "__pycache__", "common"} == families


def test_files_have_one_subject() -> None:
    folders = [ROOT, *(ROOT.parents[1] / name for name in ("papers", "tools", "benchmarks", "examples"))]
    for path in [path for folder in folders for path in folder.rglob("*.py")]:
        assert path.name != "utils.py"
        assert len(path.read_text().splitlines()) <= 460, f"{path} is longer than about 400 lines; split it"


PROGRAM = """
import json, sys, time
start = time.process_time()
import torch
middle, before = time.process_time(), set(sys.modules)
import bayesify.function_space  # not where the list of methods begins
bayesify.fit  # all names are loaded with the first
end, added = time.process_time(), set(sys.modules) - before
from bayesify.methods import METHODS
assert list(METHODS)[0] == "point" and list(METHODS)[-1] == "subnetwork", list(METHODS)
assert set(bayesify.__all__) <= set(dir(bayesify)) and not hasattr(bayesify, "nothing")
from bayesify import *
bayesianize, posteriors.MeanField
import bayesify.adapters, bayesify.datasets, bayesify.metrics
dir(bayesify.adapters)
more = set(sys.modules) - before - added
print(json.dumps([list(before), list(added), list(more), middle - start, end - middle]))
"""


def test_import_loads_torch_and_numpy_only_and_is_quick() -> None:
    """`import bayesify` takes less than twice `import torch`: what it adds, in the same process, takes less than that.

    Adapters, metrics and data sets load their packages when asked for them only.

    It adds its own files only, a fifth as many as torch has. Processor time, the best of a few tries, where it is a quarter of
    torch's: other work on the machine, or files that are read for the first time, do not decide.
    """
    times = []
    for _ in range(4):
        done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        before, added, later, torch, more = json.loads(done.stdout)
        assert not set(OPTIONAL) & {*before, *added, *later}
        assert {name.partition(".")[0] for name in added} - {"torch", *sys.stdlib_module_names} == {"bayesify"}
        assert len(added) < len(before) / 2
        times.append(f"import torch {torch:.2f} s, import bayesify {more:.2f} s more")
        if more < torch:
            return
    raise AssertionError("; ".join(times))


def public_modules() -> list[str]:
    return [
        info.name
        for info in pkgutil.walk_packages([str(ROOT)], "bayesify.")
        if not any(part.startswith("_") for part in info.name.split("."))
    ]


def test_every_public_name_has_a_docstring() -> None:
    missing = []
    for name in ["bayesify", *public_modules()]:
        try:
            module = importlib.import_module(name)
        except ImportError:
            continue  # an optional dependency
        missing += [where for where, thing in [(name, module), *public(module)] if not inspect.getdoc(thing)]
    assert missing == []


def public(module: ModuleType) -> list[tuple[str, object]]:
    """Classes and functions that a module defines, and the methods of its classes; a method may inherit its docstring."""
    found: list[tuple[str, object]] = []
    for key, thing in vars(module).items():
        if key.startswith("_") or getattr(thing, "__module__", None) != module.__name__:
            continue
        if inspect.isclass(thing) or inspect.isfunction(thing):
            found.append((f"{module.__name__}.{key}", thing))
        if inspect.isclass(thing):
            for name, member in vars(thing).items():
                if name.startswith("_"):
                    continue
                if inspect.isfunction(member) or isinstance(member, (property, staticmethod, classmethod)):
                    found.append((f"{module.__name__}.{key}.{name}", getattr(thing, name)))
    return found


def test_what_the_package_offers_exists() -> None:
    for name in bayesify.__all__:
        assert getattr(bayesify, name) is not None
