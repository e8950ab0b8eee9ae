"""The linearized Laplace approximation over all weights or a subnetwork."""

from bayesify.laplace.evidence_training import fit_with_evidence
from bayesify.laplace.laplace import Laplace
from bayesify.laplace.sampled import Sampled

__all__ = ["Laplace", "Sampled", "fit_with_evidence"]
