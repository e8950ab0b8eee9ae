"""Every public callable with valid arguments, for tests that replace them by invalid ones.

A call is a function that makes the callable and its arguments anew, so that one call cannot affect the next.
"""

import copy
import functools
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import bayesify
from bayesify import (
    acquisition,
    baselines,
    conformal,
    datasets,
    deep_gp,
    function_space,
    likelihoods,
    metrics,
    models,
    posteriors,
    priors,
    random_features,
    subnetwork,
    transforms,
)
from bayesify.adapters import onnx as onnx_adapter
from bayesify.adapters.arviz import to_inference_data
from bayesify.adapters.lightning import BayesianModule, PredictiveScores
from bayesify.adapters.torchmetrics import CalibrationError, Coverage, IntervalWidth, collection
from bayesify.compare import Question, comparison
from bayesify.datasets import corruptions, images, rotations, toy, uci
from bayesify.scale_out import engines, read_results, run_jobs
from bayesify.sklearn import BayesianClassifier, BayesianRegressor
from bayesify.training.arguments import Checkpointing, Devices, Steps, Validation
from bayesify.training.average import Average

Arguments = dict[str, Any]
Call = Callable[[], tuple[Callable[..., Any], Arguments]]

X, Y = torch.randn(8, 2, generator=torch.Generator().manual_seed(0)), torch.linspace(-1, 1, 8)[:, None]
LABELS = torch.tensor([0, 1, 2, 0, 1, 2, 0, 1])
PICTURES = np.zeros((4, 1, 6, 6), np.uint8)
FOLDER = Path(tempfile.gettempdir())


def loader() -> list[tuple[Tensor, Tensor]]:
    return [(X[:4], Y[:4]), (X[4:], Y[4:])]


def label_loader() -> list[tuple[Tensor, Tensor]]:
    return [(X, LABELS)]


def net(outputs: int = 1) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, outputs))


def copied(make: Callable[..., Any]) -> Callable[..., Any]:
    """A function that makes an object once and returns a copy of it in each call."""
    made = functools.cache(make)
    return lambda *args: copy.deepcopy(made(*args))


@copied
def bnn(name: str = "mean_field") -> bayesify.BayesianNetwork:
    if name == "normalized":
        return bayesify.bayesianize(nn.Sequential(net(2), nn.BatchNorm1d(2)), "mean_field", likelihood="gaussian")
    if name == "classes":
        return bayesify.bayesianize(net(3), "mean_field", likelihood="categorical")
    return bayesify.bayesianize(net(), name, likelihood=likelihoods.Gaussian(0.1))


@copied
def laplace() -> bayesify.Laplace:
    return bayesify.Laplace(net(), likelihoods.Gaussian(0.1)).fit(loader())


@copied
def swag() -> baselines.SWAG:
    return baselines.SWAG(net(), likelihoods.Gaussian(0.1), 3).fit(loader(), 2, progress=False)


@copied
def process() -> deep_gp.DeepGP:
    return deep_gp.DeepGP(X, Y, num_inducing=4, depth=1, likelihood=likelihoods.Gaussian(0.1))


@copied
def features() -> random_features.RandomFeatureGP:
    return random_features.RandomFeatureGP(2, 8, posterior="full_covariance", likelihood=likelihoods.Gaussian(0.1))


@functools.cache
def regression() -> bayesify.RegressionPredictive:
    return bnn().predict(X, 4)  # type: ignore[return-value]


@functools.cache
def classification() -> bayesify.ClassificationPredictive:
    return bnn("classes").predict(X, 4)  # type: ignore[return-value]


def function_space_vi() -> bayesify.FunctionSpaceVI:
    return bayesify.FunctionSpaceVI(bnn(), context=bayesify.Box(-1.0, 1.0, 4))


def saved() -> Path:
    path = FOLDER / "bayesify-public-calls.safetensors"
    bayesify.save(bnn(), path)
    return path


def temperature() -> baselines.TemperatureScaling:
    return baselines.TemperatureScaling(bnn("classes"))


def of(function: Callable[..., Any], /, **arguments: Any) -> Call:
    """A function and its arguments. A lambda among the values is called to make the value."""
    return lambda: (function, {key: _made(value) for key, value in arguments.items()})


def method(make: Callable[[], Any], name: str, /, **arguments: Any) -> Call:
    """A method of an object that is made for each call."""
    return lambda: (getattr(make(), name), {key: _made(value) for key, value in arguments.items()})


class Make:
    """A value that is made for each call."""

    def __init__(self, maker: Callable[[], Any]) -> None:
        self.maker = maker


def _made(value: Any) -> Any:
    return value.maker() if isinstance(value, Make) else value


def generator() -> torch.Generator:
    return torch.Generator().manual_seed(0)


# -- estimators, adapters, comparisons, jobs ---------------------------------------------------------------------------


ESTIMATOR: Arguments = {
    "method": "mean_field", "hidden": (3,), "activation": "tanh", "network": None, "method_options": None, "prior_scale": 2.0,
    "epochs": 1, "learning_rate": 0.01, "batch_size": 4, "num_draws": 1, "prediction_draws": 2, "standardize": True,
    "memory_rows": 8, "random_state": 0, "verbose": False,
}  # fmt: skip


def trained(kind: Any, y: Any) -> Callable[..., Any]:
    """A function that trains an estimator, because an estimator checks its parameters when it is trained."""
    return lambda **parameters: kind(**parameters).fit(X.numpy(), y)


@copied
def regressor() -> BayesianRegressor:
    return BayesianRegressor(**ESTIMATOR, noise=0.1).fit(X.numpy(), Y[:, 0].numpy())


@copied
def classifier() -> BayesianClassifier:
    return BayesianClassifier(**ESTIMATOR).fit(X.numpy(), LABELS.numpy())


def export(**arguments: Any) -> Any:
    """`export_onnx` without the exporter and the runtime, which take seconds. Only its arguments matter here."""
    exported, look = onnx_adapter._exported, onnx_adapter._Trial.difference
    onnx_adapter._exported = lambda *_: SimpleNamespace(save=lambda path, **_: Path(path).touch())
    onnx_adapter._Trial.difference = lambda *_: 0.0
    try:
        return onnx_adapter.export_onnx(**arguments)
    finally:
        onnx_adapter._exported, onnx_adapter._Trial.difference = exported, look


@functools.cache
def table() -> str:
    path = FOLDER / "bayesify-public-calls.csv"
    rows = [f"{a:.3f},{b:.3f},{a - b:.3f}" for a, b in np.random.default_rng(0).normal(size=(30, 2))]
    path.write_text("\n".join(("a,b,y", *rows)) + "\n")
    return str(path)


def question() -> Question:
    return Question(table(), "y", methods=("point",), splits=1, quick=True)


def fresh_folder() -> Path:
    folder = FOLDER / "bayesify-public-calls-folder"
    shutil.rmtree(folder, ignore_errors=True)
    return folder


class Reached(Exception):
    """Exception that shows that all arguments were accepted."""


def compare_nothing(**arguments: Any) -> None:
    """`compare` up to the point where it reads the table. Only its arguments matter here."""

    def reached(*_: Any, **__: Any) -> None:
        raise Reached

    read, comparison.read_compared_table = comparison.read_compared_table, reached
    try:
        comparison.compare(**arguments)
    except Reached:
        return
    finally:
        comparison.read_compared_table = read


def double(job: Any) -> dict[str, Any]:
    return {"twice": 2 * job}


def run_jobs_here(**arguments: Any) -> Any:
    """`run_jobs` as on one core, where the default number of workers starts no process. Only its arguments matter here."""
    count, engines.usable_cores = engines.usable_cores, lambda: 1
    try:
        return run_jobs(**arguments)
    finally:
        engines.usable_cores = count


G = Make(generator)
NET, BNN, LOADER, LABEL_LOADER = Make(net), Make(bnn), Make(loader), Make(label_loader)
TERMS: Arguments = {"x": X, "y": Y, "num_data": 8, "num_draws": 2, "example_weights": torch.ones(8), "generator": G}
GAUSSIAN = Make(lambda: likelihoods.Gaussian(0.1))
NATURAL: Arguments = {
    "bnn": BNN, "num_data": 8, "learning_rate": 0.1, "momentum": 0.9, "decay": 0.9, "damping": 0.1, "num_draws": 1,
    "antithetic": False, "kl_weight": 1.0, "point_learning_rate": 0.001,
}  # fmt: skip
RESNET: Arguments = {"variant": "cifar", "num_classes": 2, "in_channels": 1, "width": 2}

CALLS: dict[str, Call] = {
    # the package
    "bayesianize": of(
        bayesify.bayesianize, net=NET, posterior="mean_field", likelihood="gaussian", prior="neal", output=None,
        batch_statistics="auto",
    ),
    "BayesianNetwork.draw": method(bnn, "draw", num_draws=2, generator=G, antithetic=False),
    "BayesianNetwork.elbo": method(bnn, "elbo", **TERMS, kl_weight=1.0, antithetic=False),
    "BayesianNetwork.elbo_terms": method(bnn, "elbo_terms", **TERMS, antithetic=False),
    "BayesianNetwork.forward": of(lambda generator: bnn()(X, generator=generator), generator=G),
    "BayesianNetwork.kl": method(bnn, "kl", generator=G),
    "BayesianNetwork.map_objective": method(bnn, "map_objective", x=X, y=Y, num_data=8, example_weights=torch.ones(8)),
    "BayesianNetwork.predict": method(
        bnn, "predict", x=X, num_draws=2, generator=G, antithetic=False, keep_outputs=True, memory=2**24, draws=None
    ),
    "Box": of(bayesify.Box, low=-1.0, high=1.0, n=4),
    "Box.around": of(bayesify.Box.around, x=X, widths=2.0, n=4),
    "FunctionSpaceVI": of(
        bayesify.FunctionSpaceVI, bnn=BNN, prior_mean=0.0, prior_variance=10.0, context=bayesify.Box(-1.0, 1.0, 4),
        covariance="diagonal", prior=None, layers="all", jitter=1e-6, memory=2**28,
    ),
    "FunctionSpaceVI.fit": method(function_space_vi, "fit", train_loader=LOADER, epochs=1),
    "FunctionSpaceVI.function_kl": method(function_space_vi, "function_kl", context_inputs=X),
    "FunctionSpaceVI.function_moments": method(function_space_vi, "function_moments", x=X, covariance="full"),
    "FunctionSpaceVI.objective": method(function_space_vi, "objective", **TERMS, kl_weight=1.0),
    "FunctionSpaceVI.predict": method(function_space_vi, "predict", x=X, num_draws=2, method="draws", generator=G),
    "History.column": method(lambda: bayesify.History([{"epoch": 1}]), "column", key="epoch"),
    "KLSchedule": of(bayesify.KLSchedule, zero_epochs=1.0, linear_epochs=2.0),
    "KLSchedule.call": method(lambda: bayesify.KLSchedule(1.0, 2.0), "__call__", epoch=1.0),
    "Laplace": of(
        bayesify.Laplace, net=NET, likelihood=GAUSSIAN, subset="all", covariance="full", prior_precision=1.0, curvature="ggn",
        marginal=False, memory="1GiB", output=None,
    ),
    "laplace.fit_with_evidence": of(
        bayesify.laplace.fit_with_evidence, net=NET, likelihood="gaussian", loader=LOADER, epochs=1, every=1,
        covariance="kronecker", learning_rate=0.01, seed=0, memory="1GiB", read_batch=None, progress=False,
    ),
    "Laplace.draw": method(laplace, "draw", num_draws=2, generator=G),
    "Laplace.fit": method(
        lambda: bayesify.Laplace(net(), likelihoods.Gaussian(0.1)), "fit", loader=LOADER, read_batch=None, progress=False,
        checkpoint=None,
    ),
    "Laplace.output_covariance": method(laplace, "output_covariance", x=X, joint=False),
    "Laplace.predict": method(laplace, "predict", x=X, method="closed_form", num_draws=2, generator=G, memory="1GiB"),
    "Laplace.set_prior_factor": method(laplace, "set_prior_factor", factor=2.0),
    "Laplace.set_noise": method(laplace, "set_noise", variance=0.2),
    "Laplace.tune_prior_precision": method(
        laplace, "tune_prior_precision", loader=LOADER, method="validation", grid=(0.1, 1.0), fine=False, noise=False,
        prediction="linearized_mc", num_draws=2, read_batch=None, generator=G,
    ),
    "RegressionPredictive.log_prob": method(regression, "log_prob", y=Y),
    "RegressionPredictive.cdf": method(regression, "cdf", y=Y),
    "RegressionPredictive.crps": method(regression, "crps", y=Y),
    "RegressionPredictive.interval": method(regression, "interval", level=0.9),
    "RegressionPredictive.quantile": method(regression, "quantile", q=0.5),
    "ClassificationPredictive.log_prob": method(classification, "log_prob", y=LABELS),
    "check": of(
        bayesify.check, model=BNN, loader=LOADER, start=NET, losses=[1.0, 0.5], held_out=True, num_data=8, kl_weight=1.0,
        num_draws=2, num_examples=8, seed=0, read_batch=None,
    ),
    "count_parameters": of(bayesify.count_parameters, module=NET),
    "fit": of(
        bayesify.fit, model=BNN, train_loader=LOADER, epochs=1, num_data=8, learning_rate=0.01, optimizer=None, scheduler=None,
        validation=LOADER, patience=1, map_epochs=0, kl_weight=1.0, kl_schedule=bayesify.KLSchedule(), num_draws=1,
        device="cpu", precision="float32", checkpoint=None, callbacks=(), seed=0, progress=False, read_batch=None,
        steps=Steps(), update=None, average=None,
    ),
    "training.Steps": of(Steps, accumulate=1, clip_norm=1.0, scheduler="epoch"),
    "training.Average": of(Average, decay=0.9, start=0.5),
    "training.Checkpointing": of(Checkpointing, path=FOLDER / "bayesify-public-calls-run.safetensors", every=1, resume=True),
    "training.Devices": of(Devices, count=1, kind="cpu", launch="script"),
    "training.Validation": of(Validation, loader=LOADER, num_draws=2),
    "load": of(bayesify.load, path=Make(saved), net=NET, map_location="cpu"),
    "prune": of(bayesify.prune, bnn=BNN, keep=0.5),
    "keep_draws": of(
        bayesify.keep_draws, model=Make(lambda: bnn("normalized")), loader=LOADER, num_draws=2, max_examples=8, seed=0,
        read_batch=None,
    ),
    "save": of(bayesify.save, model=BNN, path=FOLDER / "bayesify-public-calls-saved.safetensors"),
    # baselines
    "baselines.SWAG": of(baselines.SWAG, net=NET, likelihood=GAUSSIAN, rank=3, scale=1.0, output=None),
    "baselines.SWAG.collect": method(lambda: baselines.SWAG(net(), likelihoods.Gaussian(0.1), 3), "collect", net=NET),
    "baselines.SWAG.draw": method(swag, "draw", num_draws=2, generator=G, loader=LOADER, read_batch=None),
    "baselines.SWAG.fit": method(
        lambda: baselines.SWAG(net(), likelihoods.Gaussian(0.1), 3), "fit", loader=LOADER, epochs=1, learning_rate=0.01,
        momentum=0.9, prior="neal", weight_decay=0.0, num_data=8, collect_every=1, skip_epochs=0, optimizer=None,
        read_batch=None, seed=0, progress=False,
    ),
    "baselines.SWAG.mean_network": method(swag, "mean_network", loader=LOADER),
    "baselines.SWAG.predict": method(
        swag, "predict", x=X, num_draws=2, generator=G, loader=LOADER, draws=None, keep_outputs=True, memory=2**24
    ),
    "baselines.VOGN": of(baselines.VOGN, **NATURAL),
    "baselines.VOGN.fit": method(
        lambda: baselines.VOGN(bnn(), num_data=8), "fit", loader=LOADER, epochs=1, schedule=lambda progress: 1.0,
        seed=0, progress=False,
    ),
    "baselines.VOGN.step": method(
        lambda: baselines.VOGN(bnn(), num_data=8), "step", x=X, y=Y, example_weights=torch.ones(8), generator=G,
        learning_rate=0.1,
    ),
    "baselines.IVON": of(
        baselines.IVON, **{key: value for key, value in NATURAL.items() if key not in ("damping", "antithetic")},
        init_curvature=0.9, clip=1.0,
    ),
    "baselines.IVON.fit": method(
        lambda: baselines.IVON(bnn(), num_data=8), "fit", loader=LOADER, epochs=1, schedule=lambda progress: 1.0,
        seed=0, progress=False, precision="bf16",
    ),
    "baselines.IVON.step": method(
        lambda: baselines.IVON(bnn(), num_data=8), "step", x=X, y=Y, example_weights=torch.ones(8), generator=G,
        learning_rate=0.1,
    ),
    "baselines.NoisyKFAC": of(
        baselines.NoisyKFAC, **{**NATURAL, "bnn": Make(lambda: bnn("matrix_normal"))}, fisher="sampled", factor_every=1,
        inverse_every=1,
    ),
    "baselines.FixedDraws": of(
        baselines.FixedDraws, draws=Make(lambda: bnn().draw(2)), likelihood=GAUSSIAN, output=None
    ),
    "baselines.FixedDraws.draw": method(
        lambda: baselines.FixedDraws(bnn().draw(3), likelihoods.Gaussian(0.1)), "draw", num_draws=2
    ),
    "baselines.FixedDraws.predict": method(
        lambda: baselines.FixedDraws(bnn().draw(3), likelihoods.Gaussian(0.1)), "predict", x=X, num_draws=2, keep_outputs=True,
        memory=2**24,
    ),
    "baselines.TemperatureScaling": of(
        baselines.TemperatureScaling, model=Make(lambda: net(3)), likelihood="categorical", output=None
    ),
    "baselines.TemperatureScaling.fit": method(
        temperature, "fit", loader=LABEL_LOADER, num_draws=2, seed=0, read_batch=None
    ),
    "baselines.TemperatureScaling.predict": method(
        lambda: temperature().fit(label_loader()), "predict", x=X, num_draws=2
    ),
    "baselines.fit_members": of(
        baselines.fit_members, bnn=Make(lambda: bnn("ensemble")), loader=LOADER, epochs=1, seed=0,
        progress=False,
    ),
    "baselines.microcanonical": of(
        baselines.microcanonical, bnn=Make(lambda: bnn("ensemble")), x=X, y=Y, example_weights=torch.ones(8), num_draws=1,
        num_warmup=1, thin=1, adjust=True, max_steps=1, seed=0,
    ),
    "baselines.sghmc": of(
        baselines.sghmc, bnn=Make(lambda: bnn("point")), loader=LOADER, epochs=1, cycles=1, num_draws=1, learning_rate=0.01,
        friction=0.1, explore=0.3, num_data=8, seed=0, progress=False,
    ),
    "baselines.Chains": of(
        baselines.Chains, draws=Make(lambda: bnn().draw(2)), likelihood=GAUSSIAN, output=None, log_density=torch.zeros(2, 1),
        energy_error=torch.zeros(2), acceptance=torch.ones(2),
    ),
    # data
    "datasets.toy.cosine": of(toy.cosine, num_data=5, num_test=4, seed=0),
    "datasets.toy.cubic": of(toy.cubic, num_data=5, num_test=4, seed=0),
    "datasets.toy.snelson": of(toy.snelson, num_data=5, num_test=4, seed=0),
    "datasets.toy.two_moons": of(toy.two_moons, num_data=5, num_test=4, noise_std=0.1, seed=0),
    "datasets.toy.linear": of(toy.linear, num_data=5, num_features=2, prior_std=1.0, noise=0.1, seed=0),
    "datasets.toy.linear_posterior": of(toy.linear_posterior, x=X.double(), y=Y.double(), prior_std=1.0, noise=0.1),
    "datasets.toy.Classification.grid": method(lambda: toy.two_moons(5, 4), "grid", side=3),
    "datasets.uci.load": of(uci.load, name="wine", folder=FOLDER / "bayesify-no-such-folder", download=False),
    "datasets.uci.seeded_splits": of(uci.seeded_splits, X=X.numpy(), y=Y.numpy(), count=2, test_share=0.25, seed=0),
    "datasets.uci.Split.with_validation": method(
        lambda: uci.Split(np.arange(8), np.arange(2)), "with_validation", share=0.25, seed=0
    ),
    "datasets.images.load": of(images.load, name="mnist", folder=FOLDER / "bayesify-no-such-folder", download=False),
    "datasets.images.synthetic": of(
        images.synthetic, num_train=4, num_test=2, side=4, num_classes=2, noise_std=0.1, seed=0
    ),
    "datasets.images.Images.first": method(lambda: images.synthetic(4, 2, side=4), "first", num_train=2, num_test=1),
    "datasets.corruptions.corrupt": of(
        corruptions.corrupt, images=PICTURES, kind="gaussian_noise", severity=1, seed=0
    ),
    "datasets.rotations.rotate": of(rotations.rotate, images=PICTURES, degrees=30.0),
    "datasets.Standardization.of": of(datasets.Standardization.of, train=X.numpy(), axes=(0,)),
    # deep Gaussian processes, function space, random features
    "deep_gp.DeepGP": of(
        deep_gp.DeepGP, inputs=X, targets=Y, depth=1, width=2, num_outputs=1, num_inducing=4, inducing="global",
        kernel="squared_exponential", likelihood=GAUSSIAN, skip=True, lengthscale=1.0, seed=0,
    ),
    "deep_gp.DeepGP.elbo": method(process, "elbo", **TERMS, kl_weight=1.0),
    "deep_gp.DeepGP.fit": method(process, "fit", data=(X, Y), epochs=1, learning_rate=0.02, seed=0),
    "deep_gp.DeepGP.kl": method(process, "kl", num_draws=2, generator=G),
    "deep_gp.DeepGP.predict": method(process, "predict", x=X, num_draws=2, generator=G, memory=2**24),
    "function_space.Constant": of(function_space.Constant, mean=0.0, variance=1.0),
    "function_space.DatasetContext": of(function_space.DatasetContext, source=LOADER, n=2, keep=4),
    "function_space.NoisyContext": of(function_space.NoisyContext, source=LOADER, std=0.1, n=2, keep=4),
    "function_space.GaussianProcess": of(
        function_space.GaussianProcess, kernel=lambda a, b: (a[:, None] - b[None]).square().sum(-1).neg().exp(), mean=0.0
    ),
    "function_space.NeuralTangent": of(function_space.NeuralTangent, std=1.0, mean=0.0),
    "random_features.RandomFeatureGP": of(
        random_features.RandomFeatureGP, num_inputs=2, num_features=8, num_outputs=1, posterior="mean_field",
        likelihood=GAUSSIAN, lengthscale=1.0, amplitude=1.0, learn_kernel=True, exact_bound=True, seed=0,
    ),
    "random_features.RandomFeatureGP.condition": method(features, "condition", x=X, y=Y, memory=2**24),
    "random_features.RandomFeatureGP.function_moments": method(features, "function_moments", x=X, memory=2**24),
    "random_features.RandomFeatureGP.predict": method(
        features, "predict", x=X, num_draws=2, method="draws", generator=G, antithetic=False, keep_outputs=True, memory=2**24
    ),
    "random_features.RandomFeatureNetwork": of(
        random_features.RandomFeatureNetwork, num_inputs=2, num_features=8, num_outputs=1, lengthscale=1.0, amplitude=1.0,
        learn=True, generator=G,
    ),
    # likelihoods, metrics, models
    "likelihoods.Gaussian": of(likelihoods.Gaussian, noise=0.1, learn=True),
    "likelihoods.Categorical": of(likelihoods.Categorical, class_axis=-1, ignore_index=-100),
    "likelihoods.HeteroscedasticGaussian": of(likelihoods.HeteroscedasticGaussian, beta=0.5),
    "likelihoods.StudentT": of(likelihoods.StudentT, scale=0.3, degrees=5.0, learn=True, beta=0.5),
    "likelihoods.NegativeBinomial": of(likelihoods.NegativeBinomial, dispersion=0.5, learn=True),
    "likelihoods.Quantiles": of(likelihoods.Quantiles, levels=[0.1, 0.5, 0.9], scale=0.3, learn=True),
    "likelihoods.Gaussian.log_prob": method(
        lambda: likelihoods.Gaussian(0.1), "log_prob", outputs=Y[None], y=Y, has_draws=True
    ),
    "likelihoods.Categorical.log_prob": method(
        likelihoods.Categorical, "log_prob", outputs=torch.randn(2, 8, 3), y=LABELS, has_draws=True
    ),
    "acquisition.bald": of(acquisition.bald, predictive=Make(classification)),
    "acquisition.epistemic": of(acquisition.epistemic, predictive=Make(regression)),
    "acquisition.expected_improvement": of(
        acquisition.expected_improvement, predictive=Make(regression), best=0.1, maximize=True
    ),
    "acquisition.batch_bald": of(
        acquisition.batch_bald, draws=Make(lambda: bnn("classes").draw(4)), x=X, size=2, likelihood=None, output=None,
        num_configurations=10, generator=None, memory=None,
    ),
    "acquisition.label_pool": of(
        acquisition.label_pool, train=lambda x, y, seed: bnn("classes"), ask=lambda indices: LABELS[indices], x=X,
        choose=acquisition.at_random, start=[0], size=2, rounds=1, evaluate=None, path=None, seed=0,
    ),
    "acquisition.by_score": of(acquisition.by_score, score=acquisition.bald),
    "acquisition.by_batch_bald": of(acquisition.by_batch_bald, num_draws=4),
    "conformal.threshold": of(conformal.threshold, scores=Y[:, 0], level=0.5),
    "conformal.enough_rows": of(conformal.enough_rows, rows=8, level=0.5),
    "conformal.credible_sets": of(conformal.credible_sets, probs=torch.full((8, 3), 1 / 3), level=0.5),
    "conformal.Intervals": of(conformal.Intervals, score="scaled"),
    "conformal.Intervals.fit": method(conformal.Intervals, "fit", prediction=Make(regression), y=Y, groups=None),
    "conformal.Intervals.interval": method(
        lambda: conformal.Intervals().fit(regression(), Y), "interval", prediction=Make(regression), level=0.5, groups=None
    ),
    "conformal.CrossIntervals": of(conformal.CrossIntervals, score="scaled"),
    "conformal.CrossIntervals.fit": method(
        conformal.CrossIntervals, "fit", predictions=Make(lambda: [regression()] * 2), targets=[Y, Y]
    ),
    "conformal.CrossIntervals.interval": method(
        lambda: conformal.CrossIntervals().fit([regression()] * 2, [Y, Y]), "interval",
        predictions=Make(lambda: [regression()] * 2), level=0.5,
    ),
    "conformal.Sets": of(
        conformal.Sets, score="adaptive", regularization=0.0, free=1, randomized=True, empty=False, seed=0
    ),
    "conformal.Sets.fit": method(conformal.Sets, "fit", prediction=Make(classification), y=LABELS, groups=None),
    "conformal.Sets.sets": method(
        lambda: conformal.Sets().fit(classification(), LABELS), "sets", prediction=Make(classification), level=0.5, groups=None
    ),
    "conformal.Conformal": of(conformal.Conformal, model=BNN, rule=None),
    "metrics.brier": of(metrics.brier, class_probs=torch.full((8, 3), 1 / 3), y=LABELS),
    "metrics.calibration_curve": of(metrics.calibration_curve, predictive=Make(regression), y=Y, levels=[0.5]),
    "metrics.evaluate": of(metrics.evaluate, predictive=Make(regression), y=Y),
    "metrics.ood": of(metrics.ood, inside=Make(classification), outside=Make(classification)),
    "metrics.rejection_curve": of(
        metrics.rejection_curve, predictive=Make(classification), y=LABELS, by="entropy", outside=Make(classification),
        num_points=3,
    ),
    "metrics.reliability": of(metrics.reliability, predictive=Make(classification), y=LABELS, num_bins=3),
    "models.VGG16": of(models.VGG16, num_classes=2, in_channels=1, width=2, batch_norm=False),
    "models.AlexNet": of(models.AlexNet, num_classes=2, in_channels=1, width=4),
    "models.alexnet": of(models.alexnet, num_classes=2, in_channels=1, width=4),
    "models.vgg16": of(models.vgg16, num_classes=2, in_channels=1, width=2, batch_norm=False),
    "models.mlp": of(models.mlp, sizes=[2, 3, 1], activation=nn.ReLU),
    "models.narrow_resnet": of(models.narrow_resnet, num_classes=2, in_channels=1, width=2),
    "models.resnet18": of(models.resnet18, **RESNET),
    "models.resnet34": of(models.resnet34, **RESNET),
    "models.resnet50": of(models.resnet50, **RESNET),
    # posteriors and priors
    "posteriors.Dropout": of(posteriors.Dropout, rate=0.1, first_layer=False),
    "posteriors.Ensemble": of(posteriors.Ensemble, members=2, init="reset"),
    "posteriors.FullCovariance": of(posteriors.FullCovariance, init_std=0.1),
    "posteriors.GlobalInducing": of(
        posteriors.GlobalInducing, inputs=X, targets=Y, precision=1.0, covariance="diagonal", learned="all", kl_form="closed",
        last_precision=1.0, init="random",
    ),
    "posteriors.InducingWeights": of(
        posteriors.InducingWeights, rows=2, cols=2, q="diagonal", members=2, max_lambda=1.0, max_std=1.0, whiten=True,
        init="random", fit_to_layer=False, function_space_kl=False, shared=None, init_std=0.1, init_lambda=0.1,
        balanced=True,
    ),
    "posteriors.KTied": of(posteriors.KTied, rank=2, init_std=0.1),
    "posteriors.LocalInducing": of(posteriors.LocalInducing, points=2, precision=1.0, kl_form="closed", init="random"),
    "posteriors.MatrixNormal": of(posteriors.MatrixNormal, init_std=0.1),
    "posteriors.MeanField": of(posteriors.MeanField, init_std=0.1, max_std=1.0, local_reparameterization=False),
    "posteriors.RankOne": of(posteriors.RankOne, components=2, init_std=0.1, factor_prior_std=0.1),
    "posteriors.WalshHadamard": of(
        posteriors.WalshHadamard, covariance="diagonal", flow_length=2, init_std=0.1, init="random",
        local_reparameterization=False,
    ),
    "priors.AroundNetwork": of(priors.AroundNetwork, scale=1.0),
    "priors.Gaussian": of(priors.Gaussian, std=1.0),
    "priors.Neal": of(priors.Neal, scale=1.0),
    # subnetworks and transforms
    "subnetwork.from_indices": of(subnetwork.from_indices, indices=[0, 1]),
    "subnetwork.from_mask": of(subnetwork.from_mask, mask=torch.tensor([True, False])),
    "subnetwork.from_names": of(subnetwork.from_names, names=["0.weight"]),
    "subnetwork.largest_magnitude": of(subnetwork.largest_magnitude, size=3),
    "subnetwork.largest_variance": of(subnetwork.largest_variance, size=3, num_examples=2, skip_flat=False),
    "subnetwork.largest_swag_variance": of(
        subnetwork.largest_swag_variance, size=3, epochs=2, learning_rate=0.1, momentum=0.9, weight_decay=0.0, seed=0
    ),
    "subnetwork.random": of(subnetwork.random, size=3, seed=0),
    "subnetwork.posterior_gap": of(
        subnetwork.posterior_gap, covariance=torch.eye(3), mask=torch.tensor([True, False, True])
    ),
    "subnetwork.as_selector": of(subnetwork.as_selector, subset="all"),
    "transforms.hadamard": of(transforms.hadamard, x=torch.randn(2, 4), normalize=True),
    "transforms.hadamard_matrix": of(transforms.hadamard_matrix, size=4, like=X),
    "transforms.next_power_of_two": of(transforms.next_power_of_two, size=5),
    # estimators
    "sklearn.BayesianRegressor": of(
        trained(BayesianRegressor, Y[:, 0].numpy()), **ESTIMATOR, noise=0.1, likelihood="auto", target_transform="none"
    ),
    "sklearn.BayesianClassifier": of(trained(BayesianClassifier, LABELS.numpy()), **ESTIMATOR),
    "sklearn.BayesianRegressor.fit": method(
        regressor, "fit", X=X.numpy(), y=Y[:, 0].numpy(), sample_weight=np.ones(8)
    ),
    "sklearn.BayesianRegressor.partial_fit": method(
        regressor, "partial_fit", X=X.numpy(), y=Y[:, 0].numpy(), sample_weight=np.ones(8)
    ),
    "sklearn.BayesianRegressor.predict": method(regressor, "predict", X=X.numpy(), return_std=False),
    "sklearn.BayesianRegressor.predict_interval": method(regressor, "predict_interval", X=X.numpy(), level=0.9),
    "sklearn.BayesianRegressor.predict_quantiles": method(
        regressor, "predict_quantiles", X=X.numpy(), quantiles=(0.5,)
    ),
    "sklearn.BayesianRegressor.predictive": method(regressor, "predictive", X=X.numpy()),
    "sklearn.BayesianRegressor.explain": method(regressor, "explain", X=X.numpy(), level=0.9, share=0.01),
    "sklearn.BayesianRegressor.unusual": method(regressor, "unusual", X=X.numpy(), share=0.01),
    "sklearn.BayesianRegressor.unusual_share": method(regressor, "unusual_share", X=X.numpy()),
    "sklearn.BayesianClassifier.fit": method(
        classifier, "fit", X=X.numpy(), y=LABELS.numpy(), sample_weight=np.ones(8)
    ),
    "sklearn.BayesianClassifier.partial_fit": method(
        classifier, "partial_fit", X=X.numpy(), y=LABELS.numpy(), classes=np.arange(3), sample_weight=np.ones(8)
    ),
    "sklearn.BayesianClassifier.predict_proba": method(classifier, "predict_proba", X=X.numpy()),
    # adapters
    "adapters.BayesianModule": of(
        BayesianModule, bnn=BNN, num_data=8, optimizer=None, learning_rate=0.01, num_draws=1, kl_weight=1.0, kl_schedule=None,
        prediction_draws=2, prediction_seed=0, read_batch=None,
    ),
    "adapters.PredictiveScores": of(PredictiveScores, read_batch=None),
    "adapters.CalibrationError": of(CalibrationError, num_bins=3),
    "adapters.CalibrationError.update": method(CalibrationError, "update", prediction=Make(classification), y=LABELS),
    "adapters.Coverage": of(Coverage, level=0.9),
    "adapters.Coverage.update": method(Coverage, "update", prediction=Make(regression), y=Y),
    "adapters.IntervalWidth": of(IntervalWidth, level=0.9),
    "adapters.collection": of(collection, task="regression"),
    "adapters.export_onnx": of(
        export, model=BNN, path=FOLDER / "bayesify-public-calls.onnx", x=X, num_draws=2, likelihood=GAUSSIAN, output=None,
        generator=G, tolerance=1e-4,
    ),
    "adapters.to_inference_data": of(
        to_inference_data, model=BNN, num_draws=2, x=X, y=Y, likelihood=GAUSSIAN, output=None, generator=G
    ),
    # comparisons and jobs
    "compare.Question": of(
        Question, data=Make(table), target="y", task="regression", methods=("point",), ignore=(), ood=None, splits=1,
        max_rows=30, quick=True, seed=0,
    ),
    "compare.compare": of(
        compare_nothing, question=Make(question), folder=Make(fresh_folder), resume=False, engine="local", workers=1, progress=None,
        report=None,
    ),
    "scale_out.run_jobs": of(
        run_jobs_here, function=double, jobs={"a": 1}, folder=Make(fresh_folder), engine="local", workers=1, threads=1, retries=0,
        progress=False,
    ),
    "scale_out.read_results": of(read_results, folder=Make(fresh_folder)),
}  # fmt: skip
