"""The last layer from its inputs: the numbers of the Jacobian, and a way back to it where the network ends otherwise."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations

import bayesify
from bayesify import likelihoods
from bayesify.jacobians import Jacobians
from bayesify.likelihoods import Likelihood
from bayesify.running.runner import Runner
from bayesify.weights.catalog import catalog

N = 9


class Net(nn.Module):
    """A body, a last layer, and what comes after it."""

    def __init__(self, last: nn.Module, end: Callable[[Tensor], Any] = lambda out: out, *, image: bool = False) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(2, 3, 1) if image else nn.Linear(2, 3), nn.Tanh())
        self.last, self.end = last, end

    def forward(self, x: Tensor) -> Any:
        return self.end(self.last(self.body(x)))


@dataclass
class Case:
    """A network with inputs, targets and a likelihood."""

    net: Callable[[], nn.Module]
    likelihood: Likelihood
    shape: tuple[int, ...]
    targets: Callable[[], Tensor]
    subset: Any = "last_layer"
    output: str | None = None


def classes(*shape: int, count: int = 4) -> Callable[[], Tensor]:
    return lambda: torch.randint(count, (N, *shape))


def missing(*shape: int) -> Callable[[], Tensor]:
    return lambda: torch.randint(4, (N, *shape)).masked_fill_(torch.rand(N, *shape) < 0.3, -100)


def numbers(*shape: int) -> Callable[[], Tensor]:
    return lambda: torch.randn(N, *shape)


categorical, over_axis = likelihoods.Categorical(), likelihoods.Categorical(class_axis=1)
CASES = {
    "classes": Case(lambda: Net(nn.Linear(3, 4)), categorical, (2,), classes()),
    "two classes": Case(lambda: Net(nn.Linear(3, 2)), categorical, (2,), classes(count=2)),
    "no bias": Case(lambda: Net(nn.Linear(3, 4, bias=False)), categorical, (2,), classes()),
    "weight only": Case(lambda: Net(nn.Linear(3, 4)), categorical, (2,), classes(), ["last.weight"]),
    "bias only": Case(lambda: Net(nn.Linear(3, 4)), categorical, (2,), classes(), ["last.bias"]),
    "head of two": Case(
        lambda: Net(nn.Linear(3, 4), lambda out: {"a": out, "b": out.exp()}),
        categorical,
        (2,),
        classes(),
        output="a",
    ),
    "numbers": Case(
        lambda: Net(nn.Linear(3, 3)), likelihoods.Gaussian(noise=[0.5, 1.0, 0.1], learn=False), (2,), numbers(3)
    ),
    "one number": Case(
        lambda: Net(nn.Linear(3, 1), lambda out: out.squeeze(-1)), likelihoods.Gaussian(noise=0.3), (2,), numbers()
    ),
    "mean and variance": Case(lambda: Net(nn.Linear(3, 4)), likelihoods.HeteroscedasticGaussian(), (2,), numbers(2)),
    "counts": Case(
        lambda: Net(nn.Linear(3, 2)), likelihoods.Poisson(), (2,), lambda: torch.randint(5, (N, 2)).double()
    ),
    "labels": Case(lambda: Net(nn.Linear(3, 3)), likelihoods.Bernoulli(), (2,), lambda: torch.rand(N, 3).round()),
    "sequence": Case(lambda: Net(nn.Linear(3, 4)), categorical, (5, 2), missing(5)),
    "sequence of numbers": Case(lambda: Net(nn.Linear(3, 2)), likelihoods.Gaussian(noise=0.2), (4, 2), numbers(4, 2)),
    "classes before positions": Case(
        lambda: Net(nn.Linear(3, 4), lambda out: out.transpose(1, 2)), over_axis, (5, 2), missing(5)
    ),
    "heads in a view": Case(
        lambda: Net(nn.Linear(3, 12), lambda out: out.view(len(out), 3, 4)), categorical, (2,), missing(3)
    ),
    "heads in a turned view": Case(
        lambda: Net(nn.Linear(3, 12), lambda out: out.view(len(out), 4, 3).mT), categorical, (2,), missing(3)
    ),
    "segmentation": Case(lambda: Net(nn.Conv2d(3, 4, 1), image=True), over_axis, (2, 2, 3), missing(2, 3)),
    "windows": Case(
        lambda: Net(nn.Conv2d(3, 4, 3, padding=1, stride=2), image=True), over_axis, (2, 4, 4), classes(2, 2)
    ),
    "masks": Case(
        lambda: Net(nn.Conv2d(3, 1, 1), image=True),
        likelihoods.Bernoulli(),
        (2, 2, 2),
        lambda: torch.rand(N, 1, 2, 2).round(),
    ),
}
STRUCTURES = ("full", "kronecker", "diagonal")


@contextmanager
def by_jacobians(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Derivatives of the network in place of the inputs of its last layer."""
    with monkeypatch.context() as patch:
        patch.setattr(Jacobians, "features", lambda *_: None)
        patch.setattr(Jacobians, "feature_cost", lambda *_: None)
        yield


@contextmanager
def without_derivatives(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """An error where a network is linearized."""

    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("the network was linearized")

    with monkeypatch.context() as patch:
        patch.setattr(Jacobians, "at", refuse)
        yield


def results(
    case: Case, structure: str, weights: Tensor | None, dtype: torch.dtype = torch.float64
) -> dict[str, Tensor]:
    torch.manual_seed(0)
    net = case.net().to(dtype).eval()
    x, y = torch.randn(N, *case.shape, dtype=dtype), case.targets()
    y = y.to(dtype) if y.is_floating_point() else y
    parts = [slice(0, 5), slice(5, N)]
    batches = [(x[part], y[part], *(() if weights is None else (weights[part],))) for part in parts]
    laplace = bayesify.Laplace(net, case.likelihood, case.subset, structure, 0.7, output=case.output)  # type: ignore[arg-type]
    laplace.fit(batches)
    other = torch.randn(6, *case.shape, dtype=dtype)
    made = laplace.predict(other)
    found = {
        "curvature": torch.cat([value.flatten() for _, value in sorted(laplace.fitted()[1].tensors().items())]),
        "evidence": laplace.log_evidence(),
        "covariance": laplace.output_covariance(other),
        "joint": laplace.output_covariance(other, joint=True),
        "log_prob": made.log_prob(y[:6]),
    }
    if case.likelihood.task == "classification":
        found |= {"probs": made.probs, "information": made.mutual_information}
    elif not isinstance(case.likelihood, likelihoods.Poisson):  # whose predictive is made of draws
        found |= {"mean": made.mean, "variance": made.variance}
    else:
        found.pop("log_prob")
    if case.subset == "last_layer" and case.output is None and len(case.shape) < 3 and "log_prob" in found:
        found["tuned"] = torch.tensor(laplace.tune_prior_precision(batches, grid=(0.1, 10.0), fine=False))
    return found


@pytest.mark.thin(3)
@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.parametrize("name", CASES)
def test_the_inputs_of_the_last_layer_give_the_numbers_of_the_jacobian(
    name: str, structure: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = CASES[name]
    with without_derivatives(monkeypatch):
        found = results(case, structure, None)
    with by_jacobians(monkeypatch):
        wanted = results(case, structure, None)
    for key, value in wanted.items():
        torch.testing.assert_close(found[key], value, rtol=1e-7, atol=1e-9, msg=lambda text, key=key: f"{key}: {text}")


@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.parametrize("name", ["classes", "sequence", "one number"])
def test_it_is_the_same_with_weights_and_in_float32(name: str, structure: str, monkeypatch: pytest.MonkeyPatch) -> None:
    weights = torch.tensor([1.0, 0.5, 2.0, 0.0, 3.0, 1.0, 0.25, 1.0, 0.0], dtype=torch.float64)
    for dtype, given in ((torch.float64, weights), (torch.float32, None)):
        found = results(CASES[name], structure, given, dtype)
        with by_jacobians(monkeypatch):
            wanted = results(CASES[name], structure, given, dtype)
        close = {"rtol": 1e-7, "atol": 1e-9} if dtype == torch.float64 else {"rtol": 1e-5, "atol": 2e-6}
        for key, value in wanted.items():
            torch.testing.assert_close(found[key], value, **close, msg=lambda text, key=key: f"{key}: {text}")


def fitted(case: Case, structure: str, **options: Any) -> tuple[bayesify.Laplace, Tensor]:
    torch.manual_seed(0)
    net = case.net().double().eval()
    x, y = torch.randn(N, *case.shape, dtype=torch.float64), case.targets()
    y = y.double() if y.is_floating_point() else y
    made = bayesify.Laplace(net, case.likelihood, case.subset, structure, 0.7, output=case.output, **options)  # type: ignore[arg-type]
    return made.fit([(x, y)]), x


@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.parametrize("name", ["classes", "bias only", "one number", "heads in a turned view", "windows"])
def test_draws_of_the_linearized_network_are_the_jacobians(
    name: str, structure: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    laplace, x = fitted(CASES[name], structure)

    def outputs() -> Tensor:
        generator = torch.Generator().manual_seed(3)
        return laplace.predict(x, 3, method="linearized_mc", generator=generator).outputs

    found = outputs()
    with by_jacobians(monkeypatch):
        torch.testing.assert_close(found, outputs())


@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.parametrize("name", ["sequence", "segmentation", "heads in a view", "sequence of numbers", "masks"])
def test_covariances_that_exceed_the_budget_are_cut_as_those_of_the_jacobian(
    name: str, structure: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    laplace, x = fitted(CASES[name], structure)

    def spread() -> Tensor:
        made = laplace.predict(x, memory=2000)
        return made.probs if CASES[name].likelihood.task == "classification" else made.variance

    found = spread()
    with by_jacobians(monkeypatch):
        torch.testing.assert_close(found, spread())


class Tied(nn.Module):
    """A last layer whose weight is the embedding's too."""

    def __init__(self, functional: bool = False) -> None:
        super().__init__()
        self.table, self.last = nn.Embedding(5, 3), nn.Linear(3, 5)
        self.functional = functional
        if not functional:
            self.last.weight = self.table.weight

    def forward(self, x: Tensor) -> Tensor:
        if self.functional:  # the same weight without a name for it
            return self.last((x.unsqueeze(-1) == torch.arange(5)).to(self.last.weight) @ self.last.weight)
        return self.last(self.table(x))


class Twice(nn.Module):
    """A last layer that is called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.last = nn.Linear(2, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.last(self.body(x)).tanh())


class Heads(nn.Module):
    """Outputs of two layers side by side."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(2, 2), nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat((self.first(x), self.last(x)), -1)


ENDS: dict[str, tuple[Callable[[], nn.Module], bool]] = {
    "nothing": (lambda: Net(nn.Linear(3, 4)), True),
    "a view": (lambda: Net(nn.Linear(3, 4), lambda out: out.view(len(out), 2, 2).flatten(1)), True),
    "a factor": (lambda: Net(nn.Linear(3, 4), lambda out: 2 * out), False),
    "a factor in place": (lambda: Net(nn.Linear(3, 4), lambda out: out.mul_(3)), False),
    "a nonlinear function": (lambda: Net(nn.Linear(3, 4), torch.tanh), False),
    "a nonlinear function in place": (lambda: Net(nn.Linear(3, 4), lambda out: out.sigmoid_()), False),
    "a change behind a view": (lambda: Net(nn.Linear(3, 4), lambda out: out.view(-1)[:3].zero_() + out), False),
    "a change of some": (lambda: Net(nn.Linear(3, 4), lambda out: out.index_fill_(1, torch.tensor([0]), 1.0)), False),
    "some of the outputs": (lambda: Net(nn.Linear(3, 8), lambda out: out[:, ::2]), False),
    "outputs twice": (lambda: Net(nn.Linear(3, 1), lambda out: out.expand(-1, 4)), False),
    "a copy": (lambda: Net(nn.Linear(3, 4), lambda out: out.flip(1)), False),
    "a call twice": (Twice, False),
    "another layer's outputs": (Heads, False),
}


@pytest.mark.parametrize("end", ENDS)
def test_a_network_that_ends_otherwise_is_differentiated(end: str) -> None:
    torch.manual_seed(0)
    make, direct = ENDS[end]
    net = make().double().eval()
    x, y = torch.randn(N, 2, dtype=torch.float64), torch.randint(4, (N,))
    names = ["last.weight", "last.bias"]
    jacobians = Jacobians(Runner(net, catalog(net).weights, evaluate=True), names)
    try:
        assert (jacobians.features((x,), {}) is not None) is direct
    except ValueError:  # rows that mix are refused
        assert end == "a change behind a view"
        return
    laplace = bayesify.Laplace(net, likelihoods.Categorical(), names, prior_precision=1.0).fit([(x, y)])
    values = {name: value.detach() for name, value in net.named_parameters()}

    def outputs(weight: Tensor, bias: Tensor) -> Tensor:
        return torch.func.functional_call(net, {**values, "last.weight": weight, "last.bias": bias}, (x,))

    parts = torch.autograd.functional.jacobian(outputs, tuple(values[name] for name in names))
    rows = torch.cat([part.flatten(2) for part in parts], -1)
    exact = rows @ laplace.covariance_matrix() @ rows.mT
    torch.testing.assert_close(laplace.output_covariance(x), exact)


@pytest.mark.parametrize("functional", [False, True])
def test_tied_weights_are_differentiated(functional: bool) -> None:
    torch.manual_seed(0)
    net, x, y = Tied(functional).double(), torch.randint(5, (N,)), torch.randint(5, (N,))
    name = "last.weight" if functional else "table.weight"
    jacobians = Jacobians(Runner(net, catalog(net).weights, evaluate=True), [name, "last.bias"])
    assert jacobians.features((x,), {}) is None
    laplace = bayesify.Laplace(net, likelihoods.Categorical(), [name], prior_precision=1.0).fit([(x, y)])
    weight = net.last.weight.detach()

    def outputs(weight: Tensor) -> Tensor:
        names = ["last.weight"] if functional else ["table.weight", "last.weight"]
        return torch.func.functional_call(net, dict.fromkeys(names, weight), (x,), tie_weights=False)

    rows = torch.autograd.functional.jacobian(outputs, weight).flatten(2)
    torch.testing.assert_close(laplace.output_covariance(x), rows @ laplace.covariance_matrix() @ rows.mT)


def test_a_network_that_ends_otherwise_for_some_batches_is_differentiated(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first batch does not show it."""
    net = Net(nn.Linear(3, 4), lambda out: out if bool((out < 9).all()) else out * 1.0)
    net.last.weight.data.fill_(3.0)
    torch.manual_seed(0)
    small, large = torch.randn(5, 2) / 100, torch.full((5, 2), 30.0) * torch.tensor([1.0, -1.0])
    net.body[0].weight.data.copy_(torch.tensor([[1.0, 0.0], [0.0, -1.0], [1.0, -1.0]]))
    batches = [(small, torch.randint(4, (5,))), (large, torch.randint(4, (5,)))]

    def matrix() -> Tensor:
        return bayesify.Laplace(net, likelihoods.Categorical(), "last_layer").fit(batches).covariance_matrix()

    found = matrix()
    with by_jacobians(monkeypatch):
        torch.testing.assert_close(found, matrix())
    laplace = bayesify.Laplace(net, likelihoods.Categorical(), "last_layer", "kronecker").fit(batches[:1])
    together = torch.cat((small, large))
    probs = laplace.predict(together).probs
    with by_jacobians(monkeypatch):
        torch.testing.assert_close(probs, laplace.predict(together).probs)


# -- which layer runs last -------------------------------------------------------------------------------------------------


class By(nn.Module):
    """Embedded tokens through a hidden layer, and an end that is a function of the network and the hidden values."""

    def __init__(self, end: Callable[[Any, Tensor], Tensor], tie: str | None = None, **parts: Any) -> None:
        super().__init__()
        self.table, self.body, self.end = nn.Embedding(4, 3), nn.Linear(3, 3), end
        for name, part in parts.items():
            setattr(self, name, part)
        if tie is not None:
            self.head.weight = self.get_submodule(tie).weight

    def forward(self, x: Tensor) -> Tensor:
        return self.end(self, self.body(self.table(x)).tanh())


def head(net: Any, hidden: Tensor) -> Tensor:
    return net.head(hidden)


def own(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.randn(shape))


HEAD = ["head.weight", "head.bias"]
HIDDEN_USES: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: By(lambda net, h: F.linear(h, net.w), w=own(4, 3)),
    "product": lambda: By(lambda net, h: h @ net.w + net.b, w=own(3, 4), b=own(4)),
    "vector": lambda: By(lambda net, h: (h @ net.w)[:, None], w=own(3)),
    "one row": lambda: By(lambda net, h: F.linear(h, net.w), w=own(1, 3)),
    "cosines": lambda: By(lambda net, h: F.linear(F.normalize(h), F.normalize(net.w)), w=own(4, 3)),
    "sum": lambda: By(lambda net, h: (h[..., None] * net.w).sum(1), w=own(3, 4)),
    "einsum": lambda: By(lambda net, h: torch.einsum("bi,ki->bk", h, net.w), w=own(4, 3)),
    "tied embedding": lambda: By(lambda net, h: F.linear(h, net.table.weight)),
    "tied hidden layer": lambda: By(lambda net, h: h @ net.body.weight),
    "after a layer": lambda: By(lambda net, h: net.head(h).tanh() @ net.w, head=nn.Linear(3, 4), w=own(4, 4)),
}
LAST: dict[str, tuple[Callable[[], nn.Module], list[str]]] = {
    "plain": (lambda: By(head, head=nn.Linear(3, 4)), HEAD),
    "tied": (lambda: By(head, "table", head=nn.Linear(3, 4)), ["table.weight", "head.bias"]),
    "tied without bias": (lambda: By(head, "table", head=nn.Linear(3, 4, bias=False)), ["table.weight"]),
    "tied to the hidden layer": (lambda: By(head, "body", head=nn.Linear(3, 3)), ["body.weight", "head.bias"]),
    "called twice": (lambda: By(lambda net, h: net.head(net.head(h).tanh()), head=nn.Linear(3, 3)), HEAD),
    "several": (
        lambda: By(
            lambda net, h: torch.cat((net.other(h), net.head(h)), 1), head=nn.Linear(3, 2), other=nn.Linear(3, 2)
        ),
        [*HEAD, "other.weight", "other.bias"],
    ),
    "another that nothing comes from": (
        lambda: By(lambda net, h: (net.head(h), net.other(h))[0], head=nn.Linear(3, 2), other=nn.Linear(3, 2)),
        HEAD,
    ),
    "in a submodule": (
        lambda: By(head, head=nn.Sequential(nn.LayerNorm(3), nn.Sequential(nn.Linear(3, 4)))),
        ["head.1.0.weight", "head.1.0.bias"],
    ),
    "weight norm": (
        lambda: By(head, head=parametrizations.weight_norm(nn.Linear(3, 4))),
        ["head.bias", *(f"head.parametrizations.weight.original{place}" for place in (0, 1))],
    ),
    "weight norm of the hidden layer": (
        lambda: By(head, body=parametrizations.weight_norm(nn.Linear(3, 3)), head=nn.Linear(3, 4)),
        HEAD,
    ),
    "spectral norm": (
        lambda: By(head, head=parametrizations.spectral_norm(nn.Linear(3, 4, bias=False))),
        ["head.parametrizations.weight.original"],
    ),
    "log_softmax": (lambda: By(lambda net, h: net.head(h).log_softmax(1), head=nn.Linear(3, 4)), HEAD),
    "learned scale": (
        lambda: By(lambda net, h: net.s * net.head(h) + net.b, head=nn.Linear(3, 4), s=own(), b=own(4)),
        HEAD,
    ),
    "norm after it": (lambda: By(lambda net, h: net.n(net.head(h)), head=nn.Linear(3, 4), n=nn.LayerNorm(4)), HEAD),
    "product by hand before it": (
        lambda: By(lambda net, h: net.head(h @ net.w), head=nn.Linear(3, 4), w=own(3, 3)),
        HEAD,
    ),
    "recurrent": (
        lambda: By(lambda net, h: net.head(h[:, None])[0][:, 0], head=nn.GRU(3, 2, batch_first=True)),
        [f"head.{kind}_{gate}_l0" for kind in ("weight", "bias") for gate in ("ih", "hh")],
    ),
    "attention": (
        lambda: By(
            lambda net, h: net.head(*3 * [h[:, None]])[0][:, 0], head=nn.MultiheadAttention(3, 1, batch_first=True)
        ),
        ["head.in_proj_weight", "head.in_proj_bias", "head.out_proj.weight", "head.out_proj.bias"],
    ),
}


@pytest.mark.parametrize("name", LAST)
def test_the_layer_that_runs_last_is_chosen(name: str) -> None:
    """By its weights, whatever else they are of, and by the covariance that a Gauss-Newton matrix by hand has."""
    torch.manual_seed(0)
    make, wanted = LAST[name]
    net, x = make().double().eval(), torch.arange(N) % 4
    y = torch.randn_like(net(x))
    laplace = bayesify.Laplace(net, likelihoods.Gaussian(0.3), "last_layer", "full", 2.0).fit([(x, y)])
    assert sorted(laplace.subset.names) == sorted(wanted)
    start = {key: net.get_parameter(key).detach() for key in laplace.subset.names}

    def outputs(*weights: Tensor) -> Tensor:
        return torch.func.functional_call(net, dict(zip(start, weights, strict=True)), (x,))

    parts = torch.autograd.functional.jacobian(outputs, tuple(start.values()))
    rows = torch.cat([part.flatten(2) for part in parts], -1)  # [N, O, P]
    precision = torch.einsum("nop,noq->pq", rows, rows) / 0.3 + 2 * torch.eye(rows.shape[-1], dtype=rows.dtype)
    torch.testing.assert_close(laplace.covariance_matrix(), precision.inverse())
    torch.testing.assert_close(laplace.output_covariance(x), rows @ precision.inverse() @ rows.mT)
    bayesify.Laplace(net, likelihoods.Gaussian(0.3), "last_layer", "kronecker").fit([(x, y)]).predict(x)


@pytest.mark.parametrize("name", HIDDEN_USES)
def test_a_last_linear_map_without_a_layer_is_refused(name: str) -> None:
    torch.manual_seed(0)
    net, x = HIDDEN_USES[name]().double(), torch.arange(N) % 4
    laplace = bayesify.Laplace(net, likelihoods.Gaussian(0.3), "last_layer")
    with pytest.raises(
        ValueError, match=r"is used outside of a call of its layer.*subset=\['(w|table.weight|body.weight)'"
    ):
        laplace.fit([(x, torch.randn_like(net(x)))])


def test_few_passes_come_before_the_data_and_none_before_a_prediction() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(36, 300)).eval()
    sizes: list[int] = []
    net[0].register_forward_hook(lambda module, args, output: sizes.append(len(output)))
    x, y = torch.randn(40, 1, 5, 5), torch.randint(300, (40,))
    laplace = bayesify.Laplace(net, "categorical", subset="last_layer", covariance="kronecker")
    laplace.fit([(x[:20], y[:20]), (x[20:], y[20:])])
    assert sizes[-2:] == [20, 20]
    assert len(sizes) <= 8 + 2  # the layer, the likelihood, derivatives in two orders, and memory, of few examples
    assert max(sizes[:-2]) <= 6
    sizes.clear()
    laplace.predict(x)
    assert sizes == [40]


@pytest.mark.parametrize(("covariance", "passes"), [("kronecker", 1), ("diagonal", 1), ("full", 2)])
def test_fit_runs_the_network_once_per_batch(covariance: Any, passes: int) -> None:
    """Beside six runs over at most six examples: one finds the layer, one measures it, and four compare its rule with autograd.

    A full covariance of classes predicts the training rows again to settle the prior precision.
    """
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))
    batches = [(torch.randn(10, 4), torch.randint(3, (10,))) for _ in range(5)]
    seen: list[int] = []
    laplace = bayesify.Laplace(net, likelihoods.Categorical(), subset="last_layer", covariance=covariance)
    with counted_rows(nn.Tanh, seen):
        laplace.fit(batches)
    assert [rows for rows in seen if rows == 10] == [10] * 5 * passes
    assert len([rows for rows in seen if rows < 10]) <= 6
    seen.clear()
    with counted_rows(nn.Tanh, seen):
        laplace.predict(batches[0][0])
    assert seen == [10]


@contextmanager
def counted_rows(layer: type[nn.Module], seen: list[int]) -> Iterator[None]:
    """Append the number of examples of every call of a type of layers, in copies of the network too."""
    handle = nn.modules.module.register_module_forward_hook(
        lambda module, args, output: seen.append(len(args[0])) if isinstance(module, layer) else None
    )
    try:
        yield
    finally:
        handle.remove()


class JoinedHeads(nn.Module):
    """Two heads on one body. The body runs again for the second head."""

    def __init__(self, join: Callable[[Tensor, Tensor], Any]) -> None:
        super().__init__()
        self.body, self.first, self.second = nn.Linear(2, 4), nn.Linear(4, 2), nn.Linear(4, 2)
        self.join = join

    def forward(self, x: Tensor) -> Any:
        return self.join(self.first(self.body(x).tanh()), self.second(self.body(x).tanh()))


@pytest.mark.parametrize("covariance", ["full", "kronecker", "diagonal"])
def test_joined_heads_are_all_last_layers(covariance: Any) -> None:
    torch.manual_seed(0)
    net, x, y = JoinedHeads(lambda a, b: torch.cat([a, b], 1)), torch.randn(N, 2), torch.randn(N, 4)
    options = {"covariance": covariance, "prior_precision": 1.5}
    found = bayesify.Laplace(net, likelihoods.Gaussian(noise=0.3), "last_layer", **options).fit([(x, y)])
    a = torch.cat([net.body(x).tanh(), torch.ones(N, 1)], 1).detach().double()  # the same for all four outputs
    h = a.T @ a / 0.3
    h = torch.diag(h.diagonal()) if covariance == "diagonal" else h
    variance = (a @ (h + 1.5 * torch.eye(5)).inverse() * a).sum(1, keepdim=True)
    torch.testing.assert_close(found.predict(x).epistemic.double(), variance.expand(N, 4), rtol=1e-4, atol=1e-6)


def test_the_last_layer_of_an_output_is_its_own_head() -> None:
    torch.manual_seed(0)
    net, data = JoinedHeads(lambda a, b: (a, b)), [(torch.randn(N, 2), torch.randn(N, 2))]
    for output, name in enumerate(("first", "second")):
        found = bayesify.Laplace(net, likelihoods.Gaussian(noise=0.3), "last_layer", output=output).fit(data)
        assert found.subset is not None
        assert set(found.subset.names) == {f"{name}.weight", f"{name}.bias"}
