"""Small synthetic problems, UCI tables and image sets (from a folder or a download), and transformations of images."""

from bayesify.datasets import corruptions, images, rotations, toy, uci
from bayesify.datasets.scaling import Standardization

__all__ = ["Standardization", "corruptions", "images", "rotations", "toy", "uci"]
