"""Gaussian processes as linear models of random features, and a Gaussian process with inducing points for comparison."""

from bayesify.random_features.features import RandomFeatureNetwork, RandomFourierFeatures
from bayesify.random_features.inducing_points import InducingPointGP
from bayesify.random_features.process import RandomFeatureGP

__all__ = ["InducingPointGP", "RandomFeatureGP", "RandomFeatureNetwork", "RandomFourierFeatures"]
