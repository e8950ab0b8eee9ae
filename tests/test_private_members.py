"""Seams: nobody reads another module's private members, and nobody asks a model for its signature or attributes."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from torch import nn

import bayesify
from bayesify import BayesianNetwork
from bayesify.methods import METHODS
from bayesify.predictor import Drawable, Predictor, Trainable

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
    "_step_supports_amp_scaling",  # torch.optim
    "_sequence_nr",  # torch.autograd.graph.Node
    "_current_level",  # torch.autograd.forward_ad
    "_global_forward_pre_hooks",  # torch.nn.modules.module
    "_global_forward_hooks",
    "_global_backward_pre_hooks",
    "_global_backward_hooks",
    "_asdict",  # named tuples
    "_fields",
    "_is_protocol",  # typing
    "_exit",  # os
}
"""Private members of torch and of the standard library that there is no public way to."""

PACKAGES = ("bayesify", "papers", "benchmarks", "tools", "examples")
"""How the names of our own modules begin."""
LOOKUPS = {
    "getattr",
    "hasattr",
    "setattr",
    "delattr",
    "attrgetter",
    "methodcaller",
    "__getattribute__",
    "getattr_static",
}


def is_private(name: object) -> bool:
    return isinstance(name, str) and name.startswith("_") and not name.startswith("__") and name not in FOREIGN


def of_itself(value: ast.expr) -> bool:
    if isinstance(value, ast.Call):
        return isinstance(value.func, ast.Name) and value.func.id == "super"
    return isinstance(value, ast.Name) and value.id in ("self", "cls")


def called(node: ast.AST) -> str:
    """The last name of what a call calls; empty for anything else."""
    if not isinstance(node, ast.Call):
        return ""
    return last_name(node.func)


def last_name(node: ast.AST) -> str:
    if isinstance(node, ast.Name):
        return node.id
    return node.attr if isinstance(node, ast.Attribute) else last_name(node.value) if hasattr(node, "value") else ""


def members(kind: ast.ClassDef, others: dict[str, ast.ClassDef]) -> set[str]:
    """What a class defines, with its bases in the same file: methods, attributes, what it stores in itself."""
    found = {node.name for node in kind.body if isinstance(node, (ast.FunctionDef, ast.ClassDef))}
    for node in kind.body:
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        found |= {target.id for target in targets if isinstance(target, ast.Name)}
    for node in ast.walk(kind):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and of_itself(node.value):
            found.add(node.attr)
    for base in kind.bases:
        if others.get(last_name(base), kind) is not kind:  # a class may have the name of its base
            found |= members(others[last_name(base)], others)
    return found


def private_reads(tree: ast.Module) -> Iterator[ast.AST]:
    """Members with a leading underscore of something else than an object of the class in whose body the code stands."""
    classes = {node.name: node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)}

    def visit(node: ast.AST, own: set[str]) -> Iterator[ast.AST]:
        for child in ast.iter_child_nodes(node):
            inside = members(child, classes) if isinstance(child, ast.ClassDef) else own
            if isinstance(child, ast.Attribute) and is_private(child.attr):
                if not (of_itself(child.value) or child.attr in inside or ast.unparse(child).startswith("torch._")):
                    yield child
            elif called(child) in LOOKUPS:
                assert isinstance(child, ast.Call)
                texts = [part.value for part in child.args if isinstance(part, ast.Constant)]
                if any(map(is_private, texts)) and not of_itself(child.args[0]):
                    yield child
            elif isinstance(child, ast.ImportFrom) and (child.module or "").startswith(PACKAGES):
                yield from [child] if any(is_private(alias.name) for alias in child.names) else []
            yield from visit(child, inside)

    yield from visit(tree, set())


PRIVATE = r"""(?<!\bself)(?<!\bcls)\.\s*_(?!_)|\.(self|cls)\b|['"]_(?!_)|\bimport\b[^)]*?[\s,(]_(?!_)"""
"""A private member of anything but `self` and `cls`, as a text or in an import too."""


@functools.cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def places(reader: Callable[[ast.Module], Iterator[ast.AST]], pattern: str, *folders: Path) -> list[str]:
    """Where a reader finds something, in folders or everywhere; files without the pattern hold nothing that it finds."""
    paths = (path for path in FILES if not folders or {*folders} & {*path.parents})
    read = ((path, tree_of(path)) for path in paths if re.search(pattern, path.read_text()))
    found = ((path, node) for path, tree in read for node in reader(tree))
    return [f"{path}:{getattr(node, 'lineno', 0)}: {ast.unparse(node)}" for path, node in found]


@pytest.mark.usefixtures("garbage_left_alone")
def test_private_members_are_read_where_they_are_defined() -> None:
    """What is private elsewhere: make it public there."""
    assert places(private_reads, PRIVATE) == []


@pytest.mark.parametrize(
    "program",
    [
        "other.b._z",
        "network._x = 1",
        "getattr(network, '_x')",
        "getattr(network, '_x', None)",
        "hasattr(self.laplace, '_x')",
        "setattr(model, '_x', 1)",
        "operator.attrgetter('_x')(model)",
        "methodcaller('_x')(model)",
        "model.__getattribute__('_x')",
        "inspect.getattr_static(model, '_x')",
        "from bayesify.network import _helper",
        "from bayesify_papers.shared import _helper",
        "from bayesify import network\nnetwork._helper",
        "def _output(): ...\ndef f(other):\n    return other._output",
        "_output = 1\ndef f(other):\n    return other._output",
        "class A:\n    def f(self):\n        self._output = 1\ndef g(other):\n    return other._output",
        "class A:\n    _output = 1\nclass B:\n    def f(self, other):\n        return other._output",
    ],
)
def test_what_is_private_is_found(program: str) -> None:
    assert re.search(PRIVATE, program)
    assert len(list(private_reads(ast.parse(program)))) == 1


def test_what_is_not_private_is_left_alone() -> None:
    program = """
class A:
    _w = 1
    def f(self, other):
        self._x = 1
        return self._y, other._x, other._w, super()._z, getattr(self, "_v"), other.__len__, tensor._version
class B(A):
    def g(self, other):
        return other._x, torch._assert
from torch.nn.modules.conv import _ConvNd
from bayesify import __version__
"""
    assert list(private_reads(ast.parse(program))) == []


WORDS = {
    "model",
    "models",
    "bnn",
    "predictor",
    "trainable",
    "laplace",
    "swag",
    "space",
    "process",
    "gp",
    "posterior",
    "draw",
}
WORDS |= {"draws", "ensemble", "stack", "estimator", "network", "net", "predict"}
"""Names under which code holds what predicts or trains: a question about any of them is one about a model."""
CONTRACT = {name for kind in (Drawable, Trainable, BayesianNetwork) for base in kind.__mro__ for name in vars(base)}
CONTRACT = {name for name in {*CONTRACT, *Predictor.__annotations__} - {*dir(nn.Module)} if not name.startswith("_")}
"""What models have: whatever is asked for it is asked whether it is one."""
SUBJECTS = {
    "self",
    "context",  # of function space: any object with `draw`
    "models",  # the package of networks
    "offer",  # of an entry point: a posterior's class, or a `Method`, which stands above configuration.py
    "os",
}
"""Of these anything may be asked."""
OF_NETWORKS = {"get_base_model", "use_cache", "inplace"}
"""What peft, transformers and torch have on some networks of the user's."""
SIGNATURES = {"function", "type(self)", "type(self).__init__", "kind.__init__", "self.fit or self.posterior"}
SIGNATURES |= {"function.forward", "base.forward", "_Hadamard.forward"}
"""What is asked for its arguments: functions, and classes by their constructors; a network of transformers."""
NAMES = {
    "kind.__name__ in (*STORED_CLASSES, MODULE_NAME)",
    "STORED_CLASSES[kind.__name__]",
    "base.__name__ == selector",
}
NAMES |= {"kind.__name__[0] not in 'AEIOU'", "FILES[make.__name__]"}
"""Names that are looked up: of stored classes, of selectors of modules, of functions; grammar."""


def about_a_model(node: ast.AST) -> bool:
    name = last_name(node)
    return name not in SUBJECTS and bool(set(name.strip("_").lower().split("_")) & WORDS)


def questions(tree: ast.Module) -> Iterator[ast.AST]:
    """What asks a model what it is: its signature, its attributes, or the name of its class."""
    for node in ast.walk(tree):
        name = called(node)
        if isinstance(node, ast.Call) and node.args:
            subject, texts = node.args[0], [part.value for part in node.args if isinstance(part, ast.Constant)]
            if name in ("signature", "getfullargspec", "getargspec"):
                if ast.unparse(subject) not in SIGNATURES:
                    yield node
            elif name in ("hasattr", "getattr", "getattr_static"):
                whole = len(node.args) == 3 or name != "getattr" or bool(texts)  # not a name that is looked up for sure
                asked = {*texts} & CONTRACT and last_name(subject) not in SUBJECTS
                if whole and (asked or (about_a_model(subject) and not {*texts} & OF_NETWORKS)):
                    yield node
            elif name in ("vars", "dir", "getmembers"):
                if about_a_model(subject):
                    yield node
            elif name in ("attrgetter", "methodcaller") and {*texts} & CONTRACT:
                yield node
        elif isinstance(node, ast.Attribute) and node.attr in ("__dict__", "__class__") and about_a_model(node.value):
            yield node
        elif isinstance(node, (ast.Compare, ast.Subscript, ast.Match)):
            chosen = {ast.Subscript: "slice", ast.Match: "subject"}.get(type(node))
            parts = ast.walk(node) if chosen is None else [getattr(node, chosen)]
            named = any(isinstance(part, ast.Attribute) and part.attr in ("__name__", "__qualname__") for part in parts)
            if named and ast.unparse(node) not in NAMES:
                yield node


QUESTION = (
    "signature|argspec|hasattr|getattr|vars|dir|getmembers|attrgetter|methodcaller|__(dict|class|name|qualname)__"
)


@pytest.mark.usefixtures("garbage_left_alone")
def test_nobody_asks_a_model_what_it_is() -> None:
    """It is a `Predictor`, see predictor.py."""
    assert places(questions, QUESTION) == []


@pytest.mark.parametrize(
    "program",
    [
        "hasattr(model, 'x')",
        "getattr(self.laplace, 'x', None)",
        "getattr(self.model_, 'x')",
        "hasattr(space, 'x')",
        "hasattr(anything, 'elbo_terms')",
        "getattr(anything, 'likelihood', None)",
        "vars(model)",
        "dir(self.bnn)",
        "inspect.getmembers(model)",
        "model.__dict__",
        "model.__class__",
        "type(model).__name__ == 'DeepGP'",
        "type(anything).__name__ in ('DeepGP', 'Laplace')",
        "{'DeepGP': 1}[type(anything).__name__]",
        "match type(anything).__name__:\n    case 'DeepGP':\n        pass",
        "operator.attrgetter('predict')(anything)",
        "inspect.signature(a.predict)",
        "inspect.getfullargspec(model.predict)",
        "fn = model.predict\nsignature(fn)",
    ],
)
def test_questions_are_found(program: str) -> None:
    assert re.search(QUESTION, program)
    assert len(list(questions(ast.parse(program)))) == 1


def test_what_is_no_question_is_left_alone() -> None:
    program = """
getattr(loader, "dataset", None), hasattr(value, "__len__"), hasattr(self, "model_"), getattr(self.network, method)
vars(problem), f"{type(model).__name__}", {type(model).__name__: 1}, isinstance(model, Predictor), signature(function)
"""
    assert list(questions(ast.parse(program))) == []


def names_of_methods(tree: ast.Module) -> Iterator[ast.AST]:
    """Texts that are names of methods, except the plain network that all are compared with, and names of attributes."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value in {*METHODS} - {"point"}:
            yield node


@pytest.mark.usefixtures("garbage_left_alone")
def test_facts_about_methods_stand_in_lists_of_them() -> None:
    """Estimators, comparison and demonstration know no method by name.

    What they ask for is a fact of methods.Method, or stands in a table of their own.
    """
    found = places(names_of_methods, "", SOURCE / "compare", SOURCE / "sklearn", SOURCE / "demo")
    found = [place for place in found if not any(file in place for file in ("method_facts.py", "contestants.py"))]
    assert [place for place in found if not place.endswith("'dropout'")] == []  # a setting of the estimators' network


@pytest.mark.parametrize(
    "program", ["name == 'swag'", "('auto', 'ensemble')", "{'laplace': 1}", "f(method='inducing')"]
)
def test_names_of_methods_are_found(program: str) -> None:
    assert len(list(names_of_methods(ast.parse(program)))) == 1
