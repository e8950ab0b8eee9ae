"""Scores of a network on a validation loader, accumulated batch by batch."""

import math
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

LEVEL, HALF_WIDTH_STDS = 0.9, 1.6449
"""Level of the intervals whose coverage is checked, and their half-width in standard deviations of a Gaussian."""
MAX_LEVERAGE = 0.95
"""Upper bound on the leverage in the correction for training rows."""
MAX_GUESSED_EXAMPLES = 4096
"""Maximum number of examples for which the target (to score a constant guess) and the scores are stored."""


def validated(model: Trainable, owner: str = "fit") -> Predictor:
    """The predictor of a model in training: the model itself or its module. Raises `TypeError` if neither is one."""
    for part in (model, model.module):
        if isinstance(part, Predictor):
            return part
    remedy = "leave out validation=" if owner == "fit" else "give the predictor that training produced"
    raise TypeError(f"{owner}: {type(model).__name__} does not predict while it trains; {remedy}")


def predict_plain(network: nn.Module, x: Any, likelihood: Likelihood, output: str | int | None) -> Predictive:
    """Prediction of a plain network, as a single draw."""
    args, kwargs = as_inputs(x)
    outputs = select_output(network(*args, **kwargs), output)
    return likelihood.predictive(Outputs(kept=outputs.unsqueeze(0)))


class Totals:
    r"""Scores of predictions, accumulated batch by batch and weighted by example weights.

    If `seen` is true, the model was trained on the examples, so their residuals are smaller than those of new rows. In a linear
    model, the residual of a training row with leverage h is $1 - h$ times its residual as a new row. The leverage is
    $h = v / \sigma^2$, where v is the epistemic variance and $\sigma^2$ the noise. For training rows, coverage is therefore
    computed for the residual $r / (1 - h)$ with the variance $\sigma^2 + v / (1 - h)$. The factor on the residual is at least the
    square root of `ratio`. `ratio` is the mean squared error on new rows divided by the mean squared error on training rows.
    """

    def __init__(self, seen: bool = False, ratio: float = 1.0) -> None:
        self.nll = self.score_sum = self.total = self.covered = 0.0
        self.has_atoms, self._seen, self._stretch = False, seen, math.sqrt(ratio)
        self.name = "accuracy"
        self.count = 0
        self._targets: list[Tensor] = []
        self._rows: list[Tensor] = []  # NLL, error and, for classes, confidence of each example, [2, B] or [3, B]

    def add(self, prediction: Predictive, batch: Batch) -> None:
        """Add the scores of a batch's prediction."""
        weights = batch.weights if batch.weights is not None else torch.ones(len(batch), device=batch.y.device)
        log_prob = prediction.log_prob(batch.y)
        self.nll -= float((weights * log_prob).sum())
        errors, known = torch.zeros_like(log_prob), []
        if isinstance(prediction, RegressionPredictive):
            self.name = "rmse"
            y = match_targets(batch.y, prediction.mean)
            errors = _per_example((y - prediction.mean).square())
            self.score_sum += float((weights * errors).sum())
            self.covered += float((weights * _per_example(self._holds(prediction, y).to(weights))).sum())
        elif isinstance(prediction, ClassificationPredictive):
            errors = _per_example((prediction.labels != batch.y.reshape(prediction.labels.shape)).to(weights))
            self.score_sum += float((weights * (1 - errors)).sum())
            known = [_per_example(prediction.confidence)]
        self.total += float(weights.sum())
        self.count += len(batch)
        if self.count <= MAX_GUESSED_EXAMPLES:
            self._targets.append(batch.y.detach())
            rows = [part.to(log_prob) for part in (-log_prob, errors, *known)]
            self._rows.append(torch.stack(rows).detach().double().cpu())

    def _holds(self, prediction: RegressionPredictive, y: Tensor) -> Tensor:
        """Whether the central 90 % intervals cover the targets."""
        below, up_to = prediction.below(y), prediction.cdf(y)
        self.has_atoms |= bool((below != up_to).any())
        if not self._seen or self.has_atoms:
            return torch.maximum(1 - 2 * up_to, 2 * below - 1) <= LEVEL
        noise, spread = prediction.aleatoric, prediction.epistemic
        rest = 1 - (spread / noise).clamp(max=MAX_LEVERAGE)
        stretch = (1 / rest).clamp_min(self._stretch)
        return stretch * (y - prediction.mean).abs() <= HALF_WIDTH_STDS * (noise + spread / rest).sqrt()

    def means(self) -> dict[str, float]:
        """The NLL per example and, for classes, the accuracy; for numbers, the RMSE and the coverage of 90 % intervals."""
        mean = self.score_sum / self.total
        if self.name == "accuracy":
            return {"nll": self.nll / self.total, "accuracy": mean}
        return {"nll": self.nll / self.total, "rmse": mean**0.5, "coverage_90": self.covered / self.total}

    def score(self) -> Score:
        """The scores of `means`, as a `Score` for the rules of `fit`."""
        means = self.means()
        coverage = means.get("coverage_90")
        rmse, numbers = means.get("rmse"), self._targets[0][0].numel() if self._targets else 1
        own = map(tuple, torch.cat(self._rows, 1).tolist() if self._rows else ())
        known: dict[str, Any] = {"coverage": coverage, "has_atoms": self.has_atoms, "numbers": numbers}
        known |= zip(("losses", "errors", "confidences"), own, strict=False)
        return Score(means["nll"], means.get("accuracy"), self.count, rmse, self._guess(), **known)

    def _guess(self) -> float | None:
        """Score of the best constant guess: the entropy of the labels in nats, or the RMSE of the targets' mean."""
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
    """Weighted scores of predictions for a validation loader. Raises `ValueError` if there is no batch or an invalid one."""
    totals = Totals()
    for index, item in enumerate(loader):
        try:
            batch = parse_batch(item, reader).to(device)
            totals.add(predict(batch.x), batch)
        except (ValueError, TypeError) as error:
            raise type(error)(f"fit: validation batch {index + 1}: {error}") from error
    if totals.total == 0:
        raise ValueError(
            "fit: the validation loader yields no examples; give a loader with data, or leave validation= out"
        )
    return totals


def _per_example(values: Tensor) -> Tensor:
    return values.flatten(1).mean(1) if values.ndim > 1 else values
