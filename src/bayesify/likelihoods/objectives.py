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
) -> Tensor:
    r"""The data term of a bound: $\frac{N}{B} \sum_{b} \omega_b \log p(y_b | f_s(x_b))$ for each draw, [S], in nats.

    Shapes: outputs of each draw [S, B, ...], example weights $\omega$ [B] (1 by default). N is `num_data`, the number of examples
    in the whole dataset. Raises `ValueError` if N is below the batch size B, or if the weights do not fit the batch.
    """
    log_prob = likelihood.objective(outputs, y, has_draws=True)  # [S, B]
    batch = log_prob.shape[-1]
    if batch == 0:
        raise ValueError("elbo: the batch is empty; give at least one example")
    if num_data < batch:
        found = f"num_data={num_data} is below the batch size {batch}"
        raise ValueError(f"elbo: {found}; give the size of the whole dataset")
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

    The data term and the KL of each draw are [S]. A weight $\beta$ below 1 gives a tempered posterior.
    """
    return torch.sub(log_likelihood, kl, alpha=kl_weight).mean()


def check_result(value: Tensor, weights: Mapping[str, Tensor], outputs: Tensor) -> None:
    """Raise `ValueError` if an objective is not finite; the message names the first weight that is not finite, or the outputs."""
    if math.isfinite(value.item()):
        return
    for name, weight in weights.items():
        if not bool(torch.isfinite(weight).all()):
            why = f": a draw of {name} is not finite; lower the learning rate, or give init_std= of the posterior a smaller value"
            break
    else:
        why = ", although outputs and weights are finite; check the noise variance and the prior's scale"
        if not bool(torch.isfinite(outputs).all()):
            why = ": the network's weights are finite, but its outputs are not; standardize the inputs"
    raise ValueError(f"elbo is {value.item()}{why}")


def exact_copy(likelihood: Likelihood) -> Likelihood:
    """A copy of a likelihood, for samplers. The copy's `objective` is `log_prob`, with the gradients of `log_prob`."""
    copied = copy.deepcopy(likelihood)
    copied.training_density = copied.log_density  # type: ignore[method-assign]
    return copied
