"""A posterior of ResNet-18 in one ONNX file that draws: size, calibration beside torch's, and time beside the plain network's.

    python -m benchmarks.onnx_sampling train FOLDER [--device cuda]      inducing weights on Fashion-MNIST, stored in FOLDER
    python -m benchmarks.onnx_sampling calibrate FOLDER [--device cuda]  scores by the file's numbers and by torch's, on all images
    python -m benchmarks.onnx_sampling measure FOLDER                    export and run it on a CPU; needs the extra `onnx`

`calibrate` makes draws from the normal numbers that the file makes (`normals`), by the graph that is in the file, and runs them in
torch; `measure` shows that ONNX Runtime gives the same outputs for the same numbers.

The aims: a file of at most 30 % of the network's own, and an expected calibration error within 0.005 of torch's.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import torch
from torch.utils.data import DataLoader, TensorDataset

import bayesify
from bayesify import likelihoods, metrics, models, posteriors
from bayesify.datasets import images
from bayesify.predictive.base import Outputs
from benchmarks.timing import ratios, record

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
    """Scores of 16 draws each by three seeds of the file's normal numbers, and of torch's own."""
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
            scores = metrics.evaluate(bnn.predict(x, draws=draws.detach()), y)
            figures[f"{name}, seed {seed}"] = {key: round(float(scores[key]), 5) for key in ("accuracy", "nll", "ece")}
            print(name, seed, figures[f"{name}, seed {seed}"], flush=True)
    record("onnx_calibration", figures, images=len(x), draws=NUM_DRAWS)


def measure(folder: Path, images_used: int) -> None:
    """Export with 1 and 16 draws, compare with torch, time."""
    import onnxruntime

    from bayesify.adapters import export_onnx

    bnn = bayesify.load(folder / "inducing.safetensors", network()).eval()
    net = bnn.mean_network().eval()
    x, y = (part[:images_used] for part in tensors(train=False))
    figures: dict[str, float] = {"network_megabytes": round(4 * bayesify.count_parameters(net) / 1e6, 3)}
    one = x[:1].numpy()
    sessions = {}
    for count in (1, NUM_DRAWS):
        made = export_onnx(bnn, folder / f"draws-{count}.onnx", x[:2], num_draws=count, sample=True)
        sessions[count] = onnxruntime.InferenceSession(str(made.path), providers=["CPUExecutionProvider"])
        figures[f"file_over_network_{count}"] = round(made.path.stat().st_size / figures["network_megabytes"] / 1e6, 4)
        figures[f"difference_from_torch_{count}"] = made.largest_difference
    torch.onnx.export(net.eval(), (x[:1],), folder / "plain.onnx", dynamo=True, verbose=False)
    plain = onnxruntime.InferenceSession(str(folder / "plain.onnx"), providers=["CPUExecutionProvider"])
    name = plain.get_inputs()[0].name
    seeds = iter(range(10**9))

    def drawn(count: int) -> np.ndarray:
        return sessions[count].run(["probs"], {"x": one, "seed": np.array(next(seeds))})[0]

    times = ratios(lambda: plain.run(None, {name: one}), lambda: drawn(1), lambda: drawn(NUM_DRAWS), seconds=8.0)
    figures |= {f"time_over_plain_{count}": round(value, 2) for count, value in zip(sessions, times, strict=True)}
    probs = {
        "torch": bnn.predict(x, NUM_DRAWS, generator=torch.Generator().manual_seed(1)).probs,
        "onnx": torch.from_numpy(
            np.concatenate(
                [
                    sessions[NUM_DRAWS].run(["probs"], {"x": part.numpy(), "seed": np.array(7)})[0]
                    for part in x.split(100)
                ]
            )
        ),
        "mean_network": torch.cat([net(part).softmax(-1).detach() for part in x.split(100)]),
    }
    for kind, found in probs.items():
        prediction = likelihoods.Categorical().predictive(Outputs(kept=found.log().unsqueeze(0)))
        figures |= {f"{kind}_{key}": round(float(value), 5) for key, value in metrics.evaluate(prediction, y).items()}
    record("onnx_sampling_cpu", figures, images=images_used, draws=NUM_DRAWS, onnxruntime=onnxruntime.__version__)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("stage", choices=["train", "calibrate", "measure"])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--images", type=int, default=10_000)
    given = parser.parse_args()
    if given.stage == "train":
        train(given.folder, given.device, given.epochs)
    elif given.stage == "calibrate":
        calibrate(given.folder, given.device, given.images)
    else:
        measure(given.folder, given.images)


if __name__ == "__main__":
    main()
