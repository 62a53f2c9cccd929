"""All that training changes: the model, the optimizer, the schedule, and how far they are."""

from __future__ import annotations

from typing import Any

from raytrain_platform.checkpoint.snapshot import Snapshot, digest, flatten
from raytrain_platform.data.seeding import Purpose, seed_everything
from raytrain_platform.task import Task


class TrainState:
    """The state of one worker; equal on all members of a generation after every committed step."""

    def __init__(self, task: Task, seed: int) -> None:
        """Build the initial state, the same on every worker."""
        seed_everything(Purpose.MODEL, seed)
        self.model = task.build_model()
        self.optimizer = task.build_optimizer(self.model)
        self.scheduler = task.build_scheduler(self.optimizer)
        self.step = 0
        self.num_skipped = 0

    def state_dict(self) -> dict[str, Any]:
        """Everything, as nested dicts; the tensors are the live ones."""
        return {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "scheduler": self.scheduler.state_dict() if self.scheduler is not None else None,
            "progress": {"step": self.step, "num_skipped": self.num_skipped},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over what ``state_dict`` gave."""
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        if self.scheduler is not None:
            self.scheduler.load_state_dict(state["scheduler"])
        self.step = state["progress"]["step"]
        self.num_skipped = state["progress"]["num_skipped"]

    def snapshot(self, **more: Any) -> Snapshot:
        """The state, and ``more`` beside it, as named tensors, the live ones, and a skeleton that JSON can hold."""
        tensors, skeleton = flatten(self.state_dict() | more)
        return Snapshot(step=self.step, tensors=tensors, meta=skeleton)

    def weights_sha256(self) -> str:
        """The sha256 of the model's parameters and buffers."""
        tensors, _ = flatten(self.model.state_dict())
        return digest(tensors)
