"""The ways to write one operation: as a function, as a method, with keywords. They give the same moments or the same refusal."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import bayesify
from bayesify import likelihoods, posteriors
from bayesify.moments import Moments, NoRule
from benchmarks.moments_programs import MAX_MEAN_GAP, MAX_STD_RATIO

ROW = torch.linspace(0.5, 1.5, 5)
KERNEL = torch.linspace(-1, 1, 2 * 4 * 3).view(2, 4, 3)
PLACES = {"torch": torch, "Tensor": Tensor, "F": F}
DIM, POOL, OTHER, SIZE = [("dim", 1)], [("kernel_size", 2), ("stride", 2)], [("other", ROW)], [("output_size", 1)]
NORM = [("running_mean", ROW[:4]), ("running_var", ROW[:4]), ("weight", ROW[1:]), ("bias", ROW[:4])]
DROP = [("p", 0.5), ("training", False)]

ARGUMENTS: dict[str, list[tuple[str, Any]]] = {
    **dict.fromkeys(("add", "sub", "rsub", "mul", "multiply", "div", "true_divide"), OTHER),
    "mean": [("dim", 2), ("keepdim", True)],
    "sum": [("dim", (1, 2))],
    "pow": [("exponent", 2)],
    **dict.fromkeys(("avg_pool1d", "max_pool1d"), POOL),
    **dict.fromkeys(("adaptive_avg_pool1d", "adaptive_max_pool1d"), SIZE),
    "reshape": [("shape", (3, 20))],
    "view": [("size", (3, 20))],
    "flatten": [("start_dim", 1), ("end_dim", 2)],
    "unflatten": [("dim", 1), ("sizes", (2, 2))],
    "unsqueeze": DIM,
    "squeeze": DIM,
    "expand": [("size", (3, 4, 5))],
    "permute": [("dims", (0, 2, 1))],
    "transpose": [("dim0", 1), ("dim1", 2)],
    "unbind": DIM,
    "chunk": [("chunks", 2), ("dim", 1)],
    "split": [("split_size", 2), ("dim", 1)],
    "glu": DIM,
    "pad": [("pad", (1, 2)), ("mode", "constant"), ("value", 3.0)],
    "linear": [("weight", ROW.expand(2, 5))],
    "conv1d": [("weight", KERNEL), ("bias", ROW[:2]), ("stride", 2), ("padding", 1)],
    "batch_norm": NORM,
    "layer_norm": [("normalized_shape", (5,)), ("weight", ROW)],
    "group_norm": [("num_groups", 2)],
    "leaky_relu": [("negative_slope", 0.2)],
    "clamp": [("min", -0.5), ("max", 0.5)],
    "clamp_min": [("min", 0.1)],
    **dict.fromkeys(("dropout", "alpha_dropout", "dropout1d"), DROP),
}
"""What operations take after the units, by torch's names; nothing for the others."""

SPECIAL = {"cat", "concat", "embedding", "multi_head_attention_forward", "scaled_dot_product_attention"}
"""Operations whose first argument is not the units, and those of images."""


def random_units(channels: tuple[int, ...] = (-1, 1, 0)) -> Moments:
    mean, variance = torch.rand(2, 3, 4, 5, generator=torch.Generator().manual_seed(0))
    return Moments(mean - 0.4, 0.01 * variance, channels).clone()


def outcome(call: Callable[[Moments], Any], units: Moments) -> Any:
    """Means and variances of all parts, or the words of the refusal."""
    try:
        found = call(units)
    except NoRule as refusal:
        return str(refusal)
    parts = found if isinstance(found, tuple) else (found,)
    return [(part.mean_, part.variance_) for part in parts]


def forms(name: str) -> dict[str, Callable[[Moments], Any]]:
    """The ways to call an operation that torch has."""
    given = ARGUMENTS.get(name, [])
    values, found = [value for _, value in given], {}
    for place, owner in PLACES.items():
        function = getattr(owner, name, None)
        if function not in Moments.rules:
            continue
        for cut in range(len(given) + 1):
            words = dict(given[cut:])
            if name == "split" and place == "torch" and "split_size" in words:
                words["split_size_or_sections"] = words.pop("split_size")
            found[f"{place}, {cut} by place"] = lambda h, f=function, c=cut, w=words: f(h, *values[:c], **w)
        if hasattr(Tensor, name):
            found["method"] = lambda h: getattr(h, name)(*values)
        if place != "Tensor" and name != "split":
            found[f"{place}, all by name"] = lambda h, f=function: f(input=h, **dict(given))
    return found


NAMES = sorted({function.__name__.replace("log_s", "logs") for function in Moments.rules})
PLAIN = [n for n in NAMES if not n.endswith("_") and n not in SPECIAL and n[-2:] not in ("2d", "3d")]


@pytest.mark.parametrize("name", PLAIN)
def test_functions_methods_and_keywords_are_alike(name: str) -> None:
    calls = forms(name)
    channels = (-1, 0, 1) if name == "layer_norm" else (-1, 1, 0)
    outcomes = {way: outcome(call, random_units(channels)) for way, call in calls.items()}
    first = next(iter(outcomes.values()))
    assert not isinstance(first, str), first
    for way, found in outcomes.items():
        torch.testing.assert_close(found, first, msg=lambda text, way=way: f"{way}: {text}")


def test_functions_that_are_known_are_known_as_methods() -> None:
    """But for torch's own functions below those of `torch.nn.functional`, which take or give others and are refused."""
    below = {
        "adaptive_max_pool1d",
        "embedding",
        "batch_norm",
        "layer_norm",
        "group_norm",
        "dropout",
        "alpha_dropout",
        "selu",
        "celu",
    }
    for name, (place, owner) in itertools.product(NAMES, PLACES.items()):
        if hasattr(owner, name) and not (name in below and place == "torch"):
            assert getattr(owner, name) in Moments.rules, (place, name)


TRIES = ((), (1,), (2, 1), ((2, 2), 1), (ROW,))
UNSAFE = {"backward", "register_hook", "register_post_accumulate_grad_hook", "share_memory_", "set_", "resize_"}


def _parts(found: Any) -> list[Any]:
    return list(found) if isinstance(found, (tuple, list)) else [found]


def _has_tensors(found: Any) -> bool:
    return any(isinstance(part, Tensor) for part in _parts(found))


@pytest.mark.parametrize("owner", [Tensor, torch, F], ids=["Tensor", "torch", "F"])
def test_whatever_is_answered_has_the_shapes_of_plain_tensors(owner: Any) -> None:
    """Every method and function of one tensor: a result has the parts and shapes that the mean gives, and all are random."""
    known = torch.overrides.get_testing_overrides()
    for name in dir(owner):
        if name in UNSAFE or name.startswith(("_", "cudnn", "mkldnn", "miopen", "fbgemm", "quantize")):
            continue
        function = getattr(owner, name)
        if not callable(function) or (owner is not Tensor and function not in known):
            continue
        for args in TRIES:
            units = random_units()
            before = units.mean_.clone()
            try:
                found = getattr(units, name)(*args) if owner is Tensor else function(units, *args)
                expected = function(before, *args) if _has_tensors(found) else None
            except Exception:  # refused, or wrong arguments
                continue
            if expected is not None:
                assert [part.shape for part in _parts(found)] == [part.shape for part in _parts(expected)], (name, args)
                assert all(part.value_.mean.shape == part.shape for part in _parts(found)), (name, args)


def bayesian(net: nn.Module, std: float = 0.1) -> Any:
    return bayesify.bayesianize(net.eval(), posteriors.MeanField(init_std=std), likelihood=likelihoods.Gaussian(0.01))


class Net(nn.Module):
    """Layers and a function that uses them."""

    def __init__(self, function: Callable[..., Any], **layers: nn.Module) -> None:
        super().__init__()
        self.function, self.layers = function, nn.ModuleDict(layers)

    def forward(self, x: Tensor) -> Any:
        return self.function(x, *self.layers.values())


def heads(way: str) -> Callable[..., Tensor]:
    """Self-attention with one layer for queries, keys and values, cut apart in one of the usual ways."""

    def attention(x: Tensor, layer: nn.Module, last: nn.Module) -> Tensor:
        h, (rows, steps, _) = layer(x), x.shape
        if way == "chunk":
            parts = [part.view(rows, steps, 2, 4).transpose(1, 2) for part in h.chunk(3, -1)]
        elif way == "unbind":
            parts = h.view(rows, steps, 3, 2, 4).transpose(1, 3).unbind(2)
        else:
            cut = h.reshape(rows, steps, 3, 2, 4).permute(2, 0, 3, 1, 4)
            parts = [cut[0], cut[1], cut[2]]
        return last(F.scaled_dot_product_attention(*parts).transpose(1, 2).reshape(rows, steps, 8).mean(1))

    return attention


def test_ways_to_cut_queries_keys_and_values_apart_agree() -> None:
    x, found = torch.randn(3, 5, 8, generator=torch.Generator().manual_seed(0)), []
    for way in ("chunk", "unbind", "index"):
        torch.manual_seed(0)
        bnn = bayesian(Net(heads(way), layer=nn.Linear(8, 24), last=nn.Linear(8, 2)))
        found.append(bnn.predict(x, method="moments"))
    for one in found[1:]:
        torch.testing.assert_close(one.mean, found[0].mean)
        torch.testing.assert_close(one.epistemic, found[0].epistemic)


def _weights_of(x: Tensor, layer: nn.Module) -> Tensor:
    weights = layer(x, x, x)[1]
    return (weights.unsqueeze(-1) * x.unsqueeze(1)).sum(2)


def _scripted(x: Tensor) -> Tensor:
    return torch.relu(x) * 2


with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)
    SCRIPT = torch.jit.script(_scripted)


def _split_heads(h: Tensor) -> Tensor:
    return h.view(len(h), -1, 2, 4).transpose(1, 2)


REFUSED = {
    "attention weights": (
        _weights_of,
        lambda: nn.MultiheadAttention(8, 2, batch_first=True),
        "function of the attention weights",
    ),
    "attention weights alone": (
        lambda x, layer: layer(x, x, x)[1],
        lambda: nn.MultiheadAttention(8, 2, batch_first=True),
        "second output of attention has no means and variances",
    ),
    "attention of itself": (
        lambda x, layer: (lambda h: F.scaled_dot_product_attention(h, h, h))(layer(x)).mean(1),
        lambda: nn.Linear(8, 8),
        "the same random units",
    ),
    "attention of views": (
        lambda x, layer: (lambda h: F.scaled_dot_product_attention(*(_split_heads(h) for _ in range(3))))(layer(x)),
        lambda: nn.Linear(8, 8),
        "the same random units",
    ),
    "attention of normalized units": (
        lambda x, layer: (lambda h: F.scaled_dot_product_attention(h, F.layer_norm(h, (8,)), x.expand(len(x), 5, 8)))(
            layer(x)
        ),
        lambda: nn.Linear(8, 8),
        "the same random units",
    ),
    "script": (lambda x, layer: SCRIPT(layer(x)), lambda: nn.Linear(8, 2), "a TorchScript function is not supported"),
    "overflow": (lambda x, layer: torch.exp(200 * layer(x).mean(1) + 200), lambda: nn.Linear(8, 2), "is not finite"),
    "many outputs that meet themselves": (
        lambda x, layer: (lambda h: h[:, :, 1:] - h[:, :, :-1])(layer(x.repeat(1, 1, 20))),
        lambda: nn.Conv1d(5, 8, 3),
        "combined with themselves",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refusals_name_what_and_the_remedy(name: str) -> None:
    function, layer, words = REFUSED[name]
    torch.manual_seed(0)
    bnn = bayesian(Net(function, layer=layer()))
    with pytest.raises(ValueError, match=rf"method='moments' does not support .*{words}.*; use method='draws'"):
        bnn.predict(torch.randn(3, 5, 8), method="moments")


def test_outputs_without_an_axis_of_their_own() -> None:
    found = []
    for keep in (True, False):
        torch.manual_seed(0)
        bnn = bayesian(Net(lambda x, layer, keep=keep: layer(x).mean(1, keepdim=keep), layer=nn.Linear(8, 4)))
        found.append(bnn.predict(torch.ones(3, 8), method="moments"))
    assert found[1].mean.shape == (3,)
    torch.testing.assert_close(found[1].mean, found[0].mean.squeeze(1))
    torch.testing.assert_close(found[1].epistemic, found[0].epistemic.squeeze(1))


TOKENS = torch.tensor([[1] * 6, [1, 2, 1, 2, 1, 2], [3, 3, 3, 1, 1, 1], [0, 1, 2, 3, 4, 5]])


@pytest.mark.parametrize(("seed", "std", "norm_first"), [(0, 0.05, True), (2, 0.05, False), (3, 0.02, False)])
def test_repeated_tokens_have_finite_moments(seed: int, std: float, norm_first: bool) -> None:
    """Positions that are all the same have a correlation of 1, which rounding must not exceed."""
    torch.manual_seed(seed)
    layers = {"embed": nn.Embedding(11, 16)}
    layers["body"] = nn.TransformerEncoderLayer(16, 4, 32, dropout=0.0, batch_first=True, norm_first=norm_first)
    net = Net(lambda t, embed, body, last: last(body(embed(t)).mean(1)), **layers, last=nn.Linear(16, 3))
    assert bayesian(net, std).predict(TOKENS, method="moments").epistemic.isfinite().all()


@pytest.mark.parametrize("seed", [0, 3])
def test_the_largest_of_positions_that_are_alike(seed: int) -> None:
    """Tokens that repeat make positions that are the same, next to others that are not; bounds of the benchmark and three
    standard errors of n = 2,000 draws."""
    torch.manual_seed(seed)

    def pooled(t: Tensor, embed: nn.Module, conv: nn.Module, last: nn.Module) -> Tensor:
        return last(F.max_pool1d(conv(embed(t).transpose(1, 2)).relu(), 4).flatten(1))

    layers = {"embed": nn.Embedding(11, 8), "conv": nn.Conv1d(8, 8, 3), "last": nn.Linear(8, 2)}
    bnn, n = bayesian(Net(pooled, **layers), 0.05), 2000
    found = bnn.predict(TOKENS, method="moments")
    drawn = bnn.predict(TOKENS, n, generator=torch.Generator().manual_seed(0))
    std, margin = drawn.epistemic.sqrt(), 3 / n**0.5
    assert ((found.mean - drawn.mean).abs() / std).max() < MAX_MEAN_GAP + margin
    ratio = found.epistemic.sqrt() / std
    assert torch.maximum(ratio, 1 / ratio).max() < MAX_STD_RATIO * (1 + margin)
