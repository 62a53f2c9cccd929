"""Reads the batches of the shards a worker has, ahead of time, through any number of resizes."""

from __future__ import annotations

import contextlib
import itertools
import multiprocessing
import os
import pickle
import queue
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import torch

from raytrain_platform.data.sampler import Sampler
from raytrain_platform.data.seeding import Purpose, seed_everything
from raytrain_platform.errors import DataError, RaytrainError, TaskError
from raytrain_platform.spec import LoaderSpec
from raytrain_platform.task import SizedDataset

Collate = Callable[[Sequence[Any]], Any]


class _Key(NamedTuple):
    step: int
    shard: int
    num_shards: int


class Loader:
    """The batches of the shards this worker has now.

    What ``batch`` returns depends on the seed, the step, the shard and the number of shards alone: not on the worker,
    on the number of loader processes, on what was assigned before or on the order of the calls. An assignment says
    what to read ahead, so no history of resizes can repeat or drop a sample. Epochs follow one another without end.

    Any one thread may use it, not only the main one. With no loader processes, ``batch`` leaves the global generators
    of the calling process reseeded.
    """

    def __init__(self, dataset: SizedDataset, collate: Collate, sampler: Sampler, spec: LoaderSpec) -> None:
        """Start the loader processes, which takes about two seconds for the first loader of a process.

        Args:
            dataset: The training data.
            collate: Makes a batch of samples.
            sampler: Says which samples a shard has.
            spec: How many loader processes, and how far they read ahead.

        Raises:
            TaskError: The data set or ``collate`` cannot be sent to a loader process.
        """
        self._sampler = sampler
        self._reader = _Reader(dataset, collate, sampler)
        self._processes = _Processes(self._reader, spec.num_workers) if spec.num_workers else None
        self._num_ahead = spec.num_workers * spec.prefetch
        self._shards = range(0)
        self._ahead: dict[_Key, Future[Any]] = {}

    def assign(self, first_step: int, shards: range, num_shards: int | None = None) -> None:
        """From now on read these shards ahead, beginning at this step; batches under way that are needed stay.

        Args:
            first_step: Step whose batches are asked for next.
            shards: This worker's shards.
            num_shards: Slices of every batch; by default as many as before, at first as the sampler has it.
        """
        self._shards = shards
        if num_shards is not None:
            self._sampler = replace(self._sampler, num_shards=num_shards)
        for key in list(self._ahead):
            if key.step < first_step or key.shard not in shards or key.num_shards != self._sampler.num_shards:
                self._ahead.pop(key).cancel()
        self._read_ahead(first_step, shards.start)

    def batch(self, step: int, shard: int) -> Any:
        """Return the batch of one shard of one step, or None for an empty shard.

        Raises:
            DataError: The data set raised at one index, or ``collate`` raised.
            RaytrainError: A loader process died.
        """
        if not self._sampler.positions(step, shard):
            return None
        key = _Key(step, shard, self._sampler.num_shards)
        if self._processes is None:
            return self._reader.read(key)
        future = self._ahead.pop(key, None) or self._processes.submit(key)
        self._read_ahead(step, shard + 1)
        return future.result()

    def close(self) -> None:
        """End the loader processes, in the middle of a sample if need be."""
        if self._processes is not None:
            self._processes.close()

    def _read_ahead(self, step: int, shard: int) -> None:
        if self._processes is None:
            return
        for key in itertools.islice(self._keys_from(step, shard), self._num_ahead):
            # Batches kept from an earlier assignment may fill the room; these wait until those are used.
            if len(self._ahead) >= self._num_ahead:
                return
            if key not in self._ahead:
                self._ahead[key] = self._processes.submit(key)

    def _keys_from(self, first_step: int, first_shard: int) -> Iterator[_Key]:
        # A bounded number of steps: a worker may have no shards, or only shards that are empty in every step.
        for step in range(first_step, first_step + self._num_ahead + 1):
            for shard in self._shards:
                if (step, shard) >= (first_step, first_shard) and self._sampler.positions(step, shard):
                    yield _Key(step, shard, self._sampler.num_shards)


@dataclass(frozen=True)
class _Reader:
    """Reads one shard of one step, with the same result in whichever process it runs."""

    dataset: SizedDataset
    collate: Collate
    sampler: Sampler

    def read(self, key: _Key) -> Any:
        indices = replace(self.sampler, num_shards=key.num_shards).indices(key.step, key.shard).tolist()
        num_threads = torch.get_num_threads()
        # With another number of threads a product of matrices has other bits.
        torch.set_num_threads(1)
        try:
            seed_everything(Purpose.DATA, self.sampler.seed, step=key.step, shard=key.shard)
            return self._collated([self._sample(index, key) for index in indices], indices, key)
        finally:
            torch.set_num_threads(num_threads)

    def _sample(self, index: int, key: _Key) -> Any:
        try:
            return self.dataset[index]
        except Exception as error:
            raise _data_error(f"the data set raised at index {index} ({_where(key)})", error) from error

    def _collated(self, samples: list[Any], indices: list[int], key: _Key) -> Any:
        try:
            return self.collate(samples)
        except Exception as error:
            raise _data_error(f"collate raised on samples {indices} ({_where(key)})", error) from error


def _where(key: _Key) -> str:
    return f"step {key.step}, shard {key.shard} of {key.num_shards}"


def _data_error(what: str, error: Exception) -> DataError:
    trace = error.__traceback__
    # The first frame is ours; below it is the user's code, unless the call itself failed.
    users = trace.tb_next if trace is not None and trace.tb_next is not None else trace
    text = "".join(traceback.format_exception(type(error), error, users))
    return DataError(f"{what}: {type(error).__name__}: {error}\n\n{text}")


class _Processes:
    """Loader processes, each driven by one thread, which take up batches in the order they are asked for.

    Rather than a torch ``DataLoader``, because a resize must be able to take back what nobody needs any more, and to
    have the new shards read before the next batch is asked for.
    """

    def __init__(self, reader: _Reader, num_processes: int) -> None:
        self._processes = [_Process(reader) for _ in range(num_processes)]
        self._idle: queue.SimpleQueue[_Process] = queue.SimpleQueue()
        for process in self._processes:
            self._idle.put(process)
        self._threads = ThreadPoolExecutor(num_processes, thread_name_prefix="loader")

    def submit(self, key: _Key) -> Future[Any]:
        return self._threads.submit(self._read, key)

    def _read(self, key: _Key) -> Any:
        process = self._idle.get()
        try:
            return process.read(key)
        finally:
            self._idle.put(process)

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)
        for process in self._processes:
            process.kill()
        self._threads.shutdown()


class _Process:
    """One loader process, which reads one batch at a time."""

    def __init__(self, reader: _Reader) -> None:
        # Not fork: the calling process has threads of Ray, gRPC and torch, whose locks a child would inherit as they
        # happen to be, and maybe a device in use. Not spawn: 2 s to import torch in each process, where the fork server
        # imports it once and then forks in 15 ms, with its pages shared.
        context = multiprocessing.get_context("forkserver")
        # A child imports the main module of its parent, and that of a Ray worker imports ray.
        context.set_forkserver_preload([__name__, *{"ray"}.intersection(sys.modules)])
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(reader, theirs), daemon=True)
        try:
            self._process.start()
        except (TypeError, AttributeError, pickle.PicklingError) as error:
            raise TaskError(
                f"the data set ({type(reader.dataset).__name__}) or collate cannot be sent to a loader process: "
                f"{error}; keep to what pickle can take, or set loader.num_workers to 0"
            ) from error
        # Ours was the last copy but the child's: its death now ends a wait for its answer.
        theirs.close()

    def read(self, key: _Key) -> Any:
        try:
            self._connection.send(key)
            batch, error = self._connection.recv()
        except (EOFError, OSError) as broken:
            self._process.join(timeout=1.0)
            raise RaytrainError(
                f"loader process {self._process.pid} died with exit code {self._process.exitcode} in {_where(key)}; "
                f"-9 mostly means out of memory: lower loader.num_workers or loader.prefetch"
            ) from broken
        if error is not None:
            raise error
        return batch

    def kill(self) -> None:
        self._process.kill()
        self._process.join()


def _serve(reader: _Reader, connection: Connection) -> None:
    """Answer requests until the parent closes the connection or ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    with contextlib.suppress(EOFError, BrokenPipeError, ConnectionResetError):
        while True:
            key = connection.recv()
            answer: tuple[Any, DataError | None]
            try:
                answer = reader.read(key), None
            except DataError as error:
                answer = None, error
            try:
                connection.send(answer)
            except (TypeError, AttributeError, pickle.PicklingError) as error:
                what = f"collate returned what pickle cannot take ({_where(key)}); return tensors, dicts or tuples"
                connection.send((None, _data_error(what, error)))
            # Not held while the next one is read.
            del answer


def _end_with_parent() -> None:
    # A parent that was killed closes nothing in order, and the fork server lives as long as its children do.
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)
