"""Variational inference with a prior over functions."""

from bayesify.function_space.contexts import Box, Context, DatasetContext, Mixture, NoisyContext
from bayesify.function_space.from_task import fit_function_space
from bayesify.function_space.priors import Constant, FunctionPrior, GaussianProcess, NeuralTangent, UnknownPrior
from bayesify.function_space.variational import FunctionSpaceVI
from bayesify.registry import Method, register

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

register(
    Method(
        "function_space",
        "Function-space VI",
        "Rudner et al. 2021",
        "2 P",
        fit=fit_function_space,
        used_as="FunctionSpaceVI",
        aliases=("fsvi",),
        trials=({"prior_variance": 1.0}, {"prior_variance": 10.0}, {"prior_variance": 3.0}),
        demo_epochs={"regression": 2.5},  # after fewer its band is no wider in the gap than at the data
    )
)
