"""Connecting this process to Ray: to the one it already uses, to a cluster, or to one started here."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
from collections.abc import Callable
from types import TracebackType
from typing import Self

import ray

from raytrain_platform.errors import RaytrainError

# A replica may wait for a node for days; the run that asked must still be there then.
_WAIT_FOR_CAPACITY_S = 30 * 24 * 3600
_DEFAULTS = {
    "RAY_TRAIN_V2_ENABLED": "1",
    # Bounds how fast a Ray Train run starts, reports and ends; Ray's own 2 s doubles the time of a short run.
    "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.2",
    "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S": str(_WAIT_FOR_CAPACITY_S),
    # Saves an exporter and an actor for every replica: Ray Train restarts a run on preemption, a replica just leaves.
    "RAY_TRAIN_METRICS_ENABLED": "0",
    "RAY_TRAIN_ENABLE_PREEMPTION_WATCHER": "0",
    # Workers stay in the user's folder, so that relative paths mean the same in every one of them.
    "RAY_CHDIR_TO_TRIAL_DIR": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
}
# Set by Ray's job server for the command that it runs.
_JOB_CONFIG_VARIABLE = "RAY_JOB_CONFIG_JSON_ENV_VAR"
_PROBE_TIMEOUT_S = 5.0
TOKEN_CURE = (
    "set RAY_AUTH_MODE=token and put the token into RAY_AUTH_TOKEN or ~/.ray/auth_token (`ray get-auth-token` prints "
    "the one of an existing cluster on its head, `ray get-auth-token --generate` makes one for clusters of your own)"
)
"""What to do when Ray asks for a token."""


class Connection:
    """A live connection to Ray; closing it ends what opening it started, and only that."""

    def __init__(self, address: str, end: Callable[[], None] | None = None) -> None:
        self.address = address
        """Where Ray's head listens."""

        self._ending = contextlib.ExitStack()
        if end is not None:
            self._ending.callback(end)

    def close(self) -> None:
        """End what opening the connection started; closing twice does nothing more."""
        self._ending.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def connect(*, num_cpus: int | None = None) -> Connection:
    """Connect this process to Ray.

    In this order: the Ray this process is already connected to; the cluster that RAY_ADDRESS names, or that runs this
    process as a submitted job; else a Ray started here, on loopback only, which ends with the connection.

    The output of workers stays in Ray's log files; with RAY_LOG_TO_DRIVER=1 it is shown here as well.

    Args:
        num_cpus: CPUs of a Ray started here; by default those of the machine. A cluster has its own.

    Raises:
        RaytrainError: The cluster cannot be reached or refuses us; the message says what to do.
    """
    set_ray_defaults()
    if ray.is_initialized():
        return Connection(ray.get_runtime_context().gcs_address)
    address = os.environ.get("RAY_ADDRESS") or ("auto" if _JOB_CONFIG_VARIABLE in os.environ else "local")
    if address != "local":
        return attach(address)
    # Built on `attach`, so it cannot be imported above.
    from raytrain_platform.cluster.local import LocalCluster

    cluster = LocalCluster(num_nodes=0, head_cpus=num_cpus or os.cpu_count() or 1, keep_logs=True)
    cluster.connect()
    return Connection(cluster.address, cluster.shutdown)


def attach(address: str) -> Connection:
    """Connect this process to the cluster at ``address``.

    The runtime environment of a submitted job stays as it is: it brings the user's code to the workers. Without one,
    Ray itself puts the working directory on their import path.

    Args:
        address: ``host:port`` of the head, or ``auto`` for the cluster of this machine.

    Raises:
        RaytrainError: The cluster cannot be reached or refuses us; the message says what to do.
    """
    set_ray_defaults()
    if address != "auto":
        address = _reachable(address)
    try:
        ray.init(
            address=address,
            log_to_driver=os.environ.get("RAY_LOG_TO_DRIVER", "0") == "1",
            logging_level=logging.WARNING,
        )
    except (ray.exceptions.AuthenticationError, ConnectionError, RuntimeError, ValueError) as error:
        raise RaytrainError(_explain_refusal(address, error)) from error
    return Connection(ray.get_runtime_context().gcs_address, ray.shutdown)


def set_ray_defaults() -> None:
    """Set the switches of Ray that the platform relies on, where the user has not set them."""
    for name, value in _DEFAULTS.items():
        os.environ.setdefault(name, value)


def loopback_address(port: int | str) -> str:
    """Return the address of a head that listens on loopback only.

    A driver of Ray replaces ``127.0.0.1`` and ``localhost`` by an outer address of the machine, where such a head does
    not listen; it leaves the same address alone when it is written as IPv6 writes it.
    """
    return f"[::ffff:127.0.0.1]:{port}"


def _reachable(address: str) -> str:
    """Return the address as Ray can use it, once something answers there: Ray itself would try for minutes."""
    if "://" in address:
        raise RaytrainError(
            f"RAY_ADDRESS is {address!r}, but training needs the head's own address, as host:6379; to send a job "
            f"through the dashboard, use `ray job submit --address {address} --working-dir . -- <command>`"
        )
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit():
        raise RaytrainError(f"RAY_ADDRESS is {address!r}: write it as host:port, such as 10.0.0.5:6379")
    try:
        with socket.create_connection((host.strip("[]"), int(port)), timeout=_PROBE_TIMEOUT_S):
            pass
    except (OSError, OverflowError) as error:
        raise RaytrainError(
            f"no Ray cluster answers at RAY_ADDRESS {address}: {error}; start one there with `ray start --head`, "
            f"correct RAY_ADDRESS, or unset it to train on this machine alone"
        ) from error
    return loopback_address(port) if host in ("127.0.0.1", "localhost") else address


def _explain_refusal(address: str, error: Exception) -> str:
    if isinstance(error, ray.exceptions.AuthenticationError) or "uthenticat" in f"{error}{error.__cause__}":
        return f"the Ray cluster at {address} admits only those who have its token; {TOKEN_CURE}"
    return (
        f"cannot join the Ray cluster at {address}: {error}; check RAY_ADDRESS, and that the cluster runs the same "
        f"versions of Ray ({ray.__version__}) and Python"
    )
