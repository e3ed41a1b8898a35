"""Conv4 and ResNet-12 as PyTorch's users write them, with the names of `experiments.models`.

For `channels_last`: positions come before channels in flattened features.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch.nn.functional as F
from torch import Tensor, nn

from experiments.config import ModelConfig

_SLOPE = 0.1


class ConvNorm(nn.Module):
    """A convolution without bias, and batch normalisation."""

    def __init__(self, channels_in: int, channels_out: int, kernel_size: int):
        super().__init__()
        self.conv = nn.Conv2d(
            channels_in, channels_out, kernel_size, padding=kernel_size // 2, bias=False
        )
        self.norm = nn.BatchNorm2d(channels_out)

    def forward(self, x: Tensor) -> Tensor:
        """Convolves and normalises `x`."""
        return self.norm(self.conv(x))


class Conv4(nn.Module):
    """Four blocks of a convolution, normalisation, max-pooling and ReLU; flattened features."""

    def __init__(self, channels: Sequence[int]):
        super().__init__()
        self.layers = nn.ModuleList(ConvNorm(*pair, 3) for pair in itertools.pairwise(channels))

    def forward(self, x: Tensor) -> Tensor:
        """Features of images."""
        for layer in self.layers:
            x = F.relu(F.max_pool2d(layer(x), 2), inplace=True)
        return x.permute(0, 2, 3, 1).flatten(1)


class Block(nn.Module):
    """Three convolutions and a shortcut, max-pooling and leaky ReLU."""

    def __init__(self, channels_in: int, channels_out: int):
        super().__init__()
        self.first = ConvNorm(channels_in, channels_out, 3)
        self.second = ConvNorm(channels_out, channels_out, 3)
        self.third = ConvNorm(channels_out, channels_out, 3)
        self.shortcut = ConvNorm(channels_in, channels_out, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Halves height and width."""
        y = F.leaky_relu(self.first(x), _SLOPE, inplace=True)
        y = F.leaky_relu(self.second(y), _SLOPE, inplace=True)
        y = self.third(y) + self.shortcut(x)
        return F.leaky_relu(F.max_pool2d(y, 2), _SLOPE, inplace=True)


class ResNet12(nn.Module):
    """Four blocks, averaged over all positions."""

    def __init__(self, channels: Sequence[int]):
        super().__init__()
        self.blocks = nn.Sequential(*(Block(*pair) for pair in itertools.pairwise(channels)))

    def forward(self, x: Tensor) -> Tensor:
        """Features of images."""
        return self.blocks(x).mean((2, 3))


def build_network(config: ModelConfig, channels: int) -> nn.Module:
    """The network of a configuration with `backbone` conv4 or resnet12."""
    kinds = {"conv4": Conv4, "resnet12": ResNet12}
    return kinds[config.backbone]((channels, *config.widths))
