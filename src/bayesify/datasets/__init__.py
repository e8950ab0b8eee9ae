"""Data: small problems made from a seed, UCI tables and image sets from a folder or downloaded, and what is done to images."""

from bayesify.datasets import corruptions, images, rotations, toy, uci
from bayesify.datasets.scaling import Standardization

__all__ = ["Standardization", "corruptions", "images", "rotations", "toy", "uci"]
