"""Derivatives of a network's outputs with respect to chosen weights, example by example."""

from bayesify.jacobians.features import Features
from bayesify.jacobians.linearization import FeatureCost, Gradients, Jacobians, Linearization, check_deterministic

__all__ = ["FeatureCost", "Features", "Gradients", "Jacobians", "Linearization", "check_deterministic"]
