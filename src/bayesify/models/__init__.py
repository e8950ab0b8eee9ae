"""The networks of the papers, which need only torch."""

from bayesify.models.convolutional import VGG16, AlexNet, alexnet, vgg16
from bayesify.models.mlp import mlp
from bayesify.models.resnet import ResNet, narrow_resnet, resnet18, resnet34, resnet50

__all__ = ["VGG16", "AlexNet", "ResNet", "alexnet", "mlp", "narrow_resnet", "resnet18", "resnet34", "resnet50", "vgg16"]
