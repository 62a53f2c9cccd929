"""The promise, acted out on one machine: a node is killed, another is added, the weights stay the same."""

from __future__ import annotations

import contextlib
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path

from rich.console import Console
from rich.live import Live

from raytrain_platform.cluster.local import LocalCluster
from raytrain_platform.spec import JobSpec, load_spec
from raytrain_platform.task import load_task
from raytrain_platform.tracking.records import RecoveryRecord, StepRecord
from raytrain_platform.training.job import Job
from raytrain_platform.training.monitor import LineMonitor, LiveMonitor, recovery_table
from raytrain_platform.training.run import Result, run_job
from raytrain_platform.training.solo import train_alone

_KILL_AT, _ADD_AT = 0.15, 0.2
"""When the node is killed and the other one added, as shares of all steps."""


class _Trouble:
    """Kills the leader's node at one step, and adds a node at a later one."""

    def __init__(self, cluster: LocalCluster, num_steps: int, tell: Callable[[str], None]) -> None:
        self._cluster, self._tell = cluster, tell
        self._due = [(round(_KILL_AT * num_steps), self._kill), (round(_ADD_AT * num_steps), self._add)]
        self._job: Job | None = None

    def follow(self, job: Job) -> None:
        """Learn which job to trouble."""
        self._job = job

    def on_steps(self, records: list[StepRecord]) -> None:
        """See ``Observer``."""
        while self._due and records[-1].step >= self._due[0][0]:
            threading.Thread(target=self._due.pop(0)[1], daemon=True).start()

    def on_recovery(self, record: RecoveryRecord) -> None:
        """See ``Observer``."""

    def on_event(self, text: str) -> None:
        """See ``Observer``."""

    def _kill(self) -> None:
        assert self._job is not None and self._job.generation is not None
        leader = self._job.generation.members[0]
        self._tell(f"KILLING the node of replica {leader.replica}, the leader: SIGKILL to all its processes")
        self._cluster.kill_node(self._job.places[leader].node_id)

    def _add(self) -> None:
        self._tell("ADDING a node")
        self._cluster.add_node()


def run_demo(spec_file: Path, num_nodes: int = 3) -> int:
    """Train twice, once in peace and once in trouble, and compare.

    Args:
        spec_file: The job to train.
        num_nodes: Nodes of the local cluster, each a raylet with one CPU.

    Returns:
        The exit code: 0 if the weights are the same, bit for bit.
    """
    console = Console(highlight=False)
    with tempfile.TemporaryDirectory(prefix="raytrain-demo-") as folder:
        spec = load_spec(spec_file, {"storage": folder, "replicas.min": 1, "replicas.max": num_nodes})
        console.print(f"[bold]1.[/] an undisturbed run of {spec.steps} steps, alone in one process without Ray")
        peaceful = spec.model_copy(update={"name": f"{spec.name}-undisturbed"})
        view = _view(peaceful, console)
        with _shown(view, console):
            undisturbed = train_alone(load_task(spec.task), peaceful, view.on_steps)["weights_sha256"]
        console.print(f"[bold]2.[/] the same job on a cluster of {num_nodes} nodes, one of which will die")
        result = _train_in_trouble(spec, num_nodes, console)
    console.print(recovery_table(result.recoveries))
    is_same = result.weights_sha256 == undisturbed
    console.print(f"undisturbed  {undisturbed}\ndisturbed    {result.weights_sha256}")
    console.print("[bold green]the same weights, bit for bit[/]" if is_same else "[bold red]DIFFERENT weights[/]")
    return 0 if is_same else 1


def _train_in_trouble(spec: JobSpec, num_nodes: int, console: Console) -> Result:
    with LocalCluster(num_nodes=num_nodes) as cluster, cluster.connect():
        view = _view(spec, console)
        assert spec.steps is not None
        trouble = _Trouble(cluster, spec.steps, view.on_event)
        with _shown(view, console):
            return run_job(spec, load_task(spec.task), observers=[view, trouble], on_start=trouble.follow)


def _view(spec: JobSpec, console: Console) -> LiveMonitor | LineMonitor:
    return LiveMonitor(spec) if console.is_terminal else LineMonitor(spec, console)


def _shown(view: LiveMonitor | LineMonitor, console: Console) -> contextlib.AbstractContextManager[object]:
    if isinstance(view, LiveMonitor):
        return Live(view, console=console, refresh_per_second=8)
    return contextlib.nullcontext()
