"""Sixty tables as people have them, each with its outcome: what is read, what is told, or what is wrong with it."""

import gzip
import io
import lzma
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pandas
import pytest
from awkward_tables import CASES, ROWS, Y, csv, frame, zipped

from bayesify.compare.compared_table import read_compared_table
from bayesify.compare.question import Question
from bayesify.tables import packed
from bayesify.tables.errors import InputError
from bayesify.tables.files import Reading


def test_there_are_sixty():
    assert len(CASES) >= 60


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_outcome(case, tmp_path):
    path = tmp_path / f"table{case.suffix}"
    path.write_bytes(case.content)
    options = {"target": "y", "max_rows": 5000, "seed": 0, **case.options}
    if case.error:
        with pytest.raises(InputError) as caught:
            read_compared_table(Question(str(path), **options))
        assert case.error in str(caught.value)
        return
    problem = read_compared_table(Question(str(path), **options))
    assert problem.task == case.task
    assert case.told in " ".join((*problem.notes, *problem.cautions))
    if case.numbers is not None:
        assert problem.features.number_names == case.numbers
    if case.check is not None:
        assert case.check(problem) in (None, True)
    assert all(len(rows) for rows in vars(problem.parts(0, 0)).values())


def test_standard_input(monkeypatch):
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(csv())))
    problem = read_compared_table(Question("-", target="y", max_rows=100, seed=0))
    assert (problem.name, len(problem)) == ("table", ROWS)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ("https://example.org/t.csv", "this is a web address; download the table"),
        ("nothing.csv", "there is no such file"),
        (".", "is a folder"),
    ],
)
def test_no_table_there(data, message):
    with pytest.raises(InputError, match=message):
        read_compared_table(Question(data, target="y", max_rows=100, seed=0))


def test_archives_that_unpack_to_too_much_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(packed, "MAX_UNPACKED_BYTES", 1 << 20)
    zeros = b"a,y\n" + b"0,1\n" * (1 << 19)
    for name, content in (
        ("t.csv.gz", gzip.compress(zeros)),
        ("t.zip", zipped(t__csv=zeros)),
        ("t.xz", lzma.compress(zeros)),
    ):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(InputError, match="the file has more than"):
            read_compared_table(Question(str(tmp_path / name), target="y", max_rows=100, seed=0))
    book = zipped(**{"xl/workbook.xml": b"<workbook/>", "xl/worksheets/sheet1.xml": zeros})
    (tmp_path / "t.xlsx").write_bytes(book)
    with pytest.raises(InputError, match="GiB when unpacked, more than"):
        read_compared_table(Question(str(tmp_path / "t.xlsx"), target="y", max_rows=100, seed=0))


def test_an_encoding_that_does_not_fit(tmp_path):
    (tmp_path / "t.csv").write_bytes(csv(frame(y="schön")).decode().encode("cp1252"))
    with pytest.raises(InputError, match="--encoding utf-8"):
        read_compared_table(
            Question(str(tmp_path / "t.csv"), target="y", max_rows=100, seed=0, reading=Reading(encoding="utf-8"))
        )
    with pytest.raises(InputError, match="there is no such encoding"):
        Reading(encoding="utf-9")


def test_spreadsheets(tmp_path):
    pytest.importorskip("openpyxl")
    path = Path(tmp_path / "t.xlsx")
    with pandas.ExcelWriter(path) as writer:
        pandas.DataFrame().to_excel(writer, sheet_name="cover")
        frame(y=Y).to_excel(writer, sheet_name="data", index=False)
        frame(y=-Y).to_excel(writer, sheet_name="other", index=False)
    problem = read_compared_table(Question(str(path), target="y", max_rows=100, seed=0))
    assert "Sheet 'data' was read, one of 3 (cover, data, other); --sheet chooses another." in problem.notes
    np.testing.assert_allclose(problem.values, Y)
    other = read_compared_table(Question(str(path), target="y", max_rows=100, seed=0, reading=Reading(sheet="other")))
    np.testing.assert_allclose(other.values, -Y)
    with pytest.raises(InputError, match="has no sheet 'x'; its sheets are cover, data, other"):
        read_compared_table(Question(str(path), target="y", max_rows=100, seed=0, reading=Reading(sheet="x")))
    with pytest.raises(InputError, match="sheet 'cover' is empty"):
        read_compared_table(Question(str(path), target="y", max_rows=100, seed=0, reading=Reading(sheet="cover")))
