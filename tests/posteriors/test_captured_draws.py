"""Draws by graphs, with a graph that is a plain function: which draws count, and which graphs follow the parameters."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import bayesify
from bayesify.posteriors.common import gpu_draws
from bayesify.posteriors.common.gpu_draws import CapturedDraw, CapturedDraws
from bayesify.running.caching import Results
from bayesify.running.cuda_graphs import Kind


def captured(owner: nn.Module, generator: torch.Generator) -> CapturedDraws:
    """Draws of a posterior whose graph was captured at addresses 1 and 2 in state 7."""
    graph = SimpleNamespace(generator=generator, replay=lambda: torch.rand(1, generator=generator))
    draws = CapturedDraws()
    draws.of(owner)._kinds.update({"kind": Kind(((1, 2), 7), 4, graph), "other": Kind(None)})
    return draws


@pytest.mark.parametrize("same", [True, False])
def test_a_captured_draw_runs_ahead_of_the_comparison(monkeypatch: pytest.MonkeyPatch, same: bool) -> None:
    """It counts where parameters are what they were; otherwise it is as if it was never made."""
    owner, generator = bayesify.bayesianize(nn.Linear(1, 1), "mean_field").posterior, torch.Generator().manual_seed(0)
    draws = captured(owner, generator)
    monkeypatch.setattr(Results, "run_beside_comparison", lambda *given: (given[3](), same and given[2] == 7))
    assert draws._ahead(owner, "kind", (1, 3)) is None  # parameters are elsewhere
    assert draws._ahead(owner, "unknown", (1, 2)) is None
    before = generator.get_state()
    drawn = draws._ahead(owner, "kind", (1, 2))
    assert (drawn is not None) == same
    assert torch.equal(generator.get_state(), before) != same
    assert list(draws.of(owner)._kinds) == ["other", "kind"]


def test_a_draw_that_does_not_count_gives_out_no_number_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another thread takes numbers of the same generator while parameters are compared."""
    owner, generator = bayesify.bayesianize(nn.Linear(1, 1), "mean_field").posterior, torch.Generator().manual_seed(0)
    draws, taken = captured(owner, generator), []

    def compare(self: Results, owner: Any, state: int, run: Callable[[], Any]) -> tuple[Any, bool]:
        drawn = run()
        taken.append(torch.rand(3, generator=generator))
        return drawn, False

    monkeypatch.setattr(Results, "run_beside_comparison", compare)
    assert draws._ahead(owner, "kind", (1, 2)) is None
    assert not torch.isin(torch.rand(8, generator=generator), taken[0]).any()


@pytest.mark.parametrize(("many", "largest", "follows"), [(1, 4, True), (1, 3, False), (2, 4, False)])
def test_single_draws_of_small_posteriors_follow_the_parameters(
    many: int, largest: int, follows: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_draws, "MAX_PARAMETERS_TO_FOLLOW", largest)
    assert gpu_draws._follows(nn.Linear(3, 1), SimpleNamespace(num_draws=many)) == follows


def test_copies_of_a_network_have_no_graphs_of_it() -> None:
    bnn = bayesify.bayesianize(nn.Linear(2, 1), "mean_field")
    bnn._road.captured.of(bnn.posterior).find("kind", 0, object)
    for other in (copy.deepcopy(bnn), pickle.loads(pickle.dumps(bnn))):
        assert other._road is None
    assert bnn._road.captured.of(bnn.posterior).known("kind") is not None


def test_the_gradient_of_a_replay_and_a_graph_in_use() -> None:
    """A graph whose draw is 3 w with a KL of 5 w: used in place, busy until its backward pass, and no use after a later draw."""
    parameter = nn.Parameter(torch.tensor([2.0]))
    graph = object.__new__(CapturedDraw)
    graph.training, graph.names, graph.parameters, graph.pending = True, ["w"], [parameter], None
    graph.forward = SimpleNamespace(replay=lambda: [3 * parameter.detach(), 5 * parameter.detach()])
    graph.backward = SimpleNamespace(replay=lambda grads: (3 * grads[0] + (0 if grads[1] is None else 5 * grads[1]),))
    assert not graph.busy()
    weights, kl = graph.replay()
    assert graph.busy()
    assert torch.autograd.grad(weights["w"].square() + kl, parameter, retain_graph=True)[0].item() == 2 * 9 * 2 + 5
    assert not graph.busy()
    later = graph.replay()
    with pytest.raises(RuntimeError, match="once on each elbo"):
        torch.autograd.grad(weights["w"], parameter)
    del later
    assert not graph.busy()  # nobody can ask for its gradient any more
