"""The demonstration: every registered method on a regression with a gap and on two moons."""

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from bayesify import metrics
from bayesify.arguments.suggestions import reason_of
from bayesify.conversion import bayesianize
from bayesify.datasets import toy
from bayesify.demo.method_facts import EPOCH_FACTORS, OPTIONS
from bayesify.likelihoods import Categorical, Gaussian, Likelihood
from bayesify.methods import METHODS, Method, all_methods
from bayesify.predictive import ClassificationPredictive, Predictive, RegressionPredictive
from bayesify.predictor import Predictor
from bayesify.priors import Neal
from bayesify.running.generators import own_generators
from bayesify.running.modes import torch_threads
from bayesify.training.fitting import fit
from bayesify.training.task import TrainingTask
from bayesify.weights.catalog import count_parameters

HIDDEN_UNITS = 32
"""Number of hidden units of the demonstration's networks, in one layer with tanh.

With 20 hidden units, one of eight runs of Walsh-Hadamard weights separates the moons by a straight line; with 32, none does.
"""
PRIOR_SCALE = 4.0
"""Scale of the `Neal` prior, as in the inducing weights paper's toy regression."""
MAP_EPOCHS, EPOCHS, QUICK_EPOCHS = 60, 240, 60
"""Number of full-batch steps in the MAP phase, in the variational phase, and in the shorter variational phase of a quick look."""
LEARNING_RATE = 0.15
TRAINING_DRAWS, PREDICTION_DRAWS = 8, 60
BUDGET_SECONDS = 8.0
"""Processor time after which the training of a method on one problem stops."""
STEPS_PER_REPORT = 20
"""Number of steps between two progress reports; a report takes an eighth of a small step's time."""
MAP_SIDE = 60
"""Number of points along each side of the map of the two moons."""

Report = Callable[[float], None]
"""Called with the finished share of the training, between 0 and 1."""


@dataclass(frozen=True)
class ToyProblem:
    """One problem of the demonstration."""

    name: str  # `"regression"` or `"classification"`
    title: str  # title for headings
    data: toy.Regression | toy.Classification
    likelihood: Likelihood
    num_inputs: int
    num_outputs: int
    effort: float = 1.0  # factor on the number of epochs for this problem

    def network(self, seed: int) -> nn.Module:
        """A network with one hidden layer, whose initial weights depend only on the seed."""
        with own_generators(seed=seed):
            return nn.Sequential(
                nn.Linear(self.num_inputs, HIDDEN_UNITS), nn.Tanh(), nn.Linear(HIDDEN_UNITS, self.num_outputs)
            )

    @property
    def loader(self) -> list[tuple[Tensor, Tensor]]:
        """The training data as one batch."""
        return [(self.data.x, self.data.y)]

    @property
    def grid(self) -> Tensor:
        """Inputs of the figure."""
        return self.data.grid if isinstance(self.data, toy.Regression) else self.data.grid(MAP_SIDE)


@dataclass(frozen=True)
class Outcome:
    """The outcome of one method on one problem.

    `scores` has the scores of `metrics.evaluate` on test data. For a regression, it also has `std_data` and `std_gap`: the mean
    epistemic standard deviations at the training inputs and in the gap. `figure` has arrays on the problem's grid: `mean`,
    `epistemic_std` and `std`, or `probs` and `entropy`.
    """

    method: Method
    problem: str
    scores: dict[str, float] = field(default_factory=dict)  # empty if the method failed
    seconds: float = 0.0  # processor time of the training, which equals the elapsed time on an idle machine
    num_parameters: int | None = None  # number of trainable scalars, if they can be counted
    figure: dict[str, Tensor] = field(default_factory=dict)
    note: str = ""  # why the method failed or stopped early; empty if all went well

    @property
    def failed(self) -> bool:
        """Whether the method failed, so that only the note can be shown."""
        return not self.scores


def problems(seed: int = 0) -> list[ToyProblem]:
    """The two problems of the demonstration."""
    cosine = toy.cosine(num_data=60, seed=seed)
    return [
        ToyProblem("regression", "Regression with a gap", cosine, Gaussian(noise=cosine.noise, learn=False), 1, 1),
        ToyProblem("classification", "Two moons", toy.two_moons(seed=seed), Categorical(), 2, 2, effort=0.6),
    ]


def chosen_methods(everything: bool = False) -> list[Method]:
    """Registered methods that the demonstration runs: the methods within its time budget, or all methods."""
    return [method for method in all_methods().values() if everything or not method.slow]


def run(
    method: Method,
    problem: ToyProblem,
    *,
    seed: int = 0,
    epochs: int = EPOCHS,
    budget: float | None = BUDGET_SECONDS,
    report: Report | None = None,
) -> Outcome:
    """Train one method on one problem and score it; an error becomes the outcome's note.

    Training has a MAP phase of `epochs / 4` epochs and then a variational phase of `epochs` epochs. Both numbers are multiplied
    by the problem's `effort`. Training stops after `budget` seconds, unless a method has its own training function.
    """
    epochs = max(1, round(problem.effort * EPOCH_FACTORS.get(method.name, {}).get(problem.name, 1.0) * epochs))
    start = time.process_time()
    try:
        with own_generators(seed=seed), torch_threads(1):  # these networks are too small for a second thread
            if method.fit is not None:
                given = problem.network(seed), problem.likelihood, problem.loader, Neal(PRIOR_SCALE)
                task, note = TrainingTask(*given, len(problem.data.x), epochs, seed), ""
                model: Any = method.fit(task, **_options(method, problem))
            else:
                model, note = _train_posterior(method, problem, seed, epochs, budget, report)
            seconds = time.process_time() - start
            scores, figure = _score(model, problem, seed)
        counted = count_parameters(model) if isinstance(model, nn.Module) else None
        return Outcome(method, problem.name, scores, seconds, counted, figure, note)
    except Exception as error:
        return Outcome(method, problem.name, seconds=time.process_time() - start, note=reason_of(error, 200))


def run_all(
    methods: Sequence[Method],
    *,
    seed: int = 0,
    epochs: int = EPOCHS,
    budget: float | None = BUDGET_SECONDS,
    report: Callable[[Method, ToyProblem, float], None] | None = None,
) -> Iterator[Outcome]:
    """Outcomes of `run` for every method and problem. Each method runs on both problems before the next method starts, so that
    the results of finished methods survive an interruption."""
    made = problems(seed)
    with own_generators():  # warm up, so that torch's slow first use is not in any method's time
        _train_posterior(METHODS["point"], made[0], seed, 1, None, None)
    for method in methods:
        for problem in made:

            def tell(share: float, method: Method = method, problem: ToyProblem = problem) -> None:
                if report is not None:
                    report(method, problem, share)

            yield run(method, problem, seed=seed, epochs=epochs, budget=budget, report=tell)


def _options(method: Method, problem: ToyProblem) -> dict[str, Any]:
    return {**method.options, **OPTIONS.get(method.name, {}).get(problem.name, {})}


def _train_posterior(
    method: Method, problem: ToyProblem, seed: int, epochs: int, budget: float | None, report: Report | None
) -> tuple[nn.Module, str]:
    if method.posterior is None:
        raise ValueError(f"{method.name}: the registry has neither a posterior nor a training function for this method")
    posterior = method.posterior(**_options(method, problem))
    bnn = bayesianize(problem.network(seed), posterior, likelihood=problem.likelihood, prior=Neal(PRIOR_SCALE))
    map_epochs = max(1, epochs * MAP_EPOCHS // EPOCHS)
    total, start, stopped = epochs + map_epochs, time.process_time(), 0

    def watch(_: Any, history: Sequence[Any]) -> bool:
        nonlocal stopped
        done = len(history)
        if report is not None and (done % STEPS_PER_REPORT == 0 or done == total):
            report(done / total)
        if budget is not None and done < total and time.process_time() - start > budget:
            stopped = done
        return stopped > 0

    num_draws = max(TRAINING_DRAWS if bnn.num_distinct_draws != 1 else 1, bnn.posterior.training_draws)
    fit(
        bnn,
        problem.loader,
        epochs=epochs,
        map_epochs=map_epochs,
        learning_rate=LEARNING_RATE,
        num_draws=num_draws,
        callbacks=[watch],
        seed=seed,
        progress=False,
    )
    return bnn, f"stopped at the limit of {budget:g} s after {stopped} of {total} steps" if stopped else ""


def _score(model: Predictor, problem: ToyProblem, seed: int) -> tuple[dict[str, float], dict[str, Tensor]]:
    def predict(x: Tensor) -> Predictive:
        distinct = model.num_distinct_draws
        draws = PREDICTION_DRAWS if distinct is None else min(distinct, PREDICTION_DRAWS)
        return model.predict(x, draws, generator=torch.Generator().manual_seed(seed))  # the same draws for every x

    scores = metrics.evaluate(predict(problem.data.x_test), problem.data.y_test)
    for name, value in scores.items():
        if not math.isfinite(value):
            raise ValueError(f"the score {name} is {value} on the test data, so this method has failed")
    grid = predict(problem.grid)
    if isinstance(grid, RegressionPredictive):
        figure = {"mean": grid.mean[:, 0], "epistemic_std": grid.epistemic[:, 0].sqrt(), "std": grid.std[:, 0]}
        assert isinstance(problem.data, toy.Regression)
        low, high = problem.data.gap or (0.0, 0.0)
        inside = (problem.grid[:, 0] > low) & (problem.grid[:, 0] < high)
        trained = predict(problem.data.x)
        assert isinstance(trained, RegressionPredictive)
        scores["std_gap"] = float(figure["epistemic_std"][inside].mean())
        scores["std_data"] = float(trained.epistemic.sqrt().mean())
    else:
        assert isinstance(grid, ClassificationPredictive)
        figure = {"probs": grid.probs[:, 1], "entropy": grid.entropy}
    return scores, {name: values.detach().cpu() for name, values in figure.items()}
