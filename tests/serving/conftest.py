from __future__ import annotations

from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True, scope="module")
def brief_noise() -> Iterator[None]:
    """The noise of methods by name is settled by one training: no test here judges it, and models of a file are made once."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("bayesify.sklearn.settling.MAX_ROUNDS", 1)
        patch.setattr("bayesify.sklearn.settling.DOUBTFUL_LEVERAGE", 1.0)
        yield
