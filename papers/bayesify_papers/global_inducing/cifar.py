"""CIFAR-10 with the 32-channel residual network, without augmentation and tempering (section 3.4, table 1).

    python -m bayesify_papers.global_inducing.cifar --out DIR [--systems gi] [--priors spatial] [--epochs 100] [--device cuda]

There are 500 inducing images, chosen at random from the training set. A step has a batch of 500 and one draw. As in the authors'
code, there are 1,000 epochs, convolutions have no biases, and images have the authors' normalization. The log precisions of gi's
pseudo-outputs start at -4 (at 0 in the last layer), and those of li at 0. Log precisions have three times the learning rate. The
page of the paper lists the settings that differ from the authors' code. The factor on the KL rises in ten steps over the first
`--warm-up` epochs. The authors' learning rate is constant, but the first version of their code calls a scheduler that it does not
define. Here the learning rate is 0.01 for 70 % of the epochs and then falls to a fiftieth of this. So a run that has done at most
70 % of its epochs can be continued to any other number of epochs as if it had been started with this number. Means of factorized
layers are in units of the prior. On a GPU, the network runs in bfloat16 with images in channels-last layout.

Each training run writes a checkpoint every `--stored` epochs and on Ctrl-C, and the same command resumes it. Training runs whose
scores are in the folder are not repeated. `--no-train` scores the checkpoint without training, on any device. Predictions and the
bound use 32 draws in float32. For the bound, each draw sees its own part of the training images, and each image is used once.
"""

import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from bayesify import BayesianNetwork, History, bayesianize, fit
from bayesify.datasets import images
from bayesify.likelihoods import Categorical
from bayesify.models import narrow_resnet
from bayesify.posteriors import GlobalInducing, LocalInducing, MeanField, Posterior
from bayesify.priors import Neal, Prior, Scale, SpatialInverseWishart
from bayesify.training import Checkpointing, Steps
from bayesify.training.checkpoints import Checkpoint, set_model_state
from bayesify_papers.global_inducing import rows
from bayesify_papers.shared import records
from bayesify_papers.shared.batches import MemoryBatches
from bayesify_papers.shared.program import Program, fill
from bayesify_papers.shared.rows import show
from bayesify_papers.shared.scores import classification_scores
from bayesify_papers.shared.sources import Normalization, as_labels

SYSTEMS = ("fac", "li", "fac-gi", "gi")
PRIORS: dict[str, type[Prior]] = {"spatial": SpatialInverseWishart, "scale": Scale, "neal": Neal}
CHANNEL_MOMENTS = ((0.4914, 0.4822, 0.4465), (0.2023, 0.1994, 0.2010))
"""Mean and scale of the authors' normalization, by channel."""

LAST_LAYER = "9"
"""Name of the network's linear layer."""


@dataclass(frozen=True)
class Setting:
    """Settings of a training run.

    Args:
        epochs: Number of passes over the training images.
        points: Number M of inducing images.
        batch: Number of images per step.
        warm_up: Epochs over which the factor on the KL rises from 0 to 1; 100 in the authors' code with `--temperL`.
        learning_rate: Initial learning rate of Adam. Log precisions have three times this rate.
        width: Number of channels.
        passes: Number of epochs per entry of the history.
        stored: Number of epochs between checkpoints. A checkpoint of gi has 0.7 GB.
        precision: Floating-point precision of the network in training on a GPU.
        draws: Number of draws for predictions and for the bound.
        seed: Seed of all random numbers.
    """

    epochs: int = 1000
    points: int = 500
    batch: int = 500
    warm_up: int = 100
    learning_rate: float = 1e-2
    width: int = 32
    passes: int = 10
    stored: int = 100
    precision: str = "bf16"
    draws: int = 32
    seed: int = 0


def rate(share: float) -> float:
    """Factor on the learning rate after a share of the epochs."""
    return float(0.02 ** (max(0.0, share - 0.7) / 0.3))


def kl_weight(share: float) -> float:
    """Factor on the KL after a share of the warm-up."""
    return min(1.0, math.floor(10 * share + 1e-9) / 10)


def normalization(data: images.Images) -> Normalization:
    """Shift and scale of images: the authors' numbers for CIFAR-10, otherwise from the images themselves."""
    scale = Normalization(data.train_images)
    if data.name == "cifar10":
        scale.mean, scale.std = (255 * torch.tensor(values).reshape(1, -1, 1, 1) for values in CHANNEL_MOMENTS)
    return scale


def make_posterior(system: str, x: Tensor, y: Tensor, points: int) -> Posterior | dict[str, Posterior]:
    """The posterior of a system. Global inducing images start at training images, and the last layer's V at their labels."""
    if system == "fac":
        return MeanField(init_std=1e-2, units="prior")
    if system == "li":
        return LocalInducing(points)
    chosen = torch.randperm(len(x))[:points].to(x.device)
    inducing = GlobalInducing(x[chosen].cpu(), y[chosen].cpu(), precision=math.exp(-4), last_precision=1.0)
    return inducing if system == "gi" else {LAST_LAYER: inducing, "*": MeanField(init_std=1e-2, units="prior")}


def make(system: str, prior: str, x: Tensor, y: Tensor, setting: Setting) -> BayesianNetwork:
    """The network before training.

    Args:
        system: One of `SYSTEMS`.
        prior: A key of `PRIORS`.
        x: Training images, normalized, [N, C, H, W].
        y: Labels of the inputs.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(setting.seed)
        net = narrow_resnet(int(y.max()) + 1, x.shape[1], setting.width)
        for module in net.modules():
            if isinstance(module, nn.Conv2d):
                module.bias = None
        posterior = make_posterior(system, x, y, setting.points)
        return bayesianize(net, posterior, likelihood=Categorical(), prior=PRIORS[prior]()).to(x.device)


def run(
    system: str,
    prior: str,
    data: images.Images,
    setting: Setting,
    checkpoint: Path,
    device: str = "cpu",
    training: bool = True,
) -> dict[str, Any]:
    """Train, or resume training, and score.

    Args:
        system: One of `SYSTEMS`.
        prior: A key of `PRIORS`.
        training: Whether to train. Otherwise the checkpoint is scored as it is.
    """
    scale = normalization(data)
    x = scale(data.train_images, torch.device(device)).contiguous(memory_format=torch.channels_last)
    y = as_labels(data.train_labels).to(device)
    bnn = make(system, prior, x, y, setting)
    history: Sequence[Mapping[str, Any]]
    if training:
        history, epochs = train(bnn, x, y, setting, checkpoint, f"{system}, {prior}"), setting.epochs
    else:
        stored = Checkpoint.read(checkpoint)
        set_model_state(bnn, stored.model)
        history, epochs = stored.history, stored.position["steps"] // (len(x) // setting.batch)
    bnn.eval()
    scores = score(bnn, x, y, scale(data.test_images, torch.device(device)), data.test_labels, setting)
    return {
        **scores,
        "epochs": epochs,
        "seconds": round(sum(row["seconds"] for row in history), 1),
        "history": history,
    }


def train(bnn: BayesianNetwork, x: Tensor, y: Tensor, setting: Setting, checkpoint: Path, label: str = "") -> History:
    """Train, or resume from a checkpoint.

    Args:
        bnn: Network to train; changed in place.
        x: Images, [N, C, H, W].
        y: Labels, [N].

    Returns:
        History of the epochs, see `bayesify.History`.
    """

    loader = MemoryBatches(x, y, setting.batch, passes=setting.passes)
    steps = setting.epochs // setting.passes * len(loader)

    def adam(_: Any) -> torch.optim.Optimizer:
        groups: dict[bool, list[nn.Parameter]] = {False: [], True: []}
        for name, parameter in bnn.named_parameters():
            groups["log_precision" in name].append(parameter)
        rates = {False: setting.learning_rate, True: 3 * setting.learning_rate}
        chosen = [{"params": own, "lr": rates[which]} for which, own in groups.items() if own]
        return torch.optim.Adam(chosen, fused=True)

    def report(_: Any, history: History) -> None:
        row = history[-1]
        bound = row["elbo"] / len(x)
        done = setting.passes * row["epoch"]
        print(f"{label}: epoch {done}, bound {bound:.4f} per example, {row['seconds']:.1f} s", flush=True)

    return fit(
        bnn,
        loader,
        num_data=len(x),
        epochs=setting.epochs // setting.passes,
        optimizer=adam,
        scheduler=lambda chosen: torch.optim.lr_scheduler.LambdaLR(chosen, lambda done: rate(done / steps)),
        steps=Steps(scheduler="step"),
        kl_schedule=lambda done: kl_weight(done * setting.passes / setting.warm_up),
        num_draws=1,
        precision=setting.precision if x.is_cuda else "float32",
        checkpoint=Checkpointing(checkpoint, every=setting.stored * (len(x) // setting.batch)),
        callbacks=[report],
        seed=setting.seed,
        progress=False,
    )


@torch.no_grad()
def score(
    bnn: BayesianNetwork, x: Tensor, y: Tensor, x_test: Tensor, labels: np.ndarray, setting: Setting
) -> dict[str, float]:
    """Accuracy, log-likelihood and ECE on test images, and the bound on training images per example, in nats."""
    generator = torch.Generator(device=x.device).manual_seed(setting.seed)
    prediction: Any = bnn.predict(x_test, setting.draws, generator=generator)
    scores = classification_scores(prediction, as_labels(labels).to(x.device))
    bound = 0.0
    for start in range(setting.draws):
        own_x, own_y = x[start :: setting.draws], y[start :: setting.draws]
        draw = bnn.draw(1, generator=generator)
        for part_x, part_y in zip(own_x.split(setting.batch), own_y.split(setting.batch), strict=True):
            bound += float(draw(part_x)[0].double().log_softmax(-1).gather(-1, part_y.unsqueeze(-1)).sum())
        bound -= float(draw.kl.mean()) / setting.draws
    return {**scores, "log_likelihood": -scores["nll"], "elbo": bound / len(x)}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the experiment from the command line."""
    program = Program(__doc__, __spec__, "global-inducing-cifar").choice("systems", SYSTEMS, ["gi"])
    program.choice("priors", PRIORS, ["spatial"]).option("data", device="cpu", dataset="cifar10", train=True)
    chosen = program.settings(Setting()).read(arguments)
    setting, systems, priors = fill(Setting, chosen), chosen.systems, chosen.priors
    if chosen.smoke:
        setting, systems, priors = (
            Setting(epochs=2, points=6, batch=20, warm_up=1, width=4, passes=1, draws=2),
            SYSTEMS,
            ["spatial"],
        )
        data = images.synthetic(40, 20, side=8)
    else:
        data = images.load(chosen.dataset, chosen.data)
    path = chosen.out / "results.json"
    settings = {"settings": asdict(setting), "dataset": data.name}
    content = records.begin_run(path, settings, chosen.facts, scores={})
    found: dict[str, Any] = content["scores"]
    for prior in priors:
        for system in systems:
            name = f"{system}_{prior}"
            if found.get(name, {}).get("epochs") == setting.epochs:
                continue
            checkpoint = chosen.out / f"{name}.safetensors"
            found[name] = run(system, prior, data, setting, checkpoint, chosen.device, chosen.train)
            records.write(path, content)
            if chosen.train:
                checkpoint.unlink(missing_ok=True)
    print(show(rows.cifar(chosen.out), "No augmentation, no tempering; log-likelihood and bound in nats per example."))
    return 0


if __name__ == "__main__":
    sys.exit(main())
