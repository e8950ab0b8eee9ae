"""Experiments of the paper on inducing weights (Ritter et al. 2021), with its published numbers."""
