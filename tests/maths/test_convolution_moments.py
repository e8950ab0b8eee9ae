"""The two matrices of a convolution's regression are those of extracted patches, gradients too, in the memory of a few maps."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from bayesify.maths.convolution_moments import Geometry, convolution_moments, patch_moments
from bayesify.maths.lag_correlations import fast_size

M, R = 3, 2


def patches(x: Tensor, geometry: Geometry) -> Tensor:
    """[G, M o, D], one copy of the map for each position of the kernel."""
    padded = F.pad(x, [size for pair in reversed(geometry.padding) for size in pair])
    sizes = geometry.outputs(x.shape[2:])
    columns = []
    for offset in itertools.product(*(range(size) for size in geometry.kernel)):
        index = [slice(None), slice(None)]
        for start, size, s, d in zip(offset, sizes, geometry.stride, geometry.dilation, strict=True):
            index.append(slice(d * start, d * start + s * (size - 1) + 1, s))
        columns.append(padded[tuple(index)])
    stacked = torch.stack(columns, 2).unflatten(1, (geometry.groups, -1))  # [M, G, C, K, *o]
    return stacked.flatten(4).permute(1, 0, 4, 2, 3).flatten(1, 2).flatten(2)


def rows(v: Tensor, groups: int) -> Tensor:
    """[G, M o, R]."""
    return v.unflatten(1, (groups, -1)).flatten(3).permute(1, 0, 3, 2).flatten(1, 2)


def both(padding: int) -> tuple[int, int]:
    return (padding, padding)


GEOMETRIES = [
    Geometry((k,) * 2, (s,) * 2, (d,) * 2, (both(p),) * 2, g)
    for k, s, d, p, g in itertools.product((1, 2, 3), (1, 2, 3), (1, 2), (0, 1, 2, 4), (1, 2))
] + [
    Geometry((3, 2), (1, 1), (1, 3), ((1, 0), (0, 2)), 4),
    Geometry((3, 2), (2, 1), (1, 3), ((1, 0), (0, 2)), 4),
    Geometry((5, 5), (1, 1), (1, 1), (both(2),) * 2, 1),
    Geometry((4, 4), (1, 1), (1, 1), ((1, 2),) * 2, 1),
    Geometry((7, 1), (1, 1), (1, 1), (both(3), both(0)), 1),
    Geometry((3,), (1,), (2,), (both(1),), 2),
    Geometry((3,), (2,), (2,), (both(3),), 1),
    Geometry((2, 3, 2), (1, 1, 1), (1, 1, 1), (both(0), both(1), both(1)), 2),
    Geometry((2, 3, 2), (1, 2, 1), (1, 1, 1), (both(0), both(1), both(1)), 2),
]


def name(geometry: Geometry) -> str:
    return "k{}-s{}-d{}-p{}-g{}".format(
        *("".join(map(str, part)) for part in (geometry.kernel, geometry.stride, geometry.dilation)),
        ".".join(f"{a}{b}" for a, b in geometry.padding),
        geometry.groups,
    )


def data(geometry: Geometry, sizes: tuple[int, ...] = (6, 7, 5)) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    sizes = sizes[: len(geometry.kernel)]
    x = torch.randn(M, 4, *sizes, dtype=torch.float64, generator=generator)
    v = torch.randn(M, R * geometry.groups, *geometry.outputs(sizes), dtype=torch.float64, generator=generator)
    return x.requires_grad_(), v.requires_grad_()


def same(ours: tuple[Tensor, ...], theirs: tuple[Tensor, ...], leaves: tuple[Tensor, ...]) -> None:
    """Values, and gradients of a random linear function of them, to 1e-10 of their size."""
    generator = torch.Generator().manual_seed(1)
    sums = []
    weights = [torch.randn(value.shape, dtype=value.dtype, generator=generator) for value in theirs]
    for found in (ours, theirs):
        total = sum((value * weight).sum() for value, weight in zip(found, weights, strict=True))
        sums.append(torch.autograd.grad(total, leaves))
    for one, other in zip((*ours, *sums[0]), (*theirs, *sums[1]), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-10 * (1 + float(other.detach().abs().max())))


@pytest.mark.thin(3)
@pytest.mark.parametrize("geometry", GEOMETRIES, ids=name)
def test_both_matrices_are_those_of_patches(geometry: Geometry) -> None:
    """By lag at stride 1, by extracted patches elsewhere."""
    x, v = data(geometry)
    a, t = patches(x, geometry), rows(v, geometry.groups)
    same(convolution_moments(x, v, geometry), (a.mT @ a, a.mT @ t), (x, v))


@pytest.mark.parametrize("geometry", GEOMETRIES[::5], ids=name)
def test_extracted_patches_at_any_stride(geometry: Geometry) -> None:
    x, v = data(geometry)
    a, t = patches(x, geometry), rows(v, geometry.groups)
    same(patch_moments(x, v, geometry), (a.mT @ a, a.mT @ t), (x, v))


@pytest.mark.thin(3)
@pytest.mark.parametrize("geometry", GEOMETRIES, ids=name)
def test_a_column_for_the_bias(geometry: Geometry) -> None:
    x, v = data(geometry)
    ones = torch.rand(M, dtype=torch.float64, generator=torch.Generator().manual_seed(3)).requires_grad_()
    a, t = patches(x, geometry), rows(v, geometry.groups)
    column = ones.repeat_interleave(a.shape[1] // M).view(1, -1, 1).expand(geometry.groups, -1, -1)
    a = torch.cat((a, column), -1)
    same(convolution_moments(x, v, geometry, ones), (a.mT @ a, a.mT @ t), (x, v, ones))


@pytest.mark.parametrize("geometry", [each for each in GEOMETRIES[::3] if max(each.stride) == 1], ids=name)
def test_fast_transforms_for_large_maps(geometry: Geometry, monkeypatch: pytest.MonkeyPatch) -> None:
    """Above a size maps are transformed by fast transforms in place of matrices; here from the smallest size on."""
    monkeypatch.setattr("bayesify.maths.lag_correlations.MAX_MATRIX_PERIOD", 0)
    monkeypatch.setattr("bayesify.maths.lag_correlations.MAX_SPECTRUM_NUMBERS", 64)  # and a few frequencies at a time
    x, v = data(geometry)
    a, t = patches(x, geometry), rows(v, geometry.groups)
    same(convolution_moments(x, v, geometry), (a.mT @ a, a.mT @ t), (x, v))


def test_the_reference_is_unfold() -> None:
    geometry = Geometry((3, 2), (2, 1), (1, 2), (both(1), both(0)), 1)
    x, _ = data(geometry)
    expected = F.unfold(x, (3, 2), dilation=(1, 2), padding=(1, 0), stride=(2, 1)).transpose(1, 2).flatten(0, 1)
    torch.testing.assert_close(patches(x, geometry)[0], expected)


@pytest.mark.parametrize("mode", ["circular", "reflect", "replicate"])
def test_other_padding_is_padding_first(mode: str) -> None:
    """What torch convolves is the map padded by its mode: the matrices are those of that map without zeros around it."""
    layer = torch.nn.Conv2d(4, 2, 3, padding=1, padding_mode=mode, bias=False).double()
    bare = Geometry((3, 3), (1, 1), (1, 1), (both(0),) * 2)
    x, v = data(Geometry((3, 3), (1, 1), (1, 1), (both(1),) * 2))
    padded = F.pad(x, (1, 1, 1, 1), mode=mode)
    gram, cross = convolution_moments(padded, v, bare)
    w = layer.weight.flatten(1)
    out = layer(x)
    torch.testing.assert_close(torch.einsum("od,de,pe->op", w, gram[0], w), torch.einsum("mohw,mphw->op", out, out))
    torch.testing.assert_close(w @ cross[0], torch.einsum("mohw,mrhw->or", out, v))


class Largest(TorchDispatchMode):
    """The largest tensor that any operation returns, in bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        output = func(*args, **(kwargs or {}))
        for value in output if isinstance(output, (tuple, list)) else [output]:
            if isinstance(value, Tensor):
                self.bytes = max(self.bytes, value.numel() * value.element_size())
        return output


@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize("kernel", [3, 7])
def test_no_tensor_is_larger_than_a_few_maps(kernel: int, stride: int) -> None:
    """Patches would take kernel^2 / stride^2 maps; a spectrum with its zeros takes less than three."""
    geometry = Geometry((kernel,) * 2, (stride,) * 2, (1, 1), (both(kernel // 2),) * 2)
    x = torch.randn(64, 4, 24, 24).requires_grad_()
    v = torch.randn(64, 4, *geometry.outputs((24, 24))).requires_grad_()
    with Largest() as largest:
        gram, cross = convolution_moments(x, v, geometry)
        (gram.square().sum() + cross.square().sum()).backward()
    # [x v] in one spectrum: two maps of 30 x 30 at most, in complex numbers of half the frequencies
    assert largest.bytes <= 4 * 4 * x.numel()


def test_sizes_that_transform_fast() -> None:
    assert [fast_size(size) for size in (1, 7, 9, 11, 29, 31, 34, 37)] == [1, 8, 9, 12, 30, 32, 36, 40]


def test_single_precision_is_near() -> None:
    geometry = GEOMETRIES[-9 - 48 + 30]
    x, v = data(geometry)
    exact = convolution_moments(x, v, geometry)
    near = convolution_moments(x.float(), v.float(), geometry)
    for one, other in zip(near, exact, strict=True):
        torch.testing.assert_close(one.double(), other, rtol=0, atol=1e-5 * float(other.detach().abs().max()))
