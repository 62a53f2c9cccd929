"""The state of a job at one step, as plain tensors and JSON: what is written, and what comes back.

A nested state becomes tensors by name and a *skeleton*, which is JSON. Numbers, strings, booleans, None and lists stand
for themselves in it; everything else is an object of one key that says what it is::

    {"dict": [[key, value], ...]}          also "ordered" (OrderedDict) and "counter" (Counter)
    {"tuple": [value, ...]}
    {"tensor": name}                       the same name twice: the same tensor twice (tied weights)
    {"float": "nan" | "inf" | "-inf"}      JSON has no such numbers
    {"numpy": [dtype, value]}              a NumPy scalar

Nothing in it names code, so nothing is run when it is read.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
from collections import Counter, OrderedDict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import safetensors
import safetensors.torch
import torch
from pydantic import JsonValue

from raytrain_platform.errors import CheckpointError

_DTYPE_CODES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.complex64: "C64",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
_TENSOR_TYPES = (torch.Tensor, torch.nn.Parameter)
_MAPPINGS: dict[type, str] = {dict: "dict", OrderedDict: "ordered", Counter: "counter"}
_MAPPING_TYPES = {tag: kind for kind, tag in _MAPPINGS.items()}
_WHAT_FITS = "tensors, numbers, strings, booleans, None, lists, tuples and dicts"


@dataclass(frozen=True)
class Snapshot:
    """The state of a job after one step, held on the host."""

    step: int
    """Steps committed so far."""

    tensors: dict[str, torch.Tensor]
    """Contiguous host copies, by name."""

    meta: JsonValue
    """What ``flatten`` left besides the tensors."""

    def state(self) -> Any:
        """Return the nested state that was flattened; its tensors are those of the snapshot, not copies."""
        return unflatten(self.tensors, self.meta)


def flatten(state: Any) -> tuple[dict[str, torch.Tensor], JsonValue]:
    """Take a nested state apart into tensors by dotted path and a skeleton of JSON.

    The tensors are those of the state, detached but not copied; parameters come back as plain tensors. A tensor met
    twice, as tied weights are, is kept once and comes back as one tensor; views that overlap only in part come back as
    separate tensors.

    Args:
        state: Nested dicts, lists and tuples, such as ``state_dict()`` returns.

    Raises:
        CheckpointError: Something in it has no form without pickle; the message names its path and type.
    """
    flattening = _Flattening()
    try:
        skeleton = flattening.visit(state, "")
    except RecursionError:
        raise CheckpointError("cannot save this state: it contains itself, or is nested too deeply to write") from None
    return flattening.tensors, skeleton


def unflatten(tensors: Mapping[str, torch.Tensor], skeleton: JsonValue) -> Any:
    """Put a state that ``flatten`` took apart together again.

    Raises:
        CheckpointError: The skeleton names a tensor that is missing, or is no skeleton.
    """
    match skeleton:
        case None | bool() | int() | float() | str():
            return skeleton
        case list():
            return [unflatten(tensors, value) for value in skeleton]
        case {"tensor": str(name)}:
            if name not in tensors:
                raise CheckpointError(f"tensor {name!r} is missing: the state was taken apart by something else")
            return tensors[name]
        case {"tuple": list(values)}:
            return tuple(unflatten(tensors, value) for value in values)
        case {"float": "nan" | "inf" | "-inf" as word}:
            return float(word)
        case {"numpy": [str(dtype), value]}:
            return np.dtype(dtype).type(unflatten(tensors, value))
        case {"dict": list(pairs)} | {"ordered": list(pairs)} | {"counter": list(pairs)}:
            return _mapping(tensors, skeleton, pairs)
    raise CheckpointError(f"not a skeleton: {str(skeleton)[:200]}; it was written by a newer version or is damaged")


def digest(tensors: Mapping[str, torch.Tensor]) -> str:
    """Return the sha256 of names, dtypes, shapes and bytes: equal digests mean equal bits, in any order of the dict."""
    total = hashlib.sha256()
    for name in sorted(tensors):
        tensor = tensors[name]
        total.update(json.dumps([name, str(tensor.dtype), list(tensor.shape)]).encode())
        total.update(_bytes_of(tensor))
    return total.hexdigest()


def encode(tensors: Mapping[str, torch.Tensor]) -> Iterator[memoryview]:
    """Yield the bytes of a safetensors file, without copying host tensors.

    The format: the header's length as a little-endian u64, the header as JSON, the tensors without gaps.
    Source: the format section of the safetensors documentation.
    """
    # Widest first: then every tensor starts at a multiple of its item size, as readers that map the file expect.
    ordered = sorted(tensors.items(), key=lambda item: (-item[1].itemsize, item[0]))
    header: dict[str, JsonValue] = {}
    end = 0
    for name, tensor in ordered:
        start, end = end, end + tensor.numel() * tensor.itemsize
        header[name] = {
            "dtype": _DTYPE_CODES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [start, end],
        }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    yield memoryview(len(text).to_bytes(8, "little") + text)
    for _, tensor in ordered:
        yield _bytes_of(tensor)


def decode(content: bytes) -> dict[str, torch.Tensor]:
    """Read what ``encode`` wrote.

    Raises:
        CheckpointError: It is not a safetensors file.
    """
    try:
        return safetensors.torch.load(content)
    except (safetensors.SafetensorError, KeyError) as error:
        raise CheckpointError(f"not a safetensors file that this version reads: {error}") from error


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    plain = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
    return plain.reshape(-1).view(torch.uint8).numpy().data


def _mapping(tensors: Mapping[str, torch.Tensor], skeleton: dict[str, JsonValue], pairs: list[JsonValue]) -> Any:
    tag = next(tag for tag in _MAPPING_TYPES if tag in skeleton)
    mapping: Any = _MAPPING_TYPES[tag]()
    for pair in pairs:
        if not isinstance(pair, list) or len(pair) != 2:
            raise CheckpointError(f"not a skeleton: {str(pair)[:200]} is no pair of key and value; it is damaged")
        mapping[unflatten(tensors, pair[0])] = unflatten(tensors, pair[1])
    if "metadata" in skeleton:
        mapping._metadata = unflatten(tensors, skeleton["metadata"])
    return mapping


class _Flattening:
    """One walk over a state, and the tensors met on the way."""

    def __init__(self) -> None:
        self.tensors: dict[str, torch.Tensor] = {}
        self._names: dict[tuple[Any, ...], str] = {}

    def visit(self, value: Any, path: str) -> JsonValue:
        kind = type(value)
        if value is None or kind in (bool, int, str):
            return value  # type: ignore[no-any-return]
        if kind is float:
            return value if math.isfinite(value) else {"float": str(value)}
        if kind in _TENSOR_TYPES:
            return {"tensor": self._add(value, path)}
        if kind in (list, tuple):
            values = self._each(value, path)
            return values if kind is list else {"tuple": values}
        if kind in _MAPPINGS:
            return self._visit_mapping(value, path)
        if isinstance(value, np.generic) and value.dtype.kind in "biuf" and value.dtype.itemsize <= 8:
            return {"numpy": [value.dtype.name, self.visit(value.item(), path)]}
        raise _misfit(path, kind)

    def _each(self, values: Iterable[Any], path: str) -> list[JsonValue]:
        return [self.visit(value, _join(path, index)) for index, value in enumerate(values)]

    def _visit_mapping(self, mapping: Mapping[Any, Any], path: str) -> JsonValue:
        pairs: list[JsonValue] = []
        for key, value in mapping.items():
            if type(key) not in (str, int, float, bool, type(None)):
                raise _misfit(_join(path, key), type(key), role="a key")
            pairs.append([self.visit(key, path), self.visit(value, _join(path, key))])
        skeleton: dict[str, JsonValue] = {_MAPPINGS[type(mapping)]: pairs}
        # Modules keep the version of their state here, and read old states by it.
        metadata = getattr(mapping, "_metadata", None)
        if metadata is not None:
            skeleton["metadata"] = self.visit(metadata, _join(path, "_metadata"))
        return skeleton

    def _add(self, tensor: torch.Tensor, path: str) -> str:
        if tensor.layout != torch.strided or tensor.is_quantized or tensor.is_meta or tensor.dtype not in _DTYPE_CODES:
            form = "meta" if tensor.is_meta else f"{tensor.layout}, {tensor.dtype}"
            raise CheckpointError(
                f"cannot save {path or 'this state'}: a tensor of this form ({form}) cannot be written"
            )
        identity = (
            tensor.device,
            tensor.data_ptr(),
            tensor.shape,
            tensor.stride(),
            tensor.dtype,
            tensor.is_conj(),
            tensor.is_neg(),
        )
        # Empty tensors all have the address 0, so they are never taken for one another.
        if tensor.numel() and identity in self._names:
            return self._names[identity]
        name = self._free_name(path or "value")
        self._names[identity] = name
        self.tensors[name] = tensor.detach()
        return name

    def _free_name(self, path: str) -> str:
        """Tell apart paths that look alike, such as the key ``"a.b"`` and ``b`` inside ``a``, or 0 and ``"0"``."""
        candidates = itertools.chain([path], (f"{path}#{number}" for number in itertools.count(2)))
        # The format keeps this one name for itself.
        return next(name for name in candidates if name not in self.tensors and name != "__metadata__")


def _join(path: str, key: Any) -> str:
    return f"{path}.{key}" if path else str(key)


def _misfit(path: str, kind: type, role: str = "it") -> CheckpointError:
    return CheckpointError(
        f"cannot save {path or 'this state'}: {role} is of type {kind.__module__}.{kind.__qualname__}, which has no "
        f"form without pickle; a state may hold {_WHAT_FITS}: keep anything else out of state_dict(), or build it anew"
    )
