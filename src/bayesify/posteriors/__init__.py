"""Posteriors over the weights of a network, one file per family."""

from bayesify.posteriors.common.base import DrawRequest, Posterior
from bayesify.posteriors.dropout import Dropout
from bayesify.posteriors.ensemble import Ensemble
from bayesify.posteriors.full_covariance import FullCovariance
from bayesify.posteriors.global_inducing.posterior import GlobalInducing
from bayesify.posteriors.inducing_weights.posterior import InducingWeights
from bayesify.posteriors.k_tied import KTied
from bayesify.posteriors.local_inducing import LocalInducing
from bayesify.posteriors.matrix_normal import MatrixNormal
from bayesify.posteriors.mean_field import MeanField
from bayesify.posteriors.point import Point
from bayesify.posteriors.rank_one import RankOne
from bayesify.posteriors.walsh_hadamard.posterior import WalshHadamard
from bayesify.weights.named_parameters import NamedParameters

__all__ = [
    "REGISTRY",
    "DrawRequest",
    "Dropout",
    "Ensemble",
    "FullCovariance",
    "GlobalInducing",
    "InducingWeights",
    "KTied",
    "LocalInducing",
    "MatrixNormal",
    "MeanField",
    "NamedParameters",
    "Point",
    "Posterior",
    "RankOne",
    "WalshHadamard",
]

REGISTRY: dict[str, type[Posterior]] = {
    kind.name: kind
    for kind in (
        Point,
        MeanField,
        FullCovariance,
        MatrixNormal,
        KTied,
        RankOne,
        InducingWeights,
        GlobalInducing,
        LocalInducing,
        WalshHadamard,
        Ensemble,
        Dropout,
    )
}
"""Posteriors by name. Code, configuration files and the command line use these names."""
