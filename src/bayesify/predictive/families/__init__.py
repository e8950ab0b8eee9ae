"""Distributions of one number, of which predictions of numbers are mixtures."""

from bayesify.predictive.families.base import Family

__all__ = ["Family"]
