"""Draws, or the posterior that makes them, as one ONNX file, which predicts without torch."""

from __future__ import annotations

import copy
import logging
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from bayesify.adapters.drawn import check_draws, fixed_draws, likelihood_of, output_of
from bayesify.adapters.onnx_sampling import NOISE_INPUT, SEED_INPUT, SamplingGraph, normals, package, quantized, repeat
from bayesify.arguments.checks import Count, Inputs, Positive, checked
from bayesify.draws import Draws
from bayesify.likelihoods import Likelihood
from bayesify.network import BayesianNetwork
from bayesify.predictive.base import Outputs, Predictive, Result
from bayesify.predictive.classification import ClassificationPredictive
from bayesify.predictive.regression import RegressionPredictive
from bayesify.predictor import Drawable
from bayesify.running.inputs_and_outputs import checked_inputs, select_output
from bayesify.storage.atomic import check_file, write_atomically
from bayesify.weights.catalog import put_in

REGRESSION_OUTPUTS = ("mean", "variance", "epistemic")
CLASSIFICATION_OUTPUTS = ("probs", "entropy", "mutual_information")
BATCH_AXIS = torch.export.Dim("batch", min=1)
DEFAULT_NUM_DRAWS = 16
"""Draws in the file where a model's draws cannot be counted."""


@dataclass(frozen=True)
class Exported:
    """What `export_onnx` wrote.

    Args:
        path: The file.
        inputs: Names of the graph's inputs: the network's, examples along the first axis of each, and `seed` or `noise`, where
            draws are made inside.
        outputs: Names of its outputs: `mean`, `variance`, `epistemic` or `probs`, `entropy`, `mutual_information`.
        num_draws: S, the draws inside.
        largest_difference: Largest difference of an output from torch's on the example inputs, in units of 1 + its size.
        noise_size: K, the normal numbers that each draw takes, where draws are made inside.
    """

    path: Path
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    num_draws: int
    largest_difference: float
    noise_size: int | None = None


class PredictiveGraph(nn.Module):
    """S plain networks, one per draw, and the moments of their mixture as a tuple of tensors.

    Weights that are not under the posterior are shared by the networks.

    Args:
        draws: The draws.
        likelihood: p(y | outputs).
        output: Which of several outputs the likelihood is about.
        keys: Names of keyword inputs in the order in which they come; empty for positional inputs.
    """

    def __init__(self, draws: Draws, likelihood: Likelihood, output: str | int | None, keys: tuple[str, ...]) -> None:
        super().__init__()
        runner, own = draws.runner, draws.buffers
        source = runner.network
        shared = {id(value): value for value in source.parameters()} | {id(value): value for value in source.buffers()}
        members = []
        for index, draw in enumerate(draws):
            plain = copy.deepcopy(source, dict(shared))
            put_in(plain, list(runner.weights.values()), draw.weights)
            for name, value in (own[index] if own else {}).items():
                path, _, leaf = name.rpartition(".")
                plain.get_submodule(path).register_buffer(leaf, value.clone())
            members.append(plain)
        self.members = nn.ModuleList(members)
        self.likelihood, self._output, self._keys = copy.deepcopy(likelihood), output, keys
        self.requires_grad_(False)
        self.eval()

    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        """Mean, variance and its epistemic part, or probabilities, entropy and mutual information: [B, ...] each."""
        args, kwargs = ((), dict(zip(self._keys, inputs, strict=True))) if self._keys else (inputs, {})
        outputs = torch.stack([select_output(member(*args, **kwargs), self._output) for member in self.members])
        return moments(outputs, self.likelihood)


class _WholeOutputs(Outputs):
    """Outputs that are never cut: how many rows fit at a time would be fixed in the graph."""

    def map(self, function: Callable[..., Result], *rowwise: Tensor) -> Result:
        return function(self.kept, *rowwise)


def moments(outputs: Tensor, likelihood: Likelihood) -> tuple[Tensor, ...]:
    """What the graph gives of outputs [S, B, ...]; the names are `REGRESSION_OUTPUTS` or `CLASSIFICATION_OUTPUTS`."""
    prediction: Predictive = likelihood.predictive(_WholeOutputs(outputs))
    if isinstance(prediction, RegressionPredictive):
        return prediction.mean, prediction.variance, prediction.epistemic
    assert isinstance(prediction, ClassificationPredictive)
    return prediction.probs, prediction.entropy, prediction.mutual_information


@checked
@torch.no_grad()
def export_onnx(
    model: Any,
    path: str | Path,
    x: Inputs,
    *,
    num_draws: Count | None = None,
    likelihood: Likelihood | None = None,
    output: str | int | None = None,
    generator: torch.Generator | None = None,
    tolerance: Positive = 1e-4,
    sample: bool | Literal["seed", "noise"] = False,
    int8: bool = False,
) -> Exported:
    """Write S draws, or what makes them, and the average of what they predict as one ONNX graph, and check it against torch.

    The graph runs the network once per draw and returns `mean`, `variance` and `epistemic` of a regression, or `probs`,
    `entropy` and `mutual_information` of a classification. The number of examples is free. The file holds S times the
    weights under the posterior, the others once, and layers below the first drawn one run once. Before it gets its name,
    ONNX Runtime runs it on `x`, on one example and on more than `x` has, and every output is compared with torch's. For a
    `Laplace` this is the network at draws of its weights, not the linearized prediction.

    With `sample` the file holds the posterior in place of its draws: means and scales, or the factors of inducing weights, as
    many numbers as the posterior has, so that the file of an inducing posterior is smaller than the network's. Each run draws
    S networks from normal numbers that it makes from the input `seed` by integer operations (see `onnx_sampling.normals`): the
    same seed gives the same prediction on every machine up to rounding, another seed another one.

    Args:
        model: Something with `draw` and a likelihood: a `BayesianNetwork`, a `Laplace`, a `SWAG`, ...; or `Draws`.
        path: The file.
        x: Example inputs, two or more: a tensor, a tuple of positional inputs, or a dict of keyword inputs.
        num_draws: S; by default all where they can be counted (`Draws`, an ensemble, a chain), else 16.
        likelihood: p(y | outputs), where the model has none.
        output: Which of several outputs; see `bayesianize`.
        generator: Source of randomness.
        tolerance: Largest difference from torch that is accepted, in units of 1 + an output's size.
        sample: Whether draws are made inside the file: true or `"seed"` from an input `seed`, a 64-bit integer; `"noise"` from an
            input `noise` [S, K] of normal numbers. For a `BayesianNetwork` on the CPU whose draws ONNX can make: mean-field,
            k-tied, matrix normal, inducing weights, Walsh-Hadamard, full covariance, dropout.
        int8: With `sample`, store large matrices as 8-bit integers with a scale for each row, a quarter of the size; the comparison
            with torch is of the file before that, so compare its scores on data of yours.

    Raises:
        ImportError: If onnx, onnxscript or onnxruntime is missing.
        TypeError: If the model has no draws.
        ValueError: If there is no likelihood, `x` is a single example or in bfloat16, or the graph does not give what torch gives;
            no file is left then.
    """
    for module in ("onnx", "onnxscript", "onnxruntime"):
        package(module)
    check_draws(model, "export_onnx")
    law = likelihood_of(model, likelihood, "export_onnx")
    trial = _Trial(check_file(path), *_example_inputs(x), law, output_of(model, output), tolerance)
    if sample:
        return _export_sampling(model, trial, num_draws or DEFAULT_NUM_DRAWS, sample, int8)
    if int8:
        raise ValueError(
            "export_onnx: int8=True is for sample=True; quantize files of fixed draws by ONNX Runtime's tools"
        )
    return _export_draws(fixed_draws(model, num_draws, generator, "export_onnx", DEFAULT_NUM_DRAWS), trial)


def _example_inputs(x: Inputs) -> tuple[tuple[Tensor, ...], tuple[str, ...]]:
    """Example inputs in order, and the names of keyword inputs."""
    args, kwargs = checked_inputs(x)
    inputs = tuple(kwargs.values()) if kwargs else args
    if any(not isinstance(value, Tensor) or not value.ndim or value.shape[0] < 2 for value in inputs):
        raise ValueError("export_onnx: inputs must be tensors of at least 2 examples, along the first axis")
    if any(value.dtype == torch.bfloat16 for value in inputs):
        raise ValueError(
            "export_onnx: ONNX Runtime has no bfloat16 on processors; give model.float() and inputs in float32"
        )
    return inputs, tuple(kwargs)


def _export_draws(draws: Draws, trial: _Trial) -> Exported:
    graph = PredictiveGraph(draws, trial.likelihood, trial.output, trial.keys)
    wanted = [graph(*rows) for rows in trial.batches]
    with write_atomically(trial.path) as temporary:
        axes = (tuple({0: BATCH_AXIS} for _ in trial.inputs),)
        _exported(graph, trial.inputs, trial.names, trial.outputs, axes).save(str(temporary), external_data=False)
        difference = trial.difference(wanted, temporary)
    return Exported(trial.path, trial.names, trial.outputs, len(draws), difference)


def _export_sampling(
    model: Drawable | Draws, trial: _Trial, num_draws: int, sample: bool | str, int8: bool
) -> Exported:
    if not isinstance(model, BayesianNetwork):
        raise TypeError(
            f"export_onnx: sample={sample!r} needs a BayesianNetwork, not {type(model).__name__}; use sample=False"
        )
    graph, from_seed = SamplingGraph(model, trial.output, trial.keys), sample != NOISE_INPUT
    inputs, names, outputs, sizes, seed = trial.inputs, trial.names, trial.outputs, trial.batches, 12345
    average = _Moments(trial.likelihood)
    noise = torch.from_numpy(np.stack([normals(seed, index, graph.noise_size) for index in range(num_draws)]))
    taken = {SEED_INPUT: np.array(seed)} if from_seed else {NOISE_INPUT: noise.numpy()}
    drawn: list[list[Tensor]] = [[] for _ in sizes]
    for values in noise:  # a draw is made once for all batches, and is gone before the next
        weights = graph.draw(values)
        for found, rows in zip(drawn, sizes, strict=True):
            found.append(graph.run(weights, *rows))
    together = [torch.stack(found) for found in drawn]
    axes = (None, tuple({0: BATCH_AXIS} for _ in inputs))
    one = _exported(graph, (noise[0], *inputs), (NOISE_INPUT, *names), ("result",), axes, optimize=False)
    # Constants of a few entries are folded, so that shapes are known; transposed or repeated matrices are not stored again.
    optimizer = package("onnxscript.optimizer")
    optimizer.inline(one.model)
    optimizer.fold_constants(one.model, input_size_limit=64, output_size_limit=64)
    optimizer.remove_unused_nodes(one.model)
    summary = _exported(average, (together[0],), ("drawn",), outputs, ({1: BATCH_AXIS},))
    proto = package("onnx_ir").to_proto
    made = repeat(proto(one.model), proto(summary.model), names, num_draws, graph.noise_size, from_seed=from_seed)
    with write_atomically(trial.path) as temporary:
        temporary.write_bytes(made.SerializeToString())
        difference = trial.difference([average(found) for found in together], temporary, taken)
        if int8:
            temporary.write_bytes(quantized(made).SerializeToString())
    return Exported(trial.path, (*names, *taken), outputs, num_draws, difference, graph.noise_size)


class _Moments(nn.Module):
    def __init__(self, likelihood: Likelihood) -> None:
        super().__init__()
        self.likelihood = copy.deepcopy(likelihood).requires_grad_(False)

    def forward(self, outputs: Tensor) -> tuple[Tensor, ...]:
        return moments(outputs, self.likelihood)


def _exported(
    graph: nn.Module,
    inputs: tuple[Tensor, ...],
    names: tuple[str, ...],
    outputs: tuple[str, ...],
    axes: tuple[Any, ...],
    *,
    optimize: bool = True,
) -> Any:
    """The exporter's program; `axes` says which axes of the inputs, in the form of the graph's signature, have any length."""
    talk = logging.getLogger("torch.onnx._internal.exporter._registration")
    level = talk.level
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what the exporter deprecates inside itself is not the caller's
        talk.setLevel(logging.ERROR)  # nor that torchvision is not there
        try:
            program: Any = torch.onnx.export(
                graph,
                inputs,
                input_names=list(names),
                output_names=list(outputs),
                dynamic_shapes=axes,
                dynamo=True,
                verbose=False,
                optimize=optimize,
            )
        finally:
            talk.setLevel(level)
    # The exporter writes where in whose folders each operation came from.
    package("onnx_ir.passes.common").ClearMetadataAndDocStringPass()(program.model)
    return program


@dataclass(frozen=True)
class _Trial:
    """A file, its inputs and outputs, and how far it may be from torch."""

    path: Path
    inputs: tuple[Tensor, ...]
    keys: tuple[str, ...]
    likelihood: Likelihood
    output: str | int | None
    tolerance: float

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the network's inputs in the graph."""
        count = len(self.inputs)
        return self.keys or (("x",) if count == 1 else tuple(f"x{index}" for index in range(count)))

    @property
    def outputs(self) -> tuple[str, ...]:
        """Names of the graph's outputs."""
        return REGRESSION_OUTPUTS if self.likelihood.task == "regression" else CLASSIFICATION_OUTPUTS

    @property
    def batches(self) -> list[tuple[Tensor, ...]]:
        """The given rows, the first alone, and the first once more: three sizes of batch."""
        first = tuple(value[:1] for value in self.inputs)
        return [self.inputs, first, tuple(map(torch.cat, zip(self.inputs, first, strict=True)))]

    def difference(
        self, expectations: Iterable[tuple[Tensor, ...]], path: Path, taken: Mapping[str, np.ndarray] | None = None
    ) -> float:
        """Largest difference of a file's outputs from torch's, batch by batch; `taken` are other inputs of the file."""
        runtime = package("onnxruntime")
        session = runtime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
        largest = 0.0
        for rows, wanted in zip(self.batches, expectations, strict=True):
            feed = {name: value.detach().cpu().numpy() for name, value in zip(self.names, rows, strict=True)}
            got = session.run(list(self.outputs), {**feed, **(taken or {})})
            for name, expected, values in zip(self.outputs, wanted, got, strict=True):
                found = torch.from_numpy(values).to(expected)
                if found.shape != expected.shape:
                    raise ValueError(
                        f"export_onnx: {name} has shape {tuple(found.shape)} in ONNX Runtime and {tuple(expected.shape)} in "
                        "torch; the network fixes its number of examples somewhere"
                    )
                difference = float(((found - expected).abs() / (1 + expected.abs())).max())
                if not difference <= self.tolerance:
                    raise ValueError(
                        f"export_onnx: {name} differs by {difference:.2g} between torch and ONNX Runtime, more than "
                        f"tolerance={self.tolerance}; no file was written"
                    )
                largest = max(largest, difference)
        return largest
