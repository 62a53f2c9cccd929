"""What each worker of Ray Train's elastic rival runs, and the record it leaves of the steps it has committed."""

from __future__ import annotations

import os
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

import ray.train
import torch
from ray.train import Checkpoint
from ray.train.torch import prepare_model
from torch.nn.parallel import DistributedDataParallel

from benchmarks.rivals.torchrun_ddp import batches
from raytrain_platform.task import build_task, load_task

CHECKPOINT_EVERY = 10


class Commit(NamedTuple):
    """One step that one worker has applied."""

    worker: str
    step: int
    at_s: float
    world_size: int


def read_commits(folder: Path) -> list[Commit]:
    """Return the steps the workers have applied; those of each worker in order."""
    found = []
    for path in folder.glob("worker-*.txt"):
        # What follows the last line end is a line still being written.
        for line in path.read_text().split("\n")[:-1]:
            step, at_s, world_size = line.split()
            found.append(Commit(path.stem, int(step), float(at_s), int(world_size)))
    return found


def train_loop(config: dict[str, Any]) -> None:
    """Train one worker as Ray's guides have it: DDP, and a checkpoint every few steps to go on from.

    It trains until it is killed: the benchmark ends when it has seen enough.
    """
    torch.set_num_threads(1)
    torch.manual_seed(0)
    task = build_task(load_task(config["task"]), config["params"])
    model = prepare_model(task.build_model(), parallel_strategy_kwargs={"gradient_as_bucket_view": True})
    optimizer = task.build_optimizer(model)
    step = _resume(model, optimizer)
    context = ray.train.get_context()
    # Line buffered: a step is on record the moment it is applied, whatever happens to this process.
    with (Path(config["folder"]) / f"worker-{os.getpid()}.txt").open("a", buffering=1) as record:
        for batch in batches(task, config["batch_size"], context.get_world_rank(), context.get_world_size()):
            loss, _weight = task.loss(model, batch)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            step += 1
            record.write(f"{step} {time.monotonic()} {context.get_world_size()}\n")
            if step % CHECKPOINT_EVERY == 0:
                _report(model, optimizer, step)


def _resume(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Load the newest checkpoint, if there is one, and return its step."""
    checkpoint = ray.train.get_checkpoint()
    if checkpoint is None:
        return 0
    with checkpoint.as_directory() as folder:
        state = torch.load(Path(folder) / "state.pt", weights_only=True)
    _bare(model).load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    return int(state["step"])


def _report(model: torch.nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    if ray.train.get_context().get_world_rank() != 0:
        ray.train.report({"step": step})
        return
    with tempfile.TemporaryDirectory() as folder:
        state = {"model": _bare(model).state_dict(), "optimizer": optimizer.state_dict(), "step": step}
        torch.save(state, Path(folder) / "state.pt")
        ray.train.report({"step": step}, checkpoint=Checkpoint.from_directory(folder))


def _bare(model: torch.nn.Module) -> torch.nn.Module:
    """The model without DDP, which Ray leaves out when there is one worker."""
    return model.module if isinstance(model, DistributedDataParallel) else model
