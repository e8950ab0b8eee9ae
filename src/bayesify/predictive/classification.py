"""Predictions of classes: mixtures of categorical distributions, one distribution per draw."""

import math
from collections.abc import Callable
from functools import cached_property
from typing import ClassVar

import torch
from torch import Tensor

from bayesify.arguments.checks import checked
from bayesify.predictive.base import Outputs, Predictive, with_column


class ClassificationPredictive(Predictive):
    r"""A mixture of categorical distributions, one per draw: $p(y) = \frac1S \sum_s p_s(y)$.

    Args:
        outputs: The network's outputs for each draw.
        log_probs: Function that maps outputs to log-probabilities [S, rows, ..., C], with classes last. By default, outputs are
            log-probabilities. The function must be defined at module level, or be a partial of such a function, so that
            predictions can be pickled.
        binary: Whether each output is a separate yes-or-no decision. If so, C = 2, and `probs` is the probability of yes.
        ignore_index: A label that means "no label here" and contributes nothing to `log_prob`.
    """

    remedy: ClassVar[str] = ", such as the result of predict(x) for a classifier"

    def __init__(
        self,
        outputs: Outputs,
        log_probs: Callable[[Tensor], Tensor] | None = None,
        *,
        binary: bool = False,
        ignore_index: int | None = None,
    ) -> None:
        super().__init__(outputs)
        self._log_probs = log_probs or as_given
        self._binary = binary
        self._ignore_index = ignore_index

    @cached_property
    def _summary(self) -> tuple[Tensor, Tensor]:
        def reduce(outputs: Tensor) -> tuple[Tensor, Tensor]:
            log_probs = self._log_probs(outputs)
            probs = log_probs.exp()
            entropy = -(probs * log_probs.clamp_min(torch.finfo(log_probs.dtype).min)).sum(-1)
            return probs.mean(0), entropy.mean(0)

        return self._source.map(reduce)

    @cached_property
    def class_probs(self) -> Tensor:
        """Probability of each class, with classes on the last axis: [B, ..., C], or [B, ..., 2] for binary outputs."""
        if self._source.kept is None or "_summary" in vars(self):
            return self._summary[0]
        return self._source.map(lambda outputs: self._log_probs(outputs).exp().mean(0))  # entropies only on demand

    @property
    def probs(self) -> Tensor:
        """Probability of each class, [B, C], or the probability of yes for each binary output, [B, O]."""
        return self.class_probs[..., 1] if self._binary else self.class_probs

    @property
    def labels(self) -> Tensor:
        """The most probable class of each example: [B], or [B, O] for binary outputs."""
        return self.class_probs.argmax(-1)

    @property
    def confidence(self) -> Tensor:
        """Probability of the most probable class: [B], or [B, O] for binary outputs."""
        return self.class_probs.amax(-1)

    @cached_property
    def entropy(self) -> Tensor:
        """Entropy of the mixture in nats: [B], or [B, O] for binary outputs. It measures the total uncertainty."""
        # Avoid `special.entr`, because torch 2.11 cannot export it to ONNX.
        return -torch.xlogy(self.class_probs, self.class_probs).sum(-1)

    @property
    def aleatoric_entropy(self) -> Tensor:
        """Mean entropy of the draws in nats: [B], or [B, O] for binary outputs. It measures the noise in the data."""
        return self._summary[1]

    @property
    def mutual_information(self) -> Tensor:
        """Entropy minus aleatoric entropy in nats, which measures the disagreement between draws: [B], or [B, O]. It is never
        negative."""
        return (self.entropy - self.aleatoric_entropy).clamp_min(0.0)

    @property
    def draw_log_probs(self) -> Tensor:
        """Log-probabilities of each draw, with classes on the last axis: [S, B, ..., C].

        Raises:
            TypeError: If this prediction is a closed form and not a mixture over draws.
        """
        self._check_mixture()
        return self._source.map(lambda outputs: self._log_probs(outputs).movedim(0, 1)).movedim(0, 1)

    @checked
    def log_prob(self, y: Tensor) -> Tensor:
        """`logsumexp_s sum log p_s(y) - log S`, where the sum runs over positions or outputs of one example: [B]."""
        ignored = torch.zeros_like(y, dtype=torch.bool) if self._ignore_index is None else y == self._ignore_index
        labels = self.match_labels(y.masked_fill(ignored, 0))
        ignored = ignored.view_as(labels)

        def score(outputs: Tensor, y: Tensor, ignored: Tensor) -> Tensor:
            log_probs = self._log_probs(outputs)
            index = y.expand(log_probs.shape[:-1]).unsqueeze(-1)
            per_draw = log_probs.gather(-1, index).squeeze(-1).masked_fill(ignored, 0.0)
            per_draw = per_draw.flatten(2).sum(-1) if per_draw.ndim > 2 else per_draw
            return per_draw.logsumexp(0) - math.log(per_draw.shape[0])

        return self._source.map(score, labels, ignored)

    def _elements(self, y: Tensor) -> Tensor:
        if self._ignore_index is None:
            return super()._elements(y)
        return (y != self._ignore_index).reshape(len(y), -1).sum(1).clamp_min(1)

    def match_labels(self, y: Tensor) -> Tensor:
        """The given labels as integers, with the shape of the property `labels`. A last axis of one entry is added or dropped if
        necessary.

        Raises:
            ValueError: If the labels do not fit the predictions, or if a label is not a class.
        """
        found, classes = with_column(y, self.labels.shape), self.class_probs.shape[-1]
        if found is None:
            raise ValueError(
                f"targets of shape {tuple(y.shape)} do not fit predictions of shape {tuple(self.labels.shape)}; give one "
                "integer label per prediction"
            )
        labels = found.long()
        wrong = (labels != found) | (labels < 0) | (labels >= classes)
        if bool(wrong.any()):
            raise ValueError(
                f"label {found[wrong][0].item()} is not one of the {classes} classes; give integers from 0 to {classes - 1}"
            )
        return labels


def as_given(outputs: Tensor) -> Tensor:
    """The outputs themselves, which are already log-probabilities."""
    return outputs
