"""Every registered posterior x every kind of leaf that it takes, as one parametrization.

By default a test runs a quarter of the pairs, a different quarter for each test. So each test covers every posterior and every
leaf, and all tests together cover each pair. The other pairs run with the slow tests, and so do posteriors on rare leaves that
only repeat another posterior.
"""

import zlib
from collections.abc import Callable, Iterable
from typing import Any

import pytest
from cases import CASES, POSTERIORS, Case, pairs

SOME = ["linear", "conv1d", "transposed1d", "embedding", "lstm", "attention_kdim", "layer_norm", "custom", "tied"]
every_posterior = pytest.mark.parametrize("name", POSTERIORS)
every_leaf = pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
TYPICAL = {"mean_field", "inducing", "walsh_hadamard"}
"""Posteriors that represent the others on rare leaves, in tests that depend only on the leaf."""
REPEATS = {"point", "ensemble", "full_covariance", "matrix_normal", "k_tied", "rank_one"}
"""Posteriors that treat a leaf as another posterior does: entry by entry as `mean_field`, or as a matrix as `inducing`."""
STRIDE, FIRST_SHIFT = 4, 12
"""One pair in `STRIDE` runs by default. With this first shift, the hashes of the tests' names have every remainder."""


def over(leaves: Iterable[str], typical: bool = False) -> Callable[[Any], Any]:
    """Every posterior on the leaves that it takes. With `typical`, only `TYPICAL` posteriors run on rare leaves by default."""
    rows, columns = list(POSTERIORS), list(CASES)

    def parametrize(test: Any) -> Any:
        shift = zlib.crc32(test.__name__.encode(), FIRST_SHIFT)

        def is_slow(name: str, leaf: str) -> bool:
            if leaf not in SOME and (name in REPEATS or (typical and name not in TYPICAL)):
                return True
            return (rows.index(name) + columns.index(leaf) + shift) % STRIDE != 0

        found = [
            pytest.param(
                name, CASES[leaf], id=f"{name}-{leaf}", marks=[pytest.mark.slow] if is_slow(name, leaf) else []
            )
            for name, leaf in pairs(leaves)
        ]
        return pytest.mark.parametrize(("name", "case"), found)(test)

    return parametrize


def some_leaves(cases: Iterable[Case]) -> pytest.MarkDecorator:
    """One leaf of each kind, and the others as slow tests, for code that builds on a tested part which handles leaves."""
    return pytest.mark.parametrize(
        "case",
        [pytest.param(case, id=case.name, marks=[] if case.name in SOME else pytest.mark.slow) for case in cases],
    )


every_pair = over(CASES)
most_pairs = over(CASES, typical=True)
some_pairs = over(SOME)
"""One leaf of each kind, for tests that depend more on the posterior than on the leaf."""
