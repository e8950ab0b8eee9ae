"""Choosing members of a finite mixture so that each is drawn equally often."""

from __future__ import annotations

import torch
from torch import Tensor


def choose_members(num_members: int, num_draws: int, generator: torch.Generator | None, device: torch.device) -> Tensor:
    """Indices of members for a number of draws, each member equally often up to one, in random order.

    Every index has the uniform distribution over members, as with independent choice, but `num_draws` equal to
    `num_members` visits each member once, which removes that part of the Monte Carlo error.

    Returns:
        [num_draws], integers.
    """
    where = generator.device if generator is not None else device
    rounds = -(-num_draws // num_members)
    order = [torch.randperm(num_members, generator=generator, device=where) for _ in range(rounds)]
    return torch.cat(order)[:num_draws].to(device)
