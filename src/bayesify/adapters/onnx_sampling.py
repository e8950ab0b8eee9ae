"""A posterior inside an ONNX graph: its parameters, the operations that make a draw, and standard normal numbers from a seed."""

import copy
import operator
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, fx, nn
from torch.fx.experimental.proxy_tensor import make_fx

from bayesify.arguments.installing import load
from bayesify.maths.noise import NoiseSource
from bayesify.network import BayesianNetwork
from bayesify.running.caching import settled
from bayesify.running.inputs_and_outputs import select_output
from bayesify.weights.catalog import put_in

MIN_INT8_ELEMENTS = 1024
"""Stored matrices with at least this many elements are rounded to 8 bits."""
SEED_INPUT = "seed"
NOISE_INPUT = "noise"

_VIEW_OPERATORS = (
    *("t", "transpose", "permute", "unsqueeze", "squeeze", "view", "_unsafe_view", "reshape"),
    *("expand", "select", "slice"),
)
_MISSING_OPERATORS = ("linalg", "cholesky", "triangular_solve", "_standard_gamma", "randperm", "eigh", "inverse")
_HASH_MULTIPLIERS = (0x7FEB352D, 0x846CA68B)
_GOLDEN_RATIO_BITS = 0x9E3779B9

_DECOMPOSITIONS: dict[Any, Any] = {
    getattr(torch.ops.aten, name).Scalar: lambda *lists: [torch.addcmul(*each) for each in zip(*lists, strict=True)]
    for name in ("_foreach_addcmul",)
}


class GivenNoise(NoiseSource):
    """A noise source that hands out given standard normal numbers in order. For uniform noise, the normal distribution function
    maps the given numbers to numbers between 0 and 1. The given numbers form a vector [K]. If no numbers are given, the source
    only counts how many numbers a draw needs."""

    def __init__(self, values: Tensor | None) -> None:
        super().__init__(None)
        self.values, self.taken = values, 0

    def normal(self, count: int, like: Tensor) -> Tensor:
        """See `NoiseSource`."""
        start, self.taken = self.taken, self.taken + count
        if self.values is None:
            return torch.zeros(count, dtype=like.dtype, device=like.device)
        return self.values[start : self.taken].to(like)

    def uniform(self, count: int, device: torch.device) -> Tensor:
        """See `NoiseSource`."""
        values: Tensor = torch.special.ndtr(self.normal(count, torch.zeros(1, device=device)))
        return values

    def permutation(self, count: int, device: torch.device) -> Tensor:
        """Raises `ValueError`, because ONNX has no operator for random permutations."""
        raise ValueError(
            "export_onnx: an ONNX file cannot choose a random ensemble member for a draw; use sample=False"
        )

    def gamma(self, shape: Tensor) -> Tensor:
        """Raises `ValueError`, because ONNX has no operator for gamma-distributed numbers."""
        raise ValueError("export_onnx: the prior draws random scales, for which ONNX has no operator; use sample=False")


class SamplingGraph(nn.Module):
    """A module that makes one draw from a vector of standard normal numbers and runs the network with this draw.

    Quantities that depend only on the parameters (factors, standard deviations) are computed once and stored. Operations that
    depend on noise stay in the graph. An exported file therefore contains as many numbers as the posterior. `keys` are the names
    of the keyword inputs, in the order in which `forward` takes them. The network must be on the CPU.
    """

    def __init__(self, bnn: BayesianNetwork, output: str | int | None, keys: tuple[str, ...]) -> None:
        super().__init__()
        self.drawing, self.names, self.noise_size = _trace(bnn)
        self.network = copy.deepcopy(bnn.network)
        drawn = bnn.draw(1).materialize().weights
        put_in(self.network, list(bnn.weights.values()), {name: value[0] for name, value in drawn.items()})
        self._output, self._keys = output, keys
        self.requires_grad_(False)
        self.eval()

    def forward(self, noise: Tensor, *inputs: Tensor) -> Tensor:
        """Output [B, ...] of the network for the draw made from noise [K]."""
        return self.run(self.draw(noise), *inputs)

    def draw(self, noise: Tensor) -> dict[str, Tensor]:
        """The draw made from noise [K]: a dictionary from names to weights."""
        return dict(zip(self.names, self.drawing(noise.clone()), strict=True))  # clone, because drawing works in place

    def run(self, weights: dict[str, Tensor], *inputs: Tensor) -> Tensor:
        """Output [B, ...] of the network with given weights."""
        args, kwargs = ((), dict(zip(self._keys, inputs, strict=True))) if self._keys else (inputs, {})
        return select_output(torch.func.functional_call(self.network, weights, args, kwargs), self._output)


def _trace(bnn: BayesianNetwork) -> tuple[fx.GraphModule, list[str], int]:
    """Return three things: a graph that maps noise [K] to one draw of the weights; the weights' names; and K."""
    for part in bnn.posteriors:
        if part.runs_network:
            raise ValueError(
                f"export_onnx: {type(part).__name__} must run the network to make a draw, which an ONNX file cannot "
                "do; use sample=False"
            )
    counter = GivenNoise(None)
    with settled():  # reuse cached quantities without comparing parameters again
        drawn = bnn.draw(1, generator=counter)
        if drawn.buffers is not None:
            raise ValueError(
                "export_onnx: an ONNX file cannot compute batch statistics for each draw; use sample=False"
            )
        if not counter.taken:
            raise ValueError("export_onnx: all draws are equal, so the file has nothing to draw; use sample=False")

        def draw(values: Tensor) -> list[Tensor]:
            weights = bnn.draw(1, generator=GivenNoise(values)).materialize().weights
            return [weight[0] for weight in weights.values()]

        like = next(bnn.posteriors.parameters())
        traced = make_fx(draw, _DECOMPOSITIONS)(torch.zeros(counter.taken, dtype=torch.float32, device=like.device))
    return _fold(_apart(traced)), list(drawn.weights), counter.taken


def _apart(traced: fx.GraphModule) -> fx.GraphModule:
    """Change the graph of a draw so that each piece of the noise is copied before it is used.

    A draw changes its pieces of the noise in place. Without the copies, the exported graph, which has no in-place
    operations, would rewrite the whole noise vector for each piece.
    """
    split = torch.ops.aten.split_with_sizes.default
    cuts = (torch.ops.aten.slice.Tensor, split, operator.getitem)
    of_noise = {node for node in traced.graph.nodes if node.op == "placeholder"}
    for node in [node for node in traced.graph.nodes if node.target in cuts]:
        if node.args[0] not in of_noise:
            continue
        of_noise.add(node)
        if node.target is split:
            continue
        users = [user for user in node.users if user.target not in cuts]
        with traced.graph.inserting_after(node):
            own = traced.graph.call_function(torch.ops.aten.clone.default, (node,))
        for user in users:
            user.replace_input_with(node, own)
    traced.recompile()
    return traced


def _fold(traced: fx.GraphModule) -> fx.GraphModule:
    """Change the graph so that everything that does not depend on its inputs is computed once and stored.

    Views of stored tensors are not computed in advance, because a matrix and its transpose would then be stored twice.
    """
    traced.graph.eliminate_dead_code()
    dependent: set[fx.Node] = set()
    values: dict[fx.Node, Any] = {}
    for node in traced.graph.nodes:
        if node.op == "placeholder" or any(source in dependent for source in node.all_input_nodes):
            dependent.add(node)
        elif node.op == "get_attr":
            values[node] = getattr(traced, node.target)
        elif node.op == "call_function":
            arguments = fx.map_arg((node.args, node.kwargs), values.__getitem__)
            values[node] = node.target(*arguments[0], **arguments[1])
    for node in list(traced.graph.nodes):
        name = str(getattr(node.target, "__name__", node.target))
        if node in dependent and any(part in name for part in _MISSING_OPERATORS):
            raise ValueError(
                f"export_onnx: a draw of this posterior needs {name.partition('.')[0]}, which ONNX lacks; use sample=False"
            )
        wanted = node.op == "call_function" and isinstance(values.get(node), Tensor) and not _is_view(node)
        if wanted and any(user in dependent or _is_view(user) for user in node.users):
            stored = f"folded_{len(traced._buffers)}"
            traced.register_buffer(stored, values[node].detach().clone(memory_format=torch.contiguous_format))
            with traced.graph.inserting_before(node):
                node.replace_all_uses_with(traced.graph.get_attr(stored))
    traced.graph.eliminate_dead_code()
    traced.recompile()
    traced.delete_all_unused_submodules()
    return traced


def _is_view(node: fx.Node) -> bool:
    return node.op == "call_function" and str(node.target).split(".")[-2:][0] in _VIEW_OPERATORS


def package(module: str) -> Any:
    """A module needed for the export."""
    return load(module, extra="onnx", owner="export_onnx")


def normals(seed: int, draw: int, count: int) -> npt.NDArray[np.float32]:
    r"""The standard normal numbers that an exported file computes for one of its draws, [count].

    Let n = ceil(count / 2). Each counter i below n is hashed to 32 bits with two keys, which depend on the seed and the draw. Let
    a and b be the lower and upper 16 bits of the hash. Then $r = \sqrt{-2 \log((a + 1/2) / 2^{16})}$ and $\theta = 2 \pi (b +
    1/2) / 2^{16}$ give $r \cos \theta$ (number i) and $r \sin \theta$ (number n + i; Box & Muller 1958). No number exceeds 4.85
    in absolute value. The seed is any 64-bit integer, and `draw` is the draw's index in the file.
    """
    pair = (count + 1) // 2
    with np.errstate(over="ignore"):
        words = np.array([seed & 0xFFFFFFFF, (seed >> 32) & 0xFFFFFFFF], dtype=np.uint32)
        first = _mixed(words[:1] + np.uint32(draw * _GOLDEN_RATIO_BITS & 0xFFFFFFFF), np.uint32(0))
        second = _mixed(words[1:] ^ first, np.uint32(_GOLDEN_RATIO_BITS))
        bits = _mixed(np.arange(pair, dtype=np.uint32) ^ first, second)
    lower, upper = (part.astype(np.float32) for part in (bits & np.uint32(0xFFFF), bits >> np.uint32(16)))
    radius = np.sqrt(np.float32(-2) * np.log((lower + np.float32(0.5)) * np.float32(2**-16)))
    angle = (upper + np.float32(0.5)) * np.float32(2 * np.pi * 2**-16)
    return np.concatenate([radius * np.cos(angle), radius * np.sin(angle)])[:count]


def _mixed(bits: npt.NDArray[np.uint32], key: npt.NDArray[np.uint32] | np.uint32) -> npt.NDArray[np.uint32]:
    """Hash of 32-bit integers. For each key, it maps different integers to different hashes. The multipliers are those of C.
    Wellons's lowbias32."""
    bits = (bits ^ (bits >> np.uint32(16))) * np.uint32(_HASH_MULTIPLIERS[0]) + key
    bits = (bits ^ (bits >> np.uint32(15))) * np.uint32(_HASH_MULTIPLIERS[1])
    return bits ^ (bits >> np.uint32(16))


def repeat(one: Any, moments: Any, inputs: Sequence[str], num_draws: int, count: int, *, from_seed: bool) -> Any:
    """Make an ONNX model that runs S draws. `one` is the ONNX model of a `SamplingGraph`. `moments` is an ONNX model
    that computes the results from the outputs [S, B, ...] of all draws.

    Stored numbers and operations that do not depend on noise occur once; all other operations are repeated S times. The K
    standard normal numbers of each draw come from an input `seed`, as in `normals`, or from an input `noise`, [S, K].
    """
    onnx = package("onnx")
    builder, (result,) = _Builder(onnx), one.graph.output
    vectors = [f"{NOISE_INPUT}_{index}" for index in range(num_draws)]
    if from_seed:
        builder.from_seed(vectors, count)
        taken = onnx.helper.make_tensor_value_info(SEED_INPUT, onnx.TensorProto.INT64, [])
    else:
        taken = onnx.helper.make_tensor_value_info(NOISE_INPUT, onnx.TensorProto.FLOAT, [num_draws, count])
        for index, name in enumerate(vectors):
            builder.node("Gather", NOISE_INPUT, builder.constant(np.int64(index)), axis=0, name=name)
    drawn = {NOISE_INPUT}
    for node in one.graph.node:
        if drawn.intersection(node.input):
            drawn.update(node.output)
        else:
            builder.nodes.append(node)
    for index, vector in enumerate(vectors):
        nodes = (node for node in one.graph.node if drawn.intersection(node.output))
        builder.copy(nodes, drawn, f"draw{index}_", {NOISE_INPUT: vector})
    axis = builder.constant(np.array([0], dtype=np.int64))
    each = [builder.node("Unsqueeze", f"draw{index}_{result.name}", axis) for index in range(num_draws)]
    stacked = builder.node("Concat", *each, axis=0)
    builder.constants.extend(one.graph.initializer)
    inside = {name for node in moments.graph.node for name in node.output}
    inside |= {entry.name for entry in moments.graph.initializer}
    renamed = {moments.graph.input[0].name: stacked} | {entry.name: entry.name for entry in moments.graph.output}
    builder.copy(moments.graph.node, inside, "moments_", renamed)
    for entry in moments.graph.initializer:
        builder.constants.append(onnx.TensorProto.FromString(entry.SerializeToString()))
        builder.constants[-1].name = f"moments_{entry.name}"
    given = [entry for entry in one.graph.input if entry.name in inputs]
    ends = [*given, taken], list(moments.graph.output)
    graph = onnx.helper.make_graph(builder.nodes, "bayesify", *ends, builder.constants)
    model = onnx.helper.make_model(graph, opset_imports=list(one.opset_import), ir_version=one.ir_version)
    onnx.checker.check_model(model)
    return model


def quantized(model: Any) -> Any:
    """The same model with its large matrices stored as 8-bit integers, with one scale per row."""
    onnx = package("onnx")
    builder, made = _Builder(onnx, "int8"), type(model).FromString(model.SerializeToString())
    for entry in model.graph.initializer:
        values = onnx.numpy_helper.to_array(entry)
        if values.dtype != np.float32 or values.ndim < 2 or values.size < MIN_INT8_ELEMENTS:
            builder.constants.append(entry)
            continue
        axis = 0 if values.shape[0] > 8 else 1  # a stored tensor may stack the matrices of several layers
        others = tuple(other for other in range(values.ndim) if other != axis)
        largest = np.abs(values).max(others, keepdims=True)
        scale = np.where(largest > 0, largest / np.float32(127), np.float32(1))
        stored = builder.constant(np.round(values / scale).astype(np.int8))
        builder.node("DequantizeLinear", stored, builder.constant(scale.reshape(-1)), axis=axis, name=entry.name)
    del made.graph.initializer[:], made.graph.node[:]
    made.graph.initializer.extend(builder.constants)
    made.graph.node.extend([*builder.nodes, *model.graph.node])
    onnx.checker.check_model(made)
    return made


class _Builder:
    def __init__(self, onnx: Any, prefix: str = "bayesify") -> None:
        self.onnx, self.prefix = onnx, prefix
        self.nodes: list[Any] = []
        self.constants: list[Any] = []

    def constant(self, value: np.ndarray | np.generic) -> str:
        name = f"{self.prefix}_constant_{len(self.constants)}"
        self.constants.append(self.onnx.numpy_helper.from_array(np.asarray(value), name))
        return name

    def node(self, kind: str, *inputs: str, name: str | None = None, **attributes: Any) -> str:
        name = name or f"bayesify_{len(self.nodes)}"
        self.nodes.append(self.onnx.helper.make_node(kind, list(inputs), [name], **attributes))
        return name

    def copy(self, nodes: Iterable[Any], inside: set[str], prefix: str, renamed: Mapping[str, str]) -> None:
        """Copy nodes. Each value name in `inside` gets the prefix, and each name in `renamed` is replaced."""

        def name(old: str) -> str:
            return renamed.get(old, prefix + old if old in inside else old)

        for node in nodes:
            made = self.onnx.NodeProto.FromString(node.SerializeToString())
            made.name = prefix + node.name
            made.input[:], made.output[:] = [name(old) for old in node.input], [name(old) for old in node.output]
            self.nodes.append(made)

    def shifted(self, bits: str, places: int) -> str:
        return self.node("BitShift", bits, self.constant(np.uint32(places)), direction="RIGHT")

    def mixed(self, bits: str, key: str) -> str:
        """See `_mixed`."""
        bits = self.node("BitwiseXor", bits, self.shifted(bits, 16))
        bits = self.node("Add", self.node("Mul", bits, self.constant(np.uint32(_HASH_MULTIPLIERS[0]))), key)
        bits = self.node("BitwiseXor", bits, self.shifted(bits, 15))
        bits = self.node("Mul", bits, self.constant(np.uint32(_HASH_MULTIPLIERS[1])))
        return self.node("BitwiseXor", bits, self.shifted(bits, 16))

    def from_seed(self, names: list[str], count: int) -> None:
        """For each name in `names`, add nodes that compute a vector of `count` standard normal numbers; see `normals`."""
        kinds, pair = self.onnx.TensorProto, (count + 1) // 2
        whole = self.node("Cast", SEED_INPUT, to=kinds.UINT64)
        upper = self.node("BitShift", whole, self.constant(np.uint64(32)), direction="RIGHT")
        words = [
            self.node("Cast", self.node("BitwiseAnd", part, self.constant(np.uint64(0xFFFFFFFF))), to=kinds.UINT32)
            for part in (whole, upper)
        ]
        limits = [self.constant(np.int64(value)) for value in (0, pair, 1)]
        counter = self.node("Cast", self.node("Range", *limits), to=kinds.UINT32)
        zero, golden = self.constant(np.uint32(0)), self.constant(np.uint32(_GOLDEN_RATIO_BITS))
        half, unit = self.constant(np.float32(0.5)), self.constant(np.float32(2**-16))
        turn, minus = self.constant(np.float32(2 * np.pi * 2**-16)), self.constant(np.float32(-2))
        ends = [self.constant(np.array([value], dtype=np.int64)) for value in (0, count)]
        for index, name in enumerate(names):
            shift = self.constant(np.uint32(index * _GOLDEN_RATIO_BITS & 0xFFFFFFFF))
            first = self.mixed(self.node("Add", words[0], shift), zero)
            second = self.mixed(self.node("BitwiseXor", words[1], first), golden)
            bits = self.mixed(self.node("BitwiseXor", counter, first), second)
            lower = self.node("BitwiseAnd", bits, self.constant(np.uint32(0xFFFF)))
            parts = (self.node("Cast", part, to=kinds.FLOAT) for part in (lower, self.shifted(bits, 16)))
            inside, around = (self.node("Add", part, half) for part in parts)
            logarithm = self.node("Log", self.node("Mul", inside, unit))
            radius = self.node("Sqrt", self.node("Mul", logarithm, minus))
            angle = self.node("Mul", around, turn)
            both = [self.node("Mul", radius, self.node(kind, angle)) for kind in ("Cos", "Sin")]
            self.node("Slice", self.node("Concat", *both, axis=0), *ends, name=name)
