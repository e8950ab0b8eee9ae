"""Results that are kept for a module."""

from __future__ import annotations

import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from bayesify.running import captured_draws
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


@pytest.mark.parametrize("same", [True, False])
def test_a_captured_draw_runs_ahead_of_the_comparison(monkeypatch: pytest.MonkeyPatch, same: bool) -> None:
    """It counts where parameters are what they were; else it is as if it was never made."""
    owner, generator = nn.Linear(1, 1), torch.Generator().manual_seed(0)
    graph = SimpleNamespace(generator=generator, replay=lambda: torch.rand(1, generator=generator))
    captures = {"other": None, "kind": (4, ((1, 2), 7), graph, generator)}
    monkeypatch.setitem(captured_draws._CAPTURES, owner, captures)
    monkeypatch.setattr(captured_draws, "run_beside_comparison", lambda _, state, run: (run(), same and state == 7))
    assert captured_draws._ahead(owner, "kind", (1, 3)) is None  # parameters are elsewhere
    before = generator.get_state()
    drawn = captured_draws._ahead(owner, "kind", (1, 2))
    assert (drawn is not None) == same
    assert torch.equal(generator.get_state(), before) != same
    assert list(captures) == ["other", "kind"]


def test_a_draw_that_does_not_count_gives_out_no_number_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another thread takes numbers of the same generator while parameters are compared."""
    owner, generator = nn.Linear(1, 1), torch.Generator().manual_seed(0)
    graph = SimpleNamespace(generator=generator, replay=lambda: torch.rand(1, generator=generator))
    monkeypatch.setitem(captured_draws._CAPTURES, owner, {"kind": (4, ((1, 2), 7), graph, generator)})
    taken: list[Tensor] = []

    def compare(_: Any, state: int, run: Callable[[], Any]) -> tuple[Any, bool]:
        drawn = run()
        taken.append(torch.rand(3, generator=generator))
        return drawn, False

    monkeypatch.setattr(captured_draws, "run_beside_comparison", compare)
    assert captured_draws._ahead(owner, "kind", (1, 2)) is None
    assert not torch.isin(torch.rand(8, generator=generator), taken[0]).any()


def test_nothing_is_kept_where_all_is_to_be_computed_anew() -> None:
    owner = nn.Linear(1, 1)
    with torch.no_grad():
        kept = cached(owner, "key", lambda: object())
        with computed_anew():
            assert cached(owner, "key", lambda: object()) is not kept
        assert cached(owner, "key", lambda: object()) is kept


@pytest.mark.parametrize(("many", "largest", "follows"), [(1, 4, True), (1, 3, False), (2, 4, False)])
def test_single_draws_of_small_posteriors_follow_the_parameters(
    many: int, largest: int, follows: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(captured_draws, "FOLLOWS", largest)
    assert captured_draws._follows(nn.Linear(3, 1), SimpleNamespace(num_draws=many)) == follows
