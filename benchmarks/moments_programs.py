"""Moments of one pass compared with draws, on generated networks.

    python -m benchmarks.moments_programs [--count 2000] [--first 0] [--part 0 2]

Each number makes a network of operations that `bayesify.moments` supports, and some that it refuses: layers, pooling,
normalization, activations, residual sums, products, views, operations in place, aliases, a layer used twice, attention, embeddings
with repeated tokens; with a posterior over all layers or some, and inputs that are rough, smooth or positive. Outputs count as
within bounds if their mean is within 0.2 standard deviations of the draws' mean, and their standard deviation within a factor of
1.35. Numbers from 100,000 on have further steps of tokens: `unbind`, the maximum over tokens, attention of units with themselves,
and attention weights. If three standard errors of 1,000 draws could change the answer, 8,000 draws are made.
"""

from __future__ import annotations

import json
import math
import random
import re
import statistics
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import bayesify
from bayesify import likelihoods, posteriors

from .runs import add_row, parser, read_rows
from .timing import record

MAX_MEAN_GAP, MAX_STD_RATIO = 0.2, 1.35
STAGES = (1000, 8000)
"""Numbers of draws. The second is used if the first leaves doubt."""

LATER = ("largest", "largest", "unbind", "heads", "itself", "weights")
FIRST_WITH_LATER = 100_000
"""First number whose network may have the later steps. Networks of smaller numbers stay unchanged."""

Step = Callable[[Tensor], Tensor]


class Program(nn.Module):
    """A sequence of steps with their layers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleDict()
        self.steps: list[tuple[str, Callable[..., Tensor], tuple[str, ...]]] = []
        self.head: nn.Module = nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        for _, step, names in self.steps:
            x = step(x, *(self.layers[name] for name in names))
        found: Tensor = self.head(x)
        return found


ACTIVATIONS: dict[str, Step] = {
    "relu": F.relu,
    "leaky_relu": lambda x: F.leaky_relu(x, 0.2),
    "tanh": torch.tanh,
    "gelu": F.gelu,
    "silu": F.silu,
    "sigmoid": torch.sigmoid,
    "softplus": F.softplus,
    "elu": F.elu,
    "hardtanh": F.hardtanh,
    "relu in place": lambda x: F.relu(x, inplace=True),
    "relu_": lambda x: x.relu_(),
}


def _alias(x: Tensor) -> Tensor:
    other = x
    other += 0.5
    return x


def _relu_alias(x: Tensor) -> Tensor:
    y = F.relu(x, inplace=True)
    return 0.5 * y + x


def _through_view(x: Tensor) -> Tensor:
    x.flatten(1).mul_(1.5)
    return x


def _part_in_place(x: Tensor) -> Tensor:
    x[:, :2] *= 2.0
    return x


def _plain_in_place(x: Tensor) -> Tensor:
    total = torch.zeros(x.shape, dtype=x.dtype, device=x.device)
    other = total
    total += x
    return other + x


SELF: dict[str, Step] = {
    "h * h": lambda x: 0.3 * x * x,
    "h - 0.9 h": lambda x: x - 0.9 * x,
    "h + h": lambda x: x + x,
    "h * sigmoid(h)": lambda x: x * torch.sigmoid(x),
    "relu(h) + h": lambda x: F.relu(x) + x,
    "1 - h": lambda x: 1 - x,
    "-h / 3": lambda x: -x / 3,
    "h += 0.5 by alias": _alias,
    "relu in place by alias": _relu_alias,
    "mul_ through a view": _through_view,
    "part *= 2": _part_in_place,
    "plain += h": _plain_in_place,
    "clone().relu_() + h": lambda x: x.clone().relu_() + x,
    "h.mul_(0.5)": lambda x: x.mul_(0.5),
    "h + mean of channels": lambda x: x - x.mean(1, keepdim=True),
    "detach, contiguous": lambda x: x.detach().contiguous() * 1.1,
}

VECTOR_STEPS = ["linear"] * 3 + ["activation"] * 2 + ["self", "norm"] + ["residual"] * 2
VECTOR_STEPS += ["join", "twice", "product", "glu", "halves", "pre-activation"]
MAP_STEPS = ["conv"] * 3 + ["activation"] * 2 + ["self", "norm", "residual", "max", "average", "difference"]
MAP_STEPS += ["global"] * 2 + ["flat"] * 2 + ["tokens", "mean"]
TOKEN_STEPS = ["linear"] * 3 + ["activation"] * 2 + ["self", "norm", "residual", "attention", "encoder", "difference"]
TOKEN_STEPS += ["mean"] * 2 + ["first", "flat", "mixer", "conv", "sdpa", "place"]
"""Kinds of steps by the current shape. A kind is as probable as it is often listed."""


@dataclass
class Maker:
    """Builder of a program, which chooses steps and tracks the current shape.

    Args:
        program: Program to build.
        choice: Source of the random choices.
        shape: Shape of the units of an example.
        more: Whether the later steps are among the choices.
    """

    program: Program
    choice: random.Random
    shape: tuple[int, ...]
    more: bool = False

    def add(self, name: str, step: Callable[..., Tensor], *layers: nn.Module) -> None:
        """Add a step, which is called with the units and its layers."""
        names = [f"layer{len(self.program.layers) + index}" for index in range(len(layers))]
        self.program.layers.update(dict(zip(names, layers, strict=True)))
        self.program.steps.append((name, step, tuple(names)))

    def apply(self, name: str, layer: nn.Module) -> None:
        self.add(name, lambda x, layer: layer(x), layer)

    def width(self) -> int:
        return self.choice.choice((4, 8, 12, 20, 32))

    def activation(self) -> None:
        self.add(*self.choice.choice(list(ACTIVATIONS.items())))

    # -- vectors -------------------------------------------------------------------------------------------------------

    def vector(self) -> None:
        size, width = self.shape[0], self.width()
        kind = self.choice.choice(VECTOR_STEPS)
        if kind == "linear":
            self.apply("linear", nn.Linear(size, width))
            self.shape = (width,)
        elif kind == "activation":
            self.activation()
        elif kind == "self":
            self.add(*self.choice.choice(list(SELF.items())))
        elif kind == "norm":
            self.norm(nn.LayerNorm(size) if self.choice.random() < 0.5 else nn.BatchNorm1d(size))
        elif kind == "residual":
            act = ACTIVATIONS[self.choice.choice(("relu", "tanh", "gelu"))]
            self.add("residual", lambda x, inner: x + act(inner(x)), nn.Linear(size, size))
        elif kind == "pre-activation":
            self.add(
                "pre-activation in place", lambda x, inner: x + inner(F.relu(x, inplace=True)), nn.Linear(size, size)
            )
        elif kind == "join":
            if self.choice.random() < 0.4:
                self.add("cat h, h", lambda x: torch.cat((x, x), 1))
                self.shape = (2 * size,)
            else:
                self.add("cat h, f(h)", lambda x, inner: torch.cat((x, F.relu(inner(x))), 1), nn.Linear(size, width))
                self.shape = (size + width,)
        elif kind == "twice":
            self.add("a layer twice", lambda x, inner: inner(torch.tanh(inner(x))), nn.Linear(size, size))
        elif kind == "product":
            pair = (nn.Linear(size, width) for _ in range(2))
            self.add("a(h) * b(h)", lambda x, first, second: first(x) * torch.sigmoid(second(x)), *pair)
            self.shape = (width,)
        elif kind == "glu":
            self.add("glu", lambda x, inner: F.glu(inner(x), 1), nn.Linear(size, 2 * width))
            self.shape = (width,)
        elif kind == "halves" and size % 2 == 0:
            self.add("sum of halves", lambda x: x[:, : size // 2] + torch.tanh(x[:, size // 2 :]))
            self.shape = (size // 2,)

    def norm(self, module: nn.Module) -> None:
        if isinstance(module, (nn.BatchNorm1d, nn.BatchNorm2d)):
            for name, low, high in (("running_mean", -0.3, 0.3), ("running_var", 0.3, 1.5)):
                getattr(module, name).uniform_(low, high)
        for parameter in module.parameters():
            parameter.data.add_(torch.empty_like(parameter).uniform_(-0.3, 0.3))
        self.apply(type(module).__name__, module)

    # -- maps ----------------------------------------------------------------------------------------------------------

    def maps(self) -> None:
        size, height = self.shape[0], self.shape[1]
        width = self.choice.choice((4, 6, 8))
        kind = self.choice.choice(MAP_STEPS)
        if kind == "conv":
            groups = self.choice.choice((1, 1, 2)) if size % 2 == 0 else 1
            stride = self.choice.choice((1, 1, 2)) if height > 3 else 1
            kernel = self.choice.choice((1, 3)) if height >= 3 else 1
            layer = nn.Conv2d(size, width, kernel, stride=stride, padding=kernel // 2, groups=groups)
            self.apply("conv", layer)
            side = (height - 1) // stride + 1
            self.shape = (width, side, side)
        elif kind == "activation":
            self.activation()
        elif kind == "self":
            self.add(*self.choice.choice(list(SELF.items())))
        elif kind == "norm":
            self.norm(nn.BatchNorm2d(size) if self.choice.random() < 0.6 or size % 2 else nn.GroupNorm(2, size))
        elif kind == "residual":
            self.add("conv residual", lambda x, inner: x + F.relu(inner(x)), nn.Conv2d(size, size, 3, padding=1))
        elif kind in ("max", "average") and height >= 4:
            pool = F.max_pool2d if kind == "max" else F.avg_pool2d
            self.add(f"{kind} pool", lambda x: pool(x, 2))
            self.shape = (size, height // 2, height // 2)
        elif kind == "difference" and height > 2:
            self.add("difference of positions", lambda x: x[:, :, 1:, 1:] - x[:, :, :-1, :-1])
            self.shape = (size, height - 1, height - 1)
        elif kind == "global":
            self.add("global average", lambda x: F.adaptive_avg_pool2d(x, 1).flatten(1))
            self.shape = (size,)
        elif kind == "mean":
            self.add("mean of positions", lambda x: x.mean((2, 3)))
            self.shape = (size,)
        elif kind == "flat":
            self.add("flatten", lambda x: x.flatten(1))
            self.shape = (math.prod(self.shape),)
        elif kind == "tokens":
            self.add("maps as tokens", lambda x: x.flatten(2).transpose(1, 2))
            self.shape = (height * self.shape[2], size)

    # -- tokens --------------------------------------------------------------------------------------------------------

    def tokens(self) -> None:
        length, size = self.shape
        width = self.choice.choice((4, 8, 16))
        kind = self.choice.choice([*TOKEN_STEPS, *(LATER if self.more else ())])
        if kind == "linear":
            self.apply("linear of tokens", nn.Linear(size, width))
            self.shape = (length, width)
        elif kind == "activation":
            self.activation()
        elif kind == "self":
            self.add(*self.choice.choice(list(SELF.items())))
        elif kind == "norm":
            self.norm(nn.LayerNorm(size))
        elif kind == "residual":
            self.add("residual of tokens", lambda x, inner: x + F.gelu(inner(x)), nn.Linear(size, size))
        elif kind == "attention" and size % 4 == 0:
            self.add(
                "attention",
                lambda x, inner: inner(x, x, x, need_weights=False)[0],
                nn.MultiheadAttention(size, 2, batch_first=True),
            )
        elif kind == "encoder" and size % 4 == 0:
            before = self.choice.random() < 0.5
            layer = nn.TransformerEncoderLayer(size, 2, 16, 0.0, batch_first=True, norm_first=before)
            self.apply("encoder layer", layer)
        elif kind == "sdpa":
            self.add(
                "sdpa",
                lambda x, *parts: F.scaled_dot_product_attention(*(part(x) for part in parts)),
                *(nn.Linear(size, width) for _ in range(3)),
            )
            self.shape = (length, width)
        else:
            self._over_tokens(kind, width)

    def _over_tokens(self, kind: str, width: int) -> None:
        """Add a step that mixes tokens or selects some."""
        length, size = self.shape
        if kind == "difference" and length > 2:
            self.add("difference of tokens", lambda x: x[:, 1:] - x[:, :-1])
            self.shape = (length - 1, size)
        elif kind == "mean":
            self.add("mean of tokens", lambda x: x.mean(1))
            self.shape = (size,)
        elif kind == "first":
            self.add("first token", lambda x: x[:, 0])
            self.shape = (size,)
        elif kind == "flat":
            self.add("flatten tokens", lambda x: x.flatten(1))
            self.shape = (length * size,)
        elif kind == "mixer":
            self.add("mixer", lambda x, inner: inner(x.transpose(1, 2)).transpose(1, 2), nn.Linear(length, length))
        elif kind == "conv" and length >= 3:
            self.add(
                "conv of tokens",
                lambda x, inner: inner(x.transpose(1, 2)).transpose(1, 2),
                nn.Conv1d(size, width, 3, padding=1),
            )
            self.shape = (length, width)
        elif kind == "place":
            places = torch.randn(length, size) * 0.3
            self.add("positions added", lambda x: x + places)
        elif kind in LATER:
            self._later(kind, width)

    def _later(self, kind: str, width: int) -> None:
        """Add a later step: `unbind`, the maximum over tokens, attention of units with themselves, or attention weights."""
        length, size = self.shape
        if kind == "largest":
            self.add("max of tokens", lambda x: F.adaptive_max_pool1d(x.transpose(1, 2), 1).squeeze(-1))
            self.shape = (size,)
        elif kind == "unbind" and size % 2 == 0:
            self.add("unbind", lambda x: (lambda a, b: a * torch.sigmoid(b))(*x.unflatten(-1, (2, -1)).unbind(2)))
            self.shape = (length, size // 2)
        elif kind == "heads":
            self.add(
                "sdpa by unbind",
                lambda x, layer: F.scaled_dot_product_attention(*layer(x).unflatten(-1, (3, -1)).unbind(2)),
                nn.Linear(size, 3 * width),
            )
            self.shape = (length, width)
        elif kind == "itself":
            self.add("sdpa of itself", lambda x: F.scaled_dot_product_attention(x, x, x))
        elif kind == "weights" and size % 4 == 0:
            self.add(
                "attention weights",
                lambda x, layer: layer(x, x, x)[1].mean(1, keepdim=True).transpose(1, 2) * x,
                nn.MultiheadAttention(size, 2, batch_first=True),
            )


KINDS = ("vector", "maps", "tokens", "words")


def generate(seed: int, kind: str) -> Program:
    """The network of a number. Its weights are torch's defaults with this number as seed."""
    choice = random.Random(seed)
    torch.manual_seed(seed)
    program = Program()
    shape = {"vector": (5,), "maps": (2, 6, 6), "tokens": (5, 6), "words": (6,)}[kind]
    maker = Maker(program, choice, shape, seed >= FIRST_WITH_LATER)
    if kind == "words":
        width = choice.choice((4, 8, 16))
        maker.apply("embedding", nn.Embedding(7, width))
        maker.shape = (6, width)
    else:
        size = shape[0] if kind == "maps" else shape[-1]
        width = choice.choice((4, 8)) if kind == "maps" else maker.width()
        first: nn.Module = nn.Conv2d(size, width, 3, padding=1) if kind == "maps" else nn.Linear(size, width)
        maker.apply("first layer", first)
        maker.shape = (width, *shape[1:]) if kind == "maps" else (*shape[:-1], width)
    for _ in range(choice.randint(1, 8)):
        {1: maker.vector, 2: maker.tokens, 3: maker.maps}[len(maker.shape)]()
    if len(maker.shape) == 3:
        maker.add("flatten", lambda x: x.flatten(1))
        maker.shape = (math.prod(maker.shape),)
    elif len(maker.shape) == 2:
        maker.add("mean of tokens", lambda x: x.mean(1))
        maker.shape = (maker.shape[1],)
    program.head = nn.Linear(maker.shape[0], choice.choice((1, 1, 2, 3, 10)))
    return program.eval()


def inputs_of(seed: int, kind: str) -> Tensor:
    """Four examples that are rough, smooth or positive."""
    generator = torch.Generator().manual_seed(seed)
    if kind == "words":
        return torch.randint(7, (4, 6), generator=generator)
    way = seed % 3
    if kind == "vector":
        x = torch.randn(4, 5, generator=generator)
    elif kind == "maps":
        x = torch.randn(4, 2, 6, 6, generator=generator)
        if way == 1:
            x = F.interpolate(x[:, :, :2, :2], (6, 6), mode="bilinear")
    else:
        x = torch.randn(4, 5, 6, generator=generator)
        if way == 1:
            x = x[:, :1] + 0.3 * x
    return x.abs() if way == 2 else x


def bayesian(seed: int, kind: str) -> Any:
    """The network under a posterior of all layers, some layers, or the biases."""
    program, choice = generate(seed, kind), random.Random(seed + 1)
    std = choice.choice((0.02, 0.05, 0.1, 0.2, 0.3))
    one: Any = posteriors.MeanField(init_std=std) if choice.random() < 0.85 else posteriors.KTied(init_std=std)
    plan: Any = one
    if choice.random() < 0.4:
        names = [f"layers.{name}" for name in program.layers if not _is_norm(program.layers[name])]
        names = [name for name in names if "out_proj" not in name]
        kept = choice.sample(names, max(1, len(names) // 2))
        plan = dict.fromkeys(kept, one)
    return bayesify.bayesianize(program, plan, likelihood=likelihoods.Gaussian(0.01, learn=False))


def _is_norm(module: nn.Module) -> bool:
    return isinstance(module, (nn.LayerNorm, nn.BatchNorm1d, nn.BatchNorm2d, nn.GroupNorm))


def _drawn(bnn: Any, x: Tensor, count: int, seed: int) -> Tensor:
    """Outputs of draws, by `vmap` if possible, which takes a tenth of a loop's time for such small networks."""
    draws = bnn.draw(count, generator=torch.Generator().manual_seed(seed)).detach()
    net = bnn.mean_network().eval()
    weights = {name: value.detach() for name, value in draws.materialize().weights.items()}
    fixed = {name: value.detach() for name, value in (*net.named_parameters(), *net.named_buffers())}
    fast = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)  # `vmap` does not support torch's fused attention kernels
    try:
        with torch.no_grad(), sdpa_kernel(SDPBackend.MATH):
            outputs = torch.func.vmap(lambda drawn: torch.func.functional_call(net, fixed | drawn, (x.clone(),)))(
                weights
            )
    except RuntimeError:  # a draw writes into a tensor that all draws share
        outputs = draws(x.clone())
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)
    found: Tensor = outputs.detach().double()
    return found


def check(seed: int, stages: tuple[int, ...] = STAGES) -> dict[str, Any]:
    """Compare moments and draws of the network of a number."""
    kind = KINDS[seed % len(KINDS)]
    bnn, x = bayesian(seed, kind), inputs_of(seed, kind)
    steps = [name for name, *_ in bnn.network.steps]
    row: dict[str, Any] = {"seed": seed, "kind": kind, "steps": steps, "outcome": "refused"}
    try:
        found = bnn.predict(x, method="moments")
    except ValueError as refusal:
        if "method='moments' does not support" not in str(refusal):
            raise
        return row | {"reason": str(refusal)}
    for count in stages:
        outputs = _drawn(bnn, x, count, seed)
        std = outputs.std(0)
        fixed = std < 1e-5 * (1 + outputs.mean(0).abs())  # outputs that are not random
        centered = (outputs - outputs.mean(0)) / std.masked_fill(fixed, 1)
        error = (
            (centered.pow(4).mean(0) - 1).clamp_min(2) / (4 * count)
        ).sqrt()  # relative error of the standard deviation
        gap = ((found.mean - outputs.mean(0)).abs() / std.masked_fill(fixed, 1)).masked_fill(fixed, 0)
        ratio = (found.epistemic.sqrt() / std.masked_fill(fixed, 1)).masked_fill(fixed, 1)
        off = torch.maximum(ratio, 1 / ratio.clamp_min(1e-12))
        row |= {"mean_gap": float(gap.max()), "low": float(ratio.min()), "high": float(ratio.max()), "draws": count}
        margin = 3 / math.sqrt(count)
        sure = (gap.max() + margin < MAX_MEAN_GAP) and bool((off * (1 + 3 * error) < MAX_STD_RATIO).all())
        row["outcome"] = "within" if gap.max() < MAX_MEAN_GAP and off.max() < MAX_STD_RATIO else "outside"
        if sure:
            break
    return row


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Shares within bounds and refused, reasons, and the worst networks."""
    answered = [row for row in rows if row["outcome"] != "refused"]
    refused = [row for row in rows if row["outcome"] == "refused"]
    reasons = Counter(_reason(row["reason"]) for row in refused)
    gaps = sorted(row["mean_gap"] for row in answered)
    ratios = sorted(max(row["high"], 1 / max(row["low"], 1e-9)) for row in answered)

    def badness(row: dict[str, Any]) -> float:
        wide = math.log(max(row["high"], 1 / max(row["low"], 1e-9))) / math.log(MAX_STD_RATIO)
        return float(max(wide, row["mean_gap"] / MAX_MEAN_GAP))

    return {
        "networks": len(rows),
        "refused_share": round(len(refused) / len(rows), 4),
        "refused_by_reason": dict(reasons.most_common()),
        "answered": len(answered),
        "within_share_of_answered": round(statistics.fmean(row["outcome"] == "within" for row in answered), 4),
        "mean_gap": {
            "median": round(statistics.median(gaps), 3),
            "99 %": round(gaps[int(0.99 * len(gaps))], 3),
            "largest": round(gaps[-1], 3),
        },
        "std_ratio": {
            "median": round(statistics.median(ratios), 3),
            "99 %": round(ratios[int(0.99 * len(ratios))], 3),
            "largest": round(ratios[-1], 3),
        },
        "worst": sorted(answered, key=badness, reverse=True)[:10],
    }


def _reason(text: str) -> str:
    found = re.sub(r"^.*(?:cannot pass|does not support) [^:]*: ", "", text).removesuffix("; use method='draws'")
    return re.sub(r"layers\.\S+ is used", "a weight is used", re.sub(r"\d+(\.\d+)?", "n", found))


def main() -> None:
    options = parser(__doc__, "part", "no_summary", count=2000, first=0, rows=Path("build/moments_programs.jsonl"))
    given = options.parse_args()
    torch.set_num_threads(1)
    known = {row["seed"] for row in read_rows(given.rows)}
    first, parts = given.part
    for seed in range(given.first, given.first + given.count)[first::parts]:
        if seed not in known:
            start = time.perf_counter()
            row = check(seed)
            row["seconds"] = round(time.perf_counter() - start, 2)
            add_row(given.rows, row)
    rows = [row for row in read_rows(given.rows) if given.first <= row["seed"] < given.first + given.count]
    figures = summary(rows)
    print(json.dumps(figures, indent=2))
    if not given.no_summary:
        record("moments_programs", figures)


if __name__ == "__main__":
    main()
