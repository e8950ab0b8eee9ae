"""Predictions: mixtures over draws, from which means, spreads, probabilities and scores are computed."""

from bayesify.predictive.base import Outputs, Predictive
from bayesify.predictive.classification import ClassificationPredictive
from bayesify.predictive.regression import RegressionPredictive
from bayesify.predictive.transformed import TargetTransform, TransformedPredictive

__all__ = [
    "ClassificationPredictive",
    "Outputs",
    "Predictive",
    "RegressionPredictive",
    "TargetTransform",
    "TransformedPredictive",
]
