"""The promise, acted out on one machine: a node is killed, another is added, the weights stay the same."""

from __future__ import annotations

import contextlib
import tempfile
from pathlib import Path

from rich.console import Console
from rich.live import Live

from raytrain_platform.cluster.local import LocalCluster
from raytrain_platform.spec import JobSpec, load_spec
from raytrain_platform.task import load_task
from raytrain_platform.training.monitor import LineMonitor, LiveMonitor, recovery_table
from raytrain_platform.training.rehearsal import Rehearsal
from raytrain_platform.training.run import Result
from raytrain_platform.training.solo import train_alone

_KILL_AT, _ADD_AT = 0.15, 0.2
"""When the node is killed and the other one added, as shares of all steps."""


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
    assert spec.steps is not None
    with LocalCluster(num_nodes=num_nodes) as cluster, cluster.connect():
        view = _view(spec, console)
        with _shown(view, console):
            rehearsal = Rehearsal(cluster, spec, load_task(spec.task), [view])
            rehearsal.until_replicas(num_nodes).until_step(round(_KILL_AT * spec.steps))
            view.on_event("KILLING the node of the leader: SIGKILL to all its processes")
            rehearsal.kill_node_of(rank=0)
            rehearsal.until_step(round(_ADD_AT * spec.steps))
            view.on_event("ADDING a node")
            return rehearsal.add_node().until_done()


def _view(spec: JobSpec, console: Console) -> LiveMonitor | LineMonitor:
    return LiveMonitor(spec) if console.is_terminal else LineMonitor(spec, console)


def _shown(view: LiveMonitor | LineMonitor, console: Console) -> contextlib.AbstractContextManager[object]:
    if isinstance(view, LiveMonitor):
        return Live(view, console=console, refresh_per_second=8)
    return contextlib.nullcontext()
