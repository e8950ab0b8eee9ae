"""The base class of priors. A prior is a module that determines the prior scales of the weights."""

from __future__ import annotations

import inspect
import math
from abc import abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn

from bayesify.maths.noise import Randomness
from bayesify.maths.value_checks import transforming
from bayesify.weights.catalog import Weight


@dataclass(frozen=True)
class PriorDraw:
    r"""The Gaussian prior over weights, given S draws of its hyperparameters. The mean of the prior is 0 unless `mean`
    is given.

    The entries of a weight are independent, $\mathcal{N}(\mu_w, \sigma_w^2)$, unless `factor` names the weight. A weight named in
    `factor` is a convolution's kernel with one filter for each pair of an output and an input channel. The filters are
    independent of each other, and each has the distribution $\mathcal{N}(0, \sigma_w^2 C C^\top)$ over its K positions in
    row-major order.

    Args:
        std: Standard deviations $\sigma_w$ by weight name: a number, or a tensor [S] for S draws of a hierarchical
            prior.
        kl: KL of the hyperparameters' own posterior to their prior in nats; 0 for a fixed prior.
        factor: Lower triangular factors C by weight name, [S, K, K].
        std_variance: Variance of $\sigma_w$ by weight name, if `std` is the mean of $\sigma_w$ and not a draw (see
            `Prior.typical`).
        mean: Means $\mu_w$ by weight name, [*shape]. Weights that are not named have mean 0.
    """

    std: Mapping[str, float | Tensor]
    kl: float | Tensor = 0.0
    factor: Mapping[str, Tensor] = field(default_factory=dict)
    std_variance: Mapping[str, Tensor] = field(default_factory=dict)
    mean: Mapping[str, Tensor] = field(default_factory=dict)

    @cached_property
    def fixed(self) -> bool:
        """Whether all scales are numbers, and all entries are independent with mean 0."""
        kinds = set(map(type, self.std.values()))
        return not self.factor and not self.mean and not any(issubclass(kind, Tensor) for kind in kinds)

    def require_fixed(self, owner: str) -> PriorDraw:
        """This prior. Raises a `ValueError` that names `owner` if the prior is not fixed."""
        if not self.fixed:
            raise ValueError(
                f"{owner}: the prior has a random scale or is centered on a network; use a fixed prior with mean 0, "
                f"such as Neal()"
            )
        return self

    def second_moments(self, name: str, value: Tensor) -> Tensor:
        r"""The moments that `cross_entropy` needs, computed from a weight's value.

        For most weights this is $\lVert w - \mu \rVert^2$. For a kernel named in `factor`, it is the matrix $\sum_f w_f
        w_f^\top$, [K, K], where f runs over the filters.

        Args:
            name: The weight's name.
            value: One value of the weight, [*shape], or several values. The moments of several values are added up.
        """
        if name not in self.factor:
            return self.centered(name, value).square().sum()
        filters = value.reshape(-1, self.factor[name].shape[-1])
        return filters.mT @ filters

    def centered(self, name: str, value: Tensor) -> Tensor:
        r"""$w - \mu_w$ for one or several values of a weight."""
        return value - self.mean[name] if name in self.mean else value

    def cross_entropy(self, second_moments: Mapping[str, Tensor], sizes: Mapping[str, int]) -> Tensor:
        r"""$-\mathbb{E}_q \log p(w)$ in nats, summed over weights.

        $$ \sum_w \tfrac{P_w}{2} \log 2\pi\sigma_w^2 + \frac{\mathbb{E}_q \lVert w \rVert^2}{2\sigma_w^2} $$

        and for a kernel with correlated positions

        $$ \tfrac{P_w}{2} \log 2\pi\sigma_w^2 + \tfrac{P_w}{K} \log\det C
           + \frac{1}{2\sigma_w^2} \operatorname{tr} (C C^\top)^{-1} \sum_f \mathbb{E}_q w_f w_f^\top $$

        Args:
            second_moments: For each weight name, the expectation under q of what the method `second_moments` returns. Each is a
                scalar or [S], or [K, K] for a kernel named in `factor`.
            sizes: Number of scalars $P_w$ of each weight, by weight name.
        """
        constant = 0.5 * math.log(2 * math.pi) * sum(sizes[name] for name in second_moments)
        if not self.factor and not any(isinstance(self.std[name], Tensor) for name in second_moments):
            scales = [0.5 / float(self.std[name]) ** 2 for name in second_moments]
            logs = sum(sizes[name] * math.log(self.std[name]) for name in second_moments)
            if transforming():
                parts = [square * scale for square, scale in zip(second_moments.values(), scales, strict=True)]
                return torch.stack(parts, dim=-1).sum(-1) + (logs + constant)
            scaled = torch._foreach_mul(list(second_moments.values()), scales)  # one launch, no copy
            return torch.stack(scaled, dim=-1).sum(-1) + logs + constant
        total: Any = constant
        for name, square in second_moments.items():
            std = self._std(name, square)
            if name in self.factor:
                factor = self.factor[name]  # [S, K, K]
                eye = torch.eye(factor.shape[-1], dtype=factor.dtype, device=factor.device)
                inverse = torch.linalg.solve_triangular(factor, eye, upper=False)
                log_det = factor.diagonal(dim1=-2, dim2=-1).log().sum(-1)
                total = total + sizes[name] / factor.shape[-1] * log_det
                square = ((inverse @ square) * inverse).sum((-1, -2))  # tr C^-1 M C^-T
            total = total + square / (2 * std**2) + sizes[name] * std.log()
        found: Tensor = total
        return found

    def color(self, name: str, value: Tensor) -> Tensor:
        """Turn a kernel with independent positions into a kernel with the prior's correlation. Both kernels have the prior's
        scale.

        Posteriors that are built on the prior work with $C^{-1} w$ instead of w.

        Args:
            name: The weight's name. A weight that is not in `factor` is returned unchanged.
            value: Values of the weight, [S, *shape].
        """
        if name not in self.factor:
            return value
        factor = self.factor[name]
        filters = value.reshape(value.shape[0], -1, factor.shape[-1])  # [S, F, K]
        return (filters @ factor.mT).reshape(value.shape)

    def whiten(self, name: str, value: Tensor) -> Tensor:
        r"""One value of a weight in the prior's units, $C^{-1} w / \sigma_w$: [*shape]. At scale 1, this is the inverse of
        `color`."""
        std = self._std(name, value).detach().mean()
        if name not in self.factor:
            return value / std
        factor = self.factor[name].detach().to(value)[0]
        filters = value.reshape(-1, factor.shape[-1])
        found: Tensor = torch.linalg.solve_triangular(factor, filters.mT, upper=False).mT.reshape(value.shape) / std
        return found

    def size(self, name: str) -> float:
        """Standard deviation of a weight's entries, or the root of their mean variance if the variance depends on the position."""
        std = float(torch.as_tensor(self.std[name]).detach().mean())
        if name not in self.factor:
            return std
        factor = self.factor[name].detach()
        return std * math.sqrt(float(factor.square().sum((-2, -1)).mean()) / factor.shape[-1])

    def precision(self, name: str) -> Tensor:
        r"""$(C C^\top)^{-1} / \sigma_w^2$ of a kernel that is named in `factor`, [S, K, K]."""
        factor = self.factor[name]
        return torch.cholesky_inverse(factor) / self._std(name, factor).square().reshape(-1, 1, 1)

    def _std(self, name: str, like: Tensor) -> Tensor:
        """A weight's scale as a tensor with the type and device of `like`. If the scale is a number, the tensor is created
        directly on the device."""
        std = self.std[name]
        return std.to(like) if isinstance(std, Tensor) else like.new_full((), std)


NEGLIGIBLE_LOG_VALUE = -80.0
"""Logarithm of a number that is negligible next to the prior's, so that the posterior of the hyperparameters is their prior."""


class Prior(nn.Module):
    """A prior over the weights of a network.

    `bind` makes a copy for the weights of a network. The method `draw` of this copy returns the prior's scales. A fixed prior
    defines only `std_of`. A hierarchical prior also defines `build`, `draw`, `typical` and `set_to_prior`. `build` makes the
    parameters of the posterior over the hyperparameters. `draw` returns one set of scales per draw, and their KL.
    """

    name: ClassVar[str]
    _drawn: tuple[list[Any], PriorDraw] | None = None
    """Cached scales of a fixed prior, with the arguments and weights that they belong to. There may be hundreds of scales."""

    def __init__(self) -> None:
        super().__init__()
        self.weights: dict[str, Weight] = {}

    def config(self) -> dict[str, Any]:
        """The prior as plain data: its name and its arguments."""
        arguments = {
            key: getattr(self, key) for key in inspect.signature(type(self).__init__).parameters if key != "self"
        }
        return {"name": self.name, **arguments}

    def bind(self, weights: Mapping[str, Weight], values: Mapping[str, Tensor] | None = None) -> Self:
        """A copy of this prior for the given weights. Priors that are centered on the network also need `values`."""
        bound = type(self)(**{key: value for key, value in self.config().items() if key != "name"})
        bound.weights = dict(weights)
        bound.build()
        bound.look_at(values)
        return bound

    def build(self) -> None:
        """Make the prior's parameters, if it has any."""

    def look_at(self, values: Mapping[str, Tensor] | None) -> None:
        """Store what the prior needs from the values of the network's weights. Most priors need nothing."""

    @abstractmethod
    def std_of(self, weight: Weight) -> float:
        """Prior standard deviation of one weight's entries, with all hyperparameters at 1."""

    def draw(self, num_draws: int, generator: Randomness = None) -> PriorDraw:
        """The prior's scales for `num_draws` draws of the weights."""
        asked = [value for key, value in vars(self).items() if key not in _STANDARD]
        known = self._drawn
        if known is None or known[0] != asked:
            known = asked, PriorDraw({name: self.std_of(weight) for name, weight in self.weights.items()})
            if all(type(value) in _PLAIN or value is self.weights for value in asked):
                self._drawn = known
        return known[1]

    def __getstate__(self) -> dict[str, Any]:
        return {key: value for key, value in vars(self).items() if key != "_drawn"}

    def typical(self) -> PriorDraw:
        """A `PriorDraw` without randomness: each scale is its mean under the hyperparameters' posterior."""
        return self.draw(1)

    def live(self) -> PriorDraw:
        """Like `typical`, but the values are computed again at each access, so that they follow the training of the
        hyperparameters' posterior."""
        typical = self.typical()
        if typical.fixed:
            return typical
        return PriorDraw(kl=0.0, **{key: _Live(self, key) for key in ("std", "factor", "std_variance", "mean")})

    def set_to_prior(self) -> None:
        """Make the hyperparameters' posterior equal to their prior, in place. A fixed prior has no hyperparameters."""


_STANDARD = frozenset((*vars(nn.Module()), "_drawn"))
_PLAIN = frozenset((bool, int, float, str, type(None)))


class _Live(Mapping[str, Any]):
    """One of the mappings in the result of `Prior.typical`, such as `std`. It is computed again at each access."""

    def __init__(self, prior: Prior, key: str) -> None:
        self.prior, self.key = prior, key

    def __getitem__(self, name: str) -> Any:
        return getattr(self.prior.typical(), self.key)[name]

    def __iter__(self) -> Iterator[str]:
        return iter(getattr(self.prior.typical(), self.key))

    def __len__(self) -> int:
        return len(getattr(self.prior.typical(), self.key))


def kernel_positions(weight: Weight) -> int | None:
    """Number K of positions of a convolution's kernel; `None` for other weights."""
    if weight.kind != "matrix" or weight.is_bias or weight.units is None or len(weight.shape) < 3:
        return None
    return math.prod(weight.shape[2:])
