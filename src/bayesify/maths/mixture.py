"""Choosing members of a finite mixture so that each is drawn equally often."""

from __future__ import annotations

import torch
from torch import Tensor

from bayesify.maths.noise import Randomness, source_of


def choose_members(num_members: int, num_draws: int, generator: Randomness, device: torch.device) -> Tensor:
    """Indices of members for a number of draws, each member equally often up to one, in random order.

    Every index has the uniform distribution over members, as with independent choice, but `num_draws` equal to
    `num_members` visits each member once, which removes that part of the Monte Carlo error.

    Returns:
        [num_draws], integers.
    """
    source = source_of(generator)
    order = [source.permutation(num_members, device) for _ in range(-(-num_draws // num_members))]
    return torch.cat(order)[:num_draws]
