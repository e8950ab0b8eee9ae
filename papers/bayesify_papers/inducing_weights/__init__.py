"""Experiments of the inducing weights paper (Ritter et al. 2021), each beside the numbers that it published."""
