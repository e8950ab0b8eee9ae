"""Deep Gaussian processes."""

from bayesify.deep_gp.from_task import fit_deep_gp
from bayesify.deep_gp.layers import KERNELS, Conditional, GlobalLayer, LocalLayer
from bayesify.deep_gp.model import DeepGP

__all__ = ["KERNELS", "Conditional", "DeepGP", "GlobalLayer", "LocalLayer", "fit_deep_gp"]
