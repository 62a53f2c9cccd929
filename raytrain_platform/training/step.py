"""One step: a transaction over the whole global batch. It commits, or it never happened.

Each shard is a forward and a backward pass of its own, with its own random seed and with the buffers as they were at
the start of the step. Gradients, and beside them one short vector of everything else, are summed over all shards; then
every member takes the same decision and makes the same update.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from raytrain_platform.data.loader import Loader
from raytrain_platform.data.sampler import Sampler
from raytrain_platform.data.seeding import Purpose, seed_everything
from raytrain_platform.errors import NonFiniteLossError, TaskError
from raytrain_platform.spec import JobSpec
from raytrain_platform.task import Loss, SizedDataset, Task
from raytrain_platform.training.gradients import Gradients, Reducer
from raytrain_platform.training.state import TrainState

# Slots of the short vector that travels beside the gradients, one for each shard; then follow, for each watched
# parameter, whether the shard used it, and the running buffers.
_LOSS, _WEIGHT, _NUM_SAMPLES, _IS_FULL, _STOP, _NUM_SLOTS = range(6)


@dataclass(frozen=True)
class Share:
    """What one generation means for one worker."""

    reducer: Reducer
    shards: range
    """Shards of this worker: slices of the batch and leaves of the reduction."""

    merges: tuple[int, ...]
    """How each shard's sum is added to those before; see ``Tree.merges``."""

    num_leaves: int
    """Slices that the batch is cut into: the shards of the job, or with the fast reduction one for each worker."""


@dataclass(frozen=True)
class Totals:
    """What all members know once a step is reduced."""

    loss: float
    """Mean over the whole batch."""

    grad_norm: float
    num_samples: int
    should_stop: bool
    """Whether some member wants to stop at this boundary."""

    is_skipped: bool = False


class Stepper:
    """Carries out steps on one worker's state."""

    def __init__(self, task: Task, state: TrainState, spec: JobSpec, sampler: Sampler, loader: Loader) -> None:
        """Watch the gradients of the state's model."""
        self._task, self._state, self._spec, self._sampler, self._loader = task, state, spec, sampler, loader
        self.gradients = Gradients(state.model.parameters())
        self._buffers = list(state.model.buffers())
        self._running: list[torch.Tensor] = []

    def warm_up(self, data: SizedDataset) -> None:
        """Run one batch through the model and back: allocate, compile, and see which buffers the model updates.

        The state is as it was afterwards; the gradients are left on the parameters for the caller to use.
        """
        before = [buffer.clone() for buffer in self._buffers]
        batch = self._task.collate([data[0], data[len(data) - 1]])
        self._state.model.train()
        self.gradients.begin_step(_Alone(), (0,))
        self._backward(batch, shard=0)
        self.gradients.finish()
        # By value: batch norm updates its statistics without counting up their version.
        self._running = [b for b, value in zip(self._buffers, before, strict=True) if not torch.equal(b, value)]
        for buffer, value in zip(self._buffers, before, strict=True):
            buffer.copy_(value)

    def compute(self, share: Share) -> None:
        """Compute this worker's shards of the next step; gradients are on their way before the last one is done."""
        self._state.model.train()
        self._start_values = [buffer.clone() for buffer in self._running]
        self.gradients.begin_step(share.reducer, share.merges)
        self._vectors: list[torch.Tensor] = []
        try:
            for shard, num_merges in zip(share.shards, share.merges, strict=True):
                vector = self._compute_shard(shard, share.num_leaves)
                for _ in range(num_merges):
                    vector = self._vectors.pop().add_(vector)
                self._vectors.append(vector)
        finally:
            self._set_running(self._start_values)

    def reduce(self, wants_stop: bool) -> Totals:
        """Sum what all workers computed, up to, and without, the update.

        Args:
            wants_stop: Whether this worker wants all to stop at this boundary.

        Raises:
            GroupBrokenError: A member is gone; the step did not happen.
            NonFiniteLossError: The loss or the gradient is not finite, and the spec says to stop.
        """
        self._vectors[0][_STOP] += float(wants_stop)
        self._vector = self.gradients.sum_small(self._vectors)
        return self._total()

    def commit(self, totals: Totals) -> None:
        """Make the update that the last ``reduce`` prepared."""
        state = self._state
        if totals.is_skipped:
            state.num_skipped += 1
        else:
            num_used = len(self.gradients.parameters)
            self.gradients.assign([bool(used > 0) for used in self._vector[_NUM_SLOTS : _NUM_SLOTS + num_used]])
            state.optimizer.step()
            if state.scheduler is not None:
                state.scheduler.step()
            self._set_running(self._average_buffers())
        self.gradients.end_step()
        state.step += 1

    def _compute_shard(self, shard: int, num_leaves: int) -> torch.Tensor:
        """One forward and backward pass; returns the shard's short vector."""
        spec, step = self._spec, self._state.step
        batch = self._loader.batch(step, shard)
        self._set_running(self._start_values)
        seed_everything(Purpose.COMPUTE, spec.seed, step=step, shard=shard)
        loss = self._backward(batch, shard)
        num_samples = len(replace(self._sampler, num_shards=num_leaves).positions(step, shard))
        head = torch.tensor([*loss, num_samples, float(batch is not None), 0.0], dtype=torch.float64)
        # An empty shard has no part in the average of the buffers.
        running = [buffer.detach().to("cpu", torch.float64).flatten() * head[_IS_FULL] for buffer in self._running]
        return torch.cat([head, self._used, *running])

    def _backward(self, batch: Any, shard: int) -> tuple[float, float]:
        """Leave the gradient of the shard's summed loss in the buckets; returns that sum and its weight."""
        self.gradients.begin_shard()
        total_loss = total_weight = 0.0
        if batch is not None:
            with self._precision():
                loss = self._task.loss(self._state.model, batch)
            mean, weight = _checked(loss)
            if weight > 0:
                (mean * weight).backward()
                total_loss, total_weight = float(mean.detach()) * weight, weight
        self._used = torch.tensor(self.gradients.end_shard(), dtype=torch.float64)
        return total_loss, total_weight

    def _precision(self) -> contextlib.AbstractContextManager[Any]:
        if self._spec.precision == "bf16":
            return torch.autocast("cpu", dtype=torch.bfloat16)
        return contextlib.nullcontext()

    def _total(self) -> Totals:
        """Average the gradients, clip them, and judge the step; the same on every member."""
        head = self._vector[:_NUM_SLOTS].tolist()
        flats = self.gradients.finish()
        weight = head[_WEIGHT]
        if weight > 0:
            torch._foreach_div_(flats, weight)
        norm = math.sqrt(sum(float(n) ** 2 for n in torch._foreach_norm(flats))) if flats else 0.0
        loss = head[_LOSS] / weight if weight > 0 else 0.0
        is_finite = math.isfinite(loss) and math.isfinite(norm)
        if not is_finite and self._spec.on_nan == "stop":
            raise NonFiniteLossError(
                f"step {self._state.step}: the loss is {loss}, the norm of its gradient {norm}; lower the learning "
                "rate, set clip_grad_norm, or set on_nan: skip to leave such steps out"
            )
        limit = self._spec.clip_grad_norm
        if is_finite and limit is not None and norm > limit:
            torch._foreach_mul_(flats, limit / norm)
        return Totals(loss, norm, round(head[_NUM_SAMPLES]), head[_STOP] > 0, is_skipped=not is_finite or weight <= 0)

    def _average_buffers(self) -> list[torch.Tensor]:
        num_full = float(self._vector[_IS_FULL])
        sums = self._vector[_NUM_SLOTS + len(self.gradients.parameters) :].split([b.numel() for b in self._running])
        means = [(total / num_full).view(b.shape) for total, b in zip(sums, self._running, strict=True)]
        # Counters, such as the number of batches seen, are whole numbers.
        return [m if b.is_floating_point() else m.round() for m, b in zip(means, self._running, strict=True)]

    def _set_running(self, values: Sequence[torch.Tensor]) -> None:
        with torch.no_grad():
            for buffer, value in zip(self._running, values, strict=True):
                buffer.copy_(value)


class _Alone:
    """A reducer for a worker that is in no generation."""

    def start(self, roots: Sequence[torch.Tensor], num_elements: int) -> None:
        """The sum over one worker is what it has."""

    def finish(self) -> None:
        """Nothing is under way."""

    def sum_small(self, roots: Sequence[torch.Tensor]) -> torch.Tensor:
        """The sum over one worker is what it has."""
        return roots[0]


def _checked(loss: object) -> tuple[torch.Tensor, float]:
    """The parts of a loss, if it is one."""
    if not isinstance(loss, Loss) or not isinstance(loss.mean, torch.Tensor) or loss.mean.numel() != 1:
        raise TaskError(
            f"loss() must return Loss(mean, weight) with a scalar tensor and the count it was averaged over, "
            f"got {type(loss).__name__}: {str(loss)[:80]}"
        )
    weight = float(loss.weight)
    if weight < 0 or not math.isfinite(weight):
        raise TaskError(f"loss() returned the weight {weight}; it must be a number of samples or tokens, 0 or more")
    return loss.mean, weight
