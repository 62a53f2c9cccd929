"""One worker of a job, from its preparation to its end: it joins generations and takes steps in them."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from raytrain_platform.checkpoint.background import BackgroundSaver
from raytrain_platform.checkpoint.snapshot import Snapshot
from raytrain_platform.checkpoint.store import CheckpointStore
from raytrain_platform.comm.exact import ExactReducer, Layout
from raytrain_platform.comm.fast import FastReducer
from raytrain_platform.comm.group import Group
from raytrain_platform.comm.tree import Tree
from raytrain_platform.data.loader import Loader
from raytrain_platform.data.sampler import Sampler
from raytrain_platform.elastic.coordinator import Dismissal, Order
from raytrain_platform.elastic.protocol import Generation, Progress
from raytrain_platform.elastic.shards import block_of
from raytrain_platform.errors import CheckpointError, GroupBrokenError
from raytrain_platform.spec import JobSpec
from raytrain_platform.task import SizedDataset, Task
from raytrain_platform.training.evaluation import Evaluator
from raytrain_platform.training.journal import Journal
from raytrain_platform.training.link import Link
from raytrain_platform.training.state import TrainState
from raytrain_platform.training.step import Share, Stepper, Totals
from raytrain_platform.training.transfer import copy_state, encoded_bytes

logger = logging.getLogger(__name__)

_FINAL_SAVE_S = 600.0

MakeGroup = Callable[[Order, int], Group]
"""Makes the process group of a generation, given the order and this worker's rank."""


@dataclass(frozen=True)
class Surroundings:
    """What a worker needs from outside: real parts in a cluster, others in a simulation."""

    link: Link
    make_group: MakeGroup
    store: CheckpointStore
    turn: contextlib.AbstractContextManager[Any]
    """Held while this worker computes: workers that share a process also share its random generators."""


class Worker:
    """Trains as one member of a job."""

    def __init__(self, task: Task, spec: JobSpec, surroundings: Surroundings) -> None:
        """Prepare everything that does not need the others: model, data, one batch there and back."""
        self._spec, self._around, self._link = spec, surroundings, surroundings.link
        with surroundings.turn:
            self.state = TrainState(task, spec.seed)
            data = task.train_data()
            sampler = Sampler(
                num_samples=len(data), batch_size=spec.batch_size, num_shards=spec.num_shards, seed=spec.seed
            )
            self._num_steps = spec.num_steps(len(data))
            self._loader = Loader(data, task.collate, sampler, spec.loader)
            self._stepper = Stepper(task, self.state, spec, sampler, self._loader)
            eval_data = task.eval_data()
            self._evaluator = Evaluator(task, eval_data, spec) if eval_data is not None else None
            self._staging: torch.Tensor | None = self._warm_up(data)
        self._progress = Progress(-1)
        self._journal = Journal(surroundings.link)
        self._saver: BackgroundSaver | None = None

    def run(self) -> Dismissal | None:
        """Take part until the job is done.

        Returns:
            Why this worker was let go before the end; None when it has carried the job to the end itself.
        """
        broke = False
        while True:
            self._journal.stopped()
            answer = self._link.arrive(self._progress, broke)
            if isinstance(answer, Dismissal):
                return answer
            try:
                with self._join(answer) as share:
                    if self._train(answer.generation, share):
                        return None
                broke = False
            except GroupBrokenError as error:
                logger.info("generation %d broke at step %d: %s", answer.generation.number, self.state.step, error)
                broke = True

    def close(self) -> None:
        """Let go of everything, after what is being saved is saved."""
        if self._saver is not None:
            self._saver.close(timeout_s=60)
        self._link.close()
        self._loader.close()
        self._stepper.gradients.close()

    def _warm_up(self, data: SizedDataset) -> torch.Tensor:
        """Run a batch and an update on values that are put back afterwards.

        Returns:
            Memory to receive the state into, already mapped.
        """
        state = self.state
        initial = {name: tensor.clone() for name, tensor in state.model.state_dict().items()}
        fresh_optimizer = state.optimizer.state_dict()
        self._stepper.warm_up(data)
        self._stepper.gradients.assign([True] * len(self._stepper.gradients.parameters))
        state.optimizer.step()
        self._stepper.gradients.end_step()
        staging = torch.zeros(encoded_bytes(state.snapshot()) + 2**16, dtype=torch.uint8)
        state.optimizer.load_state_dict(fresh_optimizer)
        state.model.load_state_dict(initial)
        if self._evaluator is not None:
            self._evaluator.warm_up(state.model)
        return staging

    @contextlib.contextmanager
    def _join(self, order: Order) -> Iterator[Share]:
        """The group of a generation, everybody in it at the same step."""
        generation = order.generation
        rank = generation.members.index(self._link.member)
        group = self._around.make_group(order, rank)
        self._link.on_over(group.abandon)
        try:
            self._journal.agreed()
            group.connect()
            self._journal.regrouped()
            self._synchronize(generation, group)
            self._journal.synchronized()
            share = self._share(group)
            self._loader.assign(self.state.step, share.shards, share.num_leaves)
            yield share
        finally:
            group.close()

    def _share(self, group: Group) -> Share:
        num_leaves = self._spec.num_shards if self._spec.reduction == "exact" else group.size
        tree = Tree(num_leaves)
        blocks = tuple(block_of(rank, group.size, num_leaves) for rank in range(group.size))
        reducer = ExactReducer(group, Layout(tree, blocks)) if self._spec.reduction == "exact" else FastReducer(group)
        return Share(reducer, blocks[group.rank], tree.merges(blocks[group.rank]), num_leaves)

    def _synchronize(self, generation: Generation, group: Group) -> None:
        """Bring every member to the step of the furthest one, from storage if nobody holds any state."""
        source = generation.source
        behind = [rank for rank, progress in enumerate(generation.progress) if progress.step < generation.step]
        if generation.step < 0:
            behind = [rank for rank in range(group.size) if rank != source]
            if group.rank == source:
                self._restore()
        if behind:
            snapshot = self._snapshot() if group.rank == source else None
            received = copy_state(group, source, behind, snapshot, self._staging)
            if received is not None:
                self._take_over(received)
        self._progress = Progress(self.state.step, generation.evaluated)

    def _restore(self) -> None:
        loaded = self._around.store.load_newest()
        for reason in loaded.skipped:
            logger.warning("skipped a checkpoint: %s", reason)
        if loaded.snapshot is not None:
            logger.info("going on from the checkpoint of step %d", loaded.snapshot.step)
            self._take_over(loaded.snapshot)

    def _snapshot(self) -> Snapshot:
        # With the log lines that the coordinator has not confirmed: whoever takes over the state can hand them over.
        return self.state.snapshot(lines=self._link.unconfirmed())

    def _take_over(self, snapshot: Snapshot) -> None:
        state = snapshot.state()
        self.state.load_state_dict(state)
        self._link.take_over(state["lines"])
        self._staging = None  # the optimizer works in it from now on

    def _train(self, generation: Generation, share: Share) -> bool:
        """Take steps until the job is done (True) or the generation ends at a step boundary (False)."""
        should_stop = False
        while not should_stop and self.state.step < self._num_steps:
            self._evaluate_if_due(generation, share)
            self._link.check()
            with self._around.turn:
                self._stepper.compute(share)
            totals = self._stepper.reduce(self._link.should_stop)
            self._stepper.commit(totals)
            self._on_commit(generation, totals)
            should_stop = totals.should_stop
        self._evaluate_if_due(generation, share)
        if self.state.step < self._num_steps:
            return False
        return self._finish(generation)

    def _on_commit(self, generation: Generation, totals: Totals) -> None:
        step = self.state.step
        self._progress = Progress(step, self._progress.evaluated)
        learning_rate = self.state.optimizer.param_groups[0]["lr"]
        self._journal.committed(generation, self.state, totals, float(learning_rate))
        if self._is_leader(generation) and step % self._spec.checkpoint.every_steps == 0 and step < self._num_steps:
            self._save()

    def _evaluate_if_due(self, generation: Generation, share: Share) -> None:
        step, every = self.state.step, self._spec.eval_every
        is_due = step == self._num_steps or (every is not None and step > 0 and step % every == 0)
        if self._evaluator is None or not is_due or self._progress.evaluated >= step:
            return
        with self._around.turn:
            self._evaluator.compute(self.state.model, share)
        self._journal.evaluated(step, self._evaluator.reduce(share))
        self._progress = Progress(step, evaluated=step)

    def _is_leader(self, generation: Generation) -> bool:
        return generation.members[0] == self._link.member

    def _save(self) -> None:
        """Hand a copy of the state to the background; the copy is all that training waits for."""
        if self._saver is None:
            self._saver = BackgroundSaver(self._around.store, self._spec.checkpoint.keep)
        live = self._snapshot()
        self._saver.submit(Snapshot(live.step, self._saver.host_copy(live.tensors), live.meta))

    def _finish(self, generation: Generation) -> bool:
        """Carry the job to its end: the leader saves and reports, the others stand by in case it is lost."""
        if not self._is_leader(generation):
            return False
        self._save()
        assert self._saver is not None
        if not self._saver.close(timeout_s=_FINAL_SAVE_S) or self._saver.last_saved_step != self.state.step:
            raise CheckpointError(
                f"the final state could not be saved: {self._saver.last_error or 'storage is too slow'}"
            )
        self._link.finish(
            {
                "step": self.state.step,
                "num_skipped": self.state.num_skipped,
                "weights_sha256": self.state.weights_sha256(),
                "metrics": self._journal.last_metrics,
            }
        )
        return True
