"""Residual networks that two papers train on images."""

from torch import nn

from bayesify.models.resnet import BasicBlock, Bottleneck, ResNet


def residual_network(depth: int, width: int, channels: int, num_classes: int, *, bottleneck: bool = False) -> ResNet:
    """A residual network with the stem for small images.

    Args:
        depth: Number of basic blocks in each of the four stages. ResNet-18 has 2.
        width: Number of channels of the first stage. ResNet-18 and ResNet-50 have 64.
        bottleneck: Whether to use the 3, 4, 6 and 3 bottleneck blocks of ResNet-50 instead of basic blocks.
    """
    if bottleneck:
        return ResNet(Bottleneck, (3, 4, 6, 3), num_classes, "cifar", channels, width)
    return ResNet(BasicBlock, (depth,) * 4, num_classes, "cifar", channels, width)


def start_at_identity(net: nn.Module) -> None:
    """Set the last BatchNorm of each residual block to 0, in place (Goyal et al. 2017)."""
    for module in net.modules():
        if isinstance(module, (BasicBlock, Bottleneck)):
            nn.init.zeros_((module.bn3 if isinstance(module, Bottleneck) else module.bn2).weight)
