"""Rows after the training period: which input is the time, and how much wider their distributions are."""

import numpy as np
import pytest
import torch

pytest.importorskip("sklearn", minversion="1.7")
pytest.importorskip("pandas")
pytest.importorskip("scipy")

import pandas
from scipy import stats

import bayesify
from bayesify.predictive.base import Outputs
from bayesify.predictive.regression import RegressionPredictive
from bayesify.sklearn import BayesianRegressor
from bayesify.sklearn.columns import Columns
from bayesify.sklearn.later_rows import LaterRows, find_time, latest_rows
from bayesify.sklearn.recalibration import Recalibration
from bayesify.sklearn.units import UnitsPredictive

LEVELS = [0.01, 0.05, 0.5, 0.9, 0.99]
ROWS = 200


def test_a_stretched_gaussian_is_a_wider_gaussian():
    """N(1.62, 0.32^2) stretched by 2 is N(1.62, 0.64^2), in the second of two rows only."""
    inner = RegressionPredictive(
        Outputs(kept=torch.full((1, 2, 1), 0.3, dtype=torch.float64)), lambda f: (f, torch.full_like(f, 0.8**2))
    )
    shift, scale = torch.tensor([1.5], dtype=torch.float64), torch.tensor([0.4], dtype=torch.float64)
    found = UnitsPredictive(inner, shift, scale, stretch=torch.tensor([[1.0], [2.0]], dtype=torch.float64))
    y = torch.full((2, 1), 2.2, dtype=torch.float64)
    for row, exact in enumerate((stats.norm(1.62, 0.32), stats.norm(1.62, 0.64))):
        assert found.quantile(LEVELS)[:, row, 0].numpy() == pytest.approx(exact.ppf(LEVELS), rel=1e-9)
        assert float(found.cdf(y)[row]) == pytest.approx(exact.cdf(2.2), rel=1e-9)
        assert float(found.log_prob(y)[row]) == pytest.approx(exact.logpdf(2.2), rel=1e-9)
        assert float(found.mean[row]) == pytest.approx(1.62, rel=1e-5)
        assert float(found.std[row]) == pytest.approx(exact.std(), rel=1e-3)


def test_a_stretch_follows_the_recalibration():
    """G is the identity in normal scores up to a factor of 1/2 between its knots, and the stretch adds a factor of 1/3."""
    map_ = Recalibration((-4.0, 4.0), (-2.0, 2.0))
    u, three = torch.tensor([0.2, 0.7], dtype=torch.float64), torch.tensor(3.0, dtype=torch.float64)
    assert map_(u, three).numpy() == pytest.approx(stats.norm.cdf(stats.norm.ppf(u) / 6), rel=1e-9)
    assert map_.inverse(map_(u, three).tolist(), 3.0) == pytest.approx(u.tolist(), rel=1e-9)
    moved = [float((map_(u + step, three) - map_(u - step, three))[0]) / (2 * step) for step in (1e-5,)]
    assert float(map_.log_slope(u, three)[0].exp()) == pytest.approx(moved[0], rel=1e-6)


def test_the_factor_makes_the_intervals_of_the_latest_rows_hold():
    scores, weights = 1.7 * stats.norm.ppf((np.arange(2000) + 0.5) / 2000), np.ones(2000)
    wide = LaterRows.of(1, np.arange(5.0), stats.norm.cdf(scores), weights)
    assert wide == LaterRows(1, 4.0, pytest.approx(1.7, rel=1e-3))
    assert LaterRows.of(1, np.arange(5.0), stats.norm.cdf(0.5 * scores), weights).stretch == 1.0
    half = stats.norm.cdf(scores[::2])
    again = LaterRows.of(1, np.arange(5.0), half, 2 * weights[::2])  # a weight of 2 counts as two rows
    assert again.stretch == pytest.approx(LaterRows.of(1, np.arange(5.0), half.repeat(2), weights).stretch, rel=1e-3)
    inputs = np.array([[9.0, 4.0], [0.0, 4.5]])
    assert wide(inputs).flatten().tolist() == [1.0, wide.stretch]
    assert wide(inputs[:1]) is None


def test_the_time_is_a_date_or_a_number_that_never_falls():
    draw = np.random.default_rng(0)
    day = np.arange(ROWS) // 3.0
    numbers = np.column_stack((draw.normal(size=ROWS), day))
    assert find_time(numbers, None) == 1
    assert find_time(numbers[draw.permutation(ROWS)], None) is None
    assert find_time(numbers[:, 1:], None) is None
    assert find_time(np.column_stack((numbers[:, 0], day // 10)), None) is None  # 7 different values are too few
    frame = pandas.DataFrame({"kind": draw.choice(["a", "b"], ROWS), "size": numbers[:, 0], "day": day})
    columns, inputs = Columns.learn(frame, "here")
    assert find_time(inputs, columns) == 1
    frame["when"] = pandas.Timestamp("2020-01-01") + pandas.to_timedelta(draw.permutation(ROWS), unit="D")
    columns, inputs = Columns.learn(frame, "here")
    assert inputs[:, find_time(inputs, columns)].tolist() == pytest.approx(
        (frame["when"] - pandas.Timestamp(2000, 1, 1)).dt.days
    )


def test_rows_of_one_time_stay_together():
    times, ones = np.repeat(np.arange(20.0), 10), np.ones(ROWS)
    assert np.array_equal(latest_rows(times, ones), times >= 16)
    assert latest_rows(times + 0.1 * np.arange(ROWS), ones).sum() == 0.2 * ROWS
    assert latest_rows(times[:100], ones[:100]) is None  # 20 rows are too few
    assert latest_rows(np.repeat([0.0, 1.0], [80, 120]), ones) is None  # too few rows are earlier


@pytest.fixture(scope="module")
def moved():
    """A target that does not depend on the date until the last fifth of the rows, where it rises by 6 of its deviations."""
    draw = np.random.default_rng(0)
    frame = pandas.DataFrame(
        {
            "size": draw.normal(size=ROWS),
            "when": pandas.Timestamp("2020-01-01") + pandas.to_timedelta(np.arange(ROWS), "D"),
        }
    )
    y = draw.normal(size=ROWS) + 6 * (np.arange(ROWS) >= 0.8 * ROWS)
    order = draw.permutation(ROWS)
    frame, y = frame.iloc[order].reset_index(drop=True), y[order]
    model = BayesianRegressor(
        likelihood="heteroscedastic_gaussian", target_transform="none", epochs=40, hidden=(8,), random_state=0
    )
    return frame, y, model.fit(frame, y)


def test_a_change_that_earlier_rows_do_not_show_widens_later_rows_only(moved, tmp_path):
    _, _, model = moved
    later = model.fitted_.later
    assert later.stretch > 2  # networks that had seen the latest rows would predict them well
    assert "rows after 2020-07-18 (column 'when')" in model.choices_["left_out"][-1]
    new = pandas.DataFrame({"size": [0.0, 0.0], "when": pandas.to_datetime(["2020-07-18", "2020-07-19"])})
    lower, upper = model.predict_interval(new)
    inner = model.fitted_.predict_scaled(model._inputs(new), model.prediction_draws)
    plain_lower, plain_upper = (part[:, 0].numpy() for part in model.fitted_.units.predictive(inner).interval(0.9))
    assert (upper - lower)[0] == pytest.approx((plain_upper - plain_lower)[0])
    assert (upper - lower)[1] > 1.5 * (plain_upper - plain_lower)[1]
    assert model.explain(new).widens.shape == (2, 2)
    bayesify.save(model, tmp_path / "model.safetensors")
    again = bayesify.load(tmp_path / "model.safetensors")
    assert again.fitted_.later == later
    assert np.array_equal(again.predict_interval(new)[1], upper)


def test_a_table_without_a_time_is_not_widened(moved):
    frame, y, model = moved
    other = frame.assign(when=frame["size"] ** 2, kind="a")
    other.loc[0, "kind"] = "b"
    assert BayesianRegressor(**model.get_params()).fit(other, y).fitted_.later is None


def test_copies_of_rows_and_later_calls_do_not_change_what_the_time_is():
    """A copy at the end of a sorted table is not a step back in time, and rows that merging has sorted show no time."""
    draw = np.random.default_rng(0)
    x = draw.normal(size=(ROWS, 2))
    y = draw.normal(size=ROWS) + 6 * (x[:, 0] > 1)
    options = {"likelihood": "heteroscedastic_gaussian", "target_transform": "none", "epochs": 20, "hidden": (8,)}

    def fitted(method, *calls):
        model = BayesianRegressor(**options, random_state=0)
        for call in calls:
            getattr(model, method)(*call)
        return model.fitted_.later

    assert fitted("partial_fit", (x[:90], y[:90]), (x[90:], y[90:])) is None
    order, twice = np.argsort(x[:, 0]), np.arange(0, ROWS, 7)
    x, y, weights = x[order], y[order], np.ones(ROWS)
    weights[twice] = 2
    found = fitted("fit", (x, y, weights))
    assert found is not None
    assert fitted("fit", (np.concatenate((x, x[twice])), np.concatenate((y, y[twice])))) == found
