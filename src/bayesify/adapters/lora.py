"""Low-rank adapters with a posterior, from peft or from your own modules."""

from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

from torch import nn

from bayesify.arguments.checks import checked
from bayesify.arguments.installing import how_to_install
from bayesify.configuration import make_likelihood, make_posterior, make_prior
from bayesify.likelihoods import Likelihood
from bayesify.network import BayesianNetwork
from bayesify.posteriors import Ensemble, InducingWeights
from bayesify.priors import Prior
from bayesify.running.modes import outside_inference_mode

DEFAULT_PRIOR_SCALE = 0.5
"""Scale of the default prior `Neal` of A and of B. The product B A drawn from this prior has the square of this scale. At a scale
of 1, a linear map preserves the size of activations. The scale was chosen with `benchmarks/lora.py`, on data that the benchmark's
table does not use."""

ZERO_FACTOR_NAMES = ("lora_B", "lora_embedding_A")
"""Parts of the names of the factor that starts at 0 in peft: B, but A for embeddings."""


@outside_inference_mode()
@checked
def bayesianize_lora(
    model: nn.Module,
    posterior: Any = "inducing",
    *,
    names: Sequence[str] = ("*lora_*",),
    likelihood: Likelihood | str | Mapping[str, Any] | None = "categorical",
    prior: Prior | str | Mapping[str, Any] | None = None,
    output: str | int | None = None,
) -> BayesianNetwork:
    r"""A model in which only the low-rank updates are Bayesian: $W + \frac{\alpha}{r} B A$ where A and B are drawn and
    W is fixed.

    Weights are found by name. They can come from peft, which calls them `lora_A` and `lora_B`, or from your own module.
    Frozen weights stay frozen; the result shares them with `model` instead of copying them. Other weights, such as a new head,
    stay trainable point estimates unless `names` includes them.

    The name `"inducing"` stands for `InducingWeights(r, r, init="network")`, where r is the adapter's rank. This
    posterior starts at the current adapter and has $1 + (3 r + 2 + 1 / r) / d$ parameters for each weight of an
    $r \times d$ matrix. In an ensemble, the first member starts at the current adapter. The other members start like
    fresh adapters: A is random and B = 0 (for embeddings, A = 0 and B is random). The factor that starts at 0 is
    recognized by its name.

    Args:
        model: The result of `peft.get_peft_model`, or any module with low-rank weights, fresh or trained.
        posterior: Posterior of the low-rank weights: an instance, a name, or a dict with its name and options.
        names: Glob patterns of the weights' names.
        likelihood: p(y | logits).
        prior: p(weights); `Neal(0.5)` by default.
        output: Name or index of the output that the likelihood applies to; by default the only tensor, or the output called
            `logits`.

    Raises:
        ValueError: If a pattern matches no weight, or only frozen weights.
    """
    if not names:
        raise ValueError(f"bayesianize_lora: names={names!r}; give a tuple of glob patterns, such as ('*lora_*',)")
    found = [value for name, value in model.named_parameters() if any(fnmatchcase(name, glob) for glob in names)]
    if not found:
        raise ValueError(
            f"bayesianize_lora: no weight of {type(model).__name__} is called {' or '.join(names)}; "
            "add adapters with peft.get_peft_model(model, peft.LoraConfig(...)); if peft is missing, "
            f"{how_to_install('lora')}"
        )
    if posterior == "inducing":
        rank = max((min(value.shape) for value in found if value.ndim > 1), default=1)
        posterior = InducingWeights(rank, rank, init="network")
    bnn = BayesianNetwork(
        model,
        [(name, make_posterior(posterior)) for name in names],
        likelihood=make_likelihood(likelihood),
        prior=make_prior(prior, DEFAULT_PRIOR_SCALE),
        output=output,
        share_frozen=True,
    )
    for part in bnn.posteriors:
        for name, members in part.value.items() if isinstance(part, Ensemble) and part.init == "reset" else ():
            if any(mark in name for mark in ZERO_FACTOR_NAMES):
                members.data[1:] = 0
    return bnn
