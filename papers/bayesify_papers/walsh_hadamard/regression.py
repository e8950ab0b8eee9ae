"""Regression on UCI data as in appendix D. All splits of a data set train at once, and a later run resumes from stored results."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from importlib import resources
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from bayesify import BayesianNetwork, bayesianize
from bayesify.baselines import NoisyKFAC
from bayesify.datasets import Standardization, uci
from bayesify.likelihoods import Gaussian
from bayesify.models import mlp
from bayesify.posteriors import Dropout, MatrixNormal, MeanField, Posterior, WalshHadamard
from bayesify.priors import Neal
from bayesify.training import Checkpointing, ModelStack
from bayesify.training.schedules import cosine
from bayesify.transforms import next_power_of_two
from bayesify_papers.shared import records
from bayesify_papers.shared.batches import MemoryBatches
from bayesify_papers.shared.published import Score, published
from bayesify_papers.walsh_hadamard.stacked_training import Recipe, train

MODELS: dict[str, Callable[[], Posterior]] = {
    "WHVI": lambda: WalshHadamard(init_std=1e-3),
    "MFG": lambda: MeanField(init_std=1e-3),
    "MCD": lambda: Dropout(0.005),
    "NNG": lambda: MatrixNormal(init_std=0.02),
}
"""Posteriors by the paper's names."""


@dataclass(frozen=True)
class Setting:
    """A network and its posterior, without data and schedule.

    Args:
        model: A key of `MODELS`.
        hidden_layers: Number of hidden layers.
        width: Number of units of each hidden layer.
        prior_scale: Standard deviation of the prior times the root of the fan-in (`priors.Neal`).
        init_scale: Factor on torch's initial weights.
        point_biases: Whether biases are point estimates without a prior. Otherwise they are under the posterior.
        shrink: Factor by which the initial g and its prior are smaller, and $S_1 S_2$ larger, than the library's; see `rescale`.
        activation: `"relu"` or `"tanh"`.
        covariance: Covariance of q(g) for WHVI, `"diagonal"` or `"full"`.
        noise: Initial noise variance, of standardized targets or in their own unit.
        own_unit: Whether `noise` is in the targets' own unit.
        output_row: Whether a single output's weights are the first row of one block as wide as the layer's inputs, as in the
            authors' code. The network then has as many outputs as the block, and all but the first are dropped. Otherwise the
            weights are one smaller block, read row by row.
        validation: Whether to set aside a tenth of the training rows and score it instead of the test rows.
    """

    model: str
    hidden_layers: int
    width: int
    prior_scale: float = 1.0
    init_scale: float = 1.0
    point_biases: bool = False
    shrink: float = 1.0
    activation: Literal["relu", "tanh"] = "relu"
    covariance: Literal["diagonal", "full"] = "diagonal"
    noise: float = 0.1
    own_unit: bool = False
    output_row: bool = False
    validation: bool = False

    def __post_init__(self) -> None:
        if self.shrink != 1 and (self.model != "WHVI" or not self.point_biases):
            raise ValueError(
                f"Setting: shrink={self.shrink} needs WHVI with point_biases=True, so that the prior covers g alone"
            )

    def stem(self, dataset: str) -> str:
        """Stem of the file names of a training run."""
        stem = f"{dataset}-{self.model.lower()}-{self.hidden_layers}x{self.width}"
        if not self.validation:
            return stem
        kind = f"{self.activation}-{self.covariance}{'-points' if self.point_biases else ''}"
        return f"{stem}-{kind}-prior{self.prior_scale:g}-init{self.init_scale:g}-shrink{self.shrink:g}-validation"


@dataclass(frozen=True)
class Rows:
    """Standardized rows of all splits of a data set.

    Args:
        x: Training inputs, [R, N, D].
        y: Training targets, [R, N, O].
        tests: Inputs and targets to score, for each split.
        units: Standard deviation of the targets in their own unit, for each split. Several targets are all divided by the root mean
            square of their standard deviations, so that one noise variance remains one in their own unit.
    """

    x: Tensor
    y: Tensor
    tests: list[tuple[Tensor, Tensor]]
    units: list[float]

    @classmethod
    def of(cls, data: uci.Table, splits: Sequence[uci.Split], validation: bool = False) -> Rows:
        """Scale each split by the statistics of its training rows.

        Args:
            splits: Splits with equal numbers of training rows.
            validation: See `Setting`.
        """
        parts: list[tuple[Tensor, Tensor, tuple[Tensor, Tensor], float]] = []
        for index, split in enumerate(splits):
            rows = split.with_validation(0.1, seed=index) if validation else split
            scale_x, scale_y = Standardization.of(data.X[rows.train]), Standardization.of(data.y[rows.train])
            common = np.full_like(scale_y.std, np.sqrt(np.square(scale_y.std).mean()))
            scale_y = Standardization(scale_y.mean, common)

            def part(
                which: np.ndarray, scale_x: Standardization = scale_x, scale_y: Standardization = scale_y
            ) -> tuple[Tensor, Tensor]:
                x, y = scale_x(data.X[which]), scale_y(data.y[which])
                return torch.from_numpy(x).float(), torch.from_numpy(y).float()

            scored = part(rows.validation if validation else rows.test)
            parts.append((*part(rows.train), scored, float(scale_y.std[0, 0])))
        x, y, tests, units = zip(*parts, strict=True)
        return cls(torch.stack(x), torch.stack(y), list(tests), list(units))


def both_targets(data: uci.Table) -> uci.Table:
    """Energy and naval with both of their targets, as in the paper; other data sets unchanged.

    The standard splits have the first target: energy's heating load, naval's compressor. Energy's cooling load is in
    `energy_cooling.txt`. Naval's rows are a grid of 51 compressor states, 26 turbine states from 0.975 to 1, and 9 speeds, the last
    varying fastest (Coraddu et al. 2016). So the number of a row determines its turbine state.

    Raises:
        ValueError: If rows are not in the order of the original file.
    """
    if data.name == "energy":  # 12 shapes by 4 orientations, for each glazing area and its distribution
        places = [0, *[1, 2, 3, 4, 5] * 3]
        known = np.column_stack([np.tile(np.arange(2, 6), 192), np.repeat(places, 48)])
        ordered = data.X.shape == (768, 8) and np.array_equal(data.X[:, [5, 7]], known)
        text = resources.files("bayesify_papers.walsh_hadamard").joinpath("energy_cooling.txt").read_text("utf-8")
        second = np.loadtxt(text.splitlines()).ravel()
    elif data.name == "naval":
        compressor = np.repeat(0.95 + 0.001 * np.arange(51), 26 * 9)
        ordered = data.y.shape == (51 * 26 * 9, 1) and np.allclose(data.y[:, 0], compressor)
        second = np.tile(np.repeat(0.975 + 0.001 * np.arange(26), 9), 51)
    else:
        return data
    if not ordered:
        raise ValueError(f"{data.name}: the rows are not in the order of the original file; give the original file")
    return replace(data, y=np.column_stack([data.y, second]))


def make(setting: Setting, inputs: int, seed: int, *, outputs: int = 1, unit: float = 1.0) -> BayesianNetwork:
    """The untrained network of a setting.

    Args:
        unit: Standard deviation of the targets in their own unit.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        activation = nn.ReLU if setting.activation == "relu" else nn.Tanh
        made = next_power_of_two(setting.width) if setting.output_row else outputs
        net = mlp([inputs, *[setting.width] * setting.hidden_layers, made], activation)
        if made > outputs:
            net.append(FirstOutputs(outputs))
        with torch.no_grad():
            for parameter in net.parameters():
                parameter.mul_(setting.init_scale)
        noise = setting.noise / unit**2 if setting.own_unit else setting.noise
        likelihood, prior = Gaussian(noise=noise), Neal(setting.prior_scale / setting.shrink)
        posterior = (
            WalshHadamard(setting.covariance, init_std=1e-3) if setting.model == "WHVI" else MODELS[setting.model]()
        )
        choice = {"*.weight": posterior} if setting.point_biases else posterior
        network = bayesianize(net, choice, likelihood=likelihood, prior=prior)
    if isinstance(network.posterior, WalshHadamard):
        rescale(network.posterior, setting.shrink)
    return network


class FirstOutputs(nn.Module):
    """The first `count` outputs of a network, [..., K] -> [..., count]."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.count = count

    def forward(self, x: Tensor) -> Tensor:
        """Keep the first outputs."""
        return x[..., : self.count]


@torch.no_grad()
def rescale(posterior: WalshHadamard, shrink: float) -> None:
    r"""Divide g by a factor and multiply $S_1$ and $S_2$ by its root, in place.

    W keeps its distribution. If the prior of g shrinks by the same factor, the KL stays the same too. Adam's steps do not depend on
    the scale of a parameter, so they become larger relative to g. The paper's prior variance of g, 1e-5, has this effect.
    """
    for size in posterior.groups:
        family: Any = posterior.g[str(size)]
        family.mean_value.div_(shrink)
        family.log_std.sub_(math.log(shrink))
        for side in (posterior.left, posterior.right):
            side[str(size)].mul_(math.sqrt(shrink))


def judge(network: BayesianNetwork, x: Tensor, y: Tensor, unit: float, num_draws: int, seed: int) -> dict[str, float]:
    """RMSE and mean negative log-likelihood in the target's own unit, for the mixture of draws and for single draws.

    Args:
        x: Inputs, [B, D].
        y: Standardized targets, [B, O].
        unit: Number that the targets were divided by.
    """
    prediction = network.predict(x, num_draws, generator=torch.Generator().manual_seed(seed), keep_outputs=True)
    outputs = prediction.outputs.double()  # [S, B, O]
    variance = network.likelihood.noise.detach().double()  # type: ignore[union-attr, operator]
    squares = (outputs - y).square()
    density = -0.5 * (squares / variance + variance.log() + math.log(2 * math.pi)).sum(-1)  # [S, B]
    mixture = density.logsumexp(0) - math.log(num_draws)
    scale = y.shape[-1] * math.log(unit)
    return {
        "rmse": float((outputs.mean(0) - y).square().mean().sqrt()) * unit,
        "mnll": scale - float(mixture.mean()),
        "rmse_draws": float(squares.mean().sqrt()) * unit,
        "mnll_draws": scale - float(density.mean()),
    }


def run_setting(
    folder: Path,
    data: uci.Table,
    setting: Setting,
    recipe: Recipe,
    *,
    splits: int | None = None,
    num_draws: int = 64,
    facts: dict[str, Any] | None = None,
    device: str = "cpu",
) -> list[dict[str, Any]]:
    """Train one setting on all splits of a data set, or read the results of an earlier run.

    Args:
        folder: See `run_stored`.
        splits: Number of splits, from the first; all by default.
        device: Device for training. Scores are computed on a CPU.

    Returns:
        For each split the scores of `judge` and `noise_std`, the standard deviation of the noise, in the target's own unit.
    """
    stem, chosen = setting.stem(data.name), data.splits[:splits]
    about = {"setting": asdict(setting), "num_draws": num_draws, "splits": len(chosen)}
    about["recipe"] = used_settings(setting.model, recipe)
    network_of = {"model": setting.model, "hidden_layers": setting.hidden_layers, "width": setting.width}

    def work(checkpoint: Path, report: Report) -> tuple[list[dict[str, float]], float]:
        rows = Rows.of(data, chosen, setting.validation)
        options = {"outputs": rows.y.shape[-1]}
        made = [make(setting, data.X.shape[1], seed, unit=unit, **options) for seed, unit in enumerate(rows.units)]
        if setting.model == "NNG":
            seconds = train_naturally(made, rows, recipe, checkpoint, report)
        else:
            stack = ModelStack([network.to(device) for network in made])
            seconds = train(stack, rows.x.to(device), rows.y.to(device), recipe, checkpoint, report=report)
        scores = []
        for index, (network, scored, unit) in enumerate(zip(made, rows.tests, rows.units, strict=True)):
            network.cpu()
            noise_std = math.sqrt(float(network.likelihood.noise.detach())) * unit  # type: ignore[union-attr, operator]
            scores.append({**judge(network, *scored, unit, num_draws, seed=index), "noise_std": noise_std})
        return scores, seconds

    return run_stored(folder, stem, {"dataset": data.name, **network_of}, about, facts, recipe, work)


Report = Callable[[int, float], None]
"""Function called with the number of a step and the seconds until then."""


def run_stored(
    folder: Path,
    stem: str,
    network: dict[str, Any],
    about: dict[str, Any],
    facts: dict[str, Any] | None,
    recipe: Recipe,
    work: Callable[[Path, Report], tuple[list[dict[str, float]], float]],
) -> list[dict[str, Any]]:
    """Outcomes of the networks of all splits: trained now, or stored by an earlier run.

    Args:
        folder: Folder for a `.jsonl` file with a line per split, a `.json` file with the record of the run, and a temporary
            checkpoint.
        stem: Stem of the files' names.
        network: Data set, model, layers and width, for every line.
        about: Settings, which must equal those of an earlier run.
        recipe: Recipe, which has the number of steps.
        work: Function from a checkpoint file and a `Report` to scores by split and processor seconds.

    Raises:
        ValueError: If an earlier run had other settings.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path, checkpoint = folder / f"{stem}.jsonl", folder / f"{stem}.safetensors"
    record = path.with_suffix(".json")
    content = records.begin_run(record, about, {**(facts or {}), "dataset": network["dataset"]})
    if path.is_file():
        return records.read_lines(path)

    def report(step: int, seconds: float) -> None:
        print(f"{stem}: step {step:,} of {recipe.total:,}, {1e3 * seconds / step:.2f} ms each", flush=True)

    scores, seconds = work(checkpoint, report)
    outcomes = [
        {**network, "split": index, **{key: round(value, 6) for key, value in one.items()}}
        for index, one in enumerate(scores)
    ]
    records.write(record, {**content, "processor_seconds": round(seconds, 1)})
    records.write_lines(path, outcomes)
    for used in (checkpoint, *folder.glob(split_checkpoint(checkpoint, "*").name)):
        used.unlink(missing_ok=True)
    return outcomes


def used_settings(model: str, recipe: Recipe) -> dict[str, Any]:
    """The settings of a recipe that a model is trained with. Noisy K-FAC (`"NNG"`) uses only the number of steps and the batch."""
    return {"batch": recipe.batch, "steps": recipe.total, **NATURAL} if model == "NNG" else asdict(recipe)


NATURAL: dict[str, Any] = {"learning_rate": 0.1, "num_draws": 4, "antithetic": True}
"""Settings of noisy K-FAC."""


def train_naturally(
    networks: Sequence[BayesianNetwork], rows: Rows, recipe: Recipe, checkpoint: Path, report: Report
) -> float:
    """Train the networks of the splits one after the other by noisy K-FAC (`NoisyKFAC`), and return processor seconds.

    Args:
        networks: Networks with `MatrixNormal` posteriors; changed in place.
        recipe: Recipe with the batch size and the number of steps, which is rounded to whole epochs. The learning rate falls
            along half a cosine, as in `bayesify.compare`. Other settings are in `NATURAL`.
        checkpoint: File whose name, with the number of the split, becomes the checkpoint of a network. A network whose training
            has ended is not trained again.
        report: Function called after each network with its number of steps and the seconds of one network.
    """
    start = time.process_time()
    for index, network in enumerate(networks):
        x, y = rows.x[index], rows.y[index]
        loader = MemoryBatches(x, y, min(recipe.batch, len(x)))
        trainer = NoisyKFAC(network, num_data=len(x), **NATURAL)
        epochs = math.ceil(recipe.total / len(loader))
        own = Checkpointing(split_checkpoint(checkpoint, index), every=epochs * len(loader))
        trainer.fit(loader, epochs, schedule=cosine, checkpoint=own, seed=index, progress=False)
        report(epochs * len(loader), (time.process_time() - start) / (index + 1))
    return time.process_time() - start


def split_checkpoint(checkpoint: Path, split: int | str) -> Path:
    """Checkpoint of the network of one split, next to the checkpoint of all."""
    return checkpoint.with_stem(f"{checkpoint.stem}-split{split}")


def corrected(score: str, dataset: str, model: str, theirs: Score | None) -> Score | None:
    """A published score. An MNLL gains the `missing_nats` per target that the authors' likelihood omits.

    Args:
        score: `"rmse"`, `"mnll"`, or one of these over single draws.
        dataset: Name of the data set.
        model: Name of the model in the paper. Scores of NNG come from another paper and need no correction.
        theirs: Published mean and standard deviation.
    """
    paper = published("walsh_hadamard")
    if theirs is None or not score.startswith("mnll") or model not in paper["authors_models"]:
        return theirs
    targets = 2 if dataset in paper["two_targets"] else 1
    return theirs[0] + targets * paper["missing_nats"], theirs[1]
