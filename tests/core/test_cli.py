"""The command: exit codes, and errors of one message."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from raytrain_platform.cli.app import main

DIGITS = Path(__file__).parents[2] / "jobs" / "digits.yaml"


def run(monkeypatch, capsys, *arguments: str) -> tuple[int, str, str]:
    monkeypatch.setattr(sys, "argv", ["raytrain", *arguments])
    with pytest.raises(SystemExit) as exit_:
        main()
    captured = capsys.readouterr()
    return int(exit_.value.code or 0), captured.out, " ".join(captured.err.split())


def test_a_dry_run_shows_the_spec_and_what_ray_will_be_asked_for(monkeypatch, capsys):
    code, out, _ = run(monkeypatch, capsys, "train", str(DIGITS), "--dry-run", "--set", "replicas.max=2")
    assert code == 0
    assert "num_shards:" in out
    assert "to 2 replicas, each a Ray Train run of 1 worker(s)" in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["no-such.yaml"], "cannot read the spec file 'no-such.yaml': No such file or directory"),
        ([str(DIGITS), "--set", "batch_size=0", "--set", "stepz=1"], "2 wrong field(s)"),
        ([str(DIGITS), "--set", "task=jobs.nowhere:Digits"], "no module 'jobs.nowhere'"),
        ([str(DIGITS), "--set", "task=jobs.digits:Nobody"], "has no 'Nobody'; name one of its tasks: Digits"),
        ([str(DIGITS), "--set", "params={colour: red}"], "cannot take params {'colour': 'red'}"),
        ([str(DIGITS), "--set", "steps"], "write it as FIELD=VALUE"),
    ],
)
def test_a_wrong_job_exits_with_2_and_says_what_is_wrong(monkeypatch, capsys, arguments, message):
    code, _, err = run(monkeypatch, capsys, "train", *arguments)
    assert code == 2
    assert message in err
    assert "Traceback" not in err
