"""What the README shows, done as a user does it: commands and scripts in processes of their own."""

from __future__ import annotations

import os
import re
import secrets
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

ROOT = Path(__file__).parents[2]
BIN = Path(sys.executable).parent

pytestmark = [pytest.mark.ray, pytest.mark.timeout(400)]


def run(*command: str, cwd: Path = ROOT, **environment: str) -> str:
    """Output of a command that must succeed."""
    clean = {name: value for name, value in os.environ.items() if name not in ("RAY_ADDRESS", "MLFLOW_TRACKING_URI")}
    done = subprocess.run(
        command, cwd=cwd, capture_output=True, text=True, timeout=380, env=clean | {"COLUMNS": "160"} | environment
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


def sha_in(output: str) -> str:
    match = re.search(r"weights sha256 (\w{64})", output)
    assert match, output[-2000:]
    return match[1]


def test_a_spec_file_and_the_cluster_give_the_same_weights(tmp_path, ray_head):
    """`raytrain train` alone, then the same by `ray job submit` on a cluster with its job server."""
    fields = ["--set", "epochs=1", "--set", f"storage={tmp_path}"]
    here = sha_in(run(str(BIN / "raytrain"), "train", "jobs/digits.yaml", *fields))
    fields[-1] += "/cluster"
    submitted = run(
        *(str(BIN / "ray"), "job", "submit", "--address", ray_head, "--working-dir", ".", "--"),
        *(str(BIN / "raytrain"), "train", "jobs/digits.yaml", *fields),
        RAY_AUTH_MODE="token",
    )
    assert sha_in(submitted) == here


@pytest.mark.parametrize("script", ["jobs/digits.py", "jobs/tabular.py"])
def test_a_script_trains(script, tmp_path):
    assert "weights" in run(sys.executable, script, HOME=str(tmp_path), PYTHONPATH=str(ROOT))


def test_the_code_in_the_readme_prints_what_it_says(tmp_path):
    readme = (ROOT / "README.md").read_text()
    code, printed = re.search(r"## Ten lines\n```python\n(.*?)```\n```\n(.*?)```", readme, re.DOTALL).groups()
    script = tmp_path / "ten_lines.py"
    script.write_text(code)
    out = run(sys.executable, str(script), HOME=str(tmp_path), PYTHONPATH=str(ROOT))
    accuracy = float(re.search(r"accuracy ([\d.]+) after", out)[1])
    # Bits depend on the processor; the shape of the output and what it means do not.
    assert re.sub(r"[\d.]+|[0-9a-f]{16}", "#", out.splitlines()[-2]) == re.sub(r"[\d.]+", "#", printed.splitlines()[0])
    assert accuracy > 0.9


@pytest.fixture(scope="module")
def ray_head(tmp_path_factory) -> Iterator[str]:
    """The address of the job server of a real `ray start --head`, with token authentication."""
    home = tmp_path_factory.mktemp("head")
    ports = _free_ports(2)
    token = home / "token"
    environment = os.environ | {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(token)}
    os.environ["RAY_AUTH_TOKEN_PATH"] = str(token)
    token.write_text(secrets.token_hex(32))
    token.chmod(0o600)
    before = {process.pid for process in psutil.process_iter()}
    command = [str(BIN / "ray"), "start", "--head", "--block", "--num-cpus=2", f"--port={ports[0]}"]
    command += ["--node-ip-address=127.0.0.1", f"--dashboard-port={ports[1]}", f"--temp-dir={_short_folder(home)}"]
    with (home / "log").open("w") as log:
        head = subprocess.Popen(command, env=environment, stdout=log, stderr=log, start_new_session=True)
    try:
        _wait_for_port(ports[1], home / "log")
        yield f"http://127.0.0.1:{ports[1]}"
    finally:
        del os.environ["RAY_AUTH_TOKEN_PATH"]
        started = [p for p in _descendants(head.pid) if p.pid not in before]
        for process in started:
            process.kill()
        psutil.wait_procs(started, timeout=10)
        head.wait(10)


def _descendants(pid: int) -> list[psutil.Process]:
    root = psutil.Process(pid)
    return [root, *root.children(recursive=True)]


def _short_folder(home: Path) -> str:
    # The path of a socket has at most 107 bytes.
    short = Path("/tmp") / f"rt-{os.getpid()}"
    short.symlink_to(home)
    return str(short)


def _free_ports(count: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [s.getsockname()[1] for s in sockets]
    for s in sockets:
        s.close()
    return ports


def _wait_for_port(port: int, log: Path) -> None:
    deadline = time.monotonic() + 90
    while time.monotonic() < deadline:
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.2)
    raise AssertionError(log.read_text()[-2000:])
