"""Conformal prediction: intervals and sets that hold the truth as often as they say, over anything that predicts."""

from bayesify.conformal.cross import CrossIntervals
from bayesify.conformal.intervals import Intervals
from bayesify.conformal.predictor import Conformal
from bayesify.conformal.sets import Sets, credible_sets
from bayesify.conformal.thresholds import enough_rows, threshold

__all__ = ["Conformal", "CrossIntervals", "Intervals", "Sets", "credible_sets", "enough_rows", "threshold"]
