"""Turn a pandas table into tensors, in serving exactly as in training.

Shapes: N rows, F number columns, C category columns.
"""

from __future__ import annotations

import json
from collections.abc import Collection
from typing import Literal, NamedTuple, Self

import numpy as np
import pandas as pd
import torch
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, FiniteFloat

from raytrain_platform.errors import TaskError

Kind = Literal["number", "string", "boolean"]

_CURES: dict[Kind, str] = {
    "number": "frame[{0!r}] = pd.to_numeric(frame[{0!r}])",
    "string": "frame[{0!r}] = frame[{0!r}].astype('str')",
    "boolean": "frame[{0!r}] = frame[{0!r}].astype('boolean')",
}


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)


class NumberColumn(_Frozen):
    """What the training rows say about a column of numbers."""

    name: str

    median: FiniteFloat
    """Stands in for missing values."""

    mean: FiniteFloat
    std: FiniteFloat = Field(gt=0)
    """Standard deviation, missing values filled in; 1 for a constant column, which becomes all zeros."""

    @classmethod
    def fit(cls, column: pd.Series) -> Self:
        """Learn the statistics of one column."""
        values_N = _floats(column)
        with np.errstate(over="ignore", invalid="ignore"):
            median = np.nanmedian(values_N)
            filled_N = np.where(np.isnan(values_N), median, values_N)
            mean, std = filled_N.mean(), filled_N.std()
        if not np.isfinite([median, mean, std]).all():
            raise _not_finite(column)
        # Rounding alone gives a column this much, and tiny deviations have squares of 0: not to divide by.
        if std <= 10 * np.finfo(np.float64).eps * np.abs(filled_N).max():
            mean, std = median, 1.0
        return cls(name=str(column.name), median=float(median), mean=float(mean), std=float(std))

    def encode(self, column: pd.Series) -> NDArray[np.float32]:
        """Fill and standardize the values of one column."""
        values_N = _floats(column)
        filled_N = np.where(np.isnan(values_N), self.median, values_N)
        with np.errstate(over="ignore", invalid="ignore"):
            scaled_N: NDArray[np.float32] = ((filled_N - self.mean) / self.std).astype(np.float32)
        if not np.isfinite(scaled_N).all():
            raise _not_finite(column)
        return scaled_N


class CategoryColumn(_Frozen):
    """Which values the training rows have in a column of strings or booleans."""

    name: str
    kind: Literal["string", "boolean"]

    categories: tuple[str, ...] = Field(min_length=1)
    """Sorted; the first has code 1, since 0 stands for missing and for never seen in training."""

    @classmethod
    def fit(cls, column: pd.Series, kind: Literal["string", "boolean"]) -> Self:
        """Learn the values of one column."""
        seen = sorted(column.astype("str").dropna().unique())
        return cls(name=str(column.name), kind=kind, categories=tuple(seen))

    def encode(self, column: pd.Series) -> NDArray[np.int64]:
        """Give each value of one column its code."""
        positions_N = pd.Index(self.categories, dtype="str").get_indexer(pd.Index(column.astype("str")))
        return positions_N.astype(np.int64) + 1


class EncodedFrame(NamedTuple):
    """A table as tensors, rows in the table's order."""

    numbers_NF: torch.Tensor
    """float32: no missing values, mean 0 and deviation 1 over the training rows."""

    codes_NC: torch.Tensor
    """int64: below ``num_codes`` of the column; 0 is missing or never seen in training."""


class FramePreprocessor(_Frozen):
    """What was learned from the training rows, and is applied unchanged to all others."""

    version: Literal[1] = 1
    numbers: tuple[NumberColumn, ...]
    categories: tuple[CategoryColumn, ...]

    @classmethod
    def fit(cls, frame: pd.DataFrame, *, exclude: Collection[str] = ()) -> Self:
        """Learn from the training rows; numbers are standardized, strings and booleans are coded.

        Args:
            frame: The training rows only: with others among them, evaluation would flatter the model.
            exclude: Columns to leave out, the target among them.

        Raises:
            TaskError: A column cannot be used; the message names it and the cure.
        """
        names = [name for name in frame.columns if name not in exclude]
        if frame.empty or not names:
            raise TaskError(f"nothing to learn from a table of {len(frame)} rows and {len(names)} columns; add some")
        if unknown := [name for name in exclude if name not in frame.columns]:
            # A misspelt target would stay among the inputs and make the model look perfect.
            raise TaskError(f"exclude names {unknown[0]!r}, which is no column; the columns: {_listed(frame)}")
        numbers: list[NumberColumn] = []
        categories: list[CategoryColumn] = []
        for name in names:
            column = _column(frame, name)
            if column.isna().all():
                raise TaskError(f"column {name!r} holds no value to learn from; leave it out: exclude=({name!r},)")
            kind = _kind(column)
            if kind is None:
                raise TaskError(
                    f"column {name!r} holds {_contents(column)}, neither numbers, strings nor booleans; "
                    f"convert it (frame[{name!r}].astype('str') makes strings) or leave it out: exclude=({name!r},)"
                )
            if kind == "number":
                numbers.append(NumberColumn.fit(column))
            else:
                categories.append(CategoryColumn.fit(column, kind))
        return cls(numbers=tuple(numbers), categories=tuple(categories))

    @property
    def columns(self) -> tuple[str, ...]:
        """Names of the columns a table must have; others are ignored."""
        return (*(column.name for column in self.numbers), *(column.name for column in self.categories))

    @property
    def num_codes(self) -> tuple[int, ...]:
        """How many codes each category column can have, code 0 included: the size of its embedding."""
        return tuple(1 + len(column.categories) for column in self.categories)

    def encode(self, frame: pd.DataFrame) -> EncodedFrame:
        """Turn rows into tensors; what becomes of a row does not depend on the others.

        Raises:
            TaskError: A column is missing, or holds something else than in training; the message gives the cure.
        """
        absent = [name for name in self.columns if name not in frame.columns]
        if absent:
            raise TaskError(
                f"the table lacks the column(s) {', '.join(map(repr, absent))}; it has {_listed(frame)}: "
                f"add them (their values may be missing), or fit again"
            )
        numbers = [c.encode(_checked(frame, c.name, "number")) for c in self.numbers]
        codes = [c.encode(_checked(frame, c.name, c.kind)) for c in self.categories]
        empty = np.empty((len(frame), 0))
        return EncodedFrame(
            torch.from_numpy(np.stack(numbers, axis=1) if numbers else empty.astype(np.float32)),
            torch.from_numpy(np.stack(codes, axis=1) if codes else empty.astype(np.int64)),
        )

    def to_json(self) -> str:
        """Everything that was learned, as text to keep beside a model; floats survive to the bit."""
        return json.dumps(self.model_dump())

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Read what ``to_json`` wrote.

        Raises:
            TaskError: The text is something else.
        """
        try:
            return cls.model_validate(json.loads(text))
        except ValueError as error:
            raise TaskError(f"this text was not written by FramePreprocessor.to_json: {error}; fit again") from None


class FrameDataset:
    """A table as a map-style data set of ``{"numbers": (F,), "codes": (C,), "target": ()}``."""

    def __init__(self, frame: pd.DataFrame, preprocessor: FramePreprocessor, target: str) -> None:
        """Encode the whole table at once.

        Args:
            frame: The rows, in the order of the samples.
            preprocessor: Fitted on the training rows.
            target: The column to predict: whole numbers and booleans become int64 (classes), others float32.

        Raises:
            TaskError: A column is missing, has missing targets, or holds something else than in training.
        """
        if target in preprocessor.columns:
            raise TaskError(f"the target {target!r} is also an input; fit with exclude=({target!r},)")
        self.encoded = preprocessor.encode(frame)
        self.targets_N = _targets(frame, target)

    def __len__(self) -> int:
        """Return the number of rows."""
        return len(self.targets_N)

    def __getitem__(self, index: int, /) -> dict[str, torch.Tensor]:
        """Return one row."""
        numbers_NF, codes_NC = self.encoded
        return {"numbers": numbers_NF[index], "codes": codes_NC[index], "target": self.targets_N[index]}


def _targets(frame: pd.DataFrame, target: str) -> torch.Tensor:
    if target not in frame.columns:
        raise TaskError(f"the table lacks the target {target!r}; name one of its columns: {_listed(frame)}")
    column = _column(frame, target)
    if num_missing := int(column.isna().sum()):
        raise TaskError(
            f"the target {target!r} is missing in {num_missing} of {len(frame)} rows; "
            f"drop them: frame.dropna(subset=[{target!r}])"
        )
    if _kind(column) not in ("number", "boolean"):
        raise TaskError(
            f"the target {target!r} holds {_contents(column)}, not numbers; for classes use their codes: "
            f"frame[{target!r}] = frame[{target!r}].astype('category').cat.codes"
        )
    if pd.api.types.is_float_dtype(column):
        with np.errstate(over="ignore"):
            targets_N = _floats(column).astype(np.float32)
        if not np.isfinite(targets_N).all():
            raise _not_finite(column)
        return torch.from_numpy(targets_N)
    return torch.from_numpy(column.to_numpy(dtype=np.int64, copy=True))


def _column(frame: pd.DataFrame, name: object) -> pd.Series:
    if not isinstance(name, str):
        raise TaskError(f"column names must be strings, got {name!r}; frame.columns = frame.columns.astype('str')")
    column = frame[name]
    if isinstance(column, pd.DataFrame):
        raise TaskError(f"{column.shape[1]} columns are named {name!r}; rename or drop all but one")
    return column


def _checked(frame: pd.DataFrame, name: str, kind: Kind) -> pd.Series:
    column = _column(frame, name)
    # pandas cannot know the type of a column without a single value: one row to predict is enough to meet it.
    if _kind(column) != kind and not column.isna().all():
        raise TaskError(
            f"column {name!r} holds {_contents(column)}, but held {kind}s in training; "
            f"convert it: {_CURES[kind].format(name)}"
        )
    return column


def _kind(column: pd.Series) -> Kind | None:
    inferred = _inferred(column)
    if inferred in ("string", "boolean"):
        return "string" if inferred == "string" else "boolean"
    # Numbers that were made categories are meant as names: to standardize them would be wrong.
    is_category = isinstance(column.dtype, pd.CategoricalDtype)
    is_number = inferred in ("integer", "floating", "mixed-integer-float", "decimal")
    return "number" if is_number and not is_category else None


def _inferred(column: pd.Series) -> str:
    values = column.cat.categories if isinstance(column.dtype, pd.CategoricalDtype) else column
    return pd.api.types.infer_dtype(values, skipna=True)


def _floats(column: pd.Series) -> NDArray[np.float64]:
    return column.to_numpy(dtype=np.float64, na_value=np.nan)


def _contents(column: pd.Series) -> str:
    return f"{_inferred(column)} values (dtype {column.dtype})"


def _listed(frame: pd.DataFrame) -> str:
    return ", ".join(map(repr, frame.columns)) or "none"


def _not_finite(column: pd.Series) -> TaskError:
    return TaskError(
        f"column {column.name!r} holds values that are infinite or too large, from {column.min()} to {column.max()}; "
        f"replace them: frame[{column.name!r}].replace([np.inf, -np.inf], np.nan)"
    )
