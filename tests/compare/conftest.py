from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

import pytest

from bayesify.compare.winner import Winner
from bayesify.sklearn.settings import EFFORTS, Effort


def shorten(patch: pytest.MonkeyPatch) -> None:
    for effort in EFFORTS:
        patch.setitem(EFFORTS, effort, Effort(4, 4, 4, 1, 2, 30, 2))
    for name, value in {
        "compare.comparison.NUM_SPLITS": 2,
        "compare.comparison.NUM_QUICK_SPLITS": 2,
        "compare.runs.NUM_TIMED_ROWS": 20,
        "compare.explanation.MAX_JUDGED_COLUMNS": 1,
        "compare.models.MAX_TREES": 3,
        "compare.models.NUM_FOLDS": 2,
        "compare.models.NUM_PENALTIES": 5,
        "sklearn.settling.MAX_ROUNDS": 1,
        "sklearn.settling.DOUBTFUL_LEVERAGE": 1.0,
    }.items():
        patch.setattr(f"bayesify.{name}", value)


def leave_out_others(patch: pytest.MonkeyPatch) -> None:
    patch.setattr("bayesify.compare.question.DEFAULT_RIVALS", ("constant",))
    patch.setattr("bayesify.compare.question.BASELINES", ("point",))
    patch.setattr("bayesify.compare.comparison.train_winner", lambda *given: Winner(given[3].network, "", ""))


@pytest.fixture
def brief(monkeypatch: pytest.MonkeyPatch) -> None:
    """Comparisons of a few steps: they are to run, not to be right."""
    shorten(monkeypatch)


@pytest.fixture
def lean(brief: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Brief comparisons with two other methods instead of five, whose winner is not trained on all rows."""
    leave_out_others(monkeypatch)


@pytest.fixture(scope="module")
def leanly() -> Callable[[], AbstractContextManager[None]]:
    """Lean comparisons in a `with` block, for what a file sets up once."""

    @contextmanager
    def comparisons() -> Iterator[None]:
        with pytest.MonkeyPatch.context() as patch:
            shorten(patch)
            leave_out_others(patch)
            yield

    return comparisons
