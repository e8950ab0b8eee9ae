"""Nested data without pickle."""

from collections import Counter

import numpy as np
import pytest
import torch

from bayesify.storage import tensor_files


def test_nested_data_comes_back(tmp_path):
    shared = torch.randn(4, 3)
    value = {
        "numbers": [1, -2.5, float("inf"), True, None, "text", 2**70, 0.1],
        "pair": (0.9, (1, [2])),
        0: {"step": torch.tensor(3.0), "1": torch.zeros(0, 2)},
        1: {1: torch.ones(1), "1": torch.zeros(1)},
        "a.b": torch.ones(2),
        "a": {"b": torch.zeros(2)},
        "counter": Counter({2: 1, 3: 4}),
        "views": [shared.T, shared[1:], shared.to(torch.bfloat16), shared > 0],
        "$odd": {"$tensor": "no tensor"},
        "numpy": np.float64(0.1),
    }
    packed, tensors = tensor_files.pack(value)
    path = tmp_path / "x.safetensors"
    tensor_files.write(path, "checkpoint", {"value": packed}, tensors)
    header, stored = tensor_files.read(path, "checkpoint")
    back = tensor_files.unpack(header["value"], stored)
    assert back["numbers"] == value["numbers"]
    assert back["pair"] == value["pair"]
    assert isinstance(back["counter"], Counter)
    assert back["counter"] == value["counter"]
    assert back["$odd"] == value["$odd"]
    assert back["numpy"] == 0.1
    pairs = [
        (back[1][1], 1.0),
        (back[1]["1"], 0.0),
        (back["a.b"], 1.0),
        (back["a"]["b"], 0.0),
        (back[0]["step"], 3.0),
    ]
    for tensor, expected in pairs:
        assert bool((tensor == expected).all())
    assert back[0]["1"].shape == (0, 2)
    for one, other in zip(back["views"], value["views"], strict=True):
        assert one.dtype == other.dtype
        assert torch.equal(one, other)


def test_what_needs_pickle_is_named():
    with pytest.raises(TypeError, match=r"state.groups.0.hook is function"):
        tensor_files.pack({"groups": [{"hook": lambda: None}]})


@pytest.mark.parametrize("size", [3, 300], ids=["same size", "smaller"])
def test_a_file_that_is_replaced_while_it_is_read(tmp_path, monkeypatch, size):
    """safetensors opens the path a second time for the tensors; here another file has replaced the first one by then."""
    old, new = tmp_path / "old", tmp_path / "new"
    tensor_files.write(old, "model", {"name": "old"}, {"w": torch.zeros(size)})
    tensor_files.write(new, "model", {"name": "new"}, {"w": torch.ones(3)})
    open_tensors = torch.UntypedStorage.from_file

    def replace_first(*args, **kwargs):
        if new.exists():
            new.replace(old)
        return open_tensors(*args, **kwargs)

    monkeypatch.setattr(torch.UntypedStorage, "from_file", replace_first)
    header, tensors = tensor_files.read(old, "model")
    assert not new.exists()
    assert header["name"] == "new"
    assert torch.equal(tensors["w"], torch.ones(3))
