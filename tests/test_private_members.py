"""Seams: nobody reads another module's private members, and nobody asks a model for its signature or attributes."""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator
from pathlib import Path

import bayesify
from bayesify.registry import METHODS

SOURCE = Path(bayesify.__file__).parent
ROOT = SOURCE.parents[1]
FOLDERS = [SOURCE, *(ROOT / name for name in ("papers", "benchmarks", "tools", "examples"))]
FILES = [path for folder in FOLDERS if folder.is_dir() for path in sorted(folder.rglob("*.py"))]
FILES.remove(ROOT / "benchmarks" / "threads.py")  # measures private parts by putting others in their place

FOREIGN = {
    "_version",  # torch.Tensor
    "_base",
    "_make_wrapper_subclass",
    "_parameters",  # torch.nn.Module
    "_buffers",
    "_modules",
    "_schema",  # torch.ops
    "_flat_weights",
    "_flat_weights_names",
    "_init_flat_weights",
    "_reversed_padding_repeated_twice",
    "_current_level",  # torch.autograd.forward_ad
    "_has_any_global_hook",  # torch.nn.modules.module
    "_asdict",  # named tuples
    "_exit",  # os
}
"""Private members of torch and of the standard library that there is no public way to."""


def private_reads(nodes: list[ast.AST]) -> Iterator[ast.Attribute]:
    """Attributes with a leading underscore of something that is not defined in the same module."""
    own = {node.name for node in nodes if isinstance(node, (ast.FunctionDef, ast.ClassDef))} | FOREIGN
    for node in nodes:
        if isinstance(node, ast.Assign):
            own |= {target.id for target in node.targets if isinstance(target, ast.Name)}
        elif isinstance(node, (ast.AnnAssign, ast.AugAssign, ast.NamedExpr, ast.For)) and isinstance(
            node.target, ast.Name
        ):
            own.add(node.target.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and of_itself(node.value):
            own.add(node.attr)
    for node in nodes:
        if not isinstance(node, ast.Attribute) or not node.attr.startswith("_") or node.attr.startswith("__"):
            continue
        if not (of_itself(node.value) or node.attr in own or ast.unparse(node).startswith("torch._")):
            yield node


def of_itself(value: ast.expr) -> bool:
    if isinstance(value, ast.Call):
        return isinstance(value.func, ast.Name) and value.func.id == "super"
    return isinstance(value, ast.Name) and value.id in ("self", "cls")


def read(program: str) -> list[ast.AST]:
    return list(ast.walk(ast.parse(program)))


@functools.cache
def trees() -> dict[Path, list[ast.AST]]:
    """The nodes of every file."""
    return {path: read(path.read_text()) for path in FILES}


def test_private_members_are_read_where_they_are_defined() -> None:
    """What is private elsewhere: make it public there."""
    found = ((path, node) for path, nodes in trees().items() for node in private_reads(nodes))
    assert [f"{path}:{node.lineno}: {ast.unparse(node)}" for path, node in found] == []


def test_the_reader_finds_what_is_private() -> None:
    program = "class A:\n    def f(self, other):\n        self._x = 1\n        return self._y, other._x, other.b._z, super()._w\n"
    assert [node.attr for node in private_reads(read(program))] == ["_z"]


MODELS = {"model", "bnn", "predictor", "laplace", "self.model", "self.bnn", "self.model_", "model.predict", "draw"}
"""Names under which the library holds what predicts."""


def questions(nodes: list[ast.AST]) -> Iterator[ast.Call]:
    """Calls that ask a model what it is: its signature, or whether it has an attribute."""
    for node in nodes:
        if not isinstance(node, ast.Call) or not node.args or not isinstance(node.func, ast.Name | ast.Attribute):
            continue
        name = node.func.attr if isinstance(node.func, ast.Attribute) else node.func.id
        if name in ("hasattr", "getattr", "signature"):
            subject = ast.unparse(node.args[0])
            if subject in MODELS or subject.endswith(".predict"):
                yield node


def test_nobody_asks_a_model_what_it_is() -> None:
    """It is a `Predictor`, see predictor.py."""
    found = ((path, node) for path, nodes in trees().items() for node in questions(nodes))
    assert [f"{path}:{node.lineno}: {ast.unparse(node)}" for path, node in found] == []


def test_the_reader_finds_questions() -> None:
    program = "hasattr(model, 'x'), getattr(loader, 'y'), inspect.signature(a.predict), signature(kind)"
    assert [node.lineno for node in questions(read(program))] == [1, 1]


def test_facts_about_methods_stand_in_the_registry() -> None:
    """Estimators and comparison know no method by name, except the plain network that all are compared with."""
    names = set(METHODS) - {"point"}
    for path, nodes in trees().items():
        for node in nodes if {SOURCE / "sklearn", SOURCE / "compare"} & {*path.parents} else ():
            if isinstance(node, ast.Compare):
                texts = {part.value for part in ast.walk(node) if isinstance(part, ast.Constant)}
                assert not texts & names, (
                    f"{path}:{node.lineno}: {ast.unparse(node)}; make it a fact of registry.Method"
                )
            if isinstance(node, ast.Dict):
                keys = {key.value for key in node.keys if isinstance(key, ast.Constant)}
                assert not keys & names, f"{path}:{node.lineno}: {keys & names}; make it a fact of registry.Method"
