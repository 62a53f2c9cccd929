"""A Ray cluster of several nodes on one machine, whose nodes can be killed: for laptops, demos and tests."""

from __future__ import annotations

import atexit
import contextlib
import os
import shutil
import signal
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import psutil
import ray
import torch
from ray.cluster_utils import Cluster

from raytrain_platform.cluster.connect import TOKEN_CURE, Connection, attach, loopback_address, set_ray_defaults
from raytrain_platform.errors import RaytrainError

_LOOPBACK = "127.0.0.1"
_OBJECT_STORE_BYTES = 80 * 2**20
_END_TIMEOUT_S = 5.0
# A killed node refuses the check at once, so three checks find it within a second or so. A node that is merely slow,
# on a machine with more processes than cores, has the long timeout to answer.
_HEALTH_CHECKS = {
    "health_check_initial_delay_ms": 300,
    "health_check_period_ms": 300,
    "health_check_timeout_ms": 10_000,
    "health_check_failure_threshold": 3,
}


class LocalCluster:
    """A Ray cluster on this machine; every node is a raylet of its own, with its own workers.

    For laptops and tests: the nodes share the machine's processors, memory and disk, and Ray's failure detection is
    tuned to a second or so. Everything listens on loopback only. Use it as a context manager, one at a time in a
    process; should the process be killed, the kernel ends the nodes with it.
    """

    def __init__(
        self,
        num_nodes: int = 3,
        *,
        cpus_per_node: float = 1,
        head_cpus: float = 0,
        has_dashboard: bool = False,
        keep_logs: bool = False,
    ) -> None:
        """Start the head and the nodes, one after another.

        Args:
            num_nodes: Nodes beside the head.
            cpus_per_node: CPUs that each of them offers, whatever the machine has.
            head_cpus: CPUs of the head; by default it hosts coordinators but no workers.
            has_dashboard: Serve Ray's dashboard and job server too.
            keep_logs: Leave Ray's log files in ``folder`` after the shutdown.

        Raises:
            RaytrainError: Ray is to use a token and none is found.
        """
        set_ray_defaults()
        if os.environ.get("RAY_AUTH_MODE") == "token" and not _has_token():
            raise RaytrainError(f"RAY_AUTH_MODE is token, but there is no token to start a cluster with; {TOKEN_CURE}")
        self.folder = Path(tempfile.mkdtemp(prefix="raytrain-", dir="/tmp" if os.name == "posix" else None))
        """Where Ray keeps the session: sockets and logs."""

        self._cpus_per_node = cpus_per_node
        self._keep_logs = keep_logs
        self._nodes: dict[str, Any] = {}
        self._raylets: dict[str, psutil.Process] = {}
        self._is_main = threading.current_thread() is threading.main_thread()
        self._sigterm = signal.getsignal(signal.SIGTERM)
        # Outside the main thread Ray can neither handle SIGTERM nor have the kernel end the nodes with this process.
        self._cluster = Cluster(shutdown_at_exit=self._is_main)
        self._is_running = True
        atexit.register(self.shutdown)
        try:
            self._start_head(head_cpus, has_dashboard, _num_gpus() if num_nodes == 0 else 0)
            for _ in range(num_nodes):
                self.add_node()
        except BaseException:
            self.shutdown()
            raise

    @property
    def address(self) -> str:
        """Where the head listens; other processes join with it as RAY_ADDRESS."""
        return loopback_address(self._cluster.address.rpartition(":")[2])

    @property
    def dashboard_url(self) -> str:
        """Address of the dashboard and job server, of a cluster started with them."""
        return f"http://{self._cluster.webui_url}"

    @property
    def head(self) -> str:
        """Node id of the head."""
        return next(iter(self._raylets))

    def nodes(self) -> tuple[str, ...]:
        """Return the ids of the living nodes beside the head, oldest first."""
        return tuple(self._nodes)

    def connect(self) -> Connection:
        """Connect this process to the cluster."""
        return attach(self.address)

    def add_node(self) -> str:
        """Start one more node and return its id; Ray knows it by then."""
        with self._environment():
            node = self._cluster.add_node(
                num_cpus=self._cpus_per_node, node_ip_address=_LOOPBACK, object_store_memory=_OBJECT_STORE_BYTES
            )
        node_id = self._note(node)
        self._nodes[node_id] = node
        return node_id

    def kill_node(self, node_id: str) -> None:
        """SIGKILL every process of a node at once, without warning, as if its machine had lost power.

        Raises:
            KeyError: There is no such living node.
            RuntimeError: A process outlived the signal.
        """
        node = self._nodes[node_id]
        # A stopped raylet starts no more workers while its processes are counted. It goes last: nobody is to see it
        # missing and report it.
        self._raylets[node_id].suspend()
        doomed = self.processes_of(node_id)
        for process in reversed(doomed):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        self._cluster.remove_node(node, allow_graceful=False)
        del self._nodes[node_id], self._raylets[node_id]
        if alive := _outlast(doomed):
            raise RuntimeError(f"node {node_id} was killed, but {alive} still run; look at what blocks them")

    def node_of(self, pid: int) -> str | None:
        """Return the id of the node that process ``pid`` belongs to, or None if it is of no living node."""
        line = {pid, *(parent.pid for parent in psutil.Process(pid).parents())}
        return next((node_id for node_id, raylet in self._raylets.items() if raylet.pid in line), None)

    def processes_of(self, node_id: str) -> list[psutil.Process]:
        """Return the processes of a node: its raylet, and the agents, the workers and whatever these have started."""
        raylet = self._raylets[node_id]
        found: set[psutil.Process] = set()
        while more := {raylet, *raylet.children(recursive=True)} - found:
            found |= more
        return [raylet, *(found - {raylet})]

    def shutdown(self) -> None:
        """End every process of the cluster; a second call does nothing more."""
        if not self._is_running:
            return
        self._is_running = False
        atexit.unregister(self.shutdown)
        started = self._processes()
        if self._raylets and ray.is_initialized() and ray.get_runtime_context().gcs_address == self.address:
            ray.shutdown()
        with self._environment():
            self._cluster.shutdown()
        for process in _outlast(started):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        self._nodes.clear()
        self._raylets.clear()
        if self._is_main:
            signal.signal(signal.SIGTERM, self._sigterm)
        if not self._keep_logs:
            shutil.rmtree(self.folder, ignore_errors=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.shutdown()

    def _start_head(self, num_cpus: float, has_dashboard: bool, num_gpus: int) -> None:
        with self._environment():
            head = self._cluster.add_node(
                num_cpus=num_cpus,
                num_gpus=num_gpus,
                node_ip_address=_LOOPBACK,
                object_store_memory=_OBJECT_STORE_BYTES,
                temp_dir=str(self.folder / "ray"),
                include_dashboard=has_dashboard,
                dashboard_agent_listen_port=0,
                no_monitor=True,
                include_log_monitor=os.environ.get("RAY_LOG_TO_DRIVER", "0") == "1",
                _system_config=dict(_HEALTH_CHECKS),
            )
        self._note(head)

    def _note(self, node: Any) -> str:
        (raylet,) = (process.pid for kind, process in node.live_processes() if kind == "raylet")
        self._raylets[str(node.node_id)] = psutil.Process(raylet)
        return str(node.node_id)

    def _processes(self) -> list[psutil.Process]:
        """Processes of all nodes, those included that failed to start."""
        found = []
        for child in psutil.Process().children():
            with contextlib.suppress(psutil.NoSuchProcess):
                if any(str(self.folder) in argument for argument in child.cmdline()):
                    found += [child, *child.children(recursive=True)]
        return found

    @contextlib.contextmanager
    def _environment(self) -> Iterator[None]:
        """Set variables for the processes that Ray starts meanwhile, and for what it notes about them."""
        variables = {
            # Ray notes "the newest cluster of this machine" under it: ours is not for other programs to find, and
            # what runs in ours (Ray Train asks it whether a run still lives) must not find another.
            "RAY_TMPDIR": str(self.folder),
            # Says that nobody joins from another machine, so that Ray's own processes believe in a loopback address.
            "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
        }
        before = {name: os.environ.get(name) for name in variables}
        os.environ.update(variables)
        try:
            yield
        finally:
            for name, value in before.items():
                if value is None:
                    del os.environ[name]
                else:
                    os.environ[name] = value


def _outlast(processes: list[psutil.Process]) -> list[psutil.Process]:
    """Return those that still run after a grace period; none as soon as all have ended."""
    deadline = time.monotonic() + _END_TIMEOUT_S
    while (alive := [process for process in processes if _runs(process)]) and time.monotonic() < deadline:
        time.sleep(0.01)
    return alive


def _runs(process: psutil.Process) -> bool:
    """Whether the process executes; one that only waits for its parent to take note of its end does not."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _has_token() -> bool:
    """Whether Ray would find a token in one of the places where it looks."""
    if os.environ.get("RAY_AUTH_TOKEN"):
        return True
    return Path(os.environ.get("RAY_AUTH_TOKEN_PATH", "~/.ray/auth_token")).expanduser().is_file()


def _num_gpus() -> int:
    """GPUs of this machine, which Ray's local cluster would otherwise leave out."""
    accelerator = torch.accelerator.current_accelerator()
    return torch.accelerator.device_count() if accelerator and accelerator.type in ("cuda", "xpu") else 0
