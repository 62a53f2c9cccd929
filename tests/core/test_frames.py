from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from raytrain_platform.data.frames import FrameDataset, FramePreprocessor
from raytrain_platform.errors import TaskError

# A shared machine may stop for longer than the deadline of an example.
unhurried = settings(deadline=None)

WHOLE_TABLE = pd.DataFrame(
    {
        "age": [30, 40, 50, 60],
        "bmi": [20.0, None, 24.0, 31.0],
        "city": ["Bern", None, "Aarau", "Bern"],
        "smokes": [True, False, False, True],
        "risk": [0.5, 0.25, 0.75, 1.0],
    }
)


def fitted() -> FramePreprocessor:
    return FramePreprocessor.fit(WHOLE_TABLE, exclude=("risk",))


def refusal(call: Callable[[], object]) -> str:
    with pytest.raises(TaskError) as caught:
        call()
    return str(caught.value)


numbers = st.none() | st.floats(-1e6, 1e6) | st.integers(-1000, 1000).map(float)
names = st.none() | st.text(st.characters(codec="utf-8"), max_size=3)


@st.composite
def tables(draw: st.DrawFn) -> pd.DataFrame:
    """Tables of numbers and names with gaps; each column has a value somewhere."""
    num_rows = draw(st.integers(1, 12))
    columns: dict[str, pd.Series] = {}
    for position in range(draw(st.integers(0, 3))):
        values = draw(st.lists(numbers, min_size=num_rows, max_size=num_rows).filter(lambda v: set(v) != {None}))
        columns[f"number {position}"] = pd.Series(values, dtype="float64")
    for position in range(draw(st.integers(0 if columns else 1, 3))):
        values = draw(st.lists(names, min_size=num_rows, max_size=num_rows).filter(lambda v: set(v) != {None}))
        columns[f"name {position}"] = pd.Series(values, dtype=draw(st.sampled_from(["str", "object", "category"])))
    return pd.DataFrame(columns)


@unhurried
@given(tables())
def test_training_rows_are_standardized_and_coded(table: pd.DataFrame) -> None:
    preprocessor = FramePreprocessor.fit(table)
    numbers_NF, codes_NC = preprocessor.encode(table)
    assert (numbers_NF.dtype, codes_NC.dtype) == (torch.float32, torch.int64)
    assert numbers_NF.shape == (len(table), len(preprocessor.numbers))
    assert codes_NC.shape == (len(table), len(preprocessor.categories))
    assert torch.isfinite(numbers_NF).all()
    for position, column in enumerate(preprocessor.numbers):
        encoded_N, values = numbers_NF[:, position], table[column.name].fillna(table[column.name].median())
        spread, magnitude = values.max() - values.min(), values.abs().max()
        if spread > 1e-9 * magnitude + 1e-100:
            assert float(encoded_N.mean()) == pytest.approx(0, abs=1e-4)
            assert float(encoded_N.std(correction=0)) == pytest.approx(1, abs=1e-3)
        elif spread == 0:
            assert torch.equal(encoded_N, torch.zeros(len(table)))
    for position, category in enumerate(preprocessor.categories):
        codes_N, values = codes_NC[:, position], table[category.name]
        assert (codes_N == 0).tolist() == values.isna().tolist()
        assert int(codes_N.max()) < preprocessor.num_codes[position]
        decoded = [None if code == 0 else category.categories[code - 1] for code in codes_N.tolist()]
        assert decoded == [None if pd.isna(value) else value for value in values]


@unhurried
@given(tables())
def test_json_keeps_every_bit(table: pd.DataFrame) -> None:
    preprocessor = FramePreprocessor.fit(table)
    again = FramePreprocessor.from_json(preprocessor.to_json())
    assert again == preprocessor
    for before, after in zip(preprocessor.encode(table), again.encode(table), strict=True):
        assert torch.equal(before, after)


@unhurried
@given(tables(), st.randoms())
def test_what_becomes_of_a_row_does_not_depend_on_the_others(table: pd.DataFrame, random: Any) -> None:
    preprocessor = FramePreprocessor.fit(table)
    together = preprocessor.encode(table)
    order = list(range(len(table)))
    random.shuffle(order)
    # As in serving: one row, built anew, so that a column may have no value and therefore no type.
    rows = [preprocessor.encode(pd.DataFrame([table.iloc[i].to_dict()])) for i in order]
    for part in (0, 1):
        assert torch.equal(torch.cat([row[part] for row in rows]), together[part][order])


def test_gaps_are_filled_with_the_median_of_the_training_rows() -> None:
    preprocessor = FramePreprocessor.fit(pd.DataFrame({"x": [1.0, 2.0, 9.0, None]}))
    (column,) = preprocessor.numbers
    assert (column.median, column.mean) == (2.0, 3.5)
    later = preprocessor.encode(pd.DataFrame({"x": [None, 1000.0]})).numbers_NF
    assert later[0, 0] == np.float32((2.0 - 3.5) / column.std)


# Rounding gives the first a deviation that is none, the second one of 0 where there is one: not to divide by.
@pytest.mark.parametrize("values", [[0.1, 0.1, 0.1], [0.0, 0.0, 2.2e-308]])
def test_a_column_that_is_constant_up_to_rounding_becomes_zeros(values: list[float]) -> None:
    table = pd.DataFrame({"x": values})
    assert (np.std(values) != 0) == (len(set(values)) == 1)
    assert torch.equal(FramePreprocessor.fit(table).encode(table).numbers_NF, torch.zeros(3, 1))


def test_a_value_never_seen_in_training_is_unknown() -> None:
    preprocessor = fitted()
    later = WHOLE_TABLE.assign(city=["Bern", "Chur", "Aarau", None])
    assert preprocessor.encode(later).codes_NC[:, 0].tolist() == [2, 0, 1, 0]


@pytest.mark.parametrize(
    ("column", "kind"),
    [
        (pd.Series([1, 2, 3], dtype="int8"), "number"),
        (pd.Series([1, None, 3], dtype="Int64"), "number"),
        (pd.Series([1, None, 3.5], dtype="object"), "number"),
        (pd.Series([1.5, None, 3], dtype="Float32"), "number"),
        (pd.Series(["a", None, "b"], dtype="str"), "string"),
        (pd.Series(["a", None, "b"], dtype="string"), "string"),
        (pd.Series(["a", None, "b"], dtype="object"), "string"),
        (pd.Series(["a", None, "b"], dtype="category"), "string"),
        (pd.Series([True, False, True]), "boolean"),
        (pd.Series([True, None, False], dtype="boolean"), "boolean"),
        (pd.Series([True, None, False], dtype="object"), "boolean"),
    ],
)
def test_every_ordinary_type_of_column_is_understood(column: pd.Series, kind: str) -> None:
    preprocessor = FramePreprocessor.fit(pd.DataFrame({"x": column}))
    if kind == "number":
        assert [c.name for c in preprocessor.numbers] == ["x"]
    else:
        assert [c.kind for c in preprocessor.categories] == [kind]
        assert preprocessor.num_codes == (3,)
        assert preprocessor.encode(pd.DataFrame({"x": column})).codes_NC[0, 0] != 0


@pytest.mark.parametrize(
    ("column", "said"),
    [
        ([1, "two", 3], "holds mixed-integer values (dtype object), neither numbers, strings nor booleans; convert it"),
        (pd.to_datetime(["2026-01-01"] * 3), "holds datetime64 values"),
        (pd.Categorical([1, 2, 1]), "holds integer values (dtype category)"),
        ([1j, 2j, 3j], "holds complex values"),
        ([None, None, None], "holds no value to learn from; leave it out: exclude=('x',)"),
        ([1.0, np.inf, 2.0], "infinite or too large, from 1.0 to inf; replace them: frame['x'].replace("),
        ([1e200, -1e200, 0.0], "infinite or too large"),
    ],
)
def test_a_column_that_cannot_be_used_is_named_with_the_cure(column: Any, said: str) -> None:
    message = refusal(lambda: FramePreprocessor.fit(pd.DataFrame({"x": column})))
    assert message.startswith("column 'x' ") and said in message


@pytest.mark.parametrize(
    ("name", "values", "said"),
    [
        ("age", ["30", "40", "50", "60"], "held numbers in training; convert it: frame['age'] = pd.to_numeric("),
        ("age", [True, False, True, True], "holds boolean values (dtype bool), but held numbers"),
        ("city", [1, 2, 3, 4], "holds integer values (dtype int64), but held strings in training; convert it: frame['"),
        ("smokes", ["yes", "no", "no", "yes"], "held booleans in training; convert it: frame['smokes'] = frame['smo"),
        ("bmi", [1.0, np.inf, 2.0, 3.0], "infinite or too large, from 1.0 to inf"),
        ("bmi", [1.0, 1e300, 2.0, 3.0], "infinite or too large, from 1.0 to 1e+300"),
    ],
)  # fmt: skip
def test_a_column_of_another_type_than_in_training_is_named_with_the_cure(
    name: str, values: list[Any], said: str
) -> None:
    message = refusal(lambda: fitted().encode(WHOLE_TABLE.assign(**{name: values})))
    assert message.startswith(f"column {name!r} ") and said in message


@pytest.mark.parametrize("absent", [["age", "bmi"], ["smokes"]])
def test_all_missing_columns_are_named_at_once(absent: list[str]) -> None:
    table = WHOLE_TABLE.drop(columns=absent)
    said = refusal(lambda: fitted().encode(table))
    listed = [", ".join(map(repr, names)) for names in (absent, table.columns)]
    assert said.startswith(f"the table lacks the column(s) {listed[0]}; it has {listed[1]}: add them")


def test_columns_that_were_not_learned_are_ignored() -> None:
    plain, extended = fitted().encode(WHOLE_TABLE), fitted().encode(WHOLE_TABLE.assign(more=1j))
    assert all(torch.equal(a, b) for a, b in zip(plain, extended, strict=True))


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: FramePreprocessor.fit(WHOLE_TABLE, exclude=("rsik",)), "exclude names 'rsik', which is no column"),
        (lambda: FramePreprocessor.fit(WHOLE_TABLE[:0]), "nothing to learn from a table of 0 rows and 5 columns"),
        (lambda: FramePreprocessor.fit(WHOLE_TABLE[["risk"]], exclude=["risk"]), "a table of 4 rows and 0 columns"),
        (lambda: FramePreprocessor.fit(pd.DataFrame([[1], [2]])), "column names must be strings, got 0; frame.columns"),
        (lambda: FramePreprocessor.fit(WHOLE_TABLE[["age", "age"]]), "2 columns are named 'age'; rename or drop"),
    ],
)
def test_a_table_that_cannot_be_learned_from_is_refused(call: Callable[[], object], said: str) -> None:
    assert said in refusal(call)


@pytest.mark.parametrize(
    "text",
    ["", "[]", "{}", "not json", '{"numbers": [], "categories": [], "version": 2}',
     '{"numbers": [{"name": "x", "median": 0, "mean": 0, "std": 0}], "categories": []}',
     '{"numbers": [{"name": "x", "median": NaN, "mean": 0, "std": 1}], "categories": []}'],
)  # fmt: skip
def test_other_text_is_no_preprocessor(text: str) -> None:
    assert "was not written by FramePreprocessor.to_json" in refusal(lambda: FramePreprocessor.from_json(text))


def test_what_is_kept_is_plain_json_and_cannot_be_changed() -> None:
    preprocessor = fitted()
    assert set(json.loads(preprocessor.to_json())) == {"version", "numbers", "categories"}
    with pytest.raises(ValueError, match="frozen"):
        preprocessor.numbers = ()  # type: ignore[misc]


@pytest.mark.parametrize(
    ("targets", "dtype"),
    [([0.5, 1.5, 2.5, 3.5], torch.float32), ([0, 1, 2, 1], torch.int64), ([True, False, True, True], torch.int64)],
)
def test_a_data_set_pairs_each_row_with_its_target(targets: list[Any], dtype: torch.dtype) -> None:
    data = FrameDataset(WHOLE_TABLE.assign(risk=targets), fitted(), "risk")
    encoded = fitted().encode(WHOLE_TABLE)
    assert len(data) == 4
    for index in range(4):
        sample = data[index]
        assert sample["target"].dtype == dtype and float(sample["target"]) == float(targets[index])
        assert torch.equal(sample["numbers"], encoded.numbers_NF[index])
        assert torch.equal(sample["codes"], encoded.codes_NC[index])
    with pytest.raises(IndexError):
        data[4]


@pytest.mark.parametrize(
    ("table", "target", "said"),
    [
        (WHOLE_TABLE, "rsik", "the table lacks the target 'rsik'; name one of its columns: 'age', 'bmi'"),
        (WHOLE_TABLE, "bmi", "the target 'bmi' is also an input; fit with exclude=('bmi',)"),
        (WHOLE_TABLE.assign(risk=[1.0, None, 2.0, None]), "risk", "missing in 2 of 4 rows; drop them: frame.dropna("),
        (WHOLE_TABLE.assign(risk=list("abca")), "risk", "holds string values (dtype str), not numbers; for classes"),
        (WHOLE_TABLE.assign(risk=[1.0, np.inf, 2.0, 3.0]), "risk", "column 'risk' holds values that are infinite"),
    ],
)
def test_a_target_that_cannot_be_used_is_named_with_the_cure(table: pd.DataFrame, target: str, said: str) -> None:
    assert said in refusal(lambda: FrameDataset(table, fitted(), target))
