"""Likelihoods: distributions of targets given a network's outputs."""

from bayesify.likelihoods.base import Likelihood
from bayesify.likelihoods.categorical import Bernoulli, Categorical
from bayesify.likelihoods.counts import Hurdle, NegativeBinomial, Poisson
from bayesify.likelihoods.gaussian import Gaussian, HeteroscedasticGaussian
from bayesify.likelihoods.quantiles import Quantiles
from bayesify.likelihoods.student_t import StudentT

__all__ = [
    "REGISTRY",
    "Bernoulli",
    "Categorical",
    "Gaussian",
    "HeteroscedasticGaussian",
    "Hurdle",
    "Likelihood",
    "NegativeBinomial",
    "Poisson",
    "Quantiles",
    "StudentT",
]

NUMBERS = (Gaussian, HeteroscedasticGaussian, StudentT, Quantiles, Poisson, NegativeBinomial, Hurdle)
REGISTRY: dict[str, type[Likelihood]] = {kind.name: kind for kind in (*NUMBERS, Categorical, Bernoulli)}
"""Likelihoods by the name that configuration files use."""
