"""A weight seen as a matrix is the linear map that its layer is: outputs x inputs."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest
import torch
import torch.nn.functional as F
from cases import CASES, Case
from dense_reference import entries, matrix_entry
from torch import Tensor, nn

from bayesify.weights.catalog import Weight, catalog, group_layers


def weights_of(case: Case) -> list[Weight]:
    """The weights of a case's network, and its kernels balanced, too."""
    found = list(catalog(case.network()).weights.values())
    kernels = [weight for weight in found if weight.kind == "matrix" and len(weight.shape) > 3]
    return [*found, *(replace(weight, balanced=True) for weight in kernels)]


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
@pytest.mark.parametrize("batch", [(), (2,), (2, 3)], ids=str)
def test_views_are_inverse(case: Case, batch: tuple[int, ...]) -> None:
    for weight in weights_of(case):
        value = torch.randn((*batch, *weight.shape))
        matrix = weight.to_matrix(value)
        assert matrix.shape == (*batch, *weight.matrix_shape)
        assert torch.equal(weight.from_matrix(matrix), value)
        back = torch.randn(*batch, *weight.matrix_shape)
        assert torch.equal(weight.to_matrix(weight.from_matrix(back)), back)


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_view_entry_by_entry(case: Case) -> None:
    for weight in weights_of(case):
        value = torch.arange(float(weight.numel)).reshape(weight.shape)
        matrix = weight.to_matrix(value)
        for index in product(*(range(size) for size in weight.shape)):
            assert matrix[matrix_entry(weight, index)] == value[index]
    for layer in group_layers(catalog(case.network()).weights.values()):
        values = {weight.name: torch.randn(weight.shape) for weight in layer.weights}
        matrix = layer.to_matrix(values)
        assert matrix.shape == (layer.rows, layer.cols)
        assert len({(row, col) for _, row, col in entries(layer)}) == layer.numel == matrix.numel()
        flat = torch.cat([values[weight.name].flatten() for weight in layer.weights])
        assert torch.equal(torch.stack([matrix[row, col] for _, row, col in entries(layer)]), flat)
        back = layer.from_matrix(matrix)
        assert all(torch.equal(back[name], value) for name, value in values.items())


def only_weight(module: nn.Module) -> Weight:
    return catalog(module).weights["weight"]


@pytest.mark.parametrize("groups", [1, 2])
def test_convolution_is_its_matrix_times_patches(groups: int) -> None:
    conv = nn.Conv2d(4, 6, (2, 3), groups=groups, bias=False).double()
    x = torch.randn(1, 4, 2, 3, dtype=torch.float64)  # one patch
    matrix = only_weight(conv).to_matrix(conv.weight)
    inputs = x.reshape(groups, -1)
    rows = matrix.reshape(groups, 6 // groups, -1)
    expected = torch.einsum("goi,gi->go", rows, inputs).reshape(6)
    torch.testing.assert_close(conv(x).flatten(), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("groups", [1, 2])
def test_transposed_convolution_is_its_matrix_at_one_site(groups: int) -> None:
    """One input site spreads over the kernel: out[o, k] = sum_i W[o, (i, k)] x[i]."""
    conv = nn.ConvTranspose2d(4, 6, (2, 3), groups=groups, bias=False).double()
    x = torch.randn(1, 4, 1, 1, dtype=torch.float64)
    matrix = only_weight(conv).to_matrix(conv.weight)
    assert matrix.shape == (6, 4 // groups * 6)
    kernels = matrix.reshape(groups, 6 // groups, 4 // groups, 6)
    expected = torch.einsum("goik,gi->gok", kernels, x.reshape(groups, -1)).reshape(6, 2, 3)
    torch.testing.assert_close(conv(x)[0], expected, rtol=1e-12, atol=1e-12)


def test_embedding_is_its_matrix_times_a_one_hot_vector() -> None:
    table = nn.Embedding(5, 3).double()
    matrix = only_weight(table).to_matrix(table.weight)
    one_hot = F.one_hot(torch.tensor([4, 1]), 5).double()
    torch.testing.assert_close(table(torch.tensor([4, 1])), one_hot @ matrix.T)


def test_bilinear_is_its_matrix_times_the_outer_product() -> None:
    mix = nn.Bilinear(3, 2, 4, bias=False).double()
    left, right = torch.randn(1, 3, dtype=torch.float64), torch.randn(1, 2, dtype=torch.float64)
    matrix = only_weight(mix).to_matrix(mix.weight)
    outer: Tensor = torch.outer(left[0], right[0]).flatten()
    torch.testing.assert_close(mix(left, right)[0], matrix @ outer)


def test_weight_and_bias_of_a_linear_map_are_one_layer() -> None:
    net = nn.ModuleDict({"attention": nn.MultiheadAttention(4, 2), "core": nn.GRU(3, 2), "norm": nn.LayerNorm(3)})
    names = {
        layer.name: [weight.name for weight in layer.weights] for layer in group_layers(catalog(net).weights.values())
    }
    assert names["attention.in_proj"] == ["attention.in_proj_weight", "attention.in_proj_bias"]
    assert names["core.hh_l0"] == ["core.weight_hh_l0", "core.bias_hh_l0"]
    assert names["norm.weight"] == ["norm.weight"]


@pytest.mark.parametrize("name", ["conv2d_depthwise", "transposed1d", "conv1d", "linear"])
def test_dropout_drops_whole_input_channels(name: str) -> None:
    """A masked weight gives the network's output for inputs with those channels dropped."""
    from cases import generator

    import bayesify

    case = CASES[name]
    bnn = bayesify.bayesianize(case.network(torch.float64), bayesify.posteriors.Dropout(rate=0.5, first_layer=True))
    plain, x = case.network(torch.float64), case.batch(dtype=torch.float64)[0]
    first = plain[0] if name == "linear" else plain
    drawn = bnn.draw(16, generator=generator()).weights
    weight, bias = ("0.weight", "0.bias") if name == "linear" else ("weight", "bias")
    channels = x.shape[1]
    for draw in range(16):
        first.load_state_dict({"weight": drawn[weight][draw], "bias": drawn[bias][draw]})
        original = case.network(torch.float64)
        original = original[0] if name == "linear" else original
        probes = torch.zeros(channels, *x.shape[1:], dtype=torch.float64)
        for channel in range(channels):
            probes[channel, channel] = x[0, channel]
        zero = torch.zeros_like(x[:1])
        effect, reference = first(probes) - first(zero), original(probes) - original(zero)
        for channel in range(channels):
            kept = bool(effect[channel].any())
            expected = 2 * reference[channel] if kept else torch.zeros_like(reference[channel])
            torch.testing.assert_close(effect[channel], expected)


@pytest.mark.parametrize(
    ("shape", "matrix"), [((1, 5, 7), (5, 7)), ((1, 1, 7), (1, 7)), ((3, 1, 7), (3, 7)), ((2, 3, 4), (2, 12))]
)
def test_parameters_of_unknown_modules(shape: tuple[int, ...], matrix: tuple[int, int]) -> None:
    """Positions x width with an axis for the batch, as transformers have them, are a matrix of positions and width."""
    weight = Weight("positions", torch.Size(shape), "positions", "custom", None)
    assert weight.matrix_shape == matrix
    value = torch.randn(4, *shape)
    assert torch.equal(weight.from_matrix(weight.to_matrix(value)), value)
