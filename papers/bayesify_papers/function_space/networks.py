"""Networks of the paper's appendix 3. For images, it gives only the number of layers; the widths are ours."""

from torch import nn


def toy_network(inputs: int, outputs: int, hidden: int = 100) -> nn.Module:
    """Two hidden layers of 100 ReLU units. Saturating units could not become uncertain far from the data."""
    return nn.Sequential(
        nn.Linear(inputs, hidden), nn.ReLU(), nn.Linear(hidden, hidden), nn.ReLU(), nn.Linear(hidden, outputs)
    )


def convolutional_network(
    channels: int, side: int, num_classes: int = 10, widths: tuple[int, ...] = (32, 64, 128)
) -> nn.Module:
    """3 x 3 convolutions without batch normalization, each followed by a ReLU, then a linear layer. Pooling follows each of up to
    three convolutions, and every second one of more.

    Args:
        side: Height and width of the images.
        widths: Numbers of channels of the convolutions: three for Fashion-MNIST, seven for CIFAR-10.
    """
    layers: list[nn.Module] = []
    for index, width in enumerate(widths):
        layers += [nn.Conv2d(channels, width, 3, padding=1), nn.ReLU()]
        if side >= 4 and (len(widths) <= 3 or index % 2):
            layers.append(nn.MaxPool2d(2))
            side //= 2
        channels = width
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(channels * side * side, num_classes))


CIFAR_WIDTHS = (64, 64, 128, 128, 256, 256, 256)
"""Channels of the seven convolutions for CIFAR-10."""
