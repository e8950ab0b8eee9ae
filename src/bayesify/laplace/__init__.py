"""The linearized Laplace approximation over all weights or a subnetwork."""

from bayesify.laplace.from_task import fit_laplace, fit_subnetwork
from bayesify.laplace.laplace import Laplace
from bayesify.registry import Method, register

__all__ = ["Laplace"]

register(
    Method(
        "laplace",
        "Laplace",
        "MacKay 1992; Immer et al. 2021",
        "P + P (P + 1) / 2, or Kronecker",
        fit=fit_laplace,
        used_as="Laplace",
        tunes_prior=True,
        starts_at_point=True,
        cost_rank=1,
        portfolio_place=2,
    )
)
register(
    Method(
        "subnetwork",
        "Subnetwork Laplace",
        "Daxberger et al. 2021",
        "P + S (S + 1) / 2 for S chosen weights",
        fit=fit_subnetwork,
        used_as="Laplace",
        aliases=("subnetwork_laplace",),
        tunes_prior=True,
        starts_at_point=True,
    )
)
