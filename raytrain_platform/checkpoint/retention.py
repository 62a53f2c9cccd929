"""Which checkpoints may go."""

from __future__ import annotations

from collections.abc import Collection


def decide_deletions(steps_valid: Collection[int], steps_unfinished: Collection[int], keep: int) -> tuple[int, ...]:
    """Choose the checkpoints to delete, oldest first.

    The newest valid ones stay, and always at least one. An unfinished one newer than all of them stays too: it may be
    one that is being written.

    Args:
        steps_valid: Steps whose checkpoint can be read.
        steps_unfinished: Steps with a folder whose checkpoint cannot be read.
        keep: Valid checkpoints that stay.
    """
    valid = sorted(set(steps_valid))
    if not valid:
        return ()
    surplus = valid[: -max(keep, 1)]
    abandoned = {step for step in steps_unfinished if step < valid[-1]}.difference(valid)
    return tuple(sorted(abandoned.union(surplus)))
