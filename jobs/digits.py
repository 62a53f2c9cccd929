"""Handwritten digits: a small convolutional network on the images that come with scikit-learn.

Shapes: N images of the data set, B images of a batch, C channels, H height, W width, K classes.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Annotated, Literal

import torch
from pydantic import ConfigDict, Field, PositiveFloat, PositiveInt
from pydantic.dataclasses import dataclass
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional

from raytrain_platform.task import Loss, Task

NUM_CLASSES = 10


class DigitImages:
    """Images and their digits as a map-style data set, each image moved a little at random."""

    def __init__(self, part: Literal["train", "eval"], max_shift: int) -> None:
        """Take four of every five images to train on and the fifth to evaluate on.

        Args:
            part: Which of the two.
            max_shift: Most pixels an image is moved by, in each direction; 0 leaves it as it is.
        """
        digits = load_digits()
        images_NCHW = torch.from_numpy(digits.images).float().unsqueeze(1) / 16
        labels_N = torch.from_numpy(digits.target).long()
        is_eval_N = torch.arange(len(labels_N)) % 5 == 4
        chosen_N = is_eval_N if part == "eval" else ~is_eval_N
        self.images_NCHW, self.labels_N = images_NCHW[chosen_N], labels_N[chosen_N]
        self.max_shift = max_shift

    def __len__(self) -> int:
        """Return the number of images."""
        return len(self.labels_N)

    def __getitem__(self, index: int, /) -> tuple[torch.Tensor, torch.Tensor]:
        """Return one image, moved by what the global generator says, and its digit."""
        image_CHW = self.images_NCHW[index]
        if self.max_shift:
            down, right = (random.randint(-self.max_shift, self.max_shift) for _ in range(2))
            # A negative pad crops: what leaves the image on one side is replaced by background on the other.
            image_CHW = functional.pad(image_CHW, (right, -right, down, -down))
        return image_CHW, self.labels_N[index]


@dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class Digits(Task):
    """Tell which digit an image shows; the fields are the ``params`` of the spec."""

    num_channels: PositiveInt = 16
    """Channels of the first convolution; the second has twice as many."""

    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.2
    max_shift: Annotated[int, Field(ge=0, le=7)] = 1
    """Most pixels by which a training image is moved."""

    lr: PositiveFloat = 3e-3

    def build_model(self) -> nn.Module:
        """Return the network, freshly initialized."""
        narrow, wide = self.num_channels, 2 * self.num_channels
        return nn.Sequential(
            nn.Conv2d(1, narrow, kernel_size=3, padding=1),
            nn.BatchNorm2d(narrow),
            nn.ReLU(),
            nn.Conv2d(narrow, wide, kernel_size=3, padding=1),
            nn.BatchNorm2d(wide),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Dropout(self.dropout),
            nn.Linear(wide * 4 * 4, NUM_CLASSES),
        )

    def build_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        """Return AdamW over all parameters."""
        return torch.optim.AdamW(model.parameters(), lr=self.lr)

    def train_data(self) -> DigitImages:
        """Return four fifths of the images, moved at random."""
        return DigitImages("train", self.max_shift)

    def eval_data(self) -> DigitImages:
        """Return the other fifth, as they are."""
        return DigitImages("eval", max_shift=0)

    def loss(self, model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> Loss:
        """Return the cross-entropy for each image."""
        images_BCHW, labels_B = batch
        return Loss(functional.cross_entropy(model(images_BCHW), labels_B), len(labels_B))

    def evaluate(
        self, model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]
    ) -> Mapping[str, tuple[torch.Tensor, float]]:
        """Return the cross-entropy and how many digits were told right."""
        images_BCHW, labels_B = batch
        logits_BK = model(images_BCHW)
        num_images = float(len(labels_B))
        return {
            "loss": (functional.cross_entropy(logits_BK, labels_B, reduction="sum"), num_images),
            "accuracy": ((logits_BK.argmax(dim=1) == labels_B).sum(), num_images),
        }


if __name__ == "__main__":
    from raytrain_platform import train

    result = train(Digits, name="digits", epochs=10, num_shards=4, replicas={"min": 1, "max": 2})
    print(f"accuracy {result.metrics['val/accuracy']:.3f}, weights {result.weights_sha256[:12]}, run {result.run_id}")
