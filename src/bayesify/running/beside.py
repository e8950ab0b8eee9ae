"""A captured step whose data pass, with its gradient, runs on a stream of its own, beside a network that draws layer by layer."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from bayesify.weights.catalog import owner_of

if TYPE_CHECKING:
    from bayesify.draws import Draws
    from bayesify.posteriors.base import Posterior


@dataclass
class _Gradient:
    """The gradient of the data term by one drawn weight, [*shape], and when it is there."""

    value: Tensor | None = None
    there: torch.cuda.Event | None = None


class Beside:
    """Where a posterior runs the network to draw: data pass a layer as soon as its weights are drawn.

    Drawing is one chain of small operations, which leave most of a GPU idle. `drawn` is told each weight, in the order of drawing;
    `data_term` then runs the data pass and its gradient on a stream that waits for each weight where it is used. In the
    gradient of the draw each weight waits for the data's part alone. Only for capture, where all dependencies are known before
    anything runs.
    """

    def __init__(self) -> None:
        self._stream = torch.cuda.Stream()
        self._ready: dict[str, torch.cuda.Event] = {}
        self._gradients: dict[str, _Gradient] = {}
        self._gates: list[Tensor] = []
        self._kept: list[Any] = []  # what the other stream reads is not given back before all gradients are taken

    def drawn(self, name: str, value: Tensor) -> None:
        """Note a weight that may be used from here on."""
        event = torch.cuda.Event()
        event.record()
        self._ready[name], self._gradients[name] = event, _Gradient()
        self._gates.append(_Gate.apply(value, self._gradients[name], self))

    def data_term(self, draws: Draws, terms: Callable[[Draws], tuple[Tensor, Tensor]]) -> Tensor:
        """The data term of the objective, [1]; its gradient goes to the weights that were drawn.

        Args:
            draws: One draw, all of whose weights were `drawn`.
            terms: The terms of the objective from a draw, that of the data first.
        """
        self._kept.append(draws)
        self._stream.wait_event(next(iter(self._ready.values())))
        with torch.cuda.stream(self._stream), draws.runner.alone() as runner, ExitStack() as hooks:
            leaves = {name: value.detach().requires_grad_() for name, value in draws.weights.items()}
            for name, leaf in leaves.items():
                leaf.register_hook(self._taker(name))
            for name, event in self._ready.items():
                owner, _ = owner_of(runner.network, name)
                hooks.callback(owner.register_forward_pre_hook(self._waiter(event)).remove)
            term = terms(type(draws)(runner, leaves, draws.kl))[0]
            found, known = term.detach().clone(), torch.cuda.Event()
            known.record()
            with torch.autocast(found.device.type, enabled=False):
                term.sum().backward(inputs=list(leaves.values()))
            end = torch.cuda.Event()
            end.record()
        self._kept += [leaves, term]
        next(
            iter(self._gradients.values())
        ).there = end  # the last to be waited for, so that nothing is left on the stream
        torch.cuda.current_stream().wait_event(known)
        made: Tensor = _Anchor.apply(found, *self._gates)
        return made

    def _waiter(self, event: torch.cuda.Event) -> Callable[..., None]:
        def wait(*_: Any) -> None:
            self._stream.wait_event(event)

        return wait

    def _taker(self, name: str) -> Callable[[Tensor], None]:
        def take(grad: Tensor) -> None:
            box = self._gradients[name]
            box.value, box.there = grad[0], torch.cuda.Event()
            box.there.record(self._stream)

        return take


class _Gate(torch.autograd.Function):
    """Nothing, whose gradient by a drawn weight is that of the data term, once it is there."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, gradient: _Gradient, owner: Beside) -> Tensor:
        ctx.gradient, ctx.owner = gradient, owner
        return value.new_empty(())

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Any) -> Any:
        torch.cuda.current_stream().wait_event(ctx.gradient.there)
        return grads[0] * ctx.gradient.value, None, None


class _Anchor(torch.autograd.Function):
    """The value of the data term, from the other stream, with the gates below it."""

    @staticmethod
    def forward(ctx: Any, found: Tensor, *gates: Tensor) -> Tensor:
        ctx.mark_dirty(found)
        ctx.count = len(gates)
        return found

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Any) -> Any:
        return None, *[grads[0].sum()] * ctx.count


def find_beside(
    posteriors: Iterable[Posterior], network: nn.Module, likelihood: nn.Module | None, num_draws: int
) -> Beside | None:
    """What a step runs beside its draw with; `None` where it does not.

    Args:
        posteriors: All of them must draw by running the network.
        network: Without parameters to train, since the gradient of the data term is taken apart, and buffers to change.
        likelihood: Without parameters to train.
        num_draws: One.
    """
    if num_draws != 1 or not all(part.runs_network for part in posteriors):
        return None
    if likelihood is None or not torch.cuda.is_available() or not torch.cuda.is_current_stream_capturing():
        return None
    trained = any(value.requires_grad for module in (network, likelihood) for value in module.parameters())
    return None if trained or next(network.buffers(), None) is not None else Beside()
