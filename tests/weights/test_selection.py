"""Which posterior takes which weight: selectors, their order, and errors that name the nearest."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from cases import CASES, POSTERIORS, Tied
from torch import Tensor, nn

import bayesify
from bayesify import posteriors


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 2, 3, padding=1)
        self.bn = nn.BatchNorm2d(2)
        self.conv2 = nn.Conv2d(2, 2, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv2(torch.relu(self.bn(self.conv(x))))


class SpecialLinear(nn.Linear):
    """A subclass, to be found by its base's name too."""


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer1 = Block()
        self.layer10 = Block()
        self.scale = nn.Parameter(torch.ones(()))
        self.head = nn.Sequential(SpecialLinear(2, 4), nn.LayerNorm(4), nn.Linear(4, 3))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layer10(self.layer1(x)).mean((2, 3)) * self.scale)


def taken(choice: Any, net: nn.Module | None = None) -> dict[str, str]:
    """Posterior by weight, where there is one."""
    bnn = bayesify.bayesianize(net or Net(), choice)
    return {row.name: row.treatment for row in bnn.summary().rows if row.treatment != "point estimate"}


CONVS = {
    f"{block}.{conv}.{leaf}"
    for block in ("layer1", "layer10")
    for conv in ("conv", "conv2")
    for leaf in ("weight", "bias")
}
NORMS = {f"{block}.bn.{leaf}" for block in ("layer1", "layer10") for leaf in ("weight", "bias")} | {
    "head.1.weight",
    "head.1.bias",
}
LINEARS = {"head.0.weight", "head.0.bias", "head.2.weight", "head.2.bias"}


def test_everything_but_norms() -> None:
    for choice in (
        "mean_field",
        posteriors.MeanField,
        posteriors.MeanField(),
        {"name": "mean_field"},
        {"*": "mean_field"},
    ):
        assert set(taken(choice)) == CONVS | LINEARS | {"scale"}


@pytest.mark.parametrize(
    ("selector", "expected"),
    [
        ("head.2", {"head.2.weight", "head.2.bias"}),
        ("head.2.weight", {"head.2.weight"}),
        ("scale", {"scale"}),
        ("head", LINEARS),
        ("layer1", {name for name in CONVS if name.startswith("layer1.")}),
        ("layer1*", CONVS),
        ("*conv2*", {name for name in CONVS if ".conv2." in name}),
        ("*.bias", {name for name in CONVS | LINEARS if name.endswith("bias")}),
        ("layer?.conv.weight", {"layer1.conv.weight"}),
        ("layer1[0-9].*", {name for name in CONVS if name.startswith("layer10.")}),
        ("Conv2d", CONVS),
        ("Linear", LINEARS),
        ("SpecialLinear", {"head.0.weight", "head.0.bias"}),
        ("_ConvNd", CONVS),
        ("Block", CONVS),
        ("BatchNorm2d", {name for name in NORMS if "bn" in name}),
        ("layer1.bn", {"layer1.bn.weight", "layer1.bn.bias"}),
        ("layer1.bn.bias", {"layer1.bn.bias"}),
        ("*.bn", {name for name in NORMS if "bn" in name}),
        ("*.bn.*", {name for name in NORMS if "bn" in name}),
    ],
)  # fmt: skip
def test_selectors(selector: str, expected: set[str]) -> None:
    assert set(taken({selector: "mean_field"})) == expected


def test_a_module_object() -> None:
    net = Net()
    assert set(taken({net.head[2]: posteriors.MeanField()}, net)) == {"head.2.weight", "head.2.bias"}
    assert set(taken({net.layer1.bn: posteriors.MeanField()}, net)) == {"layer1.bn.weight", "layer1.bn.bias"}
    assert set(taken({net: posteriors.MeanField()}, net)) == CONVS | LINEARS | {"scale"}
    with pytest.raises(ValueError, match=r"selector Linear is not a module of this network"):
        taken({nn.Linear(2, 2): posteriors.MeanField()})


def test_the_first_selector_wins() -> None:
    found = taken({"layer10": "ensemble", "Conv2d": "mean_field", "*": "point"})
    assert {found[name] for name in CONVS if name.startswith("layer10.")} == {"Ensemble"}
    assert {found[name] for name in CONVS if name.startswith("layer1.")} == {"MeanField"}
    assert {found[name] for name in LINEARS | {"scale"}} == {"Point"}
    found = taken({"head.2.bias": "point", "head.2": "mean_field"})
    assert found == {"head.2.bias": "Point", "head.2.weight": "MeanField"}


def test_norms_asked_for_together_with_others() -> None:
    found = taken({"LayerNorm": "mean_field", "*": "point"})
    assert found["head.1.weight"] == "MeanField"
    assert "layer1.bn.weight" not in found


def test_an_unknown_normalization_layer_by_its_name() -> None:
    class MyRMSNorm(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gain = nn.Parameter(torch.ones(3))

        def forward(self, x: Tensor) -> Tensor:
            return x * self.gain

    net = nn.Sequential(nn.Linear(3, 3), MyRMSNorm())
    assert set(taken("mean_field", net)) == {"0.weight", "0.bias"}
    assert set(taken({"MyRMSNorm": "mean_field"}, net)) == {"1.gain"}


def test_a_tied_weight_is_found_by_either_name() -> None:
    for selector in ("embedding.weight", "out.weight", "embedding", "Embedding"):
        found = taken({selector: "mean_field"}, Tied())
        assert found == {"embedding.weight": "MeanField"}
    assert set(taken({"out": "mean_field"}, Tied())) == {"embedding.weight", "out.bias"}


def test_frozen_weights_stay() -> None:
    net = Net()
    net.head[0].weight.requires_grad_(False)
    assert set(taken("mean_field", net)) == (CONVS | LINEARS | {"scale"}) - {"head.0.weight"}
    bnn = bayesify.bayesianize(net, "mean_field")
    row = next(row for row in bnn.summary().rows if row.name == "head.0.weight")
    assert row.remark == "frozen (requires_grad=False)"
    with pytest.raises(ValueError, match=r"'head.0.weight' matches only head.0.weight: frozen.*; change this"):
        taken({"head.0.weight": "mean_field"}, net)


class Words(nn.Module):
    """A table of words, alone or in a bag, before a linear layer."""

    def __init__(self, kind: type[nn.Module], **options: Any) -> None:
        super().__init__()
        self.table = kind(6, 4, **options)
        self.head = nn.Linear(4, 2)

    def forward(self, words: Tensor) -> Tensor:
        found = self.table(words)
        return self.head(found.mean(1) if found.ndim == 3 else found)


@pytest.mark.parametrize("kind", [nn.Embedding, nn.EmbeddingBag])
def test_a_table_that_changes_in_every_pass_stays_and_trains_as_before(kind: type[nn.Module]) -> None:
    net = Words(kind, max_norm=0.1)
    assert set(taken("mean_field", net)) == {"head.weight", "head.bias"}
    with pytest.raises(ValueError, match=r"'table' matches only table.weight: .* max_norm= .*; change this"):
        taken({"table": "mean_field"}, net)
    bnn = bayesify.bayesianize(net, "mean_field", likelihood="gaussian")
    words = torch.arange(6).reshape(3, 2)
    bnn.elbo(words, torch.zeros(3, 2), num_data=3, num_draws=2).backward()
    table = bnn.network.table.weight
    assert bool((table.norm(dim=1) <= 0.1001).all())
    assert bool(table.grad.any(dim=1).all())
    tied = nn.ModuleDict({"out": nn.Linear(4, 6), "table": net.table})
    tied.out.weight = tied.table.weight
    assert set(taken("mean_field", tied)) == {"out.bias"}


@pytest.mark.parametrize("name", [name for name in POSTERIORS if not name.endswith("l_inducing")])  # those need points
@pytest.mark.parametrize("kind", [nn.Embedding, nn.EmbeddingBag])
@pytest.mark.parametrize("computed", [False, True])
def test_the_gradient_of_a_table_is_dense_and_that_of_the_objective(
    kind: type[nn.Module], name: str, computed: bool
) -> None:
    net, words = Words(kind), torch.tensor([[0, 0], [0, 1], [5, 4]])
    if computed:
        nn.utils.parametrizations.weight_norm(net.table)
    gradients = []
    for odd in (False, True):
        torch.manual_seed(0)
        net.table.sparse = net.table.scale_grad_by_freq = odd
        bnn = bayesify.bayesianize(net, name, likelihood="gaussian")
        generator = torch.Generator().manual_seed(0)
        bnn.elbo(words, torch.zeros(3, 2), num_data=3, num_draws=2, generator=generator).backward()
        gradients.append([parameter.grad for parameter in bnn.parameters() if parameter.grad is not None])
        for table in (net.table, bnn.mean_network().table):
            assert table.sparse == table.scale_grad_by_freq == odd
    for dense, other in zip(*gradients, strict=True):
        torch.testing.assert_close(dense, other)


# -- errors ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("choice", "message"),
    [
        ({"head.3": "mean_field"}, r"selector 'head.3' matches no weight; did you mean 'head\.\d'\?"),
        ({"Conv2": "mean_field"}, r"'Conv2' matches no weight; did you mean 'Conv2d'\?"),
        ({"layr1": "mean_field"}, r"'layr1' matches no weight; did you mean 'layer1'\?"),
        ({"zzz*": "mean_field"}, r"'zzz\*' matches no weight; known: "),
        ({"ReLU": "mean_field"}, r"'ReLU' matches no weight"),
        ({"*": "mean_field", "head": "point"}, r"'head' gets no weight, because earlier selectors took them"),
        ({}, r"the dict of posteriors is empty; give at least one selector"),
        ("mean_feild", r"unknown method 'mean_feild'; did you mean 'mean_field'\?"),
        ({"name": "mean_field", "std": 1}, r"^MeanField: got .*'std'; use init_std instead; its options are init_std, max_std"),
        ({"head": {"init_std": 0.1}}, r"\{'init_std': 0.1\} has no 'name'; add the name of the posterior"),
        ({"name": "mean_field", "init_std": -1}, r"MeanField: init_std=-1; give a positive number"),
        ("no_such_file.json", r"no_such_file.json: no such file; give the path"),
    ],
)  # fmt: skip
def test_errors_name_the_remedy(choice: Any, message: str) -> None:
    net = Net()
    before = {name: id(parameter) for name, parameter in net.named_parameters()}
    with pytest.raises(ValueError, match=message):
        bayesify.bayesianize(net, choice)
    assert {name: id(parameter) for name, parameter in net.named_parameters()} == before


@pytest.mark.parametrize("choice", [3, None, {"head": 3}, [posteriors.MeanField()]])
def test_choices_that_mean_nothing(choice: Any) -> None:
    with pytest.raises(TypeError, match=r"is not a posterior; give an instance, a name or a dict"):
        bayesify.bayesianize(Net(), choice)


@pytest.mark.parametrize("selector", [nn.Linear, 3])
def test_selectors_that_mean_nothing(selector: Any) -> None:
    with pytest.raises(
        TypeError, match=r"is not a selector; give a name, a glob, a class name such as 'Linear', or a module"
    ):
        bayesify.bayesianize(Net(), {selector: "mean_field"})


def test_networks_without_weights() -> None:
    with pytest.raises(ValueError, match=r"ReLU has no parameters; give a network with at least one weight"):
        bayesify.bayesianize(nn.ReLU(), "mean_field")
    with pytest.raises(ValueError, match=r"no parameter can get a posterior; .*: frozen"):
        bayesify.bayesianize(nn.Linear(2, 2).requires_grad_(False), "mean_field")
    with pytest.raises(ValueError, match=r"only normalization layers have weights here; name them"):
        bayesify.bayesianize(nn.Sequential(nn.LayerNorm(3), nn.BatchNorm1d(3)), "mean_field")
    with pytest.raises(ValueError, match=r"weight is uninitialized; run one batch through the lazy network first"):
        bayesify.bayesianize(nn.LazyLinear(3), "mean_field")
    with pytest.raises(TypeError, match=r"net=Linear; give a torch.nn.Module"):
        bayesify.bayesianize(nn.Linear, "mean_field")  # type: ignore[arg-type]


def test_a_submodule_called_like_a_key_of_the_configuration() -> None:
    """`{"posterior": ...}` and `{"name": ...}` are selectors where the network has such a module."""

    class Coder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.posterior, self.name = nn.Linear(2, 2), nn.Linear(2, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.name(self.posterior(x))

    assert set(taken({"posterior": posteriors.MeanField()}, Coder())) == {"posterior.weight", "posterior.bias"}
    assert set(taken({"name": posteriors.MeanField()}, Coder())) == {"name.weight", "name.bias"}


# -- which output ------------------------------------------------------------------------------------------------------


def test_which_output_the_likelihood_is_about() -> None:
    case = CASES["keywords_to_dict"]
    x = case.batch()
    bnn = bayesify.bayesianize(case.network(), "mean_field", likelihood="categorical")
    assert bnn.predict(x, 2).probs.shape == (3, 3)  # type: ignore[attr-defined]
    hidden = bayesify.bayesianize(case.network(), "mean_field", likelihood="gaussian", output="hidden")
    assert hidden.predict(x, 2).mean.shape == (3, 4)  # type: ignore[attr-defined]
    wrong = bayesify.bayesianize(case.network(), "mean_field", likelihood="gaussian", output="logit")
    with pytest.raises(ValueError, match=r"output has no entry 'logit'; its entries are \['logits', 'hidden'\]"):
        wrong.predict(x, 2)

    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(2, 2)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return self.layer(x), x

    unclear = bayesify.bayesianize(Two(), "mean_field", likelihood="gaussian")
    with pytest.raises(
        ValueError, match=r"name the entry that the likelihood should use: bayesianize\(..., output=...\)"
    ):
        unclear.predict(torch.zeros(3, 2))
