"""The weights do not depend on how many replicas there were, nor on when they came and went."""

from __future__ import annotations

import pytest

from raytrain_platform import JobSpec, Task
from raytrain_platform.training.solo import train_alone
from tests.simulation.world import Fate, World
from tests.tasks import TASKS, Plain


def make_spec(tmp_path: object, **fields: object) -> JobSpec:
    values = {"name": "job", "task": "tests.tasks:Plain", "steps": 8, "batch_size": 32, "storage": str(tmp_path)}
    return JobSpec.model_validate(values | fields)


def train_together(task_type: type[Task], spec: JobSpec, num_replicas: int) -> dict[str, object]:
    world = World(task_type, spec, f"{spec.job_storage}/{num_replicas}", num_replicas)
    for k in range(num_replicas):
        world.add(f"r{k}", [Fate() for _ in range(spec.replicas.workers_per_replica)])
    try:
        world.until(lambda: world.result)
    finally:
        world.close()
    assert world.result is not None
    return world.result


@pytest.mark.parametrize("task_type", TASKS)
@pytest.mark.parametrize(
    "fields",
    [{}, {"clip_grad_norm": 0.1}, {"precision": "bf16"}, {"batch_size": 20, "num_shards": 5}, {"num_shards": 7}],
    ids=lambda fields: ",".join(fields) or "plain",
)
def test_every_size_ends_in_the_same_bits(task_type, fields, tmp_path):
    spec = make_spec(tmp_path, **fields)
    expected = train_alone(task_type, spec.model_copy(update={"name": "alone"}))
    for num_replicas in (2, 3, 5):
        result = train_together(task_type, spec, num_replicas)
        assert result["weights_sha256"] == expected["weights_sha256"]
        shown = ("train/loss", "train/grad_norm", "val/loss", "val/accuracy")
        assert [result["metrics"].get(k) for k in shown] == [expected["metrics"].get(k) for k in shown]


def test_a_replica_of_several_workers_is_as_exact(tmp_path):
    spec = make_spec(tmp_path, replicas={"max": 2, "workers_per_replica": 2})
    expected = train_alone(Plain, make_spec(tmp_path, name="alone"))
    assert train_together(Plain, spec, 2)["weights_sha256"] == expected["weights_sha256"]


def test_other_numbers_would_be_seen(tmp_path):
    """The oracle itself: what must change the weights changes them."""
    expected = train_alone(Plain, make_spec(tmp_path, name="alone"))["weights_sha256"]
    assert train_alone(Plain, make_spec(tmp_path, name="b", seed=1))["weights_sha256"] != expected
    assert train_alone(Plain, make_spec(tmp_path, name="c", steps=9))["weights_sha256"] != expected
    assert train_alone(Plain, make_spec(tmp_path, name="d", batch_size=48))["weights_sha256"] != expected


def test_the_fast_reduction_trains_as_well(tmp_path):
    exact = train_alone(Plain, make_spec(tmp_path, name="alone"))
    fast = train_together(Plain, make_spec(tmp_path, reduction="fast"), 3)
    assert fast["metrics"]["train/loss"] == pytest.approx(exact["metrics"]["train/loss"], rel=0.2)


def test_global_batch_and_learning_rate_stay_what_was_asked(tmp_path):
    """CASES 10: at every size each step sees the whole batch, and the schedule takes one step for it."""
    spec = make_spec(tmp_path)
    rates = {n: train_together(Plain, spec, n)["metrics"]["train/learning_rate"] for n in (8, 6, 5)}
    assert set(rates.values()) == {1e-2 * 0.98**8} or len(set(rates.values())) == 1
