from __future__ import annotations

import json
import math
import operator
import socket
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.report import Row, describe_machine, summarize, write

FINITE = st.floats(-1e6, 1e6)
COMPARISONS = {"<=": operator.le, ">=": operator.ge, "==": operator.eq, "<": operator.lt, ">": operator.gt}


@given(st.sampled_from(sorted(COMPARISONS)), st.integers(-50, 50), st.integers(-50, 50))
def test_a_goal_is_met_exactly_when_its_comparison_holds(symbol: str, value: int, bound: int) -> None:
    for text in (f"{symbol} {bound}", f"{symbol}{bound}.0", f" {symbol}  {bound} "):
        assert Row("pause", value, goal=text).met is COMPARISONS[symbol](value, bound)


def test_a_figure_without_a_goal_is_only_shown() -> None:
    assert Row("start", 26.0, "s").met is None


def test_a_figure_that_never_came_misses_every_goal() -> None:
    assert Row("regrow", None, "s", goal="<= 30").met is False


@pytest.mark.parametrize("goal", ["0.5", "=> 1", "<= fast", "<= 1 s", "<=", ""])
def test_a_goal_that_cannot_be_read_is_refused_with_the_way_to_write_it(goal: str) -> None:
    with pytest.raises(ValueError, match="cannot read the goal"):
        Row("pause", 1.0, goal=goal)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_figures_must_be_finite(value: float) -> None:
    with pytest.raises(ValueError, match="finite"):
        Row("pause", value)
    with pytest.raises(ValueError, match="finite"):
        Row("pause", 1.0, spread=(0.0, value))


@given(st.lists(FINITE, min_size=2, max_size=9))
def test_the_median_lies_within_the_spread_and_splits_the_samples(samples: list[float]) -> None:
    row = summarize("pause", samples, "s")
    assert row.value is not None
    assert row.spread == (min(samples), max(samples))
    assert row.spread[0] <= row.value <= row.spread[1]
    assert 2 * sum(sample < row.value for sample in samples) <= len(samples)
    assert 2 * sum(sample > row.value for sample in samples) <= len(samples)


def test_one_sample_has_no_spread_and_none_is_refused() -> None:
    assert summarize("pause", [0.4], "s").spread is None
    with pytest.raises(ValueError, match="no sample"):
        summarize("pause", [])


def test_the_file_holds_what_was_measured_and_whose_machine_it_was_stays_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [
        summarize("pause", [0.4, 0.3, 0.6], "s", "<= 0.5"),
        Row("regrow", None, "s"),
        Row("ratio", 0.8, "", None, ">= 0.9"),
    ]
    path = write("recovery", rows, tmp_path)
    found = json.loads(path.read_text())
    assert found["command"] == "make bench NAME=recovery"
    assert found["rows"] == [
        {"metric": "pause", "value": 0.4, "unit": "s", "spread": [0.3, 0.6], "goal": "<= 0.5", "met": True},
        {"metric": "regrow", "value": None, "unit": "s", "spread": None, "goal": None, "met": None},
        {"metric": "ratio", "value": 0.8, "unit": "", "spread": None, "goal": ">= 0.9", "met": False},
    ]
    assert set(found["machine"]) == {"cpu", "cores", "memory_gib", "python", "torch", "ray"}
    assert socket.gethostname() not in describe_machine().values()
    assert list(tmp_path.iterdir()) == [path]
    printed = capsys.readouterr().out
    assert "0.4 s" in printed and "0.3..0.6" in printed and "never" in printed
