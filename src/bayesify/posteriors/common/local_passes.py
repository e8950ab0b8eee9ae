"""Passes with noise for each example, done again where the network turns out to use a weight more than once."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from typing import Any, TypeVar

import torch
from torch import nn

from bayesify.draws import Draws
from bayesify.maths.noise import Randomness, source_of
from bayesify.posteriors.common.base import Posterior
from bayesify.running.generators import owned_generators
from bayesify.weights.structured import UsedAgain

Result = TypeVar("Result")


def run_local(
    compute: Callable[[], Result],
    draw: Callable[..., Draws],
    inputs: tuple[tuple[Any, ...], Mapping[str, Any]],
    posteriors: Iterable[Posterior],
    network: nn.Module,
    generator: Randomness,
) -> Result:
    """The result of a draw and a pass, in which weights that are used more than once are drawn whole.

    The numbers are as if these weights had been known: a first pass that finds one is done again from the same state of the
    caller's generator, and of torch's global ones in a training, which owns them. Elsewhere other threads may take numbers from the
    global ones, which then are never set back: the network is looked at first in evaluation mode, where it takes none,
    by one pass more of a copy without hooks in the first bound alone.

    Args:
        compute: Draws, with noise for each example where that is asked for, and runs the network.
        draw: Draws once from a `generator`, with noise for each example.
        inputs: Of the network, by position and by name.
        posteriors: Of the network; they keep what was found.
        network: Whose buffers are set back before the first pass is done again.
        generator: The caller's own, where one was given.
    """
    parts = [part for part in posteriors if part.local_reparameterization]
    first = None
    if not all(part.looked for part in parts):
        if not owned_generators():
            with suppress(Exception), torch.no_grad():  # whatever is wrong, `compute` says
                _until_known(lambda: _evaluate(draw(generator=torch.Generator().manual_seed(0)), *inputs), parts)
        first = _Backup(network, generator)
    result = _until_known(compute, parts, first)
    for part in parts:
        part.looked = True
    return result


def _evaluate(draws: Draws, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    """One pass of a copy in evaluation mode, which calls none of the user's hooks where it is a copy."""
    with draws.runner.evaluating().alone() as own:
        if own.network is not draws.runner.network:  # parts that were compiled cannot be copied
            for module in own.network.modules():
                module.__dict__.update(_forward_hooks=OrderedDict(), _forward_pre_hooks=OrderedDict())
        own.run(draws.weights, args, kwargs, buffers=draws.buffers)


def _until_known(compute: Callable[[], Result], parts: list[Posterior], first: _Backup | None = None) -> Result:
    """The first result in which no weight turns out to be used more than once."""
    while True:
        try:
            return compute()
        except UsedAgain as again:
            for part in parts:
                part.materialized.add(again.name)
            if first is not None:
                first.restore()


class _Backup:
    """Buffers of a network and random generators as they are now."""

    def __init__(self, network: nn.Module, generator: Randomness) -> None:
        self._buffers = [(buffer, buffer.detach().clone()) for buffer in network.buffers()]
        generators = [*owned_generators(), *source_of(generator).generators()]
        self._generators = [(one, one.get_state()) for one in generators]

    @torch.no_grad()
    def restore(self) -> None:
        """Set everything back, in place."""
        for buffer, value in self._buffers:
            buffer.copy_(value)
        for generator, state in self._generators:
            generator.set_state(state)
