"""The residual networks that two papers train on images."""

from torch import nn

from bayesify.models.resnet import BasicBlock, Bottleneck, ResNet


def residual_network(depth: int, width: int, channels: int, num_classes: int, *, bottleneck: bool = False) -> ResNet:
    """A residual network with the stem for small images.

    Args:
        depth: Basic blocks in each of the four stages; 2 is ResNet-18.
        width: Channels of the first stage; 64 is ResNet-18 and ResNet-50.
        channels: Of the images.
        num_classes: Outputs.
        bottleneck: Whether it has the 3, 4, 6 and 3 bottleneck blocks of ResNet-50 in place of basic ones.
    """
    if bottleneck:
        return ResNet(Bottleneck, (3, 4, 6, 3), num_classes, "cifar", channels, width)
    return ResNet(BasicBlock, (depth,) * 4, num_classes, "cifar", channels, width)


def start_at_identity(net: nn.Module) -> None:
    """Set the last BatchNorm of each residual block to 0, in place (Goyal et al. 2017)."""
    for module in net.modules():
        if isinstance(module, (BasicBlock, Bottleneck)):
            nn.init.zeros_((module.bn3 if isinstance(module, Bottleneck) else module.bn2).weight)
