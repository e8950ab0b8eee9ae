"""Every class that predicts, through one protocol: signature, randomness, memory, storage, pickled predictions, outputs."""

import importlib
import inspect
import pickle
import pkgutil
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import bayesify
from bayesify import baselines, conformal, deep_gp, function_space, likelihoods, posteriors, random_features
from bayesify.predictor import Drawable, Predictor
from bayesify.storage.serializers import STORED_CLASSES

N = 24
X = torch.randn(N, 2, generator=torch.Generator().manual_seed(0))
Y = X.sum(1, keepdim=True).sin()


class Two(nn.Module):
    """A network with two outputs, of which the likelihood is about the second."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.body = nn.Sequential(nn.Linear(2, 6), nn.Tanh(), nn.Linear(6, 1))

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"other": x, "value": self.body(x)}


def gaussian() -> likelihoods.Gaussian:
    return likelihoods.Gaussian(0.1)


def network(posterior: Any = "mean_field") -> bayesify.BayesianNetwork:
    return bayesify.bayesianize(Two(), posterior, likelihood=gaussian(), output="value").eval()


def swag() -> baselines.SWAG:
    made = baselines.SWAG(Two(), gaussian(), rank=2, output="value")
    return made.fit([(X, Y)], epochs=4, learning_rate=0.05, seed=0, progress=False)


def inducing_points() -> Any:
    return random_features.InducingPointGP(X[:5])


CASES: dict[str, tuple[type[Predictor], Callable[[], Any], Callable[[], nn.Module | None]]] = {
    "BayesianNetwork": (bayesify.BayesianNetwork, network, Two),
    "Ensemble": (bayesify.BayesianNetwork, lambda: network(posteriors.Ensemble(3)), Two),
    "RandomFeatureGP": (
        random_features.RandomFeatureGP,
        lambda: random_features.RandomFeatureGP(2, 16),
        lambda: random_features.RandomFeatureNetwork(2, 16, 1),
    ),
    "InducingPointGP": (random_features.InducingPointGP, inducing_points, lambda: None),
    "DeepGP": (deep_gp.DeepGP, lambda: deep_gp.DeepGP(X, Y, num_inducing=6), lambda: None),
    "FunctionSpaceVI": (
        bayesify.FunctionSpaceVI,
        lambda: bayesify.FunctionSpaceVI(network(), context=bayesify.Box(-torch.ones(2), torch.ones(2), 4)),
        Two,
    ),
    "Laplace": (
        bayesify.Laplace,
        lambda: bayesify.Laplace(Two().eval(), gaussian(), output="value").fit([(X, Y)]),
        lambda: Two().eval(),
    ),
    "SWAG": (baselines.SWAG, swag, Two),
    "FixedDraws": (
        baselines.FixedDraws,
        lambda: baselines.FixedDraws(network().draw(6).detach(), gaussian(), "value"),
        Two,
    ),
    "Chains": (
        baselines.Chains,
        lambda: baselines.Chains(network().draw(6).detach(), gaussian(), "value", log_density=torch.zeros(2, 3)),
        Two,
    ),
    "TemperatureScaling": (
        baselines.TemperatureScaling,
        lambda: baselines.TemperatureScaling(network()).fit([(X, Y)], num_draws=4),
        Two,
    ),
    "TemperatureScaling of a plain network": (
        baselines.TemperatureScaling,
        lambda: baselines.TemperatureScaling(Two(), gaussian(), output="value").fit([(X, Y)]),
        Two,
    ),
    "Conformal": (conformal.Conformal, lambda: conformal.Conformal(network()).fit(X, Y, num_draws=4), Two),
}
WHOLE = {"RandomFeatureGP", "InducingPointGP", "DeepGP"}
"""Those without a network of several outputs."""


@pytest.fixture(params=CASES)
def case(request: pytest.FixtureRequest) -> str:
    if request.param == "InducingPointGP" and find_spec("gpytorch") is None:
        pytest.skip("gpytorch is not installed")
    return request.param


def make(case: str) -> Any:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        return CASES[case][1]()


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def test_every_predictor_is_here() -> None:
    """A class that predicts and is not in the list above, or does not say that it is a predictor, is found."""
    found: set[type] = set()
    for info in pkgutil.walk_packages(bayesify.__path__, "bayesify."):
        try:
            module = importlib.import_module(info.name)
        except ImportError:
            continue
        if ".sklearn" in info.name:  # estimators keep scikit-learn's contract
            continue
        classes = [kind for kind in vars(module).values() if inspect.isclass(kind) and kind.__module__ == info.name]
        predict = [kind for kind in classes if "predict" in vars(kind) or kind in STORED_CLASSES.values()]
        found |= {kind for kind in predict if not kind.__name__.startswith("_")}
    found -= {Predictor, Drawable}
    assert not [kind for kind in found if not issubclass(kind, Predictor)]
    assert found == {kind for kind, _, _ in CASES.values()}
    assert {kind for kind in STORED_CLASSES.values() if ".sklearn" not in kind.__module__} == found


def test_the_signature_is_the_same_everywhere(case: str) -> None:
    kind = CASES[case][0]
    parameters = list(inspect.signature(kind.predict).parameters.values())
    assert [entry.name for entry in parameters[:5]] == ["self", "x", "num_draws", "generator", "memory"]
    assert [entry.kind for entry in parameters[1:3]] == [inspect.Parameter.POSITIONAL_OR_KEYWORD] * 2
    assert parameters[2].default is None
    for entry in parameters[3:]:
        assert entry.kind in (inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.VAR_KEYWORD), entry.name
    names = {entry.name for entry in parameters}
    cuts = case not in ("DeepGP", "InducingPointGP")
    assert not cuts or "split_batch" in names or "options" in names
    if issubclass(kind, Drawable):
        drawn = list(inspect.signature(kind.draw).parameters.values())
        assert [entry.name for entry in drawn[:3]] == ["self", "num_draws", "generator"]
        assert drawn[2].kind is inspect.Parameter.KEYWORD_ONLY
    assert not getattr(kind, "__abstractmethods__", None)
    for name in ("predict", "config", "state", "restore"):
        assert any(name in vars(base) for base in kind.__mro__ if base not in (Predictor, Drawable)), name


def test_predictions_follow_the_generator(case: str) -> None:
    model = make(case)
    assert isinstance(model, Predictor)
    assert isinstance(model.likelihood, likelihoods.Likelihood)
    assert model.output == (None if case in WHOLE else "value")
    first, again = (model.predict(X, 3, generator=seeded()) for _ in range(2))
    for name in ("mean", "variance", "outputs"):
        value = getattr(first, name)
        assert torch.equal(value, getattr(again, name))
        assert bool(torch.isfinite(value).all())
        assert value.shape[-2:] == (N, 1)
    other = model.predict(X, 3, generator=seeded(1))
    fixed = case in ("FixedDraws", "Chains", "InducingPointGP", "Ensemble") or "plain" in case
    if not fixed:
        assert not torch.equal(other.outputs, first.outputs)
    by_default = model.predict(X)
    if model.num_distinct_draws is not None:
        assert by_default.outputs.shape[0] == model.num_distinct_draws
    if isinstance(model, Drawable):
        drawn = [model.draw(2, generator=seeded()).weights for _ in range(2)]
        for name, value in drawn[0].items():
            assert torch.equal(torch.as_tensor(value), torch.as_tensor(drawn[1][name]))


def test_memory_is_bytes_or_text(case: str) -> None:
    model = make(case)
    expected = model.predict(X, 3, generator=seeded()).mean
    for memory in (2**30, "1GiB", "64 KB"):
        found = model.predict(X, 3, generator=seeded(), memory=memory).mean
        close = case != "DeepGP" or memory != "64 KB"  # in pieces it draws the noise of each piece by itself
        if close:
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    for wrong in (0, -1, "many", True):
        with pytest.raises(ValueError, match=r"memory=.*; give a positive number of bytes, or text such as '1GiB'"):
            model.predict(X, 3, memory=wrong)


def test_config_state_and_restore(case: str) -> None:
    kind, _, net = CASES[case]
    model = make(case)
    config, state = model.config(), model.state()
    assert isinstance(config, Mapping)
    assert all(isinstance(name, str) and isinstance(value, Tensor) for name, value in state.items())
    copied = {name: value.detach().clone() for name, value in state.items()}
    given = net() or nn.Identity()
    before = torch.get_rng_state()
    again = kind.restore(given, config, copied)
    if case in ("BayesianNetwork", "Ensemble", "RandomFeatureGP"):
        assert torch.equal(torch.get_rng_state(), before)
    assert type(again) is kind
    assert plain(again.config()) == plain(config)
    assert again.state().keys() == state.keys()
    for name, value in again.state().items():
        assert torch.equal(value, copied[name]), name
    same_predictions(again, model)
    given = net()
    assert bool(model.fingerprint()) == (given is not None)
    if given is not None:
        from bayesify.weights.module_state import fingerprint

        assert model.fingerprint() == fingerprint(given)


def plain(config: Any) -> Any:
    if isinstance(config, Mapping):
        return {key: plain(value) for key, value in config.items()}
    if isinstance(config, (list, tuple)):
        return [plain(value) for value in config]
    return config.tolist() if isinstance(config, Tensor) else config


def same_predictions(first: Any, second: Any) -> None:
    one, two = (model.predict(X, 3, generator=seeded()) for model in (first, second))
    for name in ("mean", "variance", "outputs"):
        torch.testing.assert_close(getattr(one, name), getattr(two, name))


def test_save_and_load(case: str, tmp_path: Any) -> None:
    kind, _, net = CASES[case]
    model = make(case)
    bayesify.save(model, tmp_path / "m.safetensors")
    loaded = bayesify.load(tmp_path / "m.safetensors", net())
    assert type(loaded) is kind
    same_predictions(loaded, model)


def test_predictions_pickle_and_print(case: str) -> None:
    prediction = make(case).predict(X, 3, generator=seeded())
    again = pickle.loads(pickle.dumps(prediction))
    assert torch.equal(again.log_prob(Y), prediction.log_prob(Y))
    assert torch.equal(again.interval(0.9)[0], prediction.interval(0.9)[0])
    assert f"{N} examples" in repr(again)


def test_a_class_without_a_part_of_the_contract_cannot_be_made() -> None:
    for missing in ("predict", "config", "state", "restore"):
        broken = type("Broken", (baselines.FixedDraws,), {missing: getattr(Predictor, missing)})
        with pytest.raises(TypeError, match=missing):
            broken(network().draw(2), gaussian())
    with pytest.raises(TypeError, match="draw"):
        type("Broken", (baselines.FixedDraws,), {"draw": Drawable.draw})(network().draw(2), gaussian())


def test_the_linearized_prediction_of_function_space_takes_the_same_arguments() -> None:
    model: function_space.FunctionSpaceVI = make("FunctionSpaceVI")
    whole = model.predict(X, generator=seeded(), method="linearized")
    cut = model.predict(X, generator=seeded(), method="linearized", memory="4KB")
    torch.testing.assert_close(cut.variance, whole.variance, rtol=1e-4, atol=1e-6)
