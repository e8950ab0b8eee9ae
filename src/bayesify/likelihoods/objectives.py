"""Training objectives in nats, scaled to the whole dataset. All objectives are maximized."""

import copy
import math
from collections.abc import Mapping

import torch
from torch import Tensor

from bayesify.likelihoods import Gaussian, Likelihood
from bayesify.maths.value_checks import should_check


def expected_log_likelihood(
    outputs: Tensor,
    y: Tensor,
    likelihood: Likelihood,
    num_data: int,
    example_weights: Tensor | None = None,
    *,
    exact: bool = False,
) -> Tensor:
    r"""The data term of a bound: $\frac{N}{B} \sum_{b} \omega_b \log p(y_b | f_s(x_b))$ for each draw, [S], in nats.

    Args:
        outputs: The network's outputs of each draw, [S, B, ...].
        y: Targets of B examples.
        likelihood: p(y | f).
        num_data: Number N of examples in the whole dataset.
        example_weights: Weights $\omega$ of the examples, [B]; 1 by default.
        exact: Whether to use `log_prob` and its own gradients instead of the likelihood's `objective`. Samplers need the exact
            gradients of `log_prob`.

    Raises:
        ValueError: If `num_data` is below the batch size, or if the weights do not fit the batch.
    """
    score = likelihood.log_prob if exact else likelihood.objective
    log_prob = score(outputs, y, has_draws=True)  # [S, B]
    batch = log_prob.shape[-1]
    if batch == 0:
        raise ValueError("elbo: the batch is empty; give at least one example")
    if num_data < batch:
        raise ValueError(
            f"elbo: num_data={num_data} is below the batch size {batch}; give the size of the whole dataset"
        )
    if example_weights is not None:
        check_example_weights(example_weights, batch)
        log_prob = log_prob * example_weights
    return num_data / batch * log_prob.sum(-1)


def integrated_log_likelihood(
    mean: Tensor,
    variance: Tensor,
    y: Tensor,
    likelihood: Gaussian,
    num_data: int,
    example_weights: Tensor | None = None,
) -> Tensor:
    r"""The data term if the outputs are not draws but Gaussians with means and variances [S, B, O].

    The result is the data term of the means minus $\frac NB \sum_b \omega_b v_b / 2 \sigma^2$, where v is the sum of an example's
    output variances.
    """
    data = expected_log_likelihood(mean, y, likelihood, num_data, example_weights)
    spread = (variance / likelihood.noise.to(variance)).sum(-1)  # [S, B]
    spread = spread if example_weights is None else spread * example_weights
    return data - 0.5 * num_data / spread.shape[-1] * spread.sum(-1)


def check_example_weights(weights: Tensor, batch: int) -> None:
    """Raise `ValueError` unless there is one finite weight of at least 0 for each example of a batch."""
    if weights.shape != (batch,):
        raise ValueError(f"example_weights= has shape {tuple(weights.shape)}; give one weight per example, [{batch}]")
    if should_check(weights) and not bool((weights >= 0).all() & torch.isfinite(weights).all()):
        raise ValueError("example_weights= holds a negative or non-finite number; give finite weights of at least 0")


def elbo(log_likelihood: Tensor, kl: Tensor, kl_weight: float = 1.0) -> Tensor:
    r"""Evidence lower bound: $\frac1S \sum_s \log p(\mathcal{D} | f_s) - \beta\,\mathrm{KL}_s$, a scalar in nats.

    Args:
        log_likelihood: The data term of each draw, [S].
        kl: KL of each draw, [S] or a scalar.
        kl_weight: $\beta$. The value 1 gives the bound, and a smaller value gives a tempered posterior.
    """
    return torch.sub(log_likelihood, kl, alpha=kl_weight).mean()


def check_result(value: Tensor, weights: Mapping[str, Tensor], outputs: Tensor) -> None:
    """Raise `ValueError` if an objective is not finite. The message names the first weight that is not finite. If all weights are
    finite, the message says whether the outputs are finite."""
    if math.isfinite(value.item()):
        return
    for name, weight in weights.items():
        if not bool(torch.isfinite(weight).all()):
            raise ValueError(
                f"elbo is {value.item()}: a draw of {name} is not finite; lower the learning rate, or give init_std= "
                "of the posterior a smaller value"
            )
    if not bool(torch.isfinite(outputs).all()):
        raise ValueError(
            f"elbo is {value.item()}: the network's weights are finite, but its outputs are not; standardize the inputs"
        )
    raise ValueError(
        f"elbo is {value.item()}, although outputs and weights are finite; check the noise variance and the prior's scale"
    )


def exact_copy(likelihood: Likelihood) -> Likelihood:
    """A copy of a likelihood, for samplers. The copy's `objective` is `log_prob`, with the gradients of `log_prob`."""
    copied = copy.deepcopy(likelihood)
    copied.training_density = copied.log_density  # type: ignore[method-assign]
    return copied
