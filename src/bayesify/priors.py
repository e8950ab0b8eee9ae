"""Priors over weights: zero-mean Gaussians whose scale follows from the weight, fixed or with a posterior of its own."""

from __future__ import annotations

import inspect
import math
from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn

from bayesify.weights import Weight


@dataclass(frozen=True)
class PriorDraw:
    r"""The prior over weights given one draw of its hyperparameters: independent $\mathcal{N}(0, \sigma_w^2)$.

    Args:
        std: $\sigma_w$ by weight name, a number, or [S] where the prior is hierarchical and S sets were drawn.
        kl: KL of the hyperparameters' own posterior to their prior in nats; 0 for a fixed prior.
    """

    std: Mapping[str, float | Tensor]
    kl: float | Tensor = 0.0

    def cross_entropy(self, squares: Mapping[str, Tensor], sizes: Mapping[str, int]) -> Tensor:
        r"""$-\mathbb{E}_q \log p(w)$ in nats, summed over weights.

        $$ \sum_w \tfrac{P_w}{2} \log 2\pi\sigma_w^2 + \frac{\mathbb{E}_q \lVert w \rVert^2}{2\sigma_w^2} $$

        Args:
            squares: $\mathbb{E}_q \lVert w \rVert^2$ by name, a scalar or [S].
            sizes: $P_w$, the number of scalars, by name.
        """
        constant = 0.5 * math.log(2 * math.pi) * sum(sizes[name] for name in squares)
        if not any(isinstance(self.std[name], Tensor) for name in squares):
            scales = [0.5 / float(self.std[name]) ** 2 for name in squares]
            scaled = torch._foreach_mul(list(squares.values()), scales)  # one launch, and no copy to the device
            logs = sum(sizes[name] * math.log(self.std[name]) for name in squares)
            return torch.stack(scaled, dim=-1).sum(-1) + logs + constant
        total: Any = constant
        for name, square in squares.items():
            std = torch.as_tensor(self.std[name], dtype=square.dtype, device=square.device)
            total = total + square / (2 * std**2) + sizes[name] * std.log()
        return total


class Prior(nn.Module):
    """A prior over the weights of a network.

    `bind` makes a copy that knows the weights; `draw` then gives the prior's scales. A fixed prior writes `std_of` only. A
    hierarchical one makes the parameters of its hyperparameters' posterior in `build` and overrides `draw`, which
    returns one set of scales per draw and their KL; nothing else changes for the posteriors.
    """

    name: ClassVar[str]

    def __init__(self) -> None:
        super().__init__()
        self.weights: dict[str, Weight] = {}

    def config(self) -> dict[str, Any]:
        """The prior as plain data: its name and its arguments."""
        arguments = {
            key: getattr(self, key) for key in inspect.signature(type(self).__init__).parameters if key != "self"
        }
        return {"name": self.name, **arguments}

    def bind(self, weights: Mapping[str, Weight]) -> Self:
        """A copy of this prior for the given weights."""
        bound = type(self)(**{key: value for key, value in self.config().items() if key != "name"})
        bound.weights = dict(weights)
        bound.build()
        return bound

    def build(self) -> None:
        """Make parameters, where the prior has any."""

    @abstractmethod
    def std_of(self, weight: Weight) -> float:
        """Prior standard deviation of one weight's entries."""

    def draw(self, num_draws: int, generator: torch.Generator | None = None) -> PriorDraw:
        """The scales that `num_draws` draws of the weights are judged by."""
        return PriorDraw({name: self.std_of(weight) for name, weight in self.weights.items()})


class Gaussian(Prior):
    r"""$p(w) = \mathcal{N}(0, \text{std}^2)$, the same for every weight.

    Args:
        std: Standard deviation.

    Raises:
        ValueError: If `std` is not positive and finite.
    """

    name = "gaussian"

    def __init__(self, std: float) -> None:
        super().__init__()
        if not (std > 0 and math.isfinite(std)):
            raise ValueError(f"priors.Gaussian: std={std}; give a positive number")
        self.std = float(std)

    def std_of(self, weight: Weight) -> float:
        """`std`, whatever the weight."""
        return self.std


class Standard(Prior):
    r"""$p(w) = \mathcal{N}(0, 1)$ for every weight."""

    name = "standard"

    def std_of(self, weight: Weight) -> float:
        """1, whatever the weight."""
        return 1.0


class Neal(Prior):
    r"""$p(w) = \mathcal{N}(0, \text{scale}^2 / \text{fan\_in})$, so that activations keep their scale in width (Neal 1996).

    A bias shares its layer's fan-in; embeddings, normalization layers and custom parameters, which have none,
    get standard deviation `scale`.

    Args:
        scale: Factor on the standard deviation; the inducing weights paper uses 4 for its toy regression.

    Raises:
        ValueError: If `scale` is not positive and finite.
    """

    name = "neal"

    def __init__(self, scale: float = 1.0) -> None:
        super().__init__()
        if not (scale > 0 and math.isfinite(scale)):
            raise ValueError(f"priors.Neal: scale={scale}; give a positive number")
        self.scale = float(scale)

    def std_of(self, weight: Weight) -> float:
        """`scale / sqrt(fan_in)`."""
        return self.scale / math.sqrt(weight.fan_in or 1)


REGISTRY: dict[str, type[Prior]] = {kind.name: kind for kind in (Gaussian, Standard, Neal)}
"""Priors by the name that configuration files use."""
