"""Derivatives of a network's outputs by chosen weights, example by example."""

from bayesify.jacobians.linearization import Gradients, Jacobians, Linearization, check_deterministic

__all__ = ["Gradients", "Jacobians", "Linearization", "check_deterministic"]
