"""Data: small problems made from a seed, image sets read from a folder, and corruptions of images."""

from bayesify.datasets import corruptions, images, toy

__all__ = ["corruptions", "images", "toy"]
