"""MLflow's pages in a browser: a server on this machine for as long as it is wanted, and links into it."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from raytrain_platform.errors import RaytrainError
from raytrain_platform.tracking.connection import initialization_lock
from raytrain_platform.tracking.location import Location, locate_uri, mask_secrets

START_TIMEOUT_S = 120.0
STOP_TIMEOUT_S = 10.0
DEFAULT_PORT = 5000

# MLflow opens on its pages for language-model applications unless told otherwise.
_CLASSIC_VIEW = "workflowType=machine_learning"


def run_page(uri: str, experiment_id: str, run_id: str) -> str:
    """Return the address of a run: on its server, or on the one that ``raytrain ui`` starts."""
    server = _safe_server(uri) if _is_server(uri) else f"http://127.0.0.1:{DEFAULT_PORT}"
    return f"{server}/#/experiments/{experiment_id}/runs/{run_id}?{_CLASSIC_VIEW}"


def serve_ui(uri: str, host: str = "127.0.0.1", port: int = DEFAULT_PORT) -> None:
    """Show a tracking store in the browser until interrupted (Ctrl-C or SIGTERM).

    Args:
        uri: Tracking URI of the store; when it is a server, only its address is printed.
        host: Address to listen on; anything but loopback shows the runs to everyone who can reach it.
        port: Port to listen on.

    Raises:
        RaytrainError: There is no database yet, the port is taken, or the server does not start.
    """
    if _is_server(uri):
        print(f"MLflow is already served at {_safe_server(uri)}/#/experiments?{_CLASSIC_VIEW}")
        return
    with _sigterm_as_interrupt(), contextlib.suppress(KeyboardInterrupt), running_ui(uri, host, port) as server:
        print(f"MLflow is at {server.url} (Ctrl-C ends it)", flush=True)
        server.process.wait()
        raise RaytrainError(f"the MLflow server ended by itself:\n{server.last_words()}")


@dataclass(frozen=True)
class UiServer:
    """A running server."""

    url: str
    """Page with all experiments."""

    process: subprocess.Popen[bytes]
    """Leader of the server's process group."""

    log_file: Path
    """What the server prints."""

    def last_words(self) -> str:
        """Return the end of what the server printed, without credentials."""
        lines = self.log_file.read_text(errors="replace").splitlines()[-15:]
        return mask_secrets("\n".join(lines))


@contextlib.contextmanager
def running_ui(uri: str, host: str = "127.0.0.1", port: int = DEFAULT_PORT) -> Iterator[UiServer]:
    """Serve a tracking store while the context lasts; no process is left after it.

    Args:
        uri: Tracking URI of a database.
        host: Address to listen on.
        port: Port to listen on.

    Raises:
        RaytrainError: There is no database yet, the port is taken, or the server does not start.
    """
    location = locate_uri(uri)
    _require_database(location)
    _require_free_port(host, port)
    with tempfile.TemporaryDirectory(prefix="raytrain-ui-") as scratch:
        server = _start(location, host, port, Path(scratch) / "server.log")
        try:
            _wait_ready(server, host, port)
            yield server
        finally:
            _stop(server.process)


def _start(location: Location, host: str, port: int, log_file: Path) -> UiServer:
    is_file = location.database is not None
    env = os.environ | {
        # By the environment, not the command line, where any user of this machine could read a password.
        "MLFLOW_BACKEND_STORE_URI": location.uri,
        "MLFLOW_DISABLE_TELEMETRY": "true",
        # Eight processes and a gigabyte for features that need a language model.
        "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false",
    }
    # MLflow's own pool of 15 connections locks itself up when 16 requests log at once.
    if is_file:
        env["MLFLOW_SQLALCHEMYSTORE_POOLCLASS"] = "NullPool"
    else:
        env |= {"MLFLOW_SQLALCHEMYSTORE_POOL_SIZE": "32", "MLFLOW_SQLALCHEMYSTORE_MAX_OVERFLOW": "32"}
    command = [sys.executable, "-m", "mlflow", "server", "--host", host, "--port", str(port), "--workers", "1"]
    if location.artifact_root:
        command += ["--artifacts-destination", location.artifact_root]
    with log_file.open("wb") as log:
        # In its own session: the server is a group of processes, and killing only the first leaves the rest serving.
        process = subprocess.Popen(
            command,
            env=env,
            cwd=log_file.parent,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    return UiServer(f"{_address(host, port)}/#/experiments?{_CLASSIC_VIEW}", process, log_file)


def _wait_ready(server: UiServer, host: str, port: int) -> None:
    # Without the proxies of the environment, which do not know this machine's loopback.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    deadline_s = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline_s:
        if server.process.poll() is not None:
            raise RaytrainError(f"the MLflow server did not start:\n{server.last_words()}")
        with contextlib.suppress(OSError), opener.open(f"{_address(host, port)}/health", timeout=5):
            return
        time.sleep(0.1)
    raise RaytrainError(f"the MLflow server did not answer within {START_TIMEOUT_S:g} s:\n{server.last_words()}")


def _stop(process: subprocess.Popen[bytes]) -> None:
    for kill_signal in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, kill_signal)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(STOP_TIMEOUT_S)


def _require_database(location: Location) -> None:
    database = location.database
    if database is None:
        return
    if not database.exists():
        raise RaytrainError(f"nothing was tracked yet: {database} does not exist; run a job first, or give another URI")
    with initialization_lock(database):
        pass  # A job that makes the tables right now is done with them.


def _require_free_port(host: str, port: int) -> None:
    try:
        socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET).close()
    except OSError as error:
        raise RaytrainError(
            f"cannot serve MLflow on {host} port {port}: {os.strerror(error.errno or 0)}; choose another port"
        ) from error


def _address(host: str, port: int) -> str:
    reachable = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(host, f"[{host}]" if ":" in host else host)
    return f"http://{reachable}:{port}"


def _is_server(uri: str) -> bool:
    return uri.startswith(("http://", "https://"))


def _safe_server(uri: str) -> str:
    return mask_secrets(uri).replace("***@", "").rstrip("/")


@contextlib.contextmanager
def _sigterm_as_interrupt() -> Iterator[None]:
    """Let SIGTERM end the server too; by default it ends this process at once and leaves the server behind."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def interrupt(_signal: int, _frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    previous = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)
