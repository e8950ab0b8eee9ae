"""What a type checker sees of predictions; read by mypy in `make lint`, and by nothing else."""

from typing import assert_type

import torch
from torch import Tensor, nn

import bayesify
from bayesify import BayesianNetwork, ClassificationPredictive, Predictive, RegressionPredictive, likelihoods
from bayesify.likelihoods import Likelihood

X = torch.zeros(2, 3)


def classes(net: nn.Module) -> None:
    bnn = bayesify.bayesianize(net, "mean_field", likelihood=likelihoods.Categorical())
    assert_type(bnn, BayesianNetwork[ClassificationPredictive])
    assert_type(bnn.predict(X).probs, Tensor)
    assert_type(bayesify.bayesianize(net, "mean_field", likelihood="bernoulli").predict(X), ClassificationPredictive)
    bnn.predict(X).interval(0.9)  # type: ignore[attr-defined]


def regression(net: nn.Module) -> None:
    bnn = bayesify.bayesianize(net, "mean_field", likelihood=likelihoods.Gaussian(0.1))
    assert_type(bnn.predict(X), RegressionPredictive)
    assert_type(bnn.predict(X).interval(0.9), tuple[Tensor, Tensor])
    print(bnn.predict(X).probs)  # type: ignore[attr-defined]


def unknown(net: nn.Module, likelihood: Likelihood, plain: BayesianNetwork) -> None:
    assert_type(bayesify.bayesianize(net, "mean_field", likelihood=likelihood).predict(X), Predictive)
    assert_type(plain.predict(X), Predictive)
