"""The linearized Laplace approximation over all weights or a subnetwork."""

from bayesify.laplace.laplace import Laplace

__all__ = ["Laplace"]
