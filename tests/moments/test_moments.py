"""One pass of means and variances against closed forms, unfolded convolutions, and many draws."""

from __future__ import annotations

import copy
import itertools
import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import bayesify
from bayesify import likelihoods, posteriors
from bayesify.moments import Moments
from bayesify.moments.attention import attend
from bayesify.moments.prediction import _points, _rule
from bayesify.moments.responses import Plan, covariance
from bayesify.moments.shapes import _maximum, reshaped
from bayesify.moments.tensors import value_of
from bayesify.predictive.gaussian import OutputGaussian
from bayesify.running.light_copies import leaves_inputs

NOISE = 0.1


def bayesian(net: nn.Module, std: float | None = 0.2, posterior: posteriors.Posterior | None = None, **options):
    likelihood = options.pop("likelihood", likelihoods.Gaussian(NOISE, learn=False))
    posterior = posterior or posteriors.MeanField(init_std=std)
    return bayesify.bayesianize(net, posterior, likelihood=likelihood, **options).double().eval()


def spread_out(bnn, generator: torch.Generator) -> None:
    """Standard deviations that differ between weights, by factors between 1/2 and 2."""
    for raw in bnn.posterior.raw_std.values():
        raw.data += math.log(4) * (torch.rand(raw.shape, generator=generator, dtype=raw.dtype) - 0.5)


def output_covariance(outputs: Moments) -> Tensor:
    value = value_of(outputs)
    return covariance(Plan(value.node, value.mean.shape[1]), value.mean)[0]


@pytest.fixture
def generator() -> torch.Generator:
    torch.manual_seed(0)
    return torch.Generator().manual_seed(0)


def test_a_linear_model_has_the_closed_form(generator) -> None:
    """Outputs are independent Gaussians: mean M x + m, variance V x^2 + v; the prediction is exact."""
    bnn = bayesian(nn.Linear(4, 3))
    spread_out(bnn, generator)
    x = torch.randn(5, 4, generator=generator, dtype=torch.float64)
    mean, variance = bnn.posterior.mean(), bnn.posterior.variance()
    found = bnn.predict(x, method="moments")
    torch.testing.assert_close(found.mean, F.linear(x, mean["weight"], mean["bias"]))
    expected = F.linear(x**2, variance["weight"], variance["bias"])
    torch.testing.assert_close(found.epistemic, expected)
    y = torch.randn(5, 3, generator=generator, dtype=torch.float64)
    normal = torch.distributions.Normal(found.mean, (expected + NOISE).sqrt())
    torch.testing.assert_close(found.log_prob(y), normal.log_prob(y).sum(-1))


def test_two_linear_layers_have_the_exact_covariance(generator) -> None:
    """For y = W2 W1 x, Cov = M2 D M2^T + diag(V2 (m1^2 + d)), with d = V1 x^2 the variance of the hidden units."""
    net = nn.Sequential(nn.Linear(4, 6, bias=False), nn.Identity(), nn.Linear(6, 3, bias=False))
    bnn = bayesian(net)
    spread_out(bnn, generator)
    x = torch.randn(5, 4, generator=generator, dtype=torch.float64)
    mean, variance = bnn.posterior.mean(), bnn.posterior.variance()
    hidden, spread = x @ mean["0.weight"].T, x**2 @ variance["0.weight"].T
    second = mean["2.weight"]
    expected = torch.einsum("kh,bh,jh->bkj", second, spread, second)
    expected += torch.diag_embed((hidden**2 + spread) @ variance["2.weight"].T)
    draws = {name: Moments(mean[name], variance[name]) for name in mean}
    outputs = F.linear(F.linear(x, draws["0.weight"]), draws["2.weight"])
    torch.testing.assert_close(output_covariance(outputs), expected)
    torch.testing.assert_close(bnn.predict(x, method="moments").epistemic, expected.diagonal(dim1=1, dim2=2))


NETWORKS = {
    "relu": lambda: nn.Sequential(nn.Linear(5, 20), nn.ReLU(), nn.Linear(20, 3)),
    "leaky": lambda: nn.Sequential(nn.Linear(5, 20), nn.LeakyReLU(0.2), nn.Linear(20, 3)),
    "tanh": lambda: nn.Sequential(nn.Linear(5, 20), nn.Tanh(), nn.Linear(20, 3)),
    "gelu": lambda: nn.Sequential(nn.Linear(5, 20), nn.GELU(), nn.Linear(20, 3)),
}


@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.parametrize("std", [0.05, 0.5])
def test_one_hidden_layer_agrees_with_draws(name: str, std: float, generator) -> None:
    """Hidden units are independent and Gaussian before the function, so that means and variances are exact: n = 1e4 draws give
    a mean within 5 standard errors, sqrt(v / n), and a variance within 5 of its own, v sqrt((kurtosis + 2) / n), kurtosis < 4."""
    bnn = bayesian(NETWORKS[name](), std)
    spread_out(bnn, generator)
    x = torch.randn(4, 5, generator=generator, dtype=torch.float64)
    found, n = bnn.predict(x, method="moments"), 10_000
    outputs = bnn.draw(n, generator=generator)(x).detach()
    mean, variance = outputs.mean(0), outputs.var(0)
    assert ((found.mean - mean).abs() < 5 * (variance / n).sqrt()).all()
    assert ((found.epistemic / variance - 1).abs() < 5 * math.sqrt(6 / n)).all()


def test_one_hidden_layer_has_the_moments_of_quadrature(generator) -> None:
    r"""Units before a ReLU are independent Gaussians, $\mathcal N(m, v)$, so that outputs have an exact covariance,
    $M_2 \operatorname{diag}(\operatorname{Var} f) M_2^\top + \operatorname{diag}(V_2 \mathbb{E} f^2 + V_b)$."""
    bnn = bayesian(nn.Sequential(nn.Linear(5, 20), nn.LeakyReLU(0.1), nn.Linear(20, 3)), 0.1)
    spread_out(bnn, generator)
    x = torch.randn(6, 5, generator=generator, dtype=torch.float64)
    means, variances = (
        {name: part.detach() for name, part in found.items()}
        for found in (bnn.posterior.mean(), bnn.posterior.variance())
    )
    m1, mb1, m2, mb2 = means.values()
    v1, vb1, v2, vb2 = variances.values()
    mean, variance = x @ m1.mT + mb1, x.square() @ v1.mT + vb1
    nodes, weights = (torch.from_numpy(part) for part in np.polynomial.legendre.leggauss(100))
    kink = (-mean / variance.sqrt()).clamp(-9, 9).unsqueeze(-1)
    first = second = torch.zeros(())
    for low, high in ((torch.full_like(kink, -9), kink), (kink, torch.full_like(kink, 9))):  # smooth on either side
        z = low + (high - low) * (nodes + 1) / 2
        density = weights * (high - low) / 2 * torch.exp(-0.5 * z.square()) / math.sqrt(2 * math.pi)
        f = F.leaky_relu(mean.unsqueeze(-1) + variance.sqrt().unsqueeze(-1) * z, 0.1)
        first, second = first + (density * f).sum(-1), second + (density * f.square()).sum(-1)
    spread = second - first.square()
    expected = torch.einsum("bj,ij,kj->bik", spread, m2, m2) + torch.diag_embed(second @ v2.mT + vb2)
    draws = {name: Moments(means[name], variances[name]) for name in means}
    outputs = F.linear(x, draws["0.weight"], draws["0.bias"])
    outputs = F.linear(F.leaky_relu(outputs, 0.1), draws["2.weight"], draws["2.bias"])
    torch.testing.assert_close(output_covariance(outputs), expected, rtol=1e-8, atol=1e-9)
    found = bnn.predict(x, method="moments")
    torch.testing.assert_close(found.mean, first @ m2.mT + mb2, rtol=1e-8, atol=1e-9)
    torch.testing.assert_close(found.epistemic, expected.diagonal(dim1=1, dim2=2), rtol=1e-8, atol=1e-9)


def test_three_layers_with_normalization_between_have_the_exact_covariance(generator) -> None:
    r"""Behind a layer $D (M C M^\top + \operatorname{diag}(V (m^2 + \operatorname{diag} C) + V_b)) D$, where D scales each unit."""
    net = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Linear(5, 3))
    net = net.double().eval().requires_grad_(False)
    for value in net.state_dict().values():
        if value.is_floating_point():
            value.copy_(0.5 + torch.rand(value.shape, generator=generator, dtype=value.dtype))
    variances = {name: value.square() / 4 for name, value in net.state_dict().items()}
    x = torch.randn(7, 4, generator=generator, dtype=torch.float64)
    mean, expected = x, torch.zeros(7, 4, 4, dtype=torch.float64)
    for index in (0, 2, 4):
        layer, norm = net[index], net[index + 1 : index + 2]
        second = mean.square() + expected.diagonal(dim1=1, dim2=2)
        own = F.linear(second, variances[f"{index}.weight"], variances[f"{index}.bias"])
        scale = norm[0].weight / (norm[0].running_var + norm[0].eps).sqrt() if norm else torch.ones(3).double()
        expected = (layer.weight @ expected @ layer.weight.mT + torch.diag_embed(own)) * scale[:, None] * scale
        mean = norm(layer(mean))
    random = {name: Moments(part, variances[name]) for name, part in net.named_parameters() if name[0] in "024"}
    found = torch.func.functional_call(net, random, (x,))
    torch.testing.assert_close(found.mean_, mean)
    torch.testing.assert_close(output_covariance(found), expected)


@pytest.mark.parametrize("function", [F.relu, lambda x: F.leaky_relu(x, 0.3), torch.tanh, F.gelu])
def test_gains_are_the_derivatives_of_means(function, generator) -> None:
    """By differences of 1e-5; the rule of eight points is right to 1e-6 for functions as smooth as these."""
    mean, variance = torch.rand(2, 20, 1, generator=generator, dtype=torch.float64) - torch.tensor([[[0.5]], [[0.0]]])

    def at(shift: float) -> Moments:
        return function(F.linear(torch.ones(1, 1).double(), Moments(mean + shift, 0.1 * variance + 0.01)))

    expected = (at(1e-5).mean_ - at(-1e-5).mean_) / 2e-5
    node = value_of(at(0.0)).node
    torch.testing.assert_close(node.push(torch.ones_like(expected)), expected, rtol=0, atol=1e-5)


def test_independent_biases_alone(generator) -> None:
    """With random biases and fixed weights the outputs of a linear network have their exact covariance."""
    net = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    bnn = bayesian(net, posterior={"*bias": posteriors.MeanField(init_std=0.3)})
    x = torch.randn(5, 3, generator=generator, dtype=torch.float64)
    weight = net[1].weight.double()
    expected = 0.09 * (weight**2).sum(1) + 0.09
    torch.testing.assert_close(
        bnn.predict(x, method="moments").epistemic, expected.detach().expand(5, 2), rtol=1e-6, atol=0
    )


@pytest.mark.parametrize("dims", [1, 2, 3])
def test_a_convolution_is_an_unfolded_linear_map(dims: int, generator) -> None:
    """The first convolution sees plain inputs: each output's mean and variance are those of a linear map of its patch."""
    kind = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[dims - 1]
    layer = kind(2, 3, 3, stride=2, padding=1).double()
    variance = torch.rand(layer.weight.shape, generator=generator, dtype=torch.float64)
    bias_variance = torch.rand(3, generator=generator, dtype=torch.float64)
    x = torch.randn(4, 2, *[7] * dims, generator=generator, dtype=torch.float64)
    layer.weight = nn.Parameter(layer.weight.detach())
    with torch.no_grad():
        function = (F.conv1d, F.conv2d, F.conv3d)[dims - 1]
        weight, bias = Moments(layer.weight.detach(), variance), Moments(layer.bias.detach(), bias_variance)
        found = function(x, weight, bias, stride=2, padding=1)
        padded = F.pad(x, [1] * 2 * dims)
        for axis in range(dims):
            padded = padded.unfold(2 + axis, 3, 2)  # [B, C, *o, 3, ...]
        patches = padded.movedim(1, 1 + dims).flatten(1 + dims)  # [B, *o, C k]
        mean = F.linear(patches, layer.weight.flatten(1), layer.bias).movedim(-1, 1)
        spread = F.linear(patches**2, variance.flatten(1), bias_variance).movedim(-1, 1)
    torch.testing.assert_close(found.mean_, mean)
    torch.testing.assert_close(found.variance_, spread)


def test_positions_of_a_channel_vary_together(generator) -> None:
    """Maps in which each channel is scaled by one random number: a convolution with a constant kernel and pooling are exact."""
    scale = torch.rand(4, 3, 1, 1, generator=generator, dtype=torch.float64)
    maps = Moments(torch.zeros(4, 3, 6, 6, dtype=torch.float64), (scale**2).expand(4, 3, 6, 6), (-1, 1, 0, 0))
    kernel = torch.rand(5, 3, 1, 1, generator=generator, dtype=torch.float64).expand(5, 3, 3, 3)
    found = F.conv2d(maps, kernel)
    expected = torch.einsum("oc,bc->bo", (9 * kernel[:, :, 0, 0]) ** 2, scale[:, :, 0, 0] ** 2)
    torch.testing.assert_close(found.variance_, expected[:, :, None, None].expand(4, 5, 4, 4))
    torch.testing.assert_close(F.adaptive_avg_pool2d(maps, 1).variance_, scale**2)
    torch.testing.assert_close(maps.mean((2, 3)).variance_, scale[:, :, 0, 0] ** 2)
    torch.testing.assert_close(F.max_pool2d(maps, 2).variance_, (scale**2).expand(4, 3, 3, 3))
    weight = torch.randn(2, 108, generator=generator, dtype=torch.float64)
    flat = F.linear(maps.flatten(1), weight)
    moved = torch.einsum("bc,ocp->boc", scale[:, :, 0, 0], weight.view(2, 3, 36))
    torch.testing.assert_close(flat.variance_, moved.square().sum(-1))


KERNEL, MATRIX, ROW = (
    0.5 + torch.rand(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    for shape in ((4, 3, 1, 1), (2, 5), (5,))
)
LINEAR = {
    "sum": lambda x: 2 + x + ROW,
    "more axes": lambda x: torch.zeros(2, 1, 1, 1, 1) + x,
    "scaled sum": lambda x: torch.sub(ROW, x, alpha=3),
    "product": lambda x: -(ROW * x) / 3,
    "mean of positions": lambda x: x.mean((2, 3)),
    "mean of channels": lambda x: x.mean(1, keepdim=True),
    "pooling": lambda x: F.avg_pool2d(x, 2),
    "kernel of one": lambda x: F.conv2d(x, KERNEL),
    "positions": lambda x: F.linear(x, MATRIX),
    "channels last": lambda x: F.linear(x.permute(0, 2, 3, 1), MATRIX[:, :3]),
    "channels before": lambda x: F.linear(x.transpose(1, 3), MATRIX[:, :3]),
    "blocks": lambda x: F.linear(x.flatten(1), MATRIX.repeat(1, 18)),
    "part": lambda x: F.linear(x[:, 1:, None, 2], MATRIX),
    "joined": lambda x: F.linear(torch.cat((x, torch.ones(4, 3, 6, 5), x), 3), MATRIX.repeat(1, 3)),
    "padding": lambda x: F.pad(x, (1, 2), value=3.0),
    "norm": lambda x: F.batch_norm(x, ROW[:3], ROW[:3] ** 2, ROW[1:4], ROW[:3]),
}


@pytest.mark.parametrize("name", LINEAR)
def test_linear_functions_of_maps_are_exact(name: str, generator) -> None:
    """Each channel is moved by one number for all its positions, so that the variance is the sum over channels of squared moves."""
    function, (mean, variance) = LINEAR[name], torch.rand(2, 4, 3, 6, 5, generator=generator, dtype=torch.float64)
    found, plain = function(Moments(mean, variance, (-1, 1, 0, 0))), function(mean)
    moved = [function(mean + variance.sqrt() * one.view(3, 1, 1)) - plain for one in torch.eye(3)]
    torch.testing.assert_close(found.mean_, plain)
    torch.testing.assert_close(found.variance_, sum(move**2 for move in moved))


def test_a_kernel_sees_positions_of_different_spread(generator) -> None:
    """Of one window: (sum M)^2 times the mean deviation squared, and the squares of M - mean M times the deviations' variance."""
    variance, kernel = torch.rand(2, 4, 3, 3, 3, generator=generator, dtype=torch.float64)
    found = F.conv2d(Moments(torch.zeros_like(variance), variance, (-1, 1, 0, 0)), kernel)
    std = variance.sqrt().flatten(2)  # [B, C, K]
    kernel = kernel.flatten(2)
    first = torch.einsum("oc,bc->bo", kernel.sum(-1) ** 2, std.mean(-1) ** 2)
    rest = (kernel - kernel.mean(-1, keepdim=True)).square().sum(-1)
    expected = first + torch.einsum("oc,bc->bo", rest, std.var(-1, correction=0))
    torch.testing.assert_close(found.variance_[:, :, 0, 0], expected)


def test_sums_and_products_of_independent_units(generator) -> None:
    one, other = torch.rand(2, 2, 4, 3, generator=generator, dtype=torch.float64)
    found = torch.sub(Moments(*one, (-1, 1)), Moments(*other, (-1, 1)), alpha=3)
    torch.testing.assert_close(found.mean_, one[0] - 3 * other[0])
    torch.testing.assert_close(found.variance_, one[1] + 9 * other[1])
    squares = (one[0] ** 2 + one[1]) * (other[0] ** 2 + other[1])
    found = Moments(*one, (-1, 1)) * Moments(*other, (-1, 1))
    torch.testing.assert_close(found.variance_, squares - found.mean_**2)


def test_random_weights_of_sequences(generator) -> None:
    """Rows of a sequence are mapped as rows of a batch."""
    units = torch.rand(2, 4, 5, 3, generator=generator, dtype=torch.float64)
    weight, bias = torch.rand(2, 6, 3, generator=generator), torch.rand(2, 6, generator=generator)
    weight, bias = Moments(*weight.double()), Moments(*bias.double())
    rows = F.linear(Moments(*units.flatten(1, 2), (-1, 1)), weight, bias)
    torch.testing.assert_close(
        F.linear(Moments(*units, (-1, 0, 1)), weight, bias).variance_.flatten(0, 1), rows.variance_
    )


@pytest.mark.parametrize("channels", [1, 3])
def test_layouts_in_memory_do_not_matter(channels: int, generator) -> None:
    """`max_pool2d` and `view` see channels before positions, wherever these lie in memory."""
    mean, variance = torch.rand(2, 4, channels, 6, 6, generator=generator, dtype=torch.float64)
    pooled = [
        F.max_pool2d(Moments(*(part.contiguous(memory_format=form) for part in (mean, variance)), (-1, 1, 0, 0)), 2)
        for form in (torch.contiguous_format, torch.channels_last)
    ]
    for one, other in zip(pooled[0].components_, pooled[1].components_, strict=True):
        torch.testing.assert_close(one, other)
    torch.testing.assert_close(pooled[1].view(4, -1).variance_, pooled[0].variance_.flatten(1))


@pytest.mark.parametrize("share", [0.0, 0.7])
def test_the_largest_of_a_window(share: float, generator) -> None:
    """Of two Gaussians Clark's moments are exact; of four, n = 200,000 draws have a mean within 2 % and a deviation within 4 %."""
    mean, std = torch.rand(2, 4, generator=generator, dtype=torch.float64)
    noise = torch.randn(200_000, 5, generator=generator, dtype=torch.float64)
    drawn = mean + std * (math.sqrt(share) * noise[:, :1] + math.sqrt(1 - share) * noise[:, 1:])
    for count, tolerance in ((2, 0.01), (4, 0.04)):
        largest = drawn[:, :count].max(1).values
        found = _maximum(list(mean[:count]), list(std[:count] ** 2), torch.tensor(share))
        assert abs(found[0] - largest.mean()) < 0.02 * largest.std()
        assert abs(found[1].sqrt() / largest.std() - 1) < tolerance


def _pieces(name: str, units: Tensor, mask: Tensor) -> list[Tensor]:
    maps = Moments(*units, (-1, 1, 0, 0))
    if name == "attention":
        found = attend(
            tuple(units), tuple(units.flip(1)), tuple(units.flip(2)), torch.linspace(0, 1, 7).double(), mask, 0.5
        )
    elif name == "norm":
        found = F.layer_norm(Moments(units[0].flatten(2), 0.05 * units[1].flatten(2), (-1, 0, 1)), (16,)).components_
    else:
        found = F.leaky_relu(maps, 0.2 if name == "leaky" else 0.0).components_
    return list(found)


@pytest.mark.parametrize("name", ["relu", "leaky", "norm", "attention", "masked"])
def test_pieces_of_a_batch_are_the_same(name: str, generator, monkeypatch) -> None:
    units = torch.rand(2, 7, 3, 4, 4, generator=generator, dtype=torch.float64)  # means and variances of 7 examples
    units[0] -= 0.5
    mask = torch.randn(7, 1, 4, 4, generator=generator, dtype=torch.float64) if name == "masked" else torch.eye(4)
    name = "attention" if name == "masked" else name
    whole = _pieces(name, units, mask)
    monkeypatch.setattr("bayesify.moments.tensors.MAX_PIECE_UNITS", 100)
    for found, expected in zip(_pieces(name, units, mask), whole, strict=True):
        torch.testing.assert_close(found, expected)


def test_means_behind_a_relu_have_squares_that_are_no_denormal_numbers() -> None:
    """x86-64 multiplies denormal numbers slowly. With z the mean over the standard deviation, here 0.1, errors in float32 are those
    of z times erf, whose own may be several roundings: at most 2^-18 of the scale."""
    mean = torch.linspace(-3, 3, 10_001)
    found = F.relu(Moments(mean, torch.full_like(mean, 0.01), (-1,)))
    exact = F.relu(Moments(mean.double(), torch.full_like(mean, 0.01).double(), (-1,)))
    assert (
        found.mean_.square() > 1e8 * torch.finfo(torch.float32).tiny
    ).all()  # products with variances of weights too
    torch.testing.assert_close(found.mean_, exact.mean_.float(), rtol=1e-6, atol=0.1 * 2**-18)
    torch.testing.assert_close(found.variance_, exact.variance_.float(), rtol=1e-4, atol=0.01 * 2**-18)


def test_layer_normalization_is_group_normalization_of_one_group(generator) -> None:
    """With many channels, for which layer normalization is linearized."""
    mean, variance = torch.rand(2, 4, 40, generator=generator, dtype=torch.float64)
    variance *= 0.02
    weight, bias = torch.rand(2, 40, generator=generator, dtype=torch.float64)
    layer = F.layer_norm(Moments(mean, variance, (-1, 1)), (40,), weight, bias)
    group = F.group_norm(Moments(mean[..., None], variance[..., None], (-1, 1, 0)), 1, weight, bias)
    torch.testing.assert_close(layer.mean_, group.mean_.squeeze(-1))
    torch.testing.assert_close(layer.variance_, group.variance_.squeeze(-1))


@pytest.mark.parametrize("mixed", [False, True])
def test_layer_normalization_of_few_channels_is_of_second_order(mixed: bool, generator) -> None:
    r"""Mean and variance for a small covariance t S, with gradients G and Hessians H by automatic differentiation.

    The mean is $z + \frac t2 \operatorname{tr}(H S)$ and the variance $t\,G S G^\top$. Where the gradient is 0, the variance is
    $\frac{t^2}2 \operatorname{tr}(H S H S)$.
    """
    mean = torch.tensor([[3.0, 0.0, 0.0, 0.0], [1.0, -0.5, 0.2, -0.4]], dtype=torch.float64)
    variance = torch.rand(2, 4, generator=generator, dtype=torch.float64)
    weight, bias = torch.rand(2, 4, generator=generator, dtype=torch.float64)
    matrix = torch.randn(4, 4, generator=generator, dtype=torch.float64) if mixed else torch.eye(4, dtype=torch.float64)
    mean = torch.linalg.solve(matrix, mean.mT).mT  # so that the matrix makes the means above
    small = 1e-6

    def normalized(units: Tensor) -> Tensor:
        return F.layer_norm(F.linear(units, matrix), (4,), weight, bias, 0.0)

    given = Moments(mean, small * variance, (-1, 1))
    found = F.layer_norm(F.linear(given, matrix), (4,), weight, bias, 0.0)
    for row in range(2):
        hessian = torch.func.jacrev(torch.func.jacrev(normalized))(mean[row])  # [i, k, l]
        gradient = torch.func.jacrev(normalized)(mean[row])
        shift = 0.5 * torch.einsum("ikk,k->i", hessian, variance[row])
        torch.testing.assert_close((found.mean_[row] - normalized(mean[row])) / small, shift, rtol=1e-3, atol=1e-5)
        first = torch.einsum("ik,k,ik->i", gradient, variance[row], gradient)
        torch.testing.assert_close(found.variance_[row] / small, first, rtol=1e-4, atol=1e-5)
        if row == 0:  # the first unit has its largest possible value
            pair = hessian[0] * variance[row].sqrt() * variance[row].sqrt().unsqueeze(-1)
            second = 0.5 * pair.square().sum()
            torch.testing.assert_close(found.variance_[row, 0] / small**2, second, rtol=1e-2, atol=1e-6)


def test_layers_behind_layer_normalization_see_its_correlated_channels(generator) -> None:
    """Normalized channels add up to 0. Against n = 20,000 draws: five standard errors, and 3 % for orders above the second."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    plan = {"0": posteriors.MeanField(init_std=0.05)}
    bnn = bayesify.bayesianize(net, plan, likelihood=likelihoods.Gaussian(0.01)).eval()
    x, n = torch.randn(4, 3, generator=generator, dtype=torch.float64), 20_000
    found, drawn = bnn.predict(x, method="moments"), bnn.predict(x, n, generator=generator)
    std = drawn.epistemic.sqrt()
    assert ((found.mean - drawn.mean).abs() < (5 / n**0.5 + 0.03) * std).all()
    assert ((found.epistemic.sqrt() / std - 1).abs() < 5 * (3 / (4 * n)) ** 0.5 + 0.03).all()


class Attention(nn.Module):
    def __init__(self, apart: bool = False, batch_first: bool = True, need_weights: bool = True) -> None:
        super().__init__()
        self.body, self.apart = nn.MultiheadAttention(8, 2, batch_first=batch_first), apart
        self.batch_first, self.need_weights = batch_first, need_weights

    def forward(self, x: Tensor) -> Tensor:
        x = x if self.batch_first else x.transpose(0, 1).contiguous()
        keys, values = (x.clone(), x.clone()) if self.apart else (x, x)
        found, attention = self.body(x, keys, values, need_weights=self.need_weights)
        assert (attention is not None) == self.need_weights
        return (found if self.batch_first else found.transpose(0, 1)).mean(1)


@pytest.mark.parametrize("way", [{"apart": True}, {"batch_first": False}, {"need_weights": False}], ids=str)
def test_ways_to_write_self_attention_agree(way: dict[str, bool], generator, monkeypatch) -> None:
    """One product or three, examples or positions first, with the attention or without; at any cost, with no approximation."""
    monkeypatch.setattr("bayesify.moments.prediction.MAX_COST_RATIO", math.inf)
    x = torch.randn(3, 5, 8, generator=generator, dtype=torch.float64)
    one, other = bayesian(Attention()), bayesian(Attention(**way))
    other.load_state_dict(one.state_dict())
    found, expected = (bnn.predict(x, method="moments") for bnn in (other, one))
    torch.testing.assert_close(found.mean, expected.mean)
    torch.testing.assert_close(found.epistemic, expected.epistemic)


@pytest.mark.parametrize("way", ["causal", "mask", "none"])
def test_attention_is_linearized(way: str, generator) -> None:
    """Values of a channel move together, by A s; scores independently, by A (v - o) times their deviation.

    The mean changes by half the trace of the scores' covariance with the Hessian of the attention.
    """
    q, k, v = torch.rand(3, 2, 2, 5, 4, generator=generator, dtype=torch.float64)  # means and variances, [B, T, D]
    keep = torch.rand(5, 5, generator=generator) > 0.3 if way == "mask" else torch.ones(5, 5).tril() > 0
    options = {"causal": {"is_causal": True}, "mask": {"attn_mask": keep | torch.eye(5).bool()}, "none": {}}[way]
    found = F.scaled_dot_product_attention(*(Moments(*part, (-1, 0, 1)) for part in (q, k, v)), **options)
    mean = F.scaled_dot_product_attention(q[0], k[0], v[0], **options)
    attention = F.scaled_dot_product_attention(q[0], k[0], torch.eye(5, dtype=torch.float64).expand(2, 5, 5), **options)
    scores = ((q[0] ** 2 + q[1]) @ (k[0] ** 2 + k[1]).mT - q[0] ** 2 @ (k[0] ** 2).mT) / 4
    moved = (v[0][:, None] - mean[:, :, None]).square()  # [B, T, J, D]
    expected = (attention @ v[1].sqrt()) ** 2 + torch.einsum("btj,btjd->btd", attention**2 * scores, moved)
    covariance = torch.einsum("btd,bjd,bkd->btjk", q[1], k[0], k[0]) / 4
    covariance += torch.diag_embed(scores - covariance.diagonal(dim1=-2, dim2=-1))
    chosen = attention.new_zeros(2, 5, 5, 5)
    for b, t in itertools.product(range(2), range(5)):
        logits = attention[b, t].log().clamp_min(-1e9)
        hessian = torch.func.jacrev(torch.func.jacrev(lambda scores: scores.softmax(-1)))(logits)
        chosen[b, t, t] = 0.5 * torch.einsum("jkl,kl->j", hessian, covariance[b, t])
    shift = torch.einsum("bttj,bjd->btd", chosen, v[0])
    torch.testing.assert_close(found.mean_, mean + shift)
    torch.testing.assert_close(found.variance_, expected)


def test_padded_keys_are_not_attended_to(generator) -> None:
    class Padded(Attention):
        def forward(self, x: Tensor) -> Tensor:
            return self.body(x, x, x, key_padding_mask=torch.arange(5).expand(3, 5) > 2)[0].mean(1)

    x, net = torch.randn(3, 5, 8, generator=generator, dtype=torch.float64), Padded().double()
    found = bayesian(net, 1e-6).predict(x, method="moments")
    torch.testing.assert_close(found.mean, net(x).detach(), rtol=1e-6, atol=1e-6)


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.inner, self.norm, self.last = (
            nn.Linear(5, 32),
            nn.Linear(32, 32),
            nn.LayerNorm(32),
            nn.Linear(32, 3),
        )

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        return self.last(hidden + torch.relu(self.inner(self.norm(hidden))))


class Tokens(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(12, 16)
        self.body = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.1, batch_first=True, norm_first=True)
        self.head = nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(self.embed(x)).mean(1))


def _maps(generator: torch.Generator) -> Tensor:
    return torch.rand(5, 2, 8, 8, generator=generator, dtype=torch.float64)


DEEP = {
    "residual": (Residual, lambda g: torch.randn(5, 5, generator=g, dtype=torch.float64), 0.1),
    "convolutions": (
        lambda: nn.Sequential(
            *(
                nn.Conv2d(2, 8, 3, padding=1),
                nn.BatchNorm2d(8),
                nn.ReLU(),
                nn.MaxPool2d(2),
                nn.Conv2d(8, 8, 3),
                nn.ReLU(),
            ),
            *(nn.AvgPool2d(2), nn.Flatten(), nn.Linear(8, 3)),
        ),
        _maps,
        0.05,
    ),
    "groups": (
        lambda: nn.Sequential(
            nn.Conv2d(2, 32, 3), nn.GroupNorm(2, 32), nn.SiLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 3)
        ),
        _maps,
        0.05,
    ),
    "attention": (Tokens, lambda g: torch.randint(12, (5, 6), generator=g), 0.03),
}


@pytest.mark.parametrize("name", DEEP)
def test_deeper_networks_are_close_to_draws(name: str, generator) -> None:
    """Approximations: of n = 1,000 draws (standard error of a deviation 2.2 %), means within 0.2 deviations, deviations within
    12 %."""
    make, inputs, std = DEEP[name]
    bnn, x = bayesian(make(), std), inputs(generator)
    found = bnn.predict(x, method="moments")
    outputs = bnn.draw(1000, generator=generator)(x).detach()
    std = outputs.std(0)
    assert ((found.mean - outputs.mean(0)).abs() < 0.2 * std).all()
    assert (found.epistemic.sqrt() / std - 1).abs().max() < 0.12


def test_networks_in_bfloat16(generator) -> None:
    """Sums over outputs are in float32, as those of draws are; bfloat16 has 8 bits."""
    net, x = nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 3)), torch.randn(4, 5, generator=generator)
    likelihood, posterior = likelihoods.Categorical(), posteriors.MeanField(init_std=0.1)
    exact, rounded = (
        bayesify.bayesianize(copy.deepcopy(net).to(kind), posterior, likelihood=likelihood).predict(
            x.to(kind), method="moments"
        )
        for kind in (torch.float32, torch.bfloat16)
    )
    assert rounded.probs.dtype == torch.float32
    torch.testing.assert_close(rounded.probs, exact.probs, rtol=0, atol=0.02)


def test_classes_are_close_to_draws(generator) -> None:
    """Probabilities within 0.01 of 20,000 draws, whose own error is at most 0.5 / sqrt(20,000) = 0.0035; the same in every call."""
    net = nn.Sequential(nn.Linear(5, 30), nn.ReLU(), nn.Linear(30, 10))
    bnn = bayesian(net, 0.15, likelihood=likelihoods.Categorical())
    x = torch.randn(20, 5, generator=generator, dtype=torch.float64)
    found, again = bnn.predict(x, method="moments"), bnn.predict(x[3:4], method="moments")
    drawn = bnn.predict(x, 20_000, generator=generator)
    assert (found.probs - drawn.probs).abs().max() < 0.01
    assert (found.mutual_information - drawn.mutual_information).abs().max() < 0.1 * drawn.mutual_information.max()
    torch.testing.assert_close(again.probs, found.probs[3:4])


@pytest.mark.parametrize("size", [1, 3, 10])
def test_points_have_the_moments_of_a_normal(size: int) -> None:
    points = _rule(size)
    torch.testing.assert_close(points.mean(0), torch.zeros(size, dtype=torch.float64))
    torch.testing.assert_close(points.T @ points / len(points), torch.eye(size, dtype=torch.float64))


@pytest.mark.parametrize("shape", [(5, 3), (5, 10), (5, 2, 4)])
def test_points_have_the_moments_of_their_gaussian(shape: tuple[int, ...], generator) -> None:
    """To 1e-6 of the variance, which is added; of outputs with positions variances alone."""
    mean, size = torch.rand(shape, generator=generator, dtype=torch.float64), math.prod(shape[1:])
    factor = torch.rand(5, size, size, generator=generator, dtype=torch.float64)
    spread = factor @ factor.mT if len(shape) == 2 else factor[:, 0]
    points = _points(OutputGaussian(mean, spread.clone(), 0)).flatten(2)
    moved = points - mean.flatten(1)
    torch.testing.assert_close(points.mean(0), mean.flatten(1))
    found = torch.einsum("nbi,nbj->bij", moved, moved) / len(points)
    if len(shape) > 2:
        found = found.diagonal(dim1=1, dim2=2)
    torch.testing.assert_close(found, spread, rtol=1e-5, atol=1e-5)


def test_logits_that_vary_together_leave_no_doubt(generator) -> None:
    """Two equal rows of the last layer: the difference of the logits is fixed, whatever the random layer below does."""
    net = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    net[1].weight.data[1] = net[1].weight.data[0]
    bnn = bayesian(net, likelihood=likelihoods.Categorical(), posterior={"0": posteriors.MeanField(init_std=0.5)})
    found = bnn.predict(torch.randn(5, 3, generator=generator, dtype=torch.float64), method="moments")
    torch.testing.assert_close(found.probs, net[1].bias.double().softmax(0).expand(5, 2), rtol=1e-4, atol=0)
    assert found.mutual_information.max() < 1e-4


def test_small_budgets_and_k_tied_give_the_same(generator) -> None:
    x = torch.randn(50, 5, generator=generator, dtype=torch.float64)
    for posterior in (posteriors.MeanField(), posteriors.KTied()):
        bnn = bayesian(NETWORKS["relu"](), posterior=posterior)
        whole, cut = (bnn.predict(x, method="moments", memory=size) for size in ("1GiB", "64KiB"))
        torch.testing.assert_close(whole.variance, cut.variance)
        outputs = bnn.draw(20_000, generator=generator)(x[:4]).detach()
        assert (whole.epistemic[:4].sqrt() / outputs.std(0) - 1).abs().max() < 0.05


def test_a_posterior_that_changes_is_seen(generator) -> None:
    """What is kept of the weights' moments follows the parameters."""
    bnn, x = bayesian(nn.Linear(3, 2)), torch.ones(1, 3, dtype=torch.float64)
    before = bnn.predict(x, method="moments").epistemic
    for raw in bnn.posterior.raw_std.values():
        raw.data += math.log(2)
    torch.testing.assert_close(bnn.predict(x, method="moments").epistemic, 4 * before)


class Shifted(nn.Module):
    """Changes its inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x.add_(1))


def test_inputs_stay_as_they_are() -> None:
    """A copy is made where a network may change its inputs: by code of its own, a module in place, or a hook."""
    hooked = nn.Sequential(nn.Linear(3, 2))
    hooked[0].register_forward_pre_hook(lambda module, given: (given[0].mul_(2),))
    replaced = nn.Sequential(nn.Flatten(), nn.Linear(3, 2))
    replaced[0].forward = lambda x: x.mul_(2)
    plain = nn.Sequential(nn.Flatten(), nn.Linear(3, 4), nn.ReLU(inplace=True), nn.Linear(4, 2))
    for net in (Shifted(), nn.Sequential(nn.ReLU(inplace=True), nn.Linear(3, 2)), hooked, replaced, plain):
        x = torch.randn(4, 3, dtype=torch.float64)
        before = x.clone()
        bayesian(net).predict(x, method="moments")
        assert torch.equal(x, before)
        assert not leaves_inputs(net)
    assert leaves_inputs(nn.Sequential(nn.Flatten(), nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2)))


class Turned(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.layer.weight.T


class Dropped(Turned):
    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(self.layer(x))


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(self.layer(x))


@pytest.mark.parametrize(
    ("net", "posterior", "message"),
    [
        (
            nn.Sequential(nn.Linear(3, 3), nn.Softmax(-1)),
            None,
            r"does not support 1 \(Softmax\): softmax is not supported",
        ),
        (Turned(), None, r"does not support Turned: (permute|t) is not supported"),
        (Dropped(), None, r"does not support Dropped: dropout is not supported"),
        (Twice(), None, r"does not support layer \(Linear\): layer.weight is used more than once"),
        (nn.Linear(3, 3), posteriors.MatrixNormal(), "the posterior is MatrixNormal"),
    ],
)
def test_what_has_no_rule_is_refused_by_name(net, posterior, message) -> None:
    with pytest.raises(ValueError, match=message):
        bayesian(net, posterior=posterior).predict(torch.ones(2, 3, dtype=torch.float64), method="moments")


class Last(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.GRU(3, 4, batch_first=True), nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x)[0][:, -1])


@pytest.mark.parametrize("posterior", [None, {"head": posteriors.MeanField()}])
def test_recurrent_networks_are_refused_by_name(posterior) -> None:
    with pytest.raises(
        ValueError, match=r"does not support body \(GRU\): recurrent layers are not supported; use method='draws'"
    ):
        bayesian(Last(), posterior=posterior).predict(torch.ones(2, 5, 3, dtype=torch.float64), method="moments")


def test_draws_make_no_sense_with_moments() -> None:
    with pytest.raises(ValueError, match="draws nothing"):
        bayesian(nn.Linear(3, 2)).predict(torch.ones(2, 3, dtype=torch.float64), 8, method="moments")


@pytest.mark.parametrize(
    ("shape", "layout", "new", "expected"),
    [
        ((2, 3, 4, 5), (-1, 1, 0, 0), (2, 60), (-1, 20)),
        ((2, 60), (-1, 20), (2, 3, 20), (-1, 1, 0)),
        ((2, 7, 12), (-1, 0, 1), (2, 7, 3, 4), (-1, 0, 1, 1)),
        ((2, 7, 12), (-1, 0, 1), (2, 84), (-1, 1)),
        ((2, 3, 1, 1), (-1, 1, 0, 0), (2, 3), (-1, 1)),
    ],
)
def test_layouts_follow_changes_of_shape(shape, layout, new, expected) -> None:
    assert reshaped(shape, layout, new) == expected
