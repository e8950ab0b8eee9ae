"""Experiments of the Walsh-Hadamard paper (Rossi et al. 2020), each beside the numbers that it published."""
