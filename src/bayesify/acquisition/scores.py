"""Scores that say how informative an example's label would be, and the choice of the most informative batch."""

import math

import torch
from torch import Tensor

from bayesify.arguments.checks import Budget, Count, Inputs, checked
from bayesify.draws import Draws
from bayesify.likelihoods import Categorical, Likelihood
from bayesify.predictive import ClassificationPredictive, RegressionPredictive
from bayesify.predictive.base import MAX_ELEMENTS_PER_CHUNK
from bayesify.running.inputs_and_outputs import checked_inputs


@checked
def bald(predictive: ClassificationPredictive) -> Tensor:
    r"""Mutual information between an example's label and the weights, in nats: [B].

    $$ I(y; w) = H\Big[\tfrac1S \sum_s p_s\Big] - \tfrac1S \sum_s H[p_s] $$   (Houlsby et al. 2011, eq. 2)

    If an example has several labels (binary outputs, positions), the labels' scores are added, as if the labels were independent.
    """
    return _per_example(predictive.mutual_information)


@checked
def epistemic(predictive: RegressionPredictive) -> Tensor:
    """The variance over draws of each output's predicted mean, summed over outputs: [B]. No label can reduce the noise."""
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
        maximize: Whether larger values are better. If false, an improvement is a value below the best value.

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


@torch.no_grad()
@checked
def batch_bald(
    draws: Draws,
    x: Inputs,
    size: Count,
    *,
    likelihood: Likelihood | None = None,
    output: str | int | None = None,
    num_configurations: Count = 10_000,
    generator: torch.Generator | None = None,
    memory: Budget = None,
) -> tuple[Tensor, Tensor]:
    r"""Greedy choice of the batch whose labels have the most mutual information with the weights (BatchBALD, Kirsch et al. 2019).

    $$ I(y_{1:q}; w) = H[y_{1:q}] - \sum_i \tfrac1S \sum_s H[p_s(y_i)], \qquad p(y_{1:q}) = \tfrac1S \sum_s \prod_i p_s(y_i) $$

    The chain rule gives the information that example n adds to the chosen examples, $\mathbb{E}_{y_{1:q}} H[y_n | y_{1:q}] -
    \tfrac1S \sum_s H[p_s(y_n)]$. Given hypothetical labels of the chosen examples, draw s has the weight $p(s | y_{1:q})$, and
    $p(y_n | y_{1:q})$ is the mixture with these weights. All $C^q$ configurations of labels are enumerated if there are at most
    `num_configurations`. Otherwise `num_configurations` configurations are sampled, equally many from each draw. If each draw is
    certain of a chosen example's label, a copy of this example adds no information. `bald`, in contrast, gives the copy the same
    score as the original.

    Args:
        draws: S functions that return logits of C classes.
        x: Inputs of N examples; N must be at least `size`.
        size: Number of examples q to choose.
        likelihood: Classification likelihood; `Categorical()` by default.
        output: Name or index of the output to use, if the network has several; see `bayesianize`.
        num_configurations: Largest number of label configurations.
        generator: Source of randomness of the sampled configurations.
        memory: Memory budget of the forward passes; see `predict`.

    Returns:
        The indices of the chosen examples, in order of choice; and, after each choice, the mutual information in nats between the
        weights and the labels of all examples chosen so far. Both are tensors [q].

    Raises:
        TypeError: If the likelihood is not a classification likelihood.
        ValueError: If an example has several labels, if there is only one class, or if there are too few examples.
    """
    args, kwargs = checked_inputs(x)
    outputs = draws.outputs(args, kwargs, output=output, memory=memory)
    predictive = (likelihood if likelihood is not None else Categorical()).predictive(outputs)
    if not isinstance(predictive, ClassificationPredictive):
        raise TypeError(
            f"batch_bald: {type(likelihood).__name__} is not a classification likelihood; use Categorical or Bernoulli"
        )
    return _greedy(_log_probs_of_one_label(predictive, size), size, num_configurations, generator)


def _log_probs_of_one_label(predictive: ClassificationPredictive, size: int) -> Tensor:
    log_probs = predictive.draw_log_probs
    if log_probs.ndim == 4 and log_probs.shape[2] == 1:
        log_probs = log_probs.squeeze(2)
    if log_probs.ndim != 3:
        raise ValueError(
            f"batch_bald: each example has labels of shape {list(log_probs.shape[2:-1])}; give a model with one label per example"
        )
    if log_probs.shape[-1] == 1:
        raise ValueError(
            "batch_bald: the network has only one output, so there is only one class and labels carry no information; "
            "give likelihood=Bernoulli() for two classes, or use acquisition.epistemic for regression"
        )
    if log_probs.shape[1] < size:
        raise ValueError(
            f"batch_bald: size={size} is larger than the number of examples, {log_probs.shape[1]}; give a smaller "
            "size=, or more examples"
        )
    return log_probs


def _greedy(
    log_probs: Tensor, size: int, num_configurations: int, generator: torch.Generator | None
) -> tuple[Tensor, Tensor]:
    log_probs = log_probs.clamp_min(-1e3)  # labels that no draw allows get zero weight
    num_draws, _, classes = log_probs.shape
    noise = _entropy(log_probs.exp()).mean(0)  # [N]
    log_joint = log_probs.new_zeros(1, num_draws)  # log p_s of each configuration of labels, [M, S]
    shares = log_probs.new_ones(1)  # probability of each configuration, [M]
    chosen: list[int] = []
    total, information = 0.0, []
    for _ in range(size):
        gains = _conditional_entropy(log_probs, log_joint.softmax(-1), shares) - noise
        gains[chosen] = -math.inf
        best = int(gains.argmax())
        total += float(gains[best])
        chosen.append(best)
        information.append(total)
        if classes ** len(chosen) <= num_configurations:
            log_joint = (log_joint[:, None] + log_probs[:, best].T).flatten(0, 1)  # [M C, S]
            shares = log_joint.exp().mean(-1)
        elif len(chosen) < size:
            log_joint = _sampled(log_probs[:, chosen], num_configurations, generator)
            shares = log_probs.new_full((len(log_joint),), 1 / len(log_joint))
    return torch.tensor(chosen), torch.tensor(information, dtype=torch.float64)


def _sampled(log_probs: Tensor, count: int, generator: torch.Generator | None) -> Tensor:
    """The log-probabilities [M, S], given each draw, of M label configurations that are sampled from `log_probs` [S, k, C]."""
    num_draws, chosen, _ = log_probs.shape
    each = -(-count // num_draws)
    home = log_probs.device if generator is None else generator.device
    flat = log_probs.exp().flatten(0, 1).to(home)
    labels = torch.multinomial(flat, each, replacement=True, generator=generator).to(log_probs.device)  # [S k, each]
    labels = labels.view(num_draws, chosen, each).movedim(1, 2).flatten(0, 1)  # [M, k]
    return sum((log_probs[:, place].T[labels[:, place]] for place in range(chosen)), log_probs.new_zeros(1))


def _conditional_entropy(log_probs: Tensor, weights: Tensor, shares: Tensor) -> Tensor:
    """Entropy of each example's label, [N], averaged over M label configurations with weights `shares` [M]. Given configuration m,
    draw s has the weight `weights[m, s]`."""
    num_draws, _, classes = log_probs.shape
    rows = max(1, MAX_ELEMENTS_PER_CHUNK // (classes * max(len(weights), num_draws)))
    found = []
    for part in log_probs.split(rows, dim=1):
        mixture = (weights @ part.exp().flatten(1)).view(len(weights), -1, classes)  # [M, n, C]
        found.append(shares @ _entropy(mixture))
    return torch.cat(found)


def _entropy(probs: Tensor) -> Tensor:
    entropy: Tensor = torch.special.entr(probs).sum(-1)
    return entropy
