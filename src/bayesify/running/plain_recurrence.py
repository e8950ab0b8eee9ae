"""Recurrent layers, computed step by step with plain operations, because torch's own kernels have no batching rule for `vmap`."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

States = tuple[Tensor, ...]
Step = Callable[[Tensor, Tensor, States], States]
"""The next states, hidden first, from a step's gates, the hidden state's contribution to the gates, and the states."""


def _gru(inputs: Tensor, recurrent: Tensor, states: States) -> States:
    (r, z, n), (s, y, m) = inputs.chunk(3, -1), recurrent.chunk(3, -1)
    update = (z + y).sigmoid()
    return ((1 - update) * (n + (r + s).sigmoid() * m).tanh() + update * states[0],)


def _lstm(inputs: Tensor, recurrent: Tensor, states: States) -> States:
    enter, forget, new, leave = (inputs + recurrent).chunk(4, -1)
    cell = forget.sigmoid() * states[1] + enter.sigmoid() * new.tanh()
    return leave.sigmoid() * cell.tanh(), cell


STEPS: dict[Any, Step] = {
    torch.gru: _gru,
    torch.lstm: _lstm,
    torch.rnn_tanh: lambda inputs, recurrent, states: ((inputs + recurrent).tanh(),),
    torch.rnn_relu: lambda inputs, recurrent, states: ((inputs + recurrent).relu(),),
}


class PlainRecurrence(TorchFunctionMode):
    """Mode in which `nn.GRU`, `nn.LSTM` and `nn.RNN` on padded batches run as plain operations; packed batches are unaffected."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Replace recurrent layers, and run all other operations unchanged."""
        if func in STEPS and len(args) == 9 and isinstance(args[3], bool) and not (args[5] > 0 and args[6]):
            return _run(STEPS[func], *args)
        return func(*args, **(kwargs or {}))


def _run(
    step: Step,
    x: Tensor,
    start: Any,
    weights: list[Tensor],
    biases: bool,
    layers: int,
    dropout: float,
    training: bool,
    both_ways: bool,
    batch_first: bool,
) -> tuple[Tensor, ...]:
    """Run a recurrent layer. Return the outputs, and the last states of every layer and direction, as torch's functions do."""
    firsts = (start,) if isinstance(start, Tensor) else tuple(start)
    ways = 2 if both_ways else 1
    each = len(weights) // (layers * ways)
    x = x.transpose(0, 1) if batch_first else x  # [T, B, inputs]
    lasts: list[States] = []
    for layer in range(layers):
        outputs = []
        for way in range(ways):
            place = layer * ways + way
            own = weights[place * each : (place + 1) * each]
            (b_in, b_hidden), rest = (own[2:4], own[4:]) if biases else ((None, None), own[2:])
            gates, states = F.linear(x, own[0], b_in), tuple(first[place] for first in firsts)
            found: list[Tensor] = []
            for gate in gates.flip(0) if way else gates:
                hidden, *other = step(gate, F.linear(states[0], own[1], b_hidden), states)
                states = (F.linear(hidden, rest[0]) if rest else hidden, *other)  # an LSTM may project its hidden state
                found.append(states[0])
            outputs.append(torch.stack(found[::-1] if way else found))
            lasts.append(states)
        x = torch.cat(outputs, -1)
    return x.transpose(0, 1) if batch_first else x, *(torch.stack(parts) for parts in zip(*lasts, strict=True))
