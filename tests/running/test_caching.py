"""Results that are kept for a module."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from bayesify.running.caching import MOST_RECENT, cached, computed_anew, recent


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


@pytest.mark.parametrize("layout", ["rows", "channels last", "columns", "a part of other memory"])
def test_every_change_of_a_parameter_is_seen_in_any_layout(layout: str) -> None:
    """Parameters are compared as bytes where they have no gaps; equal values that are no numbers are no change."""
    value = torch.randn(3, 2, 4, 4)
    value = {
        "rows": lambda: value,
        "channels last": lambda: value.to(memory_format=torch.channels_last),
        "columns": lambda: value.mT,
        "a part of other memory": lambda: torch.randn(3, 2, 4, 8)[..., ::2],
    }[layout]()
    owner, made = nn.Module(), []
    owner.weight = nn.Parameter(value)

    def ask() -> int:
        return cached(owner, "count", lambda: made.append(1) or len(made))

    with torch.no_grad():
        assert [ask(), ask()] == [1, 1]
        for index, place in enumerate(((0, 0, 0, 0), (1, 1, 2, 3), (2, 1, 3, 3))):
            owner.weight.data[place] += 1
            assert [ask(), ask()] == [index + 2] * 2
        owner.weight.data = owner.weight.data.clone(
            memory_format=torch.contiguous_format
        )  # another layout, equal values
        ask()
        count = len(made)
        owner.weight.data[0] = math.nan
        assert ask() == count + 1
        assert layout != "rows" or ask() == count + 1


def test_nothing_is_kept_where_all_is_to_be_computed_anew() -> None:
    owner = nn.Linear(1, 1)
    with torch.no_grad():
        kept = cached(owner, "key", lambda: object())
        with computed_anew():
            assert cached(owner, "key", lambda: object()) is not kept
        assert cached(owner, "key", lambda: object()) is kept
