from __future__ import annotations

from hypothesis import example, given
from hypothesis import strategies as st

from raytrain_platform.checkpoint.retention import decide_deletions

steps = st.sets(st.integers(0, 60), max_size=12)
keeps = st.integers(1, 5)


def test_the_newest_stay_and_leftovers_go():
    assert decide_deletions([20, 40, 60, 80], [10, 50, 90], keep=2) == (10, 20, 40, 50)


def test_the_only_valid_checkpoint_stays_even_if_told_to_keep_none():
    assert decide_deletions([40], [], keep=0) == ()
    assert decide_deletions([20, 40], [], keep=0) == (20,)


@given(valid=steps, unfinished=steps, keep=keeps)
@example(valid={40}, unfinished={80}, keep=1)
def test_the_newest_valid_ones_always_survive(valid, unfinished, keep):
    deleted = set(decide_deletions(valid, unfinished, keep))
    survivors = sorted(valid - deleted)
    assert survivors == sorted(valid)[-keep:]


@given(valid=steps, unfinished=steps, keep=keeps)
def test_leftovers_go_once_something_newer_is_valid_and_not_before(valid, unfinished, keep):
    deleted = set(decide_deletions(valid, unfinished, keep))
    newest = max(valid, default=-1)
    for step in unfinished - valid:
        assert (step in deleted) == (step < newest)


@given(valid=steps, unfinished=steps, keep=keeps)
def test_only_what_is_there_is_deleted_and_a_second_pass_finds_nothing(valid, unfinished, keep):
    deleted = decide_deletions(valid, unfinished, keep)
    assert list(deleted) == sorted(set(deleted))
    assert set(deleted) <= valid | unfinished
    assert decide_deletions(valid - set(deleted), unfinished - set(deleted), keep) == ()


@given(valid=steps, unfinished=steps, keep=keeps, num_done=st.integers(0, 20))
def test_a_crash_between_two_deletions_never_loses_the_newest(valid, unfinished, keep, num_done):
    done = set(decide_deletions(valid, unfinished, keep)[:num_done])
    if valid:
        assert max(valid) not in done


@given(valid=steps, unfinished=steps, keep=keeps)
def test_keeping_more_never_deletes_more(valid, unfinished, keep):
    assert set(decide_deletions(valid, unfinished, keep + 1)) <= set(decide_deletions(valid, unfinished, keep))
