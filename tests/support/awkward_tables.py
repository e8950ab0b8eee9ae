"""Tables as users have them, each with its outcome: the content, a note, or an error message."""

import bz2
import gzip
import io
import json
import lzma
import zipfile
from dataclasses import dataclass, field

import numpy as np
import pandas

from bayesify.tables.files import Reading

ROWS = 40
X = np.random.default_rng(0).normal(size=(ROWS, 3))
Y = X[:, 0] + np.random.default_rng(1).normal(size=ROWS)


def frame(**columns):
    return pandas.DataFrame({"a": X[:, 0], "b": X[:, 1], **columns})


def csv(table=None, **options):
    return (frame(y=Y) if table is None else table).to_csv(index=False, **options).encode()


def lines(*rows):
    return "\n".join(rows).encode()


def zipped(**files):
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in files.items():
            archive.writestr(name.replace("__", "."), content)
    return buffer.getvalue()


def texts(write, values=None):
    """A table whose target is written by a function."""
    values = 1000 * np.abs(Y) + 1000 if values is None else values
    return csv(frame(y=[write(value) for value in values]))


def german(value):
    return f"{value:,.2f}".replace(",", "#").replace(".", ",").replace("#", ".")


def marked(text):
    return [text if row < 6 else str(value) for row, value in enumerate(X[:, 2])]


def bookkeeper(value):
    return f"({-value:,.2f})" if value < 0 else f"{value:,.2f}"


@dataclass
class Case:
    """A file and the outcome of reading it.

    Args:
        name: Name of the test.
        content: Bytes of the file.
        error: Part of the error message; empty if the file can be read.
        told: Part of a note or caution.
        task: Expected task.
        numbers: Expected names of numeric inputs; not checked if empty.
        suffix: Suffix of the file's name.
        options: Arguments of `read_problem`.
        check: Function that checks the problem.
    """

    name: str
    content: bytes
    error: str = ""
    told: str = ""
    task: str = "regression"
    numbers: tuple | None = None
    suffix: str = ".csv"
    options: dict = field(default_factory=dict)
    check: object = None


def close(values):
    return lambda problem: np.testing.assert_allclose(problem.values, values, rtol=1e-4)


MONEY = np.round(1000 * np.abs(Y) + 1000, 2)
WHOLE = 600 + 139 * np.random.default_rng(1).permutation(ROWS)
COUNTS = np.random.default_rng(2).choice(6, 400, p=[0.45, 0.28, 0.15, 0.07, 0.03, 0.02])
MANY = np.random.default_rng(3).normal(size=(400, 2))
WIDE = pandas.DataFrame(np.random.default_rng(5).normal(size=(50, 2001))).rename(columns={2000: "y"})
CASES = [
    # -- rows and targets
    Case("one row", csv(frame(y=Y)[:1]), error="has 1 row; a comparison needs at least 20"),
    Case("ten rows", csv(frame(y=Y)[:10]), error="has 10 rows; a comparison needs at least 20"),
    Case("header only", b"a,b,y\n", error="has a header but no rows"),
    Case("empty file", b" \n", error="is empty; give a table"),
    Case("no header", csv(frame(y=Y), header=False), error="the first line holds numbers only"),
    Case("two columns of one name", lines("a,a,y", *["1,2,3"] * 30), error="columns 1 and 2 have the same name 'a'"),
    Case("ragged line", lines("a,b,y", *["1,2,3"] * 30, "1,2,3,4"), error="line 32 has 4 cells, but"),
    Case("constant target", csv(frame(y=7.5)), error="is 7.5 in every row"),
    Case("target without a value", csv(frame(y=np.nan)), error="is empty in every row"),
    Case("infinite targets", csv(frame(y=np.where(np.arange(ROWS) < 2, np.inf, Y))), told="2 rows without a finite y"),
    Case("dates for a target", csv(frame(y="2020-01-01")), error="holds dates"),
    Case("three hundred classes", csv(pandas.DataFrame({"a": range(300), "y": [f"k{i}" for i in range(300)]})),
         error="may have at most 100 classes"),
    Case("class with one member", csv(frame(y=["u"] * 20 + ["v"] * 19 + ["w"])), task="classification", told="'w'"),
    Case("truth values", csv(frame(y=Y > 0)), task="classification"),
    Case("yes and no", csv(frame(y=np.where(Y > 0, "yes", "no"))), task="classification"),
    Case("stars from 1 to 5", csv(frame(y=np.resize([1, 2, 3, 4, 5], ROWS))), task="classification", told="--task regression"),
    Case("counts from 0 to 5", csv(pandas.DataFrame({"a": MANY[:, 0], "y": COUNTS})), told="y is treated as counts",
         check=lambda problem: close(COUNTS)(problem)),
    Case("codes from 0 to 3", csv(frame(y=np.resize([0, 1, 2, 3], ROWS))), task="classification"),
    # -- numbers as people write them
    Case("thousands", texts(lambda v: f"{v:,.2f}", MONEY), told="such as '", check=close(MONEY)),
    Case("dollars", texts(lambda v: f"${v:,.0f}", MONEY), told="holds numbers such as '$", check=close(np.round(MONEY))),
    Case("euros after", texts(lambda v: f"{german(v)} €", MONEY), check=close(MONEY)),
    Case("German with semicolons", csv(frame(y=[german(v) for v in MONEY]), sep=";", decimal=","), check=close(MONEY)),
    Case("decimal commas", csv(frame(y=MONEY), sep=";", decimal=","), check=close(MONEY)),
    Case("points between thousands next to decimal commas",
         csv(frame(y=[f"{v:,}".replace(",", ".") for v in WHOLE]), sep=";", decimal=","),
         told="holds numbers such as '", check=close(WHOLE)),
    Case("spaces between thousands", texts(lambda v: f"{v:,.1f}".replace(",", " "), MONEY), check=close(np.round(MONEY, 1))),
    Case("negative in parentheses", texts(bookkeeper, 1000 * Y), check=close(np.round(1000 * Y, 2))),
    Case("percent inputs", csv(frame(rate=[f"{v:.1f} %" for v in 10 * X[:, 2]], y=Y)), numbers=("a", "b", "rate"), told="'rate'"),
    Case("unknown among numbers", csv(frame(c=marked("unknown"), y=Y)),
         error="but row 1 below the header has 'unknown' (6 of 40 cells"),
    Case("unknown that is named", csv(frame(c=marked("unknown"), y=Y)),
         options={"reading": Reading(missing=["unknown"])}, numbers=("a", "b", "c")),
    Case("dashes for missing", csv(frame(c=marked("-"), y=Y)), numbers=("a", "b", "c")),
    Case("numbers over ten orders", csv(frame(y=np.exp(5 * Y)))),
    # -- columns
    Case("empty column", csv(frame(c=np.nan, y=Y)), told="Column 'c' was left out: all its cells are empty"),
    Case("constant column", csv(frame(c=1, y=Y)), told="it holds the same value in every row"),
    Case("numbers of rows", csv(frame(account=range(ROWS), y=Y)), told="Column 'account' was left out: it numbers the rows"),
    Case("names of rows", csv(frame(c=[f"n {i}" for i in range(ROWS)], y=Y)), told="a different text in every row"),
    Case("infinite inputs", csv(frame(c=np.where(np.arange(ROWS) < 3, np.inf, X[:, 2]), y=Y)), told="holds 3 infinite numbers"),
    Case("quoted line breaks", csv(frame(c=[f"line\n{i % 3}" for i in range(ROWS)], y=Y)),
         check=lambda problem: problem.features.levels[0][0] == "line\n0"),
    Case("first days of years", csv(frame(day=[f"{1970 + i}-01-01" for i in range(ROWS)], y=Y)), numbers=("a", "b", "day (days)")),
    Case("first days of months", csv(frame(day=[f"{2000 + i // 12}-{i % 12 + 1:02d}-01" for i in range(ROWS)], y=Y)),
         numbers=("a", "b", "day (days)", "day (season, sine)", "day (season, cosine)"), told="--time day"),
    Case("names of months", csv(frame(day=[f"Jan {i % 28 + 1:02d}, {1990 + i}" for i in range(ROWS)], y=Y)),
         check=lambda problem: "day (days)" in problem.features.number_names),
    Case("German dates", csv(frame(day=[f"{i % 28 + 1:02d}.03.{1990 + i}" for i in range(ROWS)], y=Y)),
         check=lambda problem: "day (days)" in problem.features.number_names),
    Case("2,000 columns on 50 rows", csv(WIDE),
         told="There are 2,000 columns for 50 rows"),
    Case("copies", csv(pandas.concat([frame(c=X[:, 2], y=Y)] * 3)), told="80 of 120 rows are copies"),
    Case("copy of the target", csv(frame(c=2.5 * Y + 1, y=Y)), told="Column 'c' alone predicts 100.0 %"),
    # -- files
    Case("UTF-8 with a mark", b"\xef\xbb\xbf" + csv()),
    Case("UTF-16", csv().decode().encode("utf-16")),
    Case("UTF-16 without a mark", csv().decode().encode("utf-16-le")),
    Case("UTF-32", csv().decode().encode("utf-32")),
    Case("Windows-1252", csv(frame(y=np.where(Y > 0, "schön", "übel"))).decode().encode("cp1252"), task="classification",
         told="read as Windows-1252"),
    Case("Shift-JIS by name", csv(frame(y=np.where(Y > 0, "はい", "いいえ"))).decode().encode("shift_jis"), task="classification",
         options={"reading": Reading(encoding="shift_jis")}, check=lambda problem: problem.classes == ("いいえ", "はい")),
    Case("gzip", gzip.compress(csv()), suffix=".csv.gz"),
    Case("bzip2", bz2.compress(csv()), suffix=".csv.bz2"),
    Case("xz", lzma.compress(csv()), suffix=".csv.xz"),
    Case("damaged gzip", gzip.compress(csv())[:200], suffix=".csv.gz", error="cannot be unpacked"),
    Case("zip with one table", zipped(t__csv=csv()), suffix=".zip"),
    Case("zip with two tables", zipped(t__csv=csv(), u__csv=csv()), suffix=".zip", error="archive with 2 files (t.csv, u.csv)"),
    Case("JSON lines", "\n".join(json.dumps(row) for row in frame(y=Y).to_dict("records")).encode(), suffix=".jsonl"),
    Case("JSON list", json.dumps(frame(y=Y).to_dict("records")).encode(), suffix=".json"),
    Case("JSON of something else", b"[1, 2, 3]", suffix=".json", error="the JSON has no column names"),
    Case("JSON that ends early", b'{"a": 1, "y"', suffix=".json", error="this is not a table in JSON"),
    Case("JSON with lists in cells", json.dumps([{"a": [1], "y": float(v)} for v in Y]).encode(), error="holds list values"),
    Case("picture", b"\x89PNG\r\n\x1a\n" + bytes(100), error="is a picture"),
    Case("binary file", bytes(range(256)) * 20, error="is a binary file"),
]  # fmt: skip
