"""Elastic PyTorch training on Ray: replicas come and go, the weights stay the same, bit for bit."""

from raytrain_platform.spec import JobSpec, load_spec
from raytrain_platform.task import Loss, Task

__all__ = ["JobSpec", "Loss", "Task", "load_spec"]
