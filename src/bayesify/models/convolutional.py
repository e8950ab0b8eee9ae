"""AlexNet (Krizhevsky et al. 2012) and VGG16 (Simonyan & Zisserman 2015), as the Walsh-Hadamard paper adapts them to 32 pixels."""

from collections import OrderedDict

from torch import Tensor, nn

from bayesify.arguments.checks import Count, checked

IMAGE_SIDE = 32
CHANNEL_MULTIPLES, POOLED_LAYERS = (1, 3, 6, 4, 4), (1, 2, 5)
"""Channels of the convolutions, as multiples of the width, and indices (from 1) of the convolutions before a pooling layer."""


class AlexNet(nn.Module):
    """Five 3x3 convolutions and three linear layers (Rossi et al. 2020, table 3); its last layer is `fc3`.

    The first linear layer has 4096 inputs (256 channels of 4 x 4 positions), so images must be 32 x 32 pixels. (The paper's table 1
    says 28, but three poolings do not reduce 28 to 4.) Every layer has a bias, and a ReLU follows every layer except the last. The
    network has 35,855,178 parameters for ten classes.

    Args:
        num_classes: Number of outputs.
        in_channels: Number of channels of the images.
        width: Number of channels of the first convolution, 64 in the paper; the other layers scale with it.

    Raises:
        ValueError: If `width` is not a positive multiple of 4.
    """

    @checked
    def __init__(self, num_classes: Count = 10, in_channels: Count = 3, width: Count = 64) -> None:
        super().__init__()
        if width % 4:
            raise ValueError(f"AlexNet: width={width}; give a positive multiple of 4")
        layers: OrderedDict[str, nn.Module] = OrderedDict()
        channels = in_channels
        for place, multiple in enumerate(CHANNEL_MULTIPLES, start=1):
            layers[f"conv{place}"] = nn.Conv2d(channels, multiple * width, 3, padding=1)
            layers[f"relu{place}"] = nn.ReLU()
            if place in POOLED_LAYERS:
                layers[f"pool{place}"] = nn.MaxPool2d(2)
            channels = multiple * width
        self.features = nn.Sequential(layers)
        flat = channels * (IMAGE_SIDE // 8) ** 2  # 64 * width: 4096 in the paper
        self.fc1 = nn.Linear(flat, flat)
        self.fc2 = nn.Linear(flat, flat)
        self.fc3 = nn.Linear(flat, num_classes)
        self.relu = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        """Images [B, C, 32, 32] -> class scores [B, num_classes].

        Raises:
            ValueError: If the images have another size.
        """
        if x.shape[-2:] != (IMAGE_SIDE, IMAGE_SIDE):
            raise ValueError(
                f"AlexNet: images have {x.shape[-2]} x {x.shape[-1]} pixels; give {IMAGE_SIDE} x {IMAGE_SIDE}"
            )
        x = self.features(x).flatten(1)
        scores: Tensor = self.fc3(self.relu(self.fc2(self.relu(self.fc1(x)))))
        return scores


def alexnet(num_classes: int = 10, in_channels: int = 3, width: int = 64) -> AlexNet:
    """AlexNet for 32-pixel images. See `AlexNet` for the arguments."""
    return AlexNet(num_classes, in_channels, width)


STAGES = ((1, 2), (2, 2), (4, 3), (8, 3), (8, 3))
"""Number of channels as a multiple of the width, and number of convolutions, in each of the five stages."""


class VGG16(nn.Module):
    """Thirteen 3x3 convolutions in five stages, each followed by max-pooling, and a linear layer `fc` (Rossi et al. 2020, table 4).

    Every layer has a bias, and a ReLU follows every convolution. The network has 3,682,730 parameters for ten classes.

    Args:
        num_classes: Number of outputs.
        in_channels: Number of channels of the images.
        width: Number of channels of the first stage; 32 in the paper, half as many as in the original VGG16.
        batch_norm: Whether batch normalization follows every convolution. The paper's table has no normalization,
            but thirteen layers are then hard to train unless their initial weights are good.

    Raises:
        ValueError: If `width` is below 1.
    """

    @checked
    def __init__(
        self, num_classes: Count = 10, in_channels: Count = 3, width: Count = 32, batch_norm: bool = False
    ) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        channels = in_channels
        for multiple, depth in STAGES:
            for _ in range(depth):
                convolution = nn.Conv2d(channels, multiple * width, 3, padding=1)
                nn.init.kaiming_normal_(convolution.weight, mode="fan_out", nonlinearity="relu")
                nn.init.zeros_(convolution.bias)  # type: ignore[arg-type]
                channels = multiple * width
                layers += [convolution, *([nn.BatchNorm2d(channels)] if batch_norm else []), nn.ReLU()]
            layers.append(nn.MaxPool2d(2))
        self.features = nn.Sequential(*layers)
        self.avgpool = nn.AdaptiveAvgPool2d(1)  # does nothing for 32-pixel images, which leave one position
        self.fc = nn.Linear(channels, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        """Images [B, C, H, W] with H and W of at least 32 -> class scores [B, num_classes]."""
        scores: Tensor = self.fc(self.avgpool(self.features(x)).flatten(1))
        return scores


def vgg16(num_classes: int = 10, in_channels: int = 3, width: int = 32, batch_norm: bool = False) -> VGG16:
    """VGG16 for 32-pixel images. See `VGG16` for the arguments."""
    return VGG16(num_classes, in_channels, width, batch_norm)
