"""Pause of torchft on Ray Train when a node dies: one SIGKILL a run, timed by the survivors.

Each run starts a fresh Ray cluster of separate raylets on loopback addresses (a head with one CPU, a node
for each replica and a spare), trains in Ray Train's torchft mode and kills the raylet of one node and all its
children at once. The pause runs from a survivor's last commit before the kill to its first without the dead
replica, less its median step. `steps_lost` are the attempts it threw away, `step_s` is a step before the kill.

    python3.11 -m venv VENV  # its own, apart from the platform's
    VENV/bin/pip install torch==2.13.0 'ray[default,train]==2.60.0' torchft==0.2.0
    VENV/bin/python benchmarks/rivals/torchft_on_ray.py --repeat 3 --out torchft.json
"""

import argparse
import contextlib
import itertools
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

HEAD_IP = "127.0.0.2"  # Ray swaps 127.0.0.1 for the machine's outside address but leaves the rest of 127/8 alone
TIMEOUT_MS = 1000  # the lighthouse's, both for heartbeats and for joining a quorum
GROUP_TIMEOUT_S = 5  # as in torchft's own example: a survivor whose allreduce misses the reset hangs this long
WARM_STEPS, AFTER_STEPS = 60, 40  # waited for before the kill and after it
RUN_LIMIT_S, HIDDEN, BATCH = 400, 512, 256  # about 25 ms of one core a step


class Step(NamedTuple):
    """One attempt at a step, as one replica saw it end."""

    at: float
    committed: bool
    participants: int


def train(config: dict[str, Any]) -> None:
    """Train one replica until its time is up, writing down every attempt at a step."""
    from datetime import timedelta

    import torch
    from ray.train import get_context
    from ray.util import get_node_ip_address
    from torch.nn.utils import parameters_to_vector, vector_to_parameters
    from torchft import Manager, Optimizer, ProcessGroupGloo
    from torchft.checkpointing.pg_transport import PGTransport

    torch.set_num_threads(1)
    torch.manual_seed(0)
    rank, timeout = get_context().get_world_rank(), timedelta(seconds=GROUP_TIMEOUT_S)
    model = torch.nn.Sequential(*(torch.nn.Linear(HIDDEN, HIDDEN) for _ in range(4)))
    sgd = torch.optim.SGD(model.parameters(), lr=1e-3)
    group = ProcessGroupGloo(timeout=timeout)
    port = os.environ["TORCHFT_LIGHTHOUSE"].rpartition(":")[2]  # the address it comes with names the machine
    manager = Manager(
        pg=group,
        min_replica_size=1,
        load_state_dict=lambda state: (model.load_state_dict(state["model"]), sgd.load_state_dict(state["sgd"])),
        state_dict=lambda: {"model": model.state_dict(), "sgd": sgd.state_dict()},
        rank=0,
        world_size=1,
        replica_id=f"replica_{rank}",
        hostname=get_node_ip_address(),
        lighthouse_addr=f"http://{HEAD_IP}:{port}",
        checkpoint_transport=PGTransport(group, timeout=timeout, device=torch.device("cpu")),
    )
    guarded, inputs = Optimizer(manager, sgd), torch.randn(BATCH, HIDDEN)
    end = time.monotonic() + RUN_LIMIT_S
    with open(Path(config["rows"]) / f"{rank}-{get_node_ip_address()}", "w", buffering=1) as rows:
        while time.monotonic() < end:
            guarded.zero_grad()
            model(inputs).square().mean().backward()
            grads = [p.grad for p in model.parameters() if p.grad is not None]
            flat = parameters_to_vector(grads)
            manager.allreduce(flat).wait()  # by hand: torchft 0.2's DDP wrapper raises when an allreduce fails
            vector_to_parameters(flat, grads)
            before = manager.current_step()
            guarded.step()
            step = Step(time.monotonic(), manager.current_step() > before, manager.num_participants())
            rows.write(json.dumps(step) + "\n")
    manager.shutdown()


def drive(address: str, rows: str, replicas: int) -> None:
    """Run the training as the driver of the cluster at `address`, until it ends or is killed."""
    import ray
    from ray.train import FailureConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchTrainer
    from ray.train.v2.torch.torchft_config import TorchftConfig

    timeouts = {"join_timeout_ms": TIMEOUT_MS, "heartbeat_timeout_ms": TIMEOUT_MS}
    ray.init(address=address, log_to_driver=False)
    TorchTrainer(
        train,
        train_loop_config={"rows": rows},
        scaling_config=ScalingConfig(num_workers=replicas, resources_per_worker={"CPU": 1, "replica": 1}),
        torch_config=TorchftConfig({"bind": f"{HEAD_IP}:0", "min_replicas": 1, **timeouts}, backend="gloo"),
        run_config=RunConfig(storage_path=f"{rows}-ray", failure_config=FailureConfig(max_failures=-1)),
    ).fit()


def read(rows: Path) -> dict[str, list[Step]]:
    """The steps so far, by the address of the node that ran them."""
    lines = {path.name.partition("-")[2]: path.read_text().split("\n")[:-1] for path in rows.iterdir()}
    return {ip: [Step(*json.loads(line)) for line in whole] for ip, whole in lines.items()}


def wait_for(ready: Callable[[], bool], what: str, limit_s: float) -> None:
    """Return as soon as `ready` says so, or raise."""
    end = time.monotonic() + limit_s
    while not ready():
        if time.monotonic() > end:
            raise TimeoutError(f"no {what} within {limit_s:.0f} s")
        time.sleep(0.1)


def descendants(root: int) -> list[int]:
    """The processes below `root`, straight from /proc."""
    children: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it may have ended meanwhile
            parent = int(stat.read_text().rpartition(")")[2].split()[1])
            children.setdefault(parent, []).append(int(stat.parent.name))
    tree = [root]
    for pid in tree:
        tree.extend(children.get(pid, []))
    return tree[1:]


def kill(pids: Iterable[int]) -> None:
    """SIGKILL each of them that still runs."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def measure(steps: list[Step], killed_at: float, replicas: int) -> tuple[float, int, float]:
    """One survivor's pause in seconds, the attempts it threw away, and its median step before the kill."""
    commits = [s for s in steps if s.committed]
    # The step in flight may still commit right after the kill, with every replica: then it's the last one before.
    first = next(i for i, s in enumerate(commits) if s.at > killed_at and s.participants < replicas)
    last_at, first_at, warm = commits[first - 1].at, commits[first].at, commits[first - WARM_STEPS : first]
    median = statistics.median(after.at - before.at for before, after in itertools.pairwise(warm))
    return first_at - last_at - median, sum(last_at < s.at < first_at for s in steps), median


def run_once(victim: int, replicas: int) -> tuple[float, int, float]:
    """Start a cluster, train, kill the node of replica `victim` and measure: the slowest survivor counts."""
    from ray.cluster_utils import Cluster

    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder, contextlib.ExitStack() as stack:
        (rows := Path(folder, "rows")).mkdir()
        os.environ["RAY_TMPDIR"] = folder  # so that no other driver on the machine takes this cluster for its own
        stack.callback(lambda: kill(descendants(os.getpid())))
        cluster = Cluster(True, head_node_args={"num_cpus": 1, "node_ip_address": HEAD_IP, "include_dashboard": False})
        ips = [f"127.0.0.{3 + i}" for i in range(replicas + 1)]
        nodes = {ip: cluster.add_node(num_cpus=1, resources={"replica": 1}, node_ip_address=ip) for ip in ips}
        subprocess.Popen([sys.executable, __file__, f"--replicas={replicas}", "--drive", cluster.address, str(rows)])

        def commits(since: float = 0.0) -> dict[str, int]:
            return {ip: sum(s.committed and s.at > since for s in steps) for ip, steps in read(rows).items()}

        wait_for(lambda: len(c := commits()) == replicas and min(c.values()) > WARM_STEPS, "steady training", 240)
        dead_ip = next(rows.glob(f"{victim}-*")).name.partition("-")[2]
        survivors = commits().keys() - {dead_ip}
        raylet = next(process.pid for kind, process in nodes[dead_ip].live_processes() if kind == "raylet")
        doomed = [raylet, *descendants(raylet)]
        killed_at = time.monotonic()
        kill(doomed)
        wait_for(lambda: min(commits(killed_at)[ip] for ip in survivors) > AFTER_STEPS, "step after the kill", 90)
        return max(measure(read(rows)[ip], killed_at, replicas) for ip in survivors)


def main() -> None:
    """Measure as often as asked and print the JSON, or be the driver that a run starts."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--repeat", type=int, default=3, help="kills to measure, each in a fresh cluster")
    parser.add_argument("--replicas", type=int, default=3)
    parser.add_argument("--out", type=Path, help="also write the JSON here")
    parser.add_argument("--drive", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.drive:
        return drive(args.drive[0], args.drive[1], args.replicas)
    os.environ |= {"RAY_TRAIN_V2_ENABLED": "1", "GLOO_SOCKET_IFNAME": "lo", "RAY_USAGE_STATS_ENABLED": "0"}
    pauses, lost, steps = zip(*(run_once(i % args.replicas, args.replicas) for i in range(args.repeat)), strict=True)
    median_s, step_s = round(statistics.median(pauses), 3), round(statistics.median(steps), 4)
    result = {"pauses_s": [round(p, 3) for p in pauses], "median_s": median_s, "steps_lost": lost, "step_s": step_s}
    print(json.dumps(result))
    if args.out:
        args.out.write_text(json.dumps(result) + "\n")


if __name__ == "__main__":
    main()
