"""The shape of the papers' code: papers stand alone on one shared layer, use public names only, and repeat nothing."""

import ast
import functools
import importlib
import re
from collections.abc import Iterator
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

import bayesify_papers
from bayesify_papers.catalog import CATALOG

ROOT = Path(bayesify_papers.__file__).parent
PAPERS = sorted({experiment.module.partition(".")[0] for experiment in CATALOG.values()})
FILES = sorted(path for path in ROOT.rglob("*.py"))
BLOCK = 15
"""Equal lines in a row that two papers may not have."""


def name(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def imported(tree: ast.AST) -> Iterator[tuple[str, str]]:
    """Module and name of everything that a file imports."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, "") for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from ((node.module or "", alias.name) for alias in node.names)


def test_one_folder_a_paper() -> None:
    folders = {path.name for path in ROOT.iterdir() if path.is_dir() and path.name != "__pycache__"}
    assert folders == {*PAPERS, "shared"}
    for paper in PAPERS:
        assert (ROOT / paper / "published.toml").is_file()
        assert (ROOT.parent / "results" / paper).is_dir()


def test_no_paper_imports_another() -> None:
    for path in FILES:
        own = path.relative_to(ROOT).parts[0]
        for module, what in imported(ast.parse(path.read_text())):
            whole = f"{module}.{what}".split(".")
            if whole[0] == "bayesify_papers" and own != "command.py" and whole[1] in PAPERS:
                assert whole[1] == own, f"{name(path)} imports from the paper {whole[1]}; move it to shared/"


def test_public_names_only() -> None:
    """Neither private modules or names of the library, nor private attributes of anything but `self`, `cls` and torch."""
    for path in FILES:
        tree = ast.parse(path.read_text())
        for module, what in imported(tree):
            private = [part for part in f"{module}.{what}".split(".") if part.startswith("_") and part != "__version__"]
            assert not private or module == "__future__", f"{name(path)} imports {module}.{what}"
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and re.fullmatch(r"_[^_].*", node.attr):
                owner = ast.unparse(node.value)
                allowed = owner in ("self", "cls") or owner.partition(".")[0] == "torch"
                assert allowed, f"{name(path)}:{node.lineno} reads {owner}.{node.attr}"


def resolve(path: str) -> Any:
    """What a dotted name stands for; `None` if it is nothing."""
    parts = path.split(".")
    for end in range(len(parts), 0, -1):
        try:
            return functools.reduce(getattr, parts[end:], importlib.import_module(".".join(parts[:end])))
        except ImportError:
            continue
        except AttributeError:
            break
    return None


@functools.cache
def entries() -> frozenset[str]:
    """What the pages of the site document; of a module everything that it defines."""
    pages = (ROOT.parents[1] / "docs").rglob("*.md")
    return frozenset(entry for page in pages for entry in re.findall(r"^::: (\S+)", page.read_text(), re.MULTILINE))


def defined(path: str) -> str:
    """The name by which a class or function is defined; its own for anything else."""
    found = resolve(path)
    return f"{found.__module__}.{found.__qualname__}" if isinstance(found, (type, FunctionType)) else path


def is_public(path: str) -> bool:
    if path == "bayesify.__version__" or isinstance(resolve(path), ModuleType):
        return True
    wanted = {path, defined(path), *(name.rpartition(".")[0] for name in (path, defined(path)))}
    last = {name.rpartition(".")[2] for name in wanted}
    alike = {entry for entry in entries() if entry.rpartition(".")[2] in last}  # the others need not be loaded
    exported = (getattr(resolve(entry), path.rpartition(".")[2], None) is resolve(path) for entry in alike)
    return bool(wanted & {*alike, *map(defined, alike)}) or any(exported)  # of another path of the same module


def names_of_the_library(tree: ast.Module) -> Iterator[str]:
    """Dotted names below `bayesify` that a file imports, or reads from a module that it imports."""
    modules = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "bayesify":
            for alias in node.names:
                path = f"{node.module}.{alias.name}"
                modules[alias.asname or alias.name] = path
                yield path
        elif isinstance(node, ast.Import):
            modules |= {alias.asname or alias.name: alias.name for alias in node.names if alias.name == "bayesify"}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in modules:
            path = modules[node.value.id]
            if isinstance(resolve(path), ModuleType):
                yield f"{path}.{node.attr}"


def test_names_of_the_library_are_documented() -> None:
    """What papers use has an entry in the API pages: give it one, or use something else."""
    found = {path: name(file) for file in FILES for path in names_of_the_library(ast.parse(file.read_text()))}
    assert {path: file for path, file in found.items() if not is_public(path)} == {}


def test_public_is_told_from_private() -> None:
    for program in (
        "from bayesify.training.loop import TrainingLoop",
        "from bayesify.maths import cholesky\ncholesky.jitter",
    ):
        assert not all(map(is_public, names_of_the_library(ast.parse(program))))
    for program in ("import bayesify\nbayesify.fit", "from bayesify import posteriors\nposteriors.MeanField"):
        assert all(map(is_public, names_of_the_library(ast.parse(program))))


def lines(path: Path) -> list[str]:
    """Lines without indentation; blank ones, comments and imports are left out."""
    text = path.read_text()
    skipped: set[int] = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            skipped |= set(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    kept = (" ".join(line.split()) for number, line in enumerate(text.splitlines(), 1) if number not in skipped)
    return [line for line in kept if line and not line.startswith("#")]


def blocks(paths: list[Path]) -> dict[tuple[str, ...], str]:
    found: dict[tuple[str, ...], str] = {}
    for path in paths:
        kept = lines(path)
        for start in range(len(kept) - BLOCK + 1):
            found[tuple(kept[start : start + BLOCK])] = name(path)
    return found


def test_no_block_is_in_two_papers() -> None:
    known: dict[tuple[str, ...], str] = {}
    for folder in (*PAPERS, "shared"):
        own = blocks([path for path in FILES if path.relative_to(ROOT).parts[0] == folder])
        both = known.keys() & own.keys()
        shown = {(known[block], own[block]): block for block in both}
        assert not shown, f"the same {BLOCK} lines in two papers: {shown}"
        known |= own


def test_blocks_are_found(tmp_path: Path) -> None:
    path = ROOT / "shared" / "records.py"
    assert len(blocks([path])) == len(lines(path)) - BLOCK + 1
    assert all("import" not in line.split()[:1] for line in lines(path))
