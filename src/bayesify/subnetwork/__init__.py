"""Public path of `bayesify.laplace.subnetwork`, which selects the weights of a trained network that get a posterior."""

from bayesify.laplace.subnetwork import *  # noqa: F403
from bayesify.laplace.subnetwork import __all__ as __all__
