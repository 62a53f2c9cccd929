from __future__ import annotations

import math
import string
from pathlib import Path
from typing import Any

import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from raytrain_platform.errors import SpecError
from raytrain_platform.spec import JobSpec, load_spec, parse_spec

# A shared machine may stop for longer than the deadline of an example.
unhurried = settings(deadline=None)

MINIMAL: dict[str, Any] = {"name": "digits", "task": "jobs.digits:Digits", "epochs": 1}

SECTIONS = ("replicas", "loader", "checkpoint", "tracking", "timeouts")


def complaints(values: Any) -> dict[str, str]:
    """What is wrong with a spec: for each field, what is said of it."""
    with pytest.raises(SpecError) as caught:
        parse_spec(values)
    lines = [line.strip() for line in str(caught.value).splitlines()[1:]]
    assert str(caught.value).startswith(f"the spec has {len(lines)} wrong field(s):")
    return dict(line.split(": ", 1) for line in lines)


def spec_file(folder: Path, text: str | bytes) -> Path:
    path = folder / "job.yaml"
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return path


def test_a_minimal_spec_is_enough() -> None:
    spec = parse_spec(MINIMAL)
    assert (spec.seed, spec.batch_size, spec.num_shards, spec.reduction) == (0, 64, 8, "exact")
    assert (spec.replicas.min, spec.replicas.max, spec.replicas.resources_per_worker) == (1, 1, {"CPU": 1.0})


def test_every_wrong_field_is_named_at_once() -> None:
    said = complaints(
        {
            "name": "not a name",
            "task": "jobs/digits.py",
            "seed": -1,
            "batch_size": 0,
            "reduction": "sloppy",
            "replicas": {"min": 3, "max": 2, "resources_per_worker": {"CPU": -1}},
            "loader": {"num_workers": "many"},
            "checkpoint": 7,
            "timeouts": {"lost_after_s": 400},
        }
    )
    assert said.keys() == {
        "name", "task", "seed", "epochs", "batch_size", "reduction", "replicas.max", "loader.num_workers",
        "replicas.resources_per_worker.CPU", "checkpoint", "timeouts.hang_after_s",
    }  # fmt: skip
    # Each complaint tells the value and what is allowed.
    assert "letters, digits" in said["name"] and "'not a name'" in said["name"]
    assert "package.module:Class" in said["task"] and "'jobs/digits.py'" in said["task"]
    assert "greater than or equal to 0" in said["seed"] and "-1" in said["seed"]
    assert "'exact' or 'fast'" in said["reduction"] and "'sloppy'" in said["reduction"]
    assert said["replicas.max"] == "need min <= max, got min 3 > max 2"
    assert "integer" in said["loader.num_workers"] and "'many'" in said["loader.num_workers"]
    assert said["checkpoint"] == "should be a section with the fields every_steps, keep, got 7"


@pytest.mark.parametrize("missing", ["name", "task"])
def test_a_required_field_is_asked_for(missing: str) -> None:
    values = {field: value for field, value in MINIMAL.items() if field != missing}
    assert complaints(values) == {missing: "is required"}


@pytest.mark.parametrize(
    ("values", "field", "hint"),
    [
        ({"batchsize": 8}, "batchsize", "did you mean 'batch_size'?"),
        ({"replicas": {"zzz": 8}}, "replicas.zzz", "known fields: max, min,"),
        ({"timeouts": {"lost_after": 8}}, "timeouts.lost_after", "did you mean 'lost_after_s'?"),
        ({"zzz": 1}, "zzz", "known fields: batch_size,"),
    ],
)
def test_an_unknown_field_is_told_its_neighbour(values: dict[str, Any], field: str, hint: str) -> None:
    said = complaints(MINIMAL | values)
    assert said.keys() == {field}
    assert said[field].startswith(f"no such field; {hint}")


@pytest.mark.parametrize("length", [{"steps": None, "epochs": None}, {"steps": 10, "epochs": 1.5}])
def test_a_job_has_exactly_one_length(length: dict[str, Any]) -> None:
    said = complaints(MINIMAL | length)
    assert said == {
        "epochs": f"give exactly one of steps and epochs, got steps {length['steps']} and epochs {length['epochs']}"
    }


@pytest.mark.parametrize(
    ("values", "field"),
    [
        ({"batch_size": 4}, "num_shards"),
        ({"batch_size": 16, "num_shards": 17}, "num_shards"),
        ({"num_shards": 4, "replicas": {"max": 5}}, "replicas"),
        ({"replicas": {"max": 3, "workers_per_replica": 3}}, "replicas"),
        ({"replicas": {"min": 2}}, "replicas.max"),
    ],
)
def test_sizes_that_leave_someone_without_work_are_refused(values: dict[str, Any], field: str) -> None:
    assert complaints(MINIMAL | values).keys() == {field}


@pytest.mark.parametrize(
    ("timeouts", "both"),
    [
        ({"suspect_after_s": 3}, ("suspect_after_s 3", "lost_after_s 2")),
        ({"suspect_after_s": 2}, ("suspect_after_s 2", "lost_after_s 2")),
        ({"lost_after_s": 400}, ("hang_after_s 300", "lost_after_s 400")),
        ({"hang_after_s": 1.5}, ("hang_after_s 1.5", "lost_after_s 2")),
    ],
)
def test_timeouts_that_contradict_each_other_are_named_both(timeouts: dict[str, Any], both: tuple[str, str]) -> None:
    (complaint,) = complaints(MINIMAL | {"timeouts": timeouts}).values()
    assert "need suspect_after_s < lost_after_s < hang_after_s" in complaint
    assert all(one in complaint for one in both)


def test_a_member_is_not_lost_within_two_beats() -> None:
    said = complaints(MINIMAL | {"timeouts": {"lost_after_s": 0.9}})
    assert said == {"timeouts.lost_after_s": "should be greater than or equal to 1, got 0.9"}


@pytest.mark.parametrize("value", [float("inf"), float("nan"), 1e300])
@pytest.mark.parametrize("field", ["epochs", "replicas"])
def test_a_number_must_be_finite(field: str, value: float) -> None:
    if field == "epochs":
        assert complaints(MINIMAL | {"epochs": value}).keys() == {"epochs"}
    elif value != 1e300:
        said = complaints(MINIMAL | {"replicas": {"resources_per_worker": {"CPU": value}}})
        assert said.keys() == {"replicas.resources_per_worker.CPU"}


@unhurried
@given(
    num_samples=st.integers(1, 10**12),
    batch_size=st.integers(8, 10**6),
    epochs=st.floats(min_value=1e-6, max_value=1e9),
)
def test_a_job_takes_at_least_one_step(num_samples: int, batch_size: int, epochs: float) -> None:
    spec = parse_spec(MINIMAL | {"epochs": epochs, "batch_size": batch_size})
    assert spec.num_steps(num_samples) >= 1
    if epochs == 1:
        assert spec.num_steps(num_samples) * batch_size >= num_samples


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=10), inner, max_size=3),
    max_leaves=8,
)


def fields_of(section: str) -> list[str]:
    return list(JobSpec.model_fields[section].annotation.model_fields)  # type: ignore[union-attr]


sections = st.one_of(
    st.dictionaries(st.sampled_from(fields_of(section)) | st.text(max_size=5), json_values, max_size=3).map(
        lambda values, section=section: {section: values}
    )
    for section in SECTIONS
)
nearly_specs = st.builds(
    lambda section, values: MINIMAL | section | values,
    sections,
    st.dictionaries(st.sampled_from(list(JobSpec.model_fields)), json_values, max_size=3),
)


@unhurried
@given(st.dictionaries(st.text(max_size=10), json_values, max_size=5) | nearly_specs)
@example(MINIMAL | {"num_shards": 10**5000})
@example(MINIMAL | {"name": "\ud800", "\udfff": 1})
@example({1: 2, None: 3, (4,): 5})
def test_any_mapping_gives_a_spec_or_a_spec_error(values: dict[Any, Any]) -> None:
    try:
        spec = parse_spec(values)
    except SpecError as error:
        assert "wrong field(s):\n  " in str(error)
    else:
        assert parse_spec(spec.model_dump()) == spec


def test_a_value_too_large_or_deep_to_show_is_still_refused() -> None:
    deep: dict[str, Any] = {}
    for _ in range(3000):
        deep = {"x": deep}
    assert "too large to show" in complaints(MINIMAL | {"params": deep, "num_shards": 10**5000})["num_shards"]
    assert len(complaints(MINIMAL | {"reduction": "x" * 10_000})["reduction"]) < 300


def test_a_file_is_read(tmp_path: Path) -> None:
    path = spec_file(tmp_path, "name: a\ntask: m:C\nsteps: 3\nparams: {lr: 1e-3, label: 1e-x}\n")
    spec = load_spec(path)
    assert spec == parse_spec({"name": "a", "task": "m:C", "steps": 3, "params": {"lr": 0.001, "label": "1e-x"}})


@unhurried
@given(number=st.floats(allow_nan=False, allow_infinity=False), form=st.sampled_from(["g", "e", "E", ".2g", ".0f"]))
def test_a_number_is_a_number_however_it_is_written(
    tmp_path_factory: pytest.TempPathFactory, number: float, form: str
) -> None:
    text = format(number, form)
    assume(math.isfinite(float(text)))  # the largest are rounded up to infinity
    path = spec_file(tmp_path_factory.mktemp("spec"), f"name: a\ntask: m:C\nsteps: 3\nparams: {{lr: {text}}}\n")
    assert load_spec(path).params["lr"] == float(text)


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ({"batch_size": 32}, {"batch_size": 32}),
        ({"replicas.max": 3}, {"replicas": {"min": 1, "max": 3}}),
        ({"params.lr": 0.1, "params.deep.down": 1}, {"params": {"lr": 0.1, "deep": {"down": 1}}}),
        ({"timeouts.patience_s": 5}, {"timeouts": {"patience_s": 5}}),
    ],
)
def test_a_dot_reaches_into_a_section(tmp_path: Path, overrides: dict[str, Any], expected: dict[str, Any]) -> None:
    path = spec_file(tmp_path, "name: a\ntask: m:C\nsteps: 3\nreplicas: {min: 1}\n")
    base = {"name": "a", "task": "m:C", "steps": 3, "replicas": {"min": 1}}
    assert load_spec(path, overrides) == parse_spec(base | expected)


def test_a_dot_reaches_into_a_section_left_empty(tmp_path: Path) -> None:
    path = spec_file(tmp_path, "name: a\ntask: m:C\nsteps: 3\nloader:\n  # nothing chosen yet\n")
    assert load_spec(path, {"loader.num_workers": 1}).loader.num_workers == 1


def test_an_override_cannot_reach_into_a_value(tmp_path: Path) -> None:
    path = spec_file(tmp_path, "name: a\ntask: m:C\nsteps: 3\n")
    with pytest.raises(SpecError, match=r"cannot set 'steps\.max': 'steps' is 3, not a section"):
        load_spec(path, {"steps.max": 3})


def test_an_override_is_checked_like_the_file(tmp_path: Path) -> None:
    path = spec_file(tmp_path, "name: a\ntask: m:C\nsteps: 3\n")
    with pytest.raises(SpecError, match=r"replicas\.mx: no such field; did you mean 'max'\?"):
        load_spec(path, {"replicas.mx": 3})


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("name: [unclosed", "not valid YAML"),
        ("name: 2026-13-45", "not valid YAML"),
        (b"name: \xff\xfe\xfa", "not valid YAML"),
        ("name: a\x00b", "not valid YAML"),
        ("[" * 5000, "not valid YAML"),
        ("", "must hold a mapping of fields such as 'name: digits', got NoneType"),
        ("- a\n- b\n", "must hold a mapping of fields such as 'name: digits', got list"),
    ],
)
def test_a_file_that_is_no_mapping_is_refused(tmp_path: Path, text: str | bytes, said: str) -> None:
    path = spec_file(tmp_path, text)
    with pytest.raises(SpecError, match=said) as caught:
        load_spec(path)
    assert str(path) in str(caught.value)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=r"cannot read the spec file '.*nowhere\.yaml': No such file.*check the path"):
        load_spec(tmp_path / "nowhere.yaml")
    with pytest.raises(SpecError, match=r"cannot read the spec file .*: Is a directory"):
        load_spec(tmp_path)


@unhurried
@given(st.text(alphabet=string.printable, max_size=60) | st.binary(max_size=60))
def test_any_file_gives_a_spec_or_a_spec_error(tmp_path_factory: pytest.TempPathFactory, text: str | bytes) -> None:
    with pytest.raises(SpecError):
        load_spec(spec_file(tmp_path_factory.mktemp("spec"), text))
