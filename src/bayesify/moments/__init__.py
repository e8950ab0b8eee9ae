"""Means and variances of a network's outputs in one pass, for posteriors of independent Gaussians."""

from bayesify.moments.prediction import predict_moments
from bayesify.moments.tensors import NoRule

__all__ = ["NoRule", "predict_moments"]
