"""Inducing weights (Ritter et al. 2021)."""
