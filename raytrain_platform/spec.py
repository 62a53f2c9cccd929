"""What a user asks for: one frozen, validated description of a job."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    JsonValue,
    PositiveFloat,
    PositiveInt,
    ValidationError,
    ValidationInfo,
    field_validator,
)

from raytrain_platform.errors import SpecError


class _Frozen(BaseModel):
    # A contradiction is found by the validator of the later field (hence the validated defaults): the model's own
    # would not run, and so stay silent, while any other field is wrong.
    model_config = ConfigDict(
        frozen=True, extra="forbid", use_attribute_docstrings=True, validate_default=True, allow_inf_nan=False
    )


class ReplicaSpec(_Frozen):
    """How small and how large a job may become while it runs, and what each worker needs."""

    min: PositiveInt = 1
    """Fewest replicas the job trains with; below this it waits for capacity."""

    max: PositiveInt = 1
    """Most replicas the job asks for."""

    workers_per_replica: PositiveInt = 1
    """Workers (processes) of one replica; a replica joins and is lost as a whole."""

    resources_per_worker: dict[str, PositiveFloat] = Field(default={"CPU": 1})
    """What Ray reserves for one worker, such as ``{"CPU": 1}``."""

    @field_validator("max")
    @classmethod
    def _ordered(cls, most: int, info: ValidationInfo) -> int:
        least = info.data.get("min")
        if least is not None and least > most:
            raise ValueError(f"need min <= max, got min {least} > max {most}")
        return most


class LoaderSpec(_Frozen):
    """How samples get from the data set to the step."""

    num_workers: int = Field(default=0, ge=0)
    """Loader processes of each worker; 0 loads in the training process itself."""

    prefetch: PositiveInt = 2
    """Shards each loader process prepares ahead; without effect when ``num_workers`` is 0."""


class CheckpointSpec(_Frozen):
    """How often state is committed to storage, which is read only when no replica is left."""

    every_steps: PositiveInt = 100
    """Steps between two checkpoints; one more is written at the end."""

    keep: PositiveInt = 2
    """Newest checkpoints that stay on storage."""


class TrackingSpec(_Frozen):
    """Where MLflow keeps the run."""

    uri: str | None = None
    """An MLflow tracking URI; by default a SQLite file under the job's ``storage``."""

    experiment: str = Field(default="raytrain", min_length=1)
    """Experiment that the run belongs to."""


class TimeoutSpec(_Frozen):
    """How long to wait, in seconds, before concluding anything."""

    patience_s: PositiveFloat = 10.0
    """From the moment ``replicas.min`` are ready: how much longer the first generation waits for the rest."""

    lost_after_s: float = Field(default=2.0, ge=1.0)
    """Silence after which a member is lost, with no other evidence; at least two beats of 0.5 s."""

    suspect_after_s: PositiveFloat = 0.1
    """Silence after which a member is lost once another member saw a connection break."""

    hang_after_s: PositiveFloat = 300.0
    """How long a member that still beats may keep the others waiting before it counts as lost."""

    @field_validator("suspect_after_s", "hang_after_s")
    @classmethod
    def _ordered(cls, seconds: float, info: ValidationInfo) -> float:
        lost = info.data.get("lost_after_s")
        if lost is not None and not (seconds < lost if info.field_name == "suspect_after_s" else lost < seconds):
            raise ValueError(
                f"need suspect_after_s < lost_after_s < hang_after_s, "
                f"got {info.field_name} {seconds:g} and lost_after_s {lost:g}"
            )
        return seconds


class JobSpec(_Frozen):
    """One training of a task with fixed parameters."""

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")
    """name of the job: letters, digits, ``.``, ``_`` and ``-``; the same name goes on from the same checkpoints."""

    task: str = Field(pattern=r"^[A-Za-z_][\w.]*:[A-Za-z_]\w*$")
    """import path of the task class, as ``package.module:Class``."""

    params: dict[str, JsonValue] = Field(default={})
    """Keyword arguments of the task class."""

    seed: int = Field(default=0, ge=0, lt=2**63)
    """Decides the initial weights, the order of samples, dropout and augmentation."""

    steps: PositiveInt | None = None
    """Steps to train for; give either this or ``epochs``."""

    epochs: float | None = Field(default=None, gt=0, le=1e9)
    """Passes over the data to train for; give either this or ``steps``."""

    batch_size: PositiveInt = 64
    """Samples of one step, over all replicas; never changes with their number."""

    num_shards: PositiveInt = Field(default=8, le=4096)
    """Equal slices of every batch, dealt out to the replicas; the most workers that can help."""

    reduction: Literal["exact", "fast"] = "exact"
    """``exact`` gives the same bits at every number of replicas; ``fast`` uses the backend's own all-reduce."""

    precision: Literal["fp32", "bf16"] = "fp32"
    """Type of the forward pass; ``bf16`` uses autocast, the weights stay fp32."""

    clip_grad_norm: PositiveFloat | None = None
    """Largest total norm of the averaged gradient; larger ones are scaled down to it."""

    on_nan: Literal["stop", "skip"] = "stop"
    """What to do when the loss or a gradient is not finite: stop the job, or skip the update and count it."""

    eval_every: PositiveInt | None = None
    """Steps between two evaluations; by default only at the end."""

    replicas: ReplicaSpec = ReplicaSpec()
    loader: LoaderSpec = LoaderSpec()
    checkpoint: CheckpointSpec = CheckpointSpec()
    tracking: TrackingSpec = TrackingSpec()
    timeouts: TimeoutSpec = TimeoutSpec()

    storage: str = "~/raytrain"
    """Folder or fsspec URL under which the job keeps its checkpoints."""

    @field_validator("epochs")
    @classmethod
    def _one_length(cls, epochs: float | None, info: ValidationInfo) -> float | None:
        if "steps" in info.data and ((steps := info.data["steps"]) is None) == (epochs is None):
            raise ValueError(f"give exactly one of steps and epochs, got steps {steps} and epochs {epochs}")
        return epochs

    @field_validator("num_shards")
    @classmethod
    def _no_empty_shards(cls, num_shards: int, info: ValidationInfo) -> int:
        batch_size = info.data.get("batch_size")
        if batch_size is not None and num_shards > batch_size:
            raise ValueError(f"need num_shards <= batch_size, else shards stay empty; got {num_shards} > {batch_size}")
        return num_shards

    @field_validator("replicas")
    @classmethod
    def _no_idle_workers(cls, replicas: ReplicaSpec, info: ValidationInfo) -> ReplicaSpec:
        num_shards, most_workers = info.data.get("num_shards"), replicas.max * replicas.workers_per_replica
        if num_shards is not None and most_workers > num_shards:
            raise ValueError(f"need max * workers_per_replica <= num_shards, got {most_workers} > {num_shards}")
        return replicas

    @property
    def job_storage(self) -> str:
        """Folder or URL of this job alone, under ``storage``."""
        if "://" in self.storage:
            return f"{self.storage.rstrip('/')}/{self.name}"
        return str(Path(self.storage).expanduser().resolve() / self.name)

    @property
    def num_threads(self) -> int:
        """Threads of each worker: part of what decides the bits, so it follows from the spec, not from the machine."""
        return max(1, int(self.replicas.resources_per_worker.get("CPU", 1)))

    def num_steps(self, num_samples: int) -> int:
        """Steps the job trains for.

        Args:
            num_samples: Samples in the training data.
        """
        if self.steps is not None:
            return self.steps
        assert self.epochs is not None
        steps_per_epoch = -(-num_samples // self.batch_size)
        return max(1, round(self.epochs * steps_per_epoch))


class _Loader(yaml.SafeLoader):
    """YAML in which ``1e-3`` is a number; PyYAML follows YAML 1.1 and would read a string."""


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"^[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+$"), list("-+.0123456789")
)


def parse_spec(values: Mapping[str, Any]) -> JobSpec:
    """Check a spec given as a mapping.

    Raises:
        SpecError: Names every wrong field at once, with its value and what is allowed.
    """
    try:
        return JobSpec.model_validate(values)
    except ValidationError as error:
        lines = [_describe(detail) for detail in error.errors()]
        raise SpecError(
            f"the spec has {len(lines)} wrong field(s):\n" + "\n".join(f"  {line}" for line in lines)
        ) from None


def load_spec(path: str | Path, overrides: Mapping[str, Any] | None = None) -> JobSpec:
    """Read a spec file.

    Args:
        path: A YAML file with the fields of ``JobSpec``.
        overrides: Fields that replace those of the file; a dot reaches into a section, as ``replicas.max``.

    Raises:
        SpecError: The file is missing or is no YAML mapping, or fields are wrong.
    """
    try:
        values = yaml.load(Path(path).read_text(encoding="utf-8"), _Loader)
    except OSError as error:
        raise SpecError(f"cannot read the spec file {str(path)!r}: {error.strerror}; check the path") from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        # ValueError: not UTF-8, or a scalar such as 2026-13-45 that looks like a date and is none.
        raise SpecError(f"{str(path)!r} is not valid YAML: {error}; correct it there") from None
    if not isinstance(values, dict):
        raise SpecError(
            f"{str(path)!r} must hold a mapping of fields such as 'name: digits', got {type(values).__name__}"
        )
    for dotted, value in (overrides or {}).items():
        _assign(values, dotted, value)
    return parse_spec(values)


def _assign(values: dict[str, Any], dotted: str, value: Any) -> None:
    *sections, field = dotted.split(".")
    for section in sections:
        inner = values[section] = {} if values.get(section) is None else values[section]
        if not isinstance(inner, dict):
            raise SpecError(f"cannot set {dotted!r}: {section!r} is {inner!r}, not a section")
        values = inner
    values[field] = value


def _describe(detail: Mapping[str, Any]) -> str:
    """One wrong field, in words: where, what was given, what is allowed."""
    location = tuple(str(part) for part in detail["loc"])
    where = ".".join(location) or "spec"
    if detail["type"] == "extra_forbidden":
        known = sorted(_section(location[:-1]).model_fields)
        close = difflib.get_close_matches(location[-1], known, n=1)
        hint = f"did you mean {close[0]!r}?" if close else f"known fields: {', '.join(known)}"
        return f"{where}: no such field; {hint}"
    message = detail["msg"].removeprefix("Value error, ").removeprefix("Input ")
    if detail["type"] == "missing":
        return f"{where}: is required"
    if detail["type"] == "value_error":
        return f"{where}: {message}"
    if detail["type"] == "string_pattern_mismatch":
        message = f"should be the {_section(location[:-1]).model_fields[location[-1]].description}".rstrip(".")
    if detail["type"] == "model_type":
        message = f"should be a section with the fields {', '.join(_section(location).model_fields)}"
    return f"{where}: {message}, got {_shown(detail['input'])}"


def _shown(value: Any) -> str:
    try:
        text = repr(value)
    except (ValueError, RecursionError):  # an integer of thousands of digits; sections thousands deep
        return f"a {type(value).__name__} too large to show"
    return text if len(text) <= 200 else f"{text[:200]}..."


def _section(path: tuple[str, ...]) -> type[BaseModel]:
    model: type[BaseModel] = JobSpec
    for part in path:
        annotation = model.model_fields[part].annotation
        if not (isinstance(annotation, type) and issubclass(annotation, BaseModel)):
            break
        model = annotation
    return model
