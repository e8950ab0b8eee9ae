"""Networks that change their own state, their inputs, or the objects they return: several draws act like draws run one by one."""

from __future__ import annotations

import copy
import dataclasses
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import bayesify
from bayesify import posteriors
from bayesify.running.inputs_and_outputs import Untouched

X = 100 + 10 * torch.randn(24, 3, generator=torch.Generator().manual_seed(0))
Y = (X[:, 0] > 100).long()


class Stateful(nn.Module):
    """A network with two layers that changes its state in a pass."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(3, 4), nn.Linear(4, 2)
        self.register_buffer("mean", torch.zeros(3))
        self.register_buffer("count", torch.zeros(()))
        self.calls, self.log, self.state = 0, [], SimpleNamespace(total=torch.zeros(4), calls=0)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.change(x, torch.tanh(self.first(x - self.mean))))

    def change(self, x: Tensor, hidden: Tensor) -> Tensor:
        raise NotImplementedError

    def what(self) -> list[Any]:
        return [self.mean, self.count, self.calls, len(self.log), self.state.total, self.state.calls]


class AssignsABuffer(Stateful):
    def change(self, x: Tensor, hidden: Tensor) -> Tensor:
        self.mean = 0.9 * self.mean + 0.1 * x.mean(0)
        return hidden


class ChangesABuffer(Stateful):
    def change(self, x: Tensor, hidden: Tensor) -> Tensor:
        self.count += 1
        return hidden + self.count


class CountsCalls(Stateful):
    def change(self, x: Tensor, hidden: Tensor) -> Tensor:
        self.calls += 1
        return hidden + self.calls


class FillsAList(Stateful):
    def change(self, x: Tensor, hidden: Tensor) -> Tensor:
        self.log.append(0)
        return hidden + len(self.log)


class ChangesAnObject(Stateful):
    def change(self, x: Tensor, hidden: Tensor) -> Tensor:
        self.state.calls += 1
        self.state.total = self.state.total + hidden.detach().mean(0)
        return hidden + self.state.total


STATEFUL = [AssignsABuffer, ChangesABuffer, CountsCalls, FillsAList, ChangesAnObject]


@pytest.mark.filterwarnings("ignore:.*changes its own attributes")
@pytest.mark.parametrize("kind", STATEFUL)
@pytest.mark.parametrize(
    "posterior", [posteriors.MeanField(0.3), posteriors.Ensemble(4)], ids=["mean_field", "ensemble"]
)
def test_draws_together_change_a_network_like_draws_one_by_one(kind: type[Stateful], posterior: Any) -> None:
    torch.manual_seed(0)
    together = bayesify.bayesianize(kind(), posterior, likelihood="categorical")
    apart = copy.deepcopy(together)
    for _ in range(3):
        draws = [bnn.draw(4, generator=torch.Generator().manual_seed(1)) for bnn in (together, apart)]
        found = draws[0](X)
        torch.testing.assert_close(found, torch.cat([draws[1][index : index + 1](X) for index in range(4)]))
        torch.testing.assert_close(together.network.what(), apart.network.what())


@pytest.mark.filterwarnings("ignore:.*changes its own attributes")
@pytest.mark.parametrize("kind", STATEFUL)
def test_a_prediction_leaves_no_dead_tensors(kind: type[Stateful]) -> None:
    bnn = bayesify.bayesianize(kind(), posteriors.MeanField(0.3), likelihood="categorical").eval()
    for num_draws in (4, 4, 3):
        bnn.predict(X, num_draws)
    copy.deepcopy(bnn)
    assert torch.isfinite(bnn(X)).all()
    assert torch.isfinite(bnn.elbo(X, Y, num_data=24))


def test_a_network_that_fills_a_cache_keeps_its_speed() -> None:
    class Cached(Stateful):
        def change(self, x: Tensor, hidden: Tensor) -> Tensor:
            if not self.log:
                self.log.append(torch.arange(4.0))
            # Equal in each pass
            self.shape, self.scale, self.size = x.shape, hidden.shape[1] ** -0.5, 1000 + x.shape[1]
            self.sizes, self.unknown = (1000 + x.shape[1], (None, "a")), float("nan")
            return hidden + self.log[0]

    bnn = bayesify.bayesianize(Cached(), posteriors.MeanField(0.3), likelihood="categorical")
    for _ in range(20):
        bnn.draw(4)(X)  # without a warning
    assert torch.equal(bnn.network.log[0], torch.arange(4.0))


def test_predictions_of_a_network_that_stores_activations_run_together() -> None:
    class Stores(Stateful):
        def change(self, x: Tensor, hidden: Tensor) -> Tensor:
            self.log.append(hidden)
            self.hidden = hidden
            return hidden

    bnn = bayesify.bayesianize(Stores(), posteriors.MeanField(0.3), likelihood="categorical").eval()
    for _ in range(12):
        bnn.predict(X, 4)  # without a warning, because predictions keep nothing
    assert not bnn.network.log


def test_predictions_with_one_seed_are_equal() -> None:
    """The first call also measures the memory that a pass needs."""
    bnn = bayesify.bayesianize(CountsCalls(), posteriors.MeanField(0.3), likelihood="categorical")
    first, second = (bnn.predict(X, 3, generator=torch.Generator().manual_seed(0)).probs for _ in range(2))
    assert torch.equal(first, second)


@pytest.mark.parametrize("place", ["list", "object"])
def test_objects_that_attributes_reach_keep_no_dead_tensors(place: str) -> None:
    class Reaches(Stateful):
        def __init__(self) -> None:
            super().__init__()
            held = SimpleNamespace(total=torch.zeros(4))
            self.held = [held] if place == "list" else SimpleNamespace(inner=held)

        def change(self, x: Tensor, hidden: Tensor) -> Tensor:
            held = self.held[0] if isinstance(self.held, list) else self.held.inner
            held.total = held.total + hidden.detach().mean(0)
            return hidden + held.total

    bnn = bayesify.bayesianize(Reaches(), posteriors.MeanField(0.3), likelihood="categorical")
    for _ in range(2):
        assert torch.isfinite(bnn.draw(4)(X)).all()
    copy.deepcopy(bnn)


def test_a_network_that_makes_modules_runs_in_a_loop_after_a_warning() -> None:
    class Makes(Stateful):
        def change(self, x: Tensor, hidden: Tensor) -> Tensor:
            self.norm, type(self).total = nn.LayerNorm(4), type(self).total + 1
            return self.norm(hidden)

    Makes.total = 0
    bnn = bayesify.bayesianize(Makes(), posteriors.MeanField(0.3), likelihood="categorical")
    for _ in range(7):
        bnn.draw(4)(X)
    with pytest.warns(UserWarning, match="changes its own attributes"):
        bnn.draw(4)(X)
    Makes.total = 0
    bnn.draw(4)(X)
    assert Makes.total == 4


class Interrupted(Exception):
    """Ends a training run."""


@pytest.mark.filterwarnings("ignore:.*changes its own attributes")
def test_a_resumed_run_of_a_network_that_stores_its_batch_size_has_the_same_bits(tmp_path: Any) -> None:
    class Stores(Stateful):
        def change(self, x: Tensor, hidden: Tensor) -> Tensor:
            self.size = len(x)
            return nn.functional.dropout(hidden, 0.5)

    def train(stop: bool, **options: Any) -> Tensor:
        def interrupt(_: Any, history: Any) -> None:
            if stop and len(history) == 2:
                raise Interrupted

        torch.manual_seed(0)
        bnn = bayesify.bayesianize(Stores(), posteriors.MeanField(0.1), likelihood="categorical")
        loader = DataLoader(TensorDataset(X[:20], Y[:20]), batch_size=8)  # the last batch is smaller
        bayesify.fit(bnn, loader, epochs=4, num_draws=3, seed=0, progress=False, callbacks=[interrupt], **options)
        return torch.cat([one.detach().flatten() for one in bnn.parameters()])

    with pytest.raises(Interrupted):
        train(True, checkpoint=tmp_path / "run")
    assert torch.equal(train(False, checkpoint=tmp_path / "run"), train(False))


@pytest.mark.parametrize("posterior", [posteriors.MeanField(0.3), posteriors.Ensemble(2)], ids=["one draw", "members"])
def test_a_trained_network_that_stores_activations_can_be_copied(posterior: Any, tmp_path: Any) -> None:
    class Stores(Stateful):
        def change(self, x: Tensor, hidden: Tensor) -> Tensor:
            self.hidden, self.maps, self.pair = hidden, {"a": hidden}, (hidden, 1)
            self.log[:] = [hidden]
            return hidden

    bnn = bayesify.bayesianize(Stores(), posterior, likelihood="categorical")
    bayesify.fit(bnn, DataLoader(TensorDataset(X, Y), batch_size=8), epochs=2, seed=0, progress=False)
    assert copy.deepcopy(bnn).network.hidden.shape == (8, 4)
    bnn.mean_network()
    bayesify.save(bnn, tmp_path / "model.safetensors")


class AssigningNorm(nn.BatchNorm1d):
    """BatchNorm that assigns its statistics instead of updating them in place."""

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return super().forward(x)
        self.running_mean = 0.9 * self.running_mean + 0.1 * x.detach().mean(0)
        self.running_var = 0.9 * self.running_var + 0.1 * x.detach().var(0)
        return nn.functional.batch_norm(x, None, None, self.weight, self.bias, True)


def test_statistics_that_a_layer_assigns_are_those_of_each_member() -> None:
    found = []
    for norm in (nn.BatchNorm1d, AssigningNorm):
        torch.manual_seed(0)
        net = nn.Sequential(norm(3), nn.Linear(3, 8), norm(8), nn.Tanh(), nn.Linear(8, 2))
        bnn = bayesify.bayesianize(net, posteriors.Ensemble(3), likelihood="categorical")
        bayesify.fit(bnn, DataLoader(TensorDataset(X, Y), batch_size=8), epochs=3, seed=0, progress=False)
        found.append(bnn.predict(X, 6, generator=torch.Generator().manual_seed(0)).probs)
    torch.testing.assert_close(found[1], found[0], rtol=1e-3, atol=1e-3)


class RefusesInTraining(nn.Module):
    """`vmap` runs it in evaluation mode only."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.drop, self.last = nn.Linear(3, 4), nn.Dropout(0.5), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.drop(torch.tanh(self.first(x - 100)))
        if self.training:
            hidden = hidden * float(1 + 0 * hidden.sum().item())
        return self.last(hidden)


@pytest.mark.filterwarnings("ignore:.*vmap refused")
def test_a_prediction_before_training_changes_no_bits() -> None:
    found = []
    for predicts in (False, True):
        torch.manual_seed(0)
        bnn = bayesify.bayesianize(RefusesInTraining(), posteriors.MeanField(0.1), likelihood="categorical")
        if predicts:
            bnn.predict(X, 4, generator=torch.Generator().manual_seed(0))
        loader = DataLoader(TensorDataset(X, Y), batch_size=8)
        bayesify.fit(bnn, loader, epochs=2, num_draws=3, seed=0, progress=False)
        found.append(torch.cat([one.detach().flatten() for one in bnn.parameters()]))
    assert torch.equal(*found)


# -- inputs --------------------------------------------------------------------------------------------------------

NOT_GIVEN = object()


class Carry:
    """Starts without content, and a network may give it some."""


def test_arrays_and_sentinels_stay_the_same_objects() -> None:
    array, carry, table = np.ones(3), Carry(), {"key": torch.ones(2)}
    held = SimpleNamespace(array=array, table=table)
    inputs = Untouched((torch.ones(2), NOT_GIVEN, held), {"carry": carry})
    (_, first, copied), kwargs = inputs.take()
    assert first is NOT_GIVEN
    assert kwargs["carry"] is not carry
    assert copied.array is array
    assert copied is not held
    assert copied.table["key"] is not table["key"]


CHANGES = {
    "a tensor": lambda held: held["table"]["key"].add_(1),
    "an entry": lambda held: held["table"].update(key=0),
    "a new entry": lambda held: held["table"].update(other=0),
    "a key": lambda held: held["table"].update(other=held["table"].pop("key")),
    "a list": lambda held: held["rows"].append(held["rows"][0]),
    "an order": lambda held: held["rows"].reverse(),
    "a set": lambda held: held["names"].add("c"),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_containers_are_copied_again_only_after_a_change(change: Any) -> None:
    given = {"table": {"key": torch.zeros(2)}, "big": torch.zeros(9), "rows": [1, 2], "names": {"a"}}
    inputs = Untouched((torch.zeros(3), given), {})
    before = inputs.take()[0]
    assert inputs.take()[0][1] is before[1]
    change(before[1])
    after = inputs.take()[0]
    assert after[1] is not before[1]
    assert (list(after[1]), list(after[1]["table"])) == (list(given), ["key"])
    assert (after[1]["rows"], after[1]["names"]) == ([1, 2], {"a"})
    assert torch.equal(after[1]["table"]["key"], torch.zeros(2))
    assert after[1]["big"] is before[1]["big"], "unchanged tensors are not copied again"
    assert (list(given["table"]), given["rows"], given["names"]) == (["key"], [1, 2], {"a"})


@pytest.mark.parametrize("make", [Carry, SimpleNamespace, lambda: iter([1, 2]), lambda: np.random.default_rng(0), dict])
def test_objects_are_copied_for_every_pass(make: Any) -> None:
    inputs = Untouched((torch.zeros(3), [make(), Carry()]), {})
    first, second = inputs.take()[0][1], inputs.take()[0][1]
    assert first[0] is not second[0]


def test_tensors_keep_their_attributes() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x * x.scale)

    x = X.clone()
    x.scale = 0.01  # type: ignore[attr-defined]
    bnn = bayesify.bayesianize(Scaled(), "mean_field", likelihood="categorical")
    draws = bnn.draw(3)
    torch.testing.assert_close(draws(x), torch.cat([draws[index : index + 1](x) for index in range(3)]))


# -- outputs -------------------------------------------------------------------------------------------------------


@dataclasses.dataclass
class Doubled:
    """Doubles its logits when it is made."""

    logits: Tensor
    size: int = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        self.logits, self.size = 2 * self.logits, 2


@dataclasses.dataclass
class Nested:
    """Holds another dataclass in a list."""

    parts: list[Any]
    name: str = "n"


@dataclasses.dataclass
class Extended:
    """Doubles its logits, and keeps tensors and a number that are not fields."""

    logits: Tensor
    scale: dataclasses.InitVar[int]

    def __post_init__(self, scale: int) -> None:
        self.logits = scale * self.logits
        self.probs, self.name = torch.softmax(self.logits, -1), "n"


class Pair(tuple):
    """A tuple of another type."""


class Returns(nn.Module):
    def __init__(self, wrap: Any) -> None:
        super().__init__()
        self.layer, self.wrap = nn.Linear(3, 2), wrap

    def forward(self, x: Tensor) -> Any:
        return self.wrap(self.layer(x - 100))


@pytest.mark.parametrize("num_draws", [1, 3])
def test_outputs_of_draws_have_their_own_types(num_draws: int) -> None:
    bnn = bayesify.bayesianize(Returns(lambda out: out), "mean_field", likelihood="categorical")
    for seed in (0, 1):
        draws = bnn.draw(num_draws, generator=torch.Generator().manual_seed(seed))
        plain = draws(X)
        bnn.network.wrap = Doubled
        doubled = draws(X)
        assert isinstance(doubled, Doubled)
        torch.testing.assert_close(doubled.logits, 2 * plain)
        assert doubled.size == 2
        bnn.network.wrap = lambda out: {"a": Nested([Doubled(out), (out, None)])}
        nested = draws(X)["a"]
        assert nested.name == "n"
        torch.testing.assert_close(nested.parts[0].logits, 2 * plain)
        torch.testing.assert_close(nested.parts[1][0], plain)
        assert nested.parts[1][1] is None
        bnn.network.wrap = lambda out: Pair((Extended(out, 2), [out]))
        found = draws(X)
        assert type(found) is Pair
        assert found[0].name == "n"
        torch.testing.assert_close(found[0].logits, 2 * plain)
        torch.testing.assert_close(found[0].probs, torch.softmax(2 * plain, -1))
        torch.testing.assert_close(found[1][0], plain)
        bnn.network.wrap = lambda out: out


def test_outputs_that_torch_or_python_made() -> None:
    """Results of torch's functions have the axis of draws, and constants are kept."""
    for wrap in (
        lambda out: (out, out.max(1)),
        lambda out: {"logits": out, "top": torch.topk(out, 1), "none": None, "size": 3, "name": "n"},
    ):
        bnn = bayesify.bayesianize(Returns(wrap), "mean_field", likelihood="categorical")
        draws = bnn.draw(3)
        found = draws(X)
        one = [draws[index : index + 1](X) for index in range(3)]
        if isinstance(found, dict):
            assert (found["none"], found["size"], found["name"]) == (None, 3, "n")
            torch.testing.assert_close(found["top"].values, torch.cat([part["top"].values for part in one]))
        else:
            torch.testing.assert_close(found[1].values, torch.cat([part[1].values for part in one]))


# -- buffers of rare kinds -----------------------------------------------------------------------------------------


class OnAGraph(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(3, 4), nn.Linear(4, 2)
        self.register_buffer("adjacency", torch.eye(4).to_sparse())

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.sparse.mm(self.adjacency, torch.tanh(self.first(x - 100)).T).T)


@pytest.mark.filterwarnings("ignore:.*vmap refused")
def test_networks_with_sparse_buffers(tmp_path: Any) -> None:
    loader = DataLoader(TensorDataset(X, X[:, :2] / 100), batch_size=8)
    bnn = bayesify.bayesianize(OnAGraph(), posteriors.MeanField(0.1), likelihood="gaussian")
    bayesify.fit(bnn, loader, epochs=1, validation=loader, progress=False)
    assert torch.isfinite(bnn.predict(X, 4, memory=2000).mean).all()
    with pytest.raises(TypeError, match=r"adjacency' is a sparse tensor.*persistent=False"):
        bayesify.save(bnn, tmp_path / "net.safetensors")


def test_an_error_about_nan_is_not_hidden_by_an_expanded_buffer() -> None:
    net = nn.Sequential(nn.Linear(3, 2))
    net.register_buffer("mask", torch.ones(1, 4).expand(8, 4))
    bnn = bayesify.bayesianize(net, "mean_field", likelihood="categorical")
    with pytest.raises(ValueError, match=r"epoch 1, batch 1: the gradient of .* is not finite"):
        bayesify.fit(bnn, [(torch.full((8, 3), 1e38), Y[:8])], num_data=8, epochs=1, progress=False)
