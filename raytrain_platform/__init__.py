"""Elastic PyTorch training on Ray: replicas come and go, the weights stay the same, bit for bit."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from raytrain_platform.spec import JobSpec, load_spec
from raytrain_platform.task import Loss, Task

if TYPE_CHECKING:
    from raytrain_platform.training.run import Result, train

__all__ = ["JobSpec", "Loss", "Result", "Task", "load_spec", "train"]


def __getattr__(name: str) -> Any:
    # Importing Ray takes a second or two: a task, or a worker of a data loader, needs none of it.
    if name in ("Result", "train"):
        from raytrain_platform.training import run

        return getattr(run, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
