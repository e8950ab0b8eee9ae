"""Priors with given scales, which are equal for all weights or depend on the fan-in; the center is 0 or the weights of a
network."""

import math
from collections.abc import Mapping, Sequence
from typing import Any, Self

import torch
from torch import Tensor

from bayesify.arguments.checks import Positive, checked
from bayesify.maths.noise import Randomness
from bayesify.priors.base import Prior, PriorDraw
from bayesify.weights.catalog import Weight
from bayesify.weights.named_parameters import NamedParameters


class Gaussian(Prior):
    r"""$p(w) = \mathcal{N}(0, \text{std}^2)$ for every weight.

    Args:
        std: Standard deviation.

    Raises:
        ValueError: If `std` is not positive and finite.
    """

    name = "gaussian"

    @checked
    def __init__(self, std: Positive) -> None:
        super().__init__()
        self.std = float(std)

    def std_of(self, weight: Weight) -> float:
        """`std` for every weight."""
        return self.std


class Standard(Prior):
    r"""$p(w) = \mathcal{N}(0, 1)$ for every weight."""

    name = "standard"

    def std_of(self, weight: Weight) -> float:
        """1 for every weight."""
        return 1.0


class Neal(Prior):
    r"""$p(w) = \mathcal{N}(0, \text{scale}^2 / \text{fan\_in})$ (Neal 1996). With this prior, the scale of the activations does
    not depend on the width of the layers.

    The fan-in of a layer is the number of its inputs. The bias does not count. Ritter et al. (2021) include the bias in
    W, so their fan-in is larger by 1. For a 3 x 3 convolution of 64 channels, which has 576 inputs, the prior standard deviation
    of Ritter et al. is 0.09 % smaller than here. A bias shares its layer's fan-in. Embeddings, normalization layers and custom
    parameters have no fan-in, and their standard deviation is `scale`.

    Args:
        scale: Factor on the standard deviation. The default prior of `bayesianize` has scale 8. With this scale, trained networks
            do not lose accuracy. Neal's own scale of 1 is for networks whose initial weights come from the prior.

    Raises:
        ValueError: If `scale` is not positive and finite.
    """

    name = "neal"

    @checked
    def __init__(self, scale: Positive = 1.0) -> None:
        super().__init__()
        self.scale = float(scale)

    def std_of(self, weight: Weight) -> float:
        """`scale / sqrt(fan_in)`."""
        return self.scale / math.sqrt(weight.fan_in or 1)


class AroundNetwork(Neal):
    r"""$p(w) = \mathcal{N}(w_0, \text{scale}^2 / \text{fan\_in})$, centered on the weights $w_0$ of the given network.

    This prior does not pull a trained network away from its weights, so it is safe to train for few epochs and to use wide
    scales. It is not a prior in the strict sense if $w_0$ was trained on the same data. The data are then used twice, so the
    evidence is too high and, if training has overfitted, the uncertainty is too small. If $w_0$ comes from other data (a
    pretrained network), this is a proper prior. Weights without a fan-in have standard deviation `scale`.

    `center` stores $w_0$ by name and is not trained.

    Args:
        scale: Factor on the standard deviation of `Neal`.

    Raises:
        ValueError: If `scale` is not positive and finite.
    """

    name = "around_network"
    center: NamedParameters

    def look_at(self, values: Mapping[str, Tensor] | None) -> None:
        """Store a copy of the network's weights."""
        if values is None:
            raise ValueError(
                "AroundNetwork: the mean of this prior is not 0, but the method needs a prior with mean 0; use Neal(), or "
                "train a posterior with bayesianize"
            )
        self.center = NamedParameters({name: values[name].clone() for name in self.weights}, trainable=False)

    def draw(self, num_draws: int, generator: Randomness = None) -> PriorDraw:
        """Fixed scales, with the network's weights as means."""
        return PriorDraw(super().draw(num_draws).std, mean=dict(self.center.items()))


class Varied(Prior):
    r"""$p(w) = \mathcal{N}(0, \sigma_w^2)$. The scales $\sigma_w$ are in a buffer, because the models of a stack may have
    different scales.

    Shapes:
        scales: [U], for U distinct scales. Two weights share one entry if each model gives both weights the same scale.
    """

    name = "varied"
    scales: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.places: dict[str, int] = {}
        self.every = torch.empty(0)

    @classmethod
    def of(cls, prior: Prior, stds: Sequence[Mapping[str, Any]], like: Tensor) -> Self:
        """Make a prior whose `scales` are those of the first of R models. `stds` contains the scales of each model, by weight
        name. The attribute `every` of the prior contains the scales of all models, [R, U]."""
        made = cls()
        made.weights = dict(prior.weights)
        columns = {name: tuple(float(one[name]) for one in stds) for name in prior.weights}
        distinct = list(dict.fromkeys(columns.values()))
        made.places = {name: distinct.index(column) for name, column in columns.items()}
        made.every = torch.tensor(distinct, dtype=like.dtype, device=like.device).mT.contiguous()
        made.register_buffer("scales", made.every[0].clone())
        return made

    def std_of(self, weight: Weight) -> float:
        """The scale as a number. This method does not work inside function transforms such as `vmap`."""
        return float(self.scales[self.places[weight.name]])

    def draw(self, num_draws: int, generator: Randomness = None) -> PriorDraw:
        parts = self.scales.unbind(-1)
        return PriorDraw({name: parts[place] for name, place in self.places.items()})
