"""Metrics of a prediction: scores, calibration, ranking of examples by uncertainty, and accuracy after rejection of examples."""

from bayesify.metrics.calibration import CalibrationCurve, ReliabilityDiagram, calibration_curve, reliability
from bayesify.metrics.ranking import RejectionCurve, ood, rejection_curve
from bayesify.metrics.scores import brier, evaluate

__all__ = [
    "CalibrationCurve",
    "RejectionCurve",
    "ReliabilityDiagram",
    "brier",
    "calibration_curve",
    "evaluate",
    "ood",
    "rejection_curve",
    "reliability",
]
