from __future__ import annotations

import pytest

from bayesify.compare import tuning


@pytest.fixture
def brief(monkeypatch: pytest.MonkeyPatch) -> None:
    """Comparisons of a few steps: they are to run, not to be right."""
    effort = tuning.Effort(2, 4, 2, 4, 2, 1, 2, 30, 2, 5_000, 2, 4, 2)
    for name, value in {
        "tuning.QUICK": effort,
        "tuning.FULL": effort,
        "models.PREDICTION_DRAWS": 8,
        "runs.TIMED_ROWS": 20,
        "rivals.ROUNDS": 3,
        "rivals.FOLDS": 2,
        "rivals.PENALTIES": 5,
    }.items():
        monkeypatch.setattr(f"bayesify.compare.{name}", value)
