"""Residual networks (He et al. 2016), with a stem for 32-pixel images or for ImageNet, and a narrow one without normalization."""

from typing import Literal

from torch import Tensor, nn

from bayesify.arguments.checks import Count, checked

Variant = Literal["cifar", "imagenet"]


class BasicBlock(nn.Module):
    """Two 3x3 convolutions and a shortcut."""

    expansion = 1

    def __init__(self, channels_in: int, channels: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels_in, channels, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(channels)
        self.relu = nn.ReLU()
        self.downsample = _shortcut(channels_in, channels, stride)

    def forward(self, x: Tensor) -> Tensor:
        """[B, C_in, H, W] -> [B, C, H / stride, W / stride]."""
        out: Tensor = self.relu(self.bn1(self.conv1(x)))
        out = self.relu(self.bn2(self.conv2(out)) + self.downsample(x))
        return out


class Bottleneck(nn.Module):
    """A 1x1 convolution, a 3x3 convolution with the stride, a 1x1 convolution with four times the channels, and a shortcut."""

    expansion = 4

    def __init__(self, channels_in: int, channels: int, stride: int) -> None:
        super().__init__()
        wide = channels * self.expansion
        self.conv1 = nn.Conv2d(channels_in, channels, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, stride, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(channels)
        self.conv3 = nn.Conv2d(channels, wide, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(wide)
        self.relu = nn.ReLU()
        self.downsample = _shortcut(channels_in, wide, stride)

    def forward(self, x: Tensor) -> Tensor:
        """[B, C_in, H, W] -> [B, 4 C, H / stride, W / stride]."""
        out: Tensor = self.relu(self.bn1(self.conv1(x)))
        out = self.relu(self.bn2(self.conv2(out)))
        out = self.relu(self.bn3(self.conv3(out)) + self.downsample(x))
        return out


def _shortcut(channels_in: int, channels_out: int, stride: int) -> nn.Module:
    if stride == 1 and channels_in == channels_out:
        return nn.Identity()
    return nn.Sequential(nn.Conv2d(channels_in, channels_out, 1, stride, bias=False), nn.BatchNorm2d(channels_out))


class ResNet(nn.Module):
    """A residual network of four stages; its last layer is `fc`.

    Args:
        block: `BasicBlock` or `Bottleneck`.
        depths: Number of blocks in each of the four stages.
        num_classes: Number of outputs.
        variant: `"cifar"` has a 3x3 stem and no max-pooling; `"imagenet"` has a 7x7 stem of stride 2 and max-pooling.
        in_channels: Number of channels of the images.
        width: Number of channels of the first stage; each stage after the first has twice as many channels as the stage before
            it.

    Raises:
        ValueError: If `variant` is unknown.
    """

    @checked
    def __init__(
        self,
        block: type[BasicBlock] | type[Bottleneck],
        depths: tuple[int, int, int, int],
        num_classes: Count = 10,
        variant: Variant = "cifar",
        in_channels: Count = 3,
        width: Count = 64,
    ) -> None:
        super().__init__()
        if variant == "cifar":
            self.conv1 = nn.Conv2d(in_channels, width, 3, 1, 1, bias=False)
            self.maxpool: nn.Module = nn.Identity()
        else:
            self.conv1 = nn.Conv2d(in_channels, width, 7, 2, 3, bias=False)
            self.maxpool = nn.MaxPool2d(3, 2, 1)
        self.bn1 = nn.BatchNorm2d(width)
        self.relu = nn.ReLU()
        wide = block.expansion * width
        self.layer1 = _stage(block, width, width, depths[0], stride=1)
        self.layer2 = _stage(block, wide, 2 * width, depths[1], stride=2)
        self.layer3 = _stage(block, 2 * wide, 4 * width, depths[2], stride=2)
        self.layer4 = _stage(block, 4 * wide, 8 * width, depths[3], stride=2)
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(8 * wide, num_classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, x: Tensor) -> Tensor:
        """Images [B, C, H, W] -> class scores [B, num_classes]."""
        x = self.maxpool(self.relu(self.bn1(self.conv1(x))))
        x = self.layer4(self.layer3(self.layer2(self.layer1(x))))
        scores: Tensor = self.fc(self.avgpool(x).flatten(1))
        return scores


def _stage(
    block: type[BasicBlock] | type[Bottleneck], channels_in: int, channels: int, depth: int, stride: int
) -> nn.Sequential:
    rest = [block(channels * block.expansion, channels, 1) for _ in range(depth - 1)]
    return nn.Sequential(block(channels_in, channels, stride), *rest)


@checked
def resnet18(variant: Variant = "cifar", num_classes: Count = 10, in_channels: Count = 3, width: Count = 64) -> ResNet:
    """ResNet-18; 11,173,962 parameters for CIFAR-10. See `ResNet` for the arguments."""
    return ResNet(BasicBlock, (2, 2, 2, 2), num_classes, variant, in_channels, width)


@checked
def resnet34(variant: Variant = "cifar", num_classes: Count = 10, in_channels: Count = 3, width: Count = 64) -> ResNet:
    """ResNet-34. See `ResNet` for the arguments."""
    return ResNet(BasicBlock, (3, 4, 6, 3), num_classes, variant, in_channels, width)


@checked
def resnet50(variant: Variant = "cifar", num_classes: Count = 10, in_channels: Count = 3, width: Count = 64) -> ResNet:
    """ResNet-50; 23,520,842 parameters for CIFAR-10. See `ResNet` for the arguments."""
    return ResNet(Bottleneck, (3, 4, 6, 3), num_classes, variant, in_channels, width)


class _NarrowBlock(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, channels, 3, padding=1)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1)
        self.relu = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        change: Tensor = self.relu(self.conv2(self.relu(self.conv1(x))))
        return x + change


class _Pool(nn.Module):
    """Means of 2 x 2 positions, computed without `nn.AvgPool2d(2)`, because its gradient is slower on a GPU than the gradient of
    a convolution."""

    def forward(self, x: Tensor) -> Tensor:
        rows = x.movedim(-3, -1)
        height, width = (size - size % 2 for size in x.shape[-2:])
        pairs: Tensor = rows[..., :height, :width, :].unflatten(-2, (-1, 2)).unflatten(-4, (-1, 2))
        return pairs.mean((-4, -2)).movedim(-1, -3)


@checked
def narrow_resnet(num_classes: Count = 10, in_channels: Count = 3, width: Count = 32) -> nn.Sequential:
    """A network with the layers conv, ReLU, block, pool, block, pool, block, average, linear (Ober & Aitchison 2021, section 3.4).

    Args:
        num_classes: Number of outputs.
        in_channels: Number of channels of the images.
        width: Number of channels in all layers; 32 in the paper.
    """
    return nn.Sequential(
        nn.Conv2d(in_channels, width, 3, padding=1),
        nn.ReLU(),
        _NarrowBlock(width),
        _Pool(),
        _NarrowBlock(width),
        _Pool(),
        _NarrowBlock(width),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(width, num_classes),
    )
