"""Rules that turn measurements of a training run into findings."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean, median, stdev

import torch
from torch import Tensor

from bayesify.arguments.plain import Plain
from bayesify.likelihoods import Gaussian, Likelihood
from bayesify.posteriors.common.base import Posterior
from bayesify.predictive.findings import Finding

MIN_GAIN_NATS = 0.05
"""Training has not converged if the NLL or the bound improves by more than this many nats per example in the last third."""
MIN_GAIN_SHARES = {"NLL": 0.08, "negative bound": 0.15}
"""The gain must also exceed this share of the NLL or the bound itself."""
MIN_SLOW_GAIN_NATS, MIN_PROGRESS_SHARE = 0.02, 0.25
"""A gain of the NLL in the last third also counts if it exceeds the first value in nats and is at least the second
value as a share of the total gain. (On a straight line, the last third has a third of the gain.) This does not apply to
the bound, because its KL falls for a long time with little effect on predictions."""
TREND_SIGNIFICANCE_STDS = 3.0
"""A trend is significant if the Mann-Kendall statistic exceeds this many standard deviations."""
MIN_TREND_WINDOWS = 7
"""Minimum number of values whose trend can be significant: 7 values in order reach `TREND_SIGNIFICANCE_STDS`."""
MIN_RELATIVE_SPREAD = 0.01
"""Weights hardly vary if their standard deviation, relative to their root mean square, is below this."""
MIN_LOG_SPREAD_CHANGE = 1.0
"""The spread has moved if its logarithm changed by more than this."""
MIN_WIDE_SPREAD = 0.25
"""Weights vary widely if their standard deviation, relative to their root mean square, is above this."""
MIN_INFORMATION = 1e-5
"""Draws agree if the mean mutual information in nats, or the epistemic share of the variance, is below this."""
MIN_COVERED_EXAMPLES = 50
"""Minimum number of examples to judge the coverage of intervals."""
COVERAGE_SIGNIFICANCE_STDS = 3.0
"""A coverage exceeds chance if it lies at least this many standard deviations beyond the limit of a healthy coverage."""
MIN_HELD_OUT_LOSS_NATS = 0.02
"""A rise of the NLL per target on held-out data is a finding if it exceeds this value and chance."""
MIN_CALIBRATION_GAP, MIN_CALIBRATION_RISE = 0.04, 0.01
"""On held-out data, a network is badly calibrated if the gap between confidence and accuracy exceeds the first value,
and exceeds the gap of the given network by more than the second value. `benchmarks.defaults_wider` uses the same bounds
for the ECE."""
MIN_PAIRED_EXAMPLES = 16
"""Minimum number of examples for a standard error of their differences."""
KL_WARNING_RATIO = 10.0
"""Warn when the KL exceeds this multiple of the data term."""


@dataclass(frozen=True)
class Score(Plain):
    """Score of a network's predictions on some examples."""

    nll: float  # mean negative log predictive density
    accuracy: float | None  # share of correct labels; `None` in regression
    count: int  # number of examples
    rmse: float | None = None  # `None` in classification
    guess: float | None = None  # NLL (in regression, RMSE) of the best constant guess on the same examples
    coverage: float | None = None  # share of targets inside their central 90 % intervals; `None` in classification
    has_atoms: bool = False  # whether single values have positive probability, so that intervals cover more
    numbers: int = 1  # number of targets per example
    # For the first examples in the order of the loader: the NLL, the share of wrong labels or the mean squared error, and,
    # in classification, the probability of the predicted label.
    losses: tuple[float, ...] = field(default=(), repr=False)
    errors: tuple[float, ...] = field(default=(), repr=False)
    confidences: tuple[float, ...] = field(default=(), repr=False)

    @property
    def unit_nats(self) -> float:
        """In regression, the part of the NLL per example that depends on the unit of the targets; 0 in classification."""
        return self.numbers * math.log(self.guess) if self.rmse is not None and self.guess else 0.0


def trend(values: Sequence[float]) -> tuple[float, float]:
    r"""Change of a noisy series from its first to its last value, and the significance of this change.

    The change is the Theil-Sen slope (median slope of all pairs) times the length. The significance is the Mann-Kendall statistic
    $S / \sqrt{n (n - 1) (2 n + 5) / 18}$, where S is the number of rising pairs minus the number of falling pairs. If
    there is no trend, this statistic is standard normal. Outliers hardly change it.
    """
    count = len(values)
    pairs = [(values[late] - values[early], late - early) for early in range(count) for late in range(early + 1, count)]
    if not pairs:
        return 0.0, 0.0
    order = sum((rise > 0) - (rise < 0) for rise, _ in pairs)
    slope = median(rise / steps for rise, steps in pairs)
    return slope * (count - 1), order / math.sqrt(count * (count - 1) * (2 * count + 5) / 18)


def still_falling(values: Sequence[float], share: float, unit_nats: float = 0.0) -> float | None:
    """Decrease of a minimized series in its last third, in the unit of the series; `None` if the decrease is not significant."""
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
    """Return a finding if the NLL or the objective per example still falls at the end; for `unit_nats` see `Score.unit_nats`."""
    for name, values in (("NLL", nll), ("negative bound", objective)):
        gain = still_falling(values, MIN_GAIN_SHARES[name], unit_nats)
        if gain is not None:
            sentence = (
                f"not converged: the {name} still fell by {gain:.2g} nats per example in the last third of training, not counting "
                "the steps in which a falling learning rate was small"
            )
            return [Finding("not_converged", sentence, "train for more epochs, or with a higher learning rate")]
    return []


def members_apart(nll: Sequence[float], what: str = "members of the ensemble", unit_nats: float = 0.0) -> list[Finding]:
    """Return a finding if some members of an ensemble, or some models of a stack, are much worse than the best one."""
    best = min(nll)
    behind = sum(value > best + max(0.1, 0.25 * abs(best - unit_nats)) for value in nll)
    if not behind:
        return []
    sentence = (
        f"{behind} of {len(nll)} {what} have not converged: their NLL is up to {max(nll):.3g} nats per example, and "
        f"the best NLL is {best:.3g}"
    )
    remedy = "train for more epochs (randomly started members need as many epochs as a single network), or start all members at a "
    how = " with Ensemble(init='network')" if what.endswith("ensemble") else ""
    return [Finding("members_apart", sentence, f"{remedy}trained network{how}")]


def learned_little(score: Score) -> list[Finding]:
    """Return a finding if predictions hardly beat the best constant guess: the label frequencies, or the mean of the targets."""
    guess = score.guess
    if guess is None or score.count < 32:
        return []
    if score.rmse is not None:
        if score.rmse < 0.97 * guess:
            return []
        seen = f"its RMSE is {score.rmse:.3g}, and predicting the mean of the targets gives {guess:.3g}"
    elif score.nll < guess - max(0.02, 0.03 * guess):
        return []
    else:
        seen = f"its NLL is {score.nll:.3g} nats per example, and predicting the label frequencies gives {guess:.3g}"
    remedy = (
        "train for more epochs or with a higher learning rate, or train the means first (map_epochs=); check "
        "inputs and targets"
    )
    return [Finding("learned_little", f"the network has learned little: {seen}", remedy)]


MAX_TRAINED_RMSE_RATIO, MAX_TRAINED_NLL_RATIO = 0.75, 0.9
"""A network counts as trained if its score is at most this multiple of the score of a constant guess. On
one-dimensional data along a line, the RMSE of a random network is below 0.9 times that of the guess in one case of 4,
and below 0.75 times in one case of 15."""


def starts_elsewhere(given: Score, posteriors: Iterable[Posterior]) -> list[Finding]:
    """Return a finding if the given network clearly beats a constant guess, but the posterior does not start at it."""
    if given.guess is None or given.count < 8:
        return []
    if given.rmse is not None:
        value, name, share = given.rmse, "RMSE", MAX_TRAINED_RMSE_RATIO
    else:
        value, name, share = given.nll, "NLL", MAX_TRAINED_NLL_RATIO
    found = {type(part).__name__: part.keeping_init for part in posteriors if not part.starts_at_network}
    if not found or value > share * given.guess:
        return []
    sentence = (
        f"the given network is trained (its {name} is {value:.3g}, and a constant guess has {given.guess:.3g}), but "
        f"{' and '.join(found)} does not start at its weights, so what the network has learned is lost"
    )
    keep = " and ".join(f"{name}(init={init!r})" for name, init in found.items())
    remedy = f"start at the given weights with {keep}; ignore this if you want to train from scratch"
    return [Finding("starts_elsewhere", sentence, remedy)]


def kl_dwarfs(nll: Sequence[float], kl: float, start: Score | None = None, now: Score | None = None) -> list[Finding]:
    """Return a finding if the weighted KL at the end outweighs the data term and the fit to the data has suffered.

    All quantities are per example. A score from training mode is never compared with a score from evaluation mode. The NLL of
    training batches is averaged over groups of consecutive values, and the last group is compared with the best group. `now` is
    compared with `start`; both are scores of predictions in evaluation mode.
    """
    size = max(1, len(nll) // 8)
    smooth = [fmean(nll[place : place + size]) for place in range(0, len(nll) - size + 1, size)]
    unit = start.unit_nats if start is not None else 0.0
    if not smooth or kl < KL_WARNING_RATIO * max(abs(smooth[-1] - unit), 0.1):
        return []
    chance = 3 * stdev(nll) * math.sqrt(2 / size) if len(nll) > 2 else 0.0  # 3 standard errors of a difference of means
    pairs = [(min(smooth), smooth[-1], max(0.1, chance))]
    if start is not None and now is not None:
        pairs.append((start.nll, now.nll, 0.25))
    suffered = [pair[:2] for pair in pairs if pair[1] - pair[0] >= max(pair[2], 0.25 * abs(pair[0] - unit))]
    if not suffered:
        return []
    before, after = suffered[-1]
    sentence = (
        f"the KL ({kl:.3g} nats per example) dwarfs the data term ({after:.3g}, and {before:.3g} at the start): the "
        "prior pulls the weights away from the data"
    )
    remedy = (
        "make fewer weights Bayesian (a smaller posterior, or only some layers), widen the prior, or temper "
        "the posterior with kl_weight= below 1"
    )
    return [Finding("kl_dwarfs", sentence, remedy)]


def _chance(before: Sequence[float], after: Sequence[float], count: int, unpaired: float) -> float:
    """Two standard errors of the mean difference between scores of the same examples; `unpaired` if too few scores are known."""
    if len(before) != len(after) or len(before) < MIN_PAIRED_EXAMPLES:
        return unpaired
    apart = [last - first for first, last in zip(before, after, strict=True)]
    return 2 * stdev(apart) / math.sqrt(count)


def worse_than_start(start: Score, now: Score, held_out: bool) -> list[Finding]:
    """Return a finding if predictions are worse than those of the starting network: the network that was made Bayesian, or the
    mean of a posterior that was trained before.

    On held-out data, the difference must exceed chance and also a limit: 1 percentage point of accuracy, 5 % of the
    RMSE, or 0.02 nats per target. Chance is two standard errors of the mean difference on the same examples. On training data,
    the starting network may look better than it is, because it has memorized the rows. The limits on training data are 5
    percentage points of accuracy, 25 % of the RMSE, and 0.25 nats.
    """
    few = min(start.count, now.count)
    found = []
    if start.accuracy is not None and now.accuracy is not None:
        unpaired = 2 * math.sqrt(max(start.accuracy * (1 - start.accuracy), 0.01) / few)
        chance = _chance(start.errors, now.errors, few, unpaired) if held_out else math.sqrt(2) * unpaired
        if start.accuracy - now.accuracy > max(0.01 if held_out else 0.05, chance):
            found.append(f"accuracy {now.accuracy:.3f} (was {start.accuracy:.3f})")
    if start.rmse is not None and now.rmse is not None:
        # Let the RMSE rise by the factor 1 + 2 / sqrt(few); this is the difference of the squares.
        unpaired = 2 * start.rmse**2 * (2 / math.sqrt(few) + 2 / few)
        chance = _chance(start.errors, now.errors, few, unpaired) if held_out else unpaired
        allowed = (1.05 if held_out else 1.25) * start.rmse + 0.01 * (start.guess or 0.0)  # an error near 0 may double
        if now.rmse > allowed and now.rmse**2 - start.rmse**2 > chance:
            found.append(f"RMSE {now.rmse:.3g} (was {start.rmse:.3g})")
    margin = max(0.25, 0.25 * abs(start.nll - start.unit_nats))
    if held_out:
        unpaired = start.numbers / math.sqrt(few)
        margin = max(MIN_HELD_OUT_LOSS_NATS * start.numbers, _chance(start.losses, now.losses, few, unpaired))
    if now.nll - start.nll > margin:
        found.append(f"NLL {now.nll:.3f} (was {start.nll:.3f})")
    if not found:
        return []
    where = "held-out data" if held_out else "training batches"
    sentence = f"worse than the given network: {' and '.join(found)} on {where}"
    remedy = "lower the learning rate, widen the prior, make fewer weights Bayesian, or train for more epochs" + (
        "" if held_out else "; give validation= to compare on other data"
    )
    return [Finding("worse_than_start", sentence, remedy)]


def less_calibrated(start: Score, now: Score) -> list[Finding]:
    r"""Return a finding if, on held-out data, the gap between confidence and accuracy is larger than for the starting network
    (see `worse_than_start`).

    The gap $|\text{accuracy} - \text{mean confidence}|$ is a lower bound of the ECE and needs no bins. The gap must
    exceed `MIN_CALIBRATION_GAP` and two standard errors of the gap. The gap must exceed the starting network's gap by
    `MIN_CALIBRATION_RISE` and by two standard errors of their difference on the same examples. Training data do not show this
    gap, because a network is more often right on training data than on new data. An untrained network is no standard of
    comparison, because it is calibrated only by chance.
    """
    parts = [
        [1 - error - confidence for error, confidence in zip(score.errors, score.confidences, strict=False)]
        for score in (start, now)
    ]
    count = len(parts[1])
    trained = start.guess is not None and start.nll <= MAX_TRAINED_NLL_RATIO * start.guess
    if not trained or count < MIN_PAIRED_EXAMPLES or len(parts[0]) != count:
        return []
    before, after = (abs(fmean(part)) for part in parts)
    if after < max(MIN_CALIBRATION_GAP, 2 * stdev(parts[1]) / math.sqrt(count)):
        return []
    if after - before < max(MIN_CALIBRATION_RISE, _chance(parts[0], parts[1], count, math.inf)):
        return []
    shown = [(fmean(score.confidences), 1 - fmean(score.errors)) for score in (now, start)]
    sentence = (
        "probabilities are less calibrated than those of the given network: on held-out data the mean confidence is "
        f"{shown[0][0]:.3f} at an accuracy of {shown[0][1]:.3f} (given network: {shown[1][0]:.3f} at {shown[1][1]:.3f})"
    )
    remedy = (
        "scale the temperature on held-out data (baselines.TemperatureScaling), or start with a narrower "
        "posterior (init_std=)"
    )
    return [Finding("less_calibrated", sentence, remedy)]


def coverage_off(score: Score, held_out: bool) -> list[Finding]:
    r"""Return a finding if 90 % intervals cover far more or far fewer than 90 % of the targets, beyond chance.

    "Far" means a coverage above 95 %, or below 85 % (82 % on training rows). A coverage c of n rows is beyond chance if the
    likelihood ratio puts c more than three standard deviations from the limit l: $\sqrt{2 n \mathrm{KL}(c \| l)} > 3$, with the
    KL of Bernoulli variables.
    """
    if score.coverage is None or score.count < MIN_COVERED_EXAMPLES:
        return []
    off = score.coverage - 0.9
    limit = 0.95 if off > 0 else 0.85 if held_out else 0.82
    parts = ((score.coverage, limit), (1 - score.coverage, 1 - limit))
    kl = sum(share * math.log(share / least) for share, least in parts if share > 0)
    inside = off < limit - 0.9 if off > 0 else off > limit - 0.9
    if (
        inside
        or math.sqrt(2 * score.count * max(kl, 0.0)) < COVERAGE_SIGNIFICANCE_STDS
        or (off > 0 and score.has_atoms)
    ):
        return []
    kind = "wide" if off > 0 else "narrow"
    where = "held-out rows" if held_out else "training rows, corrected for their leverage"
    sentence = f"intervals are too {kind}: 90 % intervals cover {100 * score.coverage:.0f} % of {score.count} {where}"
    remedy = (
        "let the likelihood learn its noise (likelihoods.Gaussian() without noise=), train for more epochs, or calibrate the "
        "intervals on held-out rows with bayesify.conformal"
    )
    return [Finding("coverage_off", sentence, remedy)]


def statistics_differ(training: float, now: Score) -> list[Finding]:
    """Return a finding if predictions are worse than in training, because their BatchNorm statistics average over draws."""
    if now.nll - training < max(0.05, 0.1 * abs(training - now.unit_nats)):
        return []
    sentence = (
        f"predictions are worse than in training: the NLL of the same batches is {now.nll:.3f} in prediction and was "
        f"{training:.3f} in training, because BatchNorm normalizes each draw by its own batch in training and by "
        "averages over draws in prediction"
    )
    remedy = (
        "give each draw its own statistics with bayesify.keep_draws(bnn, loader), or train the network first and bayesianize "
        "it afterwards, which freezes its statistics (batch_statistics='frozen')"
    )
    return [Finding("statistics_differ", sentence, remedy)]


def scales_still(before: Mapping[str, float], after: Mapping[str, float]) -> list[Finding]:
    """Return a finding if weights hardly vary between draws and their spread has not changed since the start.

    `before` and `after` give the standard deviation of each weight relative to its root mean square, before and after training.
    """
    known = [name for name in after if before.get(name, 0) > 0 and after[name] > 0]
    if not known or max(after[name] for name in known) > MIN_RELATIVE_SPREAD:
        return []
    if max(abs(math.log(after[name] / before[name])) for name in known) > MIN_LOG_SPREAD_CHANGE:
        return []
    middle = median(after[name] for name in known)
    sentence = (
        f"the posterior's scales have hardly moved: weights vary by {100 * middle:.2g} % of their size between draws, and "
        "predictions have no uncertainty yet"
    )
    remedy = "start with larger scales (init_std=), train for more epochs, or use a higher learning rate"
    return [Finding("scales_still", sentence, remedy)]


def scales_wide(
    before: Mapping[str, float], after: Mapping[str, float], relative: Mapping[str, float]
) -> list[Finding]:
    """Return a finding if training has widened the posterior until draws of a weight differ by a large share of its
    size.

    This rule applies when the result is worse than the starting network (see `worse_than_start`). `before` and `after` are the
    standard deviations of each weight before and after training. `relative` is `after` divided by the root mean square of the
    weight. Weights that shrink while their spread is constant do not count as a finding.
    """
    known = [name for name in after if before.get(name, 0) > 0]
    if not known:
        return []
    growth, last = median(after[name] / before[name] for name in known), median(relative[name] for name in known)
    if last < MIN_WIDE_SPREAD or growth < math.exp(MIN_LOG_SPREAD_CHANGE):
        return []
    sentence = (
        f"the posterior has become wide: weights vary by {100 * last:.2g} % of their size between draws, and their "
        f"standard deviation is {growth:.2g} times as large as at the start"
    )
    remedy = (
        "bound the scales (set max_std= of the posterior to a tenth of the weights' size), train for fewer epochs, or "
        "train MeanField() with baselines.IVON, whose scales change slowly"
    )
    return [Finding("scales_wide", sentence, remedy)]


def no_uncertainty(information: float, unit: str) -> list[Finding]:
    """Return a finding if different draws give practically the same predictions.

    Exactly equal predictions are an exception and give no finding: they are the predictions of a point estimate, which has no
    uncertainty by design.
    """
    if not 0 < information < MIN_INFORMATION:
        return []
    sentence = (
        f"draws practically agree: {unit} is {information:.1g}, so predictions contain no uncertainty about the weights"
    )
    remedy = (
        "start with larger scales (init_std=), train for more epochs, or lower the prior precision of a Laplace "
        "approximation"
    )
    return [Finding("no_uncertainty", sentence, remedy)]


def probabilities_as_logits(likelihood: Likelihood | None, outputs: Tensor) -> list[Finding]:
    """Return a finding if outputs [B, ...] that should be class logits are probabilities: nonnegative with a sum of 1."""
    axis = likelihood.logit_axis(outputs.ndim) if likelihood is not None and outputs.ndim > 1 else None
    if axis is None or outputs.shape[axis] < 2 or outputs.numel() == 0:
        return []
    total = outputs.sum(axis)
    if not bool((outputs >= 0).all() & torch.isclose(total, torch.ones_like(total), atol=1e-3).all()):
        return []
    sentence = "the network's outputs are probabilities (nonnegative with a sum of 1), but Categorical expects logits"
    return [Finding("probabilities_as_logits", sentence, "remove the softmax at the end of the network")]


MAX_LABELS = 20
"""Integer targets count as class labels if they are 0 to K - 1, each of them occurs, and K is at most this number."""


def labels_as_numbers(likelihood: Likelihood | None, targets: Iterable[Tensor]) -> list[Finding]:
    """Return a finding if targets of a Gaussian likelihood look like class labels: integers 0 to K - 1 that all occur."""
    parts = [y.flatten() for y in targets if not y.is_floating_point()]
    if not isinstance(likelihood, Gaussian) or not parts:
        return []
    values = torch.cat(parts).unique().tolist()
    if not 2 <= len(values) <= MAX_LABELS or values != list(range(len(values))):
        return []
    kind = "likelihoods.Bernoulli()" if len(values) == 2 else f"likelihoods.Categorical() with {len(values)} outputs"
    sentence = f"targets are the integers 0 to {len(values) - 1}, as class labels are, but the likelihood is Gaussian"
    remedy = f"use {kind} for classes; if the targets are amounts, give them as floating-point numbers"
    return [Finding("labels_as_numbers", sentence, remedy)]
