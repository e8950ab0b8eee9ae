"""A predictor with calibrated intervals or sets."""

from typing import Any, Self

import torch
from torch import Tensor, nn

from bayesify.arguments.checks import checked, refuse
from bayesify.conformal.intervals import Intervals
from bayesify.conformal.sets import Sets
from bayesify.conformal.thresholds import Groups, listed
from bayesify.predictive.base import Predictive
from bayesify.predictor import Predictor
from bayesify.storage.serializers import STORED_CLASSES, register_predictor, stored_name
from bayesify.weights.module_state import below, prefixed

RULES: dict[str, type[Intervals] | type[Sets]] = {"Intervals": Intervals, "Sets": Sets}
"""Rules by their names in files."""


@register_predictor
class Conformal(Predictor):
    """A predictor whose intervals, or sets of classes, are calibrated on rows that it was not trained on.

    See `Intervals` and `Sets` for their guarantees. Calibration does not change the result of the model's `predict`. A saved file
    contains the model and the scores of the calibration rows, not the rows themselves.

    Args:
        model: Any predictor.
        rule: Calibration rule; by default `Intervals()` for numbers and `Sets()` for classes.

    Raises:
        TypeError: If the model is not a predictor.
    """

    @checked
    def __init__(self, model: Any, rule: Intervals | Sets | None = None) -> None:
        if not isinstance(model, Predictor):
            words = "a predictor; for arrays use conformal.Intervals or Sets"
            raise refuse("conformal.Conformal", "model", model, words)
        self.model, self.rule = model, rule
        self.likelihood, self.output, self.findings = model.likelihood, model.output, model.findings

    @checked
    def fit(self, x: Any, y: Any, *, groups: Groups = None, **options: Any) -> Self:
        """Calibrate on rows that the model was not trained on.

        Args:
            x: Inputs of the calibration rows.
            y: Targets of the calibration rows.
            groups: Group of each row, for coverage within each group.
            options: Options of the model's `predict`.
        """
        if self.rule is None:
            task = self.model.likelihood.task if self.model.likelihood is not None else "regression"
            self.rule = Intervals() if task == "regression" else Sets()
        self.rule.fit(self.predict(x, **options), y, groups=groups)
        return self

    @property
    def num_distinct_draws(self) -> int | None:
        return self.model.num_distinct_draws

    def predict(
        self,
        x: Any,
        num_draws: int | None = None,
        *,
        generator: torch.Generator | None = None,
        memory: int | str | None = None,
        **options: Any,
    ) -> Predictive:
        """The model's own prediction; see its `predict`."""
        return self.model.predict(x, num_draws, generator=generator, memory=memory, **options)

    @checked
    def interval(self, x: Any, level: float = 0.9, *, groups: Groups = None, **options: Any) -> tuple[Tensor, Tensor]:
        """Lower and upper ends of the intervals, [B, O] each; see `Intervals.interval`.

        Raises:
            TypeError: If the model predicts classes, or if no rule was given and `fit` was not called.
        """
        if not isinstance(self.rule, Intervals):
            raise TypeError(
                "conformal.Conformal: intervals are not calibrated; call fit(x, y) with a regression model first, or call sets(x)"
            )
        return self.rule.interval(self.predict(x, **options), level, groups=groups)

    @checked
    def sets(self, x: Any, level: float = 0.9, *, groups: Groups = None, **options: Any) -> Tensor:
        """Whether each class is in each row's set, as booleans [B, C]; see `Sets.sets`.

        Raises:
            TypeError: If the model predicts numbers, or if no rule was given and `fit` was not called.
        """
        if not isinstance(self.rule, Sets):
            remedy = "call fit(x, y) with a classification model first, or call interval(x)"
            raise TypeError(f"conformal.Conformal: sets are not calibrated; {remedy}")
        return self.rule.sets(self.predict(x, **options), level, groups=groups)

    # -- storage ---------------------------------------------------------------------------------------------------

    def config(self) -> dict[str, Any]:
        """The rule with the groups of its calibration rows, and the model's configuration."""
        rule = self.rule
        if rule is not None and callable(rule.scores):
            raise ValueError(
                "conformal.Intervals('quantiles') cannot be saved, because its scores at each level come from predictions of the "
                "calibration rows, which are not stored; save the model and calibrate again after loading, or use 'scaled' or "
                "'centrality'"
            )
        kept = rule and {"name": type(rule).__name__, "options": rule.config(), "groups": rule.groups}
        return {"rule": kept, "type": stored_name(self.model), "model": self.model.config()}

    def state(self) -> dict[str, Tensor]:
        """The model's tensors, and the scores of the calibration rows."""
        scores = self.rule.scores if self.rule is not None else None
        return prefixed(model=self.model.state()) | ({"scores": scores} if isinstance(scores, Tensor) else {})

    @classmethod
    def restore(cls, net: nn.Module, config: Any, state: dict[str, Tensor]) -> Self:
        """The model, rebuilt on a copy of the network, with the stored calibration."""
        model = STORED_CLASSES[config["type"]].restore(net, config["model"], below("model", state))
        kept = config["rule"]
        rule = None if kept is None else RULES[kept["name"]](**kept["options"])
        if rule is not None and "scores" in state:
            rule.scores, rule.groups = state["scores"], listed(kept["groups"], len(state["scores"]))
        return cls(model, rule)

    def fingerprint(self) -> dict[str, str]:
        return self.model.fingerprint()
