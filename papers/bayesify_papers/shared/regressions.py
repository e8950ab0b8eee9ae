"""Small synthetic regressions for quick runs."""

import numpy as np

from bayesify.datasets import uci


def synthetic(rows: int = 60, inputs: int = 3, splits: int = 3, amplitude: float = 3.0) -> uci.Table:
    """A noisy sine of the sum of the inputs, with standard splits and one gap split.

    Args:
        rows: Number of rows N.
        splits: Number of standard splits.
        amplitude: Amplitude of the sine. The noise has standard deviation 0.1.
    """
    generator = np.random.default_rng(0)
    X = generator.normal(size=(rows, inputs))
    y = amplitude * np.sin(X.sum(1, keepdims=True)) + 0.1 * generator.normal(size=(rows, 1))
    order, third = np.argsort(X[:, 0]), rows // 3
    gap = uci.Split(np.r_[order[:third], order[2 * third :]], order[third : 2 * third])
    return uci.Table("synthetic", "regression", X, y, uci.seeded_splits(X, y, count=splits), (gap,))
