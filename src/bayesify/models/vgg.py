"""VGG16 (Simonyan & Zisserman 2015) as the Walsh-Hadamard paper adapts it to 32-pixel images."""

from __future__ import annotations

from torch import Tensor, nn

from bayesify.arguments.checks import Count, checked

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
