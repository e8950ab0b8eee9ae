"""Experiments of the paper on function-space variational inference (Rudner et al.), with its published numbers."""
