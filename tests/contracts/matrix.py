"""Every registered posterior x every kind of leaf, as one parametrization."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from cases import CASES, EVERY_LEAF, POSTERIORS, Case, convert

from bayesify import BayesianNetwork

every_posterior = pytest.mark.parametrize("name", POSTERIORS)
every_leaf = pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
SOME = ["linear", "conv1d", "transposed1d", "embedding", "lstm", "attention_kdim", "layer_norm", "custom", "tied"]
some_leaves = pytest.mark.parametrize("case", [CASES[name] for name in SOME], ids=SOME)
"""One leaf of each kind, for what depends on the posterior more than on the leaf."""


def convert_or_skip(name: str, case: Case, dtype: torch.dtype = torch.float32, **more: Any) -> BayesianNetwork:
    """Convert, or see that the posterior says in words why it does not take this leaf, and skip."""
    refusal = ""
    try:
        return convert(name, case, dtype, **more)
    except ValueError as error:
        refusal = str(error)
    assert name not in EVERY_LEAF, f"{name} must take {case.name}: {refusal}"
    assert ";" in refusal, f"the refusal names no remedy: {refusal}"
    pytest.skip(refusal)
