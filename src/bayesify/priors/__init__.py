"""Gaussian priors over weights, centered on 0 or on a network, with fixed scales or with scales that have their own posterior."""

from bayesify.priors.base import Prior, PriorDraw, kernel_positions
from bayesify.priors.fixed import AroundNetwork, Gaussian, Neal, Standard
from bayesify.priors.hierarchical import Scale, SpatialInverseWishart

__all__ = [
    "REGISTRY",
    "AroundNetwork",
    "Gaussian",
    "Neal",
    "Prior",
    "PriorDraw",
    "Scale",
    "SpatialInverseWishart",
    "Standard",
    "kernel_positions",
]

REGISTRY: dict[str, type[Prior]] = {
    kind.name: kind for kind in (Gaussian, Standard, Neal, AroundNetwork, Scale, SpatialInverseWishart)
}
"""Priors by the name that configuration files use."""
