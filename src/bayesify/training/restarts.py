"""Restart of posteriors before the first step, with weights in units of the targets or with smaller standard deviations."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import nn

from bayesify.network import BayesianNetwork, Start, adopt
from bayesify.posteriors.common.base import Posterior
from bayesify.running.generators import own_generators, set_generator_states
from bayesify.weights.catalog import owner_of, put_in


@torch.no_grad()
def restart(
    bnn: BayesianNetwork, powers: Mapping[str, int], *, keep_function: bool = True, narrowing: float = 1.0
) -> bool:
    """Restart the posteriors in place, with weights in units of $10^k$ and smaller standard deviations.

    For the prior and the optimizer, the targets then have size 1. Posteriors restart only if they have not changed
    since `bayesianize` or since the last restart. See `Start` for the arguments.

    Returns:
        Whether the posteriors were restarted.
    """
    if not bnn.given_weights or not bnn.start.noise:
        return False
    parts, start = (
        list(bnn.posteriors),
        replace(bnn.start, powers=powers, keep_function=keep_function, narrowing=narrowing),
    )
    if not all(map(_same_tensors, parts, _built(bnn, bnn.start))):
        return False
    others = nn.ModuleList(_built(bnn, start)).state_dict(prefix="posteriors.")
    bnn.start = start
    units = {"unit_powers": torch.tensor([powers.get(name, 0) for name in bnn.weights])} if any(powers.values()) else {}
    adopt(bnn, {**others, **units})
    bnn.posteriors.load_state_dict({name.removeprefix("posteriors."): value for name, value in others.items()})
    return True


def _built(bnn: BayesianNetwork, start: Start) -> list[Posterior]:
    """The posteriors at their start, built with the same random numbers that `bayesianize` used."""
    wide = {
        name: value.float() if value.dtype == torch.bfloat16 else value for name, value in bnn.given_weights.items()
    }
    kept = start.powers if start.keep_function else {}
    values = {name: value / 10.0 ** kept[name] if kept.get(name) else value for name, value in wide.items()}
    plain = copy.deepcopy(bnn.network)
    put_in(plain, list(bnn.weights.values()), bnn.given_weights)
    modules = {name: owner_of(plain, name)[0] for name in bnn.weights}
    parts = copy.deepcopy(list(bnn.posteriors))
    with own_generators([device for device in start.noise if device.type == "cuda"]):
        set_generator_states(start.noise)
        for part in parts:
            part.narrowing = start.narrowing
            part.build(values, modules)
    return parts


def _same_tensors(one: nn.Module, other: nn.Module) -> bool:
    """Whether two modules have the same parameters and buffers."""
    first, second = one.state_dict(), other.state_dict()
    return first.keys() == second.keys() and all(torch.equal(value, second[name]) for name, value in first.items())
