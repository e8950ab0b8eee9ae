"""The linearized Laplace approximation over all weights or a subnetwork."""

from bayesify.laplace.laplace import Laplace
from bayesify.laplace.sampled import Sampled

__all__ = ["Laplace", "Sampled"]
