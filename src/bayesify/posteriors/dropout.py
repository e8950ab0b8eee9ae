"""Monte Carlo dropout as a posterior over weights."""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from bayesify.arguments.checks import Probability, checked
from bayesify.posteriors.common.base import DrawRequest, Posterior, repeat_draws
from bayesify.weights.catalog import Weight
from bayesify.weights.named_parameters import NamedParameters

DEFAULT_RATE = 0.05
"""Default probability that an input is dropped. With 0.1 the ECE of a CNN was 0.055."""


class Dropout(Posterior):
    r"""Bernoulli noise on the inputs of layers (Gal & Ghahramani 2016; MC dropout).

    $$ W = M \operatorname{diag}(z) / (1 - \text{rate}), \qquad z_j \sim \text{Bernoulli}(1 - \text{rate}) $$

    with one $z_j$ per input feature or input channel. A draw uses one mask for all examples, so a draw is a function of
    the input. These weights are not masked:

    - biases, embeddings and custom parameters;
    - the network's first layer (unless `first_layer` is true), because a mask would drop features of the data;
    - layers before the last BatchNorm layer (in the order of `named_modules()`), because BatchNorm statistics suit no
      single mask (Li et al. 2019). If all selected layers come before the last BatchNorm layer, they are masked nevertheless.

    q has no density, so $-\mathbb{E}_q \log p(W)$ replaces the KL. A rate of 0 is the same as `Point`. Stored
    parameters: `value` (M), which starts at the network's weights. The noise is one number per input of a layer, so a
    GPU needs no special kernel. Repeated draws are captured as CUDA graphs.

    Args:
        rate: Probability that an input is dropped. The default is 0.05. `fit` lowers the default rate if 0.05 would make a
            trained network much worse.
        first_layer: Whether to also mask the network's first layer.

    Raises:
        ValueError: If `rate` is not in [0, 1).
    """

    name = "dropout"
    title, paper = "MC dropout", "Gal & Ghahramani 2016"
    cost = "P"
    aliases = ("mcd",)
    is_point = True
    capturable = True
    correlated_priors = True

    @checked
    def __init__(self, rate: Probability | None = None, first_layer: bool = False) -> None:
        super().__init__()
        self.rate, self.first_layer = rate, first_layer
        self._rate, self.starts_wide = DEFAULT_RATE if rate is None else rate, rate is None

    def build(self, values: Mapping[str, Tensor], modules: Mapping[str, nn.Module]) -> None:
        """Start at the network's weights. The variance is proportional to `rate / (1 - rate)`."""
        if self.rate is None and self.narrowing < 1:
            odds = self.narrowing**2 * DEFAULT_RATE / (1 - DEFAULT_RATE)
            self.set_rate(odds / (1 + odds))
        self.value = NamedParameters({weight.name: values[weight.name].clone() for weight in self.weights})
        self.past_norms = any(self._can_mask(weight) and not weight.normalized for weight in self.weights)

    def set_rate(self, rate: float) -> None:
        """Set the rate that `fit` has found, and store it with the state."""
        self._rate = rate
        self.register_buffer("found_rate", torch.tensor(rate, dtype=torch.float64))

    def masked(self, weight: Weight) -> bool:
        """Whether a weight's inputs are dropped."""
        return self._can_mask(weight) and not (self.past_norms and weight.normalized)

    def _can_mask(self, weight: Weight) -> bool:
        wanted = self.first_layer or weight.position > 0
        return wanted and weight.units is not None and not weight.is_bias and weight.kind == "matrix"

    def draw(self, request: DrawRequest) -> tuple[dict[str, Tensor], Tensor]:
        """For each draw, choose one random mask per layer, and multiply the weights by the masks."""
        masked = {weight.name: weight for weight in self.weights if self.masked(weight)}
        sizes = [weight.groups * (weight.units or 0) for weight in masked.values()]
        like = self.value.values()[0]
        uniform = request.noise.uniform(request.num_draws * sum(sizes), like.device).view(request.num_draws, sum(sizes))
        keep = dict(zip(masked, (uniform >= self._rate).to(like.dtype).split(sizes, dim=1), strict=True))
        weights = {}
        for name, value in self.value.items():
            if name in keep:
                weights[name] = value * _on_inputs(masked[name], keep[name] / (1 - self._rate))
            else:
                weights[name] = repeat_draws(value, request.num_draws)
        return weights, self.kl(request.prior)

    def mean(self) -> dict[str, Tensor]:
        """M."""
        return dict(self.value.items())

    def variance(self) -> dict[str, Tensor]:
        """`M^2 rate / (1 - rate)` for masked weights, and 0 for other weights."""
        factor = self._rate / (1 - self._rate)
        masked = {weight.name for weight in self.weights if self.masked(weight)}
        return {name: value.square() * (factor if name in masked else 0.0) for name, value in self.value.items()}

    def spatial_covariance(self, weight: Weight, variance: Tensor, positions: int) -> Tensor:
        """For masked weights, `rate / (1 - rate)` times the sum of the outer products of the filters' means, because a mask drops
        or keeps whole filters."""
        filters = self.value[weight.name].reshape(-1, positions)
        return (self._rate / (1 - self._rate) if self.masked(weight) else 0.0) * (filters.mT @ filters)


def _on_inputs(weight: Weight, mask: Tensor) -> Tensor:
    """Reshape a mask over input channels, [S, groups * units], so that it broadcasts against weights [S, *shape]."""
    draws, kernel = mask.shape[0], (1,) * (len(weight.shape) - 2)
    if weight.transposed:
        return mask.view(draws, -1, 1, *kernel)
    if weight.groups == 1:
        return mask.view(draws, 1, -1, *kernel)
    grouped = mask.view(draws, weight.groups, 1, -1).expand(-1, -1, weight.shape[0] // weight.groups, -1)
    return grouped.reshape(draws, weight.shape[0], -1, *kernel)
