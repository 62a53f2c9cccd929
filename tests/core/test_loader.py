"""No sample repeated or dropped, the same bits everywhere, and nothing left running."""

from __future__ import annotations

import concurrent.futures
import contextlib
import itertools
import os
import pickle
import random
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from raytrain_platform.data.loader import Loader
from raytrain_platform.data.sampler import Sampler, num_steps_per_epoch
from raytrain_platform.data.seeding import Purpose, seed_everything
from raytrain_platform.errors import DataError, RaytrainError, TaskError
from raytrain_platform.spec import LoaderSpec

IN_PROCESS = LoaderSpec(num_workers=0)
ONE_PROCESS = LoaderSpec(num_workers=1)
TWO_PROCESSES = LoaderSpec(num_workers=2, prefetch=3)


class Numbers:
    """Samples that are their own index."""

    def __init__(self, num_samples: int) -> None:
        self.num_samples = num_samples

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, index: int, /) -> Any:
        return index


class Augmented(Numbers):
    """Samples that draw from every global generator, and say where they were read."""

    def __getitem__(self, index: int, /) -> dict[str, Any]:
        noise = torch.tensor([random.random(), np.random.rand(), torch.rand(())], dtype=torch.float64)
        return {"index": index, "noise": noise, "pid": os.getpid(), "num_threads": torch.get_num_threads()}


class Unlucky(Numbers):
    def __getitem__(self, index: int, /) -> Any:
        if index == 13:
            raise KeyError("sample 13 is torn")
        return index


class Noting(Numbers):
    """Notes every read in a file, and takes its time."""

    def __init__(self, num_samples: int, path: Path, duration_s: float = 0.0) -> None:
        super().__init__(num_samples)
        self.path, self.duration_s = path, duration_s

    def __getitem__(self, index: int, /) -> Any:
        with self.path.open("a") as file:
            file.write(f"{index}\n")
        time.sleep(self.duration_s)
        return index

    def reads(self) -> list[int]:
        return [int(line) for line in self.path.read_text().split()] if self.path.exists() else []


class Stuck(Numbers):
    """Notes the process that reads, and never returns."""

    def __init__(self, num_samples: int, path: Path) -> None:
        super().__init__(num_samples)
        self.path = path

    def __getitem__(self, index: int, /) -> Any:
        with self.path.open("a") as file:
            file.write(f"{os.getpid()}\n")
        threading.Event().wait()
        return index

    def pids(self) -> list[int]:
        return [int(line) for line in self.path.read_text().split()] if self.path.exists() else []


class Suicidal(Numbers):
    def __getitem__(self, index: int, /) -> Any:
        os.kill(os.getpid(), signal.SIGKILL)
        return index


def as_list(samples: Sequence[Any]) -> list[Any]:
    return list(samples)


def stacked(samples: Sequence[dict[str, Any]]) -> dict[str, Any]:
    return {
        "index": [sample["index"] for sample in samples],
        "noise": torch.stack([sample["noise"] for sample in samples]),
        "pid": {sample["pid"] for sample in samples},
        "num_threads": {sample["num_threads"] for sample in samples},
    }


def refuse(samples: Sequence[Any]) -> Any:
    raise ValueError("cannot pad")


def lazily(samples: Sequence[Any]) -> Any:
    return (sample for sample in samples)


def sampler_of(num_samples: int, batch_size: int = 8, num_shards: int = 4, seed: int = 5) -> Sampler:
    return Sampler(num_samples=num_samples, batch_size=batch_size, num_shards=num_shards, seed=seed)


@contextlib.contextmanager
def loading(dataset: Any, collate: Callable[..., Any], sampler: Sampler, spec: LoaderSpec) -> Iterator[Loader]:
    with contextlib.closing(Loader(dataset, collate, sampler, spec)) as loader:
        yield loader


def blocks(num_shards: int, num_workers: int) -> list[range]:
    cuts = [worker * num_shards // num_workers for worker in range(num_workers + 1)]
    return [range(begin, end) for begin, end in itertools.pairwise(cuts)]


def until(condition: Callable[[], bool], patience_s: float = 60.0) -> None:
    give_up = time.monotonic() + patience_s
    while not condition():
        assert time.monotonic() < give_up, "waited in vain"
        time.sleep(0.02)


def has_ended(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def committed(workers: Sequence[Loader], sampler: Sampler, history: Sequence[tuple[int, int, bool]]) -> list[Any]:
    """Batches of the steps that workers commit as they come and go, up to the end of an epoch.

    Args:
        workers: As many as ever work at once.
        sampler: Theirs.
        history: How many work from now on, how many steps they commit, and whether they compute one more that never
            happens because one of them is lost.
    """
    batches: list[Any] = []
    step = 0
    steps_per_epoch = num_steps_per_epoch(sampler.num_samples, sampler.batch_size)

    def compute() -> list[Any]:
        return [worker.batch(step, shard) for worker, shards in working for shard in shards]

    for num_workers, num_steps, is_next_lost in history:
        working = list(zip(workers, blocks(sampler.num_shards, num_workers), strict=False))
        for worker, shards in working:
            worker.assign(step, shards)
        for _ in range(num_steps):
            batches += compute()
            step += 1
        if is_next_lost:
            compute()
    while step % steps_per_epoch:
        batches += compute()
        step += 1
    return [batch for batch in batches if batch is not None]


def undisturbed(dataset: Any, collate: Callable[..., Any], sampler: Sampler, num_batches: int) -> list[Any]:
    """The first batches of a single worker that reads in its own process and is never resized."""
    loader = Loader(dataset, collate, sampler, IN_PROCESS)
    keys = ((step, shard) for step in itertools.count() for shard in range(sampler.num_shards))
    batches = (batch for key in keys if (batch := loader.batch(*key)) is not None)
    return list(itertools.islice(batches, num_batches))


def assert_same_batches(batches: Sequence[Any], others: Sequence[Any]) -> None:
    assert [batch["index"] for batch in batches] == [other["index"] for other in others]
    assert all(torch.equal(batch["noise"], other["noise"]) for batch, other in zip(batches, others, strict=True))


@settings(deadline=None, max_examples=50)
@given(
    num_samples=st.integers(1, 60),
    batch_size=st.integers(1, 20),
    num_shards=st.integers(1, 7),
    history=st.lists(st.tuples(st.integers(1, 6), st.integers(0, 4), st.booleans()), min_size=1, max_size=4),
)
def test_no_history_of_resizes_changes_what_is_read(num_samples, batch_size, num_shards, history):
    sampler, dataset = sampler_of(num_samples, batch_size, num_shards), Augmented(num_samples)
    workers = [Loader(dataset, stacked, sampler, IN_PROCESS) for _ in range(6)]
    batches = committed(workers, sampler, history)
    seen = Counter(index for batch in batches for index in batch["index"])
    assert len(set(seen.values())) <= 1
    assert not seen or sorted(seen) == list(range(num_samples))
    assert_same_batches(batches, undisturbed(dataset, stacked, sampler, len(batches)))


def test_augmentation_is_drawn_anew_for_every_sample_of_every_epoch():
    batches = undisturbed(Augmented(45), stacked, sampler_of(45), 48)
    noise = torch.cat([batch["noise"] for batch in batches])
    assert len(noise) == 2 * 45
    assert noise.unique().numel() == noise.numel()


@pytest.fixture(scope="module")
def three_workers() -> Iterator[list[Loader]]:
    """Three workers with a loader process each; the tests assign them shards again and again."""
    with contextlib.ExitStack() as stack:
        spec = LoaderSpec(num_workers=1, prefetch=3)
        yield [stack.enter_context(loading(Augmented(45), stacked, sampler_of(45), spec)) for _ in range(3)]


@pytest.mark.parametrize(
    "history",
    [
        [(1, 2, False), (3, 2, True), (2, 3, False)],
        [(3, 0, False), (2, 0, True), (3, 1, True), (1, 7, False)],
        [(2, 1, True), (2, 1, True), (1, 0, True), (3, 1, False)],
    ],
)
def test_loader_processes_live_on_and_read_the_same_bits(three_workers, history):
    sampler = sampler_of(45)
    pids = [worker.batch(0, 0)["pid"] for worker in three_workers]
    batches = committed(three_workers, sampler, history)
    seen = Counter(index for batch in batches for index in batch["index"])
    assert sorted(seen) == list(range(45))
    assert len(set(seen.values())) == 1
    assert_same_batches(batches, undisturbed(Augmented(45), stacked, sampler, len(batches)))
    assert set.union(*(batch["pid"] for batch in batches)) <= set.union(*pids)
    assert [worker.batch(0, 0)["pid"] for worker in three_workers] == pids
    assert os.getpid() not in set.union(*pids)


def test_samples_are_read_with_one_thread_everywhere(three_workers):
    # A product of matrices has other bits with another number of threads.
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        in_process = Loader(Augmented(45), stacked, sampler_of(45), IN_PROCESS)
        assert in_process.batch(0, 0)["num_threads"] == three_workers[0].batch(0, 0)["num_threads"] == {1}
        with pytest.raises(DataError):
            Loader(Unlucky(45), as_list, sampler_of(45, batch_size=45, num_shards=1), IN_PROCESS).batch(0, 0)
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)


def test_a_batch_may_be_cut_into_another_number_of_shards(three_workers):
    seen: list[int] = []
    for step, num_shards in enumerate((4, 3, 2, 1, 3, 3)):
        for worker, shards in zip(three_workers, blocks(num_shards, min(3, num_shards)), strict=False):
            worker.assign(step, shards, num_shards)
            seen += [index for shard in shards for index in worker.batch(step, shard)["index"]]
    for worker in three_workers:
        worker.assign(0, range(0), 4)
    assert sorted(seen) == list(range(45))


def test_another_thread_than_the_main_one_may_use_it():
    def read() -> list[Any]:
        with loading(Numbers(20), as_list, sampler_of(20), TWO_PROCESSES) as loader:
            loader.assign(0, range(4))
            return [loader.batch(step, shard) for step in range(3) for shard in range(4)]

    with concurrent.futures.ThreadPoolExecutor(1) as other:
        batches = other.submit(read).result()
    assert sorted(itertools.chain(*batches)) == list(range(20))


def test_what_is_read_ahead_is_used_after_a_resize(tmp_path):
    dataset = Noting(64, tmp_path / "reads")
    with loading(dataset, as_list, sampler_of(64), LoaderSpec(num_workers=1, prefetch=6)) as loader:
        loader.assign(0, range(2))
        until(lambda: len(dataset.reads()) == 12)  # six shards of two samples, before anyone asks
        loader.assign(1, range(4))
        batches = [loader.batch(step, shard) for step in (1, 2) for shard in range(4)]
        wanted = set(itertools.chain(*batches))
        until(lambda: wanted <= set(dataset.reads()))
        assert max(Counter(dataset.reads()).values()) == 1


def test_batches_cut_otherwise_make_room_for_those_now_needed(tmp_path):
    dataset = Noting(64, tmp_path / "reads")
    with loading(dataset, as_list, sampler_of(64), LoaderSpec(num_workers=1, prefetch=6)) as loader:
        for num_shards in (4, 2, 4):
            loader.assign(0, range(2), num_shards)
            sampler = sampler_of(64, num_shards=num_shards)
            keys = itertools.product(range(3), range(2))
            wanted = Counter(index for key in keys for index in sampler.indices(*key).tolist())
            until(lambda wanted=wanted: wanted <= Counter(dataset.reads()))
            dataset.path.unlink()


def test_a_resize_waits_for_no_more_than_the_batch_being_read(tmp_path):
    dataset = Noting(64, tmp_path / "reads", duration_s=0.05)
    with loading(dataset, as_list, sampler_of(64), LoaderSpec(num_workers=1, prefetch=8)) as loader:
        loader.assign(0, range(2))
        until(lambda: len(dataset.reads()) >= 1)
        loader.assign(0, range(2, 4))
        batch = loader.batch(0, 2)
        # The shard being read, perhaps one more that was about to be, and the one asked for.
        assert dataset.reads().index(batch[0]) <= 4


@pytest.mark.parametrize("spec", [IN_PROCESS, ONE_PROCESS])
def test_empty_shards_are_none_and_cost_nothing(spec):
    with loading(Numbers(3), as_list, sampler_of(3, batch_size=8, num_shards=8), spec) as loader:
        loader.assign(0, range(2))  # empty in every step
        assert [loader.batch(step, shard) for step in range(3) for shard in range(2)] == [None] * 6
        loader.assign(3, range(0))
        loader.assign(5, range(8))
        batches = [loader.batch(5, shard) for shard in range(8)]
        assert sorted(index for batch in batches if batch is not None for index in batch) == [0, 1, 2]


@pytest.mark.parametrize("spec", [IN_PROCESS, ONE_PROCESS])
def test_a_sample_that_raises_is_named_and_the_next_batch_can_be_read(spec):
    sampler = sampler_of(40)
    [(step, shard)] = [key for key in itertools.product(range(5), range(4)) if 13 in sampler.indices(*key)]
    with loading(Unlucky(40), as_list, sampler, spec) as loader:
        loader.assign(0, range(4))
        with pytest.raises(DataError) as caught:
            for key in itertools.product(range(5), range(4)):
                loader.batch(*key)
        assert loader.batch(step + 5, 0) is not None
    message = str(caught.value)
    assert message.startswith(
        f"the data set raised at index 13 (step {step}, shard {shard} of 4): KeyError: 'sample 13"
    )
    assert 'raise KeyError("sample 13 is torn")' in message
    assert "data/loader.py" not in message  # only the user's own frames
    assert str(pickle.loads(pickle.dumps(caught.value))) == message


@pytest.mark.parametrize("spec", [IN_PROCESS, ONE_PROCESS])
def test_a_collate_that_raises_names_its_samples(spec):
    sampler = sampler_of(40)
    with (
        loading(Numbers(40), refuse, sampler, spec) as loader,
        pytest.raises(
            DataError, match=r"^collate raised on samples \[.*\] \(step 2, shard 1 of 4\): ValueError: cannot"
        ) as caught,
    ):
        loader.batch(2, 1)
    assert str(sampler.indices(2, 1).tolist()) in str(caught.value)


def test_a_batch_that_cannot_leave_its_process_says_so():
    with loading(Numbers(40), lazily, sampler_of(40), ONE_PROCESS) as loader:
        for step in range(2):
            expected = rf"pickle cannot take \(step {step}, shard 1 of 4\); return tensors.*generator"
            with pytest.raises(DataError, match=expected):
                loader.batch(step, 1)


def test_data_that_cannot_be_sent_to_a_process_says_so():
    dataset = Numbers(40)
    dataset.num_samples = threading.Lock()  # type: ignore[assignment]
    with pytest.raises(
        TaskError, match=r"the data set \(Numbers\) or collate cannot be sent.*set loader.num_workers to 0"
    ):
        Loader(dataset, as_list, sampler_of(40), TWO_PROCESSES)


def test_a_loader_process_that_is_killed_is_named():
    with (
        loading(Suicidal(40), as_list, sampler_of(40), ONE_PROCESS) as loader,
        pytest.raises(RaytrainError, match=r"loader process \d+ died with exit code -9 in step 3, shard 2 of 4"),
    ):
        loader.batch(3, 2)


def test_closing_ends_the_processes_in_the_middle_of_a_sample(tmp_path):
    dataset = Stuck(40, tmp_path / "pids")
    loader = Loader(dataset, as_list, sampler_of(40), TWO_PROCESSES)
    loader.assign(0, range(4))
    until(lambda: len(dataset.pids()) == 2)
    began = time.monotonic()
    loader.close()
    assert time.monotonic() - began < 5
    assert all(has_ended(pid) for pid in dataset.pids())
    loader.close()


def test_a_batch_outlives_its_loader():
    with loading(Augmented(45), stacked, sampler_of(45), ONE_PROCESS) as loader:
        batch = loader.batch(0, 0)
    assert_same_batches([batch], undisturbed(Augmented(45), stacked, sampler_of(45), 1))


def read_until_killed(path: str) -> None:
    loader = Loader(Stuck(40, Path(path)), as_list, sampler_of(40), TWO_PROCESSES)
    loader.assign(0, range(4))
    threading.Event().wait()


def test_a_killed_parent_leaves_no_process_behind(tmp_path):
    dataset = Stuck(40, tmp_path / "pids")
    code = f"from {__name__} import read_until_killed; read_until_killed({str(dataset.path)!r})"
    with subprocess.Popen([sys.executable, "-c", code]) as parent:
        until(lambda: len(dataset.pids()) == 2)
        family = {process.pid for process in psutil.Process(parent.pid).children(recursive=True)}
        assert family > set(dataset.pids())
        parent.kill()
    until(lambda: all(has_ended(pid) for pid in family), patience_s=10)


def draws() -> tuple[float, float, float]:
    return random.random(), float(np.random.rand()), float(torch.rand((), dtype=torch.float64))


def test_every_purpose_seed_step_and_shard_has_its_own_numbers():
    keys = list(itertools.product(Purpose, range(3), range(3), range(3)))
    drawn = []
    for purpose, seed, step, shard in keys * 2:
        seed_everything(purpose, seed, step=step, shard=shard)
        drawn.append(draws())
    assert drawn[: len(keys)] == drawn[len(keys) :]
    assert len(set(itertools.chain(*drawn))) == 3 * len(keys)


def test_the_numbers_never_change_between_releases_processes_and_machines():
    seed_everything(Purpose.DATA, 2**63 - 1, step=10**12, shard=7)
    assert draws() == (0.4984776780402588, 0.4106366880057478, 0.6238037472841228)


def test_numpy_and_torch_draw_other_bits_though_both_run_the_same_twister():
    seed_everything(Purpose.COMPUTE, 0)
    numpy_words = np.random.randint(0, 2**32, 1000, dtype=np.uint32)
    torch_words = torch.randint(0, 2**32, (1000,)).numpy()
    assert np.intersect1d(numpy_words, torch_words).size == 0


def test_the_generators_of_a_device_are_seeded_too(monkeypatch):
    seeds: list[int] = []
    device = SimpleNamespace(manual_seed=None, manual_seed_all=seeds.append)
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch, "get_device_module", lambda: device)
    for shard in (1, 2, 1):
        seed_everything(Purpose.COMPUTE, 0, shard=shard)
    assert seeds[0] == seeds[2] != seeds[1]
