from __future__ import annotations

import pytest

from bayesify.compare import tuning


def shorten(patch: pytest.MonkeyPatch) -> None:
    effort = tuning.Effort(2, 4, 2, 4, 2, 1, 2, 30, 2, 5_000, 2, 4, 2)
    for name, value in {
        "compare.tuning.QUICK": effort,
        "compare.tuning.FULL": effort,
        "compare.models.PREDICTION_DRAWS": 8,
        "compare.runs.TIMED_ROWS": 20,
        "compare.rivals.ROUNDS": 3,
        "compare.rivals.FOLDS": 2,
        "compare.rivals.PENALTIES": 5,
        "sklearn.training.STEPS": 20,
        "sklearn.settling.MAX_ROUNDS": 1,
        "sklearn.settling.DOUBTFUL_LEVERAGE": 1.0,
    }.items():
        patch.setattr(f"bayesify.{name}", value)


@pytest.fixture
def brief(monkeypatch: pytest.MonkeyPatch) -> None:
    """Comparisons of a few steps: they are to run, not to be right."""
    shorten(monkeypatch)


@pytest.fixture(scope="module")
def brief_module():
    """The same for what a file sets up once."""
    with pytest.MonkeyPatch.context() as patch:
        shorten(patch)
        yield
