"""Weights that become tensors when they are asked for."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

import bayesify
from bayesify import likelihoods, posteriors
from bayesify.maths.fused_draws import ALIGNMENT_NUMBERS, Joined
from bayesify.posteriors.common.base import DrawRequest
from bayesify.posteriors.common.gpu_draws import CapturedDraw, _in_wide_numbers
from bayesify.running.inputs_and_outputs import at, each
from bayesify.weights.layout import PlacedWeights


def weights() -> PlacedWeights:
    flat = torch.arange(40.0)
    return PlacedWeights(["a", "b"], [(flat, (3, 2, 2), (4, 2, 1), 0), (flat, (3, 4), (4, 1), 16)])


def test_tensors_and_draws() -> None:
    found = weights()
    assert list(found) == ["a", "b"]
    assert len(found) == 2
    assert torch.equal(found["a"], torch.arange(12.0).view(3, 2, 2))
    assert found["a"] is found["a"]
    expected = {name: value.clone() for name, value in weights().items()}
    for index in (0, 2, -1):
        for made in (weights(), found):  # before and after a tensor was made
            one = at(made, index)
            assert all(torch.equal(one[name], expected[name][index]) for name in expected)
    assert [draw["b"][0].item() for draw in each(weights())] == [16.0, 20.0, 24.0]
    assert at(weights(), slice(0, 2))["b"].shape == (2, 4)


@pytest.mark.parametrize("num_draws", [1, 3])
def test_those_with_rows_of_one_kind_are_cut_together(num_draws: int) -> None:
    shapes = [
        (),
        (7,),
        (64,),
        (5, 64),
        (2, 64),
        (128,),
        (0, 64),
        (3, 64),
        (192,),
        (4, 64),
        (1, 64),
        (64,),
        (64,),
        (3, 5),
    ]
    layouts = [(shape, torch.empty(shape).stride()) for shape in shapes]
    layouts += [((8, 16, 2, 2), (64, 1, 32, 16)), ((4, 16, 2, 2), (64, 4, 2, 1))]
    joined = Joined([((num_draws, *shape), (math.prod(shape), *stride)) for shape, stride in layouts])
    assert [len(cut) for cut in joined.cuts] == [5, 5]
    values = [torch.randn(num_draws, *shape) for shape, _ in layouts]
    flat = joined.join(values, torch.zeros(ALIGNMENT_NUMBERS))
    assert flat.numel() == joined.total
    assert not any(start % ALIGNMENT_NUMBERS for start in joined.starts)
    assert all(map(torch.equal, joined.views(flat), values))
    made = PlacedWeights([str(at) for at in range(len(values))], joined.places(flat))
    for index in range(-1, num_draws):
        for one, value, (_, stride) in zip(made.at(index).values(), values, layouts, strict=True):
            assert torch.equal(one, value[index])
            assert one.untyped_storage().data_ptr() == flat.data_ptr()
            assert one.stride() == stride
    made["2"] = values[2] + 1
    assert torch.equal(made.at(0)["2"], values[2][0] + 1)
    assert torch.equal(made.at(0)["3"], values[3][0])


def test_they_can_be_replaced() -> None:
    found = weights()
    found["a"] = torch.zeros(3, 1)
    assert found.at(1)["a"].shape == (1,)
    del found["b"]
    assert list(found) == ["a"]
    with pytest.raises(KeyError):
        found["b"]


def test_captured_draws_are_copied_as_the_network_has_them() -> None:
    """What a graph does at its end, without one: types, layouts and order of the network's own weights."""
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Linear(4, 5).bfloat16()).to(memory_format=torch.channels_last)
    bnn = bayesify.bayesianize(net, posteriors.InducingWeights(2, 2), likelihood=likelihoods.Categorical())
    captured = object.__new__(CapturedDraw)
    request = DrawRequest(num_draws=2, prior=bnn.prior.draw(2))
    with torch.no_grad():
        weights, _ = bnn.posterior.draw(request)
        pieces = captured._joined(weights, bnn.layout)
    assert [piece.dtype for piece in pieces] == [torch.float32, torch.bfloat16]
    found = PlacedWeights(list(captured.places), [place for _, place in captured.places.values()])
    for name, view in found.items():
        assert view.data_ptr() in range(*(pieces[captured.places[name][0]][at:].data_ptr() for at in (0, -1)), 2)
        assert torch.equal(view, weights[name].to(view.dtype))
        assert view.dtype == net.get_parameter(name).dtype
        assert view[0].stride() == net.get_parameter(name).stride()
    again = object.__new__(CapturedDraw)
    assert [piece is other for piece, other in zip(again._joined(found, bnn.layout), pieces, strict=True)] == [True] * 2
    assert again.places == captured.places  # what a kernel has placed stays where it is


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_with_gaps_are_copied_in_wide_numbers(dtype: torch.dtype) -> None:
    source = torch.randn(3, 5, 24).to(dtype)[..., :16]
    target, rows = torch.zeros(3, 5, 16, dtype=dtype), source.shape[-1] * source.element_size() // 16
    wide = _in_wide_numbers(target, source)
    assert [part.shape[-1] for part in wide] == [rows, rows]
    torch._foreach_copy_(*([part] for part in wide))
    assert torch.equal(target, source)
    for other in (source[..., 1:9], source[..., :7], source.transpose(0, 1)[:, :, 0], source.contiguous()):
        same = _in_wide_numbers(torch.zeros(other.shape, dtype=dtype), other)
        assert [part.dtype for part in same] == [dtype, dtype]
