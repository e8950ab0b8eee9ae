"""Running statistics of BatchNorm layers for weights that were never trained as they are, such as draws."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sized
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, SequentialSampler

from bayesify.arguments.checks import Count, Seed, checked
from bayesify.network import BayesianNetwork
from bayesify.predictor import DEFAULT_NUM_DRAWS, Batch, Trainable
from bayesify.running.inputs_and_outputs import as_inputs, each
from bayesify.running.runner import Runner
from bayesify.training.batches import BatchReader, check_repeatable, parse_batch
from bayesify.weights.batch_statistics import KeptStatistics, pooling, running_statistics, tracking_layers

MAX_EXAMPLES = 2048
"""Examples that the statistics of a draw are computed from by default. Above 1,024, more examples changed an NLL by less than
0.002 (MLP with BatchNorm1d, Fashion-MNIST)."""

MIN_EXAMPLES = 512
"""Examples that `fit` takes however short the training is. With 256 the NLL of the same MLP was 0.007 to 0.012 worse than with
2,048, with 512 at most 0.0025."""


MAX_WEIGHT_BYTES, MIN_DRAWS = 2 * 2**30, 8
"""Memory that `fit` takes at its end for the weights of all kept draws, and the fewest draws that it keeps."""


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
    """Keep a set of draws, each with BatchNorm statistics of its own weights, and use them in predictions; in place.

    In training each draw is normalized by its own batch. The running averages mix the batches of all draws and suit none of them.
    Here each of K draws runs over training data once, and its BatchNorm layers keep the means and variances of what they see. The
    model keeps the seed of the draws and these statistics, not the weights. `predict`, `prediction_draws`, `save`, adapters and
    `export_onnx` with fixed draws use them as long as no parameter changes, and ignore them afterwards. `fit` calls this function
    at its end.

    Layers that train with frozen statistics (`bayesianize(..., batch_statistics=)`) keep theirs. For bfloat16, call it under
    `torch.autocast`, as for predictions.

    Args:
        model: The network.
        loader: Training data, as `fit` takes it.
        num_draws: K; more draws than that fall back to running averages.
        max_examples: Examples for the statistics of a draw, from batches all over the loader; `None` for all.
        seed: Seed of the draws.
        read_batch: A function from what the loader yields to inputs and targets.

    Raises:
        ValueError: If the network has no statistics that follow draws, or the loader yields nothing.
    """
    layers = following_layers(model)
    if not layers:
        raise ValueError(
            "keep_draws: no layer of this network collects statistics over draws that differ; nothing is to be refreshed, "
            "leave the call out"
        )
    check_repeatable(loader)
    draws = model.draw(num_draws, generator=torch.Generator().manual_seed(seed))
    batches = (parse_batch(item, read_batch) for item in _all_over(loader, max_examples, read_batch))
    own = statistics_of(draws.runner, draws.weights, layers, batches)
    values = {name: torch.stack([part[name] for part in own]) for name in own[0]}
    model.kept_statistics = KeptStatistics.of(seed, values, model.network, model.posteriors, model.prior)


def num_examples_within(trained: int) -> int:
    """Examples for the statistics of 32 draws that cost about a tenth of a training, from the examples of all its epochs.

    A step costs three forward passes, so that is 0.3 / 32 of them, between `MIN_EXAMPLES` and `MAX_EXAMPLES`.
    """
    return min(MAX_EXAMPLES, max(MIN_EXAMPLES, trained // 100))


def num_draws_within(model: BayesianNetwork) -> int:
    """Draws that `fit` keeps: those whose weights fit into `MAX_WEIGHT_BYTES` together, and none where these are too few."""
    dtype = next(model.network.parameters(), next(model.parameters())).dtype
    size = dtype.itemsize * sum(weight.numel for weight in model.weights.values())
    count = min(DEFAULT_NUM_DRAWS, MAX_WEIGHT_BYTES // max(1, size))
    return count if count >= MIN_DRAWS else 0


def following_layers(model: nn.Module) -> tuple[str, ...]:
    """Names of the layers of a network whose running statistics are averages over draws that differ, once it trains.

    Of a network in training mode these are layers in training mode: its own `train` may leave some out.
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
    """Mean and variance of the inputs of normalization layers over batches, for each draw: buffers by name.

    The layers are in training mode and everything else is in evaluation mode. Batches count by their size, so that the means
    are those of the dataset and the variances the batches' mean ones.

    Raises:
        ValueError: If there is no batch.
    """
    with runner.evaluating().alone() as alone:
        found = {path: layer for path, layer in tracking_layers(alone.network).items() if path in layers}
        own = {name: value for name, value in running_statistics(alone.network).items() if _owner(name) in found}
        drawn = [(draw, {name: value.clone() for name, value in own.items()}) for draw in each(weights)]
        momenta = [layer.momentum for layer in found.values()]
        for layer in found.values():
            layer.training = True
        try:
            for batch in pooling(found.values(), batches):
                args, kwargs = as_inputs(batch.to(next(iter(weights.values())).device).x)
                for draw, buffers in drawn:
                    alone.call({**draw, **buffers}, args, kwargs)
        finally:
            for layer, momentum in zip(found.values(), momenta, strict=True):
                layer.training, layer.momentum = False, momentum
    return [buffers for _, buffers in drawn]


@torch.no_grad()
def refresh_statistics(
    model: Trainable, batches: Iterable[Batch], *, num_data: int, generator: torch.Generator | None = None
) -> None:
    """Set the running statistics of layers that train to those of the model as it is now, in place.

    Each batch runs through a fresh draw, and each member of an ensemble sees all batches. BatchNorm layers are in training mode
    and everything else is in evaluation mode. Batches count by their size.

    Args:
        model: What is trained, in training mode.
        batches: The training data on the model's device; not looked at if no layer has statistics that train.
        num_data: N, for the terms of the objective.
        generator: Source of draws.

    Raises:
        ValueError: If there are no batches.
    """
    module = model.module
    layers = [layer for layer in tracking_layers(module).values() if layer.training]
    if not layers:
        return
    counts = [part.num_distinct_draws or 1 for part in module.posteriors] if isinstance(module, BayesianNetwork) else []
    modes = [(part, part.training) for part in module.modules()]
    momenta = [layer.momentum for layer in layers]
    try:
        for part, _ in modes:
            part.training = part in layers
        for batch in pooling(layers, batches):
            model.terms(
                batch, phase="variational", num_data=num_data, num_draws=max(counts, default=1), generator=generator
            )
    finally:
        for part, mode in modes:
            part.training = mode
        for layer, momentum in zip(layers, momenta, strict=True):
            layer.momentum = momentum


def _owner(name: str) -> str:
    return name.rpartition(".")[0]


def _all_over(loader: Iterable[Any], max_examples: int | None, read_batch: BatchReader | None) -> Iterator[Any]:
    """Items of a loader until they hold enough examples.

    They lie at equal distances unless the loader shuffles, because rows may be sorted.
    """
    shuffled = isinstance(loader, DataLoader) and not isinstance(loader.sampler, SequentialSampler)
    seen, step = 0, 1
    for index, item in enumerate(loader):
        if index % step:
            continue
        yield item
        seen += len(parse_batch(item, read_batch))
        if max_examples is not None and seen >= max_examples:
            return
        if index == 0 and max_examples is not None and isinstance(loader, Sized) and not shuffled:
            step = max(1, len(loader) * seen // max_examples)
