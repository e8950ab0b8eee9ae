"""`check`: the findings of `fit` for any predictor and any training loop."""

import copy
from collections.abc import Iterable, Sequence
from statistics import fmean
from typing import Any

import torch
from torch import nn

from bayesify.arguments.checks import Count, DataCount, NonNegative, Seed, checked
from bayesify.network import BayesianNetwork
from bayesify.predictive.base import Predictive
from bayesify.predictive.classification import ClassificationPredictive
from bayesify.predictive.findings import Finding, Findings, joined
from bayesify.predictive.regression import RegressionPredictive
from bayesify.predictor import Batch, Predictor, Trainable
from bayesify.training import rules
from bayesify.training.batches import BatchReader, count_examples, first_batches
from bayesify.training.validation import Totals, predict_plain, validated
from bayesify.training.watch import MAX_WINDOWS, member_nll, weight_spread


@torch.no_grad()
@checked
def check(
    model: Predictor | Trainable,
    loader: Iterable[Any],
    *,
    start: nn.Module | Predictor | None = None,
    losses: Sequence[float] | None = None,
    held_out: bool = False,
    num_data: DataCount | None = None,
    kl_weight: NonNegative = 1.0,
    num_draws: Count | None = None,
    num_examples: Count = 2048,
    seed: Seed = 0,
    read_batch: BatchReader | None = None,
) -> Findings:
    """Find problems of a trained model, each with a remedy. After your own training loop, this function reports the findings that
    `fit` would report.

    These problems are always looked for: draws that agree (no uncertainty), ensemble members that lag behind,
    predictions that are no better than a constant guess, probabilities passed as logits, class labels passed as
    numbers, and a search that ended at the edge of its range. With `start=`, two more problems are looked for:
    predictions that are worse than those of the starting network, and a KL that dwarfs the data term. With `losses=`,
    the function also looks for losses that are still falling.

    Args:
        model: A `BayesianNetwork`, `Laplace`, `SWAG` or another `Predictor`, or a `Trainable` over a predictor.
        loader: Batches of training or held-out data, as for `fit`.
        start: The network from which training started, or a predictor to compare with.
        losses: Negative objective per example, in nats: one number for each step or epoch of your own loop, in order of time.
        held_out: Whether the loader's data were held out of training. On held-out data, a smaller difference from
            `start` is enough for a finding.
        num_data: Number N of training examples; by default the number of examples in the loader.
        kl_weight: Factor on the KL in training.
        num_draws: Number of draws for predictions; by default the model's own choice.
        num_examples: Maximum number of examples from the loader, in whole batches; at least one batch is used.
        seed: Seed of the draws.
        read_batch: Function that converts an item of the loader to inputs and targets.

    Returns:
        The findings. An empty list prints as "nothing to report".

    Raises:
        ValueError: If the loader yields no examples, or if a batch is not valid.
        TypeError: If the model is not a predictor.
    """
    predictor = validated(model, "check") if isinstance(model, Trainable) else model
    batches = first_batches(loader, num_examples, read_batch)
    if not batches:
        raise ValueError("check: the loader yields no examples; give a loader with data")
    device = next(iter(predictor.state().values())).device
    now, before, information = Totals(seen=not held_out), Totals(), []
    parts: list[list[Finding]] = [list(predictor.findings)]
    for batch in (batch.to(device) for batch in batches):
        generator = torch.Generator(device).manual_seed(seed)
        prediction = predictor.predict(batch.x, num_draws, generator=generator)
        now.add(prediction, batch)
        information.append(_information(prediction) * len(batch))
        if start is not None:
            before.add(_predict(start, batch, predictor, generator), batch)
    score = now.score()
    unit = "mean mutual information in nats" if score.accuracy is not None else "the epistemic share of the variance"
    _, spread = weight_spread(predictor, device)
    if not spread or max(spread.values()) > 0:  # a point estimate has no spread
        parts.append(rules.no_uncertainty(sum(information) / score.count, unit))
    parts += [rules.learned_little(score), rules.coverage_off(score, held_out)]
    parts.append(rules.labels_as_numbers(predictor.likelihood, (batch.y for batch in batches)))
    first = before.score() if start is not None else None
    bnn = model.module if isinstance(model, Trainable) else model
    if isinstance(bnn, BayesianNetwork) and bnn.likelihood is not None:
        generator = torch.Generator(device).manual_seed(seed)
        drawn = bnn.predict(batches[0].to(device).x, 1, generator=generator, keep_outputs=True)
        parts.append(rules.probabilities_as_logits(bnn.likelihood, drawn.outputs[0]))
        parts.append(rules.members_apart(member_nll(bnn, batches, device) or [0.0], unit_nats=score.unit_nats))
        count = count_examples(loader, read_batch) if num_data is None else num_data
        penalty = kl_weight * float(bnn.kl(generator=generator)) / count
        parts.append(rules.kl_dwarfs([score.nll], penalty, first, score))
    if first is not None:
        parts.append(rules.worse_than_start(first, score, held_out))
        parts.append(rules.less_calibrated(first, score) if held_out else [])
    if losses:  # averaged in windows, which bounds the cost
        values, width = [float(value) for value in losses], -(-len(losses) // MAX_WINDOWS)
        windows = [fmean(values[place : place + width]) for place in range(0, len(values) - width + 1, width)]
        parts.append(rules.convergence([], windows))
    return joined(parts)


def _predict(start: nn.Module | Predictor, batch: Batch, like: Predictor, generator: torch.Generator) -> Predictive:
    """Prediction of the starting network. A plain network predicts with the model's likelihood."""
    if isinstance(start, Predictor):
        return start.predict(batch.x, generator=generator)
    if like.likelihood is None:
        raise ValueError(
            "check: the model has no likelihood; give the model a likelihood, or pass start= with a predictor"
        )
    return predict_plain(copy.deepcopy(start).eval(), batch.x, like.likelihood, like.output)


def _information(prediction: Predictive) -> float:
    """Disagreement of draws: the mean mutual information for classes, or the epistemic share of the variance for numbers."""
    if isinstance(prediction, ClassificationPredictive):
        return float(prediction.mutual_information.mean().clamp_min(0))
    if isinstance(prediction, RegressionPredictive):
        return float((prediction.epistemic / prediction.variance).mean())
    return 1.0
