"""A table of all weights and their posteriors."""

from collections.abc import Iterable, Mapping, Set
from dataclasses import dataclass
from typing import Any

from bayesify.weights.catalog import Weight


@dataclass(frozen=True)
class WeightRow:
    """One weight in the summary.

    Args:
        name: The weight's name in `named_parameters()`.
        shape: The weight's shape.
        treatment: The posterior that draws the weight, or "point estimate".
        before: Number of the weight's scalars before the network was made Bayesian.
        after: Number of trainable scalars that represent the weight now; `None` if they are counted in the row of another weight
            of the layer.
        remark: The reason why the weight has no posterior, or the names it is tied to.
    """

    name: str
    shape: tuple[int, ...]
    treatment: str
    before: int
    after: int | None
    remark: str = ""


@dataclass(frozen=True)
class Summary:
    """Every weight of a network, the posterior that draws it, and its number of scalars. `print` shows a table.

    Args:
        rows: One row per weight.
        shared: Number of all other trainable scalars: those of the likelihood and of the prior, and those that several weights
            share.
    """

    rows: tuple[WeightRow, ...]
    shared: int = 0

    @property
    def before(self) -> int:
        """Number of scalars before the network was made Bayesian."""
        return sum(row.before for row in self.rows)

    @property
    def after(self) -> int:
        """Number of trainable scalars in the Bayesian network."""
        return sum(row.after or 0 for row in self.rows) + self.shared

    def __str__(self) -> str:
        head = ("weight", "shape", "posterior", "before", "after", "remark")
        lines = [
            (
                row.name,
                "x".join(map(str, row.shape)) or "scalar",
                row.treatment,
                f"{row.before:,}",
                "with weight" if row.after is None else f"{row.after:,}",
                row.remark,
            )
            for row in self.rows
        ]
        if self.shared:
            lines.append(("(likelihood, prior, shared)", "", "", "0", f"{self.shared:,}", ""))
        lines.append(("total", "", "", f"{self.before:,}", f"{self.after:,}", ""))
        widths = [max(len(line[column]) for line in [head, *lines]) for column in range(len(head))]

        def render(line: tuple[str, ...]) -> str:
            cells = [
                cell.rjust(width) if column in (3, 4) else cell.ljust(width)
                for column, (cell, width) in enumerate(zip(line, widths, strict=True))
            ]
            return "  ".join(cells).rstrip()

        rule = "-" * (sum(widths) + 2 * (len(widths) - 1))
        return "\n".join([render(head), rule, *(render(line) for line in lines[:-1]), rule, render(lines[-1])])


def summarize(
    weights: Mapping[str, Weight], left: Mapping[str, str], posteriors: Iterable[Any], points: Set[str], total: int
) -> Summary:
    """The table of a network's weights.

    `left` gives the reason why a weight has no posterior, and `points` are the names of weights that are trained as point
    estimates. `total` is the number of all trainable scalars.
    """
    drawn: dict[str, tuple[str, int | None]] = {}
    remarks = dict(left)
    for posterior in posteriors:
        remarks |= posterior.remarks()
        for name, count in posterior.count_by_weight().items():
            drawn[name] = (type(posterior).__name__, count)
    rows = []
    for name, weight in weights.items():
        tied = f"tied to {', '.join(weight.aliases)}" if weight.aliases else ""
        remark = "; ".join(filter(None, (remarks.get(name), tied)))
        treatment, after = drawn.get(name, ("point estimate", weight.numel if name in points else 0))
        rows.append(WeightRow(name, tuple(weight.shape), treatment, weight.numel, after, remark))
    return Summary(tuple(rows), shared=total - sum(row.after or 0 for row in rows))
