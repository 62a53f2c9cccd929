"""Ray Train's own elasticity: one of three nodes is killed, and one is added, while a task trains.

    python -m benchmarks.rivals.ray_train_elastic --repeat 1 --out ray.json

The cluster is made of raylets on this machine, as for the platform's own recovery benchmark. ``--profile stock`` leaves
Ray's settings at their defaults; ``--profile tuned`` sets every documented one that shortens the pause (see ``TUNED``).
"""

from __future__ import annotations

import argparse
import itertools
import json
import logging
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import psutil
import ray
from ray.cluster_utils import Cluster
from ray.train import CheckpointConfig, FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer

from benchmarks.rivals.ray_train_loop import CHECKPOINT_EVERY, Commit, read_commits, train_loop

NUM_NODES = 3
# Full size and past the first checkpoints; then the failure comes half way between two, the average of all moments.
WARM_STEP = 25
# Ray Train looks at the cluster anew this often, so repeats spread their failures over it.
NODE_VIEW_PERIOD_S = 20.0
START_BOUND_S = 90.0
RECOVERY_BOUND_S = 100.0
REGROW_BOUND_S = 30.0
REPEAT_BOUND_S = 175.0
OUTCOME = "outcome.json"
Found = TypeVar("Found")


@dataclass(frozen=True)
class Profile:
    """How Ray and Ray Train are set up; without arguments, by their defaults."""

    environment: dict[str, str] = field(default_factory=dict)
    elastic_resize_monitor_interval_s: float = 60.0
    collective_timeout_s: int = 1800


STOCK = Profile()
TUNED = Profile(
    environment={
        # Poll the workers ten times as often, so that a failure is seen, and a restart begins, sooner.
        "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.2",
        # Ray Train sizes the restart by a view of the nodes that is renewed every 20 s, which no setting changes, so
        # it asks for the dead node's slot too: look again after 1 s, not 60 s, of waiting for what cannot come.
        "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S": "1",
        # The survivors' process group is torn down with a dead peer in it: do not wait 30 s for that.
        "TORCH_PROCESS_GROUP_SHUTDOWN_TIMEOUT_S": "1",
        # A raylet that refuses five checks in a row is dead: ask every 0.2 s, not every 3 s.
        "RAY_health_check_period_ms": "200",
    },
    elastic_resize_monitor_interval_s=1.0,
    collective_timeout_s=30,
)
PROFILES = {"stock": STOCK, "tuned": TUNED}
SURROUNDINGS = {
    "RAY_TRAIN_V2_ENABLED": "1",
    "PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[2]), *filter(None, [os.environ.get("PYTHONPATH")])]),
    "OMP_NUM_THREADS": "1",
    "RAY_raylet_start_wait_time_s": "60",
    # What makes Ray take 127.0.0.1 for the address of this machine, so that it listens on nothing else.
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
    "GLOO_SOCKET_IFNAME": "lo",
}


@dataclass(frozen=True)
class Outcome:
    """What one failure and one new node did to the training."""

    step_s: float
    """A normal step: the median time between two before the failure."""

    pause_s: float
    """From the last step any worker committed before the restart to the first after it, less a normal step."""

    regain_s: float
    """The same, to the first step beyond those that had been reached before."""

    steps_lost: int
    """Committed steps that had to be computed again."""

    regrow_s: float | None = None
    """From a new node being up to the first step at full size; None when the bound passed before."""


def measure(options: argparse.Namespace, folder: Path) -> Outcome:
    """Train on three nodes, kill one, add one, and say what that did to the training.

    It leaves everything running: whoever started this process ends it with all that it has started.

    Raises:
        RuntimeError: The training did not start, or did not go on, within the bounds.
    """
    head = {"num_cpus": 0, "node_ip_address": "127.0.0.1", "include_dashboard": False}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    nodes = [_add_node(cluster) for _ in range(NUM_NODES)]
    ray.init(address=cluster.address, log_to_driver=False, logging_level=logging.ERROR)
    threading.Thread(target=_trainer(options, folder).fit, daemon=True).start()
    if _wait(START_BOUND_S, lambda: _is_under_way(read_commits(folder)) or None) is None:
        raise RuntimeError(f"Ray Train did not reach step {WARM_STEP} at full size within {START_BOUND_S:g} s")
    time.sleep(options.kill_after)
    _wait(5.0, lambda: _is_between_checkpoints(read_commits(folder)) or None)
    before = {commit.worker for commit in read_commits(folder)}
    _kill(nodes[-1])
    outcome = _wait(RECOVERY_BOUND_S, lambda: _recovery(read_commits(folder), before))
    if outcome is None:
        raise RuntimeError(f"Ray Train did not get beyond where it had been within {RECOVERY_BOUND_S:g} s")
    _add_node(cluster)
    added_at_s = time.monotonic()
    grown_at_s = _wait(REGROW_BOUND_S, lambda: _full_size_at(read_commits(folder), added_at_s))
    return replace(outcome, regrow_s=None if grown_at_s is None else grown_at_s - added_at_s)


def _trainer(options: argparse.Namespace, folder: Path) -> TorchTrainer:
    profile = PROFILES[options.profile]
    # By name, since the types of Ray Train's first version are the ones it shows to a type checker.
    elastic: dict[str, Any] = {
        "num_workers": (1, NUM_NODES),
        "elastic_resize_monitor_interval_s": profile.elastic_resize_monitor_interval_s,
    }
    config = {"task": options.task, "params": options.params, "batch_size": options.batch_size, "folder": str(folder)}
    return TorchTrainer(
        train_loop,
        train_loop_config=config,
        torch_config=TorchConfig("gloo", timeout_s=profile.collective_timeout_s),
        scaling_config=ScalingConfig(**elastic),
        run_config=RunConfig(
            name="rival",
            storage_path=str(folder),
            failure_config=FailureConfig(max_failures=-1),
            checkpoint_config=CheckpointConfig(num_to_keep=2),
        ),
    )


def _is_under_way(commits: list[Commit]) -> bool:
    return any(commit.step >= WARM_STEP and commit.world_size == NUM_NODES for commit in commits)


def _is_between_checkpoints(commits: list[Commit]) -> bool:
    return max(commit.step for commit in commits) % CHECKPOINT_EVERY == CHECKPOINT_EVERY // 2


def _recovery(commits: list[Commit], before: set[str]) -> Outcome | None:
    """What the failure did, once the training is beyond where it had been; None until then.

    Args:
        commits: All steps so far.
        before: Workers that had committed steps when the node was killed; a restart replaces them all.
    """
    old = [commit for commit in commits if commit.worker in before]
    new = [commit for commit in commits if commit.worker not in before]
    reached = max(commit.step for commit in old)
    beyond_at_s = [commit.at_s for commit in new if commit.step > reached]
    if not beyond_at_s:
        return None
    one_worker = [commit.at_s for commit in old if commit.worker == old[0].worker]
    step_s = statistics.median(later - earlier for earlier, later in itertools.pairwise(one_worker))
    # A survivor may have committed a step or two after the kill: the pause begins with the last of them.
    expected_at_s = max(commit.at_s for commit in old) + step_s
    first = min(new, key=lambda commit: commit.at_s)
    return Outcome(
        step_s, first.at_s - expected_at_s, min(beyond_at_s) - expected_at_s, steps_lost=reached - (first.step - 1)
    )


def _full_size_at(commits: list[Commit], since_s: float) -> float | None:
    later = (commit.at_s for commit in commits if commit.world_size == NUM_NODES and commit.at_s > since_s)
    return min(later, default=None)


def _wait(bound_s: float, look: Callable[[], Found | None]) -> Found | None:
    """Look until there is something to see; None when the bound passes before."""
    deadline_s = time.monotonic() + bound_s
    while (found := look()) is None and time.monotonic() < deadline_s:
        time.sleep(0.02)
    return found


def _add_node(cluster: Cluster) -> list[psutil.Process]:
    """Add a node of one CPU and return the processes that were started for it."""
    me = psutil.Process()
    already = set(me.children())
    cluster.add_node(num_cpus=1, node_ip_address="127.0.0.1")
    return [process for process in me.children() if process not in already]


def _kill(node: list[psutil.Process]) -> None:
    """End every process of a node at once, without a warning to any."""
    for process in node:
        process.suspend()  # It must not start another process between the look at its children and their end.
    everyone = [*node, *(child for process in node for child in process.children(recursive=True))]
    for process in everyone:
        with suppress(psutil.NoSuchProcess):
            process.kill()


def _measure_and_exit(options: argparse.Namespace) -> NoReturn:
    """Leave the outcome in the folder, and end at once: Ray's own way to end waits for the training, which does not."""
    try:
        (options.folder / OUTCOME).write_text(json.dumps(asdict(measure(options, options.folder))))
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    os._exit(0)


def _repeat(profile: Profile, kill_after_s: float) -> dict[str, Any]:
    """Measure once in a process of its own, which is ended with everything it started."""
    with tempfile.TemporaryDirectory(prefix="rival-", ignore_cleanup_errors=True) as folder:
        environment = {**os.environ, **SURROUNDINGS, **profile.environment, "RAY_TMPDIR": folder}
        command = [sys.executable, "-m", "benchmarks.rivals.ray_train_elastic", *sys.argv[1:]]
        command += ["--folder", folder, "--kill-after", str(kill_after_s)]
        log = Path(folder, "log")
        with log.open("w") as output:
            process = subprocess.Popen(command, env=environment, stdout=output, stderr=subprocess.STDOUT)
        try:
            process.wait(REPEAT_BOUND_S)
        except subprocess.TimeoutExpired:
            raise RuntimeError(f"the measurement did not end within {REPEAT_BOUND_S:g} s") from None
        finally:
            _sweep(folder)
        if process.returncode != 0:
            raise RuntimeError(f"the measurement failed; its last words:\n{log.read_text()[-3000:]}")
        outcome: dict[str, Any] = json.loads(Path(folder, OUTCOME).read_text())
    return outcome


def _sweep(folder: str) -> None:
    """End every process that has ``folder`` as Ray's, those included whose parent is gone."""
    ours = _started_with(folder)
    deadline_s = time.monotonic() + 20
    while ours and time.monotonic() < deadline_s:
        for process in ours:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(ours, timeout=1)
        ours = _started_with(folder)


def _started_with(folder: str) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if process.environ().get("RAY_TMPDIR") == folder and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


def main() -> None:
    """Measure some times over and write what was found."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--profile", choices=sorted(PROFILES), default="tuned", help="how Ray is set up")
    parser.add_argument("--task", default="jobs.char_lm:CharLM", help="task to train, as package.module:Class")
    parser.add_argument("--params", type=json.loads, default={}, help="keyword arguments of the task, as JSON")
    parser.add_argument("--batch-size", type=int, default=96, help="samples of one step over all workers")
    parser.add_argument("--repeat", type=int, default=1, help="times to measure")
    parser.add_argument("--out", type=Path, help="JSON file to write")
    # What each repeat is started with: measure once, with this as Ray's folder, and leave ending it all to the caller.
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--kill-after", type=float, default=0.0, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.folder is not None:
        _measure_and_exit(options)
    # What was started is ended also when this process is asked to end.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    profile = PROFILES[options.profile]
    spread_s = [NODE_VIEW_PERIOD_S * (index + 0.5) / options.repeat for index in range(options.repeat)]
    outcomes = [_repeat(profile, kill_after_s) for kill_after_s in spread_s]
    found: dict[str, Any] = {name: [outcome[name] for outcome in outcomes] for name in outcomes[0]}
    found["settings"] = {"profile": options.profile, **asdict(profile)}
    print(text := json.dumps(found, indent=2))
    if options.out is not None:
        options.out.write_text(text + "\n")


if __name__ == "__main__":
    main()
