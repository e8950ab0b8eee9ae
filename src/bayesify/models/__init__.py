"""The networks that the papers use, written here so that nothing but torch is needed."""

from bayesify.models.mlp import mlp
from bayesify.models.resnet import ResNet, resnet18, resnet34, resnet50

__all__ = ["ResNet", "mlp", "resnet18", "resnet34", "resnet50"]
