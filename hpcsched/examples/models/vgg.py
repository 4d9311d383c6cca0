"""VGG-16 (Simonyan and Zisserman 2015, configuration D): 13 convolutions and 3 linear layers."""

from __future__ import annotations

import torch
from torch import nn

from hpcsched.examples.models.parts import Images, scaled, start

_STAGES = ((64, 2), (128, 2), (256, 3), (512, 3), (512, 3))
"""(channels, convolutions) between two poolings."""


class VGG16(Images):
    """138.36 million parameters at full width, 224 pixels and 1000 classes.

    Args:
        width: part of the channels and hidden units, 1.0 for all.
        classes: of the result, shape [samples, classes].
        image: pixels a side, a multiple of 32.
        dropout: behind the two hidden linear layers.
    """

    def __init__(
        self, width: float = 1.0, classes: int = 1000, image: int = 224, dropout: float = 0.5
    ) -> None:
        super().__init__()
        if image % 32 or not image:
            raise ValueError(f"images of {image} pixels cannot be halved five times")
        self.image = image
        features: list[nn.Module] = []
        channels = 3
        for full, convolutions in _STAGES:
            for _ in range(convolutions):
                outputs = scaled(full, width)
                features += [nn.Conv2d(channels, outputs, 3, padding=1), nn.ReLU(inplace=True)]
                channels = outputs
            features.append(nn.MaxPool2d(2))
        self.features = nn.Sequential(*features)
        hidden = scaled(4096, width)
        self.classifier = nn.Sequential(
            nn.Linear(channels * (image // 32) ** 2, hidden),
            nn.ReLU(inplace=True),
            nn.Dropout(dropout),
            nn.Linear(hidden, hidden),
            nn.ReLU(inplace=True),
            nn.Dropout(dropout),
            nn.Linear(hidden, classes),
        )
        start(self)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Logits of images; [samples, 3, image, image] to [samples, classes]."""
        result: torch.Tensor = self.classifier(self.features(x).flatten(1))
        return result
