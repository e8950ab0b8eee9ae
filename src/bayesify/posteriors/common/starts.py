"""Initial standard deviations, relative to the size of the weights."""

import math
from collections.abc import Collection, Iterable, Mapping

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from bayesify.weights.batch_statistics import tracking_layers
from bayesify.weights.catalog import Layer, Weight

RELATIVE_STD = 0.1
"""Default initial standard deviation, relative to the root mean square of a layer's weights. Much smaller standard
deviations hardly affect the objective and stay near their start for many epochs. The value was chosen on trained
networks (`benchmarks/defaults.py`)."""

NORMALIZED_RELATIVE_STD = 0.03
"""Default value for networks with BatchNorm after convolutions, or with statistics that are averaged over draws. BatchNorm removes
most weight noise if each draw uses the statistics of its own batch, but not if all draws share the statistics. When
mean-field started at a trained CNN (NLL 0.375), the NLL was 0.466 with 0.1 and 0.382 with 0.03. When it started from
scratch, the NLL was 0.88 with 0.1 and 0.51 with 0.03 (`default_trials_batch_statistics.json`)."""


def relative_stds(
    network: nn.Module, weights: Iterable[Weight], frozen: Collection[str], chosen: Iterable[Weight]
) -> dict[str, float]:
    r"""Initial relative standard deviations, by layer, in networks with BatchNorm. Layers that are not listed use
    `RELATIVE_STD`.

    Noise of size $s\,\mathrm{rms}(W)$ in a layer's weights changes each output by about $s$ times the root mean square
    of all outputs. If $m_c$ and $v_c$ are the running means and variances, this root mean square is $(\overline{m^2 + v})^{1/2}$.
    Frozen BatchNorm divides both the noise and the signal of an output by $v_c^{1/2}$. With $s = 0.1\,(\overline{m^2 +
    v}\;\mathrm{med}(1 / v))^{-1/2}$ the noise is therefore a tenth of the signal. Linear layers start with this $s$. Noise in
    convolutions is the same at every position. Convolutions detect out-of-distribution inputs best if they all start with the
    same small relative standard deviation, `NORMALIZED_RELATIVE_STD`. An MLP that starts with `NORMALIZED_RELATIVE_STD` would
    have hardly any uncertainty.

    `frozen` are the names of layers with frozen statistics, and `chosen` the weights that have a posterior. If no chosen weight
    comes before a BatchNorm layer, the result is empty.
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
        if weight is None or norm is None or beyond in layers:  # the second of two norms may belong to another layer
            continue
        if after in frozen and norm.num_features == weight.matrix_shape[0]:
            found[weight.layer] = max(0.1 * RELATIVE_STD, RELATIVE_STD / math.sqrt(_amplification(norm)))
    return found


def _amplification(norm: _NormBase) -> float:
    """The mean square of all outputs times the median of their inverse variances, but at least 1. The median ignores dead
    outputs."""
    mean, variance = norm.running_mean, norm.running_var
    if mean is None or variance is None or mean.is_meta:
        return 1.0
    inverse = 1 / (variance.double() + norm.eps)
    return max(1.0, float((mean.double().square() + variance.double()).mean() * inverse.quantile(0.5)))


def root_mean_square(layer: Layer, values: Mapping[str, Tensor]) -> float:
    """Root mean square of a layer's weights and bias. If every entry is 0 or any entry is not finite, the result is the standard
    deviation of Neal's prior instead."""
    square = sum(float(values[weight.name].detach().double().square().sum()) for weight in layer.weights)
    size = math.sqrt(square / max(1, layer.numel))
    return size if 0 < size < math.inf else 1 / math.sqrt(layer.weights[0].fan_in or 1)
