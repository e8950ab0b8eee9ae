"""Settings of a comparison."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from bayesify.arguments.checks import checked
from bayesify.compare.contestants import BASELINES, DEFAULT_RIVALS, PORTFOLIO, RIVALS
from bayesify.compare.models import installed
from bayesify.methods import all_methods, get_method
from bayesify.serving.sources import short_name
from bayesify.sklearn.settings import AUTO
from bayesify.tables import InputError, Reading
from bayesify.tables.targets import Task

NUM_SPLITS, NUM_QUICK_SPLITS = 10, 5
"""Default number of splits of a small table: without `quick`, and with `quick`."""
MAX_ROWS, MAX_QUICK_ROWS = 20_000, 5_000
"""Default maximum number of rows: without `quick`, and with `quick`."""


@checked
@dataclass(frozen=True)
class Question:
    """Settings of a comparison.

    Args:
        data: Path of a file, or name of a data set.
        target: Column to predict. If `data` is the name of a data set, the data set defines its target.
        task: `"regression"` or `"classification"`; `None` to detect the task.
        methods: Names of methods, or `"all"` (default: a small selection). Baselines and rivals are always added.
        ignore: Columns to leave out.
        ood: Path of a table of out-of-distribution inputs.
        splits: Number of splits; `None` for the default, which depends on `quick`.
        max_rows: Maximum number of rows, chosen at random from a larger table. The default `None` depends on `quick`.
        quick: Whether to train for a shorter time and on fewer splits.
        seed: Seed of everything random.
        group: Name of a column. Rows with the same value in this column stay on the same side of every split.
        time: Name of a column of times. Methods are trained on earlier rows and tested on later ones.
        reading: Options for reading the file.

    Raises:
        InputError: If a count is out of range or a method is unknown.
    """

    data: str
    target: str | None = None
    task: Task | None = None
    methods: Sequence[str] = ()
    ignore: Sequence[str] = ()
    ood: str | Path | None = None
    splits: int | None = None
    max_rows: int | None = None
    quick: bool = False
    seed: int = 0
    group: str | None = None
    time: str | None = None
    reading: Reading = field(default_factory=Reading)

    def __post_init__(self) -> None:
        if self.splits is not None and self.splits < 1:
            raise InputError(f"--splits {self.splits}: give at least 1")
        if self.max_rows is not None and self.max_rows < 1:
            raise InputError(f"--max-rows {self.max_rows}: give at least 1")
        if self.seed < 0:
            raise InputError(f"--seed {self.seed}: give 0 or more")
        self.chosen()

    def chosen(self) -> list[str]:
        """The methods, baselines first.

        Raises:
            InputError: If a name is unknown; the message suggests the nearest name.
        """
        wanted = [AUTO, *all_methods()] if "all" in self.methods else self.methods or PORTFOLIO
        try:
            names = [name if name in (*BASELINES, *RIVALS, AUTO) else get_method(name).name for name in wanted]
        except ValueError as error:
            raise InputError(f"--methods: {error}") from error
        return list(dict.fromkeys((*DEFAULT_RIVALS, *installed(), *BASELINES, *names)))

    @property
    def name(self) -> str:
        """Name of the file or data set, reduced to characters that are safe in folder names."""
        return short_name(self.data)
