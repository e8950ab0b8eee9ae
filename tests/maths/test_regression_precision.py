"""Regressions of inducing points in float32 are those of float64 on the same numbers, whatever the scale of the features."""

import copy
import math
import warnings
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

import bayesify
from bayesify import likelihoods, priors
from bayesify.maths.regression import RegressionFactors
from bayesify.posteriors import GlobalInducing, LocalInducing
from bayesify.posteriors.global_inducing.maps import Convolution

POINTS, COLUMNS, OUTPUTS = 12, 8, 3
LARGEST = 1e12
"""Condition number of I + B, whose smallest eigenvalue is 1 where features do not span all columns."""


def problem(generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Features of any rank with eigenvalues of A^T A in [1, 1e12], and pseudo-outputs with means of the prior's size."""
    rank = int(torch.randint(1, COLUMNS + 1, (), generator=generator))
    left, right, weights, noise = (
        torch.randn(shape, generator=generator, dtype=torch.float64)
        for shape in ((POINTS, rank), (COLUMNS, rank), (COLUMNS, OUTPUTS), (POINTS, OUTPUTS))
    )
    share = torch.rand(rank + 1, generator=generator, dtype=torch.float64)
    sizes = LARGEST ** (0.5 * share[:-1] * share[-1].sqrt())
    design = (torch.linalg.qr(left).Q * sizes) @ torch.linalg.qr(right).Q.mT
    return design.float(), (design @ weights + noise).float()


def exact(design: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and variances by an orthogonal factorization of [A; I], whose condition number is only the root of that of I + B."""
    wide = torch.cat((design.double(), torch.eye(design.shape[-1], dtype=torch.float64)))
    root = torch.linalg.inv(torch.linalg.qr(wide).R)  # (I + B)^-1 = R^-1 R^-T
    return root @ (root.mT @ (design.double().mT @ targets.double())), root.square().sum(-1)


def check(found: Tensor, spread: Tensor, design: Tensor, targets: Tensor) -> None:
    mean, variance = exact(design, targets)
    assert float(((found.double() - mean).abs() / mean.abs().clamp_min(1)).max()) < 1e-3
    assert float((spread.double() - variance).abs().max()) < 1e-3


def test_local_inducing_points_in_many_layers() -> None:
    generator = torch.Generator().manual_seed(0)
    net = nn.ModuleList(nn.Linear(COLUMNS, OUTPUTS, bias=False) for _ in range(300))
    part = bayesify.bayesianize(net, LocalInducing(POINTS), prior=priors.Standard()).posterior
    assert isinstance(part, LocalInducing)
    problems = [problem(generator) for _ in net]
    with torch.no_grad():
        for layer, (design, targets) in zip(part.layers, problems, strict=True):
            part.points_value[layer.name].copy_(design)
            part.pseudo_outputs[layer.name].copy_(targets)
        means, variances = part.mean(), part.variance()
    for layer, given in zip(part.layers, problems, strict=True):
        name = layer.weights[0].name
        assert means[name].dtype == torch.float32
        check(means[name].mT, variances[name][0], *given)


def test_global_inducing_points() -> None:
    generator = torch.Generator().manual_seed(1)
    for _ in range(100):
        design, targets = problem(generator)
        net = nn.Linear(COLUMNS, OUTPUTS, bias=False)
        part = bayesify.bayesianize(
            net, GlobalInducing(design, targets, precision=1.0), prior=priors.Standard()
        ).posterior
        check(part.mean()["weight"].detach().mT, part.variance()["weight"].detach()[0], design, targets)


def test_beyond_what_float64_holds_variances_stay_below_the_prior() -> None:
    design = torch.randn(POINTS, 3, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    design = 1e12 * design @ torch.randn(3, COLUMNS, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    gram = (design.mT @ design)[None].requires_grad_()
    with pytest.warns(UserWarning, match="too much for float64"):
        found = RegressionFactors(gram, design.mT[None], "the precision").solve()
    assert float(found.root.square().sum(-2).detach().max()) < 1 + 1e-9
    found.closed_kl().backward()
    assert gram.grad is not None
    assert bool(torch.isfinite(gram.grad).all())


# -- networks: float32 beside float64 ----------------------------------------------------------------------------------


def dense() -> tuple[nn.Module, Tensor]:
    return nn.Linear(5, 2), torch.rand(30, 2) @ torch.rand(2, 5)


def bilinear() -> tuple[nn.Module, Tensor]:
    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Bilinear(3, 3, 2)

        def forward(self, x: Tensor) -> Tensor:
            made: Tensor = self.layer(x, x + 1)
            return made

    return Both(), torch.rand(20, 3)


def convolution(**options: int) -> tuple[nn.Module, Tensor]:
    return nn.Conv2d(4, 3, 3, **options), torch.rand(6, 4, 7, 7)  # type: ignore[arg-type]


NETWORKS = {
    "dense": dense,
    "bilinear": bilinear,
    "lags": lambda: convolution(padding=1),
    "strided": lambda: convolution(stride=2),
    "groups": lambda: (nn.Conv2d(4, 4, 3, groups=2), torch.rand(6, 4, 7, 7)),
    "one by one": lambda: (nn.Conv2d(4, 3, 1), torch.rand(6, 4, 5, 5)),
    "transposed": lambda: (nn.ConvTranspose2d(4, 3, 3, stride=2), torch.rand(5, 4, 4, 4)),
}
PRIORS = {"neal": priors.Neal(), "spatial": priors.SpatialInverseWishart()}


def both(name: str, scale: float, prior: str, **options: str) -> list[bayesify.BayesianNetwork]:
    """A layer in float32, and in float64 with the same numbers."""
    torch.manual_seed(0)
    net, x = NETWORKS[name]()
    narrow = bayesify.bayesianize(net, GlobalInducing(scale * x, **options), prior=PRIORS[prior])  # type: ignore[arg-type]
    return [narrow, copy.deepcopy(narrow).double()]


def moments(bnn: bayesify.BayesianNetwork) -> tuple[Tensor, list[Tensor]]:
    """KL given the prior's scales at their means, means and variances in one row, and a gradient through all three."""
    part = bnn.posterior
    means, variances = (
        torch.cat([value.flatten() for value in found.values()]) for found in (part.mean(), part.variance())
    )
    (means.square().sum() + variances.sum()).backward()
    return torch.cat((means, variances)).detach(), [p.grad for p in bnn.parameters() if p.grad is not None]


@pytest.mark.thin(2)
@pytest.mark.parametrize("prior", list(PRIORS))
@pytest.mark.parametrize("scale", [1.0, 30.0, 3e4])
@pytest.mark.parametrize("name", list(NETWORKS))
def test_layers_and_their_gradients(name: str, scale: float, prior: str) -> None:
    (own, grads), (other, exact_grads) = (moments(bnn) for bnn in both(name, scale, prior))
    assert float((own.double() - other).abs().max()) < 1e-4  # the prior's stds are below 1
    for grad, wide in zip(grads, exact_grads, strict=True):
        assert float((grad.double() - wide).norm()) <= 2e-3 * float(wide.norm())


def test_a_full_precision_too() -> None:
    own, other = (moments(bnn)[0] for bnn in both("lags", 1e3, "neal", covariance="full"))
    assert float((own.double() - other).abs().max()) < 1e-4


# -- no shorter type enters ----------------------------------------------------------------------------------------------


@pytest.fixture
def kinds(monkeypatch: pytest.MonkeyPatch) -> list[torch.dtype]:
    """The types in which the matrices of a convolution are made."""
    found: list[torch.dtype] = []
    made = Convolution.moments

    def spy(self: Convolution, module: nn.Module, seen: list[Tensor], *rest: object) -> tuple[Tensor, Tensor]:
        found.append(seen[0].dtype)
        return made(self, module, seen, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(Convolution, "moments", spy)
    return found


@pytest.fixture
def _as_it_was() -> Iterator[None]:
    yield
    torch.set_float32_matmul_precision("highest")
    if hasattr(torch.backends, "fp32_precision"):
        torch.backends.fp32_precision = "none"  # type: ignore[assignment]


def test_float32_is_tried_for_convolutions_and_left_where_it_is_too_short(kinds: list[torch.dtype]) -> None:
    both("lags", 1.0, "neal")[0].posterior.mean()
    assert kinds == [torch.float32]
    both("lags", 1e3, "neal")[0].posterior.mean()
    assert kinds == [torch.float32, torch.float32, torch.float64]


@pytest.mark.usefixtures("_as_it_was")
@pytest.mark.parametrize("setting", ["high", "medium"])
def test_no_shorter_products_by_the_users_settings(setting: str, kinds: list[torch.dtype]) -> None:
    part = both("lags", 1.0, "neal")[0].posterior
    torch.set_float32_matmul_precision(setting)
    part.mean()
    torch.set_float32_matmul_precision("highest")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        part.mean()
    assert kinds == [torch.float64, torch.float32]  # autocast is off in means


# -- what users meet -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("learned", ["all", "last"])
def test_raw_inputs_through_a_network(learned: str) -> None:
    torch.manual_seed(0)
    year, area = 2015 + 5 * torch.rand(60, 1), 100 + 30 * torch.randn(60, 1)
    x = torch.cat([year, area, 0.03 * area + 0.5 * torch.randn(60, 1)], 1)
    targets = 0.1 * (year - 2017) + 0.01 * area + 0.3 * torch.randn(60, 1)
    net = nn.Sequential(nn.Linear(3, 50), nn.ReLU(), nn.Linear(50, 1))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        bnn = bayesify.bayesianize(
            net, GlobalInducing(x, targets, learned=learned, precision=1 / 0.09), likelihood=likelihoods.Gaussian(noise=0.09)
        )  # fmt: skip
        kl = float(bnn.draw(4, generator=torch.Generator().manual_seed(0)).kl.detach().mean())
        wide = copy.deepcopy(bnn).double()
        kls = wide.draw(64, generator=torch.Generator().manual_seed(0)).kl.detach()
    error = float(kls.std()) * math.sqrt(1 / 4 + 1 / 64)
    assert abs(kl - float(kls.mean())) < 5 * error + 1e-2
