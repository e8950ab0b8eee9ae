"""A small language model of bytes, text that ships with Python and torch, and low-rank adapters named as peft names them."""

import math
import random
import sysconfig
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset

CLASSES = ("distributed", "distributions", "nn", "onnx")
"""Folders of torch. The task is to find the folder of a snippet of code."""

SPLITS = {"train": range(12), "choice": range(12, 16), "test": range(16, 20)}
"""Files of a class by their index modulo 20. Settings are chosen on files that the table does not use."""


class Rows(Dataset[Any]):
    """Keyword inputs, each [N, ...], and labels [N]."""

    def __init__(self, x: dict[str, Tensor], y: Tensor) -> None:
        self.x, self.y = x, y

    def __len__(self) -> int:
        return len(self.y)

    def __getitem__(self, index: int) -> Any:
        return {key: part[index] for key, part in self.x.items()}, self.y[index]


class Attention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.q, self.k, self.v, self.o = (nn.Linear(width, width) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:  # [B, T, d]
        q, k, v = (part(x).unflatten(-1, (self.heads, -1)).transpose(-2, -3) for part in (self.q, self.k, self.v))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o(mixed.transpose(-2, -3).flatten(-2))


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.before_attention, self.before_mlp = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = Attention(width, heads)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.before_attention(x))
        return x + self.down(F.gelu(self.up(self.before_mlp(x))))


class Decoder(nn.Module):
    """A causal transformer from bytes [B, T] to logits [B, T, vocabulary], or to class logits [B, C] by pooling over positions."""

    def __init__(self, width: int, depth: int, heads: int, length: int, vocabulary: int = 256) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(depth)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary)
        self.pooled = False
        for module in self.modules():
            if isinstance(module, (nn.Linear, nn.Embedding)):
                nn.init.normal_(module.weight, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.positions.weight[: tokens.shape[-1]]
        x = self.norm(self.blocks(x))
        return self.head(x.mean(-2) if self.pooled else x)


class LowRank(nn.Module):
    """A fixed linear map plus an update, W x + (alpha / r) B A x. A starts at random, B at 0."""

    def __init__(self, base: nn.Linear, rank: int, alpha: float) -> None:
        super().__init__()
        self.base_layer = base
        self.lora_A = nn.Linear(base.in_features, rank, bias=False)
        self.lora_B = nn.Linear(rank, base.out_features, bias=False)
        nn.init.zeros_(self.lora_B.weight)
        self.scaling = alpha / rank

    def forward(self, x: Tensor) -> Tensor:
        return self.base_layer(x) + self.scaling * self.lora_B(self.lora_A(x))


def with_adapters(decoder: Decoder, rank: int, alpha: float, classes: int | None = None) -> Decoder:
    """The decoder, frozen in place, with low-rank updates of attention maps. For classes, its head keeps the rows of letters."""
    decoder.requires_grad_(False)
    for block in decoder.blocks:
        attention = block.attention
        for name in ("q", "k", "v", "o"):
            setattr(attention, name, LowRank(getattr(attention, name), rank, alpha))
    if classes is not None:
        decoder.pooled, letters = True, slice(ord("A"), ord("A") + classes)
        head = nn.Linear(decoder.head.in_features, classes)
        head.load_state_dict({key: value[letters] for key, value in decoder.head.state_dict().items()})
        decoder.head = head.requires_grad_(False)
    return decoder


def python_text(limit: int = 16_000_000) -> Tensor:
    """At most `limit` bytes of source code of Python's standard library and of torch, without the folders of the task."""
    skipped = {
        "site-packages",
        "dist-packages",
        "test",
        "tests",
        "idlelib",
        "encodings",
        "lib2to3",
        "distutils",
        *CLASSES,
    }
    files = []
    for root in (Path(sysconfig.get_paths()["stdlib"]), Path(torch.__file__).parent):
        inside = len(root.parts)
        files += [path for path in sorted(root.rglob("*.py")) if not skipped & set(path.parts[inside:])]
    random.Random(0).shuffle(files)
    text = b"\n".join(path.read_bytes() for path in files)[:limit]
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)


def snippets(split: str, count: int, length: int, seed: int) -> tuple[Tensor, Tensor]:
    """Snippets of torch's source code that start at a line, [N, length], and their classes, [N], which are equally frequent."""
    root, draw = Path(torch.__file__).parent, random.Random(f"{split} {seed}")
    texts: dict[int, list[bytes]] = {}
    for label, name in enumerate(CLASSES):
        files = [path for path in sorted((root / name).rglob("*.py")) if path.stat().st_size > 2_000]
        random.Random(0).shuffle(files)
        texts[label] = [path.read_bytes() for place, path in enumerate(files) if place % 20 in SPLITS[split]]
    rows, labels = [], []
    while len(rows) < count:
        label = len(rows) % len(CLASSES)
        text = draw.choice(texts[label])
        start = text.rfind(b"\n", 0, draw.randrange(len(text) - length)) + 1
        rows.append(list(text[start : start + length]))
        labels.append(label)
    return torch.tensor(rows), torch.tensor(labels)


def pretrain(decoder: Decoder, text: Tensor, steps: int, batch: int, length: int, seed: int = 0) -> list[float]:
    """Train on next bytes by Adam with a falling rate, and return ten values of the loss in nats per byte."""
    device = next(decoder.parameters()).device
    text, generator = text.to(device), torch.Generator(device).manual_seed(seed)
    optimizer = torch.optim.AdamW(decoder.parameters(), lr=1e-3, weight_decay=0.01, fused=True)
    offsets, losses = torch.arange(length + 1, device=device), []
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = 1e-3 * min(1.0, (step + 1) / 100) * 0.5 * (1 + math.cos(math.pi * step / steps))
        starts = torch.randint(len(text) - length - 1, (batch, 1), generator=generator, device=device)
        rows = text[starts + offsets].long()
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            logits = decoder(rows[:, :-1])
        loss = F.cross_entropy(logits.float().flatten(0, 1), rows[:, 1:].flatten())
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        if (step + 1) % max(1, steps // 10) == 0:
            losses.append(round(loss.item(), 3))
    return losses
