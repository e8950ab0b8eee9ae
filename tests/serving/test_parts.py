"""A table that is read in parts is the table that is read as a whole: the same rows and predictions, or the same refusal."""

import os
import random
import subprocess
import sys

import numpy as np
import pandas
import pytest
from awkward_tables import CASES, ROWS, X, Y, frame

from bayesify.serving import fit_table, predict_table, sources
from bayesify.serving.fitting import Scored
from bayesify.tables.errors import InputError
from bayesify.tables.files import Reading, read_table

PART = 7


def fitted(table):
    return fit_table(table, "y", method="point", epochs=1, scored=Scored({"rmse": 1.0}, "no rows"))


@pytest.fixture(scope="module")
def models():
    """One for numbers and one for dates, numbers that are often missing, and texts."""
    generator = np.random.default_rng(0)
    day = [f"{row % 28 + 1:02d}.03.{1990 + row}" for row in range(ROWS)]
    rich = frame(y=Y, day=day, c=np.where(X[:, 2] > 1, np.nan, X[:, 2]), rate=X[:, 2])
    text = frame(y=Y, c=generator.choice(["line\n0", "line\n1", "n 3"], ROWS))
    return [fitted(frame(y=Y)), fitted(rich.drop(columns="rate")), fitted(rich[["a", "rate", "y"]]), fitted(text)]


def outcome(model, path, reading, monkeypatch, whole):
    """What comes of a prediction, as a whole or in parts: numbers and notes, or the words of a refusal."""
    out = path.with_suffix(".out")
    monkeypatch.setattr(sources, "MAX_WHOLE_BYTES", 1 << 40 if whole else -1)
    try:
        found = predict_table(model, path, out, rows=10**6 if whole else PART, reading=reading)
    except InputError as error:
        assert not out.exists()
        return str(error)
    scores = list(found.scores.means().values()) if found.scores.num_rows else []
    cells = pandas.read_csv(out, sep=None, engine="python", dtype=str).drop(columns="unusual")
    numbers = cells.replace(",", ".", regex=True).to_numpy(float)  # the file has the decimal mark of the table
    out.unlink()
    return numbers, [found.num_rows, found.num_unusual, *scores], found.notes


def check_same(model, path, reading, monkeypatch):
    whole, parts = (outcome(model, path, reading, monkeypatch, flag) for flag in (True, False))
    if isinstance(whole, str) or isinstance(parts, str):
        assert parts == whole
        return
    for one, other in zip(whole[:2], parts[:2], strict=True):
        np.testing.assert_allclose(other, one, rtol=2e-5)
    assert parts[2] == whole[2]


@pytest.mark.thin(2)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_awkward_tables(case, models, tmp_path, monkeypatch):
    path = tmp_path / f"table{case.suffix}"
    path.write_bytes(case.content)
    round_, turn = divmod(CASES.index(case), 3)
    others = [models[1 + round_ % 3]] if turn == 0 and len(case.content) < 100_000 else []
    for model in (models[0], *others):
        check_same(model, path, case.options.get("reading"), monkeypatch)


# -- files that change their mind -----------------------------------------------------------------------------------------

A = np.round(np.random.default_rng(1).uniform(1000, 9000, ROWS), 1)


def european(value, digits=1):
    return f"{value:,.{digits}f}".translate(str.maketrans(",.", ".,"))


CELLS = {
    "plain": lambda row: f"{A[row]}",
    "whole": lambda row: f"{A[row]:.0f}",
    "thousands": lambda row: f"{A[row]:,.1f}",
    "whole thousands": lambda row: f"{A[row]:,.0f}",
    "European": lambda row: european(A[row]),
    "European whole": lambda row: european(A[row], 0),
    "decimal comma": lambda row: f"{A[row]}".replace(".", ","),
    "dollars": lambda row: f"${A[row]:,.2f}",
    "percent": lambda row: f"{A[row] / 100:.1f} %",
    "missing": lambda row: "NA",
    "empty": lambda row: "",
    "text": lambda row: f"n {row % 3}",
    "truth": lambda row: str(row % 2 == 0),
    "code": lambda row: f"{row % 5:03d}",
    "large": lambda row: str(10**19 + row),
    "day first": lambda row: f"{row % 28 + 1:02d}/03/2020",
    "month first": lambda row: f"03/{row % 28 + 1:02d}/2020",
    "either": lambda row: f"{row % 12 + 1:02d}/03/2020",
    "ISO": lambda row: f"2020-03-{row % 28 + 1:02d}",
}


def random_file(chance, names):
    """Columns whose cells are written in one way up to some row and in another one from there on."""
    separator = chance.choice(",;\t|")
    columns = []
    for _ in names:
        first, second = chance.choice(list(CELLS)), chance.choice([*CELLS, "plain", "plain"])
        change, other = chance.choice((0, 3, 7, 14, 30, ROWS)), chance.choice(("", "", "", "unknown", "é", "1,2,3"))
        cells = [CELLS[first if row < change else second](row) for row in range(ROWS)]
        if other:
            cells[chance.randrange(ROWS)] = other
        columns.append(cells)
    quoted = chance.random() < 0.7  # otherwise lines differ in length
    end = chance.choice(("\n", "\n", "\r\n", "\r"))
    lines = [separator.join(names)]
    lines += [separator.join(f'"{cell}"' if quoted else cell for cell in row) for row in zip(*columns, strict=True)]
    text = chance.choice(("", "", end, " " + end + end)) + end.join(lines) + chance.choice((end, "", end + end))
    encoding = chance.choice(("utf-8", "utf-8", "utf-8-sig", "cp1252", "utf-16", "utf-16-le", "utf-16-be", "utf-32"))
    return text.encode(encoding)


@pytest.mark.thin(2)
@pytest.mark.parametrize("seed", range(4))
def test_generated_files(models, tmp_path, monkeypatch, seed):
    for number in range(10):
        chance = random.Random(f"{seed} {number}")
        model = chance.choice(models)
        path = tmp_path / f"{number}.csv"
        names = [column.name for column in model.about.columns] + ["y"] * (chance.random() < 0.3)
        path.write_bytes(random_file(chance, [*names, "other"]))
        check_same(model, path, Reading(), monkeypatch)


def attempt(function, *arguments):
    """What a function gives, or the words of its refusal."""
    try:
        return function(*arguments)
    except InputError as error:
        return str(error)


def test_generated_files_are_read_alike(tmp_path, monkeypatch):
    """Cells, not only predictions: the parts are rows of the whole table."""
    refused = 0
    monkeypatch.setattr(sources, "MAX_WHOLE_BYTES", -1)
    for seed in range(40):
        chance, path = random.Random(f"read {seed}"), tmp_path / f"{seed}.csv"
        path.write_bytes(random_file(chance, ["a", "b", "c"]))
        reading = Reading(texts=chance.choice(((), ("a",))), commas=chance.choice(((), (), ("b",))))
        whole, parts = attempt(read_table, path, reading), attempt(sources.read_parts, path, PART, reading)
        if isinstance(whole, str) or isinstance(parts, str):
            refused += 1
            assert parts == whole
            continue
        (whole, notes), parts = whole, list(parts)
        assert max(len(part) for _, part, _ in parts) <= PART
        assert all(found == notes for *_, found in parts)
        both = pandas.concat([part.astype(object) for _, part, _ in parts])
        pandas.testing.assert_frame_equal(both, whole.astype(object), check_dtype=False, check_column_type=False)
    assert 3 < refused < 20


@pytest.mark.parametrize("end", ["\r", "\n", "\r\n"])
@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16-le", "utf-16-be"])
@pytest.mark.parametrize("before", [0, 1, 3])
def test_line_ends_empty_lines_and_encodings(tmp_path, monkeypatch, end, encoding, before):
    rows = ["name;x", *(f"ö {row};{row},5" for row in range(20))]
    (tmp_path / "t.csv").write_bytes((before * end + end.join(rows) + end).encode(encoding))
    monkeypatch.setattr(sources, "MAX_WHOLE_BYTES", -1)
    whole, parts = (
        read_table(tmp_path / "t.csv")[0],
        [part for _, part, _ in sources.read_parts(tmp_path / "t.csv", PART)],
    )
    for found in (whole, pandas.concat(parts)):
        assert list(found.columns) == ["name", "x"]
        assert found["x"].tolist() == [row + 0.5 for row in range(20)]
        assert found["name"].tolist() == [f"ö {row}" for row in range(20)]


def test_cells_without_a_name_are_refused(tmp_path, monkeypatch):
    (tmp_path / "t.csv").write_text("a,b\n1,2,3\n4,5,6\n")
    for size in (1 << 40, -1):
        monkeypatch.setattr(sources, "MAX_WHOLE_BYTES", size)
        with pytest.raises(InputError, match="the first row has more cells than the header has names"):
            list(sources.read_parts(tmp_path / "t.csv", 1))
    (tmp_path / "t.csv").write_text("a,b\n1,2,\n4,5,\n")  # a separator at the end of each line
    assert read_table(tmp_path / "t.csv")[0].to_numpy().tolist() == [[1, 2], [4, 5]]


def test_a_file_that_changes_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(sources, "MAX_WHOLE_BYTES", -1)
    (tmp_path / "t.csv").write_text("a\n" + "1\n" * 20)
    parts = iter(sources.read_parts(tmp_path / "t.csv", PART))
    next(parts)
    with (tmp_path / "t.csv").open("a") as file:
        file.write("x\n")
    with pytest.raises(InputError, match="changed while it was read"):
        list(parts)


@pytest.mark.skipif(os.name != "posix", reason="signals of POSIX")
def test_a_killed_prediction_leaves_no_rows_behind(tmp_path, monkeypatch):
    """The process dies in the middle of the table; no file of it holds a cell of the table."""
    (tmp_path / "t.csv").write_text("a,secret\n" + "1,hunter2\n" * 50)
    program = (
        "import os, sys\nfrom pathlib import Path\nfrom bayesify.serving import sources\n"
        "sources.MAX_WHOLE_BYTES = -1\n"
        "for first, part, _ in sources.read_parts(Path(sys.argv[1]), 7):\n"
        "    if first: os.kill(os.getpid(), 9)\n"
    )
    (tmp_path / "tmp").mkdir()
    done = subprocess.run(
        [sys.executable, "-c", program, tmp_path / "t.csv"], env={**os.environ, "TMPDIR": str(tmp_path / "tmp")}
    )
    assert done.returncode == -9
    assert list((tmp_path / "tmp").iterdir()) == []
    assert [path.name for path in tmp_path.iterdir() if path.is_file()] == ["t.csv"]
