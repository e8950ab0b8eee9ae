"""Bayesian optimization of botorch's test functions: simple regret of Bayesian networks compared with a Gaussian process.

Branin, Hartmann 6 and Ackley 10 are evaluated 30 times: ten times at a Sobol sequence, then in five batches of four by qLogNEI
(with `--batch 1`, in twenty batches of one). Every model is trained from scratch for each batch, on standardized values without
noise. Networks have two layers of 50 tanh units, the prior `Neal(2.0)` and a noise variance of 1e-3. They are trained by 250
full-batch steps; the Monte Carlo chains continue from the previous batch. Finished runs are appended to `--runs` and not repeated.

python -m benchmarks.bayesian_optimization --workers 5
python -m benchmarks.bayesian_optimization --seeds 1 --problems branin --methods gp ensemble --runs build/runs.jsonl
"""

import math
import statistics
import time
import warnings
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import bayesify
from bayesify import Draws, likelihoods, posteriors, priors
from bayesify.predictive import TargetTransform
from bayesify.random_features import RandomFeatureGP
from tools import markdown

from .runs import add_row, parser, read_rows
from .timing import record, revision, revisions

NUM_INITIAL, NUM_EVALUATIONS = 10, 30
NOISE, SCALE, WIDTH, STEPS = 1e-3, 2.0, 50, 250
METHODS = ("sobol", "gp", "ensemble", "hmc", "mean_field", "global_inducing", "random_features")
PROBLEMS = ("branin", "hartmann6", "ackley10")


def problem(name: str) -> Any:
    """A function to maximize on the unit cube, its dimension, and its maximum."""
    from botorch.test_functions import Ackley, Branin, Hartmann
    from botorch.utils.transforms import unnormalize

    made = {
        "branin": Branin,
        "hartmann6": lambda **o: Hartmann(dim=6, **o),
        "ackley10": lambda **o: Ackley(dim=10, **o),
    }
    function = made[name](negate=True).double()
    return (lambda x: function(unnormalize(x, function.bounds))[:, None]), function.dim, function.optimal_value


def network(dim: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(dim, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 1))


class Chains:
    """Hamiltonian Monte Carlo over the weights of the network, with eight chains at once.

    The chains move whitened weights, z = w / prior std, by 20 leapfrog steps, whose size adapts to the acceptance rate.
    """

    def __init__(self, dim: int, generator: torch.Generator) -> None:
        net = network(dim)
        self.bnn = bayesify.bayesianize(net, posteriors.MeanField(), prior=priors.Neal(SCALE))
        self.shapes = {name: value.shape for name, value in net.named_parameters()}
        fans = {name: net.get_submodule(name[0]).in_features for name in self.shapes}
        self.std = {name: SCALE / math.sqrt(fans[name]) for name in self.shapes}
        count = sum(shape.numel() for shape in self.shapes.values())
        self.generator, self.step = generator, 0.02
        self.z = torch.randn(8, count, generator=generator)

    def weights(self, z: Tensor) -> dict[str, Tensor]:
        parts = z.split([shape.numel() for shape in self.shapes.values()], dim=1)
        return {
            name: self.std[name] * part.unflatten(1, shape)
            for (name, shape), part in zip(self.shapes.items(), parts, strict=True)
        }

    def potential(self, z: Tensor, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """-log p(z, y) of each chain, and its gradient."""
        z = z.detach().requires_grad_()
        w, hidden = self.weights(z), x.expand(len(z), *x.shape)
        for layer in ("0", "2", "4"):
            hidden = torch.baddbmm(w[f"{layer}.bias"][:, None], hidden, w[f"{layer}.weight"].mT)
            hidden = hidden if layer == "4" else hidden.tanh()
        energy = 0.5 * z.square().sum(1) + 0.5 * (y - hidden).square().sum((1, 2)) / NOISE
        return energy.detach(), torch.autograd.grad(energy.sum(), z)[0]

    def run(self, x: Tensor, y: Tensor, warm_up: int, kept: int = 16, thin: int = 2) -> Draws:
        found = []
        energy, slope = self.potential(self.z, x, y)
        for turn in range(warm_up + kept * thin):
            momentum = torch.randn(self.z.shape, generator=self.generator)
            before = energy + 0.5 * momentum.square().sum(1)
            size = self.step * (0.8 + 0.4 * torch.rand(len(self.z), 1, generator=self.generator))
            z, new_slope = self.z, slope
            for _ in range(20):
                momentum = momentum - 0.5 * size * new_slope
                z = z + size * momentum
                new_energy, new_slope = self.potential(z, x, y)
                momentum = momentum - 0.5 * size * new_slope
            accept = (before - new_energy - 0.5 * momentum.square().sum(1)).nan_to_num(-1e9).clamp_max(0).exp()
            taken = torch.rand(len(z), generator=self.generator) < accept
            self.z = torch.where(taken[:, None], z, self.z)
            energy, slope = torch.where(taken, new_energy, energy), torch.where(taken[:, None], new_slope, slope)
            if turn < warm_up:
                self.step *= math.exp(0.1 * (float(accept.mean()) - 0.8))
            elif (turn - warm_up) % thin == 0:
                found.append(self.z)
        drawn = torch.cat(found)
        return Draws(self.bnn.draw(1).runner, self.weights(drawn), torch.zeros(len(drawn)))


def train(method: str, x: Tensor, z: Tensor, seed: int, chains: Chains | None) -> Any:
    """A model that draws functions, trained on points [N, D] and standardized values [N, 1], float32."""
    torch.manual_seed(seed)
    if method == "hmc":
        assert chains is not None
        return chains.run(x, z, warm_up=80 if len(x) <= NUM_INITIAL else 40)
    law = likelihoods.Gaussian(NOISE, learn=False)
    options: dict[str, Any] = {"epochs": STEPS, "learning_rate": 1e-2, "seed": seed, "progress": False}
    if method == "random_features":
        bnn: Any = RandomFeatureGP(x.shape[1], 256, posterior="full_covariance", likelihood=law, seed=seed)
        options["learning_rate"] = 3e-2
    else:
        posterior = {
            "ensemble": lambda: posteriors.Ensemble(10),
            "mean_field": lambda: posteriors.MeanField(),
            "global_inducing": lambda: posteriors.GlobalInducing(x, z, precision=1000.0),
        }[method]()
        bnn = bayesify.bayesianize(network(x.shape[1]), posterior, likelihood=law, prior=priors.Neal(SCALE))
    bayesify.fit(bnn, DataLoader(TensorDataset(x, z), batch_size=len(x)), **options)
    return bnn


def suggest(method: str, x: Tensor, y: Tensor, batch: int, seed: int, chains: Chains | None) -> Tensor:
    """The next points, [q, D]."""
    from botorch.acquisition.logei import qLogNoisyExpectedImprovement
    from botorch.fit import fit_gpytorch_mll
    from botorch.models import SingleTaskGP
    from botorch.optim import optimize_acqf
    from gpytorch.mlls import ExactMarginalLogLikelihood

    from bayesify.adapters import BoTorchModel

    options: dict[str, Any] = {}
    if method == "gp":
        model: Any = SingleTaskGP(x, y)
        fit_gpytorch_mll(ExactMarginalLogLikelihood(model.likelihood, model))
    else:
        scale = TargetTransform.fit("none", y)
        centered = 2 * x - 1
        trained = train(method, centered.float(), scale.forward(y).float(), seed, chains)
        generator = torch.Generator().manual_seed(seed)
        model = BoTorchModel(trained, inputs=lambda x: 2 * x - 1, targets=scale, generator=generator)
        options = {"sampler": model.sampler()}
    acquisition = qLogNoisyExpectedImprovement(model, x, prune_baseline=True, **options)
    bounds = torch.stack((torch.zeros(x.shape[1]), torch.ones(x.shape[1]))).double()
    limits = {"maxiter": 50, "batch_limit": 4, "init_batch_limit": 64}
    return optimize_acqf(acquisition, bounds, q=batch, num_restarts=4, raw_samples=128, options=limits)[0].detach()


def run(name: str, method: str, seed: int, batch: int) -> dict[str, Any]:
    """Simple regret after each evaluation."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    evaluate, dim, best = problem(name)
    torch.manual_seed(seed)
    engine = torch.quasirandom.SobolEngine(dim, scramble=True, seed=seed)
    x = engine.draw(NUM_EVALUATIONS if method == "sobol" else NUM_INITIAL).double()
    y = evaluate(x)
    chains = Chains(dim, torch.Generator().manual_seed(seed)) if method == "hmc" else None
    start = time.perf_counter()
    while len(x) < NUM_EVALUATIONS:
        new = suggest(method, x, y, min(batch, NUM_EVALUATIONS - len(x)), 1000 * seed + len(x), chains)
        x, y = torch.cat((x, new)), torch.cat((y, evaluate(new)))
    regret = (best - y[:, 0].cummax(0).values).tolist()
    found = {"problem": name, "method": method, "seed": seed, "batch": batch, "seconds": time.perf_counter() - start}
    return {**found, "regret": regret, "revision": revision()}


def summary(runs: list[dict[str, Any]], batch: int) -> dict[str, Any]:
    """Regret after the last evaluation by problem and method: median, quartiles, mean, number of seeds, seconds per run."""
    found: dict[str, Any] = {}
    for name in PROBLEMS:
        for method in METHODS:
            wanted = (name, method, batch)
            mine = [entry for entry in runs if (entry["problem"], entry["method"], entry["batch"]) == wanted]
            if not mine:
                continue
            last = sorted(entry["regret"][-1] for entry in mine)
            quartiles = statistics.quantiles(last, n=4) if len(last) > 1 else last * 3
            found.setdefault(name, {})[method] = {
                "median": statistics.median(last),
                "quartiles": [quartiles[0], quartiles[2]],
                "mean": statistics.mean(last),
                "median_after_20": statistics.median(entry["regret"][19] for entry in mine),
                "seeds": len(mine),
                "by_seed": [round(entry["regret"][-1], 5) for entry in sorted(mine, key=lambda entry: entry["seed"])],
                "seconds": statistics.median(entry["seconds"] for entry in mine),
            }
    return found


def table(figures: dict[str, Any]) -> str:
    """The guide's table: median and quartiles of the regret over seeds, in Markdown."""
    rows = []
    for method in (method for method in METHODS if any(method in figures[name] for name in figures)):
        cells = []
        for found in (figures[name].get(method) for name in figures):
            low, high = found["quartiles"] if found else (0.0, 0.0)
            few = f", {found['seeds']} seeds" if found and found["seeds"] < 10 else ""
            cells.append(f"{found['median']:.2g} ({low:.2g} to {high:.2g}{few})" if found else "-")
        rows.append([method.replace("_", " "), *cells])
    return markdown.table(["", *figures], rows)


def main() -> None:
    file = Path("bayesian-optimization.jsonl")
    options = parser(__doc__, "workers", "no_summary", seeds=10, batch=4, runs=file)
    options.add_argument("--problems", nargs="+", default=PROBLEMS, choices=PROBLEMS)
    options.add_argument("--methods", nargs="+", default=METHODS, choices=METHODS)
    given = options.parse_args()
    done = read_rows(given.runs)
    known = {(entry["problem"], entry["method"], entry["seed"], entry["batch"]) for entry in done}
    jobs = [(n, m, s, given.batch) for s in range(given.seeds) for n in given.problems for m in given.methods]
    jobs = [job for job in jobs if job not in known]
    with ProcessPoolExecutor(given.workers, mp_context=get_context("spawn")) as pool:
        waiting = {pool.submit(run, *job): job for job in jobs}
        for future in as_completed(waiting):
            try:
                entry = future.result()
            except Exception as error:
                print(waiting[future], type(error).__name__, error, flush=True)
                continue
            done.append(entry)
            add_row(given.runs, entry)
            print(*waiting[future], f"{entry['regret'][-1]:.4f}, {entry['seconds']:.1f} s", flush=True)
    if not given.no_summary:
        record("bayesian_optimization", summary(done, given.batch), revisions=revisions(done))


if __name__ == "__main__":
    main()
