"""Which weights a network has, who takes them, and weights with a structure of their own."""

from bayesify.weights.catalog import Layer, Weight, count_parameters

__all__ = ["Layer", "Weight", "count_parameters"]
