"""Means and variances of a network's outputs in one pass, for posteriors with independent Gaussian weights."""

from bayesify.moments import attention, linear, pointwise, shapes
from bayesify.moments.prediction import predict_moments
from bayesify.moments.tensors import Moments, NoRule

RULES = (attention, linear, pointwise, shapes)
"""Modules that register rules."""

__all__ = ["Moments", "NoRule", "predict_moments"]
