"""Results that are kept for a module."""

from __future__ import annotations

from torch import nn

from bayesify.running.caching import MOST_RECENT, recent


def test_the_last_results_are_kept_and_the_oldest_go() -> None:
    owner, made = nn.Linear(1, 1), []

    def ask(key: int) -> int:
        return recent(owner, key, lambda: made.append(key) or key)

    assert [ask(key) for key in range(MOST_RECENT)] == made
    assert ask(0) == 0  # the last one used now
    assert ask(MOST_RECENT) == MOST_RECENT
    assert len(made) == MOST_RECENT + 1
    ask(0)
    assert len(made) == MOST_RECENT + 1
    ask(1)
    assert made[-1] == 1
