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
    """Make a network Bayesian: copy it, and replace weights of the copy by a posterior distribution over them.

    Args:
        net: Any module. It is copied, not changed.
        posterior: An instance such as `MeanField()`, a name such as `"mean_field"`, or a dict that maps selectors to
            posteriors. A plain dict or the path of a JSON file is also accepted. Each posterior is then given as `{"name": ...,
            options}`. The result of `BayesianNetwork.config()` is also accepted. A selector is a dotted name, a glob pattern (its
            `*` also matches dots), a class name or a module object. Selectors are tried in order, and each selects all weights
            inside the modules that it matches. Weights that no selector matches stay point estimates. Normalization layers also
            stay point estimates unless a selector names them.
        likelihood: Likelihood p(y | outputs). `elbo` and `predict` need it.
        prior: Prior p(weights). The default is `Neal(8.0)`, or `Neal()` for `GlobalInducing` and `LocalInducing`.
        output: Key or position of the output that the likelihood describes, for a network that returns several outputs.
            By default, it is the only tensor that the network returns, or the output called `logits`.
        batch_statistics: How BatchNorm layers use running statistics while the posterior trains. With `"frozen"`, the running
            statistics stay fixed and also normalize training batches, so that the network computes the same function in training
            and in prediction. With `"train"`, each draw is normalized by its own batch statistics in training, and by averages
            over draws in prediction. With `"auto"`, layers with trained statistics are frozen if the posterior is centered at the
            network's weights. A list of layer names freezes these layers.

    Returns:
        The Bayesian network, in the mode (train or eval) of `net`.

    Raises:
        ValueError: If a selector matches nothing, if a name is unknown, if the network has no weights, or if a weight
            is float16.
    """
    if isinstance(net, BayesianNetwork):
        raise TypeError("bayesianize: net= is already a BayesianNetwork; give the plain network, or its mean_network()")
    chosen = configuration.make_choices(net, posterior, likelihood, prior, output, batch_statistics)
    return BayesianNetwork(net, **vars(chosen))
