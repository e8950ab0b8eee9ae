"""Distributions of one number. Regression predictions are mixtures of them."""

from bayesify.predictive.families.base import Family

__all__ = ["Family"]
