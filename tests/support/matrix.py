"""Every registered posterior x every kind of leaf that it takes, as one parametrization.

Some posteriors see a leaf only as another one does: entry by entry as `mean_field`, or as the matrix that `inducing` sees. On the
rarer leaves these only repeat, and run with the slow tests.
"""

from collections.abc import Iterable

import pytest
from cases import CASES, POSTERIORS, Case, pairs

SOME = ["linear", "conv1d", "transposed1d", "embedding", "lstm", "attention_kdim", "layer_norm", "custom", "tied"]
every_posterior = pytest.mark.parametrize("name", POSTERIORS)
every_leaf = pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
TYPICAL = {"mean_field", "inducing", "walsh_hadamard"}
"""They stand for the others on rare leaves, in what depends on the leaf alone."""
REPEATS = {"point", "ensemble", "full_covariance", "matrix_normal", "k_tied", "rank_one"}


def over(leaves: Iterable[str], typical: bool = False) -> pytest.MarkDecorator:
    """Every posterior on those of the leaves that it takes; on rare ones slowly, if others do what it does there."""
    return pytest.mark.parametrize(
        ("name", "case"),
        [
            pytest.param(
                name,
                CASES[leaf],
                id=f"{name}-{leaf}",
                marks=[pytest.mark.slow]
                if leaf not in SOME and (name in REPEATS or (typical and name not in TYPICAL))
                else [],
            )
            for name, leaf in pairs(leaves)
        ],
    )


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
