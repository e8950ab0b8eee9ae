"""Experiments of the paper on subnetwork inference (Daxberger et al. 2021), with its published numbers."""
