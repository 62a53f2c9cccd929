"""Evaluation over all members, with the same result at every number of them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from raytrain_platform.data.seeding import Purpose, seed_everything
from raytrain_platform.errors import DataError, TaskError
from raytrain_platform.spec import JobSpec
from raytrain_platform.task import SizedDataset, Task
from raytrain_platform.training.step import Share


class Evaluator:
    """Evaluates a model on a task's evaluation data, each shard on its own block of it."""

    def __init__(self, task: Task, data: SizedDataset, spec: JobSpec) -> None:
        """Prepare; ``warm_up`` finds out which metrics there are."""
        if len(data) == 0:
            raise TaskError("eval_data() has no samples: return None to evaluate nothing")
        self._task, self._data, self._spec = task, data, spec
        self._names: list[str] = []

    def warm_up(self, model: torch.nn.Module) -> None:
        """Evaluate one sample, to learn the names of the metrics: a worker with no data must know them too."""
        with _evaluating(model):
            self._names = sorted(self._task.evaluate(model, next(self._batches(range(1)))))

    def compute(self, model: torch.nn.Module, share: Share) -> None:
        """Evaluate this worker's blocks of the data.

        Args:
            model: The model, the same on every member.
            share: This worker's part in the generation.
        """
        self._vectors: list[torch.Tensor] = []
        with _evaluating(model):
            for shard, num_merges in zip(share.shards, share.merges, strict=True):
                vector = self._evaluate_shard(model, shard, share.num_leaves)
                for _ in range(num_merges):
                    vector = self._vectors.pop().add_(vector)
                self._vectors.append(vector)

    def reduce(self, share: Share) -> dict[str, float]:
        """Return each metric: the sum over all samples, divided by the count.

        Raises:
            GroupBrokenError: A member is gone.
        """
        sums_MX2 = share.reducer.sum_small(self._vectors).view(-1, 2)  # M metrics; sum and count
        return {name: float(total / count) for name, (total, count) in zip(self._names, sums_MX2, strict=True) if count}

    def _evaluate_shard(self, model: torch.nn.Module, shard: int, num_leaves: int) -> torch.Tensor:
        num_samples = len(self._data)
        block = range(shard * num_samples // num_leaves, (shard + 1) * num_samples // num_leaves)
        vector = torch.zeros(2 * len(self._names), dtype=torch.float64)
        seed_everything(Purpose.COMPUTE, self._spec.seed, shard=shard)
        for batch in self._batches(block):
            metrics = self._task.evaluate(model, batch)
            if sorted(metrics) != self._names:
                raise TaskError(
                    f"evaluate() returned the metrics {sorted(metrics)}, before {self._names}; always return the same"
                )
            values = [float(value) for name in self._names for value in metrics[name]]
            vector += torch.tensor(values, dtype=torch.float64)
        return vector

    def _batches(self, block: range) -> Iterator[Any]:
        size = max(1, self._spec.batch_size // self._spec.num_shards)
        for begin in range(block.start, block.stop, size):
            samples = []
            for index in range(begin, min(begin + size, block.stop)):
                try:
                    samples.append(self._data[index])
                except Exception as error:
                    raise DataError(f"eval_data()[{index}] raised {type(error).__name__}: {error}") from error
            yield self._task.collate(samples)


@contextlib.contextmanager
def _evaluating(model: torch.nn.Module) -> Iterator[None]:
    """Evaluation mode, without gradients."""
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        model.train()
