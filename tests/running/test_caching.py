"""Results that are kept for a module."""

from __future__ import annotations

import copy
import math
import pickle

import pytest
import torch
from torch import nn

from bayesify.running.caching import MAX_RECENT_RESULTS, Results, computed_anew


def test_the_last_results_are_kept_and_the_oldest_go() -> None:
    results, made = Results(), []

    def ask(key: int) -> int:
        return results.recent(key, lambda: made.append(key) or key)

    assert [ask(key) for key in range(MAX_RECENT_RESULTS)] == made
    assert ask(0) == 0  # the last one used now
    assert ask(MAX_RECENT_RESULTS) == MAX_RECENT_RESULTS
    assert len(made) == MAX_RECENT_RESULTS + 1
    ask(0)
    assert len(made) == MAX_RECENT_RESULTS + 1
    ask(1)
    assert made[-1] == 1


@pytest.mark.parametrize("layout", ["rows", "channels last", "columns", "a part of other memory"])
def test_every_change_of_a_parameter_is_seen_in_any_layout(layout: str) -> None:
    """Values are compared, so that memory layouts make no difference; NaN is equal to nothing, and then nothing is kept."""
    value = torch.randn(3, 2, 4, 4)
    value = {
        "rows": lambda: value,
        "channels last": lambda: value.to(memory_format=torch.channels_last),
        "columns": lambda: value.mT,
        "a part of other memory": lambda: torch.randn(3, 2, 4, 8)[..., ::2],
    }[layout]()
    owner, results, made = nn.Module(), Results(), []
    owner.weight = nn.Parameter(value)

    def ask() -> int:
        return results.cached(owner, "count", lambda: made.append(1) or len(made))

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
        assert ask() == count + 2


def test_nothing_is_kept_where_all_is_to_be_computed_anew() -> None:
    owner, results = nn.Linear(1, 1), Results()
    with torch.no_grad():
        kept = results.cached(owner, "key", lambda: object())
        with computed_anew():
            assert results.cached(owner, "key", lambda: object()) is not kept
        assert results.cached(owner, "key", lambda: object()) is kept


def test_copies_and_pickles_are_empty() -> None:
    owner, results = nn.Linear(1, 1), Results()
    with torch.no_grad():
        results.cached(owner, "key", lambda: 1)
    assert results.values() == [1]
    for other in (copy.deepcopy(results), pickle.loads(pickle.dumps(results))):
        assert other.values() == []
