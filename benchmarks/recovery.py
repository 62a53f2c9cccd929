"""A node is killed without warning: how long nobody takes a step, beside stock Ray Train and torchft."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import venv
from pathlib import Path
from typing import Any

from benchmarks.report import Row, summarize, write
from benchmarks.setting import SMALL, rehearsing
from raytrain_platform.tracking.records import PHASES, RecoveryRecord

NUM_KILLS = 5
ROOT = Path(__file__).parents[1]
_GOALS = {"stock": ">= 100", "tuned": None}
TORCHFT_VENV = ROOT / ".venv-torchft"


def main() -> None:
    """Measure ours, then the two others with the same task, on the same machine."""
    kills, num_lost = _ours()
    pauses = [kill.pause_s for kill in kills]
    ours_s = statistics.median(pauses)
    rows = [
        summarize("ours: pause", pauses, "s", "<= 0.5"),
        Row("ours: committed steps lost", num_lost, "", goal="<= 0"),
    ]
    for phase in PHASES:
        rows.append(summarize(f"ours: {phase.removesuffix('_s')}", [kill.phases[phase] for kill in kills], "s"))
    for profile in ("stock", "tuned"):
        found = _ray_train(profile)
        label = f"Ray Train 2.60 elastic, {'its defaults' if profile == 'stock' else 'tuned'}"
        rows += [
            summarize(f"{label}: pause", found["pause_s"], "s"),
            summarize(f"{label}: committed steps lost", found["steps_lost"]),
            Row(f"{label}: pause / ours", statistics.median(found["pause_s"]) / ours_s, goal=_GOALS[profile]),
        ]
    torchft = _torchft()
    rows += [
        summarize("torchft on Ray: pause", torchft["pauses_s"], "s"),
        Row("torchft's pause / ours", statistics.median(torchft["pauses_s"]) / ours_s, goal=">= 2"),
    ]
    write("recovery", rows)


def _ours() -> tuple[list[RecoveryRecord], float]:
    """Kill the node of one rank after the other; returns the recoveries, and how many steps had to be done again."""
    with rehearsing(3, SMALL, batch_size=96, num_shards=6, replicas={"min": 1, "max": 3}) as job:
        job.until_replicas(3)
        for kill in range(NUM_KILLS):
            job.until_step(job.newest_step + 60)
            job.kill_node_of(rank=kill % 3)
            job.until_replicas(2).until_step(job.newest_step + 20)
            job.add_node().until_replicas(3)
        steps = [record.step for record in job.steps if "train/loss" in record.metrics]
        kills = [record for record in job.recoveries if record.cause in ("lost", "broken")]
    return kills, float(len(steps) - len(set(steps)))


def _ray_train(profile: str) -> dict[str, Any]:
    return _json_of(
        [sys.executable, "-m", "benchmarks.rivals.ray_train_elastic", "--profile", profile, "--repeat", "1"]
    )


def _torchft() -> dict[str, Any]:
    """In a virtual environment of its own: torchft would change the versions of ours."""
    python = TORCHFT_VENV / "bin" / "python"
    if not python.exists():
        venv.create(TORCHFT_VENV, with_pip=True)
        pinned = ROOT / "benchmarks" / "rivals" / "torchft-requirements.txt"
        subprocess.run([str(python), "-m", "pip", "install", "--quiet", "-r", str(pinned)], check=True)
    return _json_of([str(python), str(ROOT / "benchmarks" / "rivals" / "torchft_on_ray.py"), "--repeat", "3"])


def _json_of(command: list[str]) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out.json"
        subprocess.run([*command, "--out", str(out)], check=True, cwd=ROOT, env=os.environ | {"RAY_DEDUP_LOGS": "1"})
        found: dict[str, Any] = json.loads(out.read_text())
    return found
