"""Predictions of numeric targets. A prediction is a mixture with one distribution per draw, all from the same family."""

import math
from collections.abc import Callable, Sequence
from functools import cached_property, partial
from typing import ClassVar, Self

import torch
from torch import Tensor

from bayesify.arguments.checks import Level, checked
from bayesify.predictive.base import Outputs, Predictive, check_finite, with_column
from bayesify.predictive.families.base import Family
from bayesify.predictive.families.counts import MAX_SUMMED_MEAN, MAX_SUMMED_TERMS, CountFamily
from bayesify.predictive.families.gaussian import GAUSSIAN


class RegressionPredictive(Predictive):
    r"""A mixture of distributions from one family, one per draw: $p(y) = \frac1S \sum_s p(y; \theta_s)$. Given the draw, outputs
    are independent.

    Args:
        outputs: The network's outputs for each draw.
        components: Function that maps outputs [S, rows, ...] to the family's parameters [S, rows, O], such as means and variances
            of Gaussians. The function must be defined at module level, or be a partial of such a function, so that predictions
            can be pickled.
        family: Family of the distributions.
    """

    remedy: ClassVar[str] = ", such as the result of predict(x) for a regression network"

    def __init__(
        self, outputs: Outputs, components: Callable[[Tensor], tuple[Tensor, ...]], family: Family = GAUSSIAN
    ) -> None:
        super().__init__(outputs)
        self._components = components
        self.family = family

    def map_components(self, function: Callable[..., tuple[Tensor, ...]]) -> Self:
        """The same mixture over draws, but with new parameters for each draw's distribution. The argument `function` maps the old
        parameters [S, rows, O] to the new parameters.

        Raises:
            TypeError: If this prediction is a closed form and not a mixture over draws.
        """
        made = self._fresh()
        made._components = partial(_composed, self._components, function)
        return made

    @cached_property
    def _moments(self) -> tuple[Tensor, Tensor, Tensor]:
        def reduce(outputs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            mean, variance = self.family.moments(*self._components(outputs))
            return mean.mean(0), mean.var(0, unbiased=False), variance.expand_as(mean).mean(0)

        return self._source.map(reduce)

    @property
    def mean(self) -> Tensor:
        """E[y]: [B, O]."""
        return self._moments[0]

    @property
    def epistemic(self) -> Tensor:
        """Variance of the draws' means, which is the part of the variance that more data would remove: [B, O]."""
        return self._moments[1]

    @property
    def aleatoric(self) -> Tensor:
        """Mean of the draws' variances, which measures the noise in the data: [B, O]."""
        return self._moments[2]

    @property
    def variance(self) -> Tensor:
        """Var[y] = epistemic + aleatoric: [B, O]."""
        return self.epistemic + self.aleatoric

    @property
    def std(self) -> Tensor:
        """Square root of the variance: [B, O]."""
        return self.variance.sqrt()

    @property
    def draw_means(self) -> Tensor:
        """Mean of y given each draw: [S, B, O].

        Raises:
            TypeError: If this prediction is a closed form and not a mixture over draws.
        """
        self._check_mixture()

        def means(outputs: Tensor) -> Tensor:
            return self.family.moments(*self._components(outputs))[0].movedim(0, 1)

        return self._source.map(means).movedim(0, 1)

    @checked
    def log_prob(self, y: Tensor) -> Tensor:
        """`logsumexp_s sum_o log p(y_o; theta_so) - log S`: [B]. The result is a log-probability if y is a count.

        An output may have an atom, which is a value with positive probability, such as the lowest possible value. At the atom,
        the output contributes the atom's probability instead of a density. The result is a density that integrates to 1 with
        respect to a product measure over outputs. Each factor of the measure is the Lebesgue measure plus a point mass of 1 at
        the atom.

        Raises:
            ValueError: If the shape of the targets does not fit, or if targets are not possible values of the family.
        """
        self.family.check_targets(y)
        return self.censored_log_prob(y)

    def censored_log_prob(self, y: Tensor, censored: Tensor | None = None) -> Tensor:
        r"""For each draw, multiply the density of the uncensored outputs by the probability that the censored outputs C are at
        most y. The result is the logarithm of the mean of these products over draws: [B].

        $$ \log \frac1S \sum_s \prod_{o \notin C} p(y_o; \theta_{so}) \prod_{o \in C} P(Y_o \le y_o; \theta_{so}) $$

        Args:
            y: Targets, [B, O].
            censored: Whether each output is censored, [B, O]. By default, no output is censored.
        """
        return self._log_mean(y, censored, lambda found: found.flatten(2).sum(-1) if found.ndim > 2 else found)

    def marginal_log_prob(self, y: Tensor, censored: Tensor | None = None) -> Tensor:
        """The same as `censored_log_prob`, but for each output separately: [B, O]."""
        return self._log_mean(y, censored, lambda found: found)

    def _log_mean(self, y: Tensor, censored: Tensor | None, joined: Callable[[Tensor], Tensor]) -> Tensor:
        """Apply the function `joined` to the log-densities and log-probabilities of all draws, [S, rows, O]; average the
        exponentials of its results over draws, and return the logarithm."""
        masks = () if censored is None or not bool(censored.any()) else (censored,)

        def score(outputs: Tensor, y: Tensor, *masks: Tensor) -> Tensor:
            parameters = self._components(outputs)
            found = self.family.log_density(y, *parameters)
            for mask in masks:
                found = torch.where(mask, self.family.log_cdf(y, *parameters), found)
            return joined(found).logsumexp(0) - math.log(found.shape[0])

        return self._source.map(score, match_targets(y, self.mean), *masks)

    @checked
    def cdf(self, y: Tensor) -> Tensor:
        """P(Y <= y) for each output: [B, O]."""
        return self._rowwise(lambda *given: self.family.cdf(*given).mean(0).clamp(0, 1), y)

    def cdfs(self, y: Tensor) -> Tensor:
        """P(Y <= y) at K values of each output: [K, B, O]."""

        def each(outputs: Tensor, y: Tensor) -> Tensor:
            return self.family.cdfs(y.movedim(1, 0), *self._components(outputs)).movedim(0, 1)

        return self._source.map(each, y.movedim(0, 1)).movedim(1, 0).contiguous()

    @checked
    def below(self, y: Tensor) -> Tensor:
        """P(Y < y) for each output: [B, O]. At an atom, this probability is smaller than `cdf`."""
        return self._rowwise(lambda *given: self.family.below(*given).mean(0).clamp(0, 1), y)

    @checked
    def centrality(self, y: Tensor) -> Tensor:
        r"""The level of the smallest central interval that contains y, $\max(1 - 2 P(Y \le y), 2 P(Y < y) - 1, 0)$: [B, O].

        Without atoms the level is $|2 F(y) - 1|$. Intervals that end at an atom contain more probability than their level.
        """
        return torch.maximum(1 - 2 * self.cdf(y), 2 * self.below(y) - 1).clamp_min(0)

    @checked
    def quantile(self, q: Level | Sequence[Level]) -> Tensor:
        """The q-quantile of y, exact for the mixture and monotone in q.

        The quantile is found in float64 by Newton steps on the mixture's distribution function, inside a bracket that shrinks
        with each step. For counts, the quantile is the smallest count k for which P(Y <= k) is at least q.

        Args:
            q: A probability between 0 and 1, or a sequence of probabilities.

        Returns:
            Quantiles, [B, O], or [Q, B, O] for Q probabilities.

        Raises:
            ValueError: If a probability is not strictly between 0 and 1.
        """
        levels = [q] if isinstance(q, (int, float)) else list(q)
        if not levels:
            raise ValueError("quantile: q= is empty; give at least one probability")

        def solve(outputs: Tensor) -> Tensor:
            parameters = self._components(outputs)
            order = sorted(range(len(levels)), key=levels.__getitem__)
            found = self.family.quantiles([levels[place] for place in order], *parameters).movedim(0, 1)
            ranks = torch.tensor(order, device=found.device).argsort()
            return found.cummax(1).values[:, ranks]  # quantiles that differ only by rounding must stay in order

        result = self._source.map(solve).movedim(1, 0)
        return result[0] if isinstance(q, (int, float)) else result

    @checked
    def interval(self, level: Level = 0.9) -> tuple[Tensor, Tensor]:
        """The central interval that contains y with probability `level`: lower and upper end, each [B, O]."""
        lower, upper = self.quantile([(1 - level) / 2, (1 + level) / 2])
        return lower, upper

    def steps(self) -> Tensor | None:
        """P(Y <= k) for k = 0, 1, ... up to a tail probability of 1e-9, [K, B, O]. The result is `None` if counts are large or if
        targets are not counts."""
        family = self.family
        if not isinstance(family, CountFamily):
            return None
        most = int(self.quantile(1 - 1e-9).max()) + 1
        largest = self._source.map(lambda outputs: family.moments(*self._components(outputs))[0].amax(0)).max()
        if most > MAX_SUMMED_TERMS or not bool(largest <= MAX_SUMMED_MEAN):
            return None
        return self._source.map(lambda outputs: family.cumulated(most, *self._components(outputs))).movedim(1, 0)

    @checked
    def crps(self, y: Tensor) -> Tensor:
        r"""Continuous ranked probability score of the mixture in the unit of y, [B, O]; lower is better.

        $$ \mathbb{E}|Y - y| - \tfrac12 \mathbb{E}|Y - Y'|, \quad Y, Y' \sim p \text{ independent} $$   (Gneiting & Raftery 2007)

        For Gaussians, the whole score has a closed form. For other families, $\mathbb{E}|Y - y|$ has a closed form, and $\tfrac12
        \mathbb{E}|Y - Y'|$ is a sum or an integral; see the family's `half_spread`.
        """
        self.family.check_targets(y)
        return self._rowwise(self.family.crps, y)

    def _rowwise(self, function: Callable[..., Tensor], y: Tensor) -> Tensor:
        """Apply, chunk by chunk, a function of targets [rows, O] and of the family's parameters, each [S, rows, O]."""
        values = match_targets(y, self.mean)
        return self._source.map(lambda outputs, y: function(y, *self._components(outputs)), values)


def _composed(
    inner: Callable[[Tensor], tuple[Tensor, ...]], outer: Callable[..., tuple[Tensor, ...]], outputs: Tensor
) -> tuple[Tensor, ...]:
    return outer(*inner(outputs))


def pair(both: Tensor) -> tuple[Tensor, Tensor]:
    """Means and variances of Gaussians, taken from the last axis of a tensor [..., 2]."""
    mean, variance = both.unbind(-1)
    return mean, variance


def match_targets(y: Tensor, mean: Tensor) -> Tensor:
    """The targets, reshaped to the shape of the predictions. A last axis of one entry may be added or dropped; nothing is
    broadcast."""
    check_finite(y, "targets")
    found = with_column(y, mean.shape)
    if found is None:
        labels = not y.is_floating_point() and y.ndim + 1 == mean.ndim
        remedy = "for class labels use likelihoods.Categorical()" if labels else "reshape y"
        raise ValueError(
            f"targets of shape {tuple(y.shape)} do not fit predictions of shape {tuple(mean.shape)}; {remedy}"
        )
    return found
