"""The residual network of the global inducing points paper, with few channels and no normalization."""

from __future__ import annotations

from torch import Tensor, nn

from bayesify.arguments.checks import Count, checked


class _Block(nn.Module):
    """Two convolutions, each followed by a ReLU, and a shortcut in parallel."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, channels, 3, padding=1)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1)
        self.relu = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        change: Tensor = self.relu(self.conv2(self.relu(self.conv1(x))))
        return x + change


class _Pool(nn.Module):
    """Means of 2 x 2 positions, instead of `nn.AvgPool2d(2)`, whose gradient is slower on a GPU than a convolution's gradient."""

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
        _Block(width),
        _Pool(),
        _Block(width),
        _Pool(),
        _Block(width),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(width, num_classes),
    )
