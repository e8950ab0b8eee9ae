"""A posterior of ResNet-18 in one ONNX file that makes its own draws: size, calibration compared with torch's, and time.

    python -m benchmarks.onnx_sampling train FOLDER [--device cuda]      inducing weights on Fashion-MNIST, stored in FOLDER
    python -m benchmarks.onnx_sampling calibrate FOLDER [--device cuda]  scores by the file's numbers and by torch's, on all images
    python -m benchmarks.onnx_sampling measure FOLDER                    export and run it on a CPU; needs the extra `onnx`
    python -m benchmarks.onnx_sampling int8 FOLDER                       the same draw in float32 and in int8

`calibrate` makes draws by the file's graph from the file's normal numbers (`normals`) and runs them in torch. `measure` runs the
files in ONNX Runtime: first times of one image on one thread, then scores next to torch's. It keeps predictions in FOLDER, so that
an interrupted run can resume.

The aims are a file of at most 30 % of the network's size and an expected calibration error within 0.005 of torch's.
"""

import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, TensorDataset

import bayesify
from bayesify import likelihoods, metrics, models, posteriors
from bayesify.datasets import images
from bayesify.predictive.base import Outputs
from benchmarks.runs import parser
from benchmarks.timing import clock, ratios, record
from tools import markdown

NUM_DRAWS = 16


def network() -> torch.nn.Module:
    """ResNet-18 with the stem for small images, one channel."""
    torch.manual_seed(0)
    return models.resnet18(in_channels=1)


def tensors(train: bool) -> tuple[torch.Tensor, torch.Tensor]:
    own = images.load("fashion_mnist")
    x, y = (own.train_images, own.train_labels) if train else (own.test_images, own.test_labels)
    return torch.from_numpy(x).float().div(255).reshape(-1, 1, 28, 28), torch.from_numpy(y).long()


def train(folder: Path, device: str, epochs: int) -> None:
    """Train the plain network by maximum likelihood, then inducing weights that start at it."""
    loader = DataLoader(TensorDataset(*tensors(train=True)), batch_size=250, shuffle=True)
    law = likelihoods.Categorical()
    plain = bayesify.bayesianize(network().to(device), posteriors.Point(), likelihood=law)
    bayesify.fit(plain, loader, epochs=epochs, kl_weight=0.0, seed=0)
    net = plain.mean_network()
    bnn = bayesify.bayesianize(net, posteriors.InducingWeights(64, 64, init="network"), likelihood=law)
    bayesify.fit(bnn, loader, epochs=epochs, seed=0)
    folder.mkdir(parents=True, exist_ok=True)
    bayesify.save(bnn, folder / "inducing.safetensors")


def calibrate(folder: Path, device: str, images_used: int) -> None:
    """Scores of 16 draws for three seeds of the file's normal numbers and of torch's."""
    from concurrent.futures import ThreadPoolExecutor

    from bayesify import Draws
    from bayesify.adapters.onnx_sampling import SamplingGraph, normals

    bnn = bayesify.load(folder / "inducing.safetensors", network()).eval()
    graph = SamplingGraph(bnn, None, ())
    torch.set_num_threads(1)

    @torch.no_grad()
    def drawn(pair: tuple[int, int]) -> list[torch.Tensor]:
        found: list[torch.Tensor] = graph.drawing(torch.from_numpy(normals(*pair, graph.noise_size)))
        return [weight.to(device) for weight in found]

    with ThreadPoolExecutor(4) as pool:
        pairs = [(seed, index) for seed in range(3) for index in range(NUM_DRAWS)]
        made = dict(zip(pairs, pool.map(drawn, pairs), strict=True))
    bnn.to(device)
    x, y = (part[:images_used].to(device) for part in tensors(train=False))
    runner, figures = bnn.draw(1).runner, {}
    for seed in range(3):
        stacked = [torch.stack(parts) for parts in zip(*(made[seed, index] for index in range(NUM_DRAWS)), strict=True)]
        own = Draws(runner, dict(zip(graph.names, stacked, strict=True)), torch.zeros(NUM_DRAWS, device=device))
        ways = {"file": own, "torch": bnn.draw(NUM_DRAWS, generator=torch.Generator().manual_seed(seed))}
        for name, draws in ways.items():
            found = metrics.evaluate(bnn.predict(x, draws=draws.detach()), y)
            figures[f"{name}, seed {seed}"] = {key: round(float(found[key]), 5) for key in ("accuracy", "nll", "ece")}
            print(name, seed, figures[f"{name}, seed {seed}"], flush=True)
    record("onnx_calibration", figures, images=len(x), draws=NUM_DRAWS)


def measure(folder: Path, images_used: int, threads: int) -> None:
    """Sizes and times of the files, then scores of each file and of torch. An interrupted run resumes."""
    import onnxruntime

    bnn = bayesify.load(folder / "inducing.safetensors", network()).eval()
    net = bnn.mean_network().eval()
    x, y = (part[:images_used] for part in tensors(train=False))
    path = folder / "figures.json"
    if not path.exists():
        path.write_text(json.dumps(sizes_and_times(bnn, net, x, folder)))
    figures = json.loads(path.read_text())
    torch.set_num_threads(threads)

    def drawn_by_file(name: str) -> torch.Tensor:
        running = session(folder, name, threads)
        return torch.from_numpy(np.concatenate([run(running, part, 0) for part in x.split(500)]))

    draws = bnn.draw(NUM_DRAWS, generator=torch.Generator().manual_seed(0)).detach()
    predictions: dict[str, Callable[[], torch.Tensor]] = {
        "onnx": lambda: drawn_by_file("16"),
        "torch": lambda: torch.cat([bnn.predict(part, draws=draws).probs for part in x.split(500)]),
        "int8": lambda: drawn_by_file("16_int8"),
        "mean_network": lambda: torch.cat([net(part).softmax(-1).detach() for part in x.split(500)]),
    }
    for kind, predict in predictions.items():
        path = folder / f"probs-{kind}-{len(x)}.pt"
        if not path.exists():
            torch.save(predict(), path)
        figures |= scores(kind, torch.load(path), y)
        facts = {"images": len(x), "draws": NUM_DRAWS, "seed": 0, "latency": "one image, one thread"}
        record("onnx_sampling_cpu", figures, **facts, onnxruntime=onnxruntime.__version__)


def measure_int8(folder: Path, images_used: int) -> None:
    """Scores of the same draw by a file in float32 and by a file in int8."""
    from bayesify.adapters import export_onnx

    bnn = bayesify.load(folder / "inducing.safetensors", network()).eval()
    x, y = (part[:images_used] for part in tensors(train=False))
    figures: dict[str, float] = {}
    for kind in ("float32", "int8"):
        path = folder / f"one-{kind}.onnx"
        if not path.exists():
            export_onnx(bnn, path, x[:2], num_draws=1, sample=True, int8=kind == "int8")
        running = session(folder, path.stem, torch.get_num_threads())
        probs = torch.from_numpy(np.concatenate([run(running, part, 0) for part in x.split(250)]))
        figures |= scores(kind, probs, y)
        figures[f"{kind}_megabytes"] = round(path.stat().st_size / 1e6, 2)
    record("onnx_int8", figures, images=len(x), draws=1, seed=0)


def scores(kind: str, probs: torch.Tensor, y: torch.Tensor) -> dict[str, float]:
    """Scores of class probabilities [B, K], by names that begin with a kind."""
    found = likelihoods.Categorical().predictive(Outputs(kept=probs.log().unsqueeze(0)))
    return {f"{kind}_{key}": round(float(value), 5) for key, value in metrics.evaluate(found, y).items()}


def sizes_and_times(
    bnn: bayesify.BayesianNetwork, net: torch.nn.Module, x: torch.Tensor, folder: Path
) -> dict[str, float]:
    """Export with 1 and 16 draws, in float32 and in int8, and time one image on one thread."""
    from bayesify.adapters import export_onnx

    figures: dict[str, float] = {"network_megabytes": round(4 * bayesify.count_parameters(net) / 1e6, 3)}
    files = {"1": (1, False), "16": (NUM_DRAWS, False), "16_int8": (NUM_DRAWS, True)}
    for name, (count, int8) in files.items():
        made = export_onnx(bnn, folder / f"{name}.onnx", x[:2], num_draws=count, sample=True, int8=int8)
        figures[f"file_over_network_{name}"] = round(made.path.stat().st_size / figures["network_megabytes"] / 1e6, 4)
        if not int8:
            figures[f"difference_from_torch_{name}"] = made.largest_difference
        print(figures, flush=True)
    torch.onnx.export(net, (x[:1],), folder / "plain.onnx", dynamo=True, verbose=False)
    plain, one = session(folder, "plain", 1), x[:1].numpy()
    given, seeds = plain.get_inputs()[0].name, itertools.count()
    drawing = {name: session(folder, name, 1) for name in files}
    ways = [lambda name=name: run(drawing[name], x[:1], next(seeds)) for name in files]
    times = ratios(lambda: plain.run(None, {given: one}), *ways, seconds=30.0)
    figures |= {f"time_over_plain_{name}": round(value, 2) for name, value in zip(files, times, strict=True)}
    figures["seconds_plain"] = round(min(clock(lambda: plain.run(None, {given: one})) for _ in range(10)), 5)
    return figures


def session(folder: Path, name: str, threads: int) -> Any:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    return onnxruntime.InferenceSession(str(folder / f"{name}.onnx"), options, ["CPUExecutionProvider"])


def run(running: Any, x: torch.Tensor, seed: int) -> np.ndarray:
    """Class probabilities [B, K] by a file's own draws."""
    found: np.ndarray = running.run(["probs"], {"x": x.numpy(), "seed": np.array(seed)})[0]
    return found


def table(figures: dict[str, float]) -> str:
    """The guide's table, in Markdown."""
    lines = []
    named = {
        "the network at the mean": ("", "mean_network"),
        "torch, 16 draws": ("", "torch"),
        "file, 1 draw": ("1", ""),
        "file, 16 draws": ("16", "onnx"),
        "file in int8, 16 draws": ("16_int8", "int8"),
    }
    for title, (file, scored) in named.items():
        forms = {f"file_over_network_{file}": "{:.1%}", f"time_over_plain_{file}": "{:.3g}"}
        forms |= dict.fromkeys((f"{scored}_{key}" for key in ("accuracy", "nll", "ece")), "{:.4f}")
        cells = [form.format(figures[key]) if key in figures else "" for key, form in forms.items()]
        if any(cells):
            lines.append([title, *cells])
    return markdown.table(["", "size of the network's", "passes for one image", "accuracy", "NLL", "ECE"], lines)


def int8_table(figures: dict[str, float]) -> str:
    """The guide's table of one draw in float32 and in int8, in Markdown."""
    lines = []
    for kind in ("float32", "int8"):
        cells = [f"{figures[f'{kind}_{key}']:.4f}" for key in ("accuracy", "nll", "ece", "brier")]
        lines.append([kind, *cells, f"{figures[f'{kind}_megabytes']:.1f}"])
    return markdown.table(["the same draw", "accuracy", "NLL", "ECE", "Brier", "megabytes"], lines)


def main() -> None:
    options = parser(__doc__, "device", epochs=3, images=10_000, threads=1)  # threads for scores; times use one thread
    options.add_argument("stage", choices=["train", "calibrate", "measure", "int8"])
    options.add_argument("folder", type=Path)
    given = options.parse_args()
    if given.stage == "train":
        train(given.folder, given.device, given.epochs)
    elif given.stage == "calibrate":
        calibrate(given.folder, given.device, given.images)
    elif given.stage == "int8":
        measure_int8(given.folder, given.images)
    else:
        measure(given.folder, given.images, given.threads)


if __name__ == "__main__":
    main()
