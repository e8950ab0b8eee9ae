"""Passes in which each example has its own noise. A pass is repeated if it finds a weight that the network uses more than
once."""

from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from typing import Any, TypeVar

import torch
from torch import nn

from bayesify.draws import Draws
from bayesify.maths.noise import Randomness, source_of
from bayesify.posteriors.common.base import Posterior
from bayesify.running.generators import backup, owned_generators
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
    """Draw weights and run the network with separate noise for each example, and return the result.

    Weights that are used more than once get one draw for all examples. The result does not depend on when the posteriors find out
    that a weight is used more than once. If the first pass finds a weight that is used more than once, the pass is repeated from
    the same state of the caller's generator. A training run owns torch's global generators, so their state is restored too.
    Outside a training run, other threads may use the global generators, so these generators are never reset. Instead, an extra
    pass finds the weights that are used more than once; it runs before the first bound is computed, on a copy of the network
    without hooks. The extra pass is in evaluation mode, in which the network uses no random numbers.

    `compute` draws weights and runs the network on the inputs. `draw(generator=...)` makes one draw with separate noise for each
    example. The posteriors remember the weights that are used more than once. The network's buffers are reset before the first
    pass is repeated.
    """
    parts = [part for part in posteriors if part.local_reparameterization]
    restore = None
    if not all(part.looked for part in parts):
        if not owned_generators():
            with suppress(Exception), torch.no_grad():  # `compute` will raise the same error
                _until_known(lambda: _evaluate(draw(generator=torch.Generator().manual_seed(0)), *inputs), parts)
        restore = backup(network.buffers(), (*owned_generators(), *source_of(generator).generators()))
    result = _until_known(compute, parts, restore)
    for part in parts:
        part.looked = True
    return result


def _evaluate(draws: Draws, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    """Run one pass in evaluation mode. If the network can be copied, the pass runs on a copy without the user's hooks."""
    with draws.runner.evaluating().alone() as own:
        if own.network is not draws.runner.network:  # compiled parts cannot be copied
            for module in own.network.modules():
                module.__dict__.update(_forward_hooks=OrderedDict(), _forward_pre_hooks=OrderedDict())
        own.run(draws.weights, args, kwargs, buffers=draws.buffers)


def _until_known(
    compute: Callable[[], Result], parts: list[Posterior], restore: Callable[[], None] | None = None
) -> Result:
    """Repeat the pass until it finds no further weight that is used more than once, and return its result. The function `restore`
    is called before each repetition."""
    while True:
        try:
            return compute()
        except UsedAgain as again:
            for part in parts:
                part.materialized.add(again.name)
            if restore is not None:
                restore()
