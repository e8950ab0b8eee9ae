"""Experiments of the Walsh-Hadamard paper (Rossi et al. 2020), with its published numbers."""
