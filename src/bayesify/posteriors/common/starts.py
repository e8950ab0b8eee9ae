"""Where standard deviations start: at a share of the size of the weights they belong to."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from bayesify.weights.batch_statistics import tracking_layers
from bayesify.weights.catalog import Layer, Weight

RELATIVE_STD = 0.1
"""Share of a layer's root mean square, by default. Much smaller scales stay where they start for many epochs, since the objective
hardly sees them; chosen on trained networks (`benchmarks/defaults.py`)."""

NORMALIZED_RELATIVE_STD = 0.03
"""The same in networks with BatchNorm after convolutions, or whose statistics are averaged over draws. By each draw's own batch it
would take most of the noise of weights before it away; by the same statistics for all draws it does not. Mean-field after a trained
CNN (NLL 0.375): 0.466 with 0.1, 0.382 with 0.03; from scratch 0.88 and 0.51 (`default_trials_batch_statistics.json`)."""


def relative_stds(
    network: nn.Module, weights: Iterable[Weight], frozen: Collection[str], chosen: Iterable[Weight]
) -> dict[str, float]:
    r"""The shares of layers in networks with BatchNorm, by layer; `RELATIVE_STD` for all others.

    Noise of size $s\,\mathrm{rms}(W)$ in a layer's weights moves each output by about $s$ times the root mean square of all,
    $(\overline{m^2 + v})^{1/2}$ in their running means $m_c$ and variances $v_c$. Frozen BatchNorm divides that by $v_c^{1/2}$, and
    the output's own signal by the same. So $s = 0.1\,(\overline{m^2 + v}\;\mathrm{med}(1 / v))^{-1/2}$ is noise of a tenth of the
    signal, with which linear maps start. Noise of convolutions is the same at every position, and tells strangers best where all
    layers have the same small share, `NORMALIZED_RELATIVE_STD`; an MLP would have hardly any uncertainty with that.

    Args:
        network: As it was given.
        weights: All weights in it.
        frozen: Names of the layers whose statistics are frozen.
        chosen: The weights under a posterior. Where none comes before BatchNorm, none has another share.
    """
    layers = tracking_layers(network)
    before = [weight for weight in chosen if weight.normalized]
    if any(len(weight.shape) > 2 for weight in before):
        return {weight.layer: NORMALIZED_RELATIVE_STD for weight in weights}
    owners = {weight.name.rpartition(".")[0]: weight for weight in before if not weight.is_bias}
    paths = {weight.name.rpartition(".")[0] for weight in weights if weight.kind == "matrix"} | layers.keys()
    order = [path for path, _ in network.named_modules() if path in paths]
    found = {weight.layer: NORMALIZED_RELATIVE_STD for weight in before}
    for path, after, beyond in zip(order, order[1:], [*order[2:], ""], strict=False):
        weight, norm = owners.get(path), layers.get(after)
        if weight is None or norm is None or beyond in layers:  # norms in a row may belong to other layers
            continue
        if after in frozen and norm.num_features == weight.matrix_shape[0]:
            found[weight.layer] = max(0.1 * RELATIVE_STD, RELATIVE_STD / math.sqrt(_amplification(norm)))
    return found


def _amplification(norm: _NormBase) -> float:
    """Mean square of all outputs over the variance of the median one, at least 1: dead outputs, of variance 0, do not count."""
    mean, variance = norm.running_mean, norm.running_var
    if mean is None or variance is None or mean.is_meta:
        return 1.0
    inverse = 1 / (variance.double() + norm.eps)
    return max(1.0, float((mean.double().square() + variance.double()).mean() * inverse.quantile(0.5)))


def root_mean_square(layer: Layer, values: Mapping[str, Tensor]) -> float:
    """Of a layer's weights, bias included; Neal's standard deviation where they are all 0 or not finite."""
    square = sum(float(values[weight.name].detach().double().square().sum()) for weight in layer.weights)
    size = math.sqrt(square / max(1, layer.numel))
    return size if 0 < size < math.inf else 1 / math.sqrt(layer.weights[0].fan_in or 1)
