"""What happened in each epoch of training."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from bayesify.arguments.checks import checked
from bayesify.predictive.findings import Findings


class History(list[dict[str, Any]]):
    """One dict of plain numbers per epoch; a list, so `json.dumps(history)` works.

    Keys: `epoch` (from 1), `phase` (`"map"` or `"variational"`), `nll` (negative log-likelihood per example, mean over the
    epoch's steps), `kl` (nats, whole network, mean over steps; in the MAP phase `-log p` of the mean), `kl_weight` (of the
    last step), `elbo` (nats, whole dataset, mean over steps, with the weights that were used), `learning_rate`, `seconds`, of
    several models `nll_by_model` and `elbo_by_model`, with `Steps(skip_not_finite=True)` `skipped_steps` (of each model), and
    with a validation loader `validation_nll` and `validation_accuracy`, or `validation_rmse` and `validation_coverage_90`.

    Means are over the steps that were taken, and over models that took any: NaN in an epoch all of whose steps were skipped. Such a
    model is the last by `nll_by_model` and `elbo_by_model`: infinite, and minus infinity.

    Attributes:
        findings: What is amiss with the training, each with its remedy; printed in plain words.
        notes: What else there is to say of the run, by subject: `"capture"`, whether steps ran as CUDA graphs, and why not.
    """

    def __init__(self, rows: Iterable[dict[str, Any]] = ()) -> None:
        super().__init__(rows)
        self.notes: dict[str, str] = {}
        self.findings = Findings()

    @checked
    def column(self, key: str) -> list[Any]:
        """One entry of every epoch; `None` where an epoch has no such entry.

        Raises:
            ValueError: If no epoch has it.
        """
        known = {name for row in self for name in row}
        if key not in known:
            raise ValueError(f"History: key={key!r} is no column; give one of {', '.join(sorted(known))}")
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
