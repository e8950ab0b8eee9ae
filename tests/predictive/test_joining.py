"""Joining the results of chunks agrees with `torch.cat`."""

from __future__ import annotations

import pytest
import torch

from bayesify.predictive.base import Joined


def test_other_types_and_shapes() -> None:
    for other in (torch.ones(1, 2, dtype=torch.float64), torch.ones(1, 1)):
        joined, parts = Joined(), [torch.zeros(3, 2), other]
        for part in parts:
            joined.add(part)
        if other.dtype == torch.float64:
            assert joined.all().dtype == torch.float64
            assert torch.equal(joined.all(), torch.cat(parts))
        else:
            with pytest.raises(RuntimeError, match="Sizes of tensors must match"):
                joined.all()


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("size", [0, 3, 12])
@pytest.mark.parametrize("lengths", [[12], [3, 3, 3, 3], [5, 7], [1] * 12, [8, 4, 0]])
@pytest.mark.parametrize("with_gradient", [None, 0, -1])
def test_the_result_is_that_of_cat(axis: int, size: int, lengths: list[int], with_gradient: int | None) -> None:
    parts = [torch.rand((length, 2) if axis == 0 else (2, length), dtype=torch.float64) for length in lengths]
    if with_gradient is not None:
        parts[with_gradient].requires_grad_()
    joined = Joined(axis, size)
    for part in parts:
        joined.add(part)
    found, expected = joined.all(), torch.cat(parts, axis)
    assert torch.equal(found, expected)
    assert found.requires_grad == expected.requires_grad
    assert found.untyped_storage().nbytes() == expected.untyped_storage().nbytes()
