"""Profiles compared with the plain network: on a GPU kernels by group and idle time, on a CPU the parts of a step.

python -m benchmarks.networks_gpu --profile                       # rows of that benchmark, with its figures
python -m benchmarks.profiles [--rows GLOB ...] [--limit SECONDS]  # rows of other benchmarks
python -m benchmarks.profiles --cpu [--rows GLOB ...]
"""

import re
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

import bayesify
from bayesify import likelihoods, models, posteriors
from bayesify.maths.noise import standard_normal
from bayesify.transforms import hadamard
from benchmarks import deep_gp, networks_gpu
from benchmarks.resnets import draw_calls
from benchmarks.runs import parser
from benchmarks.timing import elbo_step, record, synchronize

GROUPS = {
    "draws": r"draw_kernel|gradient_kernel|tied_|normal_kernel|positive_kernel|distribution_"
    r"|^(reach|inner|matheron|through|settle|row|column)_kernel",
    "optimizer": r"FusedOptimizer|FusedAdam",
    "factorizations": r"potrf|trsm|getrf|getri|triu_tril|lacpy",
    "Hadamard": r"hadamard|dyadic|^_kernel",
    "attention": r"sdpa|fmha|flash|compute_dot_do_o|convert_dq",
    "products in float32": r"f32f32_f32f32|sgemm|dgemm|gemmSN|gemv|splitKreduce_kernel<32, 16, int, float, float",
    "products in bfloat16": r"nvjet|cutlass|gemm|fprop|dgrad|wgrad|convolve|splitKreduce|implicit",
    "normalization": r"layer_norm|batch_norm|GammaBeta",
    "casts, copies, layout": r"copy|Memcpy|CatArray|nchwToNhwc|nhwcToNchw|AddPadding|gather|transpose",
    "fills": r"Memset|FillFunctor",
    "reductions": r"reduce_kernel|softmax|nll_loss",
    "entry by entry": r"elementwise|multi_tensor_apply|index",
}
"""Patterns of kernel names by group. The first match counts."""


def group_of(kernel: str) -> str:
    """The group of a kernel."""
    return next((group for group, names in GROUPS.items() if re.search(names, kernel, re.IGNORECASE)), "other")


def launched(found: profile) -> list[Any]:
    """The kernels of a finished profile, without annotations."""
    events = [event for event in found.events() or () if event.device_type == DeviceType.CUDA]
    return [event for event in events if not event.name.startswith("Optimizer.")]


def trace(run: Callable[[], Any]) -> dict[str, Any]:
    """Number of kernels of a call, their milliseconds by group, the longest kernels, and the longest driver calls."""
    with profile(activities=[ProfilerActivity.CUDA]) as found:
        run()
        synchronize()
    groups, names, calls = (Counter[str]() for _ in range(3))
    for event in found.events() or ():
        if event.device_type != DeviceType.CUDA:
            calls[event.name] += event.cpu_time_total / 1e3
    for event in launched(found):
        groups[group_of(event.name)] += event.device_time_total / 1e3
        names[event.name[:110]] += event.device_time_total / 1e3
    return {"kernels": len(launched(found)), "groups": dict(groups), "longest": dict(names.most_common(10))} | {
        "driver": dict(calls.most_common(5))
    }


def accounts(runs: networks_gpu.Runs, passes: int = 1, repeats: int = 12) -> dict[str, Any]:
    """Milliseconds per pass of calls, of the host until all kernels are launched, and of kernels by group. Calls alternate.

    The waiting time of the device is a call's time minus its kernels' time.
    """
    for run in runs.values():
        for _ in range(repeats // 2):  # a graph is recorded in the sixth call
            run()
    turns = [{key: timed(run) for key, run in runs.items()} for _ in range(repeats)]
    return {key: account(run, [turn[key] for turn in turns], passes) for key, run in runs.items()}


def account(run: Callable[[], Any], times: list[tuple[float, float]], passes: int) -> dict[str, Any]:
    """The account of one call, from its times in seconds; see `accounts`."""
    found = trace(run)
    whole, host = (1e3 * min(part) for part in zip(*times, strict=True))
    total = sum(found["groups"].values())
    parts = {"ms": whole, "host_ms": host, "kernels_ms": total, "idle_ms": max(0.0, whole - total)}

    def per_pass(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: per_pass(part) for key, part in sorted(value.items(), key=lambda item: -item[1])}
        return round(value / passes, 4)

    return {key: per_pass(value) for key, value in (parts | found).items()}


def timed(run: Callable[[], Any]) -> tuple[float, float]:
    """Seconds of a call, and seconds until all its kernels are launched."""
    synchronize()
    start = time.perf_counter()
    run()
    host = time.perf_counter() - start
    synchronize()
    return time.perf_counter() - start, host


def one_draw() -> networks_gpu.Runs:
    """A draw of 124 million weights, and its memory traffic alone."""
    net, *_ = networks_gpu.gpt2()
    bnn = bayesify.bayesianize(net.bfloat16().eval(), posteriors.MeanField()).eval()
    left, right = torch.zeros(2, sum(weight.numel for weight in bnn.weights.values()), device="cuda")
    out = torch.empty(len(left), dtype=torch.bfloat16, device="cuda")
    draw = torch.no_grad()(lambda: bnn.draw(1))
    return {"plain": lambda: torch.add(left, right, out=out), "alone": draw}


def curvature() -> networks_gpu.Runs:
    """Laplace of 1,000 weights of a ResNet-50 with 1,000 classes by 16 vectors, and a pass of the network."""
    net = models.resnet50("imagenet", 1000).cuda().eval()
    x, y = torch.randn(64, 3, 224, 224, device="cuda"), torch.randint(0, 1000, (64,), device="cuda")

    def fit() -> Any:
        chosen = bayesify.subnetwork.largest_variance(1000)
        made = bayesify.Laplace(net, likelihoods.Categorical(), chosen, "full", memory="8GiB", num_samples=16)
        return made.fit([(x, y)])

    return {"plain": torch.no_grad()(lambda: net(x)), "curvature": fit}


def images(network: str, kind: str, half: bool = False) -> networks_gpu.Runs:
    """Draws of `benchmarks.resnets`, in float32 or in bfloat16."""
    torch.backends.cudnn.benchmark = True
    net, x = getattr(models, network)().cuda(), torch.randn(500, 3, 32, 32, device="cuda")
    if half:
        net, x = (part.bfloat16().to(memory_format=torch.channels_last) for part in (net, x))
    calls = draw_calls(net, networks_gpu.POSTERIORS[kind](), x, 5)
    return dict(zip(("plain", "fresh", "alone", "existing"), calls, strict=True))


def one_pass() -> networks_gpu.Runs:
    """One pass of GPT-2's shape, with an existing draw and with a fresh draw, as in `benchmarks.draws_gpu`."""
    net, text, _ = networks_gpu.gpt2()
    bnn = bayesify.bayesianize(
        net.bfloat16().eval(), posteriors.MeanField(), likelihood=likelihoods.Categorical()
    ).eval()
    with torch.no_grad():
        draw = bnn.draw(1)[0]
    runs = {"plain": lambda: net(text), "existing": lambda: draw(text), "fresh": lambda: bnn(text)}
    return {name: torch.no_grad()(run) for name, run in runs.items()}


ROWS: dict[str, networks_gpu.TimedRow] = {
    "124M/mean_field/draw": (one_draw, 1),
    "gpt2/mean_field/one": (one_pass, 1),
} | {
    f"images/{network}/{kind}/draws": (lambda network=network, kind=kind: images(network, kind), 5)
    for network in ("resnet18", "resnet50")
    for kind in ("inducing", "mean_field")
}
ROWS |= {
    f"images/{network}/inducing/bf16/draws": (lambda network=network: images(network, "inducing", half=True), 5)
    for network in ("resnet18", "resnet50")
}
SLOW: dict[str, networks_gpu.TimedRow] = {"resnet50/laplace/fit": (curvature, 1)}


def least(run: Callable[[], Any], prepare: Callable[[], Any] = lambda: None, times: int = 40) -> float:
    """Milliseconds of a call after `prepare`, the smallest of many. With one thread, only the time of this process counts."""
    timer = time.process_time if torch.get_num_threads() == 1 else time.perf_counter
    found = []
    for _ in range(times):
        given = prepare()
        start = timer()
        run() if given is None else run(given)
        found.append(timer() - start)
    return round(1e3 * min(found), 4)


def parts_of_step(module: nn.Module, loss: Callable[[], Tensor]) -> dict[str, float]:
    """Milliseconds of the parts of a training step by Adam."""
    optimizer = torch.optim.Adam(module.parameters(), lr=1e-4, fused=True)

    def forward() -> Tensor:
        optimizer.zero_grad(set_to_none=True)
        return loss()

    found = {"loss": least(loss), "backward": least(Tensor.backward, forward)}
    return found | {"optimizer": least(optimizer.step)}


def mlp_on_cpu() -> dict[str, Any]:
    """Draws and training steps of the MLP of `benchmarks.foundation`, in parts and by operations of torch."""
    net = models.mlp([784, 256, 256, 10])
    x, y = torch.randn(128, 784), torch.randint(0, 10, (128,))
    makes = {"mean_field": posteriors.MeanField, "local": lambda: posteriors.MeanField(local_reparameterization=True)}
    nets = {
        name: bayesify.bayesianize(net, make(), likelihood=likelihoods.Categorical()) for name, make in makes.items()
    }
    bnn = nets["mean_field"]
    count = sum(weight.numel for weight in bnn.weights.values())
    like = torch.zeros(())
    with torch.no_grad():
        draws = bnn.draw(16)
        fresh = {
            "plain": {"16 passes": least(lambda: [net(x) for _ in range(16)])},
            "fresh": {
                "normal numbers": least(lambda: standard_normal(16 * count, like)),
                "draws with them": least(lambda: bnn.draw(16)),
                "passes of draws": least(lambda: draws(x)),
            },
        }
    steps: dict[str, Any] = {"plain": parts_of_step(net, lambda: F.cross_entropy(net(x), y))}
    for name, each in nets.items():
        parts = {
            "normal numbers": least(lambda: standard_normal(count, like)),
            "draw with its KL": least(lambda each=each: each.draw(1, local=True)),
        }
        steps[name] = parts | parts_of_step(each, lambda each=each: -each.elbo(x, y, num_data=60_000) / 60_000)
    steps["operations"] = {name: operations(elbo_step(each, x, y)) for name, each in nets.items()}
    return {"mlp/draws": fresh, "mlp/step": steps}


def inducing_on_cpu() -> dict[str, Any]:
    """Draws of the ResNet-18 of `benchmarks.inducing_cpu`, in parts."""
    net, x = models.resnet18().eval(), torch.randn(100, 3, 32, 32)
    bnn = bayesify.bayesianize(net, posteriors.InducingWeights(rows=64, cols=64), likelihood=likelihoods.Categorical())
    with torch.no_grad():
        draws = bnn.draw(4)
        parts = {
            "draws": least(lambda: bnn.draw(4), times=5),
            "passes of draws": least(lambda: draws(x), times=3),
            **{f"draws: {name}": ms for name, ms in operations(lambda: bnn.draw(4), 2).items()},
        }
        plain = {"4 passes": least(lambda: [net(x) for _ in range(4)], times=3)}
    return {"resnet18/inducing/draws": {"plain": plain, "fresh": parts}}


def hadamard_on_cpu(size: int = 4096) -> dict[str, Any]:
    """The transform of `benchmarks.hadamard`, a dense product, and a copy of the transform's input and output."""
    x, dense = torch.randn(512, size), torch.randn(size, size)
    out = torch.empty_like(x)
    with torch.no_grad():
        parts = {
            "transform": least(lambda: hadamard(x)),
            "copy of its input": least(lambda: out.copy_(x)),
            **{f"transform: {name}": ms for name, ms in operations(lambda: hadamard(x), 5).items()},
        }
        plain = {"dense product": least(lambda: x @ dense, times=4)}
    return {f"hadamard/{size}": {"plain": plain, "transform": parts}}


def deep_gp_on_cpu() -> dict[str, Any]:
    """Operations in a training step of `benchmarks.deep_gp`, ours and gpytorch's."""
    x = torch.randn(deep_gp.BATCH, deep_gp.INPUTS)
    y = torch.sin(x.sum(-1))
    ours, peer = deep_gp.ours(x, y, "global"), deep_gp.peer(x, y, shared=False)
    return {"deep_gp/step": {"plain": operations(peer, 5), "global": operations(ours, 5)}}


ON_CPU = {
    "mlp": mlp_on_cpu,
    "resnet18/inducing/draws": inducing_on_cpu,
    "hadamard/4096": hadamard_on_cpu,
    "hadamard/16384": lambda: hadamard_on_cpu(16384),
    "deep_gp/step": deep_gp_on_cpu,
}


def operations(run: Callable[[], Any], repeats: int = 20, most: int = 12) -> dict[str, float]:
    """Milliseconds of a call, divided among torch's operations in proportion to their time in a profile, the longest first."""
    for _ in range(3):
        run()
    with profile(activities=[ProfilerActivity.CPU]) as found:
        for _ in range(repeats):
            run()
    times = Counter({event.key: event.self_cpu_time_total for event in found.key_averages()})
    whole = least(run, times=repeats) / sum(times.values())
    times = Counter({key: share * whole for key, share in times.items()})
    least_named = sum(times.values()) / 100
    named = {name.removeprefix("aten::"): round(ms, 3) for name, ms in times.most_common(most) if ms > least_named}
    return named | {"other operations": round(sum(times.values()) - sum(named.values()), 3)}


def main() -> None:
    options = parser(__doc__, rows=["*"], limit=600.0, cpu=False).parse_args()
    torch.manual_seed(0)
    if options.cpu:
        figures: dict[str, Any] = {}
        for name, look in networks_gpu.selected(ON_CPU, options.rows).items():
            try:
                figures |= look()
            except ImportError as error:  # gpytorch may be missing
                print(name, error)
            record("profiles_cpu", figures, keep=options.rows != ["*"])
        return
    begin, found = time.perf_counter(), {}
    for name, (make, passes) in networks_gpu.selected(ROWS | SLOW, options.rows).items():
        if time.perf_counter() - begin > options.limit:
            print("no time for", name, flush=True)
            continue
        try:
            found[name] = accounts(make(), max(passes, 1), 1 if name in SLOW else 12)
        except Exception as error:  # one failing row must not stop the others
            print(name, repr(error)[:300], flush=True)
        torch.cuda.empty_cache()
        record("profiles_gpu", found, keep=options.rows != ["*"], quiet=True)
        print(name, flush=True)


if __name__ == "__main__":
    main()
