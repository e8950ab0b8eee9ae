"""What was wrong without a word: inputs changed in place, stale caches, padding rows, routed layers, lone examples, modes."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import bayesify
from bayesify import likelihoods, posteriors, subnetwork
from bayesify.jacobians import Jacobians
from bayesify.running.inputs_and_outputs import MAX_PARTS, Untouched
from bayesify.running.runner import Runner
from bayesify.weights.catalog import catalog

# -- inputs changed in place ---------------------------------------------------------------------------------------------


class Shifts(nn.Module):
    """Changes its input in place, as plain torch allows; inside a dict, or by a view."""

    def __init__(self, form: str) -> None:
        super().__init__()
        self.form = form
        self.layer = nn.Conv1d(1, 2, 3, padding=1) if form == "convolution" else nn.Linear(4, 2)
        self.out = nn.Linear(8 if form == "convolution" else 2, 1)

    def forward(self, x: Any) -> Tensor:
        if form_is_dict := isinstance(x, dict):
            x["a"] -= 1.0
        x = x["a"] if form_is_dict else x
        if not form_is_dict:
            x[:, ..., 0].mul_(2.0).add_(1.0)
        if self.form == "sometimes" and bool((x > 2).any()):
            x.clamp_(max=0.5)
        h = self.layer(x.unsqueeze(1) if self.form == "convolution" else x)
        return self.out(torch.tanh(h).flatten(1))


@pytest.mark.filterwarnings("ignore:.*vmap refused")
@pytest.mark.parametrize("form", ["linear", "convolution", "dict", "sometimes"])
def test_every_draw_sees_the_same_inputs(form: str) -> None:
    net, x = Shifts(form).double(), 2 * torch.randn(6, 4, dtype=torch.float64)
    given = ({"a": x.clone()},) if form == "dict" else x.clone()
    want = net({"a": x.clone()} if form == "dict" else x.clone()).detach()
    bnn = bayesify.bayesianize(net, posteriors.MeanField(1e-12), likelihood=likelihoods.Gaussian(0.1))
    for memory in (None, 2000):
        prediction = bnn.predict(given, 5, memory=memory)
        torch.testing.assert_close(prediction.mean, want, rtol=1e-8, atol=1e-8)
        assert float(prediction.epistemic.max()) < 1e-16
        assert torch.equal(given[0]["a"] if form == "dict" else given, x), "the caller's tensor stays"
    with torch.no_grad():
        outputs = bnn.draw(3)(*given) if form == "dict" else bnn.draw(3)(given)
    torch.testing.assert_close(outputs, want.expand(3, -1, -1), rtol=1e-8, atol=1e-8)


class Store:
    """Holds the tensors of `Graphs`."""

    x: Tensor


class Graphs:
    """A batch in the manner of graph libraries: attributes are those of a store."""

    def __init__(self, x: Tensor) -> None:
        self.__dict__["_store"] = Store()
        self.x = x

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.__dict__["_store"], name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._store, name, value)


@dataclass(slots=True)
class Slots:
    x: Tensor


def same_twice(x: Tensor) -> list[Any]:
    return [SimpleNamespace(x=x)] * 2


BATCHES: dict[str, tuple[Callable[[Tensor], Any], Callable[[Any], Tensor], Callable[[Any, Tensor], None]]] = {
    "dict": (lambda x: {"x": x}, lambda batch: batch["x"], lambda batch, x: batch.update(x=x)),
    "list": (lambda x: [x], lambda batch: batch[0], lambda batch, x: batch.__setitem__(0, x)),
    "object": (lambda x: SimpleNamespace(x=x), lambda batch: batch.x, lambda batch, x: setattr(batch, "x", x)),
    "dict of an object": (
        lambda x: SimpleNamespace(data={"x": x}),
        lambda batch: batch.data["x"],
        lambda batch, x: batch.data.update(x=x),
    ),
    "graphs": (Graphs, lambda batch: batch.x, lambda batch, x: setattr(batch, "x", x)),
    "slots": (Slots, lambda batch: batch.x, lambda batch, x: setattr(batch, "x", x)),
    "in place": (Slots, lambda batch: batch.x, lambda batch, x: batch.x.copy_(x)),
    "same object twice": (same_twice, lambda batch: batch[0].x, lambda batch, x: setattr(batch[1], "x", x)),
}
"""For each kind of batch: how it is made, read and changed."""


class Replaces(nn.Module):
    """Puts another tensor in the place of its input, twice."""

    def __init__(self, kind: str, way: str) -> None:
        super().__init__()
        self.way, (_, self.read, self.write) = way, BATCHES[kind]
        self.inner = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)).double()

    def forward(self, batch: Any) -> Tensor:
        self.write(batch, self.read(batch) - 3)
        self.write(batch, self.read(batch) / 2)
        x = self.read(batch)
        if self.way == "checkpointing":
            return checkpoint(self.inner, x, use_reentrant=False)
        output = self.inner(x)
        return 0 * output if self.way == "loop" and bool((output > 1e9).any()) else output


@pytest.mark.filterwarnings("ignore:.*vmap refused")
@pytest.mark.parametrize("way", ["vmap", "loop", "checkpointing"])
@pytest.mark.parametrize("kind", BATCHES)
def test_every_draw_sees_the_same_batch(kind: str, way: str) -> None:
    """The batch of the caller stays, too."""
    make, read, _ = BATCHES[kind]
    x = torch.randn(6, 4, dtype=torch.float64)
    bnn = bayesify.bayesianize(Replaces(kind, way), posteriors.MeanField(0.3), likelihood=likelihoods.Gaussian(0.1))
    with torch.no_grad():
        want = [draw(make(x.clone())) for draw in bnn.draw(3, generator=torch.Generator().manual_seed(0))]
    before = x.clone()
    for _ in range(2):
        batch = make(x)
        found = bnn.draw(3, generator=torch.Generator().manual_seed(0))(batch)
        torch.testing.assert_close(found, torch.stack(want))
        assert read(batch) is x
        assert torch.equal(x, before)


@pytest.mark.filterwarnings("ignore:.*vmap refused")
@pytest.mark.parametrize("grad", [False, True])
def test_a_cache_that_the_network_fills(grad: bool) -> None:
    """Every draw has a cache of its own, and the cache of the caller stays empty."""

    class Caching(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 2)

        def forward(self, x: Tensor, cache: Any) -> Tensor:
            cache.outputs.append(self.layer(x))
            return torch.cat(cache.outputs).sum(0, keepdim=True).expand(len(x), -1)

    bnn = bayesify.bayesianize(Caching(), posteriors.MeanField(0.3), likelihood=likelihoods.Gaussian(0.1))
    draws, x, cache = bnn.draw(3), torch.randn(6, 4), SimpleNamespace(outputs=[])
    with torch.set_grad_enabled(grad):
        want = [draw(x, SimpleNamespace(outputs=[])) for draw in draws]
        for _ in range(2):
            torch.testing.assert_close(draws(x, cache), torch.stack(want))
    assert cache.outputs == []


def test_large_inputs_are_passed_on() -> None:
    """An object with many parts is the caller's own, and takes no time to copy."""
    batch = SimpleNamespace(x=torch.randn(2), words=[str(number) for number in range(MAX_PARTS)])
    inputs = Untouched((batch,), {})
    assert inputs.take()[0][0] is batch
    assert not inputs.whole


@pytest.mark.parametrize("covariance", ["full", "kronecker", "diagonal"])
def test_laplace_of_a_network_that_changes_its_input(covariance: Any) -> None:
    class Copies(Shifts):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x.clone())

    torch.manual_seed(0)
    net, copies = Shifts("linear").double(), Copies("linear").double()
    copies.load_state_dict(net.state_dict())
    x, y = torch.randn(7, 4, dtype=torch.float64), torch.randn(7, 1, dtype=torch.float64)
    found = [
        bayesify.Laplace(one, likelihoods.Gaussian(0.1), covariance=covariance).fit([(x.clone(), y)]).predict(x.clone())
        for one in (net, copies)
    ]
    torch.testing.assert_close(found[0].epistemic, found[1].epistemic)


def test_inducing_inputs_are_not_changed() -> None:
    net, x = Shifts("linear"), torch.randn(6, 4)
    bnn = bayesify.bayesianize(net, posteriors.GlobalInducing(x[:3]), likelihood=likelihoods.Gaussian(0.1))
    before = [value.clone() for value in bnn.parameters()]
    bnn.predict(x, 3)
    assert all(torch.equal(a, b) for a, b in zip(before, bnn.parameters(), strict=True))


# -- caches --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", ["mean_field", "inducing", "k_tied", "matrix_normal", "walsh_hadamard", "full_covariance"]
)
@pytest.mark.parametrize("change", ["data", "numpy", "no_grad", "swap", "inference", "buffers"])
def test_no_way_to_change_parameters_goes_unseen(name: str, change: str) -> None:
    options = {"rows": 3, "cols": 3} if name == "inducing" else {}
    bnn = bayesify.bayesianize(
        nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 1)), {"name": name, **options}, likelihood="gaussian"
    )
    x = torch.randn(4, 6)

    def look() -> tuple[Tensor, Tensor, Tensor]:
        with torch.no_grad():
            draws = bnn.draw(2, generator=torch.Generator().manual_seed(0))
            return bnn.kl(), draws.kl, draws(x)

    look()
    with torch.no_grad():
        for buffer in bnn.posteriors.buffers() if change == "buffers" else ():
            buffer.mul_(2)
        for parameter in bnn.posteriors.parameters() if change != "buffers" else ():
            if change == "data":
                parameter.data.mul_(0.7)
            elif change == "numpy":
                parameter.detach().numpy()[...] *= 0.7
            elif change == "no_grad":
                parameter.mul_(0.7)
            elif change == "swap":
                parameter.data.copy_(parameter.data.flatten().flip(0).view_as(parameter))
            else:
                with torch.inference_mode():
                    parameter.mul_(0.7)
    expected_kl, expected_draws, expected_outputs = (value.clone() for value in look())
    other = copy.deepcopy(bnn)  # has cached nothing
    with torch.no_grad():
        draws = other.draw(2, generator=torch.Generator().manual_seed(0))
        torch.testing.assert_close(expected_kl, other.kl())
        torch.testing.assert_close(expected_draws, draws.kl)
        torch.testing.assert_close(expected_outputs, draws(x))


@pytest.mark.parametrize("name", ["inducing", "mean_field", "full_covariance", "global_inducing"])
def test_autocast_leaves_nothing_behind(name: str) -> None:
    x = torch.randn(5, 8)
    options: dict[str, Any] = {"inducing": {"rows": 4, "cols": 4}, "global_inducing": {"inputs": x[:3]}}.get(name, {})
    net = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))
    bnn = bayesify.bayesianize(net, {"name": name, **options}, likelihood="gaussian")
    seeded = lambda: torch.Generator().manual_seed(0)  # noqa: E731
    with torch.no_grad():
        kl, mean = bnn.kl(generator=seeded()), bnn.mean_network()
        want = bnn.predict(x, 3, generator=seeded()).mean
        for parameter in bnn.parameters():
            parameter.data.add_(0.0)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            torch.testing.assert_close(bnn.kl(generator=seeded()), kl)
            other = bnn.mean_network()
            bnn.predict(x, 3)
        for a, b in zip(mean.parameters(), other.parameters(), strict=True):
            torch.testing.assert_close(a, b)
        torch.testing.assert_close(bnn.kl(generator=seeded()), kl)
        torch.testing.assert_close(bnn.predict(x, 3, generator=seeded()).mean, want)


@pytest.mark.parametrize("name", ["mean_field", "inducing", "ensemble", "global_inducing", "walsh_hadamard", "laplace"])
def test_inference_mode(name: str, tmp_path: Any) -> None:
    """Made, stored, loaded and asked inside inference mode, and trained outside of it."""
    x, y = torch.randn(6, 4), torch.randn(6, 1)
    net = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1))
    options: dict[str, Any] = {"inducing": {"rows": 2, "cols": 2}, "global_inducing": {"inputs": x[:3]}}.get(name, {})
    if name == "laplace":
        made = bayesify.Laplace(net, likelihoods.Gaussian(0.1)).fit([(x, y)])
        want = made.predict(x).variance
        with torch.inference_mode():
            assert torch.equal(made.predict(x).variance, want)
        return
    with torch.inference_mode():
        bnn = bayesify.bayesianize(net, {"name": name, **options}, likelihood="gaussian")
        bnn.predict(x)
        bayesify.save(bnn, tmp_path / "model")
        loaded = bayesify.load(tmp_path / "model", net)
        found = [one.predict(x, 4, generator=torch.Generator().manual_seed(0)).mean for one in (bnn, loaded)]
        torch.testing.assert_close(*found)
    loaded.elbo(x, y, num_data=6).backward()


# -- padding rows --------------------------------------------------------------------------------------------------------


class Embeds(nn.Module):
    def __init__(self, bag: bool, padding: int) -> None:
        super().__init__()
        self.table = nn.EmbeddingBag(5, 3, padding_idx=padding) if bag else nn.Embedding(5, 3, padding_idx=padding)
        self.out = nn.Linear(3, 1)

    def forward(self, tokens: Tensor) -> Tensor:
        h = self.table(tokens)
        return self.out(h if h.ndim == 2 else h.sum(1))


def embedded(bag: bool, padding: int) -> tuple[Embeds, int, Tensor, Tensor]:
    torch.manual_seed(0)
    tokens, y = torch.randint(0, 5, (20, 4)), torch.randn(20, 1, dtype=torch.float64)
    return Embeds(bag, padding).double(), padding % 5, tokens, y


@pytest.mark.filterwarnings("ignore:.*vmap refused")
@pytest.mark.parametrize("bag", [False, True])
@pytest.mark.parametrize("padding", [0, 3, -1])
@pytest.mark.parametrize("covariance", ["full", "diagonal", "kronecker", "marginal"])
def test_padding_rows_have_no_posterior(bag: bool, padding: int, covariance: Any, tmp_path: Any) -> None:
    net, row, tokens, y = embedded(bag, padding)
    kind = {"covariance": "full", "marginal": True} if covariance == "marginal" else {"covariance": covariance}
    model = bayesify.Laplace(net, likelihoods.Gaussian(0.1), **kind).fit([(tokens, y)])
    drawn = model.draw(50).weights["table.weight"]
    assert torch.equal(drawn[:, row], net.table.weight[row].detach().expand(50, 3))
    assert float(drawn.std(0).sum(1)[[place for place in range(5) if place != row]].min()) > 0
    assert model.covariance_matrix().shape[0] == sum(value.numel() for value in net.parameters()) - 3
    bayesify.save(model, tmp_path / "model")
    torch.testing.assert_close(
        bayesify.load(tmp_path / "model", net).predict(tokens).variance, model.predict(tokens).variance
    )


@pytest.mark.parametrize("bag", [False, True])
@pytest.mark.parametrize("padding", [0, 3, -1])
def test_padding_rows_are_in_no_subnetwork(bag: bool, padding: int) -> None:
    net, row, tokens, y = embedded(bag, padding)
    fixed = set(range(3 * row, 3 * row + 3))
    selectors = [subnetwork.largest_variance(7), subnetwork.random(10, seed=1), subnetwork.largest_magnitude(9)]
    selectors += [
        subnetwork.from_names(["table.weight"]),
        subnetwork.from_indices(list(range(15))),
        subnetwork.random(1.0),
    ]
    for selector in selectors:
        chosen = bayesify.Laplace(net, likelihoods.Gaussian(0.1), subset=selector).fit([(tokens, y)]).subset
        assert chosen is not None
        assert not fixed & set(chosen.flat().tolist())


# -- routed layers, lone examples ------------------------------------------------------------------------------------------


class Experts(nn.Module):
    """Examples go through one of two layers, the second of which is called only if there are any."""

    def __init__(self, convolution: bool = False) -> None:
        super().__init__()
        self.first, self.out = nn.Linear(3, 4), nn.Linear(4, 2)
        self.one = nn.Conv1d(1, 1, 3, padding=1) if convolution else nn.Linear(4, 4)
        self.two = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.first(x))
        left = x[:, 0] > 0
        made = h.clone()
        chosen = h[left].unsqueeze(1) if isinstance(self.one, nn.Conv1d) else h[left]
        made[left] = h[left] + self.one(chosen).reshape(-1, 4)
        if bool((~left).any()):
            made[~left] = torch.tanh(self.two(h[~left]))
        return self.out(made)


@pytest.mark.thin(2)
@pytest.mark.parametrize("convolution", [False, True])
@pytest.mark.parametrize("curvature", ["ggn", "empirical"])
def test_kronecker_curvature_of_routed_layers_is_whole_in_any_order(convolution: bool, curvature: Any) -> None:
    torch.manual_seed(0)
    net = Experts(convolution).double()
    x, y = torch.randn(12, 3, dtype=torch.float64), torch.randn(12, 2, dtype=torch.float64)
    x[:4, 0], x[4:8, 0] = x[:4, 0].abs(), -x[4:8, 0].abs()
    parts = [slice(0, 4), slice(4, 8), slice(8, 12)]
    exact = bayesify.Laplace(net, likelihoods.Gaussian(0.1), covariance="diagonal", curvature=curvature).fit([(x, y)])
    traces = exact.subset.split(exact.posterior.curvature)
    want = None
    for order in ([0, 1, 2], [2, 0, 1], [1, 0, 2]):  # the first batch sees one layer, any, and the other
        loader = [(x[parts[place]], y[parts[place]]) for place in order]
        model = bayesify.Laplace(net, likelihoods.Gaussian(0.1), covariance="kronecker", curvature=curvature).fit(
            loader
        )
        for name in ("one.weight", "one.bias", "two.weight", "two.bias"):
            torch.testing.assert_close(model.posterior.diagonal[name].sum(), traces[name].sum())
        variance = model.predict(x).variance
        rows = [0, 5, 8, 11]
        alone = torch.cat([model.predict(x[row : row + 1]).variance for row in rows])
        torch.testing.assert_close(variance[rows], alone)
        joint = model.output_covariance(x, joint=True)
        torch.testing.assert_close(joint.diagonal().view(12, 2), model.output_covariance(x).diagonal(dim1=1, dim2=2))
        want = variance if want is None else want
        torch.testing.assert_close(variance, want)


def test_a_block_is_right_beside_examples_that_pass_its_layer_by() -> None:
    """Fitted on examples that all see the layer, so that it has factors; asked beside some that do not."""
    torch.manual_seed(0)
    net = Experts().double()
    x, y = torch.randn(12, 3, dtype=torch.float64), torch.randn(12, 2, dtype=torch.float64)
    x[:6, 0], x[6:, 0] = x[:6, 0].abs(), -x[6:, 0].abs()
    model = bayesify.Laplace(net, likelihoods.Gaussian(0.1), covariance="kronecker").fit([(x[:6], y[:6])])
    assert "one" in {block.layer.name for block in model.posterior.blocks}
    together = model.output_covariance(x)
    torch.testing.assert_close(together[:6], model.output_covariance(x[:6]))
    dense = model.covariance_matrix()
    jacobians = Jacobians(Runner(net, catalog(net).weights), list(catalog(net).weights))
    point = jacobians.at((x,), {})
    rows = model.subset.rows(point.pull(point.identity())).movedim(1, 0)  # [B, O, S]
    torch.testing.assert_close(together, rows @ dense @ rows.mT)
    flat = rows.flatten(0, 1)
    torch.testing.assert_close(model.output_covariance(x, joint=True), flat @ dense @ flat.T)


@pytest.mark.parametrize("covariance", ["full", "diagonal", "kronecker"])
def test_a_layer_that_no_example_saw_has_no_gradient(covariance: Any) -> None:
    net = Experts().double()
    x = torch.randn(6, 3, dtype=torch.float64).abs()
    model = bayesify.Laplace(net, likelihoods.Gaussian(0.1), covariance=covariance, subset=["two.weight"])
    model.fit([(x, torch.randn(6, 2, dtype=torch.float64))])
    assert float(model.predict(x).epistemic.max()) == 0


class Sorts(nn.Module):
    """Works on examples in another order, as networks do around packed sequences."""

    def __init__(self, descending: bool) -> None:
        super().__init__()
        self.first, self.last, self.descending = nn.Linear(2, 4), nn.Linear(4, 1), descending

    def forward(self, x: Tensor) -> Tensor:
        order = x[:, 0].argsort(descending=self.descending)
        return self.last(torch.tanh(self.first(x))[order])[order.argsort()]


@pytest.mark.thin(2)
@pytest.mark.parametrize("descending", [False, True])
@pytest.mark.parametrize("sign", [-1, 1])
@pytest.mark.parametrize("covariance", ["full", "diagonal", "kronecker"])
def test_rules_are_certified_on_several_examples(descending: bool, sign: int, covariance: Any) -> None:
    torch.manual_seed(0)
    net = Sorts(descending).double()
    x, y = torch.randn(9, 2, dtype=torch.float64), torch.randn(9, 1, dtype=torch.float64)
    x = x[(sign * x[:, 0]).argsort()]
    models = {  # by the rows of the first of two batches
        first: bayesify.Laplace(net, likelihoods.Gaussian(0.1), covariance=covariance).fit(
            [(x[part], y[part]) for part in (slice(first), slice(first, 9)) if len(x[part])]
        )
        for first in (9, 1, 2, 3)
    }
    for model in models.values():
        alone = torch.cat([model.predict(x[row : row + 1]).variance for row in range(9)])
        torch.testing.assert_close(model.predict(x).variance, alone)
        if covariance != "kronecker":
            torch.testing.assert_close(model.posterior.curvature, models[9].posterior.curvature)


def test_mixing_is_seen_at_the_first_batch_of_several() -> None:
    class Mixes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(2, 1)

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x - x.mean(0) if len(x) > 1 else x)

    x, y = torch.randn(8, 2), torch.randn(8, 1)
    model = bayesify.Laplace(Mixes(), likelihoods.Gaussian(0.1)).fit(
        [(x[row : row + 1], y[row : row + 1]) for row in range(8)]
    )
    model.predict(x[:1])
    with pytest.raises(ValueError, match="other examples"):
        model.predict(x)
    with pytest.raises(ValueError, match="other examples"):
        bayesify.Laplace(Mixes(), likelihoods.Gaussian(0.1)).fit([(x[:1], y[:1]), (x[1:], y[1:])])


# -- second derivatives ----------------------------------------------------------------------------------------------------


REFUSES = {"inducing": False}


@pytest.mark.parametrize("name", ["mean_field", "mean_field, local", "mean_field, capped", "k_tied", "matrix_normal", "inducing",
                                  "walsh_hadamard", "global_inducing", "full_covariance", "rank_one"])  # fmt: skip
@pytest.mark.parametrize(("num_draws", "frozen"), [(1, ()), (3, ()), (1, range(0, 99, 2)), (2, range(1, 99, 2))])
def test_second_derivatives_are_right_or_refused(name: str, num_draws: int, frozen: Sequence[int]) -> None:
    """v' H v of the ELBO against differences of gradients, in float64; also by some of the parameters, the others frozen."""
    torch.manual_seed(0)
    x, y = torch.randn(4, 3, dtype=torch.float64), torch.randn(4, 1, dtype=torch.float64)
    posterior: Any = {
        "mean_field": posteriors.MeanField(0.5),
        "mean_field, local": posteriors.MeanField(0.5, local_reparameterization=True),
        "mean_field, capped": posteriors.MeanField(0.5, max_std=1.0),
        "inducing": posteriors.InducingWeights(2, 2),
        "global_inducing": posteriors.GlobalInducing(x[:3]),
    }.get(name, name)
    net = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 1)).double()
    bnn = bayesify.bayesianize(net, posterior, likelihood=likelihoods.Gaussian(0.3, learn=False))
    for at_place, parameter in enumerate(bnn.posteriors.parameters()):
        parameter.requires_grad_(at_place not in frozen)
    parameters = [parameter for parameter in bnn.posteriors.parameters() if parameter.requires_grad]

    def gradients(**options: Any) -> tuple[Tensor, ...]:
        bound = bnn.elbo(x, y, num_data=4, num_draws=num_draws, generator=torch.Generator().manual_seed(0))
        return torch.autograd.grad(bound, parameters, materialize_grads=True, allow_unused=True, **options)

    direction = [torch.randn_like(parameter) for parameter in parameters]

    def along(grads: tuple[Tensor, ...]) -> Tensor:
        return torch.stack([(grad * part).sum() for grad, part in zip(grads, direction, strict=True)]).sum()

    def at(step: float) -> float:
        with torch.no_grad():
            torch._foreach_add_(parameters, direction, alpha=step)
        found = float(along(gradients()))
        with torch.no_grad():
            torch._foreach_add_(parameters, direction, alpha=-step)
        return found

    step = 1e-5
    exact = (at(step) - at(-step)) / (2 * step)
    first = along(gradients(create_graph=True))
    if REFUSES.get(name, False):
        with pytest.raises(RuntimeError, match=r"once_differentiable|twice"):
            torch.autograd.grad(first, parameters, materialize_grads=True, allow_unused=True)
        return
    second = torch.autograd.grad(first, parameters, materialize_grads=True, allow_unused=True)
    assert float(along(second).detach()) == pytest.approx(exact, rel=1e-4, abs=1e-6)  # differences lose 1e-5
