"""Targets brought into the shape of a prediction and checked."""

from __future__ import annotations

import torch
from torch import Tensor

from bayesify.predictive.classification import ClassificationPredictive
from bayesify.predictive.regression import RegressionPredictive, match_targets


def _some(y: Tensor) -> Tensor:
    y = torch.as_tensor(y)
    if y.numel() == 0:
        raise ValueError("metrics: no targets; give at least one example")
    return y


def match_values(predictive: RegressionPredictive, y: Tensor) -> Tensor:
    """Targets of a regression in the shape of its means, [B, O].

    Raises:
        ValueError: If they do not fit, are empty or not finite.
    """
    y = _some(y).to(predictive.mean.device)
    if y.is_floating_point() and not bool(torch.isfinite(y).all()):
        raise ValueError("metrics: targets hold NaN or infinity; remove such rows first")
    return match_targets(y, predictive.mean).to(predictive.mean.dtype)


def match_labels(predictive: ClassificationPredictive, y: Tensor) -> Tensor:
    """Labels of a classification in the shape of its predicted labels, [B] or [B, ...].

    Raises:
        ValueError: If they do not fit, are empty, or are no class.
    """
    labels = predictive.labels
    y = _some(y).to(labels.device)
    if y.shape != labels.shape and labels.shape in ((*y.shape, 1), y.shape[:-1]) and y.numel() == labels.numel():
        y = y.reshape(labels.shape)
    if y.shape != labels.shape:
        raise ValueError(
            f"metrics: labels of shape {tuple(y.shape)} do not fit predictions of shape {tuple(labels.shape)}; "
            "give one integer label per prediction"
        )
    classes = predictive.class_probs.shape[-1]
    wrong = (y < 0) | (y >= classes) | (y != y.long())
    if bool(wrong.any()):
        raise ValueError(
            f"metrics: label {y[wrong][0].item()} is none of {classes} classes; "
            f"labels go from 0 to {classes - 1}, leave out examples without a label"
        )
    return y.long()
