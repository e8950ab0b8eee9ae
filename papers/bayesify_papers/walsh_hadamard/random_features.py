"""Gaussian processes with random features on five functions (appendix D.4, figure 4): test error by number of parameters.

    python -m bayesify_papers.walsh_hadamard.random_features [--out DIR] [--smoke]

The schedule is the paper's: 12,000 Adam steps, with the noise fixed for the first 10,000. Walsh-Hadamard weights of one D x D block
(n = D^2 features) are compared with the same number of parameters spent on direct inference of fewer features, and on inducing
points. The text does not give the batch size (64 here, as for its networks), and shows its results in a figure without numbers.
Every training run is stored when it ends, and the same command with the same folder resumes. Several processes can share the work,
each with its own functions and folder. `--merge` then combines the files that they wrote.
"""

import math
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from importlib.util import find_spec
from itertools import count, product
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from bayesify import fit
from bayesify.likelihoods import Gaussian
from bayesify.posteriors import FullCovariance, MeanField, WalshHadamard
from bayesify.random_features import InducingPointGP, RandomFeatureGP
from bayesify.random_features.inducing_points import count_inducing_parameters
from bayesify_papers.shared import figures, records
from bayesify_papers.shared.batches import RandomBatches
from bayesify_papers.shared.program import Program
from bayesify_papers.shared.rows import show
from bayesify_papers.walsh_hadamard import computer_experiments
from bayesify_papers.walsh_hadamard.rows import random_features as read_rows

Covariance = Literal["diagonal", "full"]
System = Literal["walsh_hadamard", "fourier", "inducing_points"]
FUNCTIONS = tuple(computer_experiments.SIMULATORS)
TITLES = {"walsh_hadamard": "WHVI", "fourier": "Fourier features", "inducing_points": "inducing points"}
TRAIN_SHARE = 0.2
"""Share of the points for training. The others are for testing."""
INIT_STD = 0.1
"""Initial standard deviation of the weights; this is the default of `RandomFeatureGP`."""
LEARNING_RATES = {name: 5e-3 if name == "hartmann6" else 6e-4 for name in FUNCTIONS}


@dataclass(frozen=True)
class Training:
    """Schedule of a training run, and number of data.

    Args:
        steps: Number of steps of Adam.
        fixed_noise: Number of steps before the noise is trained.
        batch_size: Number of examples per step.
        num_points: Number of evaluations of each function; by default the paper's.
    """

    steps: int = 12_000
    fixed_noise: int = 10_000
    batch_size: int = 64
    num_points: int | None = None


SMOKE = Training(steps=6, fixed_noise=4, batch_size=32, num_points=200)


@dataclass(frozen=True)
class FeatureProblem:
    """Training and test points of one function. Inputs range from 0 to 1; training outputs have mean 0 and variance 1."""

    x: Tensor
    y: Tensor
    x_test: Tensor
    y_test: Tensor


@dataclass(frozen=True)
class Job:
    """One training run.

    Args:
        function: A function of `FUNCTIONS`.
        system: Name of the system: kind of weights, or inducing points.
        covariance: Covariance of the posterior's Gaussian.
        block: Size D of the Walsh-Hadamard block whose number of parameters the system matches.
        seed: Seed of the split, the initial values and the batches.
    """

    function: str
    system: System
    covariance: Covariance
    block: int
    seed: int = 0

    @property
    def budget(self) -> int:
        """Number of parameters of the Walsh-Hadamard posterior: 4 D, or 3 D + D (D + 1) / 2."""
        spread = self.block if self.covariance == "diagonal" else self.block * (self.block + 1) // 2
        return 3 * self.block + spread

    @property
    def size(self) -> int:
        """Smallest number of features or inducing points that uses at least the budget. Features come in pairs."""
        if self.system == "walsh_hadamard":
            return self.block**2
        step = 2 if self.system == "fourier" else 1
        return next(size for size in count(step, step) if self._parameters_of(size) >= self.budget)

    @property
    def parameters(self) -> int:
        """Number of parameters of the posterior and the inducing points, without kernel and noise."""
        return self.budget if self.system == "walsh_hadamard" else self._parameters_of(self.size)

    def _parameters_of(self, size: int) -> int:
        if self.system == "inducing_points":
            inputs = computer_experiments.SIMULATORS[self.function].num_inputs
            return count_inducing_parameters(size, inputs, self.covariance)
        return 2 * size if self.covariance == "diagonal" else size + size * (size + 1) // 2


def prepare(name: str, training: Training, seed: int) -> FeatureProblem:
    """Space-filling evaluations of a function, split at random."""
    x, y = computer_experiments.sample(name, training.num_points, seed=seed)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(seed))
    cut = int(TRAIN_SHARE * len(x))
    train, test = order[:cut], order[cut:]
    y = (y - y[train].mean()) / y[train].std(unbiased=False)
    return FeatureProblem(x[train], y[train], x[test], y[test])


def make(job: Job, x: Tensor) -> RandomFeatureGP | InducingPointGP:
    """The untrained model of a job.

    Args:
        x: Training inputs. Inducing points start at some of them.
    """
    if job.system == "inducing_points":
        chosen = torch.randperm(len(x), generator=torch.Generator().manual_seed(job.seed))[: job.size]
        return InducingPointGP(x[chosen], job.covariance)
    if job.system == "walsh_hadamard":
        posterior: Any = WalshHadamard(covariance=job.covariance, init_std=INIT_STD)
    else:
        posterior = (MeanField if job.covariance == "diagonal" else FullCovariance)(init_std=INIT_STD)
    return RandomFeatureGP(x.shape[-1], job.size, posterior=posterior, seed=job.seed)


def train(
    model: RandomFeatureGP | InducingPointGP,
    problem: FeatureProblem,
    training: Training,
    learning_rate: float,
    seed: int,
) -> None:
    """Maximize the bound in place. The bound has a closed form for all systems, so batches are the only noise."""
    likelihood, num_data = model.likelihood, len(problem.x)
    assert isinstance(likelihood, Gaussian)
    assert isinstance(likelihood.raw_noise, nn.Parameter)
    adam = torch.optim.Adam(model.parameters(), lr=learning_rate, fused=True)
    phases = ((False, training.fixed_noise), (True, training.steps - training.fixed_noise))
    for phase, (learned, steps) in enumerate(phases):
        likelihood.raw_noise.requires_grad_(learned)
        if steps > 0:
            batches = RandomBatches(problem.x, problem.y, min(training.batch_size, num_data), steps)
            fit(model, batches, epochs=1, num_data=num_data, optimizer=adam, seed=2 * seed + phase, progress=False)


def judge(
    job: Job, model: RandomFeatureGP | InducingPointGP, problem: FeatureProblem, seconds: float
) -> dict[str, Any]:
    """The results row of a trained model: test RMSE and NLL in units of the outputs' standard deviation."""
    with torch.no_grad():
        mean, variance = model.function_moments(problem.x_test)
        assert isinstance(model.likelihood, Gaussian)
        noise = model.likelihood.noise
        error = (problem.y_test - mean).square()
        nll = 0.5 * (error / (variance + noise) + (2 * math.pi * (variance + noise)).log())
    return {
        **asdict(job),
        "size": job.size,
        "parameters": job.parameters,
        "rmse": float(error.mean().sqrt()),
        "nll": float(nll.mean()),
        "noise_std": float(noise.sqrt()),
        "seconds": round(seconds, 1),
    }


def jobs(
    functions: Sequence[str],
    systems: Sequence[System],
    covariances: Sequence[Covariance],
    blocks: Sequence[int],
    seeds: int,
) -> list[Job]:
    """All training runs. The systems of one function and size follow each other, so that comparisons are complete early."""
    return [
        Job(function, system, covariance, block, seed)
        for seed in range(seeds)
        for covariance in covariances
        for block in blocks
        for function in functions
        for system in systems
    ]


def run(
    wanted: Sequence[Job],
    training: Training,
    path: Path,
    facts: dict[str, Any] | None = None,
    device: str = "cpu",
    merge: Sequence[Path] = (),
) -> list[dict[str, Any]]:
    """Train and score the jobs that are not yet in the file or in the files to merge.

    Args:
        path: JSON file of results, written after each training run.
        merge: Files of other runs.

    Raises:
        ValueError: If a file has rows with other settings.
    """
    keys = [field.name for field in fields(Job)]
    known: set[tuple[Any, ...]] = set()
    rows: list[dict[str, Any]] = []
    settings = {"training": asdict(training)}
    content = records.begin_run(path, settings, facts, rows=[])
    for stored in (content["rows"], *(records.read_run(source, settings).get("rows", []) for source in merge)):
        new = [row for row in stored if tuple(row[key] for key in keys) not in known]
        known |= {tuple(row[key] for key in keys) for row in new}
        rows += new

    def store() -> None:
        records.write(path, {**content, "rows": rows})

    if merge:
        store()
    for index, job in enumerate(wanted):
        if tuple(asdict(job).values()) in known:
            continue
        problem = prepare(job.function, training, job.seed)
        problem = FeatureProblem(*(tensor.to(device) for tensor in vars(problem).values()))
        model = make(job, problem.x.cpu()).to(device)
        start = time.process_time()
        train(model, problem, training, LEARNING_RATES[job.function], job.seed)
        rows.append(judge(job, model, problem, time.process_time() - start))
        print(
            f"{index + 1} of {len(wanted)}: {job.function}, {job.covariance}, {TITLES[job.system]}, "
            f"{job.parameters} parameters: rmse {rows[-1]['rmse']:.4f}, {rows[-1]['seconds']} s",
            flush=True,
        )
        store()
    return rows


def claims(rows: Sequence[dict[str, Any]]) -> str:
    """A sentence that says how often the order of the three systems is the paper's."""
    ahead, behind, whole = 0, 0, 0
    for case in dict.fromkeys((row["covariance"], row["block"], row["function"]) for row in rows):
        own = [row for row in rows if (row["covariance"], row["block"], row["function"]) == case]
        found = {system: [row["rmse"] for row in own if row["system"] == system] for system in get_args(System)}
        if all(found.values()):
            first, second, third = map(statistics.fmean, found.values())
            whole += 1
            ahead += first < second
            behind += third < first
    return (
        f"The paper finds WHVI ahead of Fourier features (here in {ahead} of {whole} comparisons), and inducing points "
        f"ahead of WHVI (here in {behind} of {whole})."
    )


def figure(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """Plot the test error by number of parameters, with a row of panels for each covariance (figure 4)."""
    covariances = list(dict.fromkeys(row["covariance"] for row in rows))
    functions = list(dict.fromkeys(row["function"] for row in rows))
    size = (2.6 * len(functions), 2.4 * len(covariances))
    with figures.panels(path, len(covariances), len(functions), size) as axes:
        for place, (covariance, function) in zip(axes, product(covariances, functions), strict=True):
            for system, color in zip(TITLES, (figures.DATA_COLOR, figures.BAND_COLOR, "#3b7a3b"), strict=True):
                chosen = (function, covariance, system)
                own = [row for row in rows if (row["function"], row["covariance"], row["system"]) == chosen]
                own.sort(key=lambda row: row["parameters"])
                numbers = [[row[key] for row in own] for key in ("parameters", "rmse")]
                place.loglog(*numbers, "o-", color=color, markersize=3, label=TITLES[system])
            place.set(title=f"{function}, {covariance}", xlabel="parameters", ylabel="test RMSE")
        axes[0].legend(frameon=False, fontsize="small")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the experiment from the command line."""
    program = Program(__doc__, __spec__, "random_features", smoke="a few steps of two functions", small=True)
    program.choice("functions", FUNCTIONS).choice("systems", get_args(System)).choice(
        "covariances", get_args(Covariance)
    )
    program.option(blocks=(16, 32, 64), seeds=1, steps=Training().steps, device="cpu")
    program.add_argument(
        "--merge", nargs="+", type=Path, default=[], help="files of other runs to combine, without training"
    )
    chosen = program.read(arguments)
    systems = list(chosen.systems)
    if "inducing_points" in systems and find_spec("gpytorch") is None:
        print("Inducing points are left out because gpytorch is not installed; pip install gpytorch")
        systems.remove("inducing_points")
    training = SMOKE if chosen.smoke else Training(chosen.steps, chosen.steps * 5 // 6)
    blocks, seeds = ([4], 1) if chosen.smoke else (chosen.blocks, chosen.seeds)
    functions = chosen.functions[:2] if chosen.smoke else chosen.functions
    wanted = [] if chosen.merge else jobs(functions, systems, chosen.covariances, blocks, seeds)
    rows = run(wanted, training, chosen.out / "random_features.json", chosen.facts, chosen.device, chosen.merge)
    if rows and figures.HAS_MATPLOTLIB:
        figure(rows, chosen.out / "random_features")
    title = "Test RMSE and NLL over the outputs' standard deviation. The paper shows a figure without numbers."
    print(show(read_rows(chosen.out), title))
    print(claims(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
