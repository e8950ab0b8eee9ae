"""Variational inference with a prior over functions."""

from bayesify.function_space.contexts import Box, Context, DatasetContext, Mixture, NoisyContext
from bayesify.function_space.priors import Constant, FunctionPrior, GaussianProcess, NeuralTangent, UnknownPrior
from bayesify.function_space.variational import FunctionSpaceVI

__all__ = [
    "Box",
    "Constant",
    "Context",
    "DatasetContext",
    "FunctionPrior",
    "FunctionSpaceVI",
    "GaussianProcess",
    "Mixture",
    "NeuralTangent",
    "NoisyContext",
    "UnknownPrior",
]
