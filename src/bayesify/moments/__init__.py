"""Means and variances of a network's outputs, computed in one pass, for posteriors with independent Gaussian weights."""

from bayesify.moments import attention, linear, pointwise, shapes
from bayesify.moments.prediction import predict_moments
from bayesify.moments.tensors import Moments, NoRule

RULES = (attention, linear, pointwise, shapes)
"""Python modules that register rules for torch functions."""

__all__ = ["Moments", "NoRule", "predict_moments"]
