"""Running statistics of BatchNorm layers for weights that were never trained as they are, such as draws."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from bayesify.running.inputs_and_outputs import as_inputs, count_draws, each
from bayesify.running.runner import Runner
from bayesify.training.batches import BatchReader, check_repeatable, parse_batch
from bayesify.weights.batch_statistics import pooling, running_statistics, tracking_layers


@torch.no_grad()
def refresh_statistics(
    runner: Runner, weights: Mapping[str, Tensor], loader: Iterable[Any], read_batch: BatchReader | None = None
) -> list[dict[str, Tensor]]:
    """Mean and variance of every BatchNorm layer's inputs over a dataset, for each draw: buffers by name.

    One pass over the loader per draw, BatchNorm layers in training mode and everything else in evaluation mode. Batches
    count by their size, so that the means are those of the dataset and the variances the batches' mean ones.

    Raises:
        ValueError: If the loader yields nothing.
    """
    check_repeatable(loader)
    found = []
    with runner.evaluating().alone() as alone:
        layers = tracking_layers(alone.network)
        for layer in layers.values():
            layer.training = True
        for draw in each(weights):
            own = {name: buffer.clone() for name, buffer in running_statistics(alone.network).items()}
            for batch in pooling(layers.values(), (parse_batch(item, read_batch) for item in loader)):
                args, kwargs = as_inputs(batch.to(next(iter(draw.values())).device).x)
                alone.call({**draw, **own}, args, kwargs)
            found.append(own)
    assert len(found) == count_draws(weights)
    return found
