"""The weights of a network, their selection by posteriors, and structured weights."""

from bayesify.weights.catalog import Layer, Weight, count_parameters

__all__ = ["Layer", "Weight", "count_parameters"]
