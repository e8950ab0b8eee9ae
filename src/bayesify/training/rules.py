"""The rules by which a training tells what is amiss with it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median, stdev

import torch
from torch import Tensor

from bayesify.likelihoods import Likelihood
from bayesify.posteriors.common.base import Posterior
from bayesify.predictive.findings import Finding

MIN_GAIN_NATS = 0.05
"""A training counts as not converged if it gained more nats per example than this within its last third."""
MIN_GAIN_SHARES = {"NLL": 0.08, "negative bound": 0.15}
"""The gain must also exceed this share of the quantity itself."""
MIN_SLOW_GAIN_NATS, MIN_PROGRESS_SHARE = 0.02, 0.25
"""A smaller gain of the NLL counts too if it is this share of all that the training gained: a straight line gains a third in its
last third. A KL falls so for a long time without much effect on predictions."""
TREND_SIGNIFICANCE_STDS = 3.0
"""Standard deviations of the Mann-Kendall statistic from which a trend is one: at least 7 values, all in order."""
MIN_TREND_WINDOWS = 7
"""Values that a trend needs to reach `TREND_SIGNIFICANCE_STDS`."""
MIN_RELATIVE_SPREAD = 0.01
"""Weights hardly vary if their standard deviation, relative to their root mean square, is below this."""
MIN_LOG_SPREAD_CHANGE = 1.0
"""The spread has moved if its logarithm changed by more than this."""
MIN_WIDE_SPREAD = 0.25
"""Weights vary widely if their standard deviation, relative to their root mean square, is above this."""
MIN_INFORMATION = 1e-5
"""Draws agree if the mean mutual information in nats, or the epistemic share of the variance, is below this."""
MIN_COVERED_EXAMPLES = 50
"""Examples from which the coverage of intervals is judged."""
KL_WARNING_RATIO = 10.0
"""Warn when the KL exceeds this multiple of the data term."""


@dataclass(frozen=True)
class Score:
    """How well a network does on some examples.

    Args:
        nll: Mean negative log predictive density.
        accuracy: Share of right labels; `None` in regression.
        count: Number of examples.
        rmse: Root mean squared error; `None` for classes.
        guess: What the best constant guess has on the same examples: an NLL for classes, an RMSE in regression.
        coverage: Share of targets in their central intervals of 90 %; `None` for classes.
        has_atoms: Whether single values have probabilities, so that intervals hold more than their level.
        numbers: Targets of an example.
    """

    nll: float
    accuracy: float | None
    count: int
    rmse: float | None = None
    guess: float | None = None
    coverage: float | None = None
    has_atoms: bool = False
    numbers: int = 1

    @property
    def unit_nats(self) -> float:
        """What the unit of the targets adds to the NLL of an example in regression; 0 for classes."""
        return self.numbers * math.log(self.guess) if self.rmse is not None and self.guess else 0.0


def trend(values: Sequence[float]) -> tuple[float, float]:
    r"""Change of a noisy series from its first to its last value, and how sure it is.

    The change is the Theil-Sen slope (median slope of all pairs) times the length; the certainty is the statistic of Mann and
    Kendall, $S / \sqrt{n (n - 1) (2 n + 5) / 18}$ with S the pairs in order minus those out of it: standard normal where
    there is no trend, and hardly moved by outliers.
    """
    count = len(values)
    pairs = [(values[late] - values[early], late - early) for early in range(count) for late in range(early + 1, count)]
    if not pairs:
        return 0.0, 0.0
    order = sum((rise > 0) - (rise < 0) for rise, _ in pairs)
    slope = median(rise / steps for rise, steps in pairs)
    return slope * (count - 1), order / math.sqrt(count * (count - 1) * (2 * count + 5) / 18)


def still_falling(values: Sequence[float], share: float, unit_nats: float = 0.0) -> float | None:
    """By how much the last third of a series that is minimized still falls, in its own unit; `None` if not significantly."""
    last = list(values[-max(MIN_TREND_WINDOWS, len(values) // 3) :])
    if len(last) < MIN_TREND_WINDOWS or not all(map(math.isfinite, values)):
        return None
    change, certainty = trend(last)
    few = max(1, len(values) // 8)
    end = fmean(values[-few:])
    progress = max(0.0, fmean(values[:few]) - end)
    slow = (
        share == MIN_GAIN_SHARES["NLL"] and -change > MIN_SLOW_GAIN_NATS and -change > MIN_PROGRESS_SHARE * progress > 0
    )
    found = certainty < -TREND_SIGNIFICANCE_STDS and (
        slow or -change > max(MIN_GAIN_NATS, share * abs(end - unit_nats))
    )
    return -change if found else None


def convergence(nll: Sequence[float], objective: Sequence[float], unit_nats: float = 0.0) -> list[Finding]:
    """A finding if the NLL per example, or the whole objective per example, still falls at the end; see `Score.unit_nats`."""
    for name, values in (("NLL", nll), ("negative bound", objective)):
        gain = still_falling(values, MIN_GAIN_SHARES[name], unit_nats)
        if gain is not None:
            sentence = (
                f"not converged: the {name} still fell by {gain:.2g} nats an example in the last third of the training, or of "
                "its part before a falling learning rate got small"
            )
            return [Finding("not_converged", sentence, "train for more epochs, or with a higher learning rate")]
    return []


def members_apart(nll: Sequence[float], what: str = "members of the ensemble", unit_nats: float = 0.0) -> list[Finding]:
    """A finding if some members of an ensemble, or models of a stack, do much worse than the best of them."""
    best = min(nll)
    behind = sum(value > best + max(0.1, 0.25 * abs(best - unit_nats)) for value in nll)
    if not behind:
        return []
    sentence = (
        f"{behind} of {len(nll)} {what} have not converged: they are behind the best, with an NLL of up to "
        f"{max(nll):.3g} nats an example to its {best:.3g}"
    )
    remedy = (
        "train for more epochs: those that start at random take as long as one network does, or start them all at a "
    )
    how = " with Ensemble(init='network')" if what.endswith("ensemble") else ""
    return [Finding("members_apart", sentence, f"{remedy}trained network{how}")]


def learned_little(score: Score) -> list[Finding]:
    """A finding if predictions are hardly better than the best constant guess: the labels' frequencies, or the targets' mean."""
    guess = score.guess
    if guess is None or score.count < 32:
        return []
    if score.rmse is not None:
        if score.rmse < 0.97 * guess:
            return []
        seen = f"its RMSE is {score.rmse:.3g}, that of the targets' mean {guess:.3g}"
    elif score.nll < guess - max(0.02, 0.03 * guess):
        return []
    else:
        seen = f"its NLL is {score.nll:.3g} nats an example, that of the labels' frequencies {guess:.3g}"
    remedy = "train for more epochs, with a higher learning rate, or the means first (map_epochs=); look at targets and inputs"
    return [Finding("learned_little", f"the network has learned little: {seen}", remedy)]


def starts_elsewhere(given: Score, posteriors: Iterable[Posterior]) -> list[Finding]:
    """A finding if the given network clearly beats a constant guess, but the posterior does not start at its weights."""
    if given.guess is None or given.count < 8:
        return []
    if given.rmse is not None:
        value, name = given.rmse, "RMSE"
    else:
        value, name = given.nll, "NLL"
    found = {type(part).__name__: part.keeping_init for part in posteriors if not part.starts_at_network}
    if not found or value > 0.9 * given.guess:
        return []
    sentence = (
        f"the network that was given is trained ({name} {value:.3g}, a constant guess {given.guess:.3g}), but "
        f"{' and '.join(found)} does not start at its weights, so that what it has learned is lost"
    )
    keep = " and ".join(f"{name}(init={init!r})" for name, init in found.items())
    remedy = f"keep it with {keep}; ignore this if you want to train from scratch"
    return [Finding("starts_elsewhere", sentence, remedy)]


def kl_dwarfs(nll: Sequence[float], kl: float, start: Score | None = None, now: Score | None = None) -> list[Finding]:
    """A finding if the KL outweighs the data term and the fit to the data has suffered.

    All per example. Each comparison is in one mode: training batches with training batches, and predictions in evaluation mode,
    where dropout is off, with predictions in evaluation mode.

    Args:
        nll: The NLL of training batches in windows of equal length, of which the last counts.
        kl: The weighted KL at the end.
        start: The given network in evaluation mode.
        now: The trained one in evaluation mode.
    """
    size = max(1, len(nll) // 8)
    smooth = [fmean(nll[place : place + size]) for place in range(0, len(nll) - size + 1, size)]
    unit = start.unit_nats if start is not None else 0.0
    if not smooth or kl < KL_WARNING_RATIO * max(abs(smooth[-1] - unit), 0.1):
        return []
    chance = 3 * stdev(nll) * math.sqrt(2 / size) if len(nll) > 2 else 0.0  # of a difference of two means
    pairs = [(min(smooth), smooth[-1], max(0.1, chance))]
    if start is not None and now is not None:
        pairs.append((start.nll, now.nll, 0.25))
    suffered = [pair[:2] for pair in pairs if pair[1] - pair[0] >= max(pair[2], 0.25 * abs(pair[0] - unit))]
    if not suffered:
        return []
    before, after = suffered[-1]
    sentence = (
        f"the KL, {kl:.3g} nats an example, dwarfs the data term, {after:.3g}, which was {before:.3g}: the prior pulls "
        "the weights away from the data"
    )
    remedy = (
        "put fewer weights under the posterior (a smaller one, or some layers only), widen the prior, or temper it with "
        "kl_weight below 1"
    )
    return [Finding("kl_dwarfs", sentence, remedy)]


def worse_than_start(start: Score, now: Score, held_out: bool) -> list[Finding]:
    """A finding if predictions are worse than those of the network that was given.

    On held-out data by more than chance and a point of accuracy, 5 % of the RMSE, or 0.02 nats. On training data a network that has
    learned them by heart looks better than it is, so that only 5 points, 25 % or 0.25 nats count.
    """
    few = min(start.count, now.count)
    found = []
    if start.accuracy is not None and now.accuracy is not None:
        chance = (
            2 * math.sqrt(max(start.accuracy * (1 - start.accuracy), 0.01) / few) * (1.0 if held_out else math.sqrt(2))
        )
        if start.accuracy - now.accuracy > max(0.01 if held_out else 0.05, chance):
            found.append(f"accuracy {now.accuracy:.3f} (was {start.accuracy:.3f})")
    if start.rmse is not None and now.rmse is not None:
        share = max(0.05 if held_out else 0.25, 2 / math.sqrt(few))
        if now.rmse > (1 + share) * start.rmse + 0.01 * (start.guess or 0.0):  # an error near 0 is no measure
            found.append(f"RMSE {now.rmse:.3g} (was {start.rmse:.3g})")
    margin = max(0.02, 1 / math.sqrt(few)) if held_out else max(0.25, 0.25 * abs(start.nll - start.unit_nats))
    if now.nll - start.nll > margin:
        found.append(f"NLL {now.nll:.3f} (was {start.nll:.3f})")
    if not found:
        return []
    where = "held-out data" if held_out else "training batches"
    sentence = f"worse than the network that was given: {' and '.join(found)} on {where}"
    remedy = "lower the learning rate, widen the prior, put fewer weights under the posterior, or train longer" + (
        "" if held_out else "; give validation= to know how it does on other data"
    )
    return [Finding("worse_than_start", sentence, remedy)]


def coverage_off(score: Score, held_out: bool) -> list[Finding]:
    """A finding if intervals of 90 % hold far more or fewer of the targets, by more than chance."""
    if score.coverage is None or score.count < MIN_COVERED_EXAMPLES:
        return []
    off = score.coverage - 0.9
    chance = 2 * math.sqrt(max(score.coverage * (1 - score.coverage), 0.005) / score.count)
    if abs(off) < (0.05 if held_out or off > 0 else 0.08) + chance or (off > 0 and score.has_atoms):
        return []
    kind = "wide" if off > 0 else "narrow"
    where = "held-out rows" if held_out else "training rows, corrected for their leverage"
    sentence = f"intervals are too {kind}: those of 90 % hold {100 * score.coverage:.0f} % of {score.count} {where}"
    remedy = (
        "let the likelihood find its noise (likelihoods.Gaussian() without noise=), train longer, or calibrate the intervals "
        "on held-out rows with bayesify.conformal"
    )
    return [Finding("coverage_off", sentence, remedy)]


def statistics_differ(training: float, now: Score) -> list[Finding]:
    """A finding if predictions, which BatchNorm normalizes by averages over draws, are worse than training batches were."""
    if now.nll - training < max(0.05, 0.1 * abs(training - now.unit_nats)):
        return []
    sentence = (
        f"predictions are worse than training batches: NLL {now.nll:.3f} of those that had {training:.3f}, since BatchNorm "
        "normalizes each draw by its own batch in training and by averages over draws in prediction"
    )
    remedy = (
        "give draws statistics of their own with bayesify.keep_draws(bnn, loader), or train the network first and "
        "bayesianize it then, which freezes its statistics (batch_statistics='frozen')"
    )
    return [Finding("statistics_differ", sentence, remedy)]


def scales_still(before: Mapping[str, float], after: Mapping[str, float]) -> list[Finding]:
    """A finding if weights hardly vary between draws and their spread is where it started.

    Both are standard deviations relative to the root mean square, by weight, before and after the training.
    """
    known = [name for name in after if before.get(name, 0) > 0 and after[name] > 0]
    if not known or max(after[name] for name in known) > MIN_RELATIVE_SPREAD:
        return []
    if max(abs(math.log(after[name] / before[name])) for name in known) > MIN_LOG_SPREAD_CHANGE:
        return []
    middle = median(after[name] for name in known)
    sentence = (
        f"the scales of the posterior are near where they started: weights vary by {100 * middle:.2g} % of their size between "
        "draws, and predictions have no uncertainty yet"
    )
    remedy = "start them larger (init_std=), train for more epochs, or with a higher learning rate"
    return [Finding("scales_still", sentence, remedy)]


def scales_wide(
    before: Mapping[str, float], after: Mapping[str, float], relative: Mapping[str, float]
) -> list[Finding]:
    """A finding if training has widened the posterior so far that draws of the weights differ by much of their size.

    Meant for a result that is worse than the given network. Standard deviations by weight, before and after the training, and
    those after it relative to the root mean square: weights that shrink under the same spread have another reason.
    """
    known = [name for name in after if before.get(name, 0) > 0]
    if not known:
        return []
    growth, last = median(after[name] / before[name] for name in known), median(relative[name] for name in known)
    if last < MIN_WIDE_SPREAD or growth < math.exp(MIN_LOG_SPREAD_CHANGE):
        return []
    sentence = (
        f"the posterior has become wide: weights vary by {100 * last:.2g} % of their size between draws, {growth:.2g} times as "
        "much as at the start"
    )
    remedy = (
        "bound the scales (max_std= of the posterior, at a tenth of the weights' size), train for fewer epochs, or train "
        "MeanField() by baselines.IVON, whose scales move slowly"
    )
    return [Finding("scales_wide", sentence, remedy)]


def no_uncertainty(information: float, unit: str) -> list[Finding]:
    """A finding if predictions of different draws are the same in effect; 0, a point estimate, is none."""
    if not 0 < information < MIN_INFORMATION:
        return []
    sentence = (
        f"draws agree in effect: {unit} is {information:.1g}, so that predictions carry no uncertainty of the weights"
    )
    remedy = (
        "start the scales larger (init_std=), train longer, or lower the prior precision of a Laplace approximation"
    )
    return [Finding("no_uncertainty", sentence, remedy)]


def probabilities_as_logits(likelihood: Likelihood | None, outputs: Tensor) -> list[Finding]:
    """A finding if outputs [B, ...] that should be logits of classes are probabilities: each at least 0, with a sum of 1."""
    axis = likelihood.logit_axis(outputs.ndim) if likelihood is not None and outputs.ndim > 1 else None
    if axis is None or outputs.shape[axis] < 2 or outputs.numel() == 0:
        return []
    total = outputs.sum(axis)
    if not bool((outputs >= 0).all() & torch.isclose(total, torch.ones_like(total), atol=1e-3).all()):
        return []
    sentence = "the network's outputs are probabilities (at least 0, with a sum of 1), where Categorical takes logits"
    return [Finding("probabilities_as_logits", sentence, "remove the softmax at the network's end")]
