"""A job's run in a real MLflow store: one run whatever happens, complete, readable, and never in the way."""

from __future__ import annotations

import json
import math
import shutil
import signal
import socket
import sqlite3
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pandas as pd
import psutil
import pytest
import torch
from torch import nn

from raytrain_platform import JobSpec
from raytrain_platform.errors import JobError, RaytrainError
from raytrain_platform.tracking.connection import connect
from raytrain_platform.tracking.history import history, recoveries
from raytrain_platform.tracking.location import Location, locate, unwritten_file
from raytrain_platform.tracking.model import MODEL_TAG, WEIGHTS_FILE
from raytrain_platform.tracking.records import PHASES, RecoveryRecord, StepRecord
from raytrain_platform.tracking.tracker import Status, Tracker
from raytrain_platform.tracking.ui import running_ui

SLOW = pytest.mark.timeout(300)

Opener = Callable[..., Tracker]


@pytest.fixture(autouse=True)
def _own_store(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)


@pytest.fixture(scope="module")
def empty_database(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A database with its tables and nothing in them; making one takes seconds."""
    path = tmp_path_factory.mktemp("template") / "mlflow.db"
    connect(Location(f"sqlite:///{path}", artifact_root=None))
    return path


@pytest.fixture
def storage(tmp_path: Path, empty_database: Path) -> Path:
    folder = tmp_path / "storage with a space"
    folder.mkdir()
    shutil.copy(empty_database, folder / "mlflow.db")
    return folder


def job(storage: Path | str, **fields: Any) -> JobSpec:
    return JobSpec.model_validate(
        {"name": "digits", "task": "jobs.digits:Digits", "steps": 100} | fields | {"storage": str(storage)}
    )


def steps(first: int, last: int) -> list[StepRecord]:
    return [
        StepRecord(s, time.time(), {"train/loss": 1 / (s + 1), "elastic/world_size": 3.0}) for s in range(first, last)
    ]


def recovery(generation: int, at_step: int) -> RecoveryRecord:
    phases = {phase: 0.1 * (i + 1) for i, phase in enumerate(PHASES)}
    return RecoveryRecord(generation, "lost", "node 2 gone", at_step, 3, 2, phases, pause_s=1.5, time_s=time.time())


def run_of(spec: JobSpec, run_id: str) -> Any:
    return connect(locate(spec)).get_run(run_id)


def every_point(spec: JobSpec, run_id: str, key: str) -> list[int]:
    """All steps stored for a metric, in the order they were stored, doubles included."""
    return [point.step for point in connect(locate(spec)).get_metric_history(run_id, key)]


@contextmanager
def locked(database: Path) -> Iterator[None]:
    """Keep every other process and thread out of the database."""
    connection = sqlite3.connect(database, isolation_level=None)
    try:
        connection.execute("BEGIN EXCLUSIVE")
        yield
        connection.execute("ROLLBACK")
    finally:
        connection.close()


NURSERY = """
import os, signal, sys, time
from pathlib import Path
from raytrain_platform import JobSpec
from raytrain_platform.tracking.records import StepRecord
from raytrain_platform.tracking.tracker import Tracker
import mlflow, mlflow.store.tracking.sqlalchemy_store

storage = Path(sys.argv[1])

def fork(body, *arguments):
    child = os.fork()
    if child == 0:
        try:
            body(*arguments)
        except BaseException as error:
            print(repr(error)[:300], file=sys.stderr)
            os._exit(1)
        os._exit(0)
    return child

def ended(child):
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
"""
"""Processes that need MLflow are forked from one that has it: importing it takes seconds."""

KILL_TWICE = (
    NURSERY
    + """
checkpoint, written = storage / "checkpoint", storage / "written"

def drive():
    spec = JobSpec(name="digits", task="jobs.digits:Digits", steps=100, storage=str(storage))
    first = int(checkpoint.read_text()) + 1 if checkpoint.exists() else 0
    tracker = Tracker.open(spec, {})
    for step in range(first, 400):
        tracker.log_steps([StepRecord(step, time.time(), {"train/loss": step * 0.5, "elastic/world_size": 3.0})])
        if step % 50 == 49:
            assert tracker.flush(60)
            written.write_text(str(step))
        # The checkpoint lags behind what is written: steps are computed again.
        if step % 50 == 19 and step > 50:
            checkpoint.write_text(str(step - 20))
        time.sleep(0.005)
    tracker.finish("FINISHED")

for kill_at, linger_s in ((99, 0.1), (249, 0.2)):
    child = fork(drive)
    while not (written.exists() and written.read_text() == str(kill_at)):
        time.sleep(0.01)
    time.sleep(linger_s)
    os.kill(child, signal.SIGKILL)
    assert ended(child) == -signal.SIGKILL
sys.exit(ended(fork(drive)))
"""
)

FAN_OUT = (
    NURSERY
    + """
def trial(number):
    spec = JobSpec(name=f"trial-{number}", task="jobs.digits:Digits", steps=1, storage=str(storage))
    tracker = Tracker.open(spec, {})
    tracker.log_steps([StepRecord(0, 0.0, {"train/loss": float(number)})])
    assert tracker.finish("FINISHED", timeout_s=60) is None

sys.exit(sum([ended(child) for child in [fork(trial, number) for number in range(4)]]))
"""
)


def run_script(code: str, storage: Path) -> None:
    done = subprocess.run([sys.executable, "-c", code, str(storage)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@SLOW
def test_a_job_killed_between_flushes_goes_on_in_one_run_with_no_step_twice_and_none_missing(storage: Path) -> None:
    run_script(KILL_TWICE, storage)
    spec = job(storage)
    client = connect(locate(spec))
    found = client.search_runs([experiment.experiment_id for experiment in client.search_experiments()])
    assert len(found) == 1
    assert found[0].info.status == "FINISHED"
    assert found[0].data.tags["raytrain.attempts"] == "3"
    for key in ("train/loss", "elastic/world_size"):
        assert every_point(spec, found[0].info.run_id, key) == list(range(400))


@SLOW
def test_jobs_that_start_at_once_on_a_fresh_file_all_get_their_run(tmp_path: Path) -> None:
    run_script(FAN_OUT, tmp_path)
    losses = [history(job(tmp_path, name=f"trial-{i}"))["train/loss"].item() for i in range(4)]
    assert losses == [float(i) for i in range(4)]


def test_logging_never_waits_even_when_the_database_is_locked(storage: Path) -> None:
    spec = job(storage)
    tracker = Tracker.open(spec, {})
    fastest_s = math.inf
    with locked(storage / "mlflow.db"):
        tracker.log_steps(steps(0, 10))
        time.sleep(1.2)
        for first in range(10, 5010, 1000):
            thousand = steps(first, first + 1000)
            start_s = time.perf_counter()
            tracker.log_steps(thousand)
            tracker.log_recovery(recovery(2, first))
            fastest_s = min(fastest_s, time.perf_counter() - start_s)
    assert fastest_s < 0.005
    assert tracker.finish("FINISHED", timeout_s=60) is None
    assert every_point(spec, tracker.run_id, "train/loss") == list(range(5010))
    assert len(recoveries(spec)) == 5


def test_a_job_ends_even_when_neither_the_store_nor_the_disk_takes_anything(
    storage: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tracker = Tracker.open(job(storage), {})
    (storage / "unwritten").write_text("a file where a folder should be")
    with locked(storage / "mlflow.db"):
        tracker.log_steps(steps(0, 3))
        assert tracker.finish("FINISHED", timeout_s=0.3) is None
    assert "6 points and 0 rows of recoveries are not written but lost" in caplog.text


def test_what_a_failing_store_did_not_take_is_kept_and_written_by_the_next_attempt(
    storage: Path, caplog: pytest.LogCaptureFixture
) -> None:
    spec = job(storage)
    tracker = Tracker.open(spec, {})
    with locked(storage / "mlflow.db"):
        tracker.log_steps(steps(0, 30))
        tracker.log_recovery(recovery(2, 30))
        kept = tracker.finish("FINISHED", timeout_s=0.5)
        assert kept == unwritten_file(spec, tracker.run_id)
        assert kept.exists()
        assert "66 points and 1 rows of recoveries are not written" in caplog.text
    again = Tracker.open(spec, {})
    assert again.run_id == tracker.run_id, "a run that could not be ended has not finished"
    again.log_steps(steps(20, 50))
    assert again.finish("FINISHED") is None
    assert not kept.exists()
    for key in ("train/loss", "elastic/world_size"):
        assert every_point(spec, again.run_id, key) == list(range(50))
    assert recoveries(spec)["generation"].tolist() == [2]


@pytest.mark.parametrize("status", ["FINISHED", "FAILED", "KILLED"])
def test_a_run_ends_with_its_status_and_only_a_finished_one_is_not_gone_on_with(storage: Path, status: Status) -> None:
    spec = job(storage)
    tracker = Tracker.open(spec, {})
    tracker.finish(status, f"see https://me:hunter2@host/log for {status}")
    tracker.finish("FAILED", "a second call changes nothing")
    ended = run_of(spec, tracker.run_id)
    assert ended.info.status == status
    assert ended.data.tags["raytrain.stop_reason"] == f"see https://***@host/log for {status}"
    again = Tracker.open(spec, {})
    assert (again.run_id == tracker.run_id) == (status != "FINISHED")
    assert run_of(spec, again.run_id).info.status == "RUNNING"
    again.finish("FINISHED")


def test_a_job_that_computes_other_numbers_gets_its_own_run_and_a_longer_one_does_not(storage: Path) -> None:
    first = Tracker.open(job(storage, params={"lr": 0.1}), {})
    first.finish("FAILED", "diverged")
    longer = job(storage, params={"lr": 0.1}, steps=200)
    same = Tracker.open(longer, {})
    same.finish("KILLED")
    assert same.run_id == first.run_id
    told = run_of(longer, same.run_id).data
    assert (told.params["steps"], told.tags["raytrain.now.steps"]) == ("100", "200")
    other = Tracker.open(job(storage, params={"lr": 0.01}, steps=200), {})
    other.finish("FINISHED")
    assert other.run_id != first.run_id


def test_a_run_tells_its_spec_its_origin_and_no_secret(storage: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    uri = f"sqlite:///{storage / 'mlflow.db'}"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    params = {
        "lr": 0.001,
        "layers": [64, 64],
        "optimizer": {"name": "adamw", "api_key": "hunter2"},
        "data": "s3://key:hunter2@bucket/x?X-Amz-Signature=hunter2",
        "note": "x" * 2000,
        "strange key!": 1,
    } | {f"p{i}": i for i in range(150)}
    spec = job("s3://key:hunter2@bucket/jobs", params=params)
    tracker = Tracker.open(spec, {"team": "vision", "mlflow.source.git.commit": "abc", "log": "http://a:hunter2@b"})
    tracker.finish("FINISHED")
    client = connect(Location(uri, None))
    run = client.get_run(tracker.run_id)
    told = run.data.params
    assert (told["params.lr"], told["params.layers"], told["batch_size"]) == ("0.001", "[64, 64]", "64")
    assert (told["params.optimizer.name"], told["params.optimizer.api_key"]) == ("adamw", "***")
    assert (told["params.strange key_"], told["params.p149"]) == ("1", "149")
    assert len(told["params.note"]) == 500
    tags = run.data.tags
    assert (tags["raytrain.job"], tags["team"], tags["mlflow.runName"]) == ("digits", "vision", "digits")
    assert tags["mlflow.source.git.commit"] == "abc"
    assert "jobs.digits:Digits" in tags["mlflow.note.content"]
    spec_file = Path(client.download_artifacts(tracker.run_id, "raytrain/spec.yaml")).read_text()
    assert "x" * 2000 in spec_file
    assert "hunter2" not in json.dumps([told, tags]) + spec_file


def test_history_is_a_table_of_every_metric_by_step(storage: Path) -> None:
    spec = job(storage)
    tracker = Tracker.open(spec, {})
    tracker.log_steps(steps(0, 2500))
    tracker.log_steps([StepRecord(2499, time.time(), {"val/accuracy": 0.75, "train/grad_norm": math.inf})])
    tracker.log_steps([StepRecord(2500, time.time(), {"train/loss": math.nan})])
    tracker.finish("FINISHED")
    table = history(spec)
    assert table.index.tolist() == list(range(2501))
    assert table.index.name == "step"
    assert table.columns.tolist() == ["elastic/world_size", "train/grad_norm", "train/loss", "val/accuracy"]
    assert table["train/loss"].tolist()[:2500] == [1 / (step + 1) for step in range(2500)]
    assert math.isnan(table["train/loss"][2500])
    assert table["train/grad_norm"][2499] == math.inf
    assert table["val/accuracy"].dropna().to_dict() == {2499: 0.75}
    pd.testing.assert_frame_equal(history(tracker.run_id, locate(spec).uri), table)


def test_recoveries_are_a_table_and_metrics_over_all_attempts(storage: Path) -> None:
    spec = job(storage)
    records = [recovery(generation, 10 * generation) for generation in (1, 2, 3)]
    tracker = Tracker.open(spec, {})
    assert recoveries(spec).empty
    tracker.log_recovery(records[0])
    tracker.log_recovery(records[1])
    tracker.finish("KILLED")
    tracker = Tracker.open(spec, {})
    tracker.log_recovery(records[2])
    tracker.finish("FINISHED")
    table = recoveries(spec)
    assert table["generation"].tolist() == [1, 2, 3]
    assert table.iloc[2].to_dict() == {
        "generation": 3, "cause": "lost", "detail": "node 2 gone", "at_step": 30, "num_replicas_before": 3,
        "num_replicas": 2, "pause_s": 1.5, **records[2].phases, "time_s": records[2].time_s,
    }  # fmt: skip
    assert history(spec)["recovery/sync_s"].to_dict() == {10: records[0].phases["sync_s"], 20: 0.4, 30: 0.4}


class Tagger(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, 16)
        self.norm = nn.BatchNorm1d(16)
        self.dropout = nn.Dropout(0.5)
        self.head = nn.Linear(16, 50, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens_BT: torch.Tensor) -> torch.Tensor:  # B batch, T tokens
        hidden_BE = self.norm(self.embedding(tokens_BT).mean(dim=1))
        scores: torch.Tensor = self.head(self.dropout(hidden_BE))
        return scores


class Branching(Tagger):
    def forward(self, tokens_BT: torch.Tensor) -> torch.Tensor:
        return super().forward(tokens_BT) * (2 if tokens_BT.sum().item() % 2 else 1)


def test_the_model_loads_without_unpickling_and_gives_the_same_bits(
    storage: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    spec, model = job(storage), Tagger()
    model(torch.randint(0, 50, (8, 5)))
    tracker = Tracker.open(spec, {})
    uri = tracker.log_model(model, (torch.randint(0, 50, (4, 5)),))
    tracker.finish("FINISHED")
    assert model.training, "the model of the job is not touched"
    assert uri is not None and uri.startswith("models:/")
    assert run_of(spec, tracker.run_id).data.tags[MODEL_TAG] == uri
    monkeypatch.setenv("MLFLOW_ALLOW_PICKLE_DESERIALIZATION", "false")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", locate(spec).uri)
    import mlflow.pyfunc
    import mlflow.pytorch

    tokens = torch.randint(0, 50, (11, 5))
    with torch.no_grad():
        expected = model.eval()(tokens)
        assert torch.equal(mlflow.pytorch.load_model(uri)(tokens), expected)
        assert torch.equal(torch.from_numpy(mlflow.pyfunc.load_model(uri).predict(tokens.numpy())), expected)


@pytest.mark.parametrize(
    ("model_type", "example", "reason"),
    [
        (Branching, (torch.ones(4, 5, dtype=torch.long),), "GuardOnDataDependentSymNode"),
        (Tagger, None, "no example input"),
        (Tagger, ({"tokens": torch.ones(4, 5)},), "got (dict)"),
    ],
)
def test_a_model_that_cannot_be_traced_is_kept_as_weights_with_the_reason(
    storage: Path, model_type: type[nn.Module], example: tuple[Any, ...] | None, reason: str
) -> None:
    from safetensors.torch import load_model

    spec, model = job(storage), model_type()
    tracker = Tracker.open(spec, {})
    assert tracker.log_model(model, example) == WEIGHTS_FILE
    tracker.finish("FINISHED")
    assert reason in run_of(spec, tracker.run_id).data.tags[MODEL_TAG]
    client = connect(locate(spec))
    restored = model_type()
    load_model(restored, client.download_artifacts(tracker.run_id, WEIGHTS_FILE))
    for name, value in model.state_dict().items():
        assert torch.equal(restored.state_dict()[name], value)
    assert not client.search_logged_models([run_of(spec, tracker.run_id).info.experiment_id]), (
        "no half-made model is left in the store"
    )


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def fetch(url: str) -> bytes:
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(url, timeout=30) as answer:
        return bytes(answer.read())


@SLOW
def test_the_ui_serves_a_store_takes_a_run_over_http_and_leaves_no_process(
    storage: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    port, file_spec = free_port(), job(storage)
    uri = locate(file_spec).uri
    code = f"from raytrain_platform.tracking.ui import serve_ui; serve_ui({uri!r}, port={port})"
    ui = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    with ui:
        assert ui.stdout is not None
        line = ui.stdout.readline()
        processes = psutil.Process(ui.pid).children(recursive=True)
        try:
            assert f"http://127.0.0.1:{port}/#/experiments?workflowType=machine_learning" in line
            assert b"<html" in fetch(f"http://127.0.0.1:{port}/")
            spec = job(storage, tracking={"uri": f"http://127.0.0.1:{port}"})
            tracker = Tracker.open(spec, {})
            tracker.log_steps(steps(0, 20))
            tracker.log_recovery(recovery(2, 20))
            uri_of_model = tracker.log_model(nn.Linear(3, 2), (torch.ones(4, 3),))
            assert uri_of_model is not None and uri_of_model.startswith("models:/")
            monkeypatch.setenv("MLFLOW_TRACKING_URI", f"http://127.0.0.1:{port}")
            import mlflow.pytorch

            assert mlflow.pytorch.load_model(uri_of_model)(torch.ones(1, 3)).shape == (1, 2)
            assert tracker.finish("FINISHED") is None
            assert f"127.0.0.1:{port}/#/experiments/" in tracker.run_url_hint
            assert tracker.run_id in tracker.run_url_hint
            assert len(recoveries(spec)) == 1
            monkeypatch.delenv("MLFLOW_TRACKING_URI")
        finally:
            ui.send_signal(signal.SIGTERM)
    left_behind = psutil.wait_procs(processes, timeout=10)[1]
    for process in left_behind:
        process.kill()
    assert ui.returncode == 0
    assert processes and not left_behind
    assert every_point(file_spec, tracker.run_id, "train/loss") == list(range(20))


def test_the_ui_says_why_it_cannot_start(storage: Path, tmp_path: Path) -> None:
    with (
        pytest.raises(RaytrainError, match="does not exist; run a job first"),
        running_ui(f"sqlite:///{tmp_path}/no.db"),
    ):
        pass
    with (
        socket.create_server(("127.0.0.1", 0)) as taken,
        pytest.raises(RaytrainError, match="Address already in use; choose another port"),
        running_ui(locate(job(storage)).uri, port=taken.getsockname()[1]),
    ):
        pass


def test_a_store_that_does_not_answer_is_an_error_before_training_without_its_password(tmp_path: Path) -> None:
    spec = job(tmp_path, tracking={"uri": f"http://me:hunter2@127.0.0.1:{free_port()}"})
    with pytest.raises(JobError, match=r"http://\*\*\*@127\.0\.0\.1") as caught:
        Tracker.open(spec, {})
    assert "hunter2" not in str(caught.value)


def test_history_of_what_was_never_tracked_says_so(storage: Path, tmp_path: Path) -> None:
    with pytest.raises(JobError, match="nothing was tracked yet"):
        history(job(tmp_path / "elsewhere"))
    with pytest.raises(JobError, match="no run of a job called 'digits' in experiment 'raytrain'"):
        history(job(storage))
