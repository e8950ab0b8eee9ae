"""Scores of a network on a validation loader, added up batch by batch."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from bayesify.likelihoods import Likelihood
from bayesify.predictive.base import Outputs, Predictive
from bayesify.predictive.classification import ClassificationPredictive
from bayesify.predictive.regression import RegressionPredictive, match_targets
from bayesify.predictor import Batch, Predictor, Trainable
from bayesify.running.inputs_and_outputs import as_inputs, select_output
from bayesify.training.batches import BatchReader, parse_batch
from bayesify.training.rules import Score

MAX_GUESSED_EXAMPLES = 4096
"""Examples whose targets are kept to tell how well a constant guess does."""


def validated(model: Trainable, owner: str = "fit") -> Predictor:
    """What predicts for a model in training: itself, or its module.

    Raises:
        TypeError: If neither does.
    """
    for part in (model, model.module):
        if isinstance(part, Predictor):
            return part
    remedy = "leave validation out" if owner == "fit" else "give the predictor that the training made"
    raise TypeError(f"{owner}: {type(model).__name__} does not predict while it trains; {remedy}")


def predict_plain(network: nn.Module, x: Any, likelihood: Likelihood, output: str | int | None) -> Predictive:
    """The prediction of a plain network, as one draw."""
    args, kwargs = as_inputs(x)
    outputs = select_output(network(*args, **kwargs), output)
    return likelihood.predictive(Outputs(kept=outputs.unsqueeze(0)))


class Totals:
    """Scores of predictions, added up batch by batch and weighted by example weights."""

    def __init__(self) -> None:
        self.nll = self.score_sum = self.total = 0.0
        self.name = "accuracy"
        self.count = 0
        self._targets: list[Tensor] = []

    def add(self, prediction: Predictive, batch: Batch) -> None:
        """Add the scores of a batch's prediction."""
        weights = batch.weights if batch.weights is not None else torch.ones(len(batch), device=batch.y.device)
        self.nll -= float((weights * prediction.log_prob(batch.y)).sum())
        if isinstance(prediction, RegressionPredictive):
            self.name = "rmse"
            errors = (match_targets(batch.y, prediction.mean) - prediction.mean).square()
            self.score_sum += float((weights * _per_example(errors)).sum())
        elif isinstance(prediction, ClassificationPredictive):
            right = (prediction.labels == batch.y.reshape(prediction.labels.shape)).to(weights)
            self.score_sum += float((weights * _per_example(right)).sum())
        self.total += float(weights.sum())
        self.count += len(batch)
        if self.count <= MAX_GUESSED_EXAMPLES:
            self._targets.append(batch.y.detach())

    def means(self) -> dict[str, float]:
        """NLL per example, and accuracy or root mean squared error."""
        mean = self.score_sum / self.total
        return {"nll": self.nll / self.total, self.name: mean**0.5 if self.name == "rmse" else mean}

    def score(self) -> Score:
        """The same for the rules of `fit`."""
        means = self.means()
        return Score(means["nll"], means.get("accuracy"), self.count, means.get("rmse"), self._guess())

    def _guess(self) -> float | None:
        """What the best constant guess scores: the labels' entropy in nats an example, or the RMSE of the targets' mean."""
        if not self._targets:
            return None
        targets = torch.cat(self._targets)
        if self.name == "rmse":
            return float((targets.double() - targets.double().mean(0)).square().mean().sqrt())
        if targets.is_floating_point():
            return None
        shares = targets.flatten().unique(return_counts=True)[1].double() / targets.numel()
        return -float((shares * shares.log()).sum()) * targets.numel() / len(targets)


@torch.no_grad()
def validate(
    predict: Callable[[Any], Predictive], loader: Iterable[Any], device: torch.device, reader: BatchReader | None = None
) -> Totals:
    """Scores of predictions for the batches of a validation loader, weighted by example weights.

    Raises:
        ValueError: If there are no batches, or one is not valid.
    """
    totals = Totals()
    for index, item in enumerate(loader):
        try:
            batch = parse_batch(item, reader).to(device)
            totals.add(predict(batch.x), batch)
        except (ValueError, TypeError) as error:
            raise type(error)(f"fit: validation batch {index + 1}: {error}") from error
    if totals.total == 0:
        raise ValueError("fit: the validation loader yields no examples; give one with data, or leave it out")
    return totals


def _per_example(values: Tensor) -> Tensor:
    return values.flatten(1).mean(1) if values.ndim > 1 else values
