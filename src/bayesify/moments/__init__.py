"""Means and variances of a network's outputs in one pass, for posteriors of independent Gaussians."""

from bayesify.moments import attention, linear, pointwise, shapes
from bayesify.moments.prediction import predict_moments
from bayesify.moments.tensors import Moments, NoRule

RULES = (attention, linear, pointwise, shapes)
"""Where rules are registered."""

__all__ = ["Moments", "NoRule", "predict_moments"]
