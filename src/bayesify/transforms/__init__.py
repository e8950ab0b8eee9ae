"""Fast transforms of vectors."""

from bayesify.transforms.sign_matrices import hadamard_matrix
from bayesify.transforms.walsh import hadamard, next_power_of_two

__all__ = ["hadamard", "hadamard_matrix", "next_power_of_two"]
