"""Plain PyTorch: the same task under ``torchrun`` and DistributedDataParallel, as its tutorial has it.

    torchrun --standalone --nproc-per-node 2 -m benchmarks.rivals.torchrun_ddp --steps 100 --out ddp.json

``run`` does the same with nothing listening beyond this machine's loopback. Nothing here is slower than it need be:
gradients are views of DDP's buckets, and are reduced while backward still runs. A step is timed from fetching its
samples to the end of the update, on rank 0, whose all-reduce waits for the slowest worker.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

from raytrain_platform.task import Task, build_task, load_task

ROOT = Path(__file__).parents[2]


def main() -> None:
    """Train for some steps and write how long each took."""
    options = _options()
    # One thread for each worker, as for the platform's workers: more would only take the other worker's core.
    torch.set_num_threads(1)
    if options.store is None:
        dist.init_process_group("gloo")
    else:
        rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        dist.init_process_group("gloo", init_method=options.store.as_uri(), rank=rank, world_size=world_size)
    try:
        step_s, last_loss = _measure(options)
        if dist.get_rank() == 0:
            _write(options, step_s, last_loss)
    finally:
        dist.destroy_process_group()


def run(arguments: Sequence[str], *, num_workers: int = 2, bound_s: float = 600.0) -> dict[str, Any]:
    """Run this script under ``torchrun`` and return what it found.

    Args:
        arguments: The script's own arguments, without ``--out`` and ``--store``.
        num_workers: Processes to train with.
        bound_s: When to give up.

    Raises:
        RuntimeError: It failed or took longer; its own message is on standard error.
    """
    with tempfile.TemporaryDirectory(prefix="rival-") as folder:
        # Files instead of torch's TCP stores, which listen on every interface; they serve only to meet.
        launch = ["--rdzv-backend", "c10d", "--rdzv-conf", "store_type=file", "--rdzv-endpoint", f"{folder}/rendezvous"]
        launch += ["--local-addr", "127.0.0.1", "--nproc-per-node", str(num_workers), "-m", __name__]
        outputs = ["--store", f"{folder}/store", "--out", f"{folder}/found.json"]
        command = [sys.executable, "-m", "torch.distributed.run", *launch, *arguments, *outputs]
        surroundings = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
        process = subprocess.Popen(command, env=os.environ | surroundings, cwd=ROOT)
        try:
            process.wait(bound_s)
        except subprocess.TimeoutExpired:
            raise RuntimeError(f"torchrun did not end within {bound_s:g} s") from None
        finally:
            _end(process)
        if process.returncode != 0:
            raise RuntimeError(f"torchrun ended with {process.returncode}; its own message is above")
        found: dict[str, Any] = json.loads(Path(folder, "found.json").read_text())
    return found


def _end(process: subprocess.Popen[bytes]) -> None:
    """End torchrun and its workers, if they still run."""
    if process.poll() is not None:
        return
    for each in psutil.Process(process.pid).children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            each.kill()
    process.kill()
    process.wait()


def _measure(options: argparse.Namespace) -> tuple[list[float], float]:
    """Seconds of every step after the warm-up, and the last loss of this rank."""
    torch.manual_seed(0)
    task = build_task(load_task(options.task), options.params)
    model = DistributedDataParallel(task.build_model(), gradient_as_bucket_view=True)
    optimizer = task.build_optimizer(model)
    scheduler = task.build_scheduler(optimizer)
    incoming = batches(task, options.batch_size, dist.get_rank(), dist.get_world_size())
    step_s: list[float] = []
    mean = torch.zeros(())
    for _ in range(options.warmup + options.steps):
        started = time.perf_counter()
        mean, _weight = task.loss(model, next(incoming))
        optimizer.zero_grad()
        mean.backward()
        optimizer.step()
        if scheduler is not None:
            scheduler.step()
        step_s.append(time.perf_counter() - started)
    return step_s[options.warmup :], mean.item()


def batches(task: Task, batch_size: int, rank: int, world_size: int) -> Iterator[Any]:
    """Endless batches of one rank: its equal part of every global batch, in a new order each epoch.

    Args:
        task: Gives the data, and makes batches of its samples.
        batch_size: Samples of one step over all ranks.
        rank: Whose part.
        world_size: Number of ranks.
    """
    data: Any = task.train_data()
    sampler: DistributedSampler[Any] = DistributedSampler(data, world_size, rank, seed=0, drop_last=True)
    loader: DataLoader[Any] = DataLoader(
        data, batch_size=batch_size // world_size, sampler=sampler, collate_fn=task.collate, drop_last=True
    )
    for epoch in itertools.count():
        sampler.set_epoch(epoch)
        yield from loader


def _write(options: argparse.Namespace, step_s: list[float], last_loss: float) -> None:
    found = {
        "world_size": dist.get_world_size(),
        "batch_size": options.batch_size,
        "median_step_s": statistics.median(step_s),
        "samples_per_s": options.batch_size * len(step_s) / sum(step_s),
        "step_s": step_s,
        "last_loss": last_loss,
    }
    print(f"{found['median_step_s']:.4f} s a step, {found['samples_per_s']:.1f} samples/s")
    if options.out is not None:
        options.out.write_text(json.dumps(found) + "\n")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--task", default="jobs.char_lm:CharLM", help="task to train, as package.module:Class")
    parser.add_argument("--params", type=json.loads, default={}, help="keyword arguments of the task, as JSON")
    parser.add_argument("--batch-size", type=int, default=32, help="samples of one step over all workers")
    parser.add_argument("--steps", type=int, default=100, help="steps to time")
    parser.add_argument("--warmup", type=int, default=10, help="steps before the timed ones")
    parser.add_argument("--store", type=Path, help="file to meet at; by default what torchrun offers")
    parser.add_argument("--out", type=Path, help="JSON file to write")
    return parser.parse_args()


if __name__ == "__main__":
    main()
