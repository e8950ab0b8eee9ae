"""Low-rank adapters under a posterior: those of peft, or of modules of your own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

from torch import nn

from bayesify.arguments.checks import checked
from bayesify.configuration import make_likelihood, make_posterior, make_prior
from bayesify.likelihoods import Likelihood
from bayesify.network import BayesianNetwork
from bayesify.posteriors import Ensemble, InducingWeights
from bayesify.priors import Prior
from bayesify.running.modes import outside_inference_mode

DEFAULT_PRIOR_SCALE = 0.5
"""Scale of the default prior `Neal` of A and of B: the size of an update drawn from it, over alpha / r, is the square of that of
a linear map that keeps the scale of activations. Chosen in `benchmarks/lora.py`, on files that its table does not use."""

ZERO_FACTOR_NAMES = ("lora_B", "lora_embedding_A")
"""What is in the names of the factor that starts at 0, in peft: of embeddings it is A."""


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
    r"""A model whose low-rank updates alone are Bayesian: $W + \frac{\alpha}{r} B A$ with A and B drawn, W as it is.

    Weights are found by name, so that it does not matter who put them there: peft, which calls them `lora_A` and `lora_B`, or
    a module of your own. Frozen weights stay frozen and are shared with the model, not copied; others, such as a new head, stay
    trainable point estimates unless `names` has them.

    The name `"inducing"` stands for `InducingWeights(r, r, init="network")`, r the adapter's rank: it starts at the adapter as
    it is and has $1 + (3 r + 2 + 1 / r) / d$ numbers for each weight of an $r \times d$ matrix. Of an ensemble the first member
    starts at the adapter as it is, the others as fresh adapters do: A at random and B, which is told by its name, at 0 (of
    embeddings the other way round).

    Args:
        model: What `peft.get_peft_model` returns, or any module with low-rank weights, fresh or trained.
        posterior: For these weights: an instance, a name, or a dict with its name and options.
        names: Globs of the weights' names.
        likelihood: p(y | logits).
        prior: p(weights); `Neal(0.5)` by default.
        output: Which of the model's outputs the likelihood is about; the only tensor or the one called `logits` by default.

    Raises:
        ValueError: If a glob matches nothing, or only frozen weights.
    """
    if not names:
        raise ValueError(f"bayesianize_lora: names={names!r}; give a tuple of globs, such as ('*lora_*',)")
    found = [value for name, value in model.named_parameters() if any(fnmatchcase(name, glob) for glob in names)]
    if not found:
        raise ValueError(
            f"bayesianize_lora: no weight of {type(model).__name__} is called {' or '.join(names)}; "
            "peft.get_peft_model(model, peft.LoraConfig(...)) puts adapters there (pip install 'bayesify[lora]')"
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
