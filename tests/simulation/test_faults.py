"""Workers die at any point, come and go; the job ends in the weights of an undisturbed run."""

from __future__ import annotations

import random
from functools import cache
from pathlib import Path

import pytest

from raytrain_platform import JobSpec
from raytrain_platform.training.solo import train_alone
from tests.simulation.test_exactness import make_spec
from tests.simulation.world import Fate, World
from tests.tasks import Plain

NUM_SEEDS = 120
NUM_STEPS = 10


def spec_in(folder: Path, **fields: object) -> JobSpec:
    checkpoint = {"every_steps": 3}
    return make_spec(
        folder, steps=NUM_STEPS, num_shards=6, batch_size=24, checkpoint=checkpoint, eval_every=4, **fields
    )


@cache
def undisturbed(folder: Path) -> str:
    return str(train_alone(Plain, spec_in(folder, name="undisturbed"))["weights_sha256"])


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> str:
    return undisturbed(tmp_path_factory.mktemp("undisturbed"))


def assert_lawful(world: World) -> None:
    """No step is told twice or left out, whoever led, and steps only grow within a generation."""
    committed = [record.step for record in world.steps if "train/loss" in record.metrics]
    assert sorted(set(committed)) == list(range(1, NUM_STEPS + 1))
    assert committed == sorted(set(committed))
    assert [r.step for r in world.steps if "val/loss" in r.metrics][-1] == NUM_STEPS


@pytest.mark.parametrize("seed", range(NUM_SEEDS))
def test_any_history_of_deaths_and_joins(seed, tmp_path, expected):
    chance = random.Random(seed)
    world = World(Plain, spec_in(tmp_path), str(tmp_path / "checkpoints"), target=3)
    names = [f"r{k}" for k in range(3)]
    num_deaths = 0
    for name in names:
        world.add(name, [_fate(chance)])
    try:
        while world.result is None:
            world.until(lambda: world.result or any(not world.is_alive(name) for name in names))
            for name in [name for name in names if not world.is_alive(name)]:
                # A replacement, mortal too for the first few times.
                names.remove(name)
                names.append(f"r{len(names) + num_deaths + 1}x{num_deaths}")
                num_deaths += 1
                world.add(names[-1], [_fate(chance) if num_deaths < 4 else Fate()])
    finally:
        world.close()
    assert world.result["weights_sha256"] == expected, f"seed {seed}"
    assert_lawful(world)


def _fate(chance: random.Random) -> Fate:
    is_mortal = chance.random() < 0.6
    return Fate(chance.randrange(0, 150) if is_mortal else float("inf"), is_silent=chance.random() < 0.1)


def test_a_leaver_leaves_at_a_step_boundary(tmp_path, expected):
    world = World(Plain, spec_in(tmp_path), str(tmp_path / "checkpoints"), target=3)
    for k in range(3):
        world.add(f"r{k}")
    try:
        world.until(lambda: world.newest_step >= 2)
        leader = "r0"
        world.coordinator.retarget(2)
        world.coordinator.leave(leader)
        world.until(lambda: world.result)
        assert not world.is_alive(leader)
    finally:
        world.close()
    assert world.result["weights_sha256"] == expected
    assert_lawful(world)
