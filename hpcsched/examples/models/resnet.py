"""Residual networks of bottleneck blocks: ResNet-50 (He et al. 2016) and WideResNet-101-2.

The stride is in the middle convolution of a block. The wide one (Zagoruyko and Komodakis 2016) has twice
the channels inside its blocks and as many between them.
"""

from __future__ import annotations

import torch
from torch import nn

from hpcsched.examples.models.parts import ConvNorm, Images, scaled, start


class Bottleneck(nn.Module):
    """1x1, 3x3 and 1x1 convolution beside a shortcut; from `inputs` to `outputs` channels."""

    def __init__(self, inputs: int, inner: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.reduce = ConvNorm(inputs, inner, 1)
        self.spatial = ConvNorm(inner, inner, 3, stride=stride, padding=1)
        self.expand = ConvNorm(inner, outputs, 1, active=False)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or inputs != outputs:
            self.shortcut = ConvNorm(inputs, outputs, 1, stride=stride, active=False)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inside = self.expand(self.spatial(self.reduce(x)))
        result: torch.Tensor = self.relu(inside + self.shortcut(x))
        return result


class ResNet(Images):
    """Four stages of so many blocks; `wide` times the channels inside them.

    Args:
        blocks: bottleneck blocks of each stage.
        wide: factor on the channels inside the blocks.
        width: part of all channels, 1.0 for all.
        classes: of the result, shape [samples, classes].
        image: pixels a side.
    """

    def __init__(self, blocks: tuple[int, ...], wide: int, width: float, classes: int, image: int) -> None:
        super().__init__()
        self.image = image
        channels = scaled(64, width)
        self.stem = ConvNorm(3, channels, 7, stride=2, padding=3)
        self.pool = nn.MaxPool2d(3, stride=2, padding=1)
        for number, count in enumerate(blocks):
            outputs = scaled(256 * 2**number, width)
            inner = scaled(64 * 2**number * wide, width)
            stage = nn.Sequential()
            for i in range(count):
                stage.append(Bottleneck(channels, inner, outputs, stride=2 if number and not i else 1))
                channels = outputs
            self.add_module(f"stage{number + 1}", stage)
        self.stages = len(blocks)
        self.fc = nn.Linear(channels, classes)
        start(self)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Logits of images; [samples, 3, image, image] to [samples, classes]."""
        x = self.pool(self.stem(x))
        for number in range(self.stages):
            x = self.get_submodule(f"stage{number + 1}")(x)
        result: torch.Tensor = self.fc(x.mean((2, 3)))
        return result


class ResNet50(ResNet):
    """25.56 million parameters at full width and 1000 classes."""

    def __init__(self, width: float = 1.0, classes: int = 1000, image: int = 224) -> None:
        super().__init__((3, 4, 6, 3), 1, width, classes, image)


class WideResNet101(ResNet):
    """WideResNet-101-2: 126.89 million parameters at full width and 1000 classes."""

    def __init__(self, width: float = 1.0, classes: int = 1000, image: int = 224) -> None:
        super().__init__((3, 4, 23, 3), 2, width, classes, image)
