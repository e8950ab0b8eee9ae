"""Experiments of the function-space variational inference paper (Rudner et al.), the published numbers beside ours."""
