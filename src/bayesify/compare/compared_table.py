"""The table of a comparison. It is read from a file or a named data set and passed to the runs as arrays."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from bayesify.arguments.suggestions import suggest
from bayesify.compare.leakage import describe, find_copies, time_hint
from bayesify.compare.question import MAX_QUICK_ROWS, MAX_ROWS, Question
from bayesify.compare.splits import MIN_ROWS, Parts, make_parts, thinned
from bayesify.serving.sources import Source, Standard, read_source
from bayesify.tables import InputError, read_table
from bayesify.tables.columns import Features, read_features, times_of
from bayesify.tables.targets import Task, find_column, read_target
from bayesify.training.random_streams import derive_seed

if TYPE_CHECKING:
    from pandas import DataFrame

MAX_OOD_ROWS = 2000


@dataclass(frozen=True)
class ComparedTable:
    """The table of a comparison."""

    name: str  # name of the file or data set
    task: Task
    target: str  # name of the target column
    features: Features  # features of N rows
    values: np.ndarray  # targets, [N]
    classes: tuple[str, ...] = ()  # labels of the classes; empty for a regression
    outside: Features | None = None  # out-of-distribution inputs that should be detected
    standard: Standard = ()  # training and test rows of the splits that the data set defines
    notes: tuple[str, ...] = field(default=())  # sentences that name assumptions and say what was left out
    groups: np.ndarray | None = None  # group numbers, [N]; rows of one group stay on the same side of every split
    times: np.ndarray | None = None  # time of each row, [N], for splits by time
    cautions: tuple[str, ...] = ()  # reasons why scores may look better than they are
    origin: np.ndarray | None = None  # indices of the rows in the file, [N]; only in the process that read the file
    frame: DataFrame | None = field(default=None, repr=False, compare=False)  # inputs and target; only in this process

    def __len__(self) -> int:
        return len(self.values)

    @property
    def fingerprint(self) -> str:
        """A hash of everything except the file's name. Results with the same hash were computed from the same data."""
        digest = hashlib.sha256()
        for key, value in replace(self, name="").arrays().items():
            digest.update(key.encode() + repr((value.dtype.str, value.shape)).encode())
            digest.update("\n".join(value.ravel().tolist()).encode() if value.dtype.kind == "U" else value.tobytes())
        return digest.hexdigest()[:16]

    def parts(self, index: int, seed: int) -> Parts:
        """Rows of one split."""
        classes = self.task == "classification"
        return make_parts(self.values, index, seed, classes, self.standard, self.groups, self.times)

    def arrays(self) -> dict[str, np.ndarray]:
        """Everything except `notes`, `cautions`, `origin` and `frame`, as arrays for a file."""
        found: dict[str, np.ndarray] = {
            "about": np.array([self.name, self.task, self.target]),
            "values": self.values,
            "classes": np.array(self.classes, dtype=np.str_),
        }
        for place, features in (("inside", self.features), ("outside", self.outside)):
            if features is not None:
                found[f"{place}_schema"] = np.array(json.dumps(features.config()))
                found |= {f"{place}_numbers": features.numbers, f"{place}_codes": features.codes}
        found |= {key: value for key, value in (("groups", self.groups), ("times", self.times)) if value is not None}
        for index, (train, test) in enumerate(self.standard):
            found |= {f"train_{index}": train, f"test_{index}": test}
        return found

    @classmethod
    def read(cls, path: Path) -> ComparedTable:
        """Read a file that `numpy.savez` wrote from `arrays`."""
        with np.load(path, allow_pickle=False) as stored:
            arrays = {key: stored[key] for key in stored}

        def features(place: str) -> Features:
            schema = Features.restore(json.loads(arrays[f"{place}_schema"].item()))
            return replace(schema, numbers=arrays[f"{place}_numbers"], codes=arrays[f"{place}_codes"])

        pairs: list[tuple[np.ndarray, np.ndarray]] = []
        while f"train_{len(pairs)}" in arrays:
            pairs.append((arrays[f"train_{len(pairs)}"], arrays[f"test_{len(pairs)}"]))
        name, task, target = arrays["about"].tolist()
        inside, outside = features("inside"), features("outside") if "outside_schema" in arrays else None
        targets = arrays["values"], tuple(arrays["classes"].tolist())
        found = cls(name, task, target, inside, *targets, outside, tuple(pairs))
        return replace(found, groups=arrays.get("groups"), times=arrays.get("times"))


def read_compared_table(question: Question) -> ComparedTable:
    """Read the file or data set that `question.data` names."""
    source = read_source(question.data, question.reading)
    frame, notes = source.frame, list(source.notes)
    target = _check_columns(question, source)
    found = read_target(frame[target], question.task or source.task)
    rows, values, times = found.rows, found.values, None
    if question.time is not None:
        when = times_of(frame[question.time])
        known = ~np.isnan(when[rows])
        if not known.all():
            notes.append(f"{int((~known).sum()):,} rows without a value of {question.time} were left out.")
        rows, values = rows[known], values[known]
    standard = source.standard if len(rows) == len(frame) else ()
    max_rows = question.max_rows or (MAX_QUICK_ROWS if question.quick else MAX_ROWS)
    if len(rows) > max_rows:
        chosen = thinned(len(rows), max_rows, derive_seed(question.seed, "rows"))
        notes.append(
            f"{max_rows:,} of {len(rows):,} rows, chosen at random, were used to save time; use --max-rows to use more "
            "rows."
        )
        rows, values, standard = rows[chosen], values[chosen], ()
    if question.time is not None:
        times = when[rows]
        notes.append(
            f"Splits are by time: methods are trained on rows with an earlier {question.time!r} and tested on later rows."
        )
    # Sort labels as text, in the same order as the estimators.
    classes, codes = np.unique(found.classes, return_inverse=True) if found.classes else ((), None)
    if codes is not None:
        values = codes[values]
    inputs = frame.drop(columns=list({target, *question.ignore, *([question.group] if question.group else [])}))
    features = read_features(inputs.iloc[rows])
    groups = None
    if question.group is not None:
        groups = frame[question.group].iloc[rows].astype(str).factorize()[0].astype(np.int64)
        words = f"Rows with the same {question.group} ({groups.max() + 1:,} different values)"
        notes.append(f"{words} stay on the same side of every split.")
    at_random = groups is None and times is None
    standard, cautions = standard if at_random else (), []
    if not standard:
        copies = find_copies(features) if at_random else None
        seed = derive_seed(question.seed, "giveaways") % 2**31
        cautions = describe(features, values, found.task, copies, target=target, seed=seed)
        cautions += time_hint(features) if times is None else []
        groups = copies if groups is None else groups
    table = ComparedTable(
        source.name, found.task, target, replace(features, notes=()), values, tuple(map(str, classes)), None, standard,
        (*notes, *found.notes, *features.notes), groups, times, tuple(cautions), rows,
        frame[[*inputs.columns, target]].iloc[rows].reset_index(drop=True),
    )  # fmt: skip
    table.parts(0, question.seed)
    return table if question.ood is None else _with_outside(table, Path(question.ood), question)


def _check_columns(question: Question, source: Source) -> str:
    frame, where, group, time = source.frame, source.where, question.group, question.time
    if len(frame) < MIN_ROWS:
        raise InputError(
            f"{where}: the table has {len(frame)} row{'s' * (len(frame) > 1)}; a comparison needs at least {MIN_ROWS} rows"
        )
    target = find_column(frame, question.target or source.target, where)
    if group is not None and time is not None:
        raise InputError("--group and --time cannot be combined; give only one of them")
    for option, column in (*(("ignore", name) for name in question.ignore), ("group", group), ("time", time)):
        if column is not None and column not in frame.columns:
            raise InputError(f"--{option} {column}: {where} has no such column; {suggest(column, list(frame.columns))}")
        if column == target:
            raise InputError(f"--{option} {column}: this is the target; give another column")
    return target


def _with_outside(table: ComparedTable, path: Path, question: Question) -> ComparedTable:
    frame, notes = read_table(path, replace(question.reading, sheet=""))
    frame = frame.drop(columns=[table.target], errors="ignore")
    if len(frame) > MAX_OOD_ROWS:
        frame = frame.iloc[thinned(len(frame), MAX_OOD_ROWS, derive_seed(question.seed, "outside"))]
        notes.append(f"{MAX_OOD_ROWS:,} rows of {path.name}, chosen at random, were used.")
    try:
        outside = read_features(frame, like=table.features)
    except InputError as error:
        raise InputError(f"--ood {path.name}: {error}") from error
    return replace(table, outside=outside, notes=(*table.notes, *notes))
