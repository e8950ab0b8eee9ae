"""Distance of each method from the exact posterior: reference posteriors as files, and distances from them.

    python -m benchmarks.truth sample --problem gap --part 0 --seconds 480     # chains of one problem on one core; resumes
    python -m benchmarks.truth collect                                         # chains and closed forms to benchmarks/results/truth
    python -m benchmarks.truth run --workers 2                                 # all methods on all problems, three seeds
    python -m tools.truth_page                                                 # the page from the results

`sample` keeps its chains in build/truth/PROBLEM-PART.pt. Parts of a problem are chains with other seeds, for other cores. `collect`
writes PROBLEM.npz, which has draws of functions at fixed inputs; `run` needs nothing else. Networks, priors and likelihoods are in
`benchmarks.truth_problems`.
"""

import argparse
import functools
import itertools
import json
import math
import os
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bayesify.baselines.microcanonical import sampler_of
from bayesify.conversion import bayesianize
from bayesify.draws import Draws
from bayesify.laplace.laplace import Laplace
from bayesify.maths.convergence import effective_sample_size, split_r_hat
from bayesify.methods import Method, all_methods, get_method
from bayesify.network import BayesianNetwork
from bayesify.posteriors import Ensemble
from bayesify.predictor import Batch, Predictor
from bayesify.running.generators import own_generators
from bayesify.running.runner import Runner
from bayesify.training.fitting import fit
from bayesify.training.task import TrainingTask, search_point
from benchmarks.runs import Row, cell, many, parser
from benchmarks.timing import record, rounded
from benchmarks.truth_densities import slope_of
from benchmarks.truth_distances import distances, floors, spread_ratios
from benchmarks.truth_problems import PROBLEMS, Problem

TRUTHS = Path(__file__).parent / "results" / "truth"
"""Folder of the reference posteriors."""
FOLDER = Path("build/truth")
"""Folder with the chains, and with the rows of single runs."""
STORED_DRAWS = 400
"""Number of draws of functions in a file. Half of them determine the noise floor."""
MEMBERS, POINT_EPOCHS, WARMUP = 12, 600, 60
"""Number of chains in a part, number of epochs in the training run before, and number of warm-up trajectories."""
SKIPPED_SHARE = 0.2
"""Share of the trajectories after the warm-up that are dropped as burn-in."""
EPOCHS, SLOW_SHARE, LEARNING_RATE, STEP_DRAWS = 1000, 4, 0.05, 4
"""Number of full-batch epochs (after a MAP phase of a quarter as many), divisor of this number for slow methods, initial learning
rate of Adam, and number of draws per step."""
UNRANKED_METHODS = ("deep_gp", "function_space")
"""Methods whose prior is not the network's. They have no rank."""
SECONDS_BETWEEN_FILES = 30.0
LIMIT_R_HAT = 1.05
MAX_STORED_NUMBERS = 1_500_000
"""Largest count of numbers in the file of a part."""
STORED_FIELDS, DIAGNOSTIC_FIELDS = ("functions", "densities"), ("energy_error", "acceptance", "step", "length")
"""Values and diagnostics of the chains that are stored for a part."""


class Part:
    """Chains of one problem in one process, and their file.

    Functions are kept after every `thin` trajectories. When they are too many for a small file, every other function is dropped
    and `thin` doubles.

    Args:
        problem: The problem.
        part: Number of the part, the seed of its chains.
        folder: Folder of the file.
        members: Number of chains of the part.
        warmup: Number of trajectories of the warm-up.
    """

    def __init__(self, problem: Problem, part: int, folder: Path, members: int = MEMBERS, warmup: int = WARMUP) -> None:
        self.problem, self.path = problem, folder / f"{problem.name}-{part}.pt"
        stored = torch.load(self.path) if self.path.exists() else None
        start = time.process_time()
        bnn = trained_members(problem, part, members, 1 if stored else POINT_EPOCHS)
        self.sampler, self.shapes = sampler_of(bnn, Batch(problem.x, problem.y), seed=part)
        self.sampler.slope = slope_of(problem, self.sampler.scale)  # type: ignore[method-assign]
        self.sampler.log_density, self.sampler.gradient = self.sampler.slope(self.sampler.position)
        self.runner = Runner(bnn.network, bnn.weights)
        self.functions: list[Tensor] = []  # [C, I, O] each
        self.densities: list[Tensor] = []
        self.thin, self.trajectories = 1, 0
        self.seconds = 0.0
        if stored is None:
            if warmup:
                self.sampler.warm_up(warmup)
            self.seconds = time.process_time() - start
        else:
            self.sampler.set_state(stored["sampler"])
            self.functions, self.densities = list(stored["functions"].unbind(1)), list(stored["densities"].unbind(1))
            self.seconds, self.thin, self.trajectories = stored["seconds"], stored["thin"], stored["trajectories"]

    def advance(self) -> None:
        """Run one trajectory of each chain and store its functions. Every fourth has a third of the step, for narrow regions."""
        tuned = self.sampler.step
        if self.trajectories % 4 == 3:
            self.sampler.step = tuned / 3
        self.sampler.advance()
        self.sampler.step = tuned
        self.trajectories += 1
        if self.trajectories % self.thin:
            return
        self.functions.append(
            functions_at(self.problem.inputs, self.runner, self.shapes, self.sampler.position * self.sampler.scale)
        )
        self.densities.append(self.sampler.log_density)
        if len(self.functions) * self.functions[0].numel() > MAX_STORED_NUMBERS:
            self.functions, self.densities, self.thin = self.functions[1::2], self.densities[1::2], 2 * self.thin

    def write(self) -> None:
        """Store the chains so that they can be resumed."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        tensors = {"functions": torch.stack(self.functions, 1), "densities": torch.stack(self.densities, 1)}
        told = {
            "seconds": self.seconds,
            "trajectories": self.trajectories,
            "thin": self.thin,
            "energy_error": float(self.sampler.energy_error.mean()),
            "acceptance": float(self.sampler.acceptance.mean()),
            "step": self.sampler.step,
            "length": self.sampler.length,
        }
        torch.save({**tensors, **told, "sampler": self.sampler.state()}, self.path.with_suffix(".new"))
        self.path.with_suffix(".new").replace(self.path)


def trained_members(problem: Problem, part: int, members: int, epochs: int) -> BayesianNetwork:
    """An ensemble from which chains start."""
    with own_generators(seed=1000 + part):
        bnn = bayesianize(problem.make(), Ensemble(members), likelihood=problem.likelihood, prior=problem.prior)
    search_point(bnn, [(problem.x, problem.y)], num_data=len(problem.y), epochs=epochs, seed=part)
    return bnn


def functions_at(inputs: Tensor, runner: Runner, shapes: dict[str, tuple[int, ...]], weights: Tensor) -> Tensor:
    """Outputs [S, I, O] at inputs from weights [S, P] in the order of `shapes`."""
    parts = weights.split([math.prod(shape) for shape in shapes.values()], dim=1)
    named = {name: value.unflatten(1, shape) for (name, shape), value in zip(shapes.items(), parts, strict=True)}
    with torch.no_grad():
        return Draws(runner, named, torch.zeros(len(weights)))(inputs)


def sample(
    problem: Problem, part: int, seconds: float, folder: Path, members: int = MEMBERS, warmup: int = WARMUP
) -> None:
    """Start or continue the chains of a part for a number of seconds."""
    end = time.monotonic() + seconds
    chains = Part(problem, part, folder, members, warmup)
    print(problem.name, part, f"step {chains.sampler.step:.4f}, length {chains.sampler.length:.3f}", flush=True)
    told, start = time.monotonic(), time.process_time()
    while time.monotonic() < end or len(chains.functions) < 4:
        chains.advance()
        if time.monotonic() - told > SECONDS_BETWEEN_FILES:
            told = time.monotonic()
            chains.seconds, start = chains.seconds + time.process_time() - start, time.process_time()
            chains.write()
    chains.seconds += time.process_time() - start
    chains.write()
    print(problem.name, part, json.dumps(diagnose(problem, *joined(problem.name, folder))), flush=True)


def joined(name: str, folder: Path) -> tuple[Tensor, Tensor, dict[str, Any]]:
    """Functions [C, T, I, O] and log densities [C, T] of all parts of a problem, and the parts' diagnostics."""
    parts = [torch.load(path) for path in sorted(folder.glob(f"{name}-*.pt"))]
    thin = max(part["thin"] for part in parts)
    kept = [
        {key: part[key][:, thin // part["thin"] - 1 :: thin // part["thin"]] for key in STORED_FIELDS} for part in parts
    ]
    steps = min(one["densities"].shape[1] for one in kept)
    skipped = int(SKIPPED_SHARE * steps)
    functions, densities = (torch.cat([one[key][:, skipped:steps] for one in kept]) for key in STORED_FIELDS)
    told = {key: float(np.mean([part[key] for part in parts])) for key in (*DIAGNOSTIC_FIELDS, "trajectories")}
    return functions, densities, {**told, "seconds": round(sum(part["seconds"] for part in parts), 1)}


def compared(problem: Problem, functions: Tensor) -> Tensor:
    """Functions to compare: class probabilities instead of logits."""
    return functions.softmax(-1) if problem.is_classification else functions


def diagnose(problem: Problem, functions: Tensor, densities: Tensor, told: dict[str, Any]) -> dict[str, Any]:
    """Diagnostics of chains."""
    values = compared(problem, functions).flatten(2)
    r_hat, effective = split_r_hat(values), effective_sample_size(values)
    return {
        "chains": len(values),
        "kept": values.shape[1],
        "r_hat": round(float(r_hat.max()), 4),
        "r_hat_95": round(float(r_hat.quantile(0.95)), 4),
        "effective_draws": round(float(effective.min()), 1),
        "median_effective_draws": round(float(effective.median()), 1),
        "log_density_r_hat": round(float(split_r_hat(densities)), 4),
        "log_density_effective_draws": round(float(effective_sample_size(densities)), 1),
        **{key: round(value, 5) for key, value in told.items()},
        "proven": bool(r_hat.max() < LIMIT_R_HAT),
    }


def collect(folder: Path, names: list[str], where: Path = TRUTHS) -> None:
    """Write the reference posterior of each problem that has chains or a closed form."""
    where.mkdir(parents=True, exist_ok=True)
    for name in names:
        problem = PROBLEMS[name]()
        if problem.features is not None:
            functions, told = problem.exact(STORED_DRAWS), {"closed_form": True, "proven": True, "seconds": 0.0}
        elif any(folder.glob(f"{name}-*.pt")):
            found = joined(name, folder)
            told, every = diagnose(problem, *found), found[0]
            count = STORED_DRAWS // len(every) + 1  # draws of each chain, equally spaced
            chosen = torch.linspace(0, every.shape[1] - 1, count).round().long()
            mixed = torch.randperm(count * len(every), generator=torch.Generator().manual_seed(0))[:STORED_DRAWS]
            functions = every[:, chosen].flatten(0, 1)[mixed]
        else:
            continue
        np.savez_compressed(where / f"{name}.npz", functions=functions.numpy(), diagnostics=json.dumps(told))
        print(name, json.dumps(told), flush=True)


# -- methods ---------------------------------------------------------------------------------------------------------


def competitors() -> list[str]:
    """Names of the methods to compare. Chains are references and left out."""
    return [name for name, method in all_methods().items() if not method.is_chain]


def train(problem: Problem, method: Method, seed: int, epochs: int) -> Predictor:
    """A method with options for small networks, trained in full batches."""
    loader, count = [(problem.x, problem.y)], len(problem.y)
    if method.fit is not None:
        given = {"prior": problem.prior, "num_data": count, "epochs": epochs, "seed": seed}
        return method.fit(TrainingTask(problem.network(seed), problem.likelihood, loader, **given), **method.options)
    assert method.posterior is not None
    options = dict(method.options)
    if method.starts_at_rows is not None:
        order = torch.randperm(count, generator=torch.Generator().manual_seed(seed))
        options[method.starts_at_rows] = problem.x[order[: options[method.starts_at_rows]]]
    with own_generators(seed=seed):
        posterior = method.posterior(**options)
        bnn = bayesianize(problem.network(seed), posterior, likelihood=problem.likelihood, prior=problem.prior)
    chosen = {"learning_rate": LEARNING_RATE, "seed": seed, "progress": False}
    fit(bnn, loader, epochs=epochs, map_epochs=epochs // 4, num_draws=max(STEP_DRAWS, bnn.training_draws), **chosen)
    return bnn


def draws_of(model: Predictor, inputs: Tensor, seed: int) -> Tensor:
    """Outputs of a model's functions at the inputs, [S, I, O], with the same functions at all inputs."""
    count = min(STORED_DRAWS, model.num_distinct_draws or STORED_DRAWS)
    generator = torch.Generator().manual_seed(seed)
    linear = {"method": "linearized_mc"} if isinstance(model, Laplace) else {}
    outputs: Tensor = model.predict(inputs, count, generator=generator, **linear).outputs
    return outputs.detach()


@functools.cache
def floors_of(name: str, truths: Path) -> dict[str, float]:
    """Noise floors of a problem, computed once per process."""
    functions = torch.from_numpy(np.load(truths / f"{name}.npz")["functions"])
    return {key: round(value, 5) for key, value in floors(PROBLEMS[name](), functions).items()}


def measure(name: str, method_name: str, seed: int, epochs: int, truths: Path) -> Row:
    """One method on one problem with one seed. `note` has the error if it fails."""
    problem, method = PROBLEMS[name](), get_method(method_name)
    stored = np.load(truths / f"{name}.npz")
    truth = torch.from_numpy(stored["functions"])
    held_out, wanted = truth.chunk(2)
    epochs = epochs // SLOW_SHARE if method.slow else epochs
    row: Row = {
        "problem": name,
        "method": method_name,
        "seed": seed,
        "epochs": epochs,
        "apart": method_name in UNRANKED_METHODS,
    }
    row["cores"] = os.cpu_count()  # rows of several machines can be in one file
    start = time.process_time()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model = train(problem, method, seed, epochs)
        row["seconds"] = round(time.process_time() - start, 2)
        found = draws_of(model, problem.inputs, seed)
        row["distances"] = rounded(distances(problem, found, wanted, held_out), 5)
        row["spread"] = rounded(spread_ratios(problem, found, wanted), 4)
    except Exception as error:  # a failure must not stop the other rows
        seconds = round(time.process_time() - start, 2)
        row |= {"seconds": seconds, "distances": {}, "note": f"{type(error).__name__}: {error}"[:300]}
    return {
        **row,
        "floors": floors_of(name, truths),
        "proven": json.loads(str(stored["diagnostics"]))["proven"],
    }


def stored_row(name: str, method: str, seed: int, epochs: int, truths: Path, folder: Path, end: float) -> Row | None:
    """Result of `measure`, from its file if there is one."""
    torch.set_num_threads(1)
    path = folder / "rows" / f"{name}-{method}-{seed}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    return cell(path, lambda: measure(name, method, seed, epochs, truths), end)


def run(options: argparse.Namespace) -> None:
    """Run all methods on all problems that have a truth, and write the results file."""
    names = [name for name in options.problems if (options.truths / f"{name}.npz").exists()]
    place = (options.epochs, options.truths, options.folder, time.time() + options.limit)
    every = itertools.product(names, options.methods, range(options.seeds))
    jobs = sorted(((*job, *place) for job in every), key=lambda job: job[0] != "digits")  # the longest first
    found = many(stored_row, jobs, options.workers) if options.workers > 1 else (stored_row(*job) for job in jobs)
    rows = [row for row in found if row is not None]
    if options.no_summary:
        return
    truths = {name: json.loads(str(np.load(options.truths / f"{name}.npz")["diagnostics"])) for name in names}
    settings = {
        "epochs": options.epochs,
        "map_epochs": options.epochs // 4,
        "slow_epochs": options.epochs // SLOW_SHARE,
    }
    record("truth", {}, settings={**settings, "learning_rate": LEARNING_RATE}, truths=truths, rows=rows, quiet=True)


def main(arguments: list[str] | None = None) -> None:
    """The commands of the module's docstring."""
    given = sys.argv[1:] if arguments is None else arguments
    command, rest = (given[0], given[1:]) if given else ("", [])
    torch.set_num_threads(1)
    if command == "sample":
        made = parser(__doc__, problem="gap", part=0, seconds=480.0, folder=FOLDER, members=MEMBERS, warmup=WARMUP)
        options = made.parse_args(rest)
        problem = PROBLEMS[options.problem]()
        sample(problem, options.part, options.seconds, options.folder, options.members, options.warmup)
    elif command == "collect":
        options = parser(__doc__, folder=FOLDER, problems=list(PROBLEMS)).parse_args(rest)
        collect(options.folder, options.problems)
    elif command == "run":
        made = parser(__doc__, "workers", "limit", "no_summary", folder=FOLDER, truths=TRUTHS, problems=list(PROBLEMS),
                      methods=competitors(), seeds=3, epochs=EPOCHS)  # fmt: skip
        run(made.parse_args(rest))
    else:
        raise SystemExit(__doc__)


if __name__ == "__main__":
    main()
