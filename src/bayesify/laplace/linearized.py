"""Gaussians over the outputs of a network that is linearized in chosen weights, computed exactly or from draws."""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from bayesify.jacobians import FeatureCost, Features, Gradients, Jacobians
from bayesify.jacobians.general import Args, Kwargs
from bayesify.laplace.covariances import FullCovariance, MarginalCovariance, WeightCovariance
from bayesify.laplace.curvature import FeaturesEnd, feature_rows, layer_of, matrix_order, rows_at_once
from bayesify.laplace.sampled import SampledCovariance
from bayesify.likelihoods import Likelihood
from bayesify.predictive.gaussian import LowRank, Spread, marginals
from bayesify.running.inputs_and_outputs import as_inputs, batch_size, checked_inputs, split_rows

MAX_EXACT_OUTPUTS = 128
"""Largest number of outputs for which curvature and predictive covariance are exact by default, if each output takes a
backward pass. With more outputs, `NUM_CURVATURE_SAMPLES` vectors and `NUM_DIRECTIONS` draws replace the exact
computation. The last layer is always exact."""

NUM_CURVATURE_SAMPLES = 16
"""Number of vectors per example for the curvature of more than `MAX_EXACT_OUTPUTS` outputs."""

NUM_DIRECTIONS = 32
r"""Number n of draws of the weights for the covariance of more than `MAX_EXACT_OUTPUTS` outputs. The covariance is
$R R^\top$, where R holds the effects of the draws on the outputs. The relative error of a variance is $\sqrt{2 / n}$,
which is a quarter."""

MAX_PULLED_WEIGHTS = 2**17
"""Largest number of weights whose Jacobian is formed to compute the effect of draws on outputs. If there are more
weights, each draw takes a forward derivative."""

MAX_QUIET_PASSES = 300
"""A call that takes more passes over the data than this warns and gives their number."""

Found = TypeVar("Found")
Covariance = Tensor | Spread


def variances_of(covariance: Covariance) -> Tensor:
    """Variances of the outputs of each example, [B, O], taken from their covariance."""
    return covariance.variances() if isinstance(covariance, Spread) else covariance.diagonal(dim1=-2, dim2=-1)


@dataclass(frozen=True)
class LinearizedNetwork:
    r"""The linearized network $f(x, w^*) + J(x)(w - w^*)$ under a Gaussian over the chosen weights.

    If the chosen weights are those of the last layer, the covariances need only the layer's inputs (`Features`). Every other
    subset needs derivatives of the outputs (`Gradients`).
    """

    jacobians: Jacobians
    posterior: WeightCovariance
    likelihood: Likelihood
    dtype: torch.dtype  # type of the results
    progress: Callable[[int], None] | None = None  # called after each piece with the number of examples

    @property
    def may_have_features(self) -> bool:
        """Whether the chosen weights form one layer, which may be the network's last layer."""
        formless = isinstance(self.posterior, (MarginalCovariance, SampledCovariance))
        return not formless and layer_of(self.posterior.subset) is not None

    def feature_cost(self, x: Any) -> FeatureCost | None:
        """Cost of an example if only the last layer's inputs are needed; `None` if derivatives are needed."""
        return self.jacobians.feature_cost(*checked_inputs(x)) if self.may_have_features else None

    def over(self, x: Any, budget: int, use: Callable[[Tensor, Features | Gradients], Found]) -> list[Found]:
        """Apply a function to the outputs and to their features or gradients. The batch is processed in pieces that fit
        into a budget of bytes; there is one result per piece."""
        args, kwargs = checked_inputs(x)
        if batch_size(args, kwargs) == 0:
            raise ValueError("predict: the batch is empty; give at least one example")
        try:
            return [use(mean, found) for mean, found in self._features(args, kwargs, budget)]
        except FeaturesEnd:
            return [use(mean, found) for mean, found in self._gradients(args, kwargs, budget)]

    def _features(self, args: Args, kwargs: Kwargs, budget: int) -> Iterator[tuple[Tensor, Features]]:
        cost = self.jacobians.feature_cost(args, kwargs) if self.may_have_features else None
        if cost is None:
            raise FeaturesEnd
        held = 3 * cost.outputs * (self.posterior.held if isinstance(self.posterior, FullCovariance) else 1)
        if cost.positions > 1 and cost.outputs <= MAX_EXACT_OUTPUTS:
            held += 2 * cost.outputs**2
        total, rows = batch_size(args, kwargs), feature_rows(cost, budget, held)
        for part_args, part_kwargs in split_rows(args, kwargs, -(-total // -(-total // rows))):
            found = self.jacobians.features(part_args, part_kwargs)
            if found is None:
                raise FeaturesEnd
            yield found.outputs.to(self.dtype), found

    def _gradients(self, args: Args, kwargs: Kwargs, budget: int) -> Iterator[tuple[Tensor, Gradients]]:
        rows = rows_at_once(self.jacobians, args, kwargs, budget, 3 * self.posterior.held)
        for part_args, part_kwargs in split_rows(args, kwargs, rows):
            point = self.jacobians.at(part_args, part_kwargs)
            yield point.outputs.detach().to(self.dtype), point.pull(point.identity())
            if self.progress is not None:
                self.progress(len(point.outputs))

    def gaussians(
        self, x: Any, budget: int, factors: list[float] | None = None, *, parts: bool = False
    ) -> list[tuple[Tensor, list[Covariance]]]:
        """Piece by piece, the means [B, ...] of the outputs and one covariance for each factor on the prior precisions.

        By default, the only factor is the posterior's own. If `parts` is true and all covariances together exceed the budget of
        bytes, they are reduced to `marginals`.
        """
        total = batch_size(*as_inputs(x))

        def use(mean: Tensor, found: Features | Gradients) -> tuple[Tensor, list[Covariance]]:
            fits = not parts or total * mean[0].numel() ** 2 * mean.element_size() <= budget
            if isinstance(found, Features):
                return mean, self._from_features(mean, found, factors, fits)
            whole, axis = self.posterior.outputs(found, factors), self.likelihood.logit_axis(mean.ndim)
            each = whole if factors is not None else [whole]
            return mean, [one if fits else marginals(one, mean.shape, axis) for one in each]

        return self.over(x, budget, use)

    def _from_features(
        self, mean: Tensor, features: Features, factors: list[float] | None, fits: bool
    ) -> list[Covariance]:
        """Covariances between the outputs at the same position or, if the prediction needs them, between all outputs of an
        example."""
        a, axis = features.of(self.posterior.layer), self.likelihood.logit_axis(mean.ndim)
        order = None if axis is None else features.class_order(axis)
        in_rows = features.place is None if axis is None else order is not None
        needed = fits and (self.likelihood.task != "classification" or mean[0].numel() <= MAX_EXACT_OUTPUTS)
        if in_rows and (a.shape[1] == 1 or (axis is not None and not needed)):
            return list(self.posterior.at_positions(a if order is None else a[:, order.to(a.device)], factors))
        if axis is None and not needed:
            found = [spread.variances() for spread in self.posterior.at_positions(a, factors)]
            return [features.in_order(one.reshape(len(mean), -1)) for one in found]
        whole = [features.in_order(one, 2) for one in self.posterior.across_positions(a, factors)]
        return [one if fits or axis is None else marginals(one, mean.shape, axis) for one in whole]

    def sampled(
        self, x: Any, budget: int, seed: int, posteriors: Sequence[WeightCovariance]
    ) -> Iterator[tuple[Tensor, list[LowRank]]]:
        """Piece by piece, the means of the outputs and, for each Gaussian in `posteriors`, the outputs' covariance from
        `NUM_DIRECTIONS` draws."""
        device = posteriors[0].prior.device
        drawn = [own.directions(NUM_DIRECTIONS, torch.Generator(device).manual_seed(seed)) for own in posteriors]
        for mean, *changes in self.pushed(x, budget, drawn):
            axis = self.likelihood.logit_axis(mean.ndim)
            flat = [one.flatten(2) if axis is None else one.movedim(axis, -1).flatten(1, -2) for one in changes]
            yield mean, [LowRank((one / math.sqrt(len(one))).permute(1, 2, 0)) for one in flat]  # [B P, K, n]

    def pushed(self, x: Any, budget: int, offsets: Sequence[Tensor]) -> Iterator[tuple[Tensor, ...]]:
        """Outputs [B, ...], and their changes [S, B, ...] when offsets [S, n] are added to the chosen weights. Each entry of
        `offsets` gives one tensor of changes."""
        args, kwargs = checked_inputs(x)
        rows = max(1, int(budget // (4 * self.jacobians.cost(args, kwargs).activations)))
        # number of draws that are on the device at a time
        each = max(1, budget // (4 * offsets[0][0].numel() * offsets[0].element_size()))
        for part in split_rows(args, kwargs, rows):
            found = [[self._push(part, some) for some in one.split(each)] for one in offsets]
            yield found[0][0][0], *(torch.cat([change for _, change in parts]) for parts in found)

    def _push(self, inputs: tuple[Any, Any], offsets: Tensor) -> tuple[Tensor, Tensor]:
        device = next(self.jacobians.runner.network.parameters()).device
        mean, changes = self.jacobians.push(*inputs, self.posterior.subset.spread(offsets.to(device)))
        return mean.to(self.dtype), changes.to(self.dtype)

    def moved(self, x: Any, budget: int, offsets: Tensor) -> Tensor:
        """Outputs of the linearized network, [S, B, ...], after offsets [S, n] are added to the chosen weights."""
        outputs = self.jacobians.cost(*checked_inputs(x)).outputs if self.feature_cost(x) is None else 0
        many = outputs > max(MAX_EXACT_OUTPUTS, len(offsets)) or (outputs and offsets.shape[1] > MAX_PULLED_WEIGHTS)
        if many or isinstance(self.posterior, SampledCovariance):
            with suppress(NotImplementedError):  # an operation without a forward derivative
                return torch.cat([mean + change for mean, change in self.pushed(x, budget, [offsets])], dim=1)

        def use(mean: Tensor, found: Features | Gradients) -> Tensor:
            if isinstance(found, Gradients):
                moved = self.posterior.subset.move(found, offsets).movedim(1, -1)
            else:
                layer = self.posterior.layer
                change = offsets[:, matrix_order(self.posterior.subset, layer).to(offsets.device)]  # [S, K, D]
                moved = found.of(layer).to(change).unsqueeze(0) @ change.mT.unsqueeze(1)  # [S, B, T, K]
                moved = found.in_order(moved.flatten(2))
            return mean + moved.reshape(len(offsets), *mean.shape)

        return torch.cat(self.over(x, budget, use), dim=1)

    def covariance(self, x: Any, budget: int) -> Tensor:
        """Covariance over the outputs of each example, [B, O, O]."""

        def use(mean: Tensor, found: Features | Gradients) -> Tensor:
            if isinstance(found, Gradients):
                return self.posterior.outputs(found)
            return found.in_order(self.posterior.across_positions(found.of(self.posterior.layer))[0], 2)

        return torch.cat(self.over(x, budget, use))

    def joint_covariance(self, x: Any) -> Tensor:
        """Covariance over the outputs of all examples, [B O, B O], ordered by example and then by output."""

        def use(mean: Tensor, found: Features | Gradients) -> Tensor:
            if isinstance(found, Gradients):
                return self.posterior.joint(found)
            a = found.of(self.posterior.layer)
            whole = self.posterior.across_positions(a.flatten(0, 1).unsqueeze(0))[0, 0]
            size = mean[0].numel()
            blocks = whole.reshape(len(a), size, len(a), size).transpose(1, 2)
            return found.in_order(blocks, 2).transpose(1, 2).reshape(whole.shape)

        return self.over(x, 2**62, use)[0]
