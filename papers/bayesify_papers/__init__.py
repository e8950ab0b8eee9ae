"""Experiments: what is run on which data, and what came out."""
