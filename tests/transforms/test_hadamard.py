"""The Walsh-Hadamard transform is the product by Sylvester's matrix, whichever way it runs."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from bayesify import transforms
from bayesify.transforms import hadamard, hadamard_matrix, next_power_of_two, sign_matrices, walsh

SIZES = [2**k for k in range(14)]
WAYS = {
    "chosen": walsh.transform,
    "plain": walsh.plain_transform,
    "factors": lambda x, scale: walsh._by_factors(x, scale).reshape(x.shape),
    "butterflies": lambda x, scale: walsh._by_butterflies(x, scale).reshape(x.shape),
}


def sylvester(size: int, dtype: torch.dtype = torch.float64) -> Tensor:
    """By its own recursion, H_2n = [[H, H], [H, -H]]."""
    matrix = torch.ones(1, 1, dtype=dtype)
    while len(matrix) < size:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    return matrix


@pytest.mark.parametrize("size", SIZES)
def test_is_the_dense_product(size: int) -> None:
    """For few and many rows, which go different ways, normalized or not; and its own inverse."""
    matrix = sylvester(size, torch.float32)
    for rows in (2, 40):
        x = torch.randint(-9, 10, (rows, size)).float()  # sums of integers below 2^24 are exact
        product = x @ matrix
        assert torch.equal(hadamard(x, normalize=False), product)
        torch.testing.assert_close(hadamard(x.double()), product.double() / math.sqrt(size), rtol=0, atol=1e-10)
        torch.testing.assert_close(hadamard(hadamard(x.double())), x.double(), rtol=0, atol=1e-10)
        assert not torch.equal(hadamard(x), x) or size == 1


@pytest.mark.parametrize("size", [1, 2, 8, 64, 512])
def test_matrix(size: int) -> None:
    assert torch.equal(hadamard_matrix(size, torch.zeros(0, dtype=torch.float64)), sylvester(size))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("size", [256, 512, 2048, 4096, 2**15])
def test_every_way_is_the_same(way: str, size: int) -> None:
    """In float32 the relative error is a few roundings of 6e-8."""
    x = torch.randn(16, size)
    exact = hadamard(x.double(), normalize=False)
    error = (WAYS[way](x, 1.0).double() - exact).norm() / exact.norm()
    assert float(error) < 5e-7


@pytest.mark.parametrize("piece", [1024, 100])
@pytest.mark.parametrize("many", [0, math.inf])
def test_pieces_of_large_batches(piece: int, many: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two rows at a time or one, the last piece shorter, with either inner factor."""
    monkeypatch.setattr(walsh, "NUMBERS_PER_PIECE", piece)
    monkeypatch.setattr(walsh, "MIN_NUMBERS_FOR_HALF_FACTOR", many)
    x = torch.randint(-9, 10, (5, 512)).float()
    assert torch.equal(walsh._by_butterflies(x, 1.0).reshape(x.shape), x @ sylvester(512, torch.float32))


@pytest.mark.parametrize("shape", [(4,), (3, 1, 256), (0, 8), (2, 3, 5, 16)])
def test_shapes(shape: tuple[int, ...]) -> None:
    x = torch.randn(shape, dtype=torch.float64)
    expected = x @ sylvester(shape[-1]) / math.sqrt(shape[-1])
    torch.testing.assert_close(hadamard(x), expected, rtol=0, atol=1e-12)
    strided = torch.randn(*shape[:-1], shape[-1], 2, dtype=torch.float64)[..., 0]
    torch.testing.assert_close(hadamard(strided), strided @ sylvester(shape[-1]) / math.sqrt(shape[-1]))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("size", [16, 512])
def test_types(dtype: torch.dtype, size: int) -> None:
    """Sixteen-bit types are summed in float32: one rounding of the result is all that they lose."""
    x = torch.randn(40, size).to(dtype)
    result = hadamard(x)
    assert result.dtype == dtype
    exact = x.double() @ sylvester(size) / math.sqrt(size)
    error = float((result.double() - exact).norm() / exact.norm())
    assert error < torch.finfo(dtype).eps * (1 if dtype.itemsize == 2 else 4)


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")  # torch's own, when forward mode loads
@pytest.mark.parametrize("size", [1, 8, 256])
def test_derivatives(size: int) -> None:
    """It is its own transpose; first and second derivatives, backward and forward."""
    x = torch.randn(2, size, dtype=torch.float64, requires_grad=True)
    if size <= 8:
        torch.autograd.gradcheck(hadamard, x, check_forward_ad=True, check_batched_grad=True)
        torch.autograd.gradgradcheck(hadamard, x)
    weights, matrix = torch.randn(2, size, dtype=torch.float64), sylvester(size) / math.sqrt(size)
    gradient = torch.autograd.grad((hadamard(x).pow(3) * weights).sum(), x, create_graph=True)[0]
    torch.testing.assert_close(gradient, (3 * (x @ matrix).square() * weights) @ matrix)
    (second,) = torch.autograd.grad((gradient * weights).sum(), x)
    expected = (6 * (x @ matrix) * weights * (weights @ matrix)) @ matrix
    torch.testing.assert_close(second, expected)
    tangent = torch.func.jvp(hadamard, (x.detach(),), (weights,))[1]
    torch.testing.assert_close(tangent, weights @ matrix)


@pytest.mark.parametrize("size", [8, 512])
def test_transformations_of_functions(size: int) -> None:
    x = torch.randn(size, 3, 2, dtype=torch.float64)
    rows = x.permute(2, 1, 0)
    torch.testing.assert_close(torch.func.vmap(hadamard, in_dims=2)(x.transpose(0, 1)), hadamard(rows))
    twice = torch.func.vmap(torch.func.vmap(hadamard, in_dims=1), in_dims=2)(x)
    torch.testing.assert_close(twice, hadamard(rows))
    cubes = torch.func.vmap(torch.func.grad(lambda row: hadamard(row).pow(3).sum()))(rows[0])
    torch.testing.assert_close(cubes, hadamard(3 * hadamard(rows[0]).square()))


def test_what_is_kept_is_an_ordinary_tensor() -> None:
    """Made first inside inference mode, `vmap` of `grad`, or a fake mode, and used outside."""
    x = torch.randn(40, 512)
    expected = hadamard(x)

    def inside() -> None:
        torch.func.vmap(torch.func.grad(lambda row: hadamard(row).sum()))(x)

    def inference() -> None:
        with torch.inference_mode():
            hadamard(x)

    def fake() -> None:
        from torch._subclasses.fake_tensor import FakeTensorMode

        with FakeTensorMode():
            hadamard(torch.randn(40, 512))

    for first in (inside, inference, fake):
        sign_matrices._MATRICES.clear()
        first()
        assert all(type(kept) is Tensor and not kept.is_inference() for kept in sign_matrices._MATRICES.values())
        leaf = x.clone().requires_grad_()
        hadamard(leaf).square().sum().backward()
        torch.testing.assert_close(hadamard(x), expected)
        torch.testing.assert_close(leaf.grad, 2 * x, rtol=1e-4, atol=1e-4)


def test_the_result_is_new_memory() -> None:
    for size in (1, 8, 512):
        x = torch.randn(40, size)
        before = x.clone()
        hadamard(x).zero_()
        assert torch.equal(x, before)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # the compiler's own
def test_compile() -> None:
    torch._dynamo.reset()
    compiled = torch.compile(hadamard, fullgraph=True)
    for size in (16, 512, 4096):
        x = torch.randn(8, size, requires_grad=True)
        result = compiled(x)
        torch.testing.assert_close(result, hadamard(x), rtol=1e-5, atol=1e-5)
        result.pow(3).sum().backward()
        torch.testing.assert_close(x.grad, hadamard(3 * hadamard(x.detach()).square()), rtol=1e-4, atol=1e-4)


def test_bad_input() -> None:
    with pytest.raises(ValueError, match=r"is 12, not a power of two; pad .* to 16 .*WalshHadamard pads automatically"):
        hadamard(torch.randn(2, 12))
    with pytest.raises(ValueError, match=r"is 0, not a power of two"):
        hadamard(torch.randn(2, 0))
    with pytest.raises(ValueError, match=r"scalar; give at least one dimension"):
        hadamard(torch.tensor(1.0))
    for wrong in (torch.ones(4, dtype=torch.int64), torch.ones(4, dtype=torch.complex64), [1.0, 2.0]):
        with pytest.raises(TypeError, match=r"real floating-point numbers, such as|give a tensor"):
            hadamard(wrong)  # type: ignore[arg-type]


def test_powers_of_two() -> None:
    assert [next_power_of_two(size) for size in (1, 2, 3, 4, 5, 1000, 1024, 1025)] == [1, 2, 4, 4, 8, 1024, 1024, 2048]
    assert transforms.hadamard is hadamard
