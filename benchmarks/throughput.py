"""Undisturbed throughput against plain DDP under torchrun: the same model, data and batch, two workers, gloo."""

from __future__ import annotations

import json
import statistics

from benchmarks.report import Row, summarize, write
from benchmarks.rivals import torchrun_ddp
from benchmarks.setting import LARGE, rehearsing

NUM_STEPS, NUM_WARMUP, NUM_ROUNDS = 30, 5, 3
BATCH_SIZE = 16


def main() -> None:
    """Run the three in turn, three times."""
    step_s: dict[str, list[float]] = {"torchrun": [], "fast": [], "exact": [], "exact, 8 shards": []}
    for _ in range(NUM_ROUNDS):
        step_s["torchrun"].append(_plain())
        step_s["fast"].append(_ours("fast", 2))
        step_s["exact"].append(_ours("exact", 2))
        step_s["exact, 8 shards"].append(_ours("exact", 8))
    rows = [summarize("plain DDP under torchrun: step", step_s["torchrun"], "s")]
    goals = {"fast": ">= 0.97", "exact": ">= 0.90", "exact, 8 shards": None}
    for name, goal in goals.items():
        ratios = [plain / ours for plain, ours in zip(step_s["torchrun"], step_s[name], strict=True)]
        rows.append(Row(f"{name}: step", statistics.median(step_s[name]), "s"))
        rows.append(summarize(f"{name}: throughput relative to plain DDP", ratios, goal=goal))
    write("throughput", rows)


def _plain() -> float:
    arguments = ["--params", json.dumps(LARGE), "--batch-size", str(BATCH_SIZE), "--steps", str(NUM_STEPS)]
    found = torchrun_ddp.run([*arguments, "--warmup", str(NUM_WARMUP)])
    return float(statistics.median(found["step_s"]))


def _ours(reduction: str, num_shards: int) -> float:
    fields = {"batch_size": BATCH_SIZE, "num_shards": num_shards, "reduction": reduction}
    with rehearsing(2, LARGE, replicas={"min": 2, "max": 2}, **fields) as job:
        job.until_step(NUM_WARMUP + NUM_STEPS)
        times = [r.metrics["perf/step_s"] for r in job.steps if NUM_WARMUP < r.step <= NUM_WARMUP + NUM_STEPS]
    return statistics.median(times)
