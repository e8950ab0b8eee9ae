"""Export of draws, or of a posterior that makes draws, to a single ONNX file that predicts without torch."""

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
from bayesify.running.modes import assigned
from bayesify.storage.atomic import check_file, write_atomically
from bayesify.weights.catalog import put_in

REGRESSION_OUTPUTS = ("mean", "variance", "epistemic")
CLASSIFICATION_OUTPUTS = ("probs", "entropy", "mutual_information")
BATCH_AXIS = torch.export.Dim("batch", min=1)
DEFAULT_NUM_DRAWS = 16
"""Number of draws in the file for a model with infinitely many draws."""


@dataclass(frozen=True)
class Exported:
    """Description of a file that `export_onnx` wrote.

    Args:
        path: Path of the file.
        inputs: Names of the graph's inputs: the network's inputs, with examples along the first axis, and `seed` or `noise` if the
            file makes its own draws.
        outputs: Names of the graph's outputs: `mean`, `variance` and `epistemic` for a regression; `probs`, `entropy` and
            `mutual_information` for a classification.
        num_draws: Number of draws S in the file.
        largest_difference: Largest difference between the file's outputs and torch's outputs on the example inputs.
            Each difference is divided by 1 + the absolute value of torch's output.
        noise_size: Number K of standard normal numbers per draw, if the file makes its own draws.
    """

    path: Path
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    num_draws: int
    largest_difference: float
    noise_size: int | None = None


class PredictiveGraph(nn.Module):
    """A module that runs S plain networks, one per draw, and returns the moments of their mixture as a tuple of
    tensors.

    The networks share all weights that have no posterior. `keys` are the names of the keyword inputs, in the order in which
    `forward` takes them.
    """

    def __init__(self, draws: Draws, likelihood: Likelihood, output: str | int | None, keys: tuple[str, ...]) -> None:
        super().__init__()
        runner, own = draws.runner, draws.buffers
        source = runner.network
        shared = {id(value): value for value in source.parameters()} | {id(value): value for value in source.buffers()}
        members = []
        for index, draw in enumerate(draws):
            plain = copy.deepcopy(source, dict(shared))
            put_in(plain, [runner.weights[name] for name in draw.weights], draw.weights)
            for name, value in (own[index] if own else {}).items():
                path, _, leaf = name.rpartition(".")
                plain.get_submodule(path).register_buffer(leaf, value.clone())
            members.append(plain)
        self.members = nn.ModuleList(members)
        self.likelihood, self._output, self._keys = copy.deepcopy(likelihood), output, keys
        self.requires_grad_(False)
        self.eval()

    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        """For a regression: mean, variance, and the epistemic part of the variance. For a classification: probabilities, entropy
        and mutual information. Each is a tensor [B, ...]."""
        args, kwargs = ((), dict(zip(self._keys, inputs, strict=True))) if self._keys else (inputs, {})
        outputs = torch.stack([select_output(member(*args, **kwargs), self._output) for member in self.members])
        return moments(outputs, self.likelihood)


class _WholeOutputs(Outputs):
    """Outputs that are never split, because a split would fix the number of rows per piece in the graph."""

    def map(self, function: Callable[..., Result], *rowwise: Tensor) -> Result:
        return function(self.kept, *rowwise)


def moments(outputs: Tensor, likelihood: Likelihood) -> tuple[Tensor, ...]:
    """The graph's results, computed from the outputs [S, B, ...] of S draws. `REGRESSION_OUTPUTS` or
    `CLASSIFICATION_OUTPUTS` lists the results' names."""
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
    """Write one ONNX graph that contains S draws, or the posterior that makes them, and averages their predictions.

    The graph runs the network once per draw and returns `mean`, `variance` and `epistemic` of a regression, or `probs`, `entropy`
    and `mutual_information` of a classification. It accepts any number of examples. The file contains S draws of the weights that
    have a posterior, and one copy of the other weights. Layers before the first layer with drawn weights run only once, not once
    per draw. For a `Laplace`, the graph runs the network with drawn weights, not the linearized network.

    Before the file is moved to `path`, it is compared with torch on three batches: `x`, one example, and `x` plus one example.

    With `sample`, the file contains the posterior's parameters, such as means and scales, instead of draws. The file has as many
    numbers as the posterior, so the file of an inducing posterior is smaller than the network. Each run draws S networks from
    standard normal numbers, which the graph computes from the input `seed` (see `onnx_sampling.normals`). The same seed gives the
    same prediction on every machine, up to rounding; different seeds give different predictions.

    Args:
        model: A `Draws`, or a model with `draw` and a likelihood, such as a `BayesianNetwork`, a `Laplace` or a `SWAG`.
        path: Path of the file.
        x: Example inputs, two or more: a tensor, a tuple of positional inputs, or a dict of keyword inputs.
        num_draws: Number of draws S; by default all draws if their number is finite (`Draws`, an ensemble, a chain), otherwise 16.
        likelihood: Likelihood p(y | outputs); needed if the model has no likelihood.
        output: Name or index of the output to use, if there are several; see `bayesianize`.
        generator: Source of randomness.
        tolerance: Largest accepted difference between the file's output and torch's output t, divided by 1 + |t|.
        sample: Whether the file makes its own draws. With `True` or `"seed"`, they come from an input `seed`, a 64-bit integer.
            With `"noise"`, they come from an input `noise` [S, K] of standard normal numbers. The model must be a `BayesianNetwork`
            on the CPU with mean-field, k-tied, matrix normal, inducing, Walsh-Hadamard, full covariance or dropout posteriors.
        int8: Whether to store large matrices as 8-bit integers with a scale per row, which quarters their size; only with `sample`.
            The comparison with torch precedes the rounding to integers, so check the scores of the file on your own data.

    Raises:
        ImportError: If onnx, onnxscript or onnxruntime is not installed.
        TypeError: If the model has no draws.
        ValueError: If there is no likelihood, or if `x` is a single example or has type bfloat16. Also if the graph's outputs
            differ from torch's by more than `tolerance`; in this case no file is written.
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
            "export_onnx: int8=True works only with sample=True; to quantize a file of fixed draws, use ONNX Runtime's tools"
        )
    return _export_draws(fixed_draws(model, num_draws, generator, "export_onnx", DEFAULT_NUM_DRAWS), trial)


def _example_inputs(x: Inputs) -> tuple[tuple[Tensor, ...], tuple[str, ...]]:
    args, kwargs = checked_inputs(x)
    inputs = tuple(kwargs.values()) if kwargs else args
    if any(not isinstance(value, Tensor) or not value.ndim or value.shape[0] < 2 for value in inputs):
        raise ValueError(
            "export_onnx: an input is not a tensor with at least 2 examples; give tensors with 2 or more examples along the "
            "first axis"
        )
    if any(value.dtype == torch.bfloat16 for value in inputs):
        raise ValueError(
            "export_onnx: ONNX Runtime does not support bfloat16 on CPUs; convert the model with model.float(), and give inputs "
            "in float32"
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
    for values in noise:  # use each draw for all batches, then free it
        weights = graph.draw(values)
        for found, rows in zip(drawn, sizes, strict=True):
            found.append(graph.run(weights, *rows))
    together = [torch.stack(found) for found in drawn]
    axes = (None, tuple({0: BATCH_AXIS} for _ in inputs))
    one = _exported(graph, (noise[0], *inputs), (NOISE_INPUT, *names), ("result",), axes, optimize=False)
    # Fold only small constants, which determine shapes. Folding large constants would store transposed or repeated matrices again.
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
    """The program that torch's ONNX exporter makes from the graph. `axes` names the dynamic axes of each input, with the same
    structure as the arguments of the graph's `forward`."""
    talk = logging.getLogger("torch.onnx._internal.exporter._registration")  # notes that torchvision is missing
    with warnings.catch_warnings(), assigned([talk], "disabled", True):
        warnings.simplefilter("ignore")  # hide deprecation warnings of the exporter itself
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
    # Remove metadata: the exporter stores the source path of each operation.
    package("onnx_ir.passes.common").ClearMetadataAndDocStringPass()(program.model)
    return program


@dataclass(frozen=True)
class _Trial:
    """A file to check: its path, its inputs and outputs, and the tolerance."""

    path: Path
    inputs: tuple[Tensor, ...]
    keys: tuple[str, ...]
    likelihood: Likelihood
    output: str | int | None
    tolerance: float

    @property
    def names(self) -> tuple[str, ...]:
        count = len(self.inputs)
        return self.keys or (("x",) if count == 1 else tuple(f"x{index}" for index in range(count)))

    @property
    def outputs(self) -> tuple[str, ...]:
        return REGRESSION_OUTPUTS if self.likelihood.task == "regression" else CLASSIFICATION_OUTPUTS

    @property
    def batches(self) -> list[tuple[Tensor, ...]]:
        """Three batches of different sizes: the example inputs, their first row alone, and the example inputs with the
        first row appended."""
        first = tuple(value[:1] for value in self.inputs)
        return [self.inputs, first, tuple(map(torch.cat, zip(self.inputs, first, strict=True)))]

    def difference(
        self, expectations: Iterable[tuple[Tensor, ...]], path: Path, taken: Mapping[str, np.ndarray] | None = None
    ) -> float:
        """Largest difference between the file's outputs and torch's outputs over all batches. `taken` contains the file's other
        inputs, such as the noise."""
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
                        "torch; make sure that the network's code does not fix the number of examples"
                    )
                difference = float(((found - expected).abs() / (1 + expected.abs())).max())
                if not difference <= self.tolerance:
                    raise ValueError(
                        f"export_onnx: in {name}, torch and ONNX Runtime differ by {difference:.2g}, which exceeds "
                        f"tolerance={self.tolerance}, so no file was written; if this difference is acceptable, give "
                        "tolerance= a larger value"
                    )
                largest = max(largest, difference)
        return largest
