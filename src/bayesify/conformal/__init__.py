"""Conformal prediction: intervals and sets with guaranteed coverage, for any predictor."""

from bayesify.conformal.intervals import CrossIntervals, Intervals
from bayesify.conformal.predictor import Conformal
from bayesify.conformal.sets import Sets, credible_sets
from bayesify.conformal.thresholds import enough_rows, threshold

__all__ = ["Conformal", "CrossIntervals", "Intervals", "Sets", "credible_sets", "enough_rows", "threshold"]
