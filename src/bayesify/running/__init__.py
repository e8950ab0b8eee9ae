"""How draws run through a network: in a loop, with `vmap` or with CUDA graphs, and within a memory budget."""
