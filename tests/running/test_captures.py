"""Captures by kind, with a function in the place of a graph: when they are made, made again, refused and forgotten."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from bayesify.running import cuda_graphs
from bayesify.running.cuda_graphs import WARMUP_CALLS, Captured, Captures


def ask(captures: Captures[Any], kind: str = "kind", state: Any = 0, times: int = 1, **options: Any) -> list[Any]:
    made = options.pop("make", lambda: (kind, state))
    return [captures.find(kind, state, made, **options) for _ in range(times)]


def test_a_kind_is_captured_after_its_warm_up_and_then_served() -> None:
    captures: Captures[Any] = Captures()
    found = ask(captures, times=WARMUP_CALLS + 2)
    assert found[:WARMUP_CALLS] == [None] * WARMUP_CALLS
    assert found[-2] is found[-1] == ("kind", 0)
    assert ask(captures, "other", times=WARMUP_CALLS) == [None] * WARMUP_CALLS
    assert captures.calls("kind") == WARMUP_CALLS + 2
    assert captures.calls("unknown") == 0


def test_a_changed_state_starts_the_count_again() -> None:
    captures: Captures[Any] = Captures()
    ask(captures, times=WARMUP_CALLS + 1)
    assert ask(captures, state=1, times=WARMUP_CALLS + 1)[-2:] == [None, ("kind", 1)]
    assert ask(captures, state=0) == [None]


def test_a_capture_that_fails_is_not_tried_again_until_the_state_changes() -> None:
    captures: Captures[Any] = Captures()
    tried = []

    def fail() -> None:
        tried.append(1)
        raise RuntimeError(f"reason {len(tried)}\nand more")

    assert ask(captures, times=WARMUP_CALLS + 5, make=fail) == [None] * (WARMUP_CALLS + 5)
    assert len(tried) == 1
    ask(captures, state=1, times=WARMUP_CALLS + 1, make=fail)
    assert len(tried) == 2
    assert captures.reason == "reason 1"
    with pytest.raises(KeyError):  # no reason of a device
        ask(captures, "other", times=WARMUP_CALLS + 1, make=lambda: {}["missing"])


def test_the_kinds_that_were_asked_for_last_are_known() -> None:
    captures: Captures[Any] = Captures(limit=2)
    for kind in ("a", "b", "a", "c"):
        ask(captures, kind, held=kind)
    assert captures.known("b") is None
    assert [captures.known(kind).held for kind in ("a", "c")] == ["a", "c"]  # type: ignore[union-attr]
    captures.clear()
    assert captures.calls("a") == 0


def test_copies_are_empty() -> None:
    captures: Captures[Any] = Captures(limit=1)
    ask(captures, times=5)
    for other in (copy.deepcopy(captures), pickle.loads(pickle.dumps(captures))):
        assert other.known("kind") is None
        ask(other, "a")
        ask(other, "b")
        assert other.known("a") is None


def test_a_replay_reads_the_inputs_and_writes_the_results(monkeypatch: pytest.MonkeyPatch) -> None:
    class Graph:
        def __init__(self, run: Callable[[], Tensor], into: Tensor) -> None:
            self.run, self.into = run, into

        def replay(self) -> None:
            self.into.copy_(self.run())

    def capture(run: Callable[[], Tensor], generators: Any, pool: Any) -> tuple[Graph, Tensor]:
        result = run()
        return Graph(run, result), result

    monkeypatch.setattr(cuda_graphs, "_capture", capture)
    one, other = torch.zeros(2), torch.ones(2)
    captured = Captured(lambda: one + 2 * other, [one, other])
    assert captured.replay([torch.tensor([1.0, 2.0]), torch.tensor([3.0, 4.0])]).tolist() == [7.0, 10.0]
    assert captured.replay([torch.tensor([1.0, 2.0], requires_grad=True), None]).tolist() == [1.0, 2.0]
    assert not captured.results.requires_grad
    with pytest.raises(ValueError, match="shorter"):
        captured.replay([one])
