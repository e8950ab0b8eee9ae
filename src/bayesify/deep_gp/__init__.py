"""Deep Gaussian processes."""

from bayesify.deep_gp.from_task import fit_deep_gp, make_deep_gp
from bayesify.deep_gp.kernels import KERNELS
from bayesify.deep_gp.layers import Conditional, GlobalLayer, LocalLayer
from bayesify.deep_gp.model import DeepGP
from bayesify.registry import Method, register

__all__ = ["KERNELS", "Conditional", "DeepGP", "GlobalLayer", "LocalLayer", "fit_deep_gp"]

register(
    Method(
        "deep_gp",
        "Deep Gaussian process",
        "Ober & Aitchison 2021",
        "M (D + sum of widths) + M per layer",
        fit=fit_deep_gp,
        used_as="deep_gp.DeepGP",
        aliases=("dgp",),
        make=make_deep_gp,
        options={"learning_rate": 0.02},
        draws_in_steps=True,
        slow=True,
        trials=({"learning_rate": 0.02}, {"learning_rate": 0.05}, {"learning_rate": 0.01}),
    )
)
