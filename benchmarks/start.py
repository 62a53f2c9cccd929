"""From the command to the first step, where the time goes, and what each further replica takes in memory."""

from __future__ import annotations

import itertools
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil
import yaml

from benchmarks.report import Row, summarize, write
from benchmarks.setting import SMALL, make_spec, rehearsing

NUM_STARTS = 3
MARKS = {
    "asked Ray for replica r0": "imports, Ray started",
    "generation 1": "Ray Train runs started, replicas prepared and agreed",
    "step 1:": "first step",
}


def main() -> None:
    """Start a job of three replicas some times, and grow one from one replica to three."""
    starts = [_start() for _ in range(NUM_STARTS)]
    rows = [summarize("from the command to the first step, 3 replicas", [start[-1] for start in starts], "s")]
    for k, phase in enumerate(MARKS.values()):
        rows.append(summarize(f"  {phase}", [start[k] - (start[k - 1] if k else 0.0) for start in starts], "s"))
    write("start", [*rows, *_memory()])


def _start() -> list[float]:
    """Seconds from the command until each mark was printed."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        spec = make_spec("start", SMALL, batch_size=96, num_shards=6, storage=folder, replicas={"min": 3, "max": 3})
        file = Path(folder) / "start.yaml"
        file.write_text(yaml.safe_dump(spec.model_copy(update={"steps": 2}).model_dump()))
        command = [sys.executable, "-m", "raytrain_platform", "train", str(file)]
        begin = time.monotonic()
        marks = list(MARKS)
        times = []
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            for line in process.stdout:
                if marks and marks[0] in line:
                    times.append(time.monotonic() - begin)
                    marks.pop(0)
    return times


def _memory() -> list[Row]:
    """PSS of the driver's node as a job grows from one replica to three, whose workers are on other nodes."""
    used_mb: list[float] = []
    with rehearsing(3, SMALL, batch_size=96, num_shards=6, replicas={"min": 1, "max": 3}) as job:
        job.job.resize(1)
        for count in (1, 2, 3):
            job.job.resize(count)
            job.until_replicas(count).until_step(job.newest_step + 20)
            used_mb.append(_pss_mb([*job.cluster.processes_of(job.cluster.head), psutil.Process()]))
    rows = [Row("driver's node with 1 replica: memory (PSS)", used_mb[0], "MB")]
    growth = [after - before for before, after in itertools.pairwise(used_mb)]
    return [*rows, summarize("driver's node: memory of each further replica (PSS)", growth, "MB")]


def _pss_mb(processes: list[psutil.Process]) -> float:
    return sum(process.memory_full_info().pss for process in processes) / 1e6
