r"""Means and variances of elementwise functions of a Gaussian $x \sim \mathcal{N}(m, v)$.

The gain $\operatorname{Cov}(f(x), x) / v = \mathbb{E} f'(x)$ (Stein) is the best linear response to changes of x. The
part of the variance that this linear response does not explain is treated as independent noise. Compositions of
functions, and sums and products of several functions of the same units, are treated as one function of these units.
"""

import math
from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from bayesify.moments.responses import Node, Spread
from bayesify.moments.tensors import Moments, NoRule, Value, in_pieces, nonlinear, units, value_of

NUM_QUADRATURE_POINTS = 8
"""Number of points of the Gauss-Hermite rule for a smooth function."""

NUM_POINTS_FOR_KINKS = 24
"""Number of points of the Gauss-Hermite rule for a function that may have kinks."""

Found = tuple[Tensor, Tensor, Tensor]


def of_root(root: Value, function: Callable[[Tensor], Tensor], found: Found, affine: bool) -> Moments:
    """The result of applying a function to units. `found` contains the mean, the variance and the gain of the result."""
    mean, variance, gain = found
    # If the inputs at two positions have correlation r, the nonlinear parts have a correlation of about r^2 (second Hermite
    # polynomial).
    bent = (variance - gain.square() * root.variance).clamp_min(0)
    rest = Spread(bent, root.channels, root.together[1].square(), True)
    made = root.derived(mean, variance, lambda change: change * gain, base=root, chain=function, affine=affine)
    return units(replace(made, node=Node(mean.shape, (root.node,), made.node.push, None if affine else rest)))


def elementwise(
    x: Moments,
    function: Callable[[Tensor], Tensor],
    name: str,
    closed_form: Callable[[Tensor, Tensor], Found] | None = None,
    count: int = NUM_QUADRATURE_POINTS,
    rises: bool = False,
) -> Moments:
    """Apply an elementwise function to units, by a closed form for Gaussian units or by quadrature with `count` points.

    The closed form takes the units' means and variances and returns the result's mean, variance and gain. `rises` says
    whether the function is nondecreasing.
    """
    value = nonlinear(value_of(x), name)
    made = _elementwise(value, function, closed_form, count)
    if not rises:
        return made
    again = partial(elementwise, function=function, name=name, closed_form=closed_form, count=count, rises=True)
    return units(replace(value_of(made), before=(value, again)))


def _elementwise(
    value: Value,
    function: Callable[[Tensor], Tensor],
    closed_form: Callable[[Tensor, Tensor], Found] | None,
    count: int,
) -> Moments:

    def whole(units: Tensor) -> Tensor:
        return function(value.at(units))

    if value.affine:
        closed = closed_form or (lambda mean, variance: quadrature(mean, variance, function, count))
        found = in_pieces(closed, value.mean, value.variance)
        made = of_root(value, function, found, False)  # type: ignore[arg-type]
        return units(replace(value_of(made), base=value.root, chain=whole))
    root = value.root
    return of_root(root, whole, quadrature(root.mean, root.variance, whole, NUM_POINTS_FOR_KINKS), False)


def combined(x: Value, y: Value, function: Callable[[Tensor, Tensor], Tensor], affine: bool, name: str) -> Moments:
    """Apply a function to two values that are both functions of the same units."""
    affine = affine and x.affine and y.affine
    root = x.root if affine else nonlinear(x.root, name)

    def both(units: Tensor) -> Tensor:
        return function(x.at(units), y.at(units))

    count = 2 if affine else NUM_POINTS_FOR_KINKS
    return of_root(root, both, quadrature(root.mean, root.variance, both, count), affine)


def _leaky(mean: Tensor, variance: Tensor, slope: float) -> Found:
    r"""Moments of $\max(x, 0) + a \min(x, 0)$ in closed form.

    With $z = m / \sqrt v$, ReLU has mean $m \Phi(z) + \sqrt v \varphi(z)$, variance
    $v ((1 + z^2) \Phi + z \varphi - (z \Phi + \varphi)^2)$ and gain $\Phi(z)$. The code uses $u = z / \sqrt 2$.
    """
    root = torch.add(mean.new_full((), 1e-30), variance, alpha=2).sqrt_()
    # Above z = 6, the variance is equal to the variance of x to seven digits, and the formula would lose precision by
    # cancellation. Far below 0, all results are 0. In float32, z is clamped at -7, because at -10 the squares of means would be
    # denormal numbers, which are slow.
    u = (mean / root).clamp_((-10 if mean.dtype == torch.float64 else -7) * math.sqrt(0.5), 6 * math.sqrt(0.5))
    density = torch.addcmul(mean.new_full((), -0.5 * math.log(4 * math.pi)), u, u, value=-1).exp_()
    below = torch.add(mean.new_full((), 0.5), u.erf(), alpha=0.5)
    scaled = density.addcmul_(u, below)  # mean of max(u + e / sqrt 2, 0)
    share = torch.addcmul(below, u.sub_(scaled), scaled, value=2).clamp_(0, 1)
    found = torch.maximum(scaled.mul_(root), mean)  # the mean is at least the mean of x; above z = 6 they are equal
    if slope == 0:
        return found, share.mul_(variance), below
    mixed = slope**2 + (1 - slope) ** 2 * share + 2 * slope * (1 - slope) * below
    return slope * mean + (1 - slope) * found, variance * mixed, slope + (1 - slope) * below


@cache
def _rule(count: int) -> list[tuple[float, float]]:
    nodes, weights = np.polynomial.hermite_e.hermegauss(count)
    return list(zip(nodes.tolist(), (weights / math.sqrt(2 * math.pi)).tolist(), strict=True))


def quadrature(mean: Tensor, variance: Tensor, function: Callable[[Tensor], Tensor], count: int) -> Found:
    """Mean, variance and gain, computed by a Gauss-Hermite rule. For tiny variances, the quadrature points are moved apart to
    avoid rounding errors."""
    std = variance.sqrt()
    least = (1e-6 if mean.dtype == torch.float64 else 1e-3) * (1 + mean.abs())
    wide, is_narrow = torch.maximum(std, least), std < least
    center = function(mean)
    values = [
        (node, weight, function(torch.addcmul(mean, wide, wide.new_tensor(node))) - center)
        for node, weight in _rule(count)
    ]
    zero = torch.zeros_like(std)
    found = sum((weight * value for _, weight, value in values), zero)
    spread = sum((weight * (value - found).square() for _, weight, value in values), zero)
    gain = sum((weight * node * value for node, weight, value in values), zero) / wide
    found, spread = found.masked_fill(is_narrow, 0) + center, torch.where(is_narrow, gain.square() * variance, spread)
    return found, spread, gain


@Moments.rule(F.relu, torch.relu, torch.relu_, Tensor.relu, Tensor.relu_)
def _relu(x: Moments, inplace: bool = False) -> Moments:
    return elementwise(x, F.relu, "relu", lambda mean, variance: _leaky(mean, variance, 0.0), rises=True)


@Moments.rule(F.leaky_relu)
def _leaky_relu(x: Moments, negative_slope: float = 0.01, inplace: bool = False) -> Moments:

    def function(units: Tensor) -> Tensor:
        return F.leaky_relu(units, negative_slope)

    closed = partial(_leaky, slope=negative_slope)
    return elementwise(x, function, "leaky_relu", closed, rises=negative_slope >= 0)


_BOUNDED = {"hardtanh", "clamp", "clamp_min"}
_RISING = {
    *("tanh", "sigmoid", "softplus", "elu", "selu", "celu", "logsigmoid", "softsign", "exp", "relu6", "hardsigmoid")
}
_NEARLY_RISING = {"gelu", "silu", "mish", "hardswish"}
"""Functions that decrease only for negative inputs and only by less than 0.4."""


def _rises(name: str, *args: Any) -> bool:
    """Whether a function is nondecreasing or nearly so, and is the same for all units."""
    if name in _BOUNDED:
        return not any(isinstance(part, Tensor) for part in args)
    return name in _RISING | _NEARLY_RISING and not any(isinstance(part, (int, float)) and part < 0 for part in args)


def _by_quadrature(function: Callable[..., Tensor], count: int) -> None:
    name = getattr(function, "__name__", str(function))
    plain = getattr(Tensor, name[:-1]) if name.endswith("_") else function

    def own(x: Moments, *args: Any, **kwargs: Any) -> Moments:
        if any(isinstance(part, Moments) for part in (*args, *kwargs.values())):
            raise NoRule(f"{name} with a random argument is not supported")
        kwargs.pop("inplace", None)
        kept = args[:-1] if args and isinstance(args[-1], bool) else args
        rises = _rises(name.rstrip("_"), *kept, *kwargs.values())
        return elementwise(x, lambda units: plain(units, *kept, **kwargs), name, count=count, rises=rises)

    Moments.rule(function)(own)


_SMOOTH: tuple[Callable[..., Tensor], ...] = (
    *(torch.tanh, Tensor.tanh, torch.tanh_, Tensor.tanh_, F.tanh, F.gelu, F.silu, F.softplus, F.elu, F.selu, F.celu),
    *(torch.sigmoid, Tensor.sigmoid, torch.sigmoid_, Tensor.sigmoid_, F.sigmoid, F.logsigmoid, F.mish, F.softsign),
    *(torch.square, Tensor.square, torch.sin, Tensor.sin, torch.cos, Tensor.cos, torch.exp, Tensor.exp),
)
_KINKED: tuple[Callable[..., Tensor], ...] = (
    *(F.hardtanh, F.relu6, F.hardswish, F.hardsigmoid, torch.abs, Tensor.abs, torch.clamp, Tensor.clamp),
    *(torch.clamp_min, Tensor.clamp_min),
)
for _functions, _count in ((_SMOOTH, NUM_QUADRATURE_POINTS), (_KINKED, NUM_POINTS_FOR_KINKS)):
    for _function in _functions:
        _by_quadrature(_function, _count)


@Moments.rule(torch.pow, Tensor.pow, Tensor.__pow__)
def _power(x: Any, exponent: Any) -> Any:
    if not isinstance(exponent, int) or exponent < 1:
        return NotImplemented
    return elementwise(x, lambda units: units**exponent, "pow")


@Moments.rule(F.dropout, F.dropout1d, F.dropout2d, F.dropout3d, F.alpha_dropout)
def _dropout(x: Moments, p: float = 0.5, training: bool = True, inplace: bool = False) -> Any:
    return NotImplemented if training else x
