"""Where standard deviations start: at a share of the size of the weights they belong to."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping
from itertools import zip_longest

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from bayesify.weights.batch_statistics import tracking_layers
from bayesify.weights.catalog import Layer, Weight

RELATIVE_STD = 0.1
"""Share of a layer's root mean square, by default. Much smaller scales stay where they start for many epochs, since the objective
hardly sees them; chosen on trained networks (`benchmarks/defaults.py`)."""

NORMALIZED_RELATIVE_STD = 0.03
"""The same before BatchNorm whose statistics are averaged over draws. By each draw's own batch it would take most of the noise of
weights before it away; by averages it does not. Twelve epochs of mean-field from scratch: NLL 0.65 with 0.1, 0.52 with 0.03."""

SIGNAL_SHARES = (0.1, 0.08)
"""Noise before frozen BatchNorm as a share of the signal after it: of linear maps, and of convolutions, whose noise is the same at
every position. Trained CNNs (seeds 10 and 11), mean-field, k-tied, matrix normal, rank-one and inducing weights: with 0.1 the NLL
rises by 0.018, 0.021, 0.019, 0.033 and 0.025, with 0.05 by 0.003, 0.002, 0.003, 0.005 and 0.011, but strangers are told worse than
by the network. An MLP with 0.05 would have hardly any uncertainty."""

LEAST_RELATIVE_STD = 0.01
"""The least before frozen BatchNorm, whatever its statistics say."""


def relative_stds(network: nn.Module, weights: Iterable[Weight], frozen: Collection[str]) -> dict[str, float]:
    r"""The shares of layers before BatchNorm, by layer; `RELATIVE_STD` for all others.

    Noise of size $s\,\mathrm{rms}(W)$ in a layer's weights moves each output by about $s$ times the root mean square of all,
    $(\overline{m^2 + v})^{1/2}$ in their running means $m_c$ and variances $v_c$. Frozen BatchNorm divides that by $v_c^{1/2}$, and
    the output's own signal by the same. So $s = a\,(\overline{m^2 + v}\;\overline{1 / v})^{-1/2}$ is noise of a share a of the
    signal, `SIGNAL_SHARES`. A CNN whose first layer has outputs of very different sizes (NLL 0.358) has
    0.485 at the start with 0.1 everywhere, 0.363 with a = 0.1.

    Args:
        network: As it was given.
        weights: All weights of linear maps in it.
        frozen: Names of the layers whose statistics are frozen.
    """
    layers = tracking_layers(network)
    owners = {
        weight.name.rpartition(".")[0]: weight for weight in weights if weight.kind == "matrix" and not weight.is_bias
    }
    order = [path for path, _ in network.named_modules() if path in owners or path in layers]
    found: dict[str, float] = {}
    for path, after in zip_longest(order, order[1:], fillvalue=""):
        weight = owners.get(path)
        if weight is None or not weight.normalized:
            continue
        norm, share = layers.get(after), NORMALIZED_RELATIVE_STD
        if norm is not None and after in frozen and norm.num_features == weight.matrix_shape[0]:
            share = max(LEAST_RELATIVE_STD, SIGNAL_SHARES[len(weight.shape) > 2] / math.sqrt(_amplification(norm)))
        found[weight.layer] = share
    return found


def _amplification(norm: _NormBase) -> float:
    """Mean over outputs of (mean square of all outputs) / (variance of the output), at least 1."""
    mean, variance = norm.running_mean, norm.running_var
    if mean is None or variance is None or mean.is_meta:
        return 1.0
    inverse = 1 / (variance.double() + norm.eps)
    return max(1.0, float((mean.double().square() + variance.double()).mean() * inverse.mean()))


def start_std(
    init_std: float | None, layer: Layer, values: Mapping[str, Tensor], relative: float = RELATIVE_STD
) -> float:
    """The standard deviation of a layer's weights before training.

    Args:
        init_std: What the user gives; `None` for a share of the root mean square of the layer's weights, bias included.
        layer: The layer.
        values: The network's weights by name. Where a layer's are all 0, Neal's standard deviation stands in for their size.
        relative: The share.
    """
    return init_std if init_std is not None else relative * root_mean_square(layer, values)


def root_mean_square(layer: Layer, values: Mapping[str, Tensor]) -> float:
    """Of a layer's weights, bias included; Neal's standard deviation where they are all 0 or not finite."""
    square = sum(float(values[weight.name].detach().double().square().sum()) for weight in layer.weights)
    size = math.sqrt(square / max(1, layer.numel))
    return size if 0 < size < math.inf else 1 / math.sqrt(layer.weights[0].fan_in or 1)
