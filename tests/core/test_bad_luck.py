"""What goes wrong in a task is told in words that name the cause and the cure."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from raytrain_platform import JobSpec, Loss
from raytrain_platform.errors import DataError, NonFiniteLossError, TaskError
from raytrain_platform.training.solo import train_alone
from tests.tasks import Plain


def make_spec(folder: object, **fields: Any) -> JobSpec:
    values = {"name": "job", "task": "tests.tasks:Plain", "steps": 6, "batch_size": 32, "storage": str(folder)}
    return JobSpec.model_validate(values | fields)


class Diverging(Plain):
    """Its loss is NaN in the third step."""

    def __init__(self) -> None:
        self.num_calls = 0

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        mean, weight = super().loss(model, batch)
        self.num_calls += 1
        # One warm-up batch, then eight shards in each step.
        return Loss(mean * float("nan") if self.num_calls == 1 + 2 * 8 + 3 else mean, weight)


def test_a_loss_that_is_nan_stops_the_job(tmp_path):
    with pytest.raises(NonFiniteLossError, match=r"step 2: the loss is nan.*on_nan: skip"):
        train_alone(Diverging, make_spec(tmp_path))


def test_or_its_step_is_skipped_and_counted(tmp_path):
    result = train_alone(Diverging, make_spec(tmp_path, on_nan="skip"))
    assert result["step"] == 6
    assert result["num_skipped"] == 1
    assert all(value == value for value in result["metrics"].values())


class Torn(Plain):
    """One of its samples cannot be read."""

    class _Data(torch.utils.data.Dataset[Any]):
        def __init__(self, data: Any) -> None:
            self._data = data

        def __len__(self) -> int:
            return len(self._data)

        def __getitem__(self, index: int) -> Any:
            if index == 41:
                raise OSError("bad sector")
            return self._data[index]

    def train_data(self) -> Any:
        return self._Data(super().train_data())

    def eval_data(self) -> Any:
        return None


def test_a_data_set_that_raises_at_one_index_is_named_with_it(tmp_path):
    with pytest.raises(DataError, match=r"index 41 \(step \d+, shard \d+ of 8\): OSError: bad sector"):
        train_alone(Torn, make_spec(tmp_path))


class BareLoss(Plain):
    def loss(self, model: nn.Module, batch: Any) -> Any:
        return super().loss(model, batch).mean


class NegativeWeight(Plain):
    def loss(self, model: nn.Module, batch: Any) -> Any:
        return super().loss(model, batch)._replace(weight=-1)


class Forgetful(Plain):
    """Its evaluation leaves a metric out of the last batch."""

    def evaluate(self, model: nn.Module, batch: Any) -> Any:
        metrics = super().evaluate(model, batch)
        if len(batch[1]) > 1:
            del metrics["accuracy"]
        return metrics


class Empty(Plain):
    def train_data(self) -> Any:
        return []


@pytest.mark.parametrize(
    ("task_type", "message"),
    [
        (BareLoss, r"loss\(\) must return Loss\(mean, weight\).*got Tensor"),
        (NegativeWeight, r"the weight -1.0; it must be a number of samples"),
        (Forgetful, r"evaluate\(\) returned the metrics \['loss'\], before \['accuracy', 'loss'\]"),
        (Empty, r"the training data has no samples"),
    ],
)
def test_a_task_that_breaks_its_contract_is_told_how(task_type, message, tmp_path):
    with pytest.raises(TaskError, match=message):
        train_alone(task_type, make_spec(tmp_path))
