"""Public path of `bayesify.laplace.subnetwork`, which selects the weights of a trained network that get a posterior."""

import sys

from bayesify.laplace.subnetwork import *  # noqa: F403
from bayesify.laplace.subnetwork import __all__ as __all__
from bayesify.laplace.subnetwork import gap, selectors

# Pickles of selectors name the modules below this path.
sys.modules[f"{__name__}.selectors"] = selectors
sys.modules[f"{__name__}.gap"] = gap
