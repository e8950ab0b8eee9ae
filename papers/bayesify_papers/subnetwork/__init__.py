"""Experiments of the subnetwork inference paper (Daxberger et al. 2021), each beside the numbers that it published."""
