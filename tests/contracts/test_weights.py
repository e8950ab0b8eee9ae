"""What example weights mean, for whatever takes them: a row of weight 2 is the row twice, a row of weight 0 is no row.

Closed forms agree to rounding. Of what trains, the objective of a batch with weights and its gradient are those of the repeated
batch with the same noise; where each row has noise of its own, the objective is linear in the weights. Estimators agree to the
last bit, with all that counts rows: folds, scaling, levels of texts, noise, stopping, recalibration.
"""

import ast
import importlib
import inspect
import types
from collections.abc import Callable, Iterator
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import bayesify
from bayesify import baselines, likelihoods, posteriors, priors, subnetwork
from bayesify.laplace.curvature import Structure
from bayesify.methods import all_methods
from bayesify.predictor import Batch, Trainable
from bayesify.training.task import TrainingTask
from bayesify.training.validation import validate

N = 8
WEIGHTS = torch.tensor([0, 1, 2, 3, 1, 1, 0, 4], dtype=torch.float64)
TWICE = torch.arange(N).repeat_interleave(WEIGHTS.long())
METHODS = all_methods()
POSTERIORS = [name for name, method in METHODS.items() if method.posterior is not None]
FROM_TASK = [name for name, method in METHODS.items() if method.fit is not None]
SAMPLED_PER_ROW = {"nng", "deep_gp"}
"""Methods whose training draws noise for every row, so that repeated rows have other noise than weighted ones."""


def rows(task: str = "regression", image: bool = False, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Inputs and targets; the rows of weight 0 lie far from the others."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(N, *((2, 5, 5) if image else (3,)), generator=generator, dtype=torch.float64)
    x[WEIGHTS == 0] *= 30
    if task == "classification":
        return x, torch.arange(N) % 2
    return x, torch.randn(N, 2, generator=generator, dtype=torch.float64)


def triples(task: str = "regression", image: bool = False) -> tuple[list[Any], ...]:
    """Loaders that are the same data: weighted, repeated; and with each row once more, of half the weight."""
    x, y = rows(task, image)
    return [(x, y, WEIGHTS)], [(x[TWICE], y[TWICE])], [(x, y, WEIGHTS / 2), (x, y, WEIGHTS / 2)]


def net(image: bool = False) -> nn.Sequential:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        if image:
            return nn.Sequential(nn.Conv2d(2, 3, 3), nn.Tanh(), nn.Flatten(), nn.Linear(27, 2)).double()
        return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()


@pytest.fixture(autouse=True)
def few_rows_suffice(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without it, the rows of these tests are too few for an estimate of how much a network has memorized."""
    monkeypatch.setattr("bayesify.jacobians.effective.MIN_NUMBERS", 1)


def likelihood(task: str) -> likelihoods.Likelihood:
    return likelihoods.Categorical() if task == "classification" else likelihoods.Gaussian(0.3)


def agree(values: list[Any], **tolerance: Any) -> None:
    first = values[0]
    for other in values[1:]:
        torch.testing.assert_close(other, first, **(tolerance or {"rtol": 1e-8, "atol": 1e-10}))


# -- closed forms ------------------------------------------------------------------------------------------------------

SUBSETS: dict[str, Any] = {
    "all": "all",
    "last_layer": "last_layer",
    "variance": subnetwork.largest_variance(9),
    "magnitude": subnetwork.largest_magnitude(9),
}
WHOLE = ("all", "last_layer")
EXACT = [name for name in get_args(Structure) if name != "sampled"]
"""Draws are other numbers for repeated rows; tests/laplace/test_sampled.py compares weighted rows with the dense posterior."""
"""Subsets of whole weights, which Kronecker factors need."""


def laplace(loader: Any, task: str, *structure: Any, image: bool = False, **options: Any) -> bayesify.Laplace:
    return bayesify.Laplace(net(image), likelihood(task), *structure, 0.7, memory="1MiB", **options).fit(loader)


def summary(made: bayesify.Laplace) -> list[Tensor]:
    return [made.covariance_matrix(), made.log_evidence()]


@pytest.mark.parametrize("task", ["regression", "classification"])
@pytest.mark.parametrize("covariance", EXACT)
def test_laplace(covariance: Any, task: str) -> None:
    """Covariance and evidence of every subset and curvature, and of convolutions."""
    for subset in WHOLE if covariance == "kronecker" else SUBSETS:
        structure = SUBSETS[subset], covariance
        agree([summary(laplace(loader, task, *structure)) for loader in triples(task)])
    for options in ({"curvature": "empirical"}, {"image": True}):
        loaders = triples(task, "image" in options)
        agree([summary(laplace(loader, task, "all", covariance, **options)) for loader in loaders])


@pytest.mark.parametrize("subset", SUBSETS)
def test_noise_that_laplace_finds(subset: str) -> None:
    """With a default precision and a given one, for one layer and for several, in one batch and in small ones."""
    (x, y, weights), *_ = triples()[0]
    loaders = [*triples()[:2], list(zip(x.split(3), y.split(3), weights.split(3), strict=True))]
    for structure in (("full",), ("full", 0.7)):
        found = []
        for loader in loaders:
            made = bayesify.Laplace(net(), likelihoods.Gaussian(), SUBSETS[subset], *structure).fit(loader)
            prediction = made.predict(x[:4])
            assert isinstance(prediction, bayesify.RegressionPredictive)
            found.append([prediction.std, made.log_evidence()])
        agree(found)


@pytest.mark.parametrize("method", ["evidence", "validation"])
def test_prior_precision_of_laplace(method: Any) -> None:
    found = []
    for loader in triples():
        made = laplace(loader, "regression", "all", "full")
        given = loader if method == "validation" else None
        made.tune_prior_precision(given, method=method, grid=(0.1, 1.0, 10.0), noise=method == "evidence")
        assert isinstance(made.likelihood, likelihoods.Gaussian)
        found.append(torch.tensor([made.prior_precision, float(made.likelihood.noise.detach())], dtype=torch.float64))
    agree(found)


@pytest.mark.thin(3)
@pytest.mark.filterwarnings("ignore:tune_prior_precision")
@pytest.mark.parametrize("kind", ["Poisson", "NegativeBinomial", "StudentT"])
@pytest.mark.parametrize("covariance", EXACT)
def test_prior_precision_of_laplace_by_draws(kind: str, covariance: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a density has no closed form, the draws that judge a row are the same however often the row is there.

    The scores of precisions are compared, because the best precision can lie on a plateau where rounding decides.
    """
    found = []

    def keep_scores(score: Any, base: float, *_: Any) -> tuple[float, None]:
        found.append(torch.tensor(score([0.1, 1.0, 10.0]), dtype=torch.float64))
        return base, None

    monkeypatch.setattr("bayesify.laplace.prior_precision.search_precision", keep_scores)
    for loader in triples():
        counted = [(x, y.abs().round(), *weights) for x, y, *weights in loader]
        bayesify.Laplace(net(), getattr(likelihoods, kind)(), "all", covariance, 0.7).fit(counted).tune_prior_precision(
            counted
        )
    agree(found)


def test_laplace_chooses_its_own_precision_by_weights() -> None:
    found = []
    for loader in triples("classification"):
        made = bayesify.Laplace(net(), likelihoods.Categorical(), "last_layer").fit(loader)
        found.append(torch.stack([torch.tensor(value) for value in made.prior_precision.values()]))
    agree(found)


@pytest.mark.parametrize("task", ["regression", "classification"])
@pytest.mark.parametrize("draws", [1, 3])
def test_temperature(draws: int, task: str) -> None:
    found = []
    for loader in triples(task):
        model: Any = net()
        own: Any = likelihood(task)
        if draws > 1:
            model, own = bayesify.bayesianize(model, posteriors.MeanField(init_std=0.5), likelihood=own), None
        scaled = baselines.TemperatureScaling(model, own).fit(loader, num_draws=draws)
        found.append(torch.tensor([scaled.temperature, scaled.variance_scale]))
    agree(found, rtol=1e-6, atol=0.0)  # one number by bisection


@pytest.mark.parametrize("task", ["regression", "classification"])
def test_validation_scores(task: str) -> None:
    bnn = bayesify.bayesianize(net(), "point", likelihood=likelihood(task)).eval()
    means = [validate(bnn.predict, loader, torch.device("cpu")).means() for loader in triples(task)]
    agree([torch.tensor(list(one.values())) for one in means])


# -- what trains -------------------------------------------------------------------------------------------------------


def terms(model: Trainable, batch: Batch, phase: Any) -> list[Tensor]:
    """The two terms over the whole data, and the gradient of their difference."""
    generator = torch.Generator().manual_seed(5)
    data, kl = model.terms(batch, phase=phase, num_data=len(batch), num_draws=2, generator=generator)
    trained = [parameter for parameter in model.module.parameters() if parameter.requires_grad]
    grads = torch.autograd.grad((data.mean() - kl.mean()), trained, allow_unused=True)
    return [data.mean(), kl.mean(), *(grad for grad in grads if grad is not None)]


def check_objective(make: Callable[[], Trainable], task: str) -> None:
    """The objective is that of repeated rows; of rows with noise of their own, it is linear in the weights."""
    (weighted,), (repeated,), _ = triples(task)
    for phase in make().phases:
        if make().noise_per_example and phase == "variational":
            parts = [terms(make(), Batch(*weighted[:2], one), phase)[0] for one in torch.eye(N, dtype=torch.float64)]
            agree([terms(make(), Batch(*weighted), phase)[0], WEIGHTS @ torch.stack(parts)])
        else:
            agree([terms(make(), Batch(*batch), phase) for batch in (weighted, repeated)])


@pytest.mark.parametrize("task", ["regression", "classification"])
@pytest.mark.parametrize("name", POSTERIORS)
def test_objective_of_posteriors(name: str, task: str) -> None:
    method = METHODS[name]
    options = dict(method.options)
    if method.starts_at_rows is not None:
        options[method.starts_at_rows] = rows()[0][WEIGHTS > 0]

    def make() -> Trainable:
        assert method.posterior is not None
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(2)
            return bayesify.bayesianize(net(), method.posterior(**options), likelihood=likelihood(task)).double()

    check_objective(make, task)


LEARNED_OR_CLASSES = {"classification": likelihoods.Categorical, "learned noise": likelihoods.Gaussian}


def fit_task(name: str, loader: list[Any], task: str, epochs: int = 2) -> Any:
    """A method fitted to a task, in full batches."""
    method = METHODS[name]
    assert method.fit is not None
    if method.extra is not None and find_spec(method.extra) is None:
        pytest.skip(method.status)
    own = likelihoods.Gaussian(0.3, learn=False) if task == "regression" else LEARNED_OR_CLASSES[task]()
    given: dict[str, Any] = {"num_data": sum(len(batch[1]) for batch in loader), "epochs": epochs, "seed": 0}
    return method.fit(TrainingTask(net(), own, loader, prior=priors.Neal(), **given), **method.options)


def outcome(model: Any) -> list[Tensor]:
    prediction = model.predict(rows()[0][WEIGHTS > 0], 2, generator=torch.Generator().manual_seed(0))
    return [prediction.probs] if hasattr(prediction, "probs") else [prediction.mean, prediction.std]


@pytest.mark.thin(2)
@pytest.mark.parametrize("task", ["regression", "learned noise", "classification"])
@pytest.mark.parametrize("name", FROM_TASK)
def test_methods_from_a_task(name: str, task: str) -> None:
    """Whatever stands in a row of weight 0 changes nothing, and repeated rows give the same model."""
    (weighted,), (repeated,), _ = triples(task)
    other = weighted[0].clone()
    other[WEIGHTS == 0] = 1e3
    agree([outcome(fit_task(name, [(x, *weighted[1:])], task)) for x in (weighted[0], other)])
    if METHODS[name].make is not None:
        task_of = TrainingTask(net(), likelihood(task), [weighted], prior=priors.Neal(), num_data=N, epochs=1, seed=0)
        check_objective(lambda: METHODS[name].make(task_of), task)  # type: ignore[misc]
    if name not in SAMPLED_PER_ROW:
        # Adam divides by the gradient's size plus 1e-8, and the gradient is per row.
        agree([outcome(fit_task(name, [batch], task)) for batch in (weighted, repeated)], rtol=1e-5, atol=1e-5)


def trained(name: str, batches: list[Any], **options: Any) -> list[Any]:
    """Everything that `fit` leaves: parameters with the noise that it finds, and the losses of its epochs."""
    method = METHODS[name]
    assert method.posterior is not None
    given = dict(method.options)
    if method.starts_at_rows is not None:
        given[method.starts_at_rows] = rows()[0][WEIGHTS > 0]
    torch.manual_seed(2)
    bnn = bayesify.bayesianize(net(), method.posterior(**given), likelihood=likelihoods.Gaussian()).double()
    # Adam divides by the gradient's size plus eps, and the gradient is per row.
    adam = {"optimizer": lambda parameters: torch.optim.Adam(parameters, 1e-2, eps=1e-30)}
    history = bayesify.fit(bnn, batches, epochs=4, seed=0, progress=False, **adam, **options)
    return [*bnn.state_dict().values(), *map(torch.tensor, (history.column("nll"), history.column("elbo")))]


@pytest.mark.thin(2)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", POSTERIORS)
def test_noise_that_fit_finds(name: str) -> None:
    """With weights of 1 as without any, in small batches. With other weights as with repeated rows, also in a stopped run."""
    x, y = rows()
    ones = torch.ones(N, dtype=torch.float64)
    agree(
        [trained(name, list(zip(*(part.split(3) for part in parts), strict=True))) for parts in ((x, y), (x, y, ones))]
    )
    weighted, repeated, _ = triples()
    for options in ({}, {"callbacks": [lambda _, history: len(history) == 3]}):
        agree([trained(name, batches, **options) for batches in (weighted, repeated)], rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("damping", [0.0, 0.1])
@pytest.mark.parametrize("trainer", [baselines.VOGN, baselines.IVON, baselines.NoisyKFAC])
def test_natural_gradients(trainer: Any, damping: float) -> None:
    """Mean and variance of the posterior after steps from batches of different mean weight; the third batch counts for nobody."""
    family = trainer.family
    for fisher in ("exact", "empirical") if trainer is baselines.NoisyKFAC else (None,):
        found = []
        for weighted in (True, False):
            options = {} if fisher is None else {"fisher": fisher}
            options |= {"decay": 0.9, "clip": damping or None} if trainer is baselines.IVON else {"damping": damping}
            bnn = bayesify.bayesianize(net(), family(init_std=0.1), likelihood=likelihoods.Gaussian(0.3))
            x, y = rows()
            made = trainer(bnn, num_data=N if weighted else len(TWICE), num_draws=2, **options)
            generator = torch.Generator().manual_seed(3)
            for _ in range(3):
                batch = (x, y) if weighted else (x[TWICE], y[TWICE])
                made.step(*batch, example_weights=WEIGHTS if weighted else None, generator=generator)
            found.append([*bnn.posterior.mean().values(), *bnn.posterior.variance().values()])
        agree(found)


def test_swag_refuses_weights_next_to_a_weight_decay() -> None:
    with pytest.raises(ValueError, match=r"SWAG: a batch has example weights.*give prior= instead"):
        baselines.SWAG(net(), likelihoods.Gaussian(0.3)).fit(triples()[0], 1, 1e-3, weight_decay=0.1, progress=False)


@pytest.mark.parametrize("weights", [[-1.0] + [1.0] * 7, [float("nan")] + [1.0] * 7, [0.0] * 8])
def test_weights_that_are_none_are_refused(weights: list[float]) -> None:
    x, y = rows()
    loader = [(x, y, torch.tensor(weights, dtype=torch.float64))]
    for fitting in (bayesify.Laplace(net(), "gaussian"), baselines.TemperatureScaling(net(), "gaussian")):
        with pytest.raises(ValueError, match="weight"):
            fitting.fit(loader)


# -- estimators --------------------------------------------------------------------------------------------------------

QUICK = {"hidden": (4,), "epochs": 3, "num_draws": 2, "prediction_draws": 4, "random_state": 0}


def table(count: int = 40) -> Any:
    """Numbers with gaps, texts of few, many and all levels; the rows of weight 0 have what no other row has."""
    pandas = pytest.importorskip("pandas")
    rng = np.random.default_rng(0)
    weights = rng.integers(0, 4, count).astype(float)
    frame = pandas.DataFrame(
        {
            "size": np.where(rng.random(count) < 0.2, np.nan, rng.normal(size=count)),
            "kind": rng.choice(["a", "b", "c"], count, p=[0.5, 0.4, 0.1]),
            "place": [f"p{index % 22}" for index in range(count)],
            "name": [f"n{index}" for index in range(count)],
        }
    )
    y = np.round(10 + 5 * frame["size"].fillna(0).to_numpy() + rng.normal(size=count), 2)
    frame.loc[weights == 0, "size"], frame.loc[weights == 0, "kind"] = 1e4, "z"
    return frame, np.where(weights == 0, 1e5, y), weights


def labels_of(y: np.ndarray) -> np.ndarray:
    return np.where(y > 1e4, "never", np.where(y > 10, "high", "low"))


def fitted_alike(kind: Any, method: str, weigh: Callable[[Any, Any, Any], tuple[Any, Any, Any]]) -> list[Any]:
    frame, y, weights = table()
    x, target, own = weigh(frame, y if kind is bayesify.sklearn.BayesianRegressor else labels_of(y), weights)
    made = kind(method, **QUICK).fit(x, target, own)
    seen = frame[weights > 0]
    predicted = made.predict_interval(seen) if hasattr(made, "predict_interval") else [made.predict_proba(seen)]
    return [*predicted, made.predict(seen), made.unusual_share(seen), made.choices_["left_out"]]


def as_weights(frame: Any, y: Any, weights: Any) -> Any:
    return frame, y, weights


def as_copies(frame: Any, y: Any, weights: Any) -> Any:
    index = np.random.default_rng(1).permutation(np.arange(len(y)).repeat(weights.astype(int)))
    return frame.iloc[index], y[index], None


def as_halves(frame: Any, y: Any, weights: Any) -> Any:
    index = np.r_[np.arange(len(y)), np.arange(len(y))]
    return frame.iloc[index], y[index], np.r_[weights, weights] / 2


@pytest.mark.thin(2)
@pytest.mark.usefixtures("one_round")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", ["BayesianRegressor", "BayesianClassifier"])
@pytest.mark.parametrize("method", ["auto", "temperature_scaled", *METHODS])
def test_estimators(method: str, kind: str) -> None:
    """Rows with weights, repeated in any order, or twice with half of the weight: the same to the last bit."""
    pytest.importorskip("sklearn")
    extra = METHODS[method].extra if method in METHODS else None
    if extra is not None and find_spec(extra) is None:
        pytest.skip(f"{extra} is not installed")
    estimator = getattr(importlib.import_module("bayesify.sklearn"), kind)
    ways = (as_weights, as_copies, as_halves) if method in ("auto", "laplace") else (as_weights, as_copies)
    first, *others = (fitted_alike(estimator, method, weigh) for weigh in ways)
    for other in others:
        for one, two in zip(first, other, strict=True):
            np.testing.assert_array_equal(one, two)


def closed_forms() -> dict[str, Callable[[np.ndarray, np.ndarray], Any]]:
    """What estimators compute of rows with weights; each is a function of row numbers and weights."""
    recalibration, scores, recipe, units, training = (
        importlib.import_module(f"bayesify.sklearn.{name}")
        for name in ("recalibration", "scores", "recipe", "units", "training")
    )
    encoding, preparation, means = (
        importlib.import_module(f"bayesify.tables.{name}") for name in ("encoding", "preparation", "level_means")
    )
    rng = np.random.default_rng(0)
    x, y, u = rng.normal(size=(N, 2)), rng.gamma(2.0, size=(N, 1)), rng.random(N)
    outputs = torch.from_numpy(rng.normal(size=(4, N, 2)))
    probs, codes = rng.dirichlet(np.ones(3), N), rng.integers(0, 3, N)
    own = likelihoods.HeteroscedasticGaussian()

    def predictive(index: np.ndarray) -> Any:
        return own.predictive(importlib.import_module("bayesify.predictive.base").Outputs(kept=outputs[:1, index]))

    def temperature(index: np.ndarray, weights: np.ndarray) -> Any:
        bnn = bayesify.bayesianize(net(), "point", likelihood=likelihoods.Categorical())
        start = training.Start(net(), likelihoods.Categorical(), None, None)
        whole = training.Settled(bnn, net(), likelihoods.Categorical())
        fold = types.SimpleNamespace(predict=lambda _: types.SimpleNamespace(outputs=outputs[:1, index]))
        held = importlib.import_module("bayesify.sklearn.rows").Rows(x[index], codes[index] % 2, weights)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(training, "out_of_fold", lambda *_: [(replace(whole, model=fold), held)])
            return training.scale_temperature([whole], start).temperature

    return {
        "Encoding.scaled": lambda i, w: vars(encoding.Encoding.scaled(x[i], w))["std"],
        "Encoding.piecewise": lambda i, w: np.concatenate(encoding.Encoding.piecewise(x[i], w).bounds),
        "weighted_median": lambda i, w: preparation.weighted_median(u[i], w),
        "normal_scores": lambda i, w: np.unique(means.normal_scores(y[i], w)),
        "class_scores": lambda i, w: np.unique(means.class_scores(codes[i], w)),
        "level_means": lambda i, w: means.level_means(codes[i], y[i], w, 3),
        "TargetUnits.of": lambda i, w: units.TargetUnits.of(y[i], w, "log").scale,
        "Recalibration.of": lambda i, w: recalibration.Recalibration.of(u[i], 20 * w).said,
        "ensemble_places": lambda i, w: (
            recalibration.Recalibration.of(
                recalibration.ensemble_places(own, outputs[:, i], i % 4, torch.from_numpy(y[i]), w), 20 * w
            ).said
        ),
        "pinball": lambda i, w: recipe.pinball(predictive(i), torch.from_numpy(y[i]), w),
        "Scores.of_numbers": lambda i, w: [
            *scores.Scores.of_numbers(predictive(i), y[i, 0], (0.5,), w).means().values()
        ],
        "Scores.of_classes": lambda i, w: [
            *scores.Scores.of_classes(probs[i], "01", codes[i], (0.5,), w).means().values()
        ],
        "scale_temperature": temperature,
    }


@pytest.mark.filterwarnings("ignore")
def test_closed_forms_of_estimators() -> None:
    """Also under weights far below 1, which scale numbers of examples and no mean."""
    pytest.importorskip("sklearn")
    weights = WEIGHTS.numpy()
    used = np.flatnonzero(weights)
    for name, function in closed_forms().items():
        weighted, repeated = function(used, weights[used]), function(TWICE.numpy(), np.ones(len(TWICE)))
        np.testing.assert_allclose(weighted, repeated, rtol=1e-9, err_msg=name)
        if "Recalibration" not in name and name not in ("ensemble_places", "level_means"):
            np.testing.assert_allclose(function(used, weights[used] / 1000), repeated, rtol=1e-6, err_msg=name)


# -- nobody is left out ------------------------------------------------------------------------------------------------

NAMES = {"example_weights", "sample_weight"}
"""What arguments that weigh examples are called."""
COVERED = {
    "BayesianClassifier", "BayesianRegressor", "BayesianEstimator",  # `test_estimators`
    "BayesianNetwork", "DeepGP", "FunctionSpaceVI", "RandomFeatureGP", "InducingPointGP",  # `Trainable.terms` calls theirs
    "NaturalGradient", "LayerwiseTrainer", "VOGN", "IVON", "NoisyKFAC", "LayerPass",  # `test_natural_gradients`
    "nuts", "microcanonical",  # `test_methods_from_a_task`
    "expected_log_likelihood", "integrated_log_likelihood",  # what all objectives are made of
}  # fmt: skip
"""What the tests above go through."""


def owners_of_weights() -> Iterator[str]:
    """Public classes and functions of the package with an argument that weighs examples."""
    texts = (path.read_text() for path in Path(bayesify.__path__[0]).rglob("*.py"))
    for text in texts:
        for thing in ast.parse(text).body if any(name in text for name in NAMES) else ():
            if isinstance(thing, ast.FunctionDef | ast.ClassDef) and not thing.name.startswith("_"):
                functions = [part for part in ast.walk(thing) if isinstance(part, ast.FunctionDef)]
                given = {each.arg for one in functions for each in (*one.args.args, *one.args.kwonlyargs)}
                if NAMES & given:
                    yield thing.name


def test_everything_that_takes_weights_is_here() -> None:
    assert set(owners_of_weights()) <= COVERED
    for room in ("metrics", "conformal", "acquisition"):
        module = importlib.import_module(f"bayesify.{room}")
        for name in module.__all__:
            takes = inspect.signature(getattr(module, name)).parameters if callable(getattr(module, name)) else {}
            assert not (NAMES | {"weights"}) & takes.keys(), (
                f"{room}.{name} takes weights; compare it with repeated rows here"
            )
