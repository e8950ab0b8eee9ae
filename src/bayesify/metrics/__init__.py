"""How good a prediction is: scores, calibration, ranking by uncertainty, rejection.

Scores that torchmetrics has are taken from there, when asked for; `pip install 'bayesify[metrics]'` brings it.
"""

from bayesify.metrics.calibration import CalibrationCurve, ReliabilityDiagram, calibration_curve, reliability
from bayesify.metrics.ranking import ood
from bayesify.metrics.rejection import RejectionCurve, rejection_curve
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
