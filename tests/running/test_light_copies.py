"""Which modules a pass copies."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from bayesify.running.light_copies import LightCopy


def network() -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 2), nn.Dropout(0.5))


def test_leaf_modules_without_weights_to_fill_stand_for_themselves() -> None:
    net = network()
    copied = LightCopy(net, hooks=False, owners={"0"})
    same = [copied[part] is part for part in net]
    assert same == [False, True, True, True, True]
    assert set(copied.modules()) == {copied.root, *(copied[part] for part in net)}
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
