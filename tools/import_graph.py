"""The imports of the package and the layers of its rooms, for the architecture test and the drawing."""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator, Mapping
from pathlib import Path

PACKAGE = Path(__file__).parents[1] / "src" / "bayesify"

LAYERS: dict[str, tuple[str, ...]] = {
    "foundation": ("version", "arguments", "maths", "transforms"),
    "what comes out": ("likelihoods", "predictive"),
    "a network and a draw through it": ("weights", "running", "jacobians", "draws"),
    "posteriors": ("priors", "posteriors"),
    "the model": ("predictor", "network", "configuration", "conversion", "moments"),
    "keeping and training": ("storage", "training"),
    "methods that are more than a posterior": (
        "laplace",
        "subnetwork",
        "function_space",
        "deep_gp",
        "random_features",
        "baselines",
        "methods",
    ),
    "evaluation": ("metrics", "conformal", "acquisition"),
    "gallery": ("datasets", "models", "demo"),
    "tables": ("tables", "sklearn", "scale_out", "serving", "compare"),
    "bridges": ("adapters", "public", "cli"),
}
"""Rooms by layer, from bottom to top. A room imports from its own layer, without a circle, and from layers below."""

BY_NAME = {"import_module", "__import__", "find_spec", "MODULES_BY_KIND"}
"""Names that mark a file with imports by name. Every string in such a file that names a module counts as an import."""


def modules() -> dict[str, Path]:
    """Every module of the package by dotted name."""
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = ("bayesify", *path.relative_to(PACKAGE).with_suffix("").parts)
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def imports(path: Path, known: Mapping[str, Path]) -> set[str]:
    """Modules of the package that a file imports, including imports inside functions, only for types, and by name."""
    text = path.read_text()
    tree = ast.parse(text)
    found = {name for node in statements(tree) for name in _imported(node, path, known)}
    if any(name in text for name in BY_NAME):
        nodes = list(ast.walk(tree))
        if {getattr(node, "id", getattr(node, "attr", None)) for node in nodes} & BY_NAME:
            texts = [node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)]
            found.update(text.rstrip(".") for text in texts if text.startswith("bayesify."))
            if path.name == "__init__.py":  # a table of names and the files of its own folder, as in `serving`
                folder = ".".join(("bayesify", *path.parent.relative_to(PACKAGE).parts))
                found.update(f"{folder}.{text}" for text in texts)
    return found & set(known)


def statements(tree: ast.AST) -> Iterator[ast.AST]:
    """Statements of a tree at any depth. Visiting only statements takes a tenth of the time of visiting all nodes."""
    for field in ("body", "orelse", "finalbody", "handlers", "cases"):
        inside = getattr(tree, field, None)
        for node in inside if isinstance(inside, list) else ():  # a `lambda` has no list
            yield node
            yield from statements(node)


def _imported(node: ast.AST, path: Path, known: Mapping[str, Path]) -> Iterator[str]:
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        assert node.level == 0, f"{path.name}: a relative import; write the full name"
        for alias in node.names:
            whole = f"{node.module}.{alias.name}"
            yield whole if whole in known else node.module or ""


@functools.cache
def graph() -> dict[str, set[str]]:
    """Modules of the package that each module imports."""
    known = modules()
    return {name: imports(path, known) - {name} for name, path in known.items()}


def room(name: str) -> str:
    """The folder or file directly below the package that contains a module; empty for the package itself."""
    return name.split(".")[1] if "." in name else ""


def room_graph() -> dict[str, set[str]]:
    """Other rooms that each room imports."""
    found: dict[str, set[str]] = {}
    for name, others in graph().items():
        found.setdefault(room(name), set()).update({room(other) for other in others} - {room(name)})
    return found


def rank(name: str) -> int:
    """Number of a module's layer, from 0 at the bottom. Modules without a layer are above all layers."""
    for position, rooms in enumerate(LAYERS.values()):
        if room(name) in rooms:
            return position
    return len(LAYERS)


def circles(edges: Mapping[str, set[str]]) -> list[list[str]]:
    """Groups of names in which each name reaches all others, by Tarjan's algorithm."""
    order: dict[str, int] = {}
    lowest: dict[str, int] = {}
    stack: list[str] = []
    found: list[list[str]] = []

    def visit(name: str) -> None:
        order[name] = lowest[name] = len(order)
        stack.append(name)
        for other in edges.get(name, ()):
            if other not in order:
                visit(other)
                lowest[name] = min(lowest[name], lowest[other])
            elif other in stack:
                lowest[name] = min(lowest[name], order[other])
        if lowest[name] == order[name]:
            group = stack[stack.index(name) :]
            del stack[stack.index(name) :]
            if len(group) > 1:
                found.append(sorted(group))

    for name in edges:
        if name not in order:
            visit(name)
    return found
