"""Passes with noise for each example, done again where the network turns out to use a weight more than once."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, TypeVar

import torch
from torch import nn

from bayesify.maths.noise import NoiseSource, Randomness
from bayesify.weights.structured import UsedAgain

if TYPE_CHECKING:
    from bayesify.posteriors.base import Posterior

Result = TypeVar("Result")


def run_local(
    compute: Callable[[], Result],
    posteriors: Iterable[Posterior],
    network: nn.Module,
    generator: Randomness,
) -> Result:
    """The result of a draw and a pass, in which weights that are used more than once are drawn whole.

    Args:
        compute: Draws, with noise for each example where that is asked for, and runs the network.
        posteriors: Of the network; they remember what was found.
        network: Whose buffers are set back before the first pass is done again.
        generator: The caller's own, where one was given; set back too, so that the numbers are as if it had been known.
    """
    parts = [part for part in posteriors if part.local_reparameterization]
    first = None
    if not all(part.looked for part in parts):
        first = _Backup(network, generator, next(parts[0].parameters()).device)
    while True:
        try:
            result = compute()
        except UsedAgain as again:
            for part in parts:
                part.formed.add(again.name)
            if first is not None:
                first.restore()
            continue
        for part in parts:
            part.looked = True
        return result


class _Backup:
    """Buffers of a network and random generators as they are now."""

    def __init__(self, network: nn.Module, generator: Randomness, device: torch.device) -> None:
        self._buffers = [(buffer, buffer.detach().clone()) for buffer in network.buffers()]
        given = generator if isinstance(generator, NoiseSource) else NoiseSource(generator)
        generators = [torch.default_generator, *given.generators()]
        if device.type == "cuda":
            generators.append(torch.cuda.default_generators[device.index or 0])
        self._generators = [(one, one.get_state()) for one in generators]

    @torch.no_grad()
    def restore(self) -> None:
        """Set everything back, in place."""
        for buffer, value in self._buffers:
            buffer.copy_(value)
        for generator, state in self._generators:
            generator.set_state(state)
