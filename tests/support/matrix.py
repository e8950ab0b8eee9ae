"""Every registered posterior x every kind of leaf that it takes, as one parametrization."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
from cases import CASES, POSTERIORS, pairs

SOME = ["linear", "conv1d", "transposed1d", "embedding", "lstm", "attention_kdim", "layer_norm", "custom", "tied"]
every_posterior = pytest.mark.parametrize("name", POSTERIORS)
every_leaf = pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())


def over(leaves: Iterable[str]) -> pytest.MarkDecorator:
    """Every posterior on those of the leaves that it takes."""
    return pytest.mark.parametrize(
        ("name", "case"), [pytest.param(name, CASES[leaf], id=f"{name}-{leaf}") for name, leaf in pairs(leaves)]
    )


every_pair = over(CASES)
some_pairs = over(SOME)
"""One leaf of each kind, for what depends on the posterior more than on the leaf."""
