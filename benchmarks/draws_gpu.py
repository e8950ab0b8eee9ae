"""Draws of mean-field weights on a GPU: 124 million weights in bfloat16, a transformer of GPT-2's shape, a captured MLP step.

python -m benchmarks.draws_gpu
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import bayesify
from bayesify import likelihoods, models, posteriors
from bayesify.maths import fused_draws
from benchmarks.timing import adam_step, clock, ratios, record


class Block(nn.Module):
    def __init__(self, width: int = 768, heads: int = 12) -> None:
        super().__init__()
        self.heads = heads
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attend, self.join = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        parts = self.attend(self.first(x)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(*parts, is_causal=True).transpose(1, 2).reshape(batch, length, width)
        x = x + self.join(mixed)
        return x + self.down(F.gelu(self.up(self.second(x)), approximate="tanh"))


class Transformer(nn.Module):
    """GPT-2 (124 million weights) without its library. Embedding and head share one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(50257, 768), nn.Embedding(1024, 768)
        self.blocks, self.norm = nn.Sequential(*[Block() for _ in range(12)]), nn.LayerNorm(768)
        self.head = nn.Linear(768, 50257, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, text: Tensor) -> Tensor:
        return self.head(self.norm(self.blocks(self.tokens(text) + self.places.weight[: text.shape[1]])))


def least_ms(run: Callable[[], Any], times: int = 20) -> float:
    """Milliseconds per call of many calls in a row, the smallest of five measurements."""

    def many() -> None:
        for _ in range(times):
            run()

    many()
    return min(clock(many) for _ in range(5)) / times * 1e3


def copy_ms(count: int) -> float:
    """Milliseconds of the memory traffic alone: for each weight, two float32 numbers are read and one bfloat16 is written."""
    left, right = torch.zeros(2, count, device="cuda")
    out = torch.empty(count, dtype=torch.bfloat16, device="cuda")
    return least_ms(lambda: torch.add(left, right, out=out))


def transformer_figures(seconds: float) -> dict[str, float]:
    torch.manual_seed(0)
    with torch.device("cuda"):
        net, text = Transformer().bfloat16().eval(), torch.randint(0, 50257, (8, 512))
    bnn = bayesify.bayesianize(net, posteriors.MeanField(), likelihood=likelihoods.Categorical()).eval()
    count = sum(weight.numel for weight in bnn.weights.values())
    with torch.no_grad():
        figures = {
            "weights": count,
            "copy_ms": copy_ms(count),
            "alone_ms": least_ms(lambda: bnn.draw(1)),
            "five_at_a_time_ms": least_ms(lambda: bnn.draw(5), 4) / 5,
        }
        draw = bnn.draw(1)[0]
        existing, fresh = ratios(lambda: net(text), lambda: draw(text), lambda: bnn(text), seconds=seconds)
    return figures | {"gpt2_existing": existing, "gpt2_fresh": fresh}


def captured_step(module: nn.Module, loss: Callable[[], Tensor]) -> Callable[[], None]:
    """A step by Adam as a CUDA graph. It keeps the captured objects alive because the graph reads their memory."""
    optimizer = torch.optim.Adam(module.parameters(), lr=1e-4, fused=True, capturable=True)

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        loss().backward()
        optimizer.step()

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(5):
            step()
    torch.cuda.current_stream().wait_stream(side)
    optimizer.zero_grad(set_to_none=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()

    def replay(kept: Any = step) -> None:
        graph.replay()

    return replay


def step_figures() -> dict[str, float]:
    x, y = torch.randn(128, 784, device="cuda"), torch.randint(0, 10, (128,), device="cuda")
    net = models.mlp([784, 512, 512, 10]).cuda()
    bnn = bayesify.bayesianize(net, posteriors.MeanField(), likelihood=likelihoods.Categorical())
    plain = least_ms(captured_step(net, lambda: F.cross_entropy(net(x), y)), 200)
    ours = least_ms(captured_step(bnn, lambda: -bnn.elbo(x, y, num_data=60_000) / 60_000), 200)
    return {"mlp_plain_step_ms": plain, "mlp_step_ms": ours, "mlp_step_captured": ours / plain}


def peak_of_steps(make: Callable[[], tuple[nn.Module, Callable[[], Tensor]]]) -> int:
    """Peak bytes of a network and its training by Adam."""
    before = torch.cuda.memory_allocated()
    step = adam_step(*make())
    step()
    torch.cuda.reset_peak_memory_stats()
    step()
    return torch.cuda.max_memory_allocated() - before


def memory_figures() -> dict[str, float]:
    x, y = torch.randn(8, 4096, device="cuda"), torch.randint(0, 10, (8,), device="cuda")

    def plain() -> tuple[nn.Module, Callable[[], Tensor]]:
        with torch.device("cuda"):
            net = nn.Sequential(*[nn.Linear(4096, 4096) for _ in range(6)])
        return net, lambda: F.cross_entropy(net(x), y)

    def ours() -> tuple[nn.Module, Callable[[], Tensor]]:
        bnn = bayesify.bayesianize(plain()[0], posteriors.MeanField(), likelihood=likelihoods.Categorical())
        return bnn, lambda: -bnn.elbo(x, y, num_data=60_000) / 60_000

    return {"step_memory": peak_of_steps(ours) / peak_of_steps(plain)}


def main() -> None:
    figures = transformer_figures(2.0) | step_figures() | memory_figures()
    record("draws_gpu", figures, digits=4, fused=fused_draws.USES_KERNELS)


if __name__ == "__main__":
    main()
