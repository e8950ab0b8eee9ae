"""Scores of single examples, which measure how informative their labels would be."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from bayesify.arguments.checks import checked
from bayesify.predictive.classification import ClassificationPredictive
from bayesify.predictive.regression import RegressionPredictive


@checked
def bald(predictive: ClassificationPredictive) -> Tensor:
    r"""Mutual information between an example's label and the weights, in nats: [B].

    $$ I(y; w) = H\Big[\tfrac1S \sum_s p_s\Big] - \tfrac1S \sum_s H[p_s] $$   (Houlsby et al. 2011, eq. 2)

    The scores of several labels of an example (binary outputs, positions) are added, as if the labels were independent.
    """
    return _per_example(predictive.mutual_information)


@checked
def epistemic(predictive: RegressionPredictive) -> Tensor:
    """Variance over draws of the predicted mean, summed over outputs: [B]. Noise is excluded, because no label can reduce it."""
    return _per_example(predictive.epistemic)


@checked
def expected_improvement(predictive: RegressionPredictive, best: float, *, maximize: bool = True) -> Tensor:
    r"""Expected improvement of the value f at an example over the best value so far: [B].

    $$ \mathbb{E} \max(f - \text{best}, 0) = \tfrac1S \sum_s \max(f_s - \text{best}, 0) $$   (Jones et al. 1998)

    f is the mean of the target given a draw, without noise. If the prediction has a closed form, f is Gaussian with the
    prediction's mean and epistemic variance, and the result is $\sigma (z \Phi(z) + \phi(z))$ with
    $z = (m - \text{best}) / \sigma$.

    Args:
        predictive: Prediction of one target.
        best: The best value so far.
        maximize: Whether larger values are better. Otherwise an improvement is a value below the best value.

    Raises:
        ValueError: If there are several targets.
    """
    sign = 1.0 if maximize else -1.0
    count = predictive.mean[0].numel()
    if count != 1:
        raise ValueError(
            f"expected_improvement: the prediction has {count} targets per example; give a prediction with one target per example"
        )
    if predictive.is_mixture:
        return _per_example((sign * (predictive.draw_means - best)).clamp_min(0).mean(0))
    gap, std = sign * (predictive.mean - best), predictive.epistemic.sqrt()
    z = gap / std.clamp_min(torch.finfo(std.dtype).tiny)
    density = torch.exp(-0.5 * z.square()) / math.sqrt(2 * math.pi)
    return _per_example(gap * torch.special.ndtr(z) + std * density)


def _per_example(score: Tensor) -> Tensor:
    return score.flatten(1).sum(1) if score.ndim > 1 else score
