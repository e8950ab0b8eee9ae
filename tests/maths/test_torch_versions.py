"""What differs between versions of torch is the same through the functions that hide it."""

import pytest
import torch
from torch import nn
from torch.utils import _pytree as pytree

from bayesify.maths.torch_versions import cpu_float32_precisions, has_global_hooks, structure_key


@pytest.mark.parametrize(
    "register", ["forward_hook", "forward_pre_hook", "full_backward_hook", "full_backward_pre_hook"]
)
def test_a_hook_of_all_modules_is_seen(register):
    assert not has_global_hooks()
    handle = getattr(nn.modules.module, f"register_module_{register}")(lambda *arguments: None)
    try:
        assert has_global_hooks()
    finally:
        handle.remove()
    assert not has_global_hooks()


def test_full_precision_is_the_default():
    assert set(cpu_float32_precisions()) <= {"none", "ieee"}


def test_structures_are_told_apart():
    one = torch.zeros(1)
    examples = [one, (one, one), (one, None), [one, one], {"a": one}, {"b": one}, {"a": (one, one)}]
    keys = {structure_key(pytree.tree_flatten(example)[1]) for example in examples}
    assert len(keys) == len(examples) - 1  # None is a leaf
    assert structure_key(pytree.tree_flatten((one, one))[1]) in keys
