"""History of a training run, epoch by epoch."""

from collections.abc import Iterable
from typing import Any

from bayesify.arguments.checks import checked
from bayesify.predictive.findings import Findings


class History(list[dict[str, Any]]):
    """A list with one dict of plain numbers per epoch. `json.dumps(history)` therefore works.

    Keys: `epoch` (from 1), `phase` (`"map"` or `"variational"`), `nll` (negative log-likelihood per example, mean over the
    epoch's steps), `kl` (nats, whole network, mean over steps; in the MAP phase `-log p` of the mean), `kl_weight` (in the
    last step), `elbo` (nats, whole dataset, mean over steps, with the KL weights in use), `learning_rate`, `seconds`. If several
    models are trained, the keys `nll_by_model` and `elbo_by_model` are added. `Steps(skip_not_finite=True)` adds `skipped_steps`
    (for each model). A validation loader adds `validation_nll`; for classes, also `validation_accuracy`; for numbers, also
    `validation_rmse` and `validation_coverage_90`.

    Means are taken over the steps that were not skipped, and over the models that took a step. The means are NaN in an epoch in
    which all steps were skipped. A model that took no step ranks last: its entry is infinity in `nll_by_model` and minus infinity
    in `elbo_by_model`.

    Attributes:
        findings: Problems of the training run, each with a remedy.
        notes: Further remarks, one per subject. `"capture"` says whether steps ran as CUDA graphs, and if not, why.
            `"comparison"` says that `fit` could not detect slightly worse predictions, because the run had no validation data.
    """

    def __init__(self, rows: Iterable[dict[str, Any]] = ()) -> None:
        super().__init__(rows)
        self.notes: dict[str, str] = {}
        self.findings = Findings()

    @checked
    def column(self, key: str) -> list[Any]:
        """One column of the history; `None` for epochs without this entry.

        Raises:
            ValueError: If no epoch has this entry.
        """
        known = {name for row in self for name in row}
        if key not in known:
            raise ValueError(f"History: key={key!r} is not a column; give one of {', '.join(sorted(known))}")
        return [row.get(key) for row in self]

    def __repr__(self) -> str:
        if not self:
            return "History(no epochs)"
        columns = list(dict.fromkeys(name for row in self for name in row))
        shown = list(self) if len(self) <= 12 else [*self[:5], None, *self[-5:]]
        cells = [columns, *([_cell(row.get(name)) if row else "..." for name in columns] for row in shown)]
        widths = [max(len(line[index]) for line in cells) for index in range(len(columns))]
        lines = ["  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)) for line in cells]
        return f"History of {len(self)} epochs\n" + "\n".join([*lines, *self.notes.values(), *map(str, self.findings)])


def _cell(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else "" if value is None else str(value)
