"""A predictor with calibrated intervals or sets."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any, Self

from torch import Tensor

from bayesify.arguments.checks import checked, refuse
from bayesify.conformal.intervals import Intervals
from bayesify.conformal.sets import Sets
from bayesify.predictive.base import Predictive
from bayesify.predictor import Predictor


class Conformal:
    """A predictor whose intervals, or sets of classes, are calibrated on rows that it was not trained on.

    See `Intervals` and `Sets` for what is promised. What `predict` returns stays as it is.

    Args:
        model: Anything that predicts.
        rule: How; `Intervals()` for numbers and `Sets()` for classes by default.

    Raises:
        TypeError: If the model does not predict.
    """

    @checked
    def __init__(self, model: Any, rule: Intervals | Sets | None = None) -> None:
        if not isinstance(model, Predictor):
            raise refuse(
                "conformal.Conformal", "model", model, "a predictor; for arrays use conformal.Intervals or Sets"
            )
        self.model = model
        self.rule = rule

    @checked
    def fit(self, x: Any, y: Any, *, groups: Sequence[Hashable] | Tensor | None = None, **options: Any) -> Self:
        """Calibrate.

        Args:
            x: Inputs of calibration rows, which the model was not trained on.
            y: Their targets.
            groups: One value per row.
            options: Of the model's `predict`.

        Returns:
            Itself.
        """
        if self.rule is None:
            task = self.model.likelihood.task if self.model.likelihood is not None else "regression"
            self.rule = Intervals() if task == "regression" else Sets()
        self.rule.fit(self.predict(x, **options), y, groups=groups)
        return self

    def predict(self, x: Any, **options: Any) -> Predictive:
        """What the model predicts."""
        return self.model.predict(x, **options)

    @checked
    def interval(
        self, x: Any, level: float = 0.9, *, groups: Sequence[Hashable] | Tensor | None = None, **options: Any
    ) -> tuple[Tensor, Tensor]:
        """Lower and upper ends, [B, O] each; see `Intervals.interval`.

        Raises:
            TypeError: If the model predicts classes, or nothing was fitted.
        """
        if not isinstance(self.rule, Intervals):
            raise TypeError(
                "conformal.Conformal: no calibrated intervals; call fit(x, y) of a regression first, or sets(x)"
            )
        return self.rule.interval(self.predict(x, **options), level, groups=groups)

    @checked
    def sets(
        self, x: Any, level: float = 0.9, *, groups: Sequence[Hashable] | Tensor | None = None, **options: Any
    ) -> Tensor:
        """Which classes are in, truth values [B, C]; see `Sets.sets`.

        Raises:
            TypeError: If the model predicts numbers, or nothing was fitted.
        """
        if not isinstance(self.rule, Sets):
            raise TypeError(
                "conformal.Conformal: no calibrated sets; call fit(x, y) of a classification first, or interval(x)"
            )
        return self.rule.sets(self.predict(x, **options), level, groups=groups)
