"""Arguments: how values are compared with annotations, and what every public callable says to wrong ones."""

from __future__ import annotations

import importlib
import inspect
import json
import multiprocessing
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch
from forks import forks
from torch import Tensor, nn

import bayesify
from bayesify.arguments.checks import (
    BadArgument,
    Count,
    CountOrZero,
    DataCount,
    Device,
    Inputs,
    Memory,
    NonNegative,
    Positive,
    Probability,
    Seed,
    Share,
    checked,
)

HERE = Path(__file__).parent
ACCEPTED: dict[str, dict[str, list[str]]] = json.loads((HERE / "accepted_arguments.json").read_text())
"""Odd values that arguments take on purpose, by the reason why each is right."""


@checked
def example(
    rows: Count = 1,
    zero: CountOrZero = 0,
    data: DataCount = 1,
    std: Positive = 1.0,
    weight: NonNegative = 0.0,
    rate: Probability = 0.0,
    share: Share = 0.5,
    number: float = 0.0,
    flag: bool = False,
    seed: Seed | None = None,
    choice: Literal["a", "b", "c"] = "a",
    path: str | Path | None = None,
    tensor: Tensor | None = None,
    generator: torch.Generator | None = None,
    function: Callable[[Tensor], Tensor] | None = None,
    loader: Iterable[Any] | None = None,
    sizes: Count | Sequence[Count] = 1,
    values: Mapping[str, float] | None = None,
    device: Device | None = None,
    net: nn.Module | None = None,
    x: Inputs = (1,),
    memory: Memory = 1,
    anything: Any = None,
) -> dict[str, Any]:
    return dict(locals())


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("rows", 0, "rows=0; give an integer of at least 1"),
        ("rows", True, "rows=True; give an integer of at least 1"),
        ("rows", 1.0, "rows=1.0; give an integer of at least 1"),
        ("rows", "3", "rows='3'; give an integer of at least 1"),
        ("rows", torch.tensor(3), r"rows=a tensor \[\]; give an integer of at least 1"),
        ("rows", 2**40, "rows=1099511627776; give an integer of at most 1,000,000,000"),
        ("zero", -1, "give an integer of at least 0"),
        ("data", 0, "give an integer of at least 1"),
        ("std", 0, "std=0; give a positive number"),
        ("std", float("nan"), "std=nan; give a positive number"),
        ("std", "abc", "std='abc'; give a positive number"),
        ("std", 1e300, "give a finite number, at most 3.4e38"),
        ("weight", float("inf"), "give a finite number, at most 3.4e38"),
        ("share", 1e60, "give a number of at most 1"),
        ("rate", 1.0, "give a number of at least 0 and below 1"),
        ("share", 1.5, "give a number of at most 1"),
        ("number", float("inf"), "give a finite number"),
        ("number", [1.0], r"number=\[1.0\]; give a number"),
        ("number", True, "number=True; give a number"),
        ("flag", "no", "flag='no'; give True or False"),
        ("flag", 1, "flag=1; give True or False"),
        ("flag", None, "flag=None; give True or False"),
        ("seed", -1, "seed=-1; give an integer of at least 0"),
        ("seed", 1.0, "seed=1.0; give an integer"),
        ("choice", "d", "choice='d'; give 'a', 'b' or 'c'"),
        ("choice", ["a"], "give 'a', 'b' or 'c'"),
        ("path", 3, "path=3; give a string or a path"),
        ("tensor", np.zeros((2, 3)), r"tensor=an array \[2, 3\]; give a tensor"),
        ("generator", 0, "generator=0; give a torch.Generator"),
        ("function", 3, "function=3; give a function"),
        ("loader", 3, "give batches, such as a DataLoader"),
        ("loader", "abc", "give batches, such as a DataLoader"),
        ("sizes", [1, 0], r"sizes=\[1, 0\]; give a list, each entry an integer of at least 1"),
        ("values", {"a": "b"}, "give a dictionary, each value a number"),
        ("values", [1], "give a dictionary"),
        ("device", "abc", "give a device such as 'cpu' or 'cuda:0'"),
        ("net", nn.Linear, "net=Linear; give a torch.nn.Module"),
        ("x", np.zeros(3), "torch.from_numpy"),
        ("x", None, "x=None; give inputs of the network"),
        ("memory", 0, "memory=0; give a positive number of bytes"),
    ],
)
def test_wrong_values(name: str, value: Any, words: str) -> None:
    for call in (lambda: example(**{name: value}), lambda: example(*_positional(name, value))):
        with pytest.raises(BadArgument, match=f"^example: .*{words}"):
            call()


def _positional(name: str, value: Any) -> list[Any]:
    """The arguments before one by their defaults, then the value."""
    found = []
    for key, parameter in inspect.signature(example).parameters.items():
        if key == name:
            return [*found, value]
        found.append(parameter.default)
    raise AssertionError(name)


def test_right_values_pass_and_become_plain() -> None:
    given = {
        "rows": np.int64(3), "seed": np.uint8(7), "flag": np.bool_(True), "std": np.float32(0.5), "number": -1, "path": Path("a"),
        "tensor": nn.Parameter(torch.ones(1)), "generator": torch.Generator(), "function": torch.relu, "loader": [1],
        "sizes": (2, np.int32(3)), "values": {"a": 1}, "device": "cuda:1", "net": nn.Identity(), "x": torch.ones(1),
        "anything": object(),
    }  # fmt: skip
    found = example(**given)
    assert {key: found[key] for key in given} == given
    assert [type(found[key]) for key in ("rows", "seed", "flag")] == [int, int, bool]


def test_a_signature_shows_only_the_limits_that_are_set() -> None:
    assert "Annotated[float, Range(least=0, below=1)]" in str(inspect.signature(bayesify.posteriors.Dropout))


def test_classes_dataclasses_and_methods_are_named() -> None:
    @checked
    @dataclass(frozen=True)
    class Plan:
        steps: Count = 1

    class Thing:
        @classmethod
        @checked
        def make(cls, size: Count) -> Thing:
            return cls()

        @checked
        def grow(self, size: Count) -> int:
            return size

    for call, words in (
        (lambda: Plan(0), "Plan: steps=0"),
        (lambda: Thing.make(0), "Thing.make: size=0"),
        (lambda: Thing().grow(size=0), "Thing.grow: size=0"),
        (lambda: bayesify.priors.Gaussian(0), "priors.Gaussian: std=0"),
    ):
        with pytest.raises(ValueError, match=f"^{words}"):
            call()
        with pytest.raises(TypeError):
            call()
    assert str(inspect.signature(Thing.grow)) == "(self, size: 'Count') -> 'int'"


def test_a_compiled_function_does_not_compare() -> None:
    compiled = torch.compile(lambda x: example(tensor=x)["tensor"] * 2, backend="eager", fullgraph=False)
    assert torch.equal(compiled(torch.ones(2)), 2 * torch.ones(2))


def test_an_output_of_a_network_that_has_one() -> None:
    """Which output is known when the network runs: then a name that does not exist is an error, not ignored."""
    net = nn.Linear(2, 1)
    bnn = bayesify.bayesianize(net, "mean_field", likelihood="gaussian", output="abc")
    for call in (
        lambda: bnn.predict(torch.ones(3, 2)),
        lambda: bnn.elbo(torch.ones(3, 2), torch.ones(3, 1), num_data=3),
        lambda: bayesify.Laplace(net, "gaussian", output="abc").fit([(torch.ones(3, 2), torch.ones(3, 1))]),
    ):
        with pytest.raises(ValueError, match="output='abc', but the network returns a single tensor; give output=None"):
            call()


# -- every public callable ---------------------------------------------------------------------------------------------


def run(tmp_path: Path, share: float, seed: int, seconds: float) -> list[list[str]]:
    """The calls in a process of its own, which may be stopped: a child with what is loaded here, since to load it takes seconds."""
    for module in ("arviz", "lightning", "onnx", "torchmetrics"):
        pytest.importorskip(module)  # it calls the adapters too
    import fuzz_arguments

    out = tmp_path / "found.json"
    child = multiprocessing.get_context("fork").Process(
        target=fuzz_arguments.main, args=(str(out), share, seed), kwargs={"folder": str(tmp_path)}
    )
    child.start()
    child.join(seconds)
    child.kill()
    found: list[list[str]] = json.loads(out.read_text())
    return found


def review(found: list[list[str]]) -> None:
    """98 % of wrong calls end clearly, none goes on for ever, and what is taken is known."""
    known = {(call, word) for calls in ACCEPTED.values() for call, words in calls.items() for word in words}
    taken = [row[:3] for row in found if row[3] == "accepted"]
    new = [row for row in taken if (f"{row[0]}({row[1]})", row[2]) not in known]
    assert not new, json.dumps(new)
    assert not [row[:3] for row in found if row[3] == "endless"]
    wrong = [row for row in found if row[3] != "accepted"]
    unclear = [row for row in wrong if row[3] != "clear"]
    assert len(unclear) <= 0.02 * len(wrong), json.dumps(unclear, indent=1)


@pytest.mark.skipif(sys.platform != "linux", reason="forks")
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
@forks
def test_a_sample_of_wrong_calls(tmp_path: Path) -> None:
    found = run(tmp_path, 0.02, 0, 280)
    assert len(found) > 130
    review(found)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.skipif(sys.platform != "linux", reason="forks")
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
@forks
def test_all_wrong_calls(tmp_path: Path) -> None:
    review(run(tmp_path, 1.0, 0, 3500))


def test_every_public_name_is_called() -> None:
    """A new public class or function has an entry in `public_calls`, or stands here with the reason why not."""
    from public_calls import CALLS

    called = {part for name in CALLS for part in name.split(".")}
    missing = []
    others = [importlib.import_module(f"bayesify.{name}") for name in ("adapters", "compare", "scale_out", "sklearn")]
    for room in [bayesify, *others, *(getattr(bayesify, name) for name in bayesify.__all__)]:
        if not inspect.ismodule(room):
            continue
        for name in getattr(room, "__all__", []):
            if name in called | NOT_CALLED:
                continue
            thing = getattr(room, name)
            if not (inspect.isclass(thing) or inspect.isfunction(thing)):
                continue
            if inspect.signature(thing).parameters and not inspect.isabstract(thing):
                missing.append(f"{room.__name__}.{name}")
    assert not missing


NOT_CALLED = {
    # made by the library itself, from its own values
    "Draw", "Draws", "Predictive", "BayesianNetwork", "ClassificationPredictive", "RegressionPredictive", "History",
    "CalibrationCurve", "RejectionCurve", "ReliabilityDiagram", "Conditional", "GlobalLayer", "LocalLayer", "DrawRequest",
    "NamedParameters", "PriorDraw", "Candidates", "Selector", "Likelihood", "Posterior", "Prior", "kernel_positions",
    # bases without arguments of their own, functions that the list of methods or an estimator calls, and what needs an extra
    "Bernoulli", "Poisson", "Context", "FunctionPrior", "Mixture", "UnknownPrior", "fit_deep_gp", "nuts",
    "InducingPointGP", "RandomFourierFeatures", "ResNet", "BayesianTrainer", "bayesianize_head", "bayesianize_lora",
    "generate", "Generation", "BoTorchModel",
    "Accuracy", "BrierScore", "CRPS", "NLL", "RMSE", "Exported", "Comparison", "PoolRun", "at_random", "InputError", "JobsFailed",
}  # fmt: skip
