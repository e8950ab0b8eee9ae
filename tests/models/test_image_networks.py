"""AlexNet, VGG16 and ResNet-18 have the layers of the Walsh-Hadamard paper's tables 3 to 5, and become Bayesian by it."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

import bayesify
from bayesify import likelihoods, models, posteriors

ALEXNET = [(64, 3), (192, 64), (384, 192), (256, 384), (256, 256)]
VGG16 = [(32, 3), (32, 32), (64, 32), (64, 64), (128, 64), (128, 128), (128, 128)]
VGG16 += [(256, 128), (256, 256), (256, 256), (256, 256), (256, 256), (256, 256)]
RESNET_BLOCKS = [64, 64, 128, 128, 256, 256, 512, 512]


def kinds(net: nn.Module) -> list[str]:
    """Convolutions, poolings and linear layers in the order of the table."""
    names = {nn.Conv2d: "conv", nn.MaxPool2d: "pool", nn.Linear: "linear"}
    return [names[type(module)] for module in net.modules() if type(module) in names]


def weights(net: nn.Module, kind: type[nn.Module]) -> list[tuple[int, ...]]:
    return [tuple(module.weight.shape) for module in net.modules() if isinstance(module, kind)]


def test_alexnet_is_table_3():
    net = models.alexnet()
    assert weights(net, nn.Conv2d) == [(*channels, 3, 3) for channels in ALEXNET]
    assert weights(net, nn.Linear) == [(4096, 4096), (4096, 4096), (10, 4096)]
    assert kinds(net) == ["conv", "pool", "conv", "pool", "conv", "conv", "conv", "pool", *["linear"] * 3]
    in_the_table = sum(9 * rows * cols for rows, cols in ALEXNET) + 2 * 4096**2 + 10 * 4096
    biases = sum(rows for rows, _ in ALEXNET) + 2 * 4096 + 10
    assert bayesify.count_parameters(net) == in_the_table + biases == 35_855_178


def test_vgg16_is_table_4():
    net = models.vgg16()
    assert weights(net, nn.Conv2d) == [(*channels, 3, 3) for channels in VGG16]
    assert weights(net, nn.Linear) == [(10, 256)]
    stages = [*["conv"] * 2, "pool"] * 2 + [*["conv"] * 3, "pool"] * 3
    assert kinds(net) == [*stages, "linear"]
    in_the_table = sum(9 * rows * cols for rows, cols in VGG16) + 10 * 256
    biases = sum(rows for rows, _ in VGG16) + 10
    assert bayesify.count_parameters(net) == in_the_table + biases == 3_682_730
    assert net.features(torch.zeros(1, 3, 32, 32)).shape == (1, 256, 1, 1)


def test_resnet18_is_table_5():
    net = models.resnet18(variant="cifar")
    blocks = [block for layer in (net.layer1, net.layer2, net.layer3, net.layer4) for block in layer]
    found = [tuple(block.get_submodule(name).weight.shape) for block in blocks for name in ("conv1", "conv2")]
    before = [64, *RESNET_BLOCKS[:-1]]
    expected = [
        shape
        for channels_in, channels in zip(before, RESNET_BLOCKS, strict=True)
        for shape in ((channels, channels_in, 3, 3), (channels, channels, 3, 3))
    ]
    assert found == expected
    assert net.fc.weight.shape == (10, 512)


@pytest.mark.parametrize("make", [models.alexnet, models.vgg16, models.resnet18])
def test_number_of_walsh_hadamard_parameters(make):
    net = make()
    bnn = bayesify.bayesianize(net, posteriors.WalshHadamard())
    expected = 0
    for module in net.modules():
        if isinstance(module, (nn.Conv2d, nn.Linear)):
            rows, cols = module.weight.flatten(1).shape
            size = 2 ** math.ceil(math.log2(min(rows, cols)))
            expected += 4 * size * math.ceil(max(rows, cols) / size)
            expected += 2 * module.bias.numel() if module.bias is not None else 0
        elif isinstance(module, nn.BatchNorm2d):
            expected += 2 * module.num_features
    assert bayesify.count_parameters(bnn) == expected


@pytest.mark.parametrize(
    "net",
    [
        pytest.param(lambda: models.alexnet(num_classes=4, in_channels=1, width=4), id="alexnet"),
        pytest.param(lambda: models.vgg16(num_classes=4, in_channels=1, width=2), id="vgg16"),
        pytest.param(
            lambda: models.vgg16(num_classes=4, in_channels=1, width=2, batch_norm=True), id="vgg16 normalized"
        ),
        pytest.param(lambda: models.resnet18(num_classes=4, in_channels=1, width=2), id="resnet18"),
    ],
)
def test_walsh_hadamard_networks_train(net):
    bnn = bayesify.bayesianize(net(), posteriors.WalshHadamard(), likelihood=likelihoods.Categorical())
    x, y = torch.randn(3, 1, 32, 32), torch.tensor([0, 3, 1])
    bnn.elbo(x, y, num_data=3).backward()
    without = [name for name, parameter in bnn.named_parameters() if parameter.grad is None]
    assert without == []
    prediction = bnn.predict(x, num_draws=2)
    assert prediction.probs.shape == (3, 4)
    draws = bnn.draw(2)
    torch.testing.assert_close(draws(x)[1], draws[1](x), rtol=1e-4, atol=1e-4)


def test_images_of_another_size():
    with pytest.raises(ValueError, match="28 x 28 pixels; give 32 x 32"):
        models.alexnet(width=4)(torch.zeros(1, 3, 28, 28))


def test_bad_widths():
    with pytest.raises(ValueError, match="AlexNet: width=6; give a positive multiple of 4"):
        models.alexnet(width=6)
    with pytest.raises(ValueError, match="VGG16: width=0; give an integer of at least 1"):
        models.vgg16(width=0)
