"""Draws of functions from the posterior."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from typing import Any, ClassVar, overload

import torch
from torch import Tensor

from bayesify.predictive.base import Joined, Outputs
from bayesify.running.inputs_and_outputs import (
    Args,
    Kwargs,
    at,
    batch_size,
    check_lengths,
    count_draws,
    kinds_of,
    select_output,
    split_rows,
)
from bayesify.running.memory import MEMORY_BUDGET, PROBED_ROWS, count_activation_bytes, parse_bytes, warn_of_mixing
from bayesify.running.runner import RowCost, Runner
from bayesify.weights.layout import PlacedWeights
from bayesify.weights.structured import StructuredWeight

MAX_KNOWN_COSTS = 32
"""Maximum number of input kinds per network for which the cost of an example is cached."""


class Draw:
    """One function from the posterior. Every argument is also an attribute.

    Args:
        runner: The network that the weights belong to.
        weights: Drawn weights, keyed by their names in `named_parameters()`.
        kl: KL of the draw in nats, a scalar.
        buffers: Buffers that belong to this draw, by name.
    """

    def __init__(
        self, runner: Runner, weights: Mapping[str, Tensor], kl: Tensor, buffers: Mapping[str, Tensor] | None = None
    ) -> None:
        self.runner = runner
        self.buffers = buffers or {}
        self.weights = dict(weights)
        self.kl = kl

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The network's output with these weights."""
        return self.runner.call({**self.weights, **self.buffers}, args, kwargs, protect=False)


class Draws:
    """S functions drawn from the posterior; all inputs are evaluated with the same S functions. Every argument is also an
    attribute.

    Args:
        runner: The network that the weights belong to.
        weights: Drawn weights, keyed by their names in `named_parameters()`: each is a tensor [S, *shape] or a
            structured weight.
        kl: KL of each draw in nats, [S].
        buffers: Buffers that differ between draws, such as the batch statistics of an ensemble's members; one dict per draw.
    """

    remedy: ClassVar[str] = ", such as bnn.draw(16)"

    def __init__(
        self,
        runner: Runner,
        weights: Mapping[str, Tensor],
        kl: Tensor,
        buffers: Sequence[Mapping[str, Tensor]] | None = None,
    ) -> None:
        self.runner = runner
        self.buffers = buffers
        self.weights: MutableMapping[str, Tensor] = weights if isinstance(weights, PlacedWeights) else dict(weights)
        self.kl = kl

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The network's output with each draw's weights.

        The arguments are passed to the network. The kind of network decides whether draws run together or one after the
        other. This choice changes only the speed.

        Returns:
            The outputs, [S, B, ...]. A dict, tuple or dataclass of outputs keeps its type, and each of its tensors gets
            the axis of draws.
        """
        return self.runner.run(self.weights, args, kwargs, buffers=self.buffers)

    @torch.no_grad()
    def outputs(
        self,
        args: Args,
        kwargs: Kwargs,
        *,
        output: str | int | None = None,
        keep: bool | None = None,
        memory: int | str | None = None,
        split_batch: bool = True,
    ) -> Outputs:
        """Outputs for a batch of any size, in evaluation mode, within a memory budget.

        Args:
            args: Positional inputs of the network.
            kwargs: Keyword inputs of the network.
            output: Key or position of the output to select; see `bayesianize`.
            keep: Whether to keep all outputs in memory. By default, they are kept if they fit in the budget `memory`.
            memory: Budget for activations and for kept outputs, in bytes or as text such as `"1GiB"`.
            split_batch: Whether the batch may be split to stay within the budget; see `BayesianNetwork.predict`.

        Raises:
            ValueError: If the batch is empty, or if `split_batch` is true and the inputs cannot be split.
        """
        budget = MEMORY_BUDGET if memory is None else parse_bytes(memory)
        rows = total = batch_size(args, kwargs)
        if total == 0:
            raise ValueError("predict: the batch is empty; give at least one example")
        size = 0.0
        few: Tensor | None = None

        def chunks(runner: Runner, draws: Draws) -> Iterator[Tensor]:
            pieces = split_rows(args, kwargs, rows) if split_batch else iter([(args, dict(kwargs))])
            for index, (part_args, part_kwargs) in enumerate(pieces):
                with torch.no_grad():
                    found = runner.run(draws.weights, part_args, part_kwargs, buffers=draws.buffers)
                    found = select_output(found, output)
                if few is not None and index == 0 and rows < total:
                    warn_of_mixing(few, found[0])
                yield found

        with self.runner.evaluating().alone(hooks=False) as runner:
            if split_batch and total > 1:  # a single example cannot be split
                check_lengths(args, kwargs)
                rows, cost, few = self._rows_within(runner, args, kwargs, budget, output)
                size = len(self) * total * cost.output
            if keep or (keep is None and size <= budget):
                kept = Joined(1, total)
                for chunk in chunks(runner, self):
                    kept.add(chunk)
                return Outputs(kept=kept.all())
        frozen = self._copied(self.runner.evaluating().snapshot())
        return Outputs(chunks=lambda: chunks(frozen.runner, frozen))

    def _rows_within(
        self, runner: Runner, args: Args, kwargs: Kwargs, budget: int, output: str | int | None
    ) -> tuple[int, RowCost, Tensor | None]:
        """Three results: the number of examples whose activations fit into a memory budget; the cost of one example; and the
        output of the first few examples, or `None` if this call did not measure the cost. Draws that run together share the
        budget.

        The cost of an example is measured once for each network and each kind of inputs, by running one draw on a few examples.
        The cost is also measured again in each call that must split the batch.
        """
        total, like = batch_size(args, kwargs), next(iter(self.weights.values()))
        together = len(self) if runner.mode(len(self)) in ("vmap", "rows") else 1
        autocast = torch.is_autocast_enabled(like.device.type)
        kind = (like.dtype, like.device, autocast, min(total, PROBED_ROWS), output, *kinds_of(args, kwargs))
        known = runner.decisions().row_costs
        cost = known.get(kind)
        if cost is not None and cost.activations * together * total <= budget:
            return total, cost, None
        buffers = self.buffers[0] if self.buffers else {}
        values = {**at(self.weights, 0), **buffers}
        with self.runner.evaluating().alone(hooks=False) as probe:  # the prediction does not see what this pass changes
            activations, outputs = count_activation_bytes(probe, args, kwargs, values)
        few = select_output(outputs, output)
        if len(known) >= MAX_KNOWN_COSTS:
            known.clear()
        cost = known[kind] = RowCost(activations, few.element_size() * few.numel() / few.shape[0])
        return max(1, math.floor(budget / max(1.0, activations * together))), cost, few

    def __len__(self) -> int:
        return count_draws(self.weights)

    @overload
    def __getitem__(self, index: int) -> Draw: ...
    @overload
    def __getitem__(self, index: slice) -> Draws: ...
    def __getitem__(self, index: int | slice) -> Draw | Draws:
        """One draw, or a slice of the draws."""
        if isinstance(index, slice):
            chosen = range(len(self))[index]
            if len(chosen) == 0:
                raise IndexError(
                    f"Draws: {index} selects no draw; give an index or a slice that selects at least one of the "
                    f"{len(self)} draws"
                )
            return Draws(self.runner, at(self.weights, index), self.kl[index], self.buffers and self.buffers[index])
        if not -len(self) <= index < len(self):
            raise IndexError(f"Draws: index {index} is out of range; there are {len(self)} draws")
        buffers = self.buffers[index] if self.buffers else None
        return Draw(self.runner, at(self.weights, index), self.kl[index], buffers)

    def __iter__(self) -> Iterator[Draw]:
        return (self[index] for index in range(len(self)))

    def __repr__(self) -> str:
        return f"Draws({len(self)} draws of {len(self.weights)} weights of {type(self.runner.network).__name__})"

    def materialize(self) -> Draws:
        """The same draws with every structured weight as a plain tensor."""
        weights = dict(self.weights)
        for name, weight in weights.items():
            if isinstance(weight, StructuredWeight):
                weights[name] = torch.stack([part.materialize() for part in weight.unbind()])
        return Draws(self.runner, weights, self.kl, self.buffers)

    def detach(self) -> Draws:
        """A copy of the draws that is detached from the posterior's parameters. Training after this call does not change the
        copy, not even its weights without a posterior."""
        plain = self.materialize()._copied(self.runner.snapshot())
        weights = {name: weight.detach() for name, weight in plain.weights.items()}
        return Draws(plain.runner, weights, self.kl.detach(), plain.buffers)

    def _copied(self, runner: Runner) -> Draws:
        """The same draws with another runner, through which the network is called. Tensors that training changes in place are
        copied."""
        weights = {name: _copy(weight) for name, weight in self.weights.items()}
        buffers = self.buffers and [{name: value.clone() for name, value in part.items()} for part in self.buffers]
        return Draws(runner, weights, self.kl, buffers)


def _copy(weight: Tensor) -> Tensor:
    """The drawn weight, copied if it is a view of a parameter, because training changes parameters in place."""
    base = weight._base
    if base is None or not base.is_leaf or not base.requires_grad:
        return weight
    return weight[:1].clone().expand(weight.shape) if weight.stride(0) == 0 else weight.clone()
