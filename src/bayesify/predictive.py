"""What a prediction is: a mixture over draws, reduced to means, spreads, probabilities and scores."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

ELEMENTS_AT_ONCE = 2**22
"""Entries of an [S, rows, O] array that one reduction works on at a time."""


class Outputs:
    """The network's outputs of each draw, [S, B, ...]: kept in memory, or computed again chunk by chunk.

    Args:
        kept: All outputs, or `None`.
        chunks: Where they are not kept: a function that yields them in pieces [S, rows, ...], in order, the same each time.
    """

    def __init__(self, kept: Tensor | None = None, chunks: Callable[[], Iterator[Tensor]] | None = None) -> None:
        if (kept is None) == (chunks is None):
            raise ValueError("Outputs: give either kept or chunks")
        self.kept = kept
        self._chunks = chunks

    def __iter__(self) -> Iterator[Tensor]:
        if self._chunks is not None:
            yield from self._chunks()
            return
        assert self.kept is not None
        per_row = max(1, self.kept[:, :1].numel())
        yield from self.kept.split(max(1, ELEMENTS_AT_ONCE // per_row), dim=1)

    def map(self, function: Callable[..., Any], *rowwise: Tensor) -> Any:
        """Apply a function to each chunk and join the results along their first axis, the examples.

        Args:
            function: Takes outputs [S, rows, ...] and the same rows of each further tensor; returns a tensor, or a tuple of
                tensors, with examples on the first axis.
            rowwise: Tensors with one row per example.
        """
        results, start = [], 0
        for chunk in self:
            rows = slice(start, start + chunk.shape[1])
            results.append(function(chunk, *(tensor[rows] for tensor in rowwise)))
            start = rows.stop
        for tensor in rowwise:
            if tensor.shape[0] != start:
                raise ValueError(f"Predictive: {tensor.shape[0]} targets for {start} predictions; give one per example")
        if isinstance(results[0], tuple):
            return tuple(torch.cat(parts) for parts in zip(*results, strict=True))
        return torch.cat(results)


class Predictive:
    """The predictive distribution of a batch of examples, a mixture over draws.

    Args:
        outputs: The network's outputs of each draw.
    """

    def __init__(self, outputs: Outputs) -> None:
        self._source = outputs

    @property
    def outputs(self) -> Tensor:
        """The network's outputs of each draw: [S, B, ...].

        Raises:
            RuntimeError: If the prediction exceeded the memory budget and was reduced chunk by chunk.
        """
        if self._source.kept is None:
            raise RuntimeError(
                "Predictive: outputs were not kept, they exceed the memory budget; "
                "call predict(..., keep_outputs=True), or predict fewer rows at a time"
            )
        return self._source.kept

    @abstractmethod
    def log_prob(self, y: Tensor) -> Tensor:
        """Log predictive density (or probability) of targets, one number per example: [B]."""

    def __len__(self) -> int:
        kept = self._source.kept
        return kept.shape[1] if kept is not None else sum(chunk.shape[1] for chunk in self._source)


class RegressionPredictive(Predictive):
    r"""A mixture over draws of Gaussians, independent over outputs: $p(y) = \frac1S \sum_s \mathcal{N}(y; \mu_s, v_s)$.

    Args:
        outputs: The network's outputs of each draw.
        components: Means and variances [S, rows, O] of the Gaussians, from outputs [S, rows, ...].
    """

    def __init__(self, outputs: Outputs, components: Callable[[Tensor], tuple[Tensor, Tensor]]) -> None:
        super().__init__(outputs)
        self._components = components

    @cached_property
    def _moments(self) -> tuple[Tensor, Tensor, Tensor]:
        def reduce(outputs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            mean, variance = self._components(outputs)
            return mean.mean(0), mean.var(0, unbiased=False), variance.expand_as(mean).mean(0)

        moments: tuple[Tensor, Tensor, Tensor] = self._source.map(reduce)
        return moments

    @property
    def mean(self) -> Tensor:
        """E[y]: [B, O]."""
        return self._moments[0]

    @property
    def epistemic(self) -> Tensor:
        """Variance over draws of the Gaussians' means, the part that more data would remove: [B, O]."""
        return self._moments[1]

    @property
    def aleatoric(self) -> Tensor:
        """Mean over draws of the Gaussians' variances, the noise in the data: [B, O]."""
        return self._moments[2]

    @property
    def variance(self) -> Tensor:
        """Var[y], epistemic plus aleatoric: [B, O]."""
        return self.epistemic + self.aleatoric

    @property
    def std(self) -> Tensor:
        """Root of the variance: [B, O]."""
        return self.variance.sqrt()

    def log_prob(self, y: Tensor) -> Tensor:
        """`logsumexp_s sum_o log N(y_o; mu_so, v_so) - log S`: [B]."""

        def score(outputs: Tensor, y: Tensor) -> Tensor:
            mean, variance = self._components(outputs)
            per_draw = (
                gaussian_log_density(y, mean, variance).flatten(2).sum(-1)
                if mean.ndim > 2
                else (gaussian_log_density(y, mean, variance))
            )
            return per_draw.logsumexp(0) - math.log(per_draw.shape[0])

        return self._rowwise(score, y)

    def cdf(self, y: Tensor) -> Tensor:
        """P(Y <= y) for each output: [B, O]."""

        def probability(outputs: Tensor, y: Tensor) -> Tensor:
            mean, variance = self._components(outputs)
            return torch.special.ndtr((y - mean) / variance.sqrt()).mean(0)

        return self._rowwise(probability, y)

    def quantile(self, q: float | Sequence[float]) -> Tensor:
        """The value that y stays below with probability q, exact for the mixture.

        Solved by Newton steps on the mixture's distribution function, kept inside a bracket that shrinks with each.

        Args:
            q: Probability between 0 and 1, or several.

        Returns:
            [B, O], or [Q, B, O] for Q probabilities.

        Raises:
            ValueError: If a probability is not strictly between 0 and 1.
        """
        levels = [q] if isinstance(q, (int, float)) else list(q)
        for level in levels:
            if not 0 < level < 1:
                raise ValueError(f"quantile: q={level}; give a probability strictly between 0 and 1")

        def solve(outputs: Tensor) -> Tensor:
            mean, variance = self._components(outputs)
            return torch.stack([mixture_quantile(mean, variance, level) for level in levels], dim=1)

        result = self._source.map(solve).movedim(1, 0)
        return result[0] if isinstance(q, (int, float)) else result

    def interval(self, level: float = 0.9) -> tuple[Tensor, Tensor]:
        """The central interval that holds y with probability `level`: lower and upper end, each [B, O]."""
        if not 0 < level < 1:
            raise ValueError(f"interval: level={level}; give a probability strictly between 0 and 1")
        lower, upper = self.quantile([(1 - level) / 2, (1 + level) / 2])
        return lower, upper

    def crps(self, y: Tensor) -> Tensor:
        r"""Continuous ranked probability score of the mixture, in y's unit, less is better: [B, O].

        $$ \frac1S \sum_s A(y - \mu_s, v_s) - \frac{1}{2S^2} \sum_{s,t} A(\mu_s - \mu_t, v_s + v_t), \quad
           A(d, v) = d\,(2\Phi(d/\sqrt v) - 1) + 2 \sqrt v\, \varphi(d/\sqrt v) $$   (Grimit et al. 2006, eq. 5)
        """

        def score(outputs: Tensor, y: Tensor) -> Tensor:
            mean, variance = self._components(outputs)
            variance = variance.expand_as(mean)
            spread = torch.zeros_like(y)
            for m, v in zip(mean, variance, strict=True):  # one draw against all: memory stays that of the draws
                spread += _absolute_gaussian(mean - m, variance + v).mean(0)
            return _absolute_gaussian(y - mean, variance).mean(0) - 0.5 * spread / mean.shape[0]

        return self._rowwise(score, y)

    def _rowwise(self, function: Callable[..., Tensor], y: Tensor) -> Tensor:
        result: Tensor = self._source.map(function, match_targets(y, self.mean))
        return result


class ClassificationPredictive(Predictive):
    r"""A mixture over draws of categorical distributions: $p(y) = \frac1S \sum_s p_s(y)$.

    Args:
        outputs: The network's outputs of each draw.
        log_probs: Log-probabilities [S, rows, ..., C] from outputs, classes last.
        binary: Whether each entry is a yes or no of its own: then C = 2, and `probs` is the probability of yes.
        ignore_index: A label that stands for "no label here" and adds nothing to `log_prob`.
    """

    def __init__(
        self,
        outputs: Outputs,
        log_probs: Callable[[Tensor], Tensor],
        *,
        binary: bool = False,
        ignore_index: int | None = None,
    ) -> None:
        super().__init__(outputs)
        self._log_probs = log_probs
        self._binary = binary
        self._ignore_index = ignore_index

    @cached_property
    def _summary(self) -> tuple[Tensor, Tensor]:
        def reduce(outputs: Tensor) -> tuple[Tensor, Tensor]:
            log_probs = self._log_probs(outputs)
            return log_probs.exp().mean(0), _entropy(log_probs).mean(0)

        summary: tuple[Tensor, Tensor] = self._source.map(reduce)
        return summary

    @property
    def class_probs(self) -> Tensor:
        """Probability of each class, classes last: [B, ..., C]; for yes-or-no outputs [B, ..., 2]."""
        return self._summary[0]

    @property
    def probs(self) -> Tensor:
        """Probability of each class [B, C], or of yes for each yes-or-no output [B, O]."""
        return self.class_probs[..., 1] if self._binary else self.class_probs

    @property
    def labels(self) -> Tensor:
        """The most probable class of each example: [B], or [B, O] for yes-or-no outputs."""
        return self.class_probs.argmax(-1)

    @property
    def confidence(self) -> Tensor:
        """Probability of the most probable class: [B], or [B, O] for yes-or-no outputs."""
        return self.class_probs.amax(-1)

    @cached_property
    def entropy(self) -> Tensor:
        """Entropy of the mixture in nats, the whole uncertainty: [B], or [B, O] for yes-or-no outputs."""
        return torch.special.entr(self.class_probs).sum(-1)

    @property
    def aleatoric_entropy(self) -> Tensor:
        """Mean over draws of each draw's entropy in nats, the noise in the data: [B], or [B, O]."""
        return self._summary[1]

    @property
    def mutual_information(self) -> Tensor:
        """Entropy less aleatoric entropy in nats, what the draws disagree about: [B], or [B, O]; never negative."""
        return (self.entropy - self.aleatoric_entropy).clamp_min(0.0)

    def log_prob(self, y: Tensor) -> Tensor:
        """`logsumexp_s sum log p_s(y) - log S`, the sum over positions or outputs of one example: [B]."""
        if y.shape != self.labels.shape:
            if y.shape == (*self.labels.shape, 1):
                y = y.squeeze(-1)
            elif (*y.shape, 1) == self.labels.shape:
                y = y.unsqueeze(-1)
            else:
                raise ValueError(f"log_prob: targets {tuple(y.shape)}; give labels of shape {tuple(self.labels.shape)}")
        ignored = torch.zeros_like(y, dtype=torch.bool) if self._ignore_index is None else y == self._ignore_index
        labels = self._checked_labels(y.masked_fill(ignored, 0))

        def score(outputs: Tensor, y: Tensor, ignored: Tensor) -> Tensor:
            log_probs = self._log_probs(outputs)
            index = y.expand(log_probs.shape[:-1]).unsqueeze(-1)
            per_draw = log_probs.gather(-1, index).squeeze(-1).masked_fill(ignored, 0.0)
            per_draw = per_draw.flatten(2).sum(-1) if per_draw.ndim > 2 else per_draw
            return per_draw.logsumexp(0) - math.log(per_draw.shape[0])

        result: Tensor = self._source.map(score, labels, ignored)
        return result

    def _checked_labels(self, y: Tensor) -> Tensor:
        labels, classes = y.long(), self.class_probs.shape[-1]
        if not torch.equal(labels.to(y.dtype), y):
            wrong = y[labels.to(y.dtype) != y][0].item()
            raise ValueError(f"log_prob: label {wrong} is not an integer; give labels from 0 to {classes - 1}")
        outside = (labels < 0) | (labels >= classes)
        if bool(outside.any()):
            wrong = labels[outside][0].item()
            raise ValueError(f"log_prob: label {wrong} is out of range; labels go from 0 to {classes - 1}")
        return labels


def check_finite(tensor: Tensor, what: str) -> None:
    """Raise `ValueError` if a tensor holds NaN or infinity, naming the first place.

    A finite sum proves all entries finite without a temporary of the tensor's size; only a sum that is not, which
    large numbers can have too, is looked into row by row.
    """
    if not tensor.is_floating_point() or bool(torch.isfinite(tensor.sum())):
        return
    for index, row in enumerate(tensor.unbind(0) if tensor.ndim else (tensor,)):
        wrong = ~torch.isfinite(row)
        if bool(wrong.any()):
            place = [index, *wrong.nonzero()[0].tolist()] if tensor.ndim else []
            raise ValueError(
                f"{what} hold {tensor[tuple(place)].item()} at index {place}; remove or impute such rows first"
            )


def match_targets(y: Tensor, mean: Tensor) -> Tensor:
    """Targets in the shape of predictions: a column that one side lacks is added or dropped; nothing else is broadcast.

    Raises:
        ValueError: If the shapes differ otherwise, or a target is not finite.
    """
    check_finite(y, "targets")
    if y.shape == mean.shape:
        return y
    if (*y.shape, 1) == mean.shape:
        return y.unsqueeze(-1)
    if y.shape == (*mean.shape, 1):
        return y.squeeze(-1)
    raise ValueError(
        f"targets of shape {tuple(y.shape)} do not fit predictions of shape {tuple(mean.shape)}; reshape y"
    )


def gaussian_log_density(y: Tensor, mean: Tensor, variance: Tensor) -> Tensor:
    """log N(y; mean, variance), entry by entry."""
    return -0.5 * ((y - mean).square() / variance + variance.log() + math.log(2 * math.pi))


def mixture_quantile(mean: Tensor, variance: Tensor, q: float, steps: int = 60) -> Tensor:
    """Quantile of a Gaussian mixture with equal weights over the first axis: [S, ...] -> [...]."""
    std = variance.expand_as(mean).sqrt()
    z = math.sqrt(2) * float(torch.erfinv(torch.tensor(2 * q - 1, dtype=torch.float64)))
    each = mean + z * std
    lower, upper = each.amin(0), each.amax(0)  # the components' quantiles bracket the mixture's
    value = (mean.mean(0) + z * (mean.var(0, unbiased=False) + std.square().mean(0)).sqrt()).clamp(lower, upper)
    tolerance, scale = 4 * torch.finfo(mean.dtype).eps, std.amin(0)
    done = torch.zeros_like(value, dtype=torch.bool)
    for _ in range(steps):
        scaled = (value - mean) / std
        excess = torch.special.ndtr(scaled).mean(0) - q
        density = (torch.exp(-0.5 * scaled.square()) / std).mean(0) / math.sqrt(2 * math.pi)
        lower, upper = torch.where(excess < 0, value, lower), torch.where(excess > 0, value, upper)
        newton = value - excess / density
        inside = (newton > lower) & (newton < upper)
        step = torch.where(inside, newton, 0.5 * (lower + upper))
        # What is met to rounding cannot be met better; and what has converged stays, so that an entry does not depend on
        # those beside it.
        done = done | (excess.abs() <= tolerance)
        close = (step - value).abs() <= tolerance * (step.abs() + scale)
        value = torch.where(done, value, step)
        done = done | close
        if bool(done.all()):
            break
    return value


def _entropy(log_probs: Tensor) -> Tensor:
    return -(log_probs.exp() * log_probs.clamp_min(torch.finfo(log_probs.dtype).min)).sum(-1)


def _absolute_gaussian(difference: Tensor, variance: Tensor) -> Tensor:
    """E|X| for X ~ N(difference, variance)."""
    std = variance.sqrt()
    scaled = difference / std
    density = torch.exp(-0.5 * scaled.square()) / math.sqrt(2 * math.pi)
    return difference * torch.erf(scaled / math.sqrt(2)) + 2 * std * density
