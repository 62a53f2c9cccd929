"""Whole jobs on real Ray clusters of several nodes, with real SIGKILLs."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray

from raytrain_platform import JobSpec, Task
from raytrain_platform.cluster.local import LocalCluster
from raytrain_platform.errors import InfeasibleRequestError, JobAlreadyRunningError, JobFailedError
from raytrain_platform.tracking.history import history, recoveries
from raytrain_platform.training.job import NAMESPACE, Job, coordinator_name
from raytrain_platform.training.rehearsal import Rehearsal
from raytrain_platform.training.run import run_job
from raytrain_platform.training.solo import train_alone
from tests.tasks import Raising, Slow

pytestmark = [pytest.mark.ray, pytest.mark.timeout(300)]

NUM_NODES = 3


@pytest.fixture(scope="module")
def cluster() -> Iterator[LocalCluster]:
    with LocalCluster(num_nodes=NUM_NODES) as cluster, cluster.connect():
        yield cluster


@pytest.fixture
def start(cluster: LocalCluster, tmp_path: Path) -> Iterator[Any]:
    """Start a job on the cluster, brought back to its size."""
    for _ in range(NUM_NODES - len(cluster.nodes())):
        cluster.add_node()
    running: list[Rehearsal] = []

    def start(task_type: type[Task] = Slow, **fields: Any) -> Rehearsal:
        running.append(Rehearsal(cluster, make_spec(tmp_path, **fields), task_type))
        return running[-1]

    yield start
    for rehearsal in running:
        rehearsal.stop()


def make_spec(folder: Path, **fields: Any) -> JobSpec:
    values = {
        "name": "job",
        "task": "tests.tasks:Slow",
        "steps": 60,
        "batch_size": 24,
        "num_shards": 6,
        "replicas": {"min": 1, "max": 3},
        "storage": str(folder),
    }
    return JobSpec.model_validate(values | fields)


def undisturbed(folder: Path, **fields: Any) -> str:
    return str(train_alone(Slow, make_spec(folder, name="undisturbed", **fields))["weights_sha256"])


def test_a_killed_node_and_a_new_one_change_nothing(start, tmp_path):
    job = start(steps=400)
    job.until_replicas(3).until_step(20).kill_node_of(rank=0)
    job.until_replicas(2).add_node().until_replicas(3)
    result = job.until_done()
    assert result.weights_sha256 == undisturbed(tmp_path, steps=400)
    assert [r.cause for r in result.recoveries][1:] == ["lost", "join"]
    steps = [record.step for record in job.steps if "train/loss" in record.metrics]
    assert steps == list(range(1, 401)), "no step is lost, repeated or told twice"
    assert result.recoveries[1].pause_s < 5.0

    spec = make_spec(tmp_path, steps=400)
    logged = history(result.run_id, uri=f"sqlite:///{tmp_path}/mlflow.db")
    assert list(logged["train/loss"].dropna().index) == list(range(1, 401))
    phases = recoveries(spec)
    assert set(phases["cause"]) == {"start", "lost", "join"}


def test_without_survivors_it_goes_on_from_the_checkpoint_when_capacity_returns(start, cluster, tmp_path):
    """CASES 7: below the minimum the job waits, visibly, and goes on by itself."""
    job = start(steps=200, replicas={"min": 2, "max": 2}, checkpoint={"every_steps": 10})
    job.until_step(30)
    for node in cluster.nodes():
        cluster.kill_node(node)
    job.until_event("waiting for capacity")
    newest = job.newest_step
    job.add_node().add_node()
    result = job.until_done()
    assert result.weights_sha256 == undisturbed(tmp_path, steps=200)
    assert result.recoveries[-1].cause == "restore"
    assert newest - 20 <= result.recoveries[-1].at_step


def test_the_coordinator_may_die(start, tmp_path):
    job = start(steps=400)
    job.until_replicas(3).until_step(20)
    actor = ray.get_actor(coordinator_name("job"), NAMESPACE)
    os.kill(ray.get(actor.pid.remote()), signal.SIGKILL)
    result = job.until_done()
    assert result.weights_sha256 == undisturbed(tmp_path, steps=400)


def test_a_job_grows_and_shrinks_on_request(start, tmp_path):
    job = start(steps=600, replicas={"min": 1, "max": 3})
    job.until_replicas(3).job.resize(1)
    job.until_replicas(1).until_step(job.newest_step + 10).job.resize(2)
    job.until_replicas(2)
    assert job.until_done().weights_sha256 == undisturbed(tmp_path, steps=600)


def test_a_replica_of_two_workers_is_lost_and_replaced_as_a_whole(start, tmp_path):
    job = start(steps=500, replicas={"min": 1, "max": 1, "workers_per_replica": 2}, checkpoint={"every_steps": 20})
    job.until_step(45)
    os.kill(job.place_of(rank=1).pid, signal.SIGKILL)
    assert job.until_done().weights_sha256 == undisturbed(tmp_path, steps=500)


def test_an_error_of_user_code_stops_the_job_and_releases_everything(start, cluster):
    job = start(Raising, task="tests.tasks:Raising")
    with pytest.raises(JobFailedError, match="the user's own words") as caught:
        job.until_done()
    assert "tests/tasks.py" in str(caught.value), "with the user's own traceback"
    free = ray.available_resources()
    assert free["CPU"] == ray.cluster_resources()["CPU"]


def test_a_second_job_of_the_same_name_is_refused(start, tmp_path):
    job = start(steps=2000)
    job.until_step(1)
    with pytest.raises(JobAlreadyRunningError, match="'job' is already running"):
        Job(make_spec(tmp_path), Slow)


def test_what_no_node_can_offer_is_refused_at_once(cluster, tmp_path):
    spec = make_spec(tmp_path, replicas={"max": 1, "resources_per_worker": {"CPU": 64}})
    with pytest.raises(InfeasibleRequestError, match="64"):
        run_job(spec, Slow, observers=[])
