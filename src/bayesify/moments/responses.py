r"""Linear responses of the outputs to each source of noise, and the covariance that is computed from them.

Every random value y has a `Node`, which describes a small change of y as a linear map of the changes of its parent values plus
its own noise, $\delta y = \sum_k A_k\,\delta h_k + \xi$. The covariance of an example's outputs is the sum $\sum_l J_l \Sigma_l
J_l^\top$ over all noise sources; reverse differentiation of these maps gives the matrices J. This covariance is correct even if a
value is combined with itself, if positions share a kernel, or if tokens share a row of an embedding.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Protocol

import torch
from torch import Tensor

_order = itertools.count()


class Noise(Protocol):
    """The noise that a node adds to its units."""

    cost: float
    """Number of multiplications in `features` for one output, without elementwise products."""

    @property
    def num_sure(self) -> int:
        """Number of leading tensors in the list from `features` that do not depend on an estimated correlation between
        positions."""

    @property
    def is_rest(self) -> bool:
        """Whether the noise is the part of a nonlinear function that the function's linear response leaves out."""

    def features(self, slopes: Tensor) -> list[Tensor]:
        """A list of tensors [B, F]. Their squared entries add up to the variance of `sum_i slope_i noise_i`, where i runs over
        all units.

        The slopes have the units' shape.
        """


@dataclass(eq=False)
class Node:
    """A random value in the graph of responses."""

    shape: torch.Size
    parents: tuple[Node, ...] = ()  # nodes of the values from which this value was computed
    push: Callable[..., Tensor] | None = None  # linear function from the parents' changes to the value's change
    noise: Noise | None = None  # the value's own noise
    cost: float = 0.0  # number of products in `push`
    total: Noise | None = None  # the total noise, if it is known so well that it can replace all earlier nodes
    order: int = field(default_factory=lambda: next(_order))


@dataclass
class Spread:
    """Noise with a variance for each unit and a correlation between the positions of a channel."""

    variance: Tensor
    channels: tuple[int, ...]  # kinds of the units' axes; see `Value`
    share: Tensor | None = None  # correlation between positions of a channel, [B]; `None` if they are independent
    is_rest: bool = False
    cost: float = 0.0

    @property
    def num_sure(self) -> int:
        """0 if the noise is the nonlinear part of units with several positions; otherwise the number of all tensors in
        `features`."""
        alone = all(flag in (1, -1) or size == 1 for flag, size in zip(self.channels, self.variance.shape, strict=True))
        return 2 if alone or not self.is_rest else 0

    @cached_property
    def std(self) -> Tensor:
        """Standard deviations."""
        return self.variance.sqrt()

    def features(self, slopes: Tensor) -> list[Tensor]:
        """The slopes times the standard deviations of the units, and the sums of these products over positions."""
        moved = slopes * self.std
        batch = self.channels.index(-1)
        flat = moved.movedim(batch, 0).flatten(1)
        if self.share is None or all(flag in (1, -1) for flag in self.channels):
            return [flat]
        for axis in reversed(range(moved.ndim)):
            block = self.channels[axis]
            if block == 0:
                moved = moved.sum(axis, keepdim=True)
            elif block > 1:
                moved = moved.unflatten(axis, (-1, block)).sum(axis + 1)
        summed = moved.movedim(batch, 0).flatten(1)
        share = self.share.unsqueeze(1)
        return [flat * (1 - share).sqrt(), summed * share.sqrt()]


@dataclass
class Correlated:
    """Nonlinear noise with a covariance between the channels of a position and a correlation between positions."""

    covariance: Tensor  # [B, P, C, C]
    batch: int  # axis of examples in the shape of the units, whose last axis holds the channels
    share: Tensor  # correlation between positions, [B]
    cost: float = 0.0
    is_rest: bool = True

    @property
    def num_sure(self) -> int:
        """0 if there are several positions; otherwise the number of all tensors in `features`."""
        return 2 if self.covariance.shape[1] == 1 else 0

    @cached_property
    def factor(self) -> Tensor:
        r"""Matrices F with $F F^\top$ equal to the covariances."""
        values, vectors = torch.linalg.eigh(self.covariance)
        found: Tensor = vectors * values.clamp_min(0).sqrt().unsqueeze(-2)
        return found

    def features(self, slopes: Tensor) -> list[Tensor]:
        """The slopes times the columns of `factor` at each position, and the sums of these products over positions."""
        rows, positions, count, _ = self.covariance.shape
        moved = slopes.movedim(self.batch, 0).reshape(rows, positions, 1, count) @ self.factor
        share = self.share.unsqueeze(1)
        return [moved.flatten(1) * (1 - share).sqrt(), moved.sum(1).flatten(1) * share.sqrt()]


@dataclass
class SharedWeights:
    r"""Noise of weights that all positions of an example share: $\xi_{po} = \sum_j \omega_{oj} \varphi_{pj} + \beta_o$."""

    inputs: Callable[[], Tensor]  # function that returns the means of phi for each group of channels, [B, groups, P, J]
    variance: Tensor | None  # variance of omega, [groups, O / groups, J]; `None` if the weights are fixed
    bias: Tensor | None  # variance of beta, [O]; `None` if the bias is fixed
    arrange: Callable[[Tensor], Tensor]  # function that rearranges slopes from the units' shape to [B, P, O]
    cost: float  # number of products for one output
    second: Callable[[], Spread] | None = None  # function that returns the noise from the variance of phi
    is_rest: bool = False

    @property
    def num_sure(self) -> int:
        """Number of all tensors in `features`, except those of `second`."""
        return (self.variance is not None) + (self.bias is not None)

    @cached_property
    def _rest(self) -> Spread | None:
        return None if self.second is None or self.variance is None else self.second()

    @cached_property
    def _fixed(self) -> tuple[Tensor, Tensor]:
        assert self.variance is not None
        return self.inputs(), self.variance.sqrt()

    def features(self, slopes: Tensor) -> list[Tensor]:
        """The derivatives with respect to the weights (multiplied by the weights' standard deviations), and the features of
        `second`."""
        rest = [] if self._rest is None else self._rest.features(slopes)
        parts: list[Tensor] = []
        slopes = self.arrange(slopes)
        if self.variance is not None:
            inputs, std = self._fixed
            groups, size, _ = self.variance.shape
            by_group = slopes.unflatten(-1, (groups, size)).permute(0, 2, 3, 1)  # [B, G, O / G, P]
            parts.append((by_group @ inputs).mul_(std).flatten(1))
        if self.bias is not None:
            parts.append(slopes.sum(1) * self.bias.sqrt())
        return parts + rest


@dataclass
class SharedRows:
    """Noise of an embedding's rows. Positions with the same token share a row."""

    std: Tensor  # standard deviations of the embedding row at each position, [B, P, E]
    first: Tensor  # for each position, the first position with the same token, [B, P]
    arrange: Callable[[Tensor], Tensor]  # function that rearranges slopes from the units' shape to [B, P, E]
    cost: float = 0.0
    num_sure: int = 1
    is_rest: bool = False

    def features(self, slopes: Tensor) -> list[Tensor]:
        """The slopes times the standard deviations, summed over the positions with the same token."""
        moved = self.arrange(slopes) * self.std
        place = self.first.unsqueeze(-1).expand_as(moved)
        return [torch.zeros_like(moved).scatter_add_(1, place, moved).flatten(1)]


ELEMENTWISE_COST = 20.0
"""One elementwise operation on a unit takes as long as this many multiplications."""


def _walk(node: Node) -> Iterator[Node]:
    waiting, seen = [(-node.order, node)], {node.order}
    while waiting:
        at = heapq.heappop(waiting)[1]
        yield at
        for parent in at.parents:
            if parent.order not in seen:
                seen.add(parent.order)
                heapq.heappush(waiting, (-parent.order, parent))


def plain_cost(node: Node) -> float:
    """Approximate number of multiplications in a pass of the plain network."""
    return sum(at.cost + ELEMENTWISE_COST * at.shape.numel() for at in _walk(node))


def _cost(node: Node) -> float:
    """Approximate number of multiplications at a node for one output."""
    own = 0.0 if node.noise is None else node.noise.cost
    return own + (node.cost if node.parents else 0.0) + ELEMENTWISE_COST * node.shape.numel()


class Plan:
    """The nodes that are differentiated, from the last to the first, and the noise of each node.

    `outputs` is the number of outputs to differentiate. The walk over the nodes stops before it exceeds the budget of
    multiplications. The walk stops at a value whose total noise is known and through which the noise of all remaining nodes
    passes.
    """

    def __init__(self, node: Node, outputs: int, budget: float = math.inf) -> None:
        self.nodes: list[Node] = []
        self.noises: dict[int, Noise] = {}
        self.cost = 0.0
        open_ends = {node.order}
        for at in _walk(node):
            if at.order not in open_ends:  # an ancestor of the value at which the walk ended
                continue
            open_ends.remove(at.order)
            cost = outputs * _cost(at)
            if not open_ends and self.cost + cost > budget and at.total is not None and self.nodes:
                at = Node(at.shape, noise=at.total, order=at.order)
            else:
                self.cost += cost
            self.nodes.append(at)
            if at.noise is not None:
                self.noises[at.order] = at.noise
            open_ends |= {parent.order for parent in at.parents}

    def features(self, sample: Tensor) -> Iterator[dict[int, list[Tensor]]]:
        """For each output in turn, yield the features of each noise source; see `Noise.features`."""
        added: dict[int, Tensor] = {}
        changes: dict[int, Tensor] = {}
        with torch.inference_mode(False), torch.enable_grad():
            for node in reversed(self.nodes):
                change = None if node.push is None else node.push(*(changes[parent.order] for parent in node.parents))
                if node.order in self.noises or change is None:
                    zero = torch.zeros(node.shape, dtype=sample.dtype, device=sample.device, requires_grad=True)
                    added[node.order] = zero
                    change = zero if change is None else change + zero
                changes[node.order] = change
            outputs = changes[self.nodes[0].order].flatten(1)
            size = outputs.shape[1]
            orders = [order for order in added if order in self.noises]
            leaves = [added[order] for order in orders]
            for column in range(size):
                one = outputs[:, column].sum()
                slopes = torch.autograd.grad(one, leaves, retain_graph=column + 1 < size, allow_unused=True)
                yield {
                    order: self.noises[order].features(slope)
                    for order, slope in zip(orders, slopes, strict=True)
                    if slope is not None
                }


def covariance(plan: Plan, like: Tensor) -> tuple[Tensor, Tensor]:
    """The covariance of each example's outputs and the exact part of this covariance, computed by one reverse pass per output:
    [B, O, O] each.

    The exact part does not depend on an estimated correlation between positions. The tensor `like` is [B, O].
    """
    kept: dict[tuple[int, int], list[Tensor]] = defaultdict(list)
    for found in plan.features(like):
        for order, parts in found.items():
            for index, part in enumerate(parts):
                kept[order, index].append(part)
    sure = torch.zeros(*like.shape, like.shape[1], dtype=like.dtype, device=like.device)
    estimated = torch.zeros_like(sure)
    for order, index in list(kept):
        stacked = torch.stack(kept.pop((order, index))).transpose(0, 1)  # [B, O, F]
        part = sure if index < plan.noises[order].num_sure else estimated
        part += stacked @ stacked.mT
    return sure + estimated, sure


def variances(plan: Plan, like: Tensor, pairs: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Three results: the variance of each unit, [B, O]; the nonlinear part of this variance, [B, O]; and the covariance of unit i
    with unit i + `pairs`, [B, O - pairs]. If `pairs` is 0, no covariances are computed. The tensor `like` is [B, O].
    """
    found, bent, crossed, first = [], [], [], []
    zero = like.new_zeros(len(like))
    for column, parts in enumerate(plan.features(like)):
        each = {order: sum((part.square().sum(1) for part in own), zero) for order, own in parts.items()}
        found.append(sum(each.values(), zero))
        bent.append(sum((value for order, value in each.items() if plan.noises[order].is_rest), zero))
        if pairs and column < pairs:
            first.append(parts)
        elif pairs:
            other = first[column - pairs]
            both = [(one, two) for order in parts for one, two in zip(parts[order], other.get(order, []), strict=False)]
            crossed.append(sum(((one * two).sum(1) for one, two in both), zero))
    both_found = torch.stack(crossed, 1) if crossed else like.new_zeros(len(like), 0)
    return torch.stack(found, 1), torch.stack(bent, 1), both_found
