"""How far diabetes goes in a year, from a table: scikit-learn's patients, and their preprocessing with pandas.

Shapes: B patients of a batch, F number columns, C category columns, E width of an embedding.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Annotated

import numpy as np
import pandas as pd
import torch
from pydantic import ConfigDict, Field, PositiveFloat, PositiveInt
from pydantic.dataclasses import dataclass
from sklearn.datasets import load_diabetes
from torch import nn

from raytrain_platform.data.frames import FrameDataset, FramePreprocessor
from raytrain_platform.task import Loss, Task

TARGET = "target"


def load_patients(missing_fraction: float) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Read the table: the rows to train on, and the fifth of them to evaluate on.

    Args:
        missing_fraction: Share of the cells that are made missing, always the same ones: the published table is
            complete, which tables seldom are. The target stays.
    """
    patients: pd.DataFrame = load_diabetes(as_frame=True, scaled=False).frame
    # The table says "1.0" and "2.0" and not which is which: names, not quantities.
    patients["sex"] = patients["sex"].astype("int64").astype("str")
    inputs = patients.drop(columns=TARGET)
    is_missing = np.random.default_rng(seed=0).random(inputs.shape) < missing_fraction
    patients[inputs.columns] = inputs.mask(is_missing)
    is_eval = np.arange(len(patients)) % 5 == 4
    return patients[~is_eval], patients[is_eval]


class PatientNet(nn.Module):
    """Numbers and embedded categories through one hidden layer, to a prediction in the units of the target."""

    def __init__(self, preprocessor: FramePreprocessor, task: Tabular) -> None:
        """Size the layers for the preprocessed table."""
        super().__init__()
        embedding_dim = 4
        # Code 0, missing or never seen, stays the zero vector: it says nothing, rather than something untrained.
        self.embeddings = nn.ModuleList(
            nn.Embedding(num_codes, embedding_dim, padding_idx=0) for num_codes in preprocessor.num_codes
        )
        num_inputs = len(preprocessor.numbers) + embedding_dim * len(self.embeddings)
        self.layers = nn.Sequential(
            nn.Linear(num_inputs, task.hidden_dim), nn.ReLU(), nn.Dropout(task.dropout), nn.Linear(task.hidden_dim, 1)
        )
        self.target_mean, self.target_std = task.target_mean_std

    def forward(self, numbers_BF: torch.Tensor, codes_BC: torch.Tensor) -> torch.Tensor:
        """Return a prediction (B,) for each patient."""
        embedded_BE = [embed(codes_BC[:, column]) for column, embed in enumerate(self.embeddings)]
        scaled_B = self.layers(torch.cat([numbers_BF, *embedded_BE], dim=1)).squeeze(1)
        predictions_B: torch.Tensor = scaled_B * self.target_std + self.target_mean
        return predictions_B


@dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class Tabular(Task):
    """Predict the progression of the disease; the fields are the ``params`` of the spec."""

    hidden_dim: PositiveInt = 32
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.1
    lr: PositiveFloat = 3e-3

    missing_fraction: Annotated[float, Field(ge=0, le=0.5)] = 0.02
    """Share of the cells that are made missing."""

    @functools.cached_property
    def preprocessor(self) -> FramePreprocessor:
        """What was learned from the training rows; ``to_json`` keeps it beside the model."""
        return FramePreprocessor.fit(self._frames[0], exclude=(TARGET,))

    @functools.cached_property
    def target_mean_std(self) -> tuple[float, float]:
        """Mean and standard deviation of the target over the training rows."""
        target = self._frames[0][TARGET]
        return float(target.mean()), float(target.std())

    @functools.cached_property
    def _frames(self) -> tuple[pd.DataFrame, pd.DataFrame]:
        return load_patients(self.missing_fraction)

    def build_model(self) -> nn.Module:
        """Return the network, freshly initialized."""
        return PatientNet(self.preprocessor, self)

    def build_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        """Return AdamW over all parameters."""
        return torch.optim.AdamW(model.parameters(), lr=self.lr, weight_decay=0.1)

    def train_data(self) -> FrameDataset:
        """Return four fifths of the patients."""
        return FrameDataset(self._frames[0], self.preprocessor, TARGET)

    def eval_data(self) -> FrameDataset:
        """Return the other fifth."""
        return FrameDataset(self._frames[1], self.preprocessor, TARGET)

    def loss(self, model: nn.Module, batch: Mapping[str, torch.Tensor]) -> Loss:
        """Return the squared error for each patient, in units of the target's variance."""
        errors_B = model(batch["numbers"], batch["codes"]) - batch["target"]
        return Loss((errors_B / self.target_mean_std[1]).square().mean(), len(errors_B))

    def evaluate(self, model: nn.Module, batch: Mapping[str, torch.Tensor]) -> Mapping[str, tuple[torch.Tensor, float]]:
        """Return the loss, the mean absolute error in the target's units, and the explained variance R²."""
        errors_B = model(batch["numbers"], batch["codes"]) - batch["target"]
        num_patients = float(len(errors_B))
        eval_variance = float(self._frames[1][TARGET].var(ddof=0))
        return {
            "loss": ((errors_B / self.target_mean_std[1]).square().sum(), num_patients),
            "absolute_error": (errors_B.abs().sum(), num_patients),
            # Its mean over all patients is 1 - mean squared error / variance: R².
            "r2": ((1 - errors_B.square() / eval_variance).sum(), num_patients),
        }


if __name__ == "__main__":
    from raytrain_platform import train

    result = train(Tabular, name="tabular", epochs=25, batch_size=36, num_shards=4, replicas={"min": 1, "max": 2})
    print(f"R2 {result.metrics['val/r2']:.3f}, weights {result.weights_sha256[:12]}, run {result.run_id}")
