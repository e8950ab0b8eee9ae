"""The effective number of a network's weights, which measures how much of the training rows the network has memorized."""

import math
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from bayesify.jacobians.general import Inputs
from bayesify.jacobians.linearization import Jacobians
from bayesify.running.inputs_and_outputs import split_rows
from bayesify.running.runner import Runner
from bayesify.weights.catalog import Weight, group_layers

MAX_NUMBERS, MIN_NUMBERS = 1024, 32
"""Largest number of scalar outputs in the kernel, and the smallest number that gives an estimate."""
MAX_ENTRIES = 2**25
"""Largest number of entries in the Jacobian of the outputs in the kernel (128 MiB)."""
NUM_NOISE_STEPS = 50
"""Number of fixed-point iterations for the noise."""
ROWS_AT_ONCE = 64
LEARNED_SHARE = 0.9
"""Factor on the effective number of weights. A training run that ends before the optimum has memorized less than the formula says.
This factor fits the test errors of six trained networks best (three regressions, two seeds)."""


@torch.no_grad()
def held_out_ratio(
    runner: Runner,
    weights: Mapping[str, Weight],
    inputs: Iterable[Inputs],
    residual: float,
    num_data: float,
    output: str | int | None,
    counts: Iterable[Tensor],
) -> float:
    r"""Estimate of the mean squared error on new rows, divided by the mean squared error on the N training rows. Each row has O
    outputs.

    $$ \frac{N O}{N O - 0.9\,\gamma}, \qquad \gamma = \operatorname{tr} K (K + \alpha \sigma^2 I)^{-1}, \qquad K = J D J^\top $$

    J holds the derivatives of the outputs with respect to all weights. D is a diagonal matrix. The diagonal entry of D for a
    weight is the mean square of all weights in the same layer, so that the result does not depend on units. $\alpha$ and the
    noise $\sigma^2$ come from MacKay's fixed point (1992). If K has fewer than N rows, each row counts several times, and
    $\gamma$ is underestimated. A row of weight w counts as w rows.

    This estimate was compared with the ratio measured on test rows, for three regressions of 1,000 rows (2,901 to 28,945
    weights). The estimates were 1.06 (measured: 1.03), 1.7 to 1.9 (measured: 1.6 to 2.1) and 2.4 (measured: 2.4 to 2.5).

    `inputs` and `counts` yield the inputs and the weights [B] of training rows, batch by batch. Only the first batches are read.
    `residual` is the mean squared error on the training rows. The function returns 1 if there are too few rows, or if there are
    so many weights that too few rows fit into memory.
    """
    size = sum(weight.numel for weight in weights.values())
    scale = _scales(weights, {name: runner.network.get_parameter(name).detach() for name in weights})
    rows, shares, count, most, outputs = [], [], 0, min(MAX_NUMBERS, MAX_ENTRIES // max(1, size)), 1
    jacobians = Jacobians(runner, list(weights), output=output)
    pieces = (
        piece
        for batch, own in zip(inputs, counts, strict=True)
        for piece in zip(split_rows(*batch, ROWS_AT_ONCE), own.split(ROWS_AT_ONCE), strict=True)
    )
    for (args, kwargs), own in pieces:
        if count >= most or most < MIN_NUMBERS:
            break
        point = jacobians.at(args, kwargs)
        outputs = point.outputs[:1].numel()
        found = point.pull(point.identity())
        scaled = torch.cat([scale[name] * found.dense(name).flatten(2).flatten(0, 1) for name in weights], 1)
        rows.append(scaled[: most - count])
        shares.append(own.to(scaled).repeat(outputs)[: most - count])
        count += len(rows[-1])
    counted = float(torch.cat(shares).double().sum()) if shares else 0.0
    if counted < MIN_NUMBERS or not residual > 0:
        return 1.0
    matrix, total = torch.cat(shares).sqrt().unsqueeze(1) * torch.cat(rows), num_data * outputs
    gram = matrix @ matrix.mT if count <= size else matrix.mT @ matrix  # the same eigenvalues, except for zeros
    spectrum = torch.linalg.eigvalsh(gram.double()).clamp_min(0) * max(1.0, total / counted)
    noise = fixed_point_noise(
        spectrum / residual, 1.0, residual, squared_norm=size, squared_error=total * residual, count=total
    )
    learned = LEARNED_SHARE * (1 - residual / noise) if math.isfinite(noise) else 0.0
    return 1 / (1 - max(0.0, learned))


def _scales(weights: Mapping[str, Weight], values: Mapping[str, Tensor]) -> dict[str, float]:
    """For each weight, the root mean square of all weights in its layer."""
    found: dict[str, float] = {}
    for layer in group_layers(weights.values()):
        own = torch.cat([values[part.name].double().flatten() for part in layer.weights])
        found |= dict.fromkeys((part.name for part in layer.weights), float(own.square().mean().sqrt()))
    return found


def fixed_point_noise(
    spectrum: Tensor, factor: float, noise: float, *, squared_norm: float, squared_error: float, count: float
) -> float:
    r"""MacKay's fixed point for the noise, $\sigma^2 = \mathrm{SSE} / (N O - \gamma)$ with $\gamma$ effective parameters.

    `spectrum` contains the eigenvalues of the curvature for the initial noise variance `noise`. The eigenvalues and
    `squared_norm` (the squared norm of the mean weights) are in units of the prior's standard deviations. Each step also updates
    `factor`, which multiplies the prior precisions. `count` is the number of target values, N O.
    """
    unit = spectrum.double() * noise
    for _ in range(NUM_NOISE_STEPS):
        effective = float((unit / (unit + factor * noise)).sum())
        factor = effective / max(squared_norm, 1e-12)
        noise = squared_error / max(count - effective, 1e-6)
    return noise
