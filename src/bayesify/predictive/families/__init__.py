"""Distributions of one number. Regression predictions are mixtures of these distributions."""

from bayesify.predictive.families.base import Family

__all__ = ["Family"]
