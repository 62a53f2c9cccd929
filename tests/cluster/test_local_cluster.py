from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from raytrain_platform.cluster.capacity import check_cluster, is_autoscaling
from raytrain_platform.cluster.connect import attach, connect
from raytrain_platform.cluster.local import LocalCluster
from raytrain_platform.errors import InfeasibleRequestError, RaytrainError
from raytrain_platform.spec import ReplicaSpec

LOOPBACK = {"127.0.0.1", "::ffff:127.0.0.1", "::1"}

pytestmark = [pytest.mark.ray, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def cluster(start_cluster: Callable[..., LocalCluster]) -> Iterator[LocalCluster]:
    cluster = start_cluster(num_nodes=2)
    with cluster.connect():
        yield cluster


def where_a_task_runs(node_id: str) -> tuple[int, str]:
    @ray.remote(num_cpus=1, scheduling_strategy=NodeAffinitySchedulingStrategy(node_id, soft=False))
    def locate() -> tuple[int, str]:
        return os.getpid(), ray.get_runtime_context().get_node_id()

    return ray.get(locate.remote(), timeout=60)


def executes(process: psutil.Process) -> bool:
    return process.is_running() and process.status() != psutil.STATUS_ZOMBIE


def until(condition: Callable[[], bool], timeout_s: float) -> bool:
    deadline = time.monotonic() + timeout_s
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.02)
    return condition()


def is_alive(node_id: str) -> bool:
    return any(node["NodeID"] == node_id and node["Alive"] for node in ray.nodes())


def processes_naming(folder: str) -> list[psutil.Process]:
    """Processes of the whole machine that were started for a session in ``folder``."""
    found = []
    for process in psutil.process_iter(["cmdline"]):
        if any(folder in argument for argument in process.info["cmdline"] or ()) and process.pid != os.getpid():
            found.append(process)
    return found


def environment(**variables: str) -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"} | variables


def run_python(code: str, *, cwd: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", code]
    return subprocess.run(command, cwd=cwd, env=environment(**variables), capture_output=True, text=True, timeout=200)


def test_each_node_runs_tasks_in_workers_of_its_own(cluster: LocalCluster) -> None:
    for node_id in cluster.nodes():
        pid, ran_on = where_a_task_runs(node_id)
        assert ran_on == node_id
        assert cluster.node_of(pid) == node_id
    assert cluster.node_of(os.getpid()) is None


def test_everything_listens_on_loopback_only(cluster: LocalCluster) -> None:
    processes = [p for node_id in (cluster.head, *cluster.nodes()) for p in cluster.processes_of(node_id)]
    listening = {
        connection.laddr.ip
        for process in [*processes, *psutil.Process().children(), psutil.Process()]
        for connection in process.net_connections("tcp")
        if connection.status == psutil.CONN_LISTEN
    }
    assert listening
    assert listening <= LOOPBACK


def test_the_newest_cluster_of_this_machine_is_this_one_for_its_own_workers_only(cluster: LocalCluster) -> None:
    @ray.remote(num_cpus=1)
    def noted() -> str:
        return Path(os.environ["RAY_TMPDIR"], "ray", "ray_current_cluster").read_text()

    port = cluster.address.rpartition(":")[2]
    assert ray.get(noted.remote(), timeout=60) == f"127.0.0.1:{port}"
    outside = Path("/tmp/ray/ray_current_cluster")
    assert not outside.exists() or not outside.read_text().endswith(f":{port}")


def test_a_request_that_no_node_can_host_is_refused_and_one_that_fits_is_not(cluster: LocalCluster) -> None:
    assert not is_autoscaling()
    check_cluster(ReplicaSpec(workers_per_replica=2))
    with pytest.raises(InfeasibleRequestError, match=r"asks for CPU 2, but the largest of the cluster's 3 nodes has"):
        check_cluster(ReplicaSpec(resources_per_worker={"CPU": 2}))
    with pytest.raises(InfeasibleRequestError, match=r"together have room for 2"):
        check_cluster(ReplicaSpec(workers_per_replica=3))


def test_a_killed_node_is_gone_at_once_and_ray_learns_of_it(cluster: LocalCluster) -> None:
    @ray.remote(num_cpus=1)
    class Parent:
        def start_grandchild(self) -> int:
            subprocess.Popen(["sh", "-c", "sleep 600; true"], start_new_session=True)
            return os.getpid()

    doomed, other = cluster.nodes()
    on_doomed = NodeAffinitySchedulingStrategy(doomed, soft=False)
    parent = Parent.options(scheduling_strategy=on_doomed).remote()
    worker = ray.get(parent.start_grandchild.remote(), timeout=60)
    assert until(lambda: "sleep" in [process.name() for process in cluster.processes_of(doomed)], timeout_s=10)
    processes = cluster.processes_of(doomed)
    assert worker in [process.pid for process in processes]

    killed_at = time.monotonic()
    cluster.kill_node(doomed)
    assert until(lambda: not any(map(executes, processes)), timeout_s=0.5 - (time.monotonic() - killed_at))
    assert cluster.nodes() == (other,)
    with pytest.raises(KeyError):
        cluster.kill_node(doomed)

    assert until(lambda: not is_alive(doomed), timeout_s=5)
    assert is_alive(other)
    assert where_a_task_runs(other)[1] == other


def test_an_added_node_runs_tasks(cluster: LocalCluster) -> None:
    added = cluster.add_node()
    assert cluster.nodes()[-1] == added
    assert where_a_task_runs(added)[1] == added


def test_another_process_joins_by_address_and_leaves_the_cluster_running(cluster: LocalCluster, tmp_path: Path) -> None:
    code = (
        "from raytrain_platform.cluster.connect import connect\n"
        "import ray\n"
        "with connect() as outer, connect() as inner:\n"
        "    inner.close()\n"
        "    print(len([n for n in ray.nodes() if n['Alive']]), ray.is_initialized())\n"
        "print(ray.is_initialized())\n"
    )
    plain = cluster.address.replace("[::ffff:127.0.0.1]", "127.0.0.1")
    for address in (cluster.address, plain):
        joined = run_python(code, cwd=tmp_path, RAY_ADDRESS=address)
        assert joined.stdout.split() == ["3", "True", "False"], joined.stderr
    assert is_alive(cluster.head)


def test_a_connected_process_connects_again_without_ending_the_first_connection(cluster: LocalCluster) -> None:
    with connect() as again:
        assert again.address == cluster.address
    assert ray.is_initialized()


@pytest.mark.parametrize(
    ("address", "said"),
    [
        ("127.0.0.1:1", r"no Ray cluster answers at RAY_ADDRESS 127\.0\.0\.1:1: .*refused.*`ray start --head`"),
        ("http://127.0.0.1:8265", r"the head's own address.*ray job submit --address http://127\.0\.0\.1:8265"),
        ("here", r"RAY_ADDRESS is 'here': write it as host:port"),
    ],
)
def test_an_address_without_a_cluster_is_named_with_the_cure(address: str, said: str) -> None:
    started = time.monotonic()
    with pytest.raises(RaytrainError, match=said):
        attach(address)
    assert time.monotonic() - started < 10


def test_a_ray_started_by_connect_has_the_users_code_and_ends_with_the_connection(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("ANSWER = 42\n")
    script = tmp_path / "bin" / "run.py"
    script.parent.mkdir()
    script.write_text(
        "import glob, json, os, psutil, ray\n"
        "from raytrain_platform.cluster.connect import connect\n"
        "@ray.remote(num_cpus=1)\n"
        "def look():\n"
        "    import mine, torch\n"
        "    return {'answer': mine.ANSWER, 'threads': torch.get_num_threads(), 'cwd': os.getcwd()}\n"
        "with connect(num_cpus=3):\n"
        "    seen = ray.get(look.remote()) | {'cpus': ray.cluster_resources()['CPU']}\n"
        "    [raylet] = [p for p in psutil.Process().children() if p.name() == 'raylet']\n"
        "    [seen['folder']] = {a.split('=')[1] for a in raylet.cmdline() if a.startswith('--temp_dir=')}\n"
        "    seen['listening'] = sorted({c.laddr.ip for p in psutil.Process().children(recursive=True)\n"
        "                                for c in p.net_connections('tcp') if c.status == 'LISTEN'})\n"
        "seen['left'] = [p.name() for p in psutil.Process().children(recursive=True) if p.status() != 'zombie']\n"
        "print(json.dumps(seen))\n"
    )
    answer = subprocess.run(
        [sys.executable, str(script)], cwd=tmp_path, env=environment(), capture_output=True, text=True, timeout=200
    )
    assert answer.returncode == 0, answer.stderr
    seen = json.loads(answer.stdout)
    folder = Path(seen.pop("folder"))
    assert set(seen.pop("listening")) <= LOOPBACK
    assert seen == {"answer": 42, "threads": 1, "cwd": str(tmp_path), "cpus": 3.0, "left": []}
    assert not processes_naming(str(folder))
    assert any(folder.rglob("raylet.out")), "the logs stay, for they hold what the workers printed"
    shutil.rmtree(folder.parent)


def test_a_failure_inside_the_block_leaves_no_process_and_no_file(tmp_path: Path) -> None:
    code = (
        "import psutil\n"
        "from raytrain_platform.cluster.local import LocalCluster\n"
        "try:\n"
        "    with LocalCluster(1) as cluster:\n"
        "        cluster.connect()\n"
        "        raise ZeroDivisionError\n"
        "except ZeroDivisionError:\n"
        "    left = [p for p in psutil.Process().children(recursive=True) if p.status() != 'zombie']\n"
        "    print(left, cluster.folder.exists(), cluster.nodes(), sep='; ')\n"
        "    cluster.shutdown()\n"
    )
    answer = run_python(code, cwd=tmp_path)
    assert answer.stdout.strip() == "[]; False; ()", answer.stderr


def test_nodes_do_not_outlive_a_process_that_is_killed(tmp_path: Path) -> None:
    code = (
        "import time\n"
        "from raytrain_platform.cluster.local import LocalCluster\n"
        "with LocalCluster(1) as cluster:\n"
        "    print(cluster.folder, flush=True)\n"
        "    time.sleep(600)\n"
    )
    command = [sys.executable, "-c", code]
    with subprocess.Popen(command, cwd=tmp_path, env=environment(), stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        folder = process.stdout.readline().strip()
        assert len(processes_naming(folder)) >= 4
        process.send_signal(signal.SIGKILL)
    assert until(lambda: not any(map(executes, processes_naming(folder))), timeout_s=30)
    shutil.rmtree(folder)


def test_a_cluster_with_a_token_says_so_to_those_without(tmp_path: Path) -> None:
    code = (
        "import os, subprocess, sys\n"
        "from raytrain_platform.cluster.local import LocalCluster\n"
        "from raytrain_platform.cluster.connect import connect\n"
        "with LocalCluster(0) as cluster:\n"
        "    env = {k: v for k, v in os.environ.items() if not k.startswith('RAY_AUTH')}\n"
        "    env |= {'RAY_ADDRESS': cluster.address, 'RAY_NUM_REDIS_GET_RETRIES': '2'}\n"
        "    join = 'from raytrain_platform.cluster.connect import connect; connect()'\n"
        "    stranger = subprocess.run([sys.executable, '-c', join], env=env, capture_output=True, text=True)\n"
        "    print(stranger.stderr.splitlines()[-1])\n"
        "    with cluster.connect():\n"
        "        print('joined')\n"
    )
    answer = run_python(code, cwd=tmp_path, HOME=str(tmp_path), RAY_AUTH_MODE="token", RAY_AUTH_TOKEN="0123" * 8)
    refusal, joined = answer.stdout.splitlines()
    assert "admits only those who have its token; set RAY_AUTH_MODE=token" in refusal
    assert joined == "joined"


def test_a_cluster_that_is_to_have_a_token_and_has_none_is_not_started(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    monkeypatch.delenv("RAY_AUTH_TOKEN", raising=False)
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(tmp_path / "none"))
    with pytest.raises(RaytrainError, match="ray get-auth-token --generate"):
        LocalCluster(0)
