"""Tables from files: what is read, and what is refused in which words."""

import numpy as np
import pandas
import pytest

from bayesify.tables.errors import InputError
from bayesify.tables.files import read_table


def write(tmp_path, content, name="table.csv"):
    path = tmp_path / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


@pytest.mark.parametrize(
    "content",
    [
        "a,b,c\n1.5,x,2\n?,y,3\n",
        "a;b;c\n1.5;x;2\n;y;3\n",
        "a;b;c\n1,5;x;2\n;y;3\n",
        "a\tb\tc\r\n1.5\tx\t2\r\nNA\ty\t3\r\n",
        "\ufeffa, b, c\n1.5, x, 2\nnull, y, 3\n",
        "a,b,c\n1.5,x,2\n?,y,3\n".encode("utf-16"),
    ],
    ids=["comma", "semicolon", "decimal comma", "tab", "byte order mark", "utf-16"],
)
def test_dialects_give_the_same_table(tmp_path, content):
    frame, notes = read_table(write(tmp_path, content))
    assert list(frame.columns) == ["a", "b", "c"]
    assert frame["b"].tolist() == ["x", "y"]
    np.testing.assert_array_equal(frame["a"].to_numpy(float), [1.5, np.nan])
    assert frame["c"].tolist() == [2, 3]
    comma = isinstance(content, str) and "1,5" in content
    assert notes == ["Numbers were read with a decimal comma, such as '1,5', which is 1.5."] * comma


@pytest.mark.parametrize(
    ("cells", "expected"),
    [
        (["1.234", "950"], [1234, 950]),
        (["1.234", "12.345.678"], [1234, 12345678]),
        (["1.234", "1.5"], [1.234, 1.5]),  # a point with one digit after it is no thousands separator
    ],
)
def test_the_decimal_comma_of_a_file_decides_about_points(tmp_path, cells, expected):
    frame, notes = read_table(write(tmp_path, "\n".join(["a;b", *(f"2,5;{cell}" for cell in cells)]) + "\n"))
    np.testing.assert_array_equal(frame["b"].astype(float), expected)
    said = [note for note in notes if note.startswith("Column 'b' holds numbers such as '1")]
    assert len(said) == (expected[0] == 1234)


def test_other_encodings_are_read_and_named(tmp_path):
    frame, notes = read_table(write(tmp_path, "städte,y\nKöln,1\n".encode("cp1252")))
    assert frame["städte"].tolist() == ["Köln"]
    assert "Windows-1252" in notes[0]


BOMBS = {
    "numbers": lambda pyarrow: {"a": pyarrow.array(np.zeros(5_000_000))},
    "columns": lambda pyarrow: {f"a{k}": pyarrow.array(np.zeros(100_000, np.int8)) for k in range(50)},
    "texts": lambda pyarrow: {"a": pyarrow.DictionaryArray.from_arrays(np.zeros(50_000, np.int32), ["x" * 10_000]).cast("string")},
    "lists": lambda pyarrow: {"a": pyarrow.array([np.zeros(1_000_000)] * 5)},
}  # fmt: skip


@pytest.mark.parametrize("bomb", BOMBS)
def test_a_parquet_file_that_unpacks_to_much_more_is_refused(tmp_path, monkeypatch, bomb):
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    monkeypatch.setattr("bayesify.tables.files.MAX_BYTES", 1 << 25)
    path = tmp_path / "bomb.parquet"
    parquet.write_table(pyarrow.table(BOMBS[bomb](pyarrow)), path, compression="zstd")
    assert path.stat().st_size < 1 << 20
    with pytest.raises(InputError, match=r"bomb\.parquet: the file has 0\.\d GiB when unpacked, more than"):
        read_table(path)
    monkeypatch.setattr("bayesify.tables.files.MAX_BYTES", 1 << 31)
    assert len(read_table(path)[0]) >= 5


def test_parquet(tmp_path):
    pytest.importorskip("pyarrow")
    frame = pandas.DataFrame({"a": [1.0, None], "when": pandas.to_datetime(["2020-01-01", "2021-05-03"])})
    frame.to_parquet(tmp_path / "table.parquet")
    found, _ = read_table(tmp_path / "table.parquet")
    pandas.testing.assert_frame_equal(found, frame)
    damaged = write(tmp_path, (tmp_path / "table.parquet").read_bytes()[:-20], "damaged.parquet")
    with pytest.raises(InputError, match="damaged"):
        read_table(damaged)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "is empty"),
        ("\n\n", "is empty"),
        ("a,b\n", "no rows"),
        ("a,b,a\n1,2,3\n", "columns 1 and 3 have the same name 'a'"),
        ("a,b\n1,2\n1,2,3\n", "line 3 has 3 cells, but the lines before it have 2; correct it"),
        ("1.5,2,3\n4,5,6\n", "put the columns' names in the first line"),
        (b"\x89PNG\r\n\x1a\n" + bytes(50), "a picture"),
        (b"PK\x03\x04" + bytes(50), "save the table as CSV"),
        (bytes(range(256)) * 4, "binary file"),
        (b"\x01\x02\x03\x04\x05\x06" * 20, "binary file"),
    ],
)
def test_what_is_no_table_is_refused(tmp_path, content, message):
    with pytest.raises(InputError, match=message):
        read_table(write(tmp_path, content))


def test_files_that_cannot_be_read(tmp_path):
    with pytest.raises(InputError, match="there is no such file"):
        read_table(tmp_path / "nothing.csv")
    with pytest.raises(InputError, match="is a folder"):
        read_table(tmp_path)
