"""Factors of augmented matrices: gradients, sizes that are filled up, draws in low precision."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import bayesify
from bayesify import likelihoods, posteriors
from bayesify.maths import matheron
from bayesify.maths.matheron import Augmented, Factors, GroupDraw, draw_group, factorize
from bayesify.posteriors.inducing_weights.posterior import InducingWeights


def parts(*sizes: tuple[int, int, int]) -> list[Tensor]:
    """Z of groups of matrices, [G, M, d] each."""
    generator = torch.Generator().manual_seed(len(sizes))
    return [torch.randn(size, generator=generator, dtype=torch.float64, requires_grad=True) for size in sizes]


def test_gradients_and_their_gradients() -> None:
    z = parts((2, 6, 9), (3, 4, 3))  # the second has more rows than columns, and is filled up to 6 rows
    d = (torch.rand(5, 6, dtype=torch.float64) + 0.1).requires_grad_()

    def factors(d: Tensor, *z: Tensor) -> tuple[Tensor, ...]:
        whole = torch.cat([d[:2], matheron._filled(d[2:, :4], 6, 1.0, axes=1)])
        inverse, root, tril = matheron._Triangles.apply(whole, *z)
        return inverse.tril(), root, tril.tril()

    assert torch.autograd.gradcheck(factors, (d, *z), fast_mode=True)
    assert torch.autograd.gradgradcheck(factors, (d, *z), fast_mode=True)
    alone = torch.func.vmap(torch.func.grad(lambda d: matheron._Triangles.apply(d, z[0].detach())[0].sum()))
    assert alone(torch.rand(3, 2, 6, dtype=torch.float64) + 0.1).isfinite().all()


def test_sides_of_other_sizes_are_filled_up() -> None:
    """As on a GPU: one Cholesky for all sides of all blocks gives what one for each gives."""

    class Elsewhere(Tensor):
        is_cuda = True

    def all_of(blocks: list[Factors]) -> list[Tensor]:
        names = ("row_rest", "row_tril", "col_rest", "col_tril")
        reaches = [reach for block in blocks for reach in (*block.row_reach, *block.col_reach)]
        return [torch.as_tensor(part) for part in [*reaches, *(getattr(b, name) for b in blocks for name in names)]]

    def blocks(wrap: Any) -> list[Augmented]:
        ones = [torch.ones(size, dtype=torch.float64) for size in ((3, 6), (3, 5), (1, 2), (1, 3))]
        first = Augmented(parts((2, 6, 9), (1, 6, 4)), parts((2, 5, 7), (1, 5, 8)), wrap(ones[0]), ones[1])
        return [first, Augmented(parts((1, 2, 4)), parts((1, 3, 5)), ones[2], ones[3])]

    plain = all_of(factorize(blocks(lambda d: d)))
    filled = all_of(factorize(blocks(lambda d: d.as_subclass(Elsewhere))))
    for one, other in zip(plain, filled, strict=True):
        torch.testing.assert_close(one, other.as_subclass(Tensor), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("length", [11, 12, 14])
def test_products_of_long_rows_in_pieces(monkeypatch: Any, length: int) -> None:
    """As on a GPU: rows of 11 to 14 numbers, cut into two or three pieces of four to six numbers."""
    z, more = parts((2, 3, length), (2, 4, length))
    inverse = torch.randn(2, 3, 3, dtype=torch.float64, requires_grad=True)
    expected = z @ more.mT, inverse @ z
    monkeypatch.setattr(matheron, "STACKS_ON", ("cpu",))
    monkeypatch.setattr(matheron, "PIECE", 4)
    monkeypatch.setattr(matheron, "MIN_PIECES", 2)
    assert matheron._is_cut(z)
    assert not matheron._is_cut(z[..., :7])
    assert not matheron._is_cut(z.expand(2**16, 2, 3, length))
    for one, other in zip((matheron._outer(z, more), matheron._times_long(inverse, z)), expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)
    assert torch.autograd.gradcheck(matheron._times_long, (inverse, z), fast_mode=True)
    assert torch.autograd.gradgradcheck(matheron._times_long, (inverse, z), fast_mode=True)
    stacked = torch.stack([inverse, 2 * inverse])
    by_left = torch.func.grad(lambda left: matheron._times_long(left, z).square().sum())
    torch.testing.assert_close(torch.func.vmap(by_left)(stacked)[1], by_left(stacked[1]), rtol=1e-12, atol=1e-12)
    single = [part.detach().float().requires_grad_() for part in (inverse, z)]
    with torch.autocast("cpu", torch.bfloat16):
        product = matheron._times_long(*single)
    torch.testing.assert_close(product, (single[0] @ single[1]))
    product.sum().backward()  # outside autocast, as in training
    torch.testing.assert_close(single[0].grad, single[1].sum(-1, keepdim=True).mT.expand(2, 3, 3))


def test_draws_of_low_precision(monkeypatch: Any) -> None:
    """They differ from draws that are rounded at the end by no more than a few such roundings."""
    net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Flatten(), nn.Linear(32, 50), nn.Linear(50, 7)).bfloat16()
    posterior = posteriors.InducingWeights(8, 8, init_lambda=0.5)
    bnn = bayesify.bayesianize(net, posterior, likelihood=likelihoods.Categorical())
    with torch.no_grad():
        plain = bnn.draw(3, generator=torch.Generator().manual_seed(1)).weights
        monkeypatch.setattr(InducingWeights, "_low_precision", lambda *_: torch.bfloat16)
        low = bnn.draw(3, generator=torch.Generator().manual_seed(1)).weights
    for name, weight in plain.items():
        assert low[name].dtype == weight.dtype == torch.bfloat16
        error = (low[name].float() - weight.float()).std() / weight.float().std()
        assert float(error) < 3 * 2**-8  # a rounding is up to 2^-9 of a number; three products and the sum are rounded


@pytest.mark.parametrize("sizes", [1, 3])
def test_gradients_of_draws(sizes: int) -> None:
    """Written out, once and twice, against those of torch; `sizes`: of the noise, one or one for each draw."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(2, 4, 6), (2, 5, 7), (2, 3, 4, 5), (2, sizes, 1, 1), (2, 5, 5), (2, 3, 6, 7), (2, 3, 6, 5)]
    given = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]
    learned = [part.requires_grad_() for part in given[:5]]

    def draw(*learned: Tensor) -> Tensor:
        return GroupDraw.apply(None, *learned, *given[5:])

    torch.testing.assert_close(draw(*learned), draw_group(*given), rtol=1e-12, atol=1e-12)
    assert torch.autograd.gradcheck(draw, learned, fast_mode=True)
    assert torch.autograd.gradgradcheck(draw, learned, fast_mode=True)


def test_gradients_of_low_precision() -> None:
    """Products of rounded numbers change draws and gradients by a few roundings, whole sums by as little."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(2, 6, 40), (2, 5, 33), (2, 3, 6, 5), (2, 1, 1, 1), (2, 5, 5), (2, 3, 40, 33), (2, 3, 40, 5)]
    given = [torch.randn(shape, generator=generator) for shape in shapes]
    learned = [part.requires_grad_() for part in given[:5]]
    through = torch.randn(2, 3, 40, 33, generator=generator).bfloat16().float()  # what comes back from autocast
    found = []
    for dtype in (None, torch.bfloat16):
        drawn = GroupDraw.apply(dtype, *given)
        assert drawn.dtype == torch.float32
        found.append([drawn.detach(), *torch.autograd.grad(drawn, learned, through)])
    for exact, low in zip(*found, strict=True):
        assert 0 < float((low - exact).norm() / exact.norm()) < 4 * 2**-9  # a rounding is up to 2^-9 of a number


@pytest.mark.parametrize("whiten", [True, False])
def test_a_stack_of_all_layers_is_each_layer_by_itself(monkeypatch: Any, whiten: bool) -> None:
    """As on a GPU: bound and gradients of a network whose layers have U of three sizes, in five groups."""
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Conv2d(1, 8, 3), nn.Conv2d(8, 8, 3), nn.Conv2d(8, 8, 3), nn.Flatten(), nn.Linear(32, 20), nn.Linear(20, 3)
    ).double()
    posterior = posteriors.InducingWeights(8, 10, whiten=whiten)
    bnn = bayesify.bayesianize(net, posterior, likelihood=likelihoods.Categorical())
    x, y = torch.randn(5, 1, 8, 8, dtype=torch.float64), torch.tensor([0, 1, 2, 0, 1])
    used = []
    monkeypatch.setattr(
        matheron, "_factorize_stack", lambda blocks, made=matheron._factorize_stack: used.append(1) or made(blocks)
    )

    def bound() -> list[Tensor]:
        bnn.zero_grad()
        value = bnn.elbo(x, y, num_data=50, generator=torch.Generator().manual_seed(1))
        value.backward()
        return [value.detach(), *(parameter.grad.clone() for parameter in bnn.parameters())]

    exact = bound()
    assert not used
    monkeypatch.setattr(matheron, "STACKS_ON", ("cpu",))
    torch.testing.assert_close(bound(), exact, rtol=1e-8, atol=1e-8)
    assert used
    with torch.autocast("cpu", torch.bfloat16):  # which a backward pass may run under, too
        torch.testing.assert_close(bound()[0], exact[0], rtol=0.05, atol=0.05)
