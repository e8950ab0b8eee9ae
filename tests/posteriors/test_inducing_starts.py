"""Global and local inducing points that start at a network: pseudo-outputs, means, draws, storage and what is refused."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import CASES, generator
from torch import Tensor, nn

import bayesify
from bayesify import likelihoods
from bayesify.posteriors import GlobalInducing, LocalInducing, MeanField

SURE = 1e12
"""A precision beside which the prior is lost."""


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 5, bias=False), nn.ReLU(), nn.Linear(5, 2))


class Convolutions(nn.Module):
    """Strides, groups, dilation, circular and uneven padding, a transposed convolution, a shortcut and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(2, 4, 3, stride=2, padding=1)
        self.grouped = nn.Conv2d(4, 4, (3, 2), padding=(1, 0), groups=2, bias=False)
        self.circular = nn.Conv2d(4, 4, 3, padding=2, dilation=2, padding_mode="circular")
        self.uneven = nn.Conv2d(4, 2, 2, padding="same")
        self.up = nn.ConvTranspose2d(2, 4, 3, stride=2, padding=1, output_padding=1, groups=2)
        self.head = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.grouped(torch.tanh(self.stem(x))))
        x = torch.tanh(self.uneven(x + torch.tanh(self.circular(x))))
        return self.head(torch.tanh(self.up(x)).mean((2, 3)))


class Attending(nn.Module):
    """Self-attention, then attention of one sequence to two others, all by linear maps."""

    def __init__(self) -> None:
        super().__init__()
        self.own = nn.MultiheadAttention(4, 2, batch_first=True)
        self.other = nn.MultiheadAttention(4, 2, batch_first=True, bias=False)
        self.head = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        made = self.own(x, x, x)[0]
        return self.head(self.other(made, x.flip(1), x.cos())[0].sum(1))


class Pairs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.left, self.join = nn.Linear(3, 2), nn.Bilinear(2, 3, 4)

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.join(torch.tanh(self.left(x)), x)
        return made


NETWORKS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "mlp": (mlp, (12, 3)),
    "sequences": (mlp, (4, 5, 3)),
    "convolutions": (Convolutions, (12, 2, 9, 8)),
    "conv1d": (lambda: nn.Conv1d(2, 3, 3, stride=2, padding=1), (4, 2, 9)),
    "conv3d": (lambda: nn.Conv3d(2, 2, 2, groups=2), (4, 2, 3, 4, 3)),
    "transposed1d": (lambda: nn.ConvTranspose1d(2, 3, 4, stride=3, dilation=2), (6, 2, 7)),
    "attention": (Attending, (12, 3, 4)),
    "bilinear": (Pairs, (14, 3)),
}
every_network = pytest.mark.parametrize("kind", NETWORKS)
pytestmark = pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel")


def network(kind: str) -> tuple[nn.Module, Tensor]:
    """A network with weights and biases far from 0, in float64, and inducing inputs."""
    make, shape = NETWORKS[kind]
    torch.manual_seed(0)
    net = make().double()
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.copy_(torch.randn_like(parameter) * (0.7 if parameter.ndim > 1 else 0.3))
    return net, torch.randn(shape, dtype=torch.float64)


def start(net: nn.Module, made: Any, choice: Any = None, **options: Any) -> Any:
    """The posterior of a network under it."""
    bnn = bayesify.bayesianize(net, made if choice is None else choice(made), **options)
    return next(part for part in bnn.posteriors if isinstance(part, (GlobalInducing, LocalInducing)))


# -- global inducing points ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("covariance", ["diagonal", "full"])
@every_network
@torch.no_grad()
def test_a_sure_start_is_the_network(kind: str, covariance: str) -> None:
    net, inputs = network(kind)
    part = start(net, GlobalInducing(inputs, precision=SURE, covariance=covariance, init="network"))  # type: ignore[arg-type]
    own = dict(net.named_parameters())
    for name, mean in part.mean().items():
        torch.testing.assert_close(mean, own[name], rtol=1e-6, atol=1e-6)


@every_network
@torch.no_grad()
def test_pseudo_outputs_are_what_the_layers_make(kind: str) -> None:
    net, inputs = network(kind)
    made: dict[str, Tensor] = {}
    leaves = {path: module for path, module in net.named_modules() if type(module) is not nn.MultiheadAttention}
    leaves = {path: module for path, module in leaves.items() if list(module.parameters(recurse=False))}
    handles = [
        module.register_forward_hook(lambda _, args, value, path=path: made.update({path: value}))
        for path, module in leaves.items()
    ]
    net(inputs)
    for handle in handles:
        handle.remove()
    part = start(net, GlobalInducing(inputs, init="network"))
    compared = [name for name in part.pseudo_outputs if name in made]
    assert compared
    for name in compared:
        torch.testing.assert_close(part.pseudo_outputs[name], made[name], rtol=1e-10, atol=1e-12)
    positions = {name: value[0].numel() // part.maps[name].layer.rows for name, value in part.pseudo_outputs.items()}
    for name, count in positions.items():
        torch.testing.assert_close(part.log_precision[name].exp(), torch.full((len(inputs),), 300 / count).double())


@pytest.mark.parametrize("selector", ["*weight", "*bias", "stem"])
@torch.no_grad()
def test_a_part_of_the_weights_starts_at_the_network(selector: str) -> None:
    """What stays a point estimate, or goes to another posterior, is not in the pseudo-outputs."""
    net, inputs = network("convolutions")
    made = GlobalInducing(inputs, precision=SURE, init="network")
    own = dict(net.named_parameters())
    bnn = bayesify.bayesianize(net, {selector: made})
    for name, mean in bnn.posterior.mean().items():
        torch.testing.assert_close(mean, own[name], rtol=1e-6, atol=1e-6)
    mixed = bayesify.bayesianize(net, {selector: made, "*": MeanField()}).mean_network()
    for name, value in mixed.named_parameters():
        torch.testing.assert_close(value, own[name], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("kind", ["mlp", "convolutions", "attention"])
@torch.no_grad()
def test_the_usual_start_is_near_the_network_and_scatters(kind: str) -> None:
    """With 50 inducing inputs under Neal's prior the mean's outputs are within 5 % of the network's, and n = 30 draws differ from
    it by 1 to 40 % (the standard error of a spread is 1 / sqrt(2 n) of it, 13 %)."""
    make, shape = NETWORKS[kind]
    torch.manual_seed(0)
    net, inputs = make().double(), torch.randn(50, *shape[1:], dtype=torch.float64)
    bnn = bayesify.bayesianize(net, GlobalInducing(inputs, init="network"))
    expected = net(inputs)
    size = expected.square().mean().sqrt()
    assert float((bnn.mean_network()(inputs) - expected).square().mean().sqrt() / size) < 0.05
    scatter = float((bnn.draw(30, generator=generator())(inputs) - expected).square().mean().sqrt() / size)
    assert 0.01 < scatter < 0.4


@torch.no_grad()
def test_targets_are_where_the_last_layer_starts() -> None:
    net, inputs = network("mlp")
    targets = torch.randn(12, 2).double()
    part = start(net, GlobalInducing(inputs, targets, init="network", last_precision=7.0))
    torch.testing.assert_close(part.pseudo_outputs["4"], targets)
    torch.testing.assert_close(part.pseudo_outputs["0"], net[0](inputs))  # type: ignore[index]
    torch.testing.assert_close(part.log_precision["4"].exp(), torch.full((12,), 7.0).double())


@torch.no_grad()
def test_a_network_of_low_precision() -> None:
    net, inputs = mlp().bfloat16(), torch.randn(12, 3)
    part = start(net, GlobalInducing(inputs, init="network"))
    assert part.pseudo_outputs["0"].dtype == torch.float32
    expected = nn.functional.linear(inputs.bfloat16().float(), net[0].weight.float(), net[0].bias.float())  # type: ignore[index, operator]
    torch.testing.assert_close(part.pseudo_outputs["0"], expected)


def test_the_network_is_not_changed_and_what_it_made_is_learned() -> None:
    net, inputs = network("mlp")
    before = {name: value.detach().clone() for name, value in net.named_parameters()}
    bnn = bayesify.bayesianize(net, GlobalInducing(inputs, init="network"), likelihood=likelihoods.Gaussian(0.1))
    bayesify.fit(bnn, [(inputs, torch.zeros(12, 2).double())], epochs=2, progress=False)
    assert not torch.equal(bnn.posterior.pseudo_outputs["0"], net[0](inputs))  # type: ignore[union-attr, index]
    for name, value in net.named_parameters():
        assert torch.equal(value, before[name])


# -- local inducing points -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("leaf", ["linear_no_bias", "conv2d_depthwise", "transposed1d", "embedding", "custom", "lstm"])
@torch.no_grad()
def test_a_sure_local_start_is_the_network(leaf: str) -> None:
    torch.manual_seed(0)
    net = CASES[leaf].network(torch.float64)
    part = start(net, LocalInducing(100, precision=SURE, init="network"))
    own = dict(net.named_parameters())
    for name, mean in part.mean().items():
        torch.testing.assert_close(mean, own[name], rtol=1e-6, atol=1e-6)
    usual = start(net, LocalInducing(3, init="network"))
    assert all(torch.allclose(value.exp(), value.new_tensor(300.0)) for _, value in usual.log_precision.items())


# -- both ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "made", [lambda x: GlobalInducing(x, init="network"), lambda x: LocalInducing(9, init="network")]
)
@torch.no_grad()
def test_it_is_stored(made: Callable[[Tensor], Any], tmp_path: Path) -> None:
    """Loaded into a network of other weights, the posterior is the one that was stored."""
    net, inputs = network("mlp")
    bnn = bayesify.bayesianize(net, made(inputs), likelihood=likelihoods.Gaussian(0.1))
    assert bnn.posterior.config()["init"] == "network"
    bayesify.save(bnn, tmp_path / "model.safetensors")
    again = bayesify.load(tmp_path / "model.safetensors", mlp().double())
    assert again.config() == bnn.config()
    torch.testing.assert_close(again.posterior.mean(), bnn.posterior.mean(), rtol=0, atol=0)
    assert torch.equal(again.draw(3, generator=generator())(inputs), bnn.draw(3, generator=generator())(inputs))


@pytest.mark.parametrize(
    ("made", "message"),
    [
        (lambda: GlobalInducing(5, init="net"), "GlobalInducing: init='net'; give 'random' or 'network'"),  # type: ignore[arg-type]
        (lambda: GlobalInducing(5, init=None), "GlobalInducing: init=None; give 'random' or 'network'"),  # type: ignore[arg-type]
        (lambda: GlobalInducing(5, learned="last", init="network"), "learned='last' draws .*; use init='random'"),
        (lambda: LocalInducing(5, init="net"), "LocalInducing: init='net'; give 'random' or 'network'"),  # type: ignore[arg-type]
    ],
)
def test_bad_starts(made: Callable[[], Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        made()


@torch.no_grad()
def test_a_random_start_is_standard_normal() -> None:
    """n = 4000 numbers: their mean square is 1 within k = 5 standard errors, sqrt(2 / n) each."""
    n, k = 4000, 5.0
    net = nn.Linear(3, 4)
    for part in (start(net, GlobalInducing(1000)), start(net, LocalInducing(1000))):
        values = part.pseudo_outputs[""]
        assert abs(float(values.square().mean()) - 1) < k * (2 / n) ** 0.5
        assert not part.log_precision[""].any()
