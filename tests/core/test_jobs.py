"""The jobs that come with the platform: each learns, and keeps what the platform asks of a task."""

from __future__ import annotations

import itertools
import json
import math
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from torch import nn

from jobs.char_lm import CharLM, load_text
from jobs.digits import DigitImages, Digits
from jobs.tabular import TARGET, Tabular, load_patients
from raytrain_platform.data.frames import FramePreprocessor
from raytrain_platform.data.seeding import Purpose, seed_everything
from raytrain_platform.errors import TaskError
from raytrain_platform.spec import JobSpec, load_spec
from raytrain_platform.task import Task, build_task, load_task

JOBS = Path(__file__).parents[2] / "jobs"
NAMES = ("char_lm", "digits", "tabular")

SMALL: dict[str, dict[str, Any]] = {
    "char_lm": {"dim": 32, "num_layers": 1, "num_heads": 2, "context": 16, "dropout": 0.1},
    "digits": {"num_channels": 4},
    "tabular": {"hidden_dim": 8},
}


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)


def spec_of(name: str) -> JobSpec:
    return load_spec(JOBS / f"{name}.yaml")


def task_of(name: str, params: dict[str, Any] | None = None) -> Task:
    spec = spec_of(name)
    return build_task(load_task(spec.task), spec.params if params is None else params)


def train(task: Task, num_steps: int, batch_size: int) -> tuple[nn.Module, list[float]]:
    """The plainest training loop there is, in one process; returns the model and the loss of every step."""
    seed_everything(Purpose.MODEL, seed=0)
    model, data = task.build_model().train(), task.train_data()
    optimizer = task.build_optimizer(model)
    scheduler = task.build_scheduler(optimizer)
    losses = []
    order: list[int] = []
    for _ in range(num_steps):
        order = order or torch.randperm(len(data)).tolist()
        batch, order = order[:batch_size], order[batch_size:]
        loss = task.loss(model, task.collate([data[index] for index in batch]))
        optimizer.zero_grad()
        loss.mean.backward()
        optimizer.step()
        if scheduler is not None:
            scheduler.step()
        losses.append(float(loss.mean.detach()))
    return model, losses


def evaluate(task: Task, model: nn.Module, batch_size: int) -> dict[str, tuple[float, float]]:
    """Each metric's sum and count over all evaluation data."""
    data = task.eval_data()
    assert data is not None
    totals: dict[str, tuple[float, float]] = {}
    model.eval()
    with torch.no_grad():
        for begin in range(0, len(data), batch_size):
            batch = task.collate([data[index] for index in range(begin, min(begin + batch_size, len(data)))])
            for name, (total, count) in task.evaluate(model, batch).items():
                before = totals.get(name, (0.0, 0.0))
                totals[name] = (before[0] + float(total), before[1] + float(count))
    return totals


def scores(task: Task, model: nn.Module) -> dict[str, float]:
    return {name: total / count for name, (total, count) in evaluate(task, model, batch_size=64).items()}


@pytest.mark.parametrize("name", NAMES)
def test_a_spec_fits_its_task(name: str) -> None:
    spec, task = spec_of(name), task_of(name)
    num_samples = len(task.train_data())
    assert spec.num_steps(num_samples) >= 100
    assert spec.eval_every is not None and spec.num_steps(num_samples) % spec.eval_every == 0
    assert spec.params.get("decay_steps", spec.steps) == spec.steps
    task.build_model()


def test_digits_are_told_right() -> None:
    spec, task = spec_of("digits"), task_of("digits")
    model, losses = train(task, num_steps=92, batch_size=spec.batch_size)
    assert all(map(math.isfinite, losses))
    assert scores(task, model)["accuracy"] >= 0.95


def test_the_table_is_learned() -> None:
    spec, task = spec_of("tabular"), task_of("tabular")
    model, losses = train(task, num_steps=120, batch_size=spec.batch_size)
    assert all(map(math.isfinite, losses))
    assert scores(task, model)["r2"] >= 0.35


def test_the_language_model_learns_more_than_how_frequent_characters_are() -> None:
    task = task_of("char_lm", SMALL["char_lm"] | {"lr": 1e-2, "warmup_steps": 5, "decay_steps": 120})
    model, losses = train(task, num_steps=120, batch_size=64)
    frequencies_V = torch.bincount(load_text().eval_N) / len(load_text().eval_N)
    entropy = -float(torch.special.xlogy(frequencies_V, frequencies_V).sum())
    assert losses[0] == pytest.approx(math.log(len(load_text().vocabulary)), abs=0.1)
    after = scores(task, model)
    assert after["loss"] < entropy - 0.4
    assert after["bits_per_char"] == pytest.approx(after["loss"] / math.log(2), rel=1e-5)


@pytest.mark.parametrize("name", NAMES)
def test_metrics_do_not_depend_on_how_the_data_is_batched(name: str) -> None:
    task = task_of(name, SMALL[name])
    seed_everything(Purpose.MODEL, seed=0)
    model = task.build_model()
    whole, pieces = evaluate(task, model, batch_size=512), evaluate(task, model, batch_size=37)
    assert whole.keys() == pieces.keys() and "loss" in whole
    for metric, (total, count) in whole.items():
        assert math.isfinite(total)
        assert pieces[metric] == (pytest.approx(total, rel=1e-4, abs=1e-3), count)


@pytest.mark.parametrize("name", NAMES)
def test_the_same_seed_gives_the_same_bits(name: str) -> None:
    first, again = (train(task_of(name, SMALL[name]), num_steps=4, batch_size=16)[0].state_dict() for _ in range(2))
    assert all(torch.equal(first[key], again[key]) for key in first)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("part", ["train_data", "eval_data"])
def test_samples_depend_on_nothing_but_their_index_and_the_seed(name: str, part: str) -> None:
    first, second = (getattr(task_of(name, SMALL[name]), part)() for _ in range(2))
    assert len(first) == len(second) > 0
    indices = [0, 1, len(first) // 2, len(first) - 1]
    seed_everything(Purpose.DATA, seed=5)
    seen = [first[index] for index in indices]
    [first[index] for index in indices]  # what is read before a shard leaves no trace
    seed_everything(Purpose.DATA, seed=5)
    for one, other in zip(seen, (second[index] for index in indices), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)


@pytest.mark.parametrize("name", NAMES)
def test_a_loss_weighs_as_much_as_it_has_parts(name: str) -> None:
    task = task_of(name, SMALL[name] | {"dropout": 0.0})
    seed_everything(Purpose.MODEL, seed=0)
    model = task.build_model()
    model.eval()  # batch norm would see another batch in each part
    data = list(itertools.islice(task.train_data(), 12))
    with torch.no_grad():
        whole, *parts = (task.loss(model, task.collate(part)) for part in (data, data[:3], data[3:]))
    num_parts = 12 * (SMALL[name]["context"] if name == "char_lm" else 1)  # characters, or samples
    assert [float(loss.weight) for loss in (whole, *parts)] == [num_parts, num_parts / 4, num_parts * 3 / 4]
    total = sum(part.mean.item() * float(part.weight) for part in parts)
    assert total == pytest.approx(whole.mean.item() * float(whole.weight), rel=1e-4)


@pytest.mark.parametrize(
    ("name", "params", "said"),
    [
        ("char_lm", {"dim": 64, "num_heads": 3}, "need dim to be a multiple of num_heads, got dim 64, num_heads 3"),
        ("char_lm", {"warmup_steps": 300}, "need warmup_steps < decay_steps, got warmup_steps 300 >= 300"),
        ("char_lm", {"dropout": 1.0}, "less than 1"),
        ("digits", {"max_shift": 8}, "less than or equal to 7"),
        ("digits", {"lr": 0}, "greater than 0"),
        ("digits", {"channels": 8}, "the params it takes: num_channels=16, dropout=0.2, max_shift=1, lr=0.003"),
        ("tabular", {"missing_fraction": 0.9}, "less than or equal to 0.5"),
    ],
)
def test_wrong_parameters_are_refused(name: str, params: dict[str, Any], said: str) -> None:
    with pytest.raises(TaskError) as caught:
        task_of(name, params)
    assert said in str(caught.value)


def test_digits_are_moved_by_at_most_the_shift_and_evaluated_where_they_are() -> None:
    moved, still = DigitImages("train", max_shift=1), DigitImages("train", max_shift=0)
    padded_HW = nn.functional.pad(still[3][0][0], (1, 1, 1, 1))
    places = {padded_HW[y : y + 8, x : x + 8].numpy().tobytes(): (y, x) for y in range(3) for x in range(3)}
    random.seed(0)
    assert {places[moved[3][0].numpy().tobytes()] for _ in range(200)} == set(places.values())
    evaluated = Digits(max_shift=1).eval_data()
    assert evaluated.max_shift == 0 and len(evaluated) + len(still) == 1797


def test_the_text_is_split_without_loss_or_overlap() -> None:
    from pydoc_data.topics import topics

    text = load_text()
    whole = "".join(text.vocabulary[token] for token in torch.cat([text.train_N, text.eval_N]).tolist())
    assert whole == "\n\n".join(topics[name] for name in sorted(topics))
    assert len(text.eval_N) == pytest.approx(0.1 * len(whole), abs=1)


def test_a_window_predicts_what_follows() -> None:
    task = CharLM(context=16)
    train_N, eval_N = load_text().train_N, load_text().eval_N
    assert len(task.train_data()) == len(train_N) - 16
    for index in (0, 7, len(train_N) - 17):
        tokens_T, targets_T = task.train_data()[index]
        assert torch.equal(tokens_T, train_N[index : index + 16])
        assert torch.equal(targets_T, train_N[index + 1 : index + 17])
    targets = torch.cat([targets_T for _, targets_T in itertools.islice(task.eval_data(), 10)])
    assert torch.equal(targets, eval_N[1:161])
    with pytest.raises(ValueError, match="need context < "):
        CharLM(context=10**6).train_data()


def test_the_model_does_not_see_the_future() -> None:
    task = CharLM(**SMALL["char_lm"])
    model = task.build_model().eval()
    tokens_BT = torch.stack([task.train_data()[index][0] for index in range(4)])
    changed_BT = tokens_BT.clone()
    changed_BT[:, 9] = (changed_BT[:, 9] + 1) % 50
    before, after = model(tokens_BT), model(changed_BT)
    torch.testing.assert_close(before[:, :9], after[:, :9])
    assert not torch.allclose(before[:, 9:], after[:, 9:], atol=1e-4)
    same_everywhere = model(torch.zeros(1, 16, dtype=torch.int64))[0]
    assert len(same_everywhere.unique(dim=0)) == 16, "the model cannot tell positions apart"


def test_the_output_layer_is_the_embedding() -> None:
    model: Any = CharLM().build_model()
    assert model.head.weight is model.token_embedding.weight
    assert sum(parameter.numel() for parameter in model.parameters()) == pytest.approx(0.24e6, rel=0.05)
    large = CharLM(dim=384, num_layers=6, num_heads=6, context=256).build_model()
    assert sum(parameter.numel() for parameter in large.parameters()) == pytest.approx(10.8e6, rel=0.05)
    out = [float(p.detach().std()) for name, p in large.named_parameters() if name.endswith("_out.weight")]
    assert out == pytest.approx([0.02 / math.sqrt(12)] * 12, rel=0.02)


def test_the_learning_rate_rises_then_falls_and_goes_on_from_what_is_kept_as_json() -> None:
    task = CharLM(**SMALL["char_lm"], lr=1.0, warmup_steps=10, decay_steps=50)
    optimizer = task.build_optimizer(task.build_model())
    scheduler = task.build_scheduler(optimizer)
    rates = []
    for step in range(60):
        if step == 23:
            kept = json.loads(json.dumps(scheduler.state_dict()))
            scheduler = task.build_scheduler(optimizer)
            scheduler.load_state_dict(kept)
        rates.append(scheduler.get_last_lr()[0])
        optimizer.step()
        scheduler.step()
    assert rates[:10] == pytest.approx([(step + 1) / 10 for step in range(10)])
    assert all(later < earlier for earlier, later in itertools.pairwise(rates[10:51]))
    assert rates[30] == pytest.approx(0.55)
    assert rates[50:] == pytest.approx([0.1] * 10)


def test_only_matrices_decay() -> None:
    task = CharLM(weight_decay=0.3)
    model = task.build_model()
    decay = {
        id(p): group["weight_decay"] for group in task.build_optimizer(model).param_groups for p in group["params"]
    }
    assert {decay[id(p)] for p in model.parameters() if p.dim() == 2} == {0.3}
    assert {decay[id(p)] for p in model.parameters() if p.dim() != 2} == {0.0}


def test_the_table_has_categories_and_gaps_and_no_row_twice() -> None:
    train_rows, eval_rows = load_patients(missing_fraction=0.02)
    both = pd.concat([train_rows, eval_rows])
    assert len(both) == 442 and both.index.is_unique
    for rows in (train_rows, eval_rows):
        assert set(rows["sex"].dropna()) == {"1", "2"}
        assert 0.01 < rows.drop(columns=TARGET).isna().mean().mean() < 0.03
        assert rows[TARGET].notna().all()
    pd.testing.assert_frame_equal(train_rows, load_patients(missing_fraction=0.02)[0])
    assert not load_patients(missing_fraction=0)[0].isna().any().any()


def test_preprocessing_is_learned_from_the_training_rows_alone() -> None:
    task = Tabular()
    assert task.preprocessor == FramePreprocessor.fit(load_patients(0.02)[0], exclude=(TARGET,))
    assert TARGET not in task.preprocessor.columns and task.preprocessor.num_codes == (3,)


def test_an_unknown_category_says_nothing_and_stays_so() -> None:
    model, _ = train(Tabular(), num_steps=5, batch_size=32)
    (embedding,) = model.embeddings  # type: ignore[misc]
    assert not embedding.weight[0].any() and embedding.weight[1:].any()
