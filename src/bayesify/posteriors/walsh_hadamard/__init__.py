"""Walsh-Hadamard variational inference (Rossi et al. 2020)."""
