"""Running statistics of BatchNorm layers for weights that never saw training batches, for example draws."""

import warnings
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from bayesify.arguments.checks import Count, Seed, checked
from bayesify.network import BayesianNetwork
from bayesify.predictor import DEFAULT_NUM_DRAWS, Batch, Trainable
from bayesify.running.inputs_and_outputs import as_inputs, each
from bayesify.running.modes import assigned, modes_kept
from bayesify.running.runner import Runner
from bayesify.training.batches import BatchReader, batches_all_over, check_repeatable
from bayesify.training.random_streams import loader_generators_kept, seeded_globals
from bayesify.weights.batch_statistics import KeptStatistics, pooling, running_statistics, tracking_layers

MAX_EXAMPLES = 2048
"""Default number of examples for the statistics of a draw. Above 1,024, more examples changed the NLL by less than 0.002 (MLP with
BatchNorm1d, Fashion-MNIST)."""

MIN_EXAMPLES = 512
"""Minimum number of examples that `fit` uses after a short run. For the same MLP, the NLL was worse than with 2,048
examples by 0.007 to 0.012 with 256 examples, and by at most 0.0025 with 512 examples."""


MAX_WEIGHT_BYTES, MIN_DRAWS = 2 * 2**30, 8
"""Limits on the draws that `fit` keeps at its end: maximum memory for the weights of all draws, and minimum number of draws."""


@checked
@torch.no_grad()
def keep_draws(
    model: BayesianNetwork,
    loader: Iterable[Any],
    num_draws: Count = DEFAULT_NUM_DRAWS,
    *,
    max_examples: Count | None = MAX_EXAMPLES,
    seed: Seed = 0,
    read_batch: BatchReader | None = None,
) -> None:
    """Store a set of draws, each with its own BatchNorm statistics, and use these draws in predictions. The network changes in
    place.

    In training, each draw is normalized with its own batch statistics. The running averages mix the batches of all draws and suit
    no single draw. This function runs each of K draws over training data once. The BatchNorm layers record the means and
    variances of their inputs for each draw. The model stores the seed of the draws and these statistics, not the weights.
    Until a parameter changes, the stored draws are used by `predict`, `prediction_draws`, `save`, adapters, and `export_onnx`
    with fixed draws. `fit` calls this function at its end.

    Layers with frozen statistics (`bayesianize(..., batch_statistics=)`) keep their statistics. For bfloat16, call this function
    inside a `torch.autocast` context, as for predictions.

    Args:
        model: The network.
        loader: Training data in any form that `fit` accepts.
        num_draws: Number K of stored draws. Predictions with more than K draws use the layers' running averages.
        max_examples: Number of examples for the statistics of a draw, taken from all parts of the loader; `None` for
            all examples.
        seed: Seed of the draws.
        read_batch: Function that converts an item of the loader to inputs and targets.

    Raises:
        ValueError: If no layer of the network has statistics that vary between draws, or if the loader yields nothing.
    """
    layers = following_layers(model)
    if not layers:
        raise ValueError(
            "keep_draws: no layer of this network has batch statistics that vary between draws, so no draws need to be kept; "
            "leave out the call"
        )
    check_repeatable(loader)
    draws = model.draw(num_draws, generator=torch.Generator().manual_seed(seed))
    own = statistics_of(draws.runner, draws.weights, layers, batches_all_over(loader, max_examples, read_batch))
    values = {name: torch.stack([part[name] for part in own]) for name in own[0]}
    model.kept_statistics = KeptStatistics.of(seed, values, model.network, model.posteriors, model.prior)


def keep_trained_draws(
    model: BayesianNetwork, loader: Iterable[Any], trained: int, seed: int, read_batch: BatchReader | None
) -> None:
    """Keep draws at the end of `fit`, if at least `MIN_DRAWS` of them fit into `MAX_WEIGHT_BYTES`.

    The statistics of 32 draws cost about a tenth of training on `trained` examples: an example costs about three forward passes in
    training, and 32 forward passes in the statistics.
    """
    model.kept_statistics = None
    dtype = next(model.network.parameters(), next(model.parameters())).dtype
    size = dtype.itemsize * sum(weight.numel for weight in model.weights.values())
    num_draws = min(DEFAULT_NUM_DRAWS, MAX_WEIGHT_BYTES // max(1, size))
    if num_draws < MIN_DRAWS:
        return
    torch.manual_seed(seed)
    count = min(MAX_EXAMPLES, max(MIN_EXAMPLES, trained // 100))
    try:
        with loader_generators_kept(loader), seeded_globals(seed):
            keep_draws(model, loader, num_draws, max_examples=count, seed=seed, read_batch=read_batch)
    except (MemoryError, torch.cuda.OutOfMemoryError) as error:
        warnings.warn(
            f"fit: draws cannot have their own batch statistics ({error}); so predictions use batch statistics averaged over "
            "draws, which are less accurate; free memory, and call bayesify.keep_draws with fewer draws",
            stacklevel=2,
        )


def following_layers(model: nn.Module) -> tuple[str, ...]:
    """Names of layers whose running statistics average over different draws in training.

    If the network is in training mode, only layers in training mode count, because the network's own `train` may leave
    some layers in evaluation mode.
    """
    if not isinstance(model, BayesianNetwork) or model.num_distinct_draws is not None:
        return ()
    layers = tracking_layers(model.network).items()
    collecting = (path for path, layer in layers if layer.training or not model.training)
    return tuple(path for path in collecting if path not in model.frozen_statistics)


@torch.no_grad()
def statistics_of(
    runner: Runner, weights: Mapping[str, Tensor], layers: Collection[str], batches: Iterable[Batch]
) -> list[dict[str, Tensor]]:
    """For each draw, the buffers of the normalization layers, by name: mean and variance of the layers' inputs over the batches.

    The normalization layers in `layers` are in training mode, and all other modules are in evaluation mode. Batches are weighted
    by their size, so the means are means over the dataset. The variances are averages of the batches' variances. Raises
    `ValueError` if there is no batch.
    """
    with runner.evaluating().alone() as alone:
        found = {path: layer for path, layer in tracking_layers(alone.network).items() if path in layers}
        own = {
            name: value for name, value in running_statistics(alone.network).items() if name.rpartition(".")[0] in found
        }
        drawn = [(draw, {name: value.clone() for name, value in own.items()}) for draw in each(weights)]
        with _collecting(alone.network, found.values()):
            for batch in pooling(found.values(), batches):
                args, kwargs = as_inputs(batch.to(next(iter(weights.values())).device).x)
                for draw, buffers in drawn:
                    alone.call({**draw, **buffers}, args, kwargs)
    return [buffers for _, buffers in drawn]


@torch.no_grad()
def refresh_statistics(
    model: Trainable, batches: Iterable[Batch], *, num_data: int, generator: torch.Generator | None = None
) -> None:
    """For the current model, recompute in place the running statistics of all layers in training mode.

    Each batch runs through a fresh draw, and each member of an ensemble sees all batches. BatchNorm layers are in
    training mode, and all other modules are in evaluation mode. Batches are weighted by their size. If no layer needs
    statistics, the batches are not read. Raises `ValueError` if there are no batches.
    """
    module = model.module
    layers = [layer for layer in tracking_layers(module).values() if layer.training]
    if not layers:
        return
    counts = [part.num_distinct_draws or 1 for part in module.posteriors] if isinstance(module, BayesianNetwork) else []
    with _collecting(module, layers):
        for batch in pooling(layers, batches):
            model.terms(
                batch, phase="variational", num_data=num_data, num_draws=max(counts, default=1), generator=generator
            )


@contextmanager
def _collecting(network: nn.Module, layers: Collection[_NormBase]) -> Iterator[None]:
    """Context in which only the given layers are in training mode. Modes and momenta are restored at the end."""
    with modes_kept(network.modules()), assigned(layers, "momentum", None):
        for part in network.modules():
            part.training = part in layers
        yield
