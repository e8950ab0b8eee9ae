"""`bayesianize`: from a plain network to a Bayesian one."""

from __future__ import annotations

from typing import Any, Literal, overload

from torch import nn

from bayesify import configuration
from bayesify.arguments.checks import checked
from bayesify.configuration import LikelihoodChoice, PriorChoice
from bayesify.likelihoods import Bernoulli, Categorical
from bayesify.likelihoods.base import NumberLikelihood
from bayesify.network import BayesianNetwork
from bayesify.predictive.base import Predictive
from bayesify.predictive.classification import ClassificationPredictive
from bayesify.predictive.regression import RegressionPredictive
from bayesify.running.modes import outside_inference_mode
from bayesify.weights.batch_statistics import BatchStatistics

Numbers = Literal[
    "gaussian", "heteroscedastic_gaussian", "student_t", "poisson", "negative_binomial", "hurdle", "quantiles"
]


@overload
def bayesianize(
    net: nn.Module,
    posterior: configuration.Choice,
    *,
    likelihood: Categorical | Bernoulli | Literal["categorical", "bernoulli"],
    prior: PriorChoice = None,
    output: str | int | None = None,
    batch_statistics: BatchStatistics = "auto",
) -> BayesianNetwork[ClassificationPredictive]: ...
@overload
def bayesianize(
    net: nn.Module,
    posterior: configuration.Choice,
    *,
    likelihood: NumberLikelihood | Numbers,
    prior: PriorChoice = None,
    output: str | int | None = None,
    batch_statistics: BatchStatistics = "auto",
) -> BayesianNetwork[RegressionPredictive]: ...
@overload
def bayesianize(
    net: nn.Module,
    posterior: configuration.Choice,
    *,
    likelihood: LikelihoodChoice = None,
    prior: PriorChoice = None,
    output: str | int | None = None,
    batch_statistics: BatchStatistics = "auto",
) -> BayesianNetwork[Predictive]: ...
@outside_inference_mode()
@checked
def bayesianize(
    net: nn.Module,
    posterior: configuration.Choice,
    *,
    likelihood: LikelihoodChoice = None,
    prior: PriorChoice = None,
    output: str | int | None = None,
    batch_statistics: BatchStatistics = "auto",
) -> BayesianNetwork[Any]:
    """Make a network Bayesian: take weights out of a copy of it and put them under a posterior.

    Args:
        net: Any module. It is copied, not changed.
        posterior: An instance such as `MeanField()`; a name such as `"mean_field"`; a dict from selector to posterior; or the
            same as plain data: a dict, or the path of a JSON file, with `{"name": ..., options}` in place of an instance, or
            all that `BayesianNetwork.config()` returns. Selectors (dotted name, glob whose `*` crosses dots, class name,
            module object) are tried in order; a module that matches brings all weights below it; weights that nobody takes
            stay point estimates. Normalization layers stay point estimates unless a selector names them.
        likelihood: p(y | outputs); needed by `elbo` and `predict`.
        prior: p(weights); `Neal(8.0)` by default, `Neal()` for posteriors that draw from the prior between inducing points.
        output: Which of the network's outputs the likelihood is about, where it returns several: a key or a position.
            Left out, it is the only tensor, or the one called `logits`.
        batch_statistics: What the running statistics of BatchNorm layers do while the posterior trains. `"frozen"`: they stay as
            they are and normalize training batches too, so that training and prediction are one function; `"train"`: each draw is
            normalized by its own batch in training, and by averages over draws in prediction. `"auto"` freezes those of layers
            that were trained, under posteriors that vary around the network's weights; names of layers freeze these.

    Returns:
        The Bayesian network, in the mode (train or eval) of `net`.

    Raises:
        ValueError: If a selector matches nothing, a name is unknown, or the network has no weights or float16 ones.
    """
    if isinstance(net, BayesianNetwork):
        raise TypeError("bayesianize: net is a BayesianNetwork already; give the plain network, or its mean_network()")
    chosen = configuration.make_choices(net, posterior, likelihood, prior, output, batch_statistics)
    return BayesianNetwork(
        net,
        chosen.posteriors,
        likelihood=chosen.likelihood,
        prior=chosen.prior,
        output=chosen.output,
        batch_statistics=chosen.batch_statistics,
    )
