"""Names of the packages that tests, tools, benchmarks and examples use exist, also in code that only slow tests run."""

import ast
import importlib
import re
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]
FILES = sorted(
    path for folder in ("tests", "tools", "benchmarks", "examples") for path in (ROOT / folder).rglob("*.py")
)
OURS = re.compile(r"(bayesify|bayesify_papers|tools|benchmarks)(\.\w+)*")


def module(name: str) -> ModuleType | None:
    """A module of ours; `None` if it is another's, or needs a package that is not installed."""
    if not OURS.fullmatch(name):
        return None
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as missing:
        if missing.name and OURS.fullmatch(missing.name):
            raise
        return None
    except ImportError:
        return None


def has(owner: ModuleType, name: str) -> bool:
    """Whether a module has a name. A name that needs a package that is not installed counts."""
    try:
        return hasattr(owner, name) or find_spec(f"{owner.__name__}.{name}") is not None
    except ModuleNotFoundError:  # the module is no package
        return False
    except ImportError:
        return True


def missing_names(tree: ast.Module) -> Iterator[str]:
    """Names that a file imports from a module of ours, or asks it for, and that the module does not have."""
    bound: dict[str, ModuleType] = {}
    nodes = list(ast.walk(tree))
    for node in nodes:
        if isinstance(node, ast.Import):
            for alias in node.names:
                if (found := module(alias.name)) is not None:
                    name = alias.asname or alias.name.partition(".")[0]
                    bound[name] = found if alias.asname else importlib.import_module(name)
        elif isinstance(node, ast.ImportFrom) and not node.level and (owner := module(node.module or "")) is not None:
            for alias in node.names:
                if not has(owner, alias.name):
                    yield f"{owner.__name__}.{alias.name}"
                elif isinstance(part := vars(owner).get(alias.name), ModuleType):
                    bound[alias.asname or alias.name] = part
    local = {node.id for node in nodes if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load)}
    local |= {node.arg for node in nodes if isinstance(node, ast.arg)}
    for node in nodes:
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and isinstance(node.ctx, ast.Load):
            owner = bound.get(node.value.id)
            if owner is not None and node.value.id not in local and not has(owner, node.attr):
                yield f"{owner.__name__}.{node.attr}"


WRONG_ON_PURPOSE = {"bayesify.adapters.export_onx"}
"""Names in tests of error messages."""


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_names_exist(path: Path) -> None:
    assert set(missing_names(ast.parse(path.read_text()))) <= WRONG_ON_PURPOSE


def test_a_missing_name_is_found() -> None:
    lines = ("import bayesify", "from bayesify import metrics", "def f():", "    from bayesify.maths import gone")
    wrong = "\n".join((*lines, "    metrics.lost, bayesify.fit"))
    assert list(missing_names(ast.parse(wrong))) == ["bayesify.maths.gone", "bayesify.metrics.lost"]
