"""The jobs that the benchmarks run, and the clusters they run on."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator
from typing import Any

from raytrain_platform.cluster.local import LocalCluster
from raytrain_platform.spec import JobSpec, parse_spec
from raytrain_platform.task import load_task
from raytrain_platform.training.rehearsal import Rehearsal

TASK = "jobs.char_lm:CharLM"

SMALL: dict[str, Any] = {}
"""Parameters of the task for about 0.2 million weights: steps of some 50 ms."""

LARGE: dict[str, Any] = {"dim": 384, "num_layers": 6, "num_heads": 6, "context": 64}
"""Parameters of the task for about 10 million weights."""

FOREVER = 1_000_000
"""Steps of a job that a benchmark stops when it has seen enough."""


def make_spec(name: str, params: dict[str, Any], **fields: Any) -> JobSpec:
    """A job of the character language model, on storage of its own."""
    return parse_spec({"name": name, "task": TASK, "params": params, "steps": FOREVER} | fields)


@contextlib.contextmanager
def rehearsing(num_nodes: int, params: dict[str, Any], **fields: Any) -> Iterator[Rehearsal]:
    """A job running on a fresh local cluster with one CPU on each node."""
    with (
        tempfile.TemporaryDirectory(prefix="raytrain-bench-", ignore_cleanup_errors=True) as storage,
        LocalCluster(num_nodes=num_nodes) as cluster,
        cluster.connect(),
    ):
        spec = make_spec("bench", params, storage=storage, **fields)
        rehearsal = Rehearsal(cluster, spec, load_task(spec.task))
        try:
            yield rehearsal
        finally:
            rehearsal.stop()
