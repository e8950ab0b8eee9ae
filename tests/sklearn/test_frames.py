"""Data frames as people have them: kinds of columns, what is missing or odd, choices, files, unusual rows."""

import numpy as np
import pytest

pytest.importorskip("sklearn", minversion="1.7")
pytest.importorskip("pandas")

import pandas
import torch
from sklearn.base import clone

import bayesify
from bayesify.sklearn import BayesianClassifier, BayesianRegressor
from bayesify.sklearn.columns import Columns
from bayesify.sklearn.unusual import tail_share
from bayesify.tables.encoding import Encoding

QUICK = {"epochs": 20, "learning_rate": 0.01, "hidden": (16,), "random_state": 0}
ROWS = 150


def cars(rows=ROWS, seed=0):
    """A positive target that grows with a number, depends on a text, and varies in proportion to its size."""
    draw = np.random.default_rng(seed)
    frame = pandas.DataFrame(
        {
            "weight": draw.uniform(1600, 5100, rows),
            "origin": draw.choice(["Europe", "Japan", "USA"], rows),
            "built": pandas.date_range("1970-01-01", periods=rows, freq="9D"),
            "diesel": draw.random(rows) < 0.5,
        }
    )
    y = np.exp(4.5 - 0.0003 * frame["weight"] + 0.3 * (frame["origin"] == "Japan") + 0.1 * draw.normal(size=rows))
    frame.loc[3, "weight"], frame.loc[7, "origin"], frame.loc[9, "built"] = np.nan, None, pandas.NaT
    return frame, y.to_numpy()


@pytest.fixture(scope="module")
def fitted():
    frame, y = cars()
    return frame, y, BayesianRegressor(**{**QUICK, "epochs": 40}).fit(frame, y)


def test_a_frame_of_all_kinds(fitted):
    frame, y, model = fitted
    assert np.corrcoef(model.predict(frame), y)[0, 1] > 0.8
    assert model.n_features_in_ == 4
    assert list(model.feature_names_in_) == ["weight", "origin", "built", "diesel"]
    assert model.choices_["method"] == "auto"
    assert model.choices_["members"] == 5
    assert len(model.choices_["tried"]) >= 3
    with pytest.raises(AttributeError, match="depends on the row"):
        _ = model.noise_


def test_a_number_called_like_the_days_of_a_date_is_a_column():
    frame = pandas.DataFrame({"age (days)": [1.0, 2.0, 4.0, np.nan], "kind": ["a", "b", "a", "b"]})
    columns, inputs = Columns.learn(frame, "here")
    again = Columns.restore(columns.config())
    np.testing.assert_array_equal(again(frame, "here"), inputs)
    assert set(inputs[:, 0]) == {1.0, 2.0, 4.0}


def test_positive_targets_have_positive_intervals(fitted):
    frame, _, model = fitted
    far = frame.assign(weight=5100.0)
    for level in (0.5, 0.9, 0.999):
        lower, upper = model.predict_interval(far, level)
        assert (lower > 0).all()
        assert (upper > lower).all()


@pytest.mark.thin(2)
@pytest.mark.parametrize("method", ["auto", "mean_field", "laplace"])
@pytest.mark.parametrize("kind", [BayesianRegressor, BayesianClassifier])
def test_files(kind, method, tmp_path):
    frame, y = cars()
    labels = np.where(y > np.median(y), "thrifty", "thirsty")
    model = kind(method, **QUICK).fit(frame, y if kind is BayesianRegressor else labels)
    bayesify.save(model, tmp_path / "model.safetensors")
    loaded = bayesify.load(tmp_path / "model.safetensors")
    assert type(loaded) is kind
    new = cars(20, seed=1)[0]
    if kind is BayesianClassifier:
        assert np.array_equal(loaded.predict_proba(new), model.predict_proba(new))
        assert np.array_equal(loaded.classes_, model.classes_)
    else:
        assert np.array_equal(loaded.predict_quantiles(new), model.predict_quantiles(new))
    assert np.array_equal(loaded.unusual_share(new), model.unusual_share(new))
    assert loaded.choices_ == model.choices_
    assert loaded.get_params() == model.get_params()
    with pytest.raises(ValueError, match="partial_fit needs the rows of earlier calls"):
        loaded.partial_fit(frame, y if kind is BayesianRegressor else labels)


def test_columns_are_found_by_name(fitted):
    frame, y, model = fitted
    expected = model.predict(frame)
    assert np.array_equal(model.predict(frame[["diesel", "built", "weight", "origin"]]), expected)
    assert np.array_equal(model.predict(frame.assign(mpg=y, note="x")), expected)
    assert np.array_equal(model.predict(frame.set_index(np.arange(ROWS) + 1000)), expected)


def test_odd_columns_are_named(fitted):
    frame, y, model = fitted
    with pytest.raises(ValueError, match="column 'origin' is missing"):
        model.predict(frame.drop(columns="origin"))
    with pytest.raises(ValueError, match="column 'weight' holds texts"):
        model.predict(frame.assign(weight="heavy"))
    with pytest.raises(
        ValueError,
        match=r"column 'weight' holds numbers, but row 3 below the header has 'heavy'.* or leave the column out$",
    ):
        model.predict(
            frame.assign(weight=[*frame["weight"][:2].astype(object), "heavy", *frame["weight"][3:].astype(object)])
        )
    twice = pandas.concat((frame, frame[["origin"]]), axis=1)
    with pytest.raises(ValueError, match="2 columns have the name 'origin'"):
        model.predict(twice)
    with pytest.raises(ValueError, match="2 columns have the name 'origin'"):
        BayesianRegressor(**QUICK).fit(twice, y)
    with pytest.raises(ValueError, match="give a frame with the same columns"):
        model.predict(frame.to_numpy())
    numbers = pandas.DataFrame({"a": np.arange(20.0), "b": np.arange(20.0) % 3})
    plain = BayesianRegressor(**QUICK).fit(numbers, np.arange(20.0))
    with pytest.raises(ValueError, match="column 'b' has cells that are not finite numbers"):
        plain.predict(numbers.assign(b="text"))
    with pytest.raises(ValueError, match="feature names should match"):
        plain.predict(numbers[["b", "a"]])


def test_infinite_cells_count_as_missing(fitted):
    frame, y, model = fitted
    odd = frame.assign(weight=[np.inf, *frame["weight"][1:]])
    missing = frame.assign(weight=[np.nan, *frame["weight"][1:]])
    assert np.array_equal(model.predict(odd), model.predict(missing))
    numbers = pandas.DataFrame({"a": [np.inf, *np.arange(1.0, 60.0)], "b": np.arange(60.0) % 7})
    assert np.isfinite(BayesianRegressor(**QUICK).fit(numbers, np.arange(60.0)).predict(numbers)).all()
    with pytest.raises(ValueError, match="y contains infinity"):
        BayesianRegressor(**QUICK).fit(frame, np.where(y > 60, np.inf, y))
    with pytest.raises(ValueError, match=r"X contains infinity.*column 0, row 0, counted from 0"):
        BayesianRegressor(**QUICK).fit(numbers.to_numpy(), np.arange(60.0))
    with pytest.raises(ValueError, match=r"BayesianRegressor: .*'text'.*; give y as numbers"):
        BayesianRegressor(**QUICK).fit(frame, np.full(len(y), "text"))


def test_a_frame_of_numbers_with_a_double_column():
    numbers = pandas.DataFrame({"a": np.arange(40.0), "b": np.arange(40.0) % 7})
    model = BayesianRegressor(**QUICK).fit(numbers, np.arange(40.0))
    with pytest.raises(ValueError, match="2 columns have the name 'b'"):
        model.predict(pandas.concat([numbers, numbers[["b"]]], axis=1))


def test_nothing_to_predict():
    frame, _ = cars(40)
    with pytest.raises(ValueError, match="y is 7 in every row"):
        BayesianRegressor(**QUICK).fit(frame, np.full(40, 7.0))
    with pytest.raises(ValueError, match="one class, 'a'"):
        BayesianClassifier(**QUICK).fit(frame, ["a"] * 40)


def test_unusual_rows(fitted):
    """Of 1,000 new rows like the training rows 10 % are to be flagged, of 150 in training: standard error 2.7 points."""
    frame, _, model = fitted
    odd = frame.iloc[[0, 1, 2]].copy()
    odd.loc[0, "weight"], odd.loc[1, "origin"] = 350_000.0, "Mars"
    assert model.unusual(odd).tolist() == [True, True, False]
    assert model.unusual(odd.iloc[[2]].assign(weight=np.nan)).tolist() == [True]  # no training row lacked it
    new = cars(1000, seed=3)[0]
    new["built"] = frame["built"].sample(1000, replace=True, random_state=0).to_numpy()
    assert 0.0 < model.unusual(new, share=0.1).mean() < 0.1 + 5 * 0.027
    with pytest.raises(ValueError, match="share=2"):
        model.unusual(frame, share=2)


def places(num_levels=30, each=6, rare=12):
    """A number that a text of many levels says, and `rare` texts that occur once."""
    draw = np.random.default_rng(0)
    code = np.r_[np.repeat(np.arange(num_levels), each), num_levels + np.arange(rare)]
    effect = draw.normal(size=num_levels + rare)
    frame = pandas.DataFrame({"place": [f"p{index}" for index in code], "x": draw.normal(size=len(code))})
    return frame, effect[code] + 0.1 * frame["x"].to_numpy() + 0.05 * draw.normal(size=len(code))


@pytest.mark.thin(2)
@pytest.mark.parametrize("kind", [BayesianRegressor, BayesianClassifier])
def test_texts_of_many_levels(kind, tmp_path):
    frame, y = places()
    target = y if kind is BayesianRegressor else np.where(y > 0, "high", "low")
    one = {"likelihood": "heteroscedastic_gaussian", "target_transform": "none"} if kind is BayesianRegressor else {}
    model = kind(**{**QUICK, **one, "epochs": 40, "learning_rate": 0.05}).fit(frame, target)
    assert model.choices_["categories"] in ("levels", "means")
    assert model.choices_["left_out"] == [
        "Column 'place': 12 of its 42 different texts are rare and share one input (12 of 192 rows)."
    ]

    def predict(made, rows):
        return made.predict(rows) if kind is BayesianRegressor else made.predict_proba(rows)

    often = frame[:180]
    found = predict(model, often)
    if kind is BayesianRegressor:
        assert np.corrcoef(found, y[:180])[0, 1] > 0.95  # 0.8 where 20 levels have an input of their own
    else:
        assert (model.predict(often) == target[:180]).mean() > 0.9
    parts = np.concatenate([predict(model, often[:7]), predict(model, often[7:])])
    np.testing.assert_allclose(parts, found, rtol=1e-12, atol=1e-12)
    np.testing.assert_array_equal(predict(clone(model).fit(frame, target), often), found)
    new = often.iloc[:2].assign(place=["p3", "Atlantis"])
    assert model.unusual(new).tolist() == [False, True]
    bayesify.save(model, tmp_path / "model.safetensors")
    np.testing.assert_array_equal(predict(bayesify.load(tmp_path / "model.safetensors"), new), predict(model, new))


def test_configurations_of_an_earlier_version():
    """Without the fields that came later; each has a default that predicts as before."""
    frame, _ = cars(40)
    columns = Columns.learn(frame, "here")[0].config()
    inputs = Columns.restore(columns)(frame, "here")
    del columns["preparation"]["means"]
    np.testing.assert_array_equal(Columns.restore(columns)(frame, "here"), inputs)
    encoding = Encoding.piecewise(inputs, np.ones(40))
    plain = encoding.config()
    del plain["left_out"]
    np.testing.assert_array_equal(Encoding.restore(plain)(inputs), encoding(inputs))
    with pytest.raises(KeyError, match="mean"):
        Encoding.restore({})


def test_few_rows_tell_what_is_far_outside():
    """Fifty rows: no share below 1 / 51 can be counted, the tail goes on beyond them."""
    frame, y = cars(50)
    model = BayesianRegressor(**QUICK).fit(frame, y)
    odd = frame.iloc[[0, 1]].copy()
    odd.loc[0, "weight"] = 350_000.0
    assert model.unusual(odd, share=0.01).tolist() == [True, False]


def test_tail_share_is_that_of_a_pareto_tail():
    """Against the exact tail of 10,000 draws with alpha = 3; the estimate from 1,000 of them has a relative error of 3 %."""
    known = torch.from_numpy(np.sort(1 + np.random.default_rng(0).pareto(3.0, 10_000)))
    values = known[-1] * torch.tensor([1.5, 3.0], dtype=torch.float64)
    exact = (known[-1] / values) ** 3.0 / 10_001
    assert tail_share(values, known) == pytest.approx(exact.numpy(), rel=5 * 0.03 * 3 * np.log(3.0))
    assert tail_share(known[:1], known)[0] == pytest.approx(1.0, abs=1e-3)


def test_choices_can_be_forced():
    frame, y = cars(80)
    model = BayesianRegressor(target_transform="log", likelihood="heteroscedastic_gaussian", **QUICK).fit(frame, y)
    assert model.choices_["transform"] == "log"
    assert model.choices_["tried"] == {}
    named = BayesianRegressor("mean_field", target_transform="log", **QUICK).fit(frame, y)
    assert (named.predict_interval(frame, 0.99)[0] > 0).all()
    with pytest.raises(ValueError, match="target_transform='log' does not accept the target -1"):
        BayesianRegressor(target_transform="log", **QUICK).fit(frame, y - y.min() - 1)
    with pytest.raises(ValueError, match="did you mean 'sqrt'"):
        BayesianRegressor(target_transform="sqr", **QUICK).fit(frame, y)
    with pytest.raises(ValueError, match="likelihood='beta'"):
        BayesianRegressor(likelihood="beta", **QUICK).fit(frame, y)
