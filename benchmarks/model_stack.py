"""Many small models at once: a joint step of all models compared with steps of each model in turn, in one process.

The first problem is an ensemble of ten MLPs 8-50-50-1 on 1,000 rows, as maximum a posteriori estimates. A `ModelStack`, whose
members have their own batches, and an `Ensemble` by `fit`'s objective, whose members share batches, are compared with ten networks
with ten optimizers. Ten epochs of the `Ensemble` by `fit` are compared with `fit` of each network. The second problem is stacks of
20 networks 13-50-50-1 under several posteriors. Times are processor times, because the machine may do other work.
"""

import copy
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from bayesify import bayesianize, posteriors, priors
from bayesify.likelihoods import Gaussian
from bayesify.models import mlp
from bayesify.predictor import Batch, Trainable
from bayesify.training import ModelStack, fit
from bayesify.training.batches import StackedBatch

from .runs import parser
from .timing import record

NUM_ROWS = 1000
FAMILIES: dict[str, Callable[[], posteriors.Posterior]] = {
    "point": posteriors.Point,
    "mean_field": lambda: posteriors.MeanField(init_std=1e-3),
    "walsh_hadamard": posteriors.WalshHadamard,
    "dropout": lambda: posteriors.Dropout(0.005),
    "inducing": lambda: posteriors.InducingWeights(8, 8),
}


def make(count: int, posterior: Callable[[], posteriors.Posterior], sizes: list[int]) -> list[Any]:
    """Networks with different initial weights."""
    made = []
    for seed in range(count):
        torch.manual_seed(seed)
        made.append(bayesianize(mlp(sizes), posterior(), likelihood=Gaussian(0.1), prior=priors.Neal()))
    return made


def step(model: Trainable, batch: Batch, num_draws: int = 1) -> Callable[[], None]:
    """A function that does one step of Adam."""
    module: nn.Module = model.module
    optimizer = torch.optim.Adam(module.parameters(), lr=1e-4, fused=True)
    generator = torch.Generator().manual_seed(0)

    def run() -> None:
        optimizer.zero_grad(set_to_none=True)
        options: dict[str, Any] = {"num_data": NUM_ROWS, "num_draws": num_draws, "generator": generator}
        data, kl = model.terms(batch, phase="variational", **options)
        ((kl - data).mean(-1).sum() / NUM_ROWS).backward()
        optimizer.step()

    return run


def milliseconds(functions: list[Callable[[], None]], rounds: int) -> list[float]:
    """Median processor time of a call of each function, over rounds that alternate between the functions."""
    found: list[list[float]] = [[] for _ in functions]
    for function in functions:
        function()
    for _ in range(rounds):
        for times, function in zip(found, functions, strict=True):
            start = time.process_time()
            for _ in range(3):
                function()
            times.append((time.process_time() - start) / 3)
    return [1000 * statistics.median(times) for times in found]


def compare(family: str, count: int, sizes: list[int], batch_size: int, rounds: int) -> dict[str, float]:
    """A stack compared with its models one after the other."""
    models = make(count, FAMILIES[family], sizes)
    x, y = torch.randn(count, batch_size, sizes[0]), torch.randn(count, batch_size, 1)
    stack = ModelStack(copy.deepcopy(models))
    each = [step(model, Batch(x[index], y[index])) for index, model in enumerate(models)]
    functions = [step(stack, StackedBatch(x, y)), lambda: [run() for run in each]]  # type: ignore[func-returns-value,list-item]
    names = ["stack_ms", "one_by_one_ms"]
    if family == "point":
        ensemble = make(1, lambda: posteriors.Ensemble(count), sizes)[0]
        functions.append(step(ensemble, Batch(x[0], y[0]), count))
        names += ["ensemble_ms"]
    found = dict(zip(names, milliseconds(functions, rounds), strict=True))
    found["times_faster"] = found["one_by_one_ms"] / found["stack_ms"]
    if "ensemble_ms" in found:
        found["ensemble_times_faster"] = found["one_by_one_ms"] / found["ensemble_ms"]
    assert stack.loop_reason is None
    return found


def trainings(count: int, sizes: list[int], batch_size: int, epochs: int = 10) -> dict[str, float]:
    """An `Ensemble` by `fit` compared with its members as separate networks, one after the other; the better of two runs each."""
    x = torch.randn(NUM_ROWS, sizes[0])
    batches = list(zip(x.split(batch_size), x[:, :1].sin().split(batch_size), strict=True))
    seconds: dict[str, list[float]] = {"ensemble_s": [], "one_by_one_s": []}
    for _ in range(2):
        together = make(1, lambda: posteriors.Ensemble(count), sizes)
        for name, models in (("ensemble_s", together), ("one_by_one_s", make(count, posteriors.Point, sizes))):
            start = time.process_time()
            for model in models:
                fit(model, batches, epochs=epochs, seed=0, progress=False)
            seconds[name].append(time.process_time() - start)
    found = {name: min(times) for name, times in seconds.items()}
    return {**found, "ensemble_times_faster": found["one_by_one_s"] / found["ensemble_s"]}


def main() -> None:
    chosen = parser(__doc__, rounds=15).parse_args()
    torch.set_num_threads(1)
    results: dict[str, Any] = {}
    for size in (32, 64, 128):
        results[f"ten MLPs 8-50-50-1, batch {size}"] = compare("point", 10, [8, 50, 50, 1], size, chosen.rounds)
    results["ten MLPs 8-50-50-1 by fit, batch 64"] = trainings(10, [8, 50, 50, 1], 64)
    for family in ("mean_field", "walsh_hadamard", "dropout", "inducing"):
        results[f"20 of {family}, 13-50-50-1, batch 64"] = compare(family, 20, [13, 50, 50, 1], 64, chosen.rounds)
    record("model_stack_cpu", results, digits=2)


if __name__ == "__main__":
    main()
