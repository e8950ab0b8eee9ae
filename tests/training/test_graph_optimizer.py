"""Plain optimizers in the form that a graph can hold take the same steps, and come back as they were."""

import contextlib
import copy

import pytest
import torch
from torch import nn

from bayesify.predictor import Batch
from bayesify.running import cuda_graphs
from bayesify.running.cuda_graphs import WARMUP_CALLS
from bayesify.training import captured_step
from bayesify.training.captured_step import CapturedSteps, GraphOptimizer, has_fused_form

OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.05),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, weight_decay=0.01),
    "nesterov": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, nesterov=True, weight_decay=0.01, maximize=True),
    "groups": lambda p: torch.optim.SGD([{"params": p[:1], "momentum": 0.5}, {"params": p[1:]}], lr=0.05),
    "tensor": lambda p: torch.optim.SGD(p, lr=torch.tensor(0.05), momentum=0.9),
    "adam": lambda p: torch.optim.Adam(p, lr=0.05, amsgrad=True),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.05, weight_decay=0.1),
}


def step(parameters, optimizer, number):
    """A step by random gradients; the first parameter has none before the third step, as in a MAP phase."""
    for index, value in enumerate(parameters):
        noise = torch.randn(value.shape, generator=torch.Generator().manual_seed(10 * number + index))
        value.grad = None if index == 0 and number < 2 else noise + value.detach()
    optimizer.step()


def made(name):
    module = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    with torch.no_grad():
        for value in module.parameters():
            value.copy_(torch.linspace(-1, 1, value.numel()).view_as(value))
    parameters = list(module.parameters())
    optimizer = OPTIMIZERS[name](parameters)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 12)
    return module, parameters, optimizer, scheduler


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_steps_are_those_of_the_plain_form(name):
    """With a scheduler, a rate that is assigned, a state that is stored and loaded halfway, and plain steps after the end."""
    module, ours, optimizer, scheduler = made(name)
    _, theirs, plain, other = made(name)
    before = copy.deepcopy(
        [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]
    )
    assert has_fused_form(optimizer, module)
    form = GraphOptimizer(optimizer, torch.device("cpu"))
    for number in range(10):
        if number == 5:
            optimizer.param_groups[0]["lr"] = plain.param_groups[0]["lr"] = 0.02
        if number == 7:
            stored = copy.deepcopy(form.plain(optimizer.state_dict()))
            assert type(stored["param_groups"][0]["lr"]) is float
            assert [group["fused"] for group in stored["param_groups"]] == [None] * len(stored["param_groups"])
            optimizer.load_state_dict(stored)
            form.begin()
        form.options()
        assert all(group["fused"] and isinstance(group["lr"], torch.Tensor) for group in optimizer.param_groups)
        step(ours, optimizer, number)
        step(theirs, plain, number)
        if number < 5:
            scheduler.step()
            other.step()
    form.end()
    after = [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]
    for group, earlier in zip(after, before, strict=True):
        assert {key: value for key, value in group.items() if key != "lr"} == {
            k: v for k, v in earlier.items() if k != "lr"
        }
        assert type(group["lr"]) is type(earlier["lr"])
    assert not hasattr(optimizer, "_step_supports_amp_scaling")
    again = OPTIMIZERS[name](ours)
    again.load_state_dict(optimizer.state_dict())
    for number in range(10, 13):
        step(ours, again, number)
        step(theirs, plain, number)
    for value, right in zip(ours, theirs, strict=True):
        torch.testing.assert_close(value, right, atol=1e-6, rtol=1e-5)


def test_optimizers_whose_steps_would_be_others_stay_as_they_are():
    module = nn.Linear(3, 2)
    p = list(module.parameters())
    for optimizer in (
        torch.optim.SGD(p, lr=0.1, momentum=0.9, dampening=0.5),
        torch.optim.SGD(p, lr=0.1, foreach=True),
        torch.optim.SGD(p, lr=0.1, fused=False),
        torch.optim.Adam(p, lr=0.1, foreach=False),
        torch.optim.RMSprop(p, lr=0.1),
        type("Own", (torch.optim.SGD,), {})(p, lr=0.1),
    ):
        assert not has_fused_form(optimizer, module), optimizer
    assert not has_fused_form(torch.optim.SGD(p, lr=0.1), nn.Sequential(module, nn.Embedding(4, 2, sparse=True)))
    assert has_fused_form(torch.optim.SGD(p, lr=0.1, momentum=0.9, dampening=0.5, fused=True), module)


@pytest.fixture
def recorded(monkeypatch):
    """Captures without a GPU: how many there were."""
    taken = []
    graph = type("Graph", (), {"replay": lambda self: None})
    monkeypatch.setattr(cuda_graphs, "_capture", lambda run, generators, pool: (graph(), taken.append(pool)))
    monkeypatch.setattr(captured_step, "side_stream", contextlib.nullcontext)
    monkeypatch.setattr(captured_step, "watch_waits", lambda: contextlib.nullcontext([]))
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", object)
    return taken


def test_options_that_change_make_other_graphs_and_rates_do_not(recorded):
    """A graph holds momentum and decay as numbers: it must not outlive a change of them."""
    module = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
    form, runs = GraphOptimizer(optimizer, torch.device("cpu")), []
    steps = CapturedSteps(lambda phase, batch: runs.append(phase), module, torch.Generator())
    batch = Batch(torch.zeros(4, 3), torch.zeros(4))
    steps.begin()
    for number in range(12):
        if number == 6:
            optimizer.param_groups[0]["weight_decay"] = 0.1
        optimizer.param_groups[0]["lr"] = 0.1 / (number + 1)
        steps("variational", batch, form.options())
    assert len(recorded) == 2
    assert len(runs) == 2 * WARMUP_CALLS
    assert recorded[0] is not recorded[1]  # memory of a graph that is gone takes no new one
    assert steps.reason == ""


def test_options_that_change_in_each_step_are_told(recorded):
    module = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.2, total_steps=20)
    form, runs = GraphOptimizer(optimizer, torch.device("cpu")), []
    steps = CapturedSteps(lambda phase, batch: runs.append(phase), module, torch.Generator())
    for _ in range(10):
        steps("variational", Batch(torch.zeros(4, 3), torch.zeros(4)), form.options())
        optimizer.step()
        scheduler.step()
    assert recorded == []
    assert len(runs) == 10
    assert "cycle_momentum=False" in steps.reason
