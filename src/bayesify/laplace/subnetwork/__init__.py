"""Subnetworks for `Laplace`. A subnetwork is the set of weights of a trained network that get a posterior."""

from bayesify.laplace.subnetwork.gap import posterior_gap
from bayesify.laplace.subnetwork.selectors import (
    Candidates,
    Selector,
    as_selector,
    everything,
    from_indices,
    from_mask,
    from_names,
    largest_magnitude,
    largest_swag_variance,
    largest_variance,
    last_layer,
    random,
)

__all__ = [
    "Candidates",
    "Selector",
    "as_selector",
    "everything",
    "from_indices",
    "from_mask",
    "from_names",
    "largest_magnitude",
    "largest_swag_variance",
    "largest_variance",
    "last_layer",
    "posterior_gap",
    "random",
]
