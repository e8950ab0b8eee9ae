"""Numbers that Ober & Aitchison (2021) print."""

from __future__ import annotations

CIFAR10: dict[str, dict[str, tuple[float, float, float]]] = {
    "fac": {"spatial": (-0.58, 80.27, -1.06), "scale": (-0.66, 77.65, -1.12)},
    "li": {"spatial": (-0.62, 78.96, -0.84), "scale": (-0.60, 79.46, -0.88)},
    "fac-gi": {"spatial": (-0.49, 83.33, -0.91), "scale": (-0.56, 81.72, -0.96)},
    "gi": {"spatial": (-0.40, 86.70, -0.68), "scale": (-0.43, 85.73, -0.75)},
}
"""Table 1, first block: test log-likelihood, accuracy in percent and bound per example, by posterior and prior."""
