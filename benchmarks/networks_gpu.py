"""Draws and training steps of whole networks on a GPU compared with the plain network: ViT-B/16, GPT-2's shape, ResNets, an MLP.

python -m benchmarks.networks_gpu [--seconds 1.5] [--rows GLOB ...] [--profile: kernels too, into profiles_networks_gpu]
"""

import fnmatch
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import bayesify
from bayesify import likelihoods, models, posteriors
from benchmarks.draws_gpu import Transformer, captured_step
from benchmarks.resnets import draw_calls
from benchmarks.runs import parser
from benchmarks.timing import adam_step, clock, ratios, record

Figures = dict[str, float]
Runs = dict[str, Callable[[], Any]]
"""Functions to time by name, the plain network first."""

POSTERIORS: dict[str, Callable[[], Any]] = {
    "mean_field": posteriors.MeanField,
    "inducing": lambda: posteriors.InducingWeights(64, 64),
    "k_tied": posteriors.KTied,
    "walsh_hadamard": posteriors.WalshHadamard,
}


def vit() -> tuple[nn.Module, Tensor, Tensor]:
    from torchvision.models import vit_b_16

    with torch.device("cuda"):
        return vit_b_16(), torch.randn(64, 3, 224, 224), torch.randint(0, 1000, (64,))


def gpt2() -> tuple[nn.Module, Tensor, Tensor]:
    with torch.device("cuda"):
        text = torch.randint(0, 50257, (8, 513))
        return Transformer(), text[:, :-1].contiguous(), text[:, 1:].contiguous()


def resnet50() -> tuple[nn.Module, Tensor, Tensor]:
    from torchvision.models import resnet50 as make

    with torch.device("cuda"):
        net, x = make(), torch.randn(64, 3, 224, 224)
    return *(part.to(memory_format=torch.channels_last) for part in (net, x)), torch.randint(0, 1000, (64,)).cuda()


def hugging_face(name: str) -> tuple[nn.Module, Tensor, Tensor]:
    """Models of `transformers` from their default configurations, which are the published sizes."""
    import transformers

    with torch.device("cuda"):
        if name == "hf_vit":
            net: nn.Module = transformers.ViTForImageClassification(transformers.ViTConfig(num_labels=1000))
            return net, torch.randn(64, 3, 224, 224), torch.randint(0, 1000, (64,))
        if name == "hf_bert":
            net = transformers.BertForSequenceClassification(transformers.BertConfig())
            return net, torch.randint(0, 30000, (32, 512)), torch.randint(0, 2, (32,))
        return transformers.GPT2LMHeadModel(transformers.GPT2Config()), *gpt2()[1:]


def resnet18() -> tuple[nn.Module, Tensor, Tensor]:
    with torch.device("cuda"):
        return models.resnet18(variant="cifar"), torch.randn(128, 3, 32, 32), torch.randint(0, 10, (128,))


def mlp() -> tuple[nn.Module, Tensor, Tensor]:
    with torch.device("cuda"):
        return models.mlp([784, 512, 512, 10]), torch.randn(128, 784), torch.randint(0, 10, (128,))


def loss_of(net: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(net(x).flatten(0, -2), y.flatten())


def draws(make: Callable[[], Any], kind: str) -> Runs:
    """Five fresh draws with their passes, together and one at a time, and passes of draws that exist, in bfloat16."""
    net, x, _ = make()
    half = x.bfloat16() if x.is_floating_point() else x
    calls = draw_calls(net.bfloat16(), POSTERIORS[kind](), half, 5)
    return dict(zip(("plain", "fresh", "alone", "existing"), calls, strict=True))


def step(make: Callable[[], Any], kind: str) -> Runs:
    """A training step under autocast by fused Adam."""
    net, x, y = make()
    bnn = bayesify.bayesianize(net, POSTERIORS[kind](), likelihood=likelihoods.Categorical()).train()

    def cast(run: Callable[[], Tensor]) -> Callable[[], Tensor]:
        def inside() -> Tensor:
            with torch.autocast("cuda", torch.bfloat16):
                return run()

        return inside

    plain = adam_step(net.train(), cast(lambda: loss_of(net, x, y)))
    return {"plain": plain, "ratio": adam_step(bnn, cast(lambda: -bnn.elbo(x, y, num_data=50_000) / 50_000))}


def captured(make: Callable[[], Any], kind: str, half: bool = False) -> Runs:
    """A whole step as a CUDA graph; `half`: bfloat16 autocast, images channels last."""

    def graph(kind: str | None) -> Callable[[], None]:
        net, x, y = make()
        if half and x.ndim == 4:
            net, x = (part.to(memory_format=torch.channels_last) for part in (net, x))
        bnn = kind and bayesify.bayesianize(net, POSTERIORS[kind](), likelihood=likelihoods.Categorical())

        def loss() -> Tensor:
            with torch.autocast("cuda", torch.bfloat16, enabled=half):
                return -bnn.elbo(x, y, num_data=60_000) / 60_000 if bnn else loss_of(net, x, y)

        return captured_step(bnn or net, loss)

    return {"plain": graph(None), "ratio": graph(kind)}


def measure(runs: Runs, seconds: float, passes: int) -> Figures:
    """Ratios to the plain network's time, and this time. For a CUDA graph, which is short, it is the smallest of many."""
    plain, *others = runs.values()
    if passes:
        found = ratios(plain, *others, seconds=seconds)
        times = [1e3 * min(clock(plain) for _ in range(3)) / passes]
    else:
        both = [[1e3 * min(clock(run) for _ in range(int(20 * seconds))) for run in runs.values()] for _ in range(2)]
        times = [min(pair) for pair in zip(*both, strict=True)]
        found = [time / times[0] for time in times[1:]]
    return dict(zip(list(runs)[1:], found, strict=True)) | {"plain_ms": times[0]}


TimedRow = tuple[Callable[[], Runs], int]
"""Function that makes the runs, and number of plain passes in a run; 0 for a CUDA graph."""

LARGE_NETWORKS = [(gpt2, "mean_field"), (gpt2, "inducing")] + [
    (vit, kind) for kind in ("mean_field", "inducing", "walsh_hadamard")
]
ROWS: dict[str, TimedRow] = {
    "gpt2/mean_field/draws": (lambda: draws(gpt2, "mean_field"), 5),
    "vit/mean_field/draws": (lambda: draws(vit, "mean_field"), 5),
    "vit/inducing/draws": (lambda: draws(vit, "inducing"), 5),
    "resnet50/inducing/draws": (lambda: draws(resnet50, "inducing"), 5),
    "resnet50/k_tied/draws": (lambda: draws(resnet50, "k_tied"), 5),
    **{
        f"{name}/mean_field/draws": (lambda name=name: draws(lambda: hugging_face(name), "mean_field"), 5)
        for name in ("hf_gpt2", "hf_bert", "hf_vit")
    },
    **{
        f"{make.__name__}/{kind}/captured{'_bf16' * half}": (
            lambda make=make, kind=kind, half=half: captured(make, kind, half),
            0,
        )
        for make, half in ((mlp, False), (resnet18, False), (resnet18, True))
        for kind in ("mean_field", "inducing", "k_tied")
    },
    **{
        f"{make.__name__}/{kind}/captured_bf16": (lambda make=make, kind=kind: captured(make, kind, half=True), 0)
        for make, kind in LARGE_NETWORKS
    },
    **{
        f"{make.__name__}/{kind}/step": (lambda make=make, kind=kind: step(make, kind), 1)
        for make, kind in LARGE_NETWORKS
    },
}


def selected(rows: dict[str, Any], patterns: list[str]) -> dict[str, Any]:
    """The rows whose names match a pattern."""
    return {name: row for name, row in rows.items() if any(fnmatch.fnmatch(name, pattern) for pattern in patterns)}


def main() -> None:
    options = parser(__doc__, seconds=1.5, rows=["*"], profile=False).parse_args()
    from benchmarks.profiles import accounts  # imported late because `profiles` imports this module

    torch.manual_seed(0)
    figures: Figures = {}
    profiles: dict[str, Any] = {}
    keep = options.rows != ["*"]
    for name, (make, passes) in selected(ROWS, options.rows).items():
        begin = time.perf_counter()
        try:
            runs = make()
            found = measure(runs, options.seconds, passes)
            figures |= {f"{name}/{key}": value for key, value in found.items()}
            print(f"{name}: {found}, {time.perf_counter() - begin:.1f} s", flush=True)
            if options.profile:
                profiles[name] = accounts(runs, max(passes, 1), 6)
        except Exception as error:  # one failing row must not stop the others
            print(name, repr(error)[:300], flush=True)
        runs = {}
        torch.cuda.empty_cache()
        record("networks_gpu", figures, keep=keep, digits=3, quiet=True, seconds=options.seconds)
        if options.profile:
            record("profiles_networks_gpu", profiles, keep=keep, quiet=True)


if __name__ == "__main__":
    main()
