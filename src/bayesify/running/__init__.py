"""Passes of draws through a network: one at a time, with `vmap` or in a loop, within a memory budget, or with CUDA graphs."""
