"""Walsh-Hadamard variational inference (Rossi et al. 2020)."""

from bayesify.posteriors.walsh_hadamard.posterior import WalshHadamard

__all__ = ["WalshHadamard"]
