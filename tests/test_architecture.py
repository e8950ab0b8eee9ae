"""The shape of the package: imports point one way, the core loads only torch and numpy, every public name says what it is."""

from __future__ import annotations

import ast
import importlib
import inspect
import json
import pkgutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

import bayesify
from bayesify.methods import METHODS
from bayesify.storage.serializers import find_stored
from tools.import_graph import LAYERS, circles, graph, imports, modules, rank, room, room_graph, statements

ROOT = Path(bayesify.__file__).parent

MAX_FUNCTION_LINES = 60
ARGUMENTS_APART = {"fit", "check"}
"""Functions of the public interface whose many arguments are documented in one place: signature and docstring are not counted."""
MAX_PUBLIC_METHODS = 25
PROGRAMS = ("papers", "tools", "benchmarks", "examples")

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


def wrong_imports(name: str, others: set[str]) -> list[str]:
    """What a module imports against the order of the layers."""
    found = []
    for other in sorted(others):
        if other == "bayesify":
            found.append(f"{name} imports the whole package; import the module it needs")
        elif rank(other) > rank(name):
            found.append(f"{name} imports {other}, which stands above it")
    return found


@pytest.mark.usefixtures("garbage_left_alone")
def test_imports_point_one_way() -> None:
    """Also imports inside functions, for types alone, and by name."""
    modules = {name: others for name, others in graph().items() if name != "bayesify"}  # it collects what users see
    assert [line for name, others in modules.items() for line in wrong_imports(name, others)] == []


def test_every_room_has_a_layer() -> None:
    rooms = [name for names in LAYERS.values() for name in names]
    assert len(rooms) == len(set(rooms))
    assert set(rooms) == {room(name) for name in modules()} - {""}


def test_imports_that_point_the_other_way_are_found() -> None:
    for other in ("bayesify", "bayesify.cli", "bayesify.models.mlp"):
        assert wrong_imports("bayesify.draws", {other})


@pytest.mark.parametrize(
    "program",
    [
        "def f():\n    from bayesify import cli",
        "if TYPE_CHECKING:\n    from bayesify.cli import app",
        "import_module('bayesify.cli')",
        "importlib.import_module(f'bayesify.compare.{name}')",
        "__import__('bayesify.cli')",
        "HOMES = {'a': 'bayesify.cli'}\nimport_module(HOMES['a'])",
        "serializers.MODULES_BY_KIND['a'] = 'bayesify.cli'",
    ],
)
def test_imports_of_every_form_are_found(program: str, tmp_path: Path) -> None:
    path = tmp_path / "draws.py"
    path.write_text(program)
    assert wrong_imports("bayesify.draws", imports(path, modules()))


def test_no_circles() -> None:
    assert circles(graph()) == []
    assert circles(room_graph()) == []


def test_circles_are_found() -> None:
    edges = {"a": {"b"}, "b": {"c", "d"}, "c": {"a"}, "d": {"e"}, "e": {"d"}, "f": {"a"}}
    assert sorted(circles(edges)) == [["a", "b", "c"], ["d", "e"]]


def test_the_graph_is_read() -> None:
    """The reader of imports sees what is there."""
    assert "bayesify.draws" in graph()["bayesify.network"]
    assert "bayesify.posteriors.common.base" in graph()["bayesify.posteriors.mean_field"]
    assert "bayesify.serving.folder" in graph()["bayesify.serving"]  # by name, from the table of a folder's lazy names


def test_few_files_stand_outside_the_rooms() -> None:
    assert len(list(ROOT.glob("*.py"))) <= 10


def test_tests_mirror_the_package() -> None:
    rooms = {path.name for path in ROOT.iterdir() if (path / "__init__.py").is_file()}
    assert rooms - {path.name for path in Path(__file__).parent.iterdir() if any(path.glob("test_*.py"))} == set()


def test_one_class_captures_cuda_graphs_and_has_three_uses() -> None:
    texts = {path.relative_to(ROOT).as_posix(): path.read_text() for path in ROOT.rglob("*.py")}
    capture = "running/cuda_graphs.py"
    assert [name for name, text in texts.items() if "CUDAGraph(" in text or "cuda.graph(" in text] == [capture]
    uses = {name for name, text in texts.items() if "Captured(" in text} - {capture}
    assert uses == {
        "posteriors/common/gpu_draws.py",
        "training/captured_step.py",
        "function_space/divergence.py",
    }


def test_the_folder_of_posteriors_lists_the_methods() -> None:
    """One file or package per family; what they share is in `common`."""
    files = {path.stem for path in (ROOT / "posteriors").iterdir() if path.suffix == ".py" or path.is_dir()}
    families = {
        method.posterior.__module__.split(".")[2] for method in METHODS.values() if method.posterior is not None
    }
    assert files - {"__init__", "__pycache__", "common"} == families


def too_long(path: Path) -> Iterator[str]:
    """Functions of a file with too many lines, docstring included, and classes with too many public methods."""
    for node in statements(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            start = (
                node.body[1].lineno if node.name in ARGUMENTS_APART and path.parent.name == "training" else node.lineno
            )
            if node.end_lineno is not None and node.end_lineno - start + 1 > MAX_FUNCTION_LINES:
                yield node.name
        elif isinstance(node, ast.ClassDef):
            parts = [part for part in node.body if isinstance(part, ast.FunctionDef | ast.AsyncFunctionDef)]
            if len({part.name for part in parts if not part.name.startswith("_")}) > MAX_PUBLIC_METHODS:
                yield node.name


@pytest.mark.usefixtures("garbage_left_alone")
def test_functions_and_classes_are_short() -> None:
    folders = [ROOT, *(ROOT.parents[1] / name for name in PROGRAMS)]
    files = {path: path.relative_to(folder).parts[0] for folder in folders for path in folder.rglob("*.py")}
    found = {f"{place}: {name}" for path, place in files.items() for name in too_long(path)}
    assert found == set(), "split these"
    assert [path for path in files if path.name == "utils.py"] == []


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
from bayesify.storage.serializers import MODULES_BY_KIND
assert MODULES_BY_KIND["BayesianRegressor"] == "bayesify.sklearn"  # a file may hold one
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


def test_the_module_of_an_estimator_in_a_file_holds_it() -> None:
    """The program above has its name without loading scikit-learn."""
    kind = find_stored("BayesianRegressor")
    assert kind is not None
    assert kind.__module__ == "bayesify.sklearn.regressor"


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
