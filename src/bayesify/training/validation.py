"""Scores of a network on a validation loader, added up batch by batch."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from bayesify.predictive.classification import ClassificationPredictive
from bayesify.predictive.regression import RegressionPredictive, match_targets
from bayesify.predictor import Predictor, Trainable
from bayesify.training.batches import BatchReader, parse_batch


def validated(model: Trainable) -> Predictor:
    """What predicts for a model in training: itself, or its module.

    Raises:
        TypeError: If neither does.
    """
    for part in (model, model.module):
        if isinstance(part, Predictor):
            return part
    raise TypeError(f"fit: {type(model).__name__} does not predict while it trains; leave validation out")


@torch.no_grad()
def validate(
    model: Predictor,
    loader: Iterable[Any],
    num_draws: int,
    device: torch.device,
    generator: torch.Generator,
    reader: BatchReader | None = None,
) -> dict[str, float]:
    """Mean negative log predictive density per example, and accuracy or root mean squared error; weighted by example weights.

    Args:
        model: What predicts.
        loader: Validation batches.
        num_draws: Draws per batch.
        device: Where batches go.
        generator: Source of randomness.
        reader: See `parse_batch`.

    Raises:
        ValueError: If there are no batches, or one is not valid.
    """
    nll = score = total = 0.0
    name = "accuracy"
    for index, item in enumerate(loader):
        try:
            batch = parse_batch(item, reader).to(device)
            prediction = model.predict(batch.x, num_draws=num_draws, generator=generator)
            weights = batch.weights if batch.weights is not None else torch.ones(len(batch), device=device)
            nll -= float((weights * prediction.log_prob(batch.y)).sum())
            if isinstance(prediction, RegressionPredictive):
                name = "rmse"
                errors = (match_targets(batch.y, prediction.mean) - prediction.mean).square()
                score += float((weights * _per_example(errors)).sum())
            elif isinstance(prediction, ClassificationPredictive):
                right = (prediction.labels == batch.y.reshape(prediction.labels.shape)).to(weights)
                score += float((weights * _per_example(right)).sum())
            total += float(weights.sum())
        except (ValueError, TypeError) as error:
            raise type(error)(f"fit: validation batch {index + 1}: {error}") from error
    if total == 0:
        raise ValueError("fit: the validation loader yields no examples; give one with data, or leave it out")
    return {"nll": nll / total, name: (score / total) ** 0.5 if name == "rmse" else score / total}


def _per_example(values: Tensor) -> Tensor:
    return values.flatten(1).mean(1) if values.ndim > 1 else values
