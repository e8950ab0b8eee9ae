"""Scores of a prediction against the targets."""

import torch
from torch import Tensor

from bayesify.arguments.checks import checked
from bayesify.metrics.calibration import match_labels, match_values, reliability
from bayesify.predictive import ClassificationPredictive, Predictive, RegressionPredictive

COVERAGE_LEVELS = (0.5, 0.9, 0.95)
"""Levels of the central intervals whose coverage is reported."""
ECE_BINS = 15
"""Number of bins of the expected calibration error, as in Guo et al. 2017."""


@checked
def evaluate(predictive: Predictive, y: Tensor) -> dict[str, float]:
    r"""Score a prediction.

    Regression:

    - `nll`: $-\log p(y)$ of an example in nats (the sum over its outputs), averaged over examples.
    - `nll_per_element`: `nll` divided by the number of targets of an example. It is reported if an example has several
      targets (outputs, positions, pixels).
    - `rmse`: root of the mean squared error of the predictive mean, over examples and outputs.
    - `crps`: mean continuous ranked probability score in y's unit; see `RegressionPredictive.crps`.
    - `coverage_50`, `coverage_90`, `coverage_95`: share of targets in the central interval of that level. For a calibrated
      prediction, the shares are 0.5, 0.9 and 0.95. The shares can be larger if the prediction has atoms, that is, single values
      with positive probability, such as counts or floors.

    Classification (each binary output counts as two classes):

    - `accuracy`: share of predictions whose most probable class is the label.
    - `nll`: as for regression.
    - `ece`: expected calibration error of the most probable class with 15 bins of equal width; see `reliability`.
    - `brier`: mean over predictions of $\sum_c (p_c - [y = c])^2$, between 0 and 2 (Brier 1950). For a binary output, the Brier
      score is twice the squared error of the probability of the positive class.

    Args:
        predictive: The result of `predict`.
        y: Targets, one row per example.

    Returns:
        The scores by name.

    Raises:
        ValueError: If the targets do not fit the prediction, are not finite, or are not class indices.
    """
    if isinstance(predictive, RegressionPredictive):
        return _evaluate_regression(predictive, match_values(predictive, y))
    if isinstance(predictive, ClassificationPredictive):
        return _evaluate_classification(predictive, match_labels(predictive, y))
    raise TypeError(f"evaluate: {type(predictive).__name__} is not a prediction; pass the result of predict(x)")


def _nll(predictive: Predictive, y: Tensor) -> dict[str, float]:
    nll = float(-predictive.log_prob(y).mean())
    return {"nll": nll} | ({"nll_per_element": nll / y[0].numel()} if y[0].numel() > 1 else {})


def _evaluate_regression(predictive: RegressionPredictive, y: Tensor) -> dict[str, float]:
    centrality = predictive.centrality(y)
    covered = {f"coverage_{100 * level:.0f}": (centrality <= level).double().mean() for level in COVERAGE_LEVELS}
    rmse, crps = (y - predictive.mean).square().mean().sqrt(), predictive.crps(y).mean()
    scores = {**_nll(predictive, y), "rmse": rmse, "crps": crps, **covered}
    return {name: float(score) for name, score in scores.items()}


def _evaluate_classification(predictive: ClassificationPredictive, y: Tensor) -> dict[str, float]:
    return {
        "accuracy": float((predictive.labels == y).double().mean()),
        **_nll(predictive, y),
        "ece": reliability(predictive, y, ECE_BINS).ece,
        "brier": float(brier(predictive.class_probs, y).mean()),
    }


@checked
def brier(class_probs: Tensor, y: Tensor) -> Tensor:
    r"""Brier score of each prediction, $\sum_c (p_c - [y = c])^2$: [B, ...].

    Args:
        class_probs: Probabilities [B, ..., C], classes last.
        y: Labels [B, ...].

    Raises:
        ValueError: If the labels do not fit the probabilities.
    """
    classes = class_probs.shape[-1]
    if y.shape != class_probs.shape[:-1] or not bool(((y >= 0) & (y < classes)).all()):
        raise ValueError(
            f"metrics.brier: y= has shape {list(y.shape)} and class_probs= has shape {list(class_probs.shape)}; give "
            f"one label from 0 to {classes - 1} for each row"
        )
    target = torch.nn.functional.one_hot(y.long(), class_probs.shape[-1]).to(class_probs)
    return (class_probs - target).square().sum(-1)
