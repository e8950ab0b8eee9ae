"""Evidence of linear models with Gaussian noise."""

from __future__ import annotations

from torch import Tensor

NUM_NOISE_STEPS = 50
"""Number of fixed-point iterations for the noise."""


def fixed_point_noise(
    spectrum: Tensor, factor: float, noise: float, *, squared_norm: float, squared_error: float, count: float
) -> float:
    r"""MacKay's fixed point for the noise, $\sigma^2 = \mathrm{SSE} / (N O - \gamma)$ with $\gamma$ effective parameters.

    Args:
        spectrum: Eigenvalues of the curvature at the noise variance `noise`, whitened by the prior.
        factor: Initial factor on the prior precisions, which is optimized as well.
        noise: Initial variance.
        squared_norm: Squared norm of the mean weights, whitened by the prior.
        squared_error: SSE.
        count: N O.
    """
    unit = spectrum.double() * noise
    for _ in range(NUM_NOISE_STEPS):
        effective = float((unit / (unit + factor * noise)).sum())
        factor = effective / max(squared_norm, 1e-12)
        noise = squared_error / max(count - effective, 1e-6)
    return noise
