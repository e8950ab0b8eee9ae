"""Global inducing points (Ober and Aitchison 2021)."""

from bayesify.posteriors.global_inducing.posterior import GlobalInducing

__all__ = ["GlobalInducing"]
