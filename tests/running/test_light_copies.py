"""Which modules a pass copies."""

from __future__ import annotations

from collections import deque

import pytest
import torch
from torch import Tensor, nn

from bayesify.running.light_copies import MAX_CONTAINER_ENTRIES, LightCopy


def network() -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 2), nn.Dropout(0.5))


def test_leaf_modules_without_weights_to_fill_stand_for_themselves() -> None:
    net = network()
    copied = LightCopy(net, hooks=False, owners={"0"})
    same = [copied[part] is part for part in net]
    assert same == [False, True, True, True, True]
    assert set(copied.root.modules()) == {copied.root, *(copied[part] for part in net)}
    assert copied.root[0] is copied[net[0]]
    assert copied.root[3] is net[3]


@pytest.mark.parametrize("options", [{"owners": {"0"}}, {"hooks": False}])
def test_all_are_copied_by_default_and_for_hooks(options: dict) -> None:
    net = network()
    copied = LightCopy(net, **options)
    assert not any(copied[part] is part for part in net)


def test_what_a_pass_may_change_is_copied() -> None:
    class Own(nn.ReLU):
        pass

    net = nn.Sequential(network(), Own(), nn.GRU(2, 2), nn.ReLU(), nn.ReLU())
    net[3].register_forward_hook(lambda *_: None)
    net[4].forward = lambda x: x
    copied = LightCopy(net, hooks=False, owners=set())
    assert not any(copied[part] is part for part in net)
    evaluating = LightCopy(net, hooks=False, owners=set(), evaluate=True)
    assert evaluating[net[0][1]] is not net[0][1]  # another mode
    assert LightCopy(net.eval(), hooks=False, owners=set(), evaluate=True)[net[0][1]] is net[0][1]


def test_a_module_that_is_held_elsewhere_too_is_one_module() -> None:
    net = network()
    net.others = [net[2], net[0]]
    copied = LightCopy(net, hooks=False, owners={"0"})
    assert copied.root.others[1] is copied.root[0] is not net[0]
    assert copied.root.others[0] is copied.root[2]
    assert torch.equal(copied.root.eval()(torch.ones(2, 3)), net.eval()(torch.ones(2, 3)))


class Counted(nn.Module):
    """A module of no length, which Python takes for false."""

    def __len__(self) -> int:
        return 0


def test_a_module_of_no_length_is_copied_too() -> None:
    net = nn.Sequential(nn.Linear(2, 2), Counted())
    net.register_module("none", None)
    copied = LightCopy(net, hooks=False, owners={"0"}).root
    assert all(one is not other for one, other in zip(net.children(), copied.children(), strict=True))
    assert copied.none is None


@pytest.mark.parametrize("nested", [False, True])
def test_a_module_with_weights_that_is_met_first_elsewhere_is_copied(nested: bool) -> None:
    """Shared after its weights were taken, at a path before the one that names them."""
    net = nn.Sequential(nn.Identity(), nn.Tanh(), nn.Sequential(nn.Linear(2, 2)) if nested else nn.Linear(2, 2))
    net[0] = net[2]
    copied = LightCopy(net, hooks=False, owners={"2.0" if nested else "2"})
    assert copied.root[0] is copied.root[2] is not net[2]
    own, original = (copied.root[2][0], net[2][0]) if nested else (copied.root[2], net[2])
    assert own is not original
    assert own._parameters is not original._parameters
    assert copied.root[1] is net[1]
    assert all(part is own for part in copied.owned.values())


def test_parts_of_a_shared_module_are_copied_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both paths have names, of which the second is not walked."""
    net = nn.Sequential(nn.Sequential(nn.Linear(2, 2)), nn.Tanh())
    net.append(net[0])
    roots: list[str | None] = []
    copy = LightCopy._copy
    monkeypatch.setattr(
        LightCopy, "_copy", lambda self, module, path: (roots.append(path), copy(self, module, path))[1]
    )
    copied = LightCopy(net, hooks=False, owners={"0.0", "2.0"})
    assert copied.owned["0.0"] is copied.owned["2.0"] is copied.root[0][0]
    assert roots.count("") == 1


class Keeps(nn.Module):
    """Changes containers in place, one of which two attributes hold."""

    def __init__(self) -> None:
        super().__init__()
        self.list, self.dict, self.layer = [1.0], {"a": 1}, nn.Linear(2, 2)
        self.same = self.list
        self.table = dict.fromkeys(range(MAX_CONTAINER_ENTRIES + 1))

    def forward(self, x: Tensor) -> Tensor:
        self.list.clear()
        self.list.append(x)
        self.dict["b"] = self.layer
        return self.same[0]


def test_containers_that_a_pass_changes_are_its_own_until_they_are_given_back() -> None:
    net, x = Keeps(), torch.ones(2)
    first, kept = net.list, net.dict
    copied = LightCopy(net, hooks=False, owners={"layer"})
    assert copied.root(x) is x
    assert copied.root.table is net.table
    assert net.list == [1.0]
    assert net.dict == {"a": 1}
    copied.write_back()
    assert net.list is net.same is first
    assert net.list[0] is x
    assert net.dict is kept
    assert kept["b"] is net.layer


class KeepsNested(nn.Module):
    """Changes containers in containers, one of which holds itself, and one in a list that is too large with it."""

    def __init__(self) -> None:
        super().__init__()
        self.state: dict = {"k": [], "n": 0, "deep": [{"a": deque([0], maxlen=2)}]}
        self.state["self"] = self.state
        self.same = self.state["k"]
        self.tables: list = [{"n": 0}, dict.fromkeys(range(MAX_CONTAINER_ENTRIES))]

    def forward(self, x: Tensor) -> Tensor:
        self.state["self"]["n"] += 1
        self.same.append(1)
        self.state["deep"][0]["a"].append(1)
        self.tables[0]["n"] += 1
        return x


def test_containers_in_containers_are_a_passs_own_until_they_are_given_back() -> None:
    net = KeepsNested()
    kept, inner = net.state, net.state["deep"][0]["a"]
    copied = LightCopy(net, hooks=False, owners=set())
    copied.root(torch.ones(1))
    assert copied.root.state["k"] is copied.root.same
    assert (net.state["n"], net.state["k"], inner) == (0, [], deque([0]))
    assert net.tables[0]["n"] == 1  # too large as a whole: shared as a whole
    assert copied.root.tables is net.tables
    copied.write_back()
    assert net.state is net.state["self"] is kept
    assert (net.state["n"], net.state["k"], inner) == (1, [1], deque([0, 1]))
    assert net.state["k"] is net.same
    assert net.state["deep"][0]["a"] is inner
