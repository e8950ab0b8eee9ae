"""Inducing weights (Ritter et al. 2021)."""

from bayesify.posteriors.inducing_weights.posterior import InducingWeights

__all__ = ["InducingWeights"]
