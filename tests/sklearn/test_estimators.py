"""Both estimators as a user of scikit-learn meets them."""

import pickle
import warnings

import joblib
import numpy as np
import pytest
import torch
from torch import nn

pytest.importorskip("sklearn", minversion="1.7")

from sklearn.base import clone
from sklearn.datasets import make_classification
from sklearn.exceptions import NotFittedError
from sklearn.model_selection import GridSearchCV, cross_val_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import PolynomialFeatures

from bayesify.methods import METHODS, Method
from bayesify.sklearn import BayesianClassifier, BayesianRegressor, recipe
from bayesify.storage.save_load import load, save

QUICK = {"hidden": (8,), "epochs": 30, "learning_rate": 0.05, "num_draws": 2, "prediction_draws": 20, "random_state": 0}
FEW = {**QUICK, "epochs": 5}
"""Where results are compared, or only to be there."""
RECIPES_AND_POSTERIORS = [name for name in METHODS if name not in ("hmc", "microcanonical", "deep_gp")]


def line(rows=60, outputs=1, seed=0):
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(rows, 3))
    y = 100 + 10 * x @ rng.normal(size=(3, outputs)) + rng.normal(size=(rows, outputs))
    return x, y[:, 0] if outputs == 1 else y


@pytest.mark.thin(2)
@pytest.mark.parametrize("name", RECIPES_AND_POSTERIORS)
def test_every_method_regresses_classifies_and_pickles(name):
    x, y = line(40)
    model = BayesianRegressor(name, noise=1.0, **FEW).fit(x, y)
    mean, std = model.predict(x, return_std=True)
    assert mean.shape == std.shape == y.shape
    assert np.isfinite(mean).all()
    assert (std**2 > 0.99 * model.noise_).all()
    again = pickle.loads(pickle.dumps(model))
    np.testing.assert_array_equal(again.predict(x), mean)

    labels = np.where(y > 100, "high", "low")
    classes = BayesianClassifier(name, **FEW).fit(x, labels)
    probs = classes.predict_proba(x)
    np.testing.assert_allclose(probs.sum(1), 1)
    assert set(classes.predict(x)) <= {"high", "low"}
    np.testing.assert_array_equal(pickle.loads(pickle.dumps(classes)).predict_proba(x), probs)


@pytest.mark.slow
def test_chains_work():
    pytest.importorskip("pyro")
    x, y = line(30)
    model = BayesianRegressor("hmc", **{**QUICK, "hidden": (3,)}).fit(x, y)
    assert model.score(x, y) > 0.5


def test_a_chain_shorter_than_the_prediction_draws_is_taken_whole():
    pytest.importorskip("pyro")
    x, y = line(30)
    model = BayesianRegressor("hmc", hidden=(2,), epochs=5, prediction_draws=100, noise=1.0, random_state=0).fit(x, y)
    assert len(model.model_.draws) == 5
    inner = model.model_.predict(torch.from_numpy((x - x.mean(0)) / x.std(0)))
    np.testing.assert_allclose(model.predict(x), inner.mean[:, 0].numpy() * y.std() + y.mean())
    few = BayesianRegressor("hmc", hidden=(2,), epochs=5, prediction_draws=2, noise=1.0, random_state=0).fit(x, y)
    assert np.isfinite(few.predict(x)).all()


def test_a_method_that_needs_a_package_says_so(monkeypatch):
    monkeypatch.setattr("bayesify.methods.find_spec", lambda name: None)
    with pytest.raises(ImportError, match=r"method='hmc' needs pyro; pip install 'pyro-ppl>="):
        BayesianRegressor("hmc").fit(*line())


@pytest.mark.parametrize("name", ["ensemble", "walsh_hadamard"])
def test_methods_that_start_elsewhere_do_not_warn_of_their_own_network(name, recwarn):
    x = np.random.default_rng(0).normal(size=(80, 3))
    BayesianRegressor(name, random_state=0, effort="quick").fit(x, x @ [1.0, 2.0, 3.0])
    assert not [str(one.message) for one in recwarn if "the given network is trained" in str(one.message)]


@pytest.mark.slow
def test_defaults_fit_a_curve_and_cover_it():
    """With a noise variance of 0.01 and 60 rows, an interval of 90 % holds more than half and not hopelessly wide ones."""
    rng = np.random.default_rng(0)
    x = rng.uniform(-2, 2, (160, 1))
    y = 50 + 5 * (np.sin(2 * x[:, 0]) + 0.1 * rng.normal(size=160))
    model = BayesianRegressor(random_state=0).fit(x[:60], y[:60])
    assert model.score(x[60:], y[60:]) > 0.9
    lower, upper = model.predict_interval(x[60:], level=0.9)
    assert ((lower < y[60:]) & (y[60:] < upper)).mean() > 0.8
    assert (upper - lower).mean() < 2 * 1.645 * y.std()
    low, middle, high = model.predict_quantiles(x, (0.05, 0.5, 0.95))
    np.testing.assert_allclose(model.predict_interval(x, 0.9), (low, high))
    assert (low < middle).all()
    assert model.predictive(x[60:]).log_prob(torch.from_numpy(y[60:])).shape == (100,)
    far = model.predictive(np.array([[0.0], [20.0]])).epistemic
    assert far[1] > far[0]


@pytest.mark.usefixtures("one_round")
def test_several_targets():
    x, y = line(80, outputs=2)
    y[:, 1] *= 1000
    model = BayesianRegressor("laplace", (), random_state=0, epochs=100).fit(x, y)
    mean, std = model.predict(x, return_std=True)
    assert mean.shape == std.shape == y.shape
    members = BayesianRegressor(**FEW).fit(x, y)
    assert members.predict(x).dtype == np.float64
    np.testing.assert_allclose(members.predict(x[::-1])[::-1], members.predict(x), rtol=1e-12)  # whatever a row's place
    assert model.noise_.shape == (2,)
    assert model.score(x, y) > 0.9
    assert model.predict_quantiles(x, [0.1, 0.9]).shape == (2, 80, 2)


def test_many_classes_with_few_examples_of_one():
    x, y = make_classification(200, 6, n_informative=4, n_classes=3, weights=[0.75, 0.2, 0.05], random_state=0)
    names = np.array(["common", "some", "rare"])[y]
    model = BayesianClassifier(**{**QUICK, "epochs": 150}).fit(x, names)
    assert model.classes_.tolist() == ["common", "rare", "some"]
    assert model.predict_proba(x).shape == (200, 3)
    assert model.score(x, names) > 0.75
    assert model.predictive(x).mutual_information.min() >= 0


def test_more_rows_bring_it_nearer():
    x, y = line(200)
    first = BayesianRegressor("mean_field", **QUICK).partial_fit(x[:20], y[:20])
    before = first.score(x[100:], y[100:])
    for start in (20, 60):
        first.partial_fit(x[start : start + 40], y[start : start + 40])
    assert first.score(x[100:], y[100:]) > before
    assert len(first.fitted_.kept) == 100

    labels = np.where(y > 100, "b", "a")
    classifier = BayesianClassifier(**QUICK, memory_rows=30)
    classifier.partial_fit(x[:50], labels[:50], classes=["a", "b", "c"])
    classifier.partial_fit(x[50:100], labels[50:100])
    assert classifier.predict_proba(x).shape == (200, 3)
    assert len(classifier.fitted_.kept) == 30
    assert classifier.fitted_.kept.num_data == pytest.approx(100)
    with pytest.raises(ValueError, match="label 'd' is not among"):
        classifier.partial_fit(x[:2], ["a", "d"])


@pytest.mark.usefixtures("one_round")
def test_same_seed_same_result_and_global_generators_are_left_alone():
    x, y = line(30)
    torch.manual_seed(3)
    state, numpy_state = torch.get_rng_state(), np.random.mtrand._rand.get_state()[1].copy()
    one = BayesianRegressor(**FEW).fit(x, y).predict(x)
    assert torch.equal(torch.get_rng_state(), state)
    np.testing.assert_array_equal(np.random.mtrand._rand.get_state()[1], numpy_state)
    np.testing.assert_array_equal(one, BayesianRegressor(**FEW).fit(x, y).predict(x))
    other = BayesianRegressor(**{**FEW, "random_state": 1}).fit(x, y).predict(x)
    assert not np.array_equal(one, other)


@pytest.mark.usefixtures("one_round")
def test_a_network_of_your_own():
    x, y = line(60)
    net = nn.Sequential(nn.Linear(3, 5), nn.ReLU(), nn.LayerNorm(5), nn.Linear(5, 1))
    before = net[0].weight.detach().clone()
    model = BayesianRegressor("mean_field", network=net, noise=1.0, **{**QUICK, "epochs": 150}).fit(x, y)
    assert model.score(x, y) > 0.8
    assert torch.equal(net[0].weight, before)
    assert clone(model).network is not net
    with pytest.raises(ValueError, match="give the last layer 2 outputs"):
        BayesianClassifier("mean_field", network=net).fit(x, y > 100)
    with pytest.raises(ValueError, match="does not accept rows with 2 columns"):
        BayesianRegressor("mean_field", network=net).fit(x[:, :2], y)


@pytest.mark.usefixtures("one_round")
def test_pipelines_and_scores():
    x, y = line(60)
    pipeline = make_pipeline(PolynomialFeatures(2), BayesianRegressor("laplace", **QUICK))
    assert cross_val_score(pipeline, x, y, cv=2).shape == (2,)


@pytest.mark.slow
def test_search_in_two_processes(tmp_path):
    x, y = line(60)
    search = GridSearchCV(BayesianRegressor(**QUICK), {"method": ["mean_field", "laplace"]}, cv=2, n_jobs=2)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # how joblib ends its workers is not ours
        search.fit(x, y)
    assert search.best_params_["method"] in ("mean_field", "laplace")
    joblib.dump(search.best_estimator_, tmp_path / "model.joblib")
    again = joblib.load(tmp_path / "model.joblib")
    np.testing.assert_array_equal(again.predict(x), search.predict(x))


@pytest.mark.usefixtures("one_round")
def test_columns_with_names_and_constants():
    pandas = pytest.importorskip("pandas")
    x, y = line(30)
    frame = pandas.DataFrame(x, columns=["a", "b", "c"]).assign(constant=7.3)
    model = BayesianRegressor(**FEW).fit(frame, y)
    assert model.feature_names_in_.tolist() == ["a", "b", "c", "constant"]
    assert model.n_features_in_ == 4
    with pytest.raises(ValueError, match="feature names"):
        model.predict(frame[["b", "a", "c", "constant"]])
    with pytest.raises(ValueError, match=r"y is 2\.5 in every row"):
        BayesianRegressor(**FEW).fit(x, np.full(30, 2.5))


@pytest.mark.slow
def test_noise_of_many_rows_and_batches():
    """Batches of 64: the estimated noise is at least the true 1 and not far above it, 400 rows of a line (standard error 0.07)."""
    x, y = line(400)
    model = BayesianRegressor("mean_field", hidden=(), batch_size=64, epochs=10, random_state=0).fit(x, y)
    assert 0.8 < float(model.noise_[0]) < 1.5
    assert model.score(x, y) > 0.95


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"method": "mean_feild"}, "did you mean 'mean_field'?"),
        ({"activation": "tanj"}, "did you mean 'tanh'?"),
        ({"method": 3}, r"method=3; give a name that `bayesify methods` lists"),
        ({"prior_scale": 1e60}, r"prior_scale=1e\+60; give a finite number, at most 3.4e38"),
        ({"hidden": 50}, r"hidden=50; give a list, each entry an integer of at least 1"),
        ({"hidden": (5, 0)}, r"hidden=\(5, 0\); give a list, each entry an integer of at least 1"),
        ({"epochs": 0}, "epochs=0"),
        ({"prior_scale": -1}, "prior_scale=-1; give a positive number"),
        ({"method": "ensemble", "method_options": {"memberz": 3}}, "did you mean 'members'?"),
        ({"method": "laplace", "method_options": {"epochs": 3}}, "'laplace' does not accept"),
        ({"noise": 0.0}, "noise=0.0; give a positive number"),
    ],
)
def test_bad_parameters_are_refused(parameters, message):
    with pytest.raises(ValueError, match=message):
        BayesianRegressor(**parameters).fit(*line())


def test_options_of_a_recipe_are_what_it_takes_after_the_problem(add_method):
    def mine(task, *, rank=1):
        seen.append(rank)
        return METHODS["swag"].fit(task)

    def anything(task, **options):
        return mine(task, **options)

    seen = []
    for train in (mine, anything):
        add_method(Method(train.__name__, "Mine", "Nobody 2099", "P", fit=train))
        BayesianRegressor(train.__name__, noise=1.0, method_options={"rank": 2}, **FEW).fit(*line(20))
    assert seen == [2, 2]
    with pytest.raises(ValueError, match="has the entry 'task', which 'mine' does not accept"):
        BayesianRegressor("mine", method_options={"task": 2}).fit(*line(20))


def test_files_of_earlier_versions_are_refused():
    with pytest.raises(
        ValueError, match=r"BayesianRegressor: the file was written by an earlier version.*fit again with this version"
    ):
        BayesianRegressor.restore(nn.Identity(), {"parameters": {}, "fitted": None, "x_units": {}}, {})


def test_quick_effort_trains_briefly():
    x, y = line(40)
    steps = BayesianRegressor(likelihood="gaussian", effort="quick", random_state=0).fit(x, y).choices_["steps"]
    assert max(steps) <= 300
    with pytest.raises(ValueError, match="effort='slow'; give 'full' or 'quick'"):
        BayesianRegressor(effort="slow").fit(x, y)


def test_bad_data_are_refused():
    x, y = line(30)
    with pytest.raises(ValueError, match="y holds only one class, 'a'"):
        BayesianClassifier().fit(x, ["a"] * 30)
    with pytest.raises(ValueError, match="NaN"):
        BayesianRegressor().fit(np.where(x > 2, np.nan, x) * np.nan, y)
    with pytest.raises(ValueError, match=r"sample_weight|sample weight"):
        BayesianRegressor().fit(x, y, np.zeros(30))
    with pytest.raises(ValueError, match="first call of partial_fit needs classes="):
        BayesianClassifier().partial_fit(x, y > 100)
    with pytest.raises(NotFittedError):
        BayesianClassifier().predict(x)


def test_temperature_scaling_is_fitted_out_of_fold(tmp_path):
    """Labels that are wrong in a third of the rows: a network that learns them by heart is made less sure of them."""
    generator = np.random.default_rng(0)
    x = generator.normal(size=(300, 12))
    labels = np.where(generator.random(300) < 0.33, x[:, 0] < 0, x[:, 0] > 0).astype(int)
    plain, scaled = (
        BayesianClassifier(name, prior_scale=6.0, epochs=60, random_state=0).fit(x[:150], labels[:150])
        for name in ("point", "temperature_scaled")
    )
    assert scaled.method_ == "temperature_scaled"
    assert scaled.model_.temperature > 1.5
    loss = [
        float(-model.predictive(x[150:]).log_prob(torch.from_numpy(labels[150:])).mean()) for model in (plain, scaled)
    ]
    assert loss[1] < loss[0] - 0.1
    np.testing.assert_array_equal(plain.predict(x), scaled.predict(x))
    save(scaled, tmp_path / "model.safetensors")
    np.testing.assert_array_equal(load(tmp_path / "model.safetensors").predict_proba(x), scaled.predict_proba(x))
    target = x[:150, 0] + generator.normal(0, 0.5, 150)
    regressor = BayesianRegressor("temperature_scaled", epochs=20, random_state=0).fit(x[:150], target)
    assert regressor.noise_[0] == pytest.approx(np.mean(regressor.predictive(x[:150]).aleatoric.numpy()))


def test_scores_out_of_fold_come_with_the_default(tmp_path):
    generator = np.random.default_rng(1)
    x = generator.normal(size=(200, 2))
    y = x[:, 0] + generator.normal(0, 0.5, 200)
    found = BayesianRegressor(epochs=50, random_state=0).fit(x, y).choices_["out_of_fold"]
    assert 0.4 < found["rmse"] < 0.75
    for level in (50, 90, 95):  # five standard errors of a share of 200 rows
        assert found[f"coverage_{level}"] == pytest.approx(level / 100, abs=5 * np.sqrt(level * (100 - level) / 2e6))
    assert found["width_50"] < found["width_90"] < found["width_95"]
    found = BayesianClassifier(epochs=20, random_state=0).fit(x, (y > 0).astype(int)).choices_["out_of_fold"]
    assert 0.7 < found["accuracy"] < 1
    assert found["sets_50"] <= found["sets_90"] <= found["sets_95"]


def test_partial_fit_renews_the_recalibration_and_what_is_unusual():
    generator = np.random.default_rng(0)
    x = generator.uniform(-1, 1, (400, 1))
    noise = np.where(np.arange(400) < 100, generator.normal(size=400), 3 * generator.standard_t(2, 400))
    y = 2 * x[:, 0] + 0.1 * noise
    model = BayesianRegressor("mean_field", **QUICK).fit(x[:100], y[:100])
    before, far = model.fitted_.units.recalibration, np.full((1, 1), 9.0)
    assert model.unusual(far).all()
    more = generator.uniform(8.5, 9.5, (100, 1))
    model.partial_fit(np.concatenate((x[100:], more)), np.concatenate((y[100:], 2 * more[:, 0])))
    assert model.fitted_.units.recalibration != before
    assert not model.unusual(far).any()
    lower, upper = model.predict_interval(x[100:], 0.9)
    cover = np.mean((lower <= y[100:]) & (y[100:] <= upper))
    assert 0.85 < cover < 0.95  # 3 standard errors of 300 rows


@pytest.mark.thin(2)
@pytest.mark.parametrize("method", ["mean_field", "ensemble"])  # noise that is learned, and noise that stays
def test_partial_fit_estimates_the_noise_again(method):
    generator = np.random.default_rng(0)
    x = generator.normal(size=(1500, 2))
    y = 2 * x[:, 0] + np.where(np.arange(1500) < 100, 0.1, 1.0) * generator.normal(size=1500)
    model = BayesianRegressor(method, **QUICK).fit(x[:100], y[:100])
    assert model.noise_ < 0.1
    model.partial_fit(x[100:500], y[100:500])
    assert 0.6 < model.noise_ < 1.0  # 0.8 in both parts together
    lower, upper = model.predict_interval(x[500:], 0.9)
    assert 0.84 < np.mean((lower <= y[500:]) & (y[500:] <= upper)) < 0.94


@pytest.mark.usefixtures("one_round")
def test_a_gap_where_training_had_none_is_warned_of():
    pandas = pytest.importorskip("pandas")
    days = pandas.date_range("2020-01-01", periods=40, freq="9D")
    frame = pandas.DataFrame({"a": np.arange(40.0), "b": np.arange(40.0) % 3, "kind": ["x", "y"] * 20, "when": days})
    model = BayesianRegressor("laplace", **QUICK).fit(frame, np.arange(40.0))
    assert not model.unusual(frame)[0]
    model.predict(frame)
    gaps = frame
    for column, empty in (("b", np.nan), ("kind", None), ("when", None)):
        gap = frame.assign(**{column: [empty, *frame[column][1:]]})
        with pytest.warns(UserWarning, match=rf"1 cells of '{column}' are empty, but none was empty in training"):
            model.predict(gap)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            assert model.unusual(gap)[0]
        gaps = gaps.assign(**{column: gap[column]})
    BayesianRegressor("laplace", **QUICK).fit(gaps, np.arange(40.0)).predict(gaps)  # without a warning


@pytest.mark.usefixtures("one_round")
def test_weights_that_are_probably_not_copies_are_warned_of():
    x, y = line(60)
    for weights in (np.full(60, 1000.0), np.r_[1e5, np.ones(59)]):
        with pytest.warns(UserWarning, match=r"60 rows stand for .* examples.*divide them by their mean"):
            BayesianRegressor("point", **QUICK).fit(x, y, sample_weight=weights)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        BayesianRegressor("point", **QUICK).fit(x, y, sample_weight=np.full(60, 5.0))


@pytest.mark.thin(2)
@pytest.mark.parametrize(("rows", "epochs", "few"), [(100, 60, True), (300, 8, False)])
def test_few_rows_are_not_judged_at_the_step_that_they_chose(rows, epochs, few, monkeypatch):
    """Members then stop where chance favors their rows: pure noise looks better than the mean of all targets, and does not if it is
    judged by halves."""
    generator = np.random.default_rng(0)
    x, y = generator.normal(size=(rows, 22)), generator.normal(size=rows)
    found = []
    for most in (recipe.MAX_ROWS_FOR_SPLIT_STOPPING, 0):
        monkeypatch.setattr(recipe, "MAX_ROWS_FOR_SPLIT_STOPPING", most)
        model = BayesianRegressor(likelihood="gaussian", target_transform="none", epochs=epochs, random_state=0).fit(
            x, y
        )
        found.append(model.choices_["out_of_fold_score"])
    assert found[0] > found[1] if few else found[0] == found[1]
