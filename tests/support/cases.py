"""Kinds of leaf in small networks with data, and functions that make each registered posterior for a test."""

import copy
import functools
import inspect
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

import bayesify
from bayesify import BayesianNetwork, likelihoods
from bayesify.methods import METHODS, Method
from bayesify.posteriors import Posterior
from bayesify.running.inputs_and_outputs import as_tree, select_output

BATCH = 3


@dataclass(frozen=True)
class Case:
    """One kind of leaf inside a small network.

    Args:
        name: Id of the test.
        make: Function that makes the network.
        inputs: Function that makes B inputs: a tuple of positional inputs, or a dict of keyword inputs.
        selector: Selector that takes the leaf, if "everything" does not.
        vmap: Whether `vmap` can run the network.
        training: Whether to test the network in training mode.
        needs: Names that must be under the posterior.
    """

    name: str
    make: Callable[[], nn.Module]
    inputs: Callable[[int], Any]
    selector: str | None = None
    vmap: bool = True
    training: bool = False
    needs: tuple[str, ...] = field(default=())

    def network(self, dtype: torch.dtype = torch.float32) -> nn.Module:
        """A network with the same weights in every call."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(1)
            return self.make().to(dtype).train(self.training)

    def batch(self, size: int = BATCH, dtype: torch.dtype = torch.float32) -> Any:
        """The same inputs in every call."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(2)
            return cast(self.inputs(size), dtype)


def cast(tree: Any, dtype: torch.dtype) -> Any:
    """A tuple or dict with its floating-point tensors converted to another type."""

    def one(value: Any) -> Any:
        return value.to(dtype) if isinstance(value, Tensor) and value.is_floating_point() else value

    if isinstance(tree, dict):
        return {key: one(value) for key, value in tree.items()}
    return tuple(one(value) for value in tree)


def call(function: Callable[..., Any], inputs: Any) -> Any:
    """Call with a tuple of positional or a dict of keyword inputs."""
    return function(**inputs) if isinstance(inputs, dict) else function(*inputs)


def tensors(output: Any) -> list[Tensor]:
    """All tensors of an output, in order."""
    tree, _ = as_tree(output)
    if isinstance(tree, Tensor):
        return [tree]
    values = tree.values() if isinstance(tree, dict) else tree
    return [value for value in values if isinstance(value, Tensor)]


def targets(case: Case, dtype: torch.dtype = torch.float32) -> Tensor:
    """Finite regression targets that fit the network's output."""
    with torch.no_grad():
        output = select_output(call(case.network(dtype), case.batch(dtype=dtype)), None)
    return torch.linspace(-1, 1, output.numel(), dtype=dtype).reshape(output.shape)


# -- networks with more than a single leaf ---------------------------------------------------------------------------


class Bilinear(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Bilinear(3, 2, 4)

    def forward(self, left: Tensor, right: Tensor) -> Tensor:
        return self.mix(left, right)


class Bag(nn.Module):
    def __init__(self, mode: str = "mean") -> None:
        super().__init__()
        self.bag = nn.EmbeddingBag(6, 3, mode=mode)
        self.head = nn.Linear(3, 2)

    def forward(self, words: Tensor) -> Tensor:
        return self.head(self.bag(words))


class Recurrent(nn.Module):
    def __init__(self, kind: type[nn.RNNBase], **options: Any) -> None:
        super().__init__()
        self.core = kind(3, 4, batch_first=True, **options)
        width = options.get("proj_size") or 4
        self.head = nn.Linear(width * (2 if options.get("bidirectional") else 1), 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.core(x)[0].mean(1))


class Cell(nn.Module):
    def __init__(self, kind: type[nn.RNNCellBase]) -> None:
        super().__init__()
        self.cell = kind(3, 4)

    def forward(self, x: Tensor) -> Tensor:
        state: Any = None
        for step in x.unbind(1):
            state = self.cell(step, state)
        return state[0] if isinstance(state, tuple) else state


class Attention(nn.Module):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True, **options)

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return self.attention(query, key, value, need_weights=False)[0]


class SelfAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.attention(x, x, x, need_weights=False)[0]


@dataclass
class ModelOutput:
    """An output type as in transformer libraries: a loss that may be missing, and two tensors."""

    loss: Tensor | None
    logits: Tensor
    hidden: Tensor


class KeywordNetwork(nn.Module):
    """A text classifier called by keyword, which returns a dict or a dataclass."""

    def __init__(self, as_dataclass: bool) -> None:
        super().__init__()
        self.as_dataclass = as_dataclass
        self.embeddings = nn.Embedding(7, 4)
        self.norm = nn.LayerNorm(4)
        self.classifier = nn.Linear(4, 3)

    def forward(self, *, input_ids: Tensor, attention_mask: Tensor | None = None) -> Any:
        hidden = self.norm(self.embeddings(input_ids))
        mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        pooled = (hidden * mask.unsqueeze(-1)).sum(1) / mask.sum(1, keepdim=True)
        logits = self.classifier(pooled)
        if self.as_dataclass:
            return ModelOutput(None, logits, pooled)
        return {"logits": logits, "hidden": pooled}


class Custom(nn.Module):
    """A module with its own parameters: a matrix, a vector and a scalar."""

    def __init__(self) -> None:
        super().__init__()
        self.rotation = nn.Parameter(torch.randn(3, 3))
        self.shift = nn.Parameter(torch.randn(3))
        self.temperature = nn.Parameter(torch.tensor(1.5))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x @ self.rotation + self.shift) * self.temperature


class Tied(nn.Module):
    """An embedding whose table is also the weight of the output layer."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(5, 3)
        self.body = nn.Linear(3, 3)
        self.out = nn.Linear(3, 5)
        self.out.weight = self.embedding.weight

    def forward(self, words: Tensor) -> Tensor:
        return self.out(torch.tanh(self.body(self.embedding(words))).mean(1))


def nested() -> nn.Module:
    """Two linear layers inside nested containers."""
    return nn.Sequential(nn.Sequential(nn.Linear(3, 4), nn.Tanh()), nn.Sequential(nn.Sequential(nn.Linear(4, 2))))


def mlp(inputs: int = 3, hidden: int = 5, outputs: int = 2) -> nn.Module:
    """Two linear layers with a tanh between."""
    return nn.Sequential(nn.Linear(inputs, hidden), nn.Tanh(), nn.Linear(hidden, outputs))


def normed(norm: nn.Module) -> nn.Module:
    """A normalization layer between two linear layers."""
    return nn.Sequential(nn.Linear(3, 4), norm, nn.Tanh(), nn.Linear(4, 2))


# -- inputs ----------------------------------------------------------------------------------------------------------


def floats(*shape: int) -> Callable[[int], tuple[Tensor, ...]]:
    return lambda size: (torch.randn(size, *shape),)


def words(length: int, vocabulary: int) -> Callable[[int], tuple[Tensor, ...]]:
    return lambda size: (torch.randint(vocabulary, (size, length)),)


def encoder(**options: Any) -> nn.Module:
    return nn.TransformerEncoderLayer(4, 2, dim_feedforward=6, dropout=0.0, batch_first=True, **options)


CASES: dict[str, Case] = {
    case.name: case
    for case in [
        Case("linear", mlp, floats(3), needs=("0.weight", "0.bias", "2.weight")),
        Case("linear_no_bias", lambda: nn.Linear(3, 2, bias=False), floats(3), needs=("weight",)),
        Case("bilinear", Bilinear, lambda size: (torch.randn(size, 3), torch.randn(size, 2)), vmap=False),
        Case("conv1d", lambda: nn.Conv1d(4, 6, 3, groups=2, padding=2, padding_mode="circular"), floats(4, 5)),
        Case("conv2d", lambda: nn.Conv2d(2, 3, (2, 3), stride=2, padding=1, padding_mode="reflect"), floats(2, 4, 5)),
        Case("conv2d_no_bias", lambda: nn.Conv2d(4, 5, 3, bias=False), floats(4, 4, 4), needs=("weight",)),
        Case("conv2d_depthwise", lambda: nn.Conv2d(3, 6, 2, groups=3, dilation=2), floats(3, 4, 4)),
        Case("conv3d", lambda: nn.Conv3d(2, 2, (1, 3, 3), padding="same"), floats(2, 2, 3, 3)),
        Case("transposed1d", lambda: nn.ConvTranspose1d(4, 6, 3, stride=2, groups=2), floats(4, 3)),
        Case("transposed2d", lambda: nn.ConvTranspose2d(2, 3, 2, output_padding=1, stride=2), floats(2, 3, 3)),
        Case("transposed3d", lambda: nn.ConvTranspose3d(2, 4, (1, 2, 1), groups=2, dilation=2), floats(2, 2, 2, 2)),
        Case("embedding", lambda: nn.Sequential(nn.Embedding(6, 3), nn.Flatten(), nn.Linear(6, 2)), words(2, 6)),
        Case("embedding_bag", Bag, words(2, 6), vmap=False),
        Case("layer_norm", lambda: normed(nn.LayerNorm(4)), floats(3), "LayerNorm", needs=("1.weight", "1.bias")),
        Case("batch_norm", lambda: normed(nn.BatchNorm1d(4)), floats(3), needs=("0.weight",)),
        Case("batch_norm_training", lambda: normed(nn.BatchNorm1d(4)), floats(3), vmap=False, training=True),
        Case("batch_norm_asked", lambda: normed(nn.BatchNorm1d(4)), floats(3), "1", needs=("1.weight", "1.bias")),
        Case("lstm", lambda: Recurrent(nn.LSTM), floats(2, 3), vmap=False, needs=("core.weight_hh_l0",)),
        Case("lstm_projected", lambda: Recurrent(nn.LSTM, num_layers=2, proj_size=2), floats(2, 3), vmap=False),
        Case("gru", lambda: Recurrent(nn.GRU, bidirectional=True), floats(2, 3), vmap=False),
        Case("rnn", lambda: Recurrent(nn.RNN), floats(2, 3), vmap=False),
        Case(
            "lstm_cell", lambda: Cell(nn.LSTMCell), floats(2, 3), vmap=False, needs=("cell.weight_ih", "cell.bias_hh")
        ),
        Case("gru_cell", lambda: Cell(nn.GRUCell), floats(2, 3), vmap=False),
        Case("attention", SelfAttention, floats(3, 4), vmap=False, needs=("attention.in_proj_weight",)),
        Case(
            "attention_kdim",
            lambda: Attention(kdim=3, vdim=2, add_bias_kv=True),
            lambda size: (torch.randn(size, 2, 4), torch.randn(size, 3, 3), torch.randn(size, 3, 2)),
            vmap=False,
            needs=("attention.q_proj_weight", "attention.k_proj_weight", "attention.bias_k"),
        ),
        Case("encoder", encoder, floats(3, 4), vmap=False, needs=("self_attn.in_proj_weight", "linear1.weight")),
        Case("encoder_training", lambda: encoder(norm_first=True), floats(3, 4), vmap=False, training=True),
        Case(
            "keywords_to_dict",
            lambda: KeywordNetwork(as_dataclass=False),
            lambda size: {"input_ids": torch.randint(7, (size, 4)), "attention_mask": torch.ones(size, 4).long()},
        ),
        Case(
            "keywords_to_dataclass",
            lambda: KeywordNetwork(as_dataclass=True),
            lambda size: {"input_ids": torch.randint(7, (size, 4))},
        ),
        Case("custom", Custom, floats(3), needs=("rotation", "shift", "temperature")),
        Case("tied", Tied, words(2, 5), needs=("embedding.weight", "out.bias")),
        Case("nested", nested, floats(3), needs=("0.0.weight", "1.0.0.bias")),
    ]
}

POSTERIORS: dict[str, Method] = {name: method for name, method in METHODS.items() if method.posterior is not None}

REFUSED: dict[str, frozenset[str]] = {
    "global_inducing": frozenset({
        "embedding", "embedding_bag", "layer_norm", "batch_norm_training", "batch_norm_asked", "lstm", "lstm_projected", "gru",
        "rnn", "lstm_cell", "gru_cell", "attention_kdim", "keywords_to_dict", "keywords_to_dataclass", "custom", "tied",
    }),
}  # fmt: skip
"""Kinds of leaf that a posterior refuses with a reason. All other posteriors take all kinds."""


def pairs(leaves: Iterable[str]) -> list[tuple[str, str]]:
    """Pairs of a posterior's name and the name of a leaf that it takes."""
    return [(name, leaf) for name in POSTERIORS for leaf in leaves if leaf not in REFUSED.get(name, ())]


def inducing_inputs(case: Case) -> dict[str, Any]:
    """Five inputs of the network that differ from its test inputs."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(4)
        return {"inputs": case.inputs(5)}


OPTIONS: dict[str, Callable[[Case], dict[str, Any]]] = {
    "global_inducing": inducing_inputs,
    "local_inducing": lambda case: {"points": 5},
    "inducing": lambda case: {
        "rows": 8,
        "cols": 8,
        "fit_to_layer": False,
        "balanced": True,
        "init_std": 1e-3,
        "init_lambda": 1e-4,
    },
    "walsh_hadamard": lambda case: {"init": "network"},
}
"""Arguments of a posterior that depend on the network, such as inducing inputs."""


def posterior(name: str, case: Case, **more: Any) -> Posterior:
    """A posterior by its registered name, with a spread that is large enough for tests."""
    method = POSTERIORS[name]
    assert method.posterior is not None
    options = {**method.options, **(OPTIONS[name](case) if name in OPTIONS else {}), **more}
    if "init_std" in inspect.signature(method.posterior.__init__).parameters:
        options.setdefault("init_std", 0.1)
    if name == "dropout":
        options.setdefault("rate", 0.3)
    made: Posterior = method.posterior(**options)
    return made


def convert(name: str, case: Case, dtype: torch.dtype = torch.float32, **more: Any) -> BayesianNetwork:
    """A Bayesian network for one posterior and one kind of leaf, with a Gaussian likelihood.

    All parameters of the posterior are disturbed, so that none has its initial value. The first call makes the network; later calls
    return copies, which takes a fraction of the time.
    """
    return copy.deepcopy(_converted(name, case, dtype, *sorted(more.items())))


@functools.cache
def _converted(name: str, case: Case, dtype: torch.dtype, *more: tuple[str, Any]) -> BayesianNetwork:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)  # independent of the order of tests
        made = posterior(name, case, **dict(more))
        choice: Any = made if case.selector is None else {case.selector: made}
        bnn = bayesify.bayesianize(case.network(dtype), choice, likelihood=likelihoods.Gaussian(noise=0.5))
    disturb(bnn)
    return bnn


@torch.no_grad()
def disturb(bnn: BayesianNetwork, size: float = 0.1) -> None:
    """Add normal numbers to every parameter of the posteriors."""
    generator = torch.Generator().manual_seed(3)
    for parameter in bnn.posteriors.parameters():
        parameter += size * torch.randn(parameter.shape, generator=generator).to(parameter)


def has_density(part: Posterior) -> bool:
    """Whether a posterior has a density, and its KL is a divergence."""
    return type(part).entropy is not Posterior.entropy


def can_be_prior(part: Posterior) -> bool:
    """Whether a family contains the prior."""
    return type(part).set_to_prior is not Posterior.set_to_prior


def close(actual: Any, expected: Any, dtype: torch.dtype = torch.float32) -> None:
    """Assert equality up to rounding: 1e-4 in float32, 1e-9 in float64, relative to the largest entry."""
    ours, theirs = tensors(actual), tensors(expected)
    assert len(ours) == len(theirs)
    for one, other in zip(ours, theirs, strict=True):
        tolerance = (1e-9 if dtype == torch.float64 else 1e-4) * (1 + float(other.abs().max()))
        torch.testing.assert_close(one, other, rtol=0, atol=tolerance)


def weights_close(actual: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float = 1e-5) -> None:
    """Assert that two weight dictionaries are equal up to rounding."""
    assert actual.keys() == expected.keys()
    for name, value in actual.items():
        torch.testing.assert_close(value, expected[name], rtol=tolerance, atol=tolerance, msg=f"{name} differs")


def generator(seed: int = 0) -> torch.Generator:
    """A seeded generator."""
    return torch.Generator().manual_seed(seed)


def logits_network(inputs: int = 3, classes: int = 4) -> nn.Module:
    """A classifier."""
    return nn.Sequential(nn.Linear(inputs, 6), nn.ReLU(), nn.Linear(6, classes))
