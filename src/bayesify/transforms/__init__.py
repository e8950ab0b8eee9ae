"""Fast transforms of vectors."""

from bayesify.transforms.walsh import hadamard, hadamard_matrix, next_power_of_two

__all__ = ["hadamard", "hadamard_matrix", "next_power_of_two"]
