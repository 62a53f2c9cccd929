"""Small tasks with one peculiarity each, for tests that compare bits."""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import TensorDataset

from raytrain_platform import Loss, Task


class Plain(Task):
    """Everything ordinary at once: batch norm, dropout, a schedule, AdamW."""

    num_samples = 96

    def build_model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 3))

    def build_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.parameters(), 1e-2)

    def build_scheduler(self, optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
        return torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.98)

    def train_data(self) -> Any:
        generator = torch.Generator().manual_seed(1)
        inputs = torch.randn(self.num_samples, 6, generator=generator)
        return TensorDataset(inputs, torch.randint(0, 3, (self.num_samples,), generator=generator))

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        inputs, labels = batch
        return Loss(functional.cross_entropy(model(inputs), labels), len(labels))

    def eval_data(self) -> Any:
        return self.train_data()

    def evaluate(self, model: nn.Module, batch: Any) -> Any:
        inputs, labels = batch
        outputs = model(inputs)
        return {
            "loss": (functional.cross_entropy(outputs, labels, reduction="sum"), len(labels)),
            "accuracy": ((outputs.argmax(1) == labels).sum(), len(labels)),
        }


class TiedWeights(Plain):
    """Input and output share one matrix; the loss is weighted by tokens, of which samples have different numbers."""

    class _Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(11, 8)
            self.mix = nn.Linear(8, 8)
            self.out = nn.Linear(8, 11, bias=False)
            self.out.weight = self.embedding.weight

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            return self.out(torch.tanh(self.mix(self.embedding(tokens))))

    def build_model(self) -> nn.Module:
        return self._Model()

    def train_data(self) -> Any:
        generator = torch.Generator().manual_seed(2)
        return TensorDataset(torch.randint(1, 11, (self.num_samples, 5), generator=generator))

    def collate(self, samples: Any) -> Any:
        tokens = torch.stack([sample[0] for sample in samples])
        lengths = tokens[:, 0] % 5 + 1
        return {"tokens": tokens, "is_token": torch.arange(5) < lengths[:, None]}

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        tokens, is_token = batch["tokens"], batch["is_token"]
        losses = functional.cross_entropy(model(tokens).transpose(1, 2), tokens.roll(-1, 1), reduction="none")
        return Loss((losses * is_token).sum() / is_token.sum(), is_token.sum())

    def eval_data(self) -> Any:
        return None


class PartlyUsed(Plain):
    """One layer frozen, one never used, one used only by shards that draw a large number."""

    class _Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.frozen = nn.Linear(6, 6)
            self.frozen.requires_grad_(False)
            self.never = nn.Linear(6, 6)
            self.sometimes = nn.Linear(6, 6)
            self.head = nn.Linear(6, 3)

        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            hidden = self.frozen(inputs)
            if self.training and torch.rand(()) > 0.6:
                hidden = hidden + self.sometimes(inputs)
            return self.head(torch.relu(hidden))

    def build_model(self) -> nn.Module:
        return self._Model()


TASKS: tuple[type[Task], ...] = (Plain, TiedWeights, PartlyUsed)


class Slow(Plain):
    """Steps long enough for things to happen meanwhile."""

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        time.sleep(0.005)
        return super().loss(model, batch)


class Raising(Plain):
    """Its loss raises from its tenth call on."""

    def __init__(self) -> None:
        self.num_calls = 0

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        self.num_calls += 1
        if self.num_calls > 10:
            raise ValueError("the user's own words")
        return super().loss(model, batch)
