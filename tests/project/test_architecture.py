"""Imports point one way."""

import ast
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[2] / "src"

ROOMS = [
    {"maths", "transforms", "weights", "predictive", "priors", "registry", "version"},
    {"likelihoods", "structured"},
    {"execution", "draws", "posteriors"},
    {"objectives", "selection", "summary"},
    {"network"},
    {"laplace", "function_space", "deep_gp", "random_features", "baselines"},
    {"training", "storage", "metrics", "sklearn"},
    {"experiments", "report"},
    {"cli"},
]
"""From the bottom to the top; a module in no room is held only to having no cycle."""


def module_name(path: Path) -> str:
    parts = path.relative_to(SOURCE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_name(path): path for path in sorted(SOURCE.rglob("*.py"))}


def imports(path: Path) -> set[str]:
    """Modules of the package that a module imports when it is imported itself, not later inside a function."""
    found: set[str] = set()
    waiting: list[ast.AST] = [ast.parse(path.read_text())]
    while waiting:
        node = waiting.pop()
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            continue
        if isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING"):
            continue
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        if isinstance(node, ast.ImportFrom) and node.module is not None:
            found.update(
                whole if (whole := f"{node.module}.{alias.name}") in MODULES else node.module for alias in node.names
            )
        waiting.extend(ast.iter_child_nodes(node))
    return {name for name in found if name in MODULES}


GRAPH = {name: imports(path) - {name} for name, path in MODULES.items()}


def room(name: str) -> int | None:
    top = name.split(".")[1] if "." in name else ""
    return next((index for index, names in enumerate(ROOMS) if top in names), None)


def test_no_cycle():
    try:
        TopologicalSorter(GRAPH).prepare()
    except CycleError as error:
        pytest.fail(" -> ".join(reversed(error.args[1])))


def test_no_import_points_up():
    wrong = [
        f"{name} imports {other}"
        for name, others in GRAPH.items()
        for other in others
        if (own := room(name)) is not None and (theirs := room(other)) is not None and theirs > own
    ]
    assert wrong == []


def test_imports_are_absolute():
    relative = [
        name
        for name, path in MODULES.items()
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ImportFrom) and node.level
    ]
    assert relative == []


def test_the_graph_is_not_empty():
    assert "bayesify.posteriors.base" in GRAPH["bayesify.posteriors.mean_field"]
    assert "bayesify.network" in GRAPH["bayesify.training"]
