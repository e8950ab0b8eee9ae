"""Every registered posterior x every kind of leaf that it takes, as one parametrization.

A test runs a quarter of the pairs by default, shifted from test to test: each test meets every posterior and every leaf, and over
all tests each pair is met. The others, and those on rare leaves that only repeat another posterior, run with the slow tests.
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
"""They stand for the others on rare leaves, in what depends on the leaf alone."""
REPEATS = {"point", "ensemble", "full_covariance", "matrix_normal", "k_tied", "rank_one"}
"""Some posteriors see a leaf only as another one does: entry by entry as `mean_field`, or as the matrix that `inducing` sees."""
STRIDE, FIRST_SHIFT = 4, 12
"""One pair in so many runs by default; from this start the names of the tests have every remainder."""


def over(leaves: Iterable[str], typical: bool = False) -> Callable[[Any], Any]:
    """Every posterior on those of the leaves that it takes; `typical` leaves rare ones to those that stand for the others."""
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
    """One leaf of each kind; the others slowly, for what is built on a tested piece that knows leaves."""
    return pytest.mark.parametrize(
        "case",
        [pytest.param(case, id=case.name, marks=[] if case.name in SOME else pytest.mark.slow) for case in cases],
    )


every_pair = over(CASES)
most_pairs = over(CASES, typical=True)
some_pairs = over(SOME)
"""One leaf of each kind, for what depends on the posterior more than on the leaf."""
