"""Targets, checked and reshaped to match a prediction."""

from __future__ import annotations

import torch
from torch import Tensor

from bayesify.predictive.classification import ClassificationPredictive
from bayesify.predictive.regression import RegressionPredictive, match_targets


def match_values(predictive: RegressionPredictive, y: Tensor) -> Tensor:
    """Targets of a regression, reshaped to the shape of the predictive mean, [B, O].

    Raises:
        ValueError: If the targets do not fit the prediction, are empty, or are not finite.
    """
    return match_targets(_some(y).to(predictive.mean.device), predictive.mean).to(predictive.mean.dtype)


def match_labels(predictive: ClassificationPredictive, y: Tensor) -> Tensor:
    """Labels of a classification, reshaped to the shape of the predicted labels, [B] or [B, ...].

    Raises:
        ValueError: If the labels do not fit the prediction, are empty, or are not class indices. Leave out examples without a
            label.
    """
    return predictive.match_labels(_some(y).to(predictive.labels.device))


def _some(y: Tensor) -> Tensor:
    y = torch.as_tensor(y)
    if y.numel() == 0:
        raise ValueError("metrics: there are no targets; give at least one example")
    return y
