"""What the methods in the folder above share: the base class, kernels of draws, starts, several posteriors in one network."""
