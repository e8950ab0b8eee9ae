"""Passes of draws through a network: one at a time, by `vmap` or in a loop, within a memory budget, by CUDA graphs."""
