"""How long the others pause while a replica that is ready joins."""

from __future__ import annotations

import statistics

from benchmarks.report import Row, summarize, write
from benchmarks.setting import LARGE, SMALL, rehearsing
from raytrain_platform.tracking.records import PHASES

NUM_JOINS = 3


def main() -> None:
    """Let a third replica join two, again and again."""
    rows = []
    for label, params, batch_size in (("0.2 M weights", SMALL, 96), ("10 M weights", LARGE, 12)):
        rows += _measure(label, params, batch_size)
    write("join", rows)


def _measure(label: str, params: dict[str, object], batch_size: int) -> list[Row]:
    replicas = {"min": 1, "max": 3}
    with rehearsing(3, params, batch_size=batch_size, num_shards=6, replicas=replicas) as job:
        job.until_replicas(3)
        for _ in range(NUM_JOINS):
            job.job.resize(2)
            job.until_replicas(2).until_step(job.newest_step + 5)
            job.job.resize(3)
            job.until_replicas(3).until_step(job.newest_step + 5)
        joins = [record for record in job.recoveries if record.cause == "join" and record.num_replicas_before]
    rows = [summarize(f"join, {label}: pause of the others", [j.pause_s for j in joins], "s", "<= 0.3")]
    for phase in PHASES:
        median = statistics.median(join.phases[phase] for join in joins)
        rows.append(Row(f"join, {label}: {phase.removesuffix('_s')}", median, "s"))
    return rows
