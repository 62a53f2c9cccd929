from __future__ import annotations

import json
import math
from collections import Counter, OrderedDict

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.optim import lr_scheduler

from raytrain_platform.checkpoint.snapshot import Snapshot, decode, digest, encode, flatten, unflatten
from raytrain_platform.errors import CheckpointError

DTYPE_NAMES = """
    float32 float64 bfloat16 float16 float8_e4m3fn float8_e5m2 complex64 int64
    int32 int16 int8 uint64 uint32 uint16 uint8 bool
"""
DTYPES = [getattr(torch, name) for name in DTYPE_NAMES.split()]


def through_storage(state):
    """The state after flattening, the bytes of both files, and back."""
    tensors, skeleton = flatten(state)
    content = b"".join(encode(tensors))
    return unflatten(decode(content), json.loads(json.dumps(skeleton, allow_nan=False)))


def bits(tensor):
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).tolist()


def assert_same(left, right):
    """Equal in type, structure, order and every bit."""
    if isinstance(left, torch.Tensor):
        assert isinstance(right, torch.Tensor)
        assert (left.dtype, left.shape, bits(left)) == (right.dtype, right.shape, bits(right))
        return
    assert type(left) is type(right)
    if isinstance(left, dict):
        for left_key, right_key in zip(left, right, strict=True):
            assert_same(left_key, right_key)
            assert_same(left[left_key], right[right_key])
        assert_same(getattr(left, "_metadata", None), getattr(right, "_metadata", None))
    elif isinstance(left, list | tuple):
        assert len(left) == len(right)
        for left_item, right_item in zip(left, right, strict=True):
            assert_same(left_item, right_item)
    elif isinstance(left, float | np.floating):
        assert (math.isnan(left) and math.isnan(right)) or left.hex() == right.hex()
    else:
        assert left == right


@st.composite
def any_tensor(draw):
    dtype = draw(st.sampled_from(DTYPES))
    shape = draw(st.lists(st.integers(0, 3), max_size=3))
    num_bytes = math.prod(shape) * dtype.itemsize
    # Arbitrary bytes reach every NaN payload and denormal; a bool has only two values.
    content = draw(st.binary(min_size=num_bytes, max_size=num_bytes))
    if dtype == torch.bool:
        content = bytes(byte % 2 for byte in content)
    tensor = torch.empty(shape, dtype=dtype)
    if num_bytes:
        tensor.reshape(-1).view(torch.uint8).copy_(torch.frombuffer(bytearray(content), dtype=torch.uint8))
    return tensor


keys = st.text(max_size=5) | st.integers() | st.booleans() | st.none() | st.floats(allow_nan=False)
scalars = st.none() | st.booleans() | st.integers() | st.floats() | st.text()


def nested(inner):
    dicts = st.dictionaries(keys, inner, max_size=4)
    lists = st.lists(inner, max_size=4)
    counters = st.dictionaries(keys, st.integers(), max_size=3).map(Counter)
    return lists | lists.map(tuple) | dicts | dicts.map(OrderedDict) | counters


@given(state=st.recursive(scalars | any_tensor(), nested, max_leaves=20))
def test_any_state_comes_back_bit_for_bit(state):
    assert_same(state, through_storage(state))


@given(state=st.recursive(scalars | any_tensor(), nested, max_leaves=20))
def test_what_comes_back_has_the_same_digest(state):
    tensors, _ = flatten(state)
    again, _ = flatten(through_storage(state))
    assert digest(again) == digest(tensors)


@pytest.mark.parametrize(
    "state",
    [
        {"a.b": torch.tensor(1), "a": {"b": torch.tensor(2)}},
        {0: torch.tensor(1), "0": torch.tensor(2)},
        {"a": torch.tensor(1), "a#2": torch.tensor(2), "": {"a": torch.tensor(3)}},
        {"__metadata__": torch.tensor(1)},
        {"dict": [["tensor", "x"]], "tensor": "x", "float": {"float": "nan"}},
        torch.tensor(1),
    ],
    ids=["dots", "int-and-str", "marks", "reserved", "words-of-the-skeleton", "bare"],
)
def test_names_that_look_alike_stay_apart(state):
    assert_same(state, through_storage(state))


@pytest.mark.parametrize(
    "value", [np.float64(0.1), np.float32("nan"), np.int32(-7), np.bool_(True), np.uint64(2**64 - 1)]
)
def test_numpy_scalars_keep_their_type(value):
    assert_same({"lr": value}, through_storage({"lr": value}))


def test_tied_tensors_are_written_once_and_come_back_tied():
    embedding = nn.Embedding(5, 3)
    head = nn.Linear(3, 5, bias=False)
    head.weight = embedding.weight
    state = nn.ModuleDict({"embedding": embedding, "head": head}).state_dict()
    tensors, _ = flatten(state)
    back = through_storage(state)
    assert list(tensors) == ["embedding.weight"]
    assert back["embedding.weight"] is back["head.weight"]
    assert_same(state, back)


def test_views_of_one_storage_stay_different_tensors():
    base = torch.arange(6.0)
    complex_base = torch.tensor([1 + 2j, 3 - 1j])
    state = {
        "first": base[:3],
        "overlapping": base[1:4],
        "square": base[:4].reshape(2, 2),
        "transposed": base[:4].reshape(2, 2).T,
        "whole": base,
        "as_integers": base.view(torch.int32),
        "expanded": torch.tensor([1.0]).expand(4),
        "plain": complex_base,
        "conjugate": complex_base.conj(),
        "negative": complex_base.conj().imag,
        "imaginary": complex_base.imag,
        "empty": torch.empty(0),
        "also_empty": torch.empty(0),
    }
    tensors, _ = flatten(state)
    back = through_storage(state)
    assert list(tensors) == list(state)
    assert_same({name: tensor.clone().resolve_conj().resolve_neg() for name, tensor in state.items()}, back)


def trained(num_steps, state=None):
    """A small training with everything that has state: batch norm, bf16, momentum, param groups, a schedule."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 2))
    model[2].to(torch.bfloat16)
    optimizer = torch.optim.AdamW([{"params": model[0].parameters()}, {"params": model[2].parameters(), "lr": 3e-3}])
    scheduler = lr_scheduler.SequentialLR(
        optimizer, [lr_scheduler.LinearLR(optimizer), lr_scheduler.CosineAnnealingLR(optimizer, 9)], milestones=[3]
    )
    if state is not None:
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        scheduler.load_state_dict(state["scheduler"])
    for step in range(0 if state is None else state["step"], num_steps):
        batch = torch.randn(6, 4, generator=torch.Generator().manual_seed(step))
        hidden = model[1](model[0](batch)).to(torch.bfloat16)
        model[2](hidden).float().square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
    return {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "scheduler": scheduler.state_dict(),
        "step": num_steps,
    }


def test_training_goes_on_from_a_snapshot_as_if_nothing_had_happened():
    resumed = trained(10, through_storage(trained(5)))
    assert_same(resumed, trained(10))


@pytest.mark.parametrize(
    "make",
    [
        lambda o: lr_scheduler.MultiStepLR(o, [3, 3, 5]),
        lambda o: lr_scheduler.LambdaLR(o, lambda epoch: 0.9**epoch),
        lambda o: lr_scheduler.OneCycleLR(o, 0.1, 20),
        lambda o: lr_scheduler.CyclicLR(o, 0.1, 0.2),
        lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 4),
        lambda o: lr_scheduler.ChainedScheduler([lr_scheduler.ConstantLR(o), lr_scheduler.ExponentialLR(o, 0.9)]),
        lambda o: lr_scheduler.ReduceLROnPlateau(o),
    ],
    ids=["multi-step", "lambda", "one-cycle", "cyclic", "warm-restarts", "chained", "plateau"],
)
def test_the_schedules_of_torch_can_be_saved(make):
    optimizer = torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1, momentum=0.9)
    state = make(optimizer).state_dict()
    assert_same(state, through_storage(state))


class Warmup:
    """A schedule as an object: its attributes go into ``state_dict()``."""

    def __init__(self):
        self.curve = math.sqrt

    def __call__(self, epoch):
        return self.curve(epoch + 1)


def test_what_has_no_form_without_pickle_is_named_with_its_path_and_type():
    optimizer = torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1)
    state = {"scheduler": lr_scheduler.LambdaLR(optimizer, Warmup()).state_dict()}
    with pytest.raises(
        CheckpointError, match=r"scheduler\.lr_lambdas\.0\.curve: it is of type builtins\.builtin_function"
    ):
        flatten(state)


@pytest.mark.parametrize(
    ("state", "complaint"),
    [
        ({"a": [0, {1, 2}]}, r"save a\.1: it is of type builtins\.set"),
        ({"a": lambda: 0}, r"save a: it is of type builtins\.function"),
        ({("x", 1): 0}, r"a key is of type builtins\.tuple"),
        ({"a": torch.eye(2).to_sparse()}, r"save a: a tensor of this form \(torch\.sparse_coo"),
        ({"a": torch.empty(2, device="meta")}, r"save a: a tensor of this form \(meta"),
        ({"a": torch.zeros(2, dtype=torch.complex128)}, r"save a: .*complex128"),
        (np.longdouble(1), r"this state: it is of type numpy\.longdouble"),
    ],
    ids=["set", "function", "key", "sparse", "meta", "complex128", "longdouble"],
)
def test_what_cannot_be_written_is_refused_before_anything_is(state, complaint):
    with pytest.raises(CheckpointError, match=complaint):
        flatten(state)


def test_a_state_that_contains_itself_is_refused():
    state = {}
    state["self"] = state
    with pytest.raises(CheckpointError, match="contains itself"):
        flatten(state)


@pytest.mark.parametrize(
    "skeleton",
    [{"tensor": "gone"}, {"pickle": "x"}, {"dict": [["key"]]}, {}, {"float": "1"}, {"tuple": {}}],
    ids=["missing-tensor", "unknown", "no-pair", "empty", "ordinary-float", "no-list"],
)
def test_a_skeleton_that_is_none_is_refused(skeleton):
    with pytest.raises(CheckpointError):
        unflatten({}, skeleton)


def test_equal_tensors_have_equal_digests_in_any_order_and_layout():
    tensors = {"a": torch.arange(6.0).reshape(2, 3), "b": torch.tensor(1)}
    other = {"b": torch.tensor(1), "a": torch.arange(6.0).reshape(2, 3).T.contiguous().T}
    assert digest(tensors) == digest(other)


@given(tensor=any_tensor(), data=st.data())
def test_every_bit_and_every_name_counts_in_a_digest(tensor, data):
    before = digest({"a": tensor, "b": torch.tensor(0)})
    assert digest({"a": tensor, "c": torch.tensor(0)}) != before
    assert digest({"a": tensor.unsqueeze(0), "b": torch.tensor(0)}) != before
    if tensor.dtype == torch.float32:
        assert digest({"a": tensor.view(torch.int32), "b": torch.tensor(0)}) != before
    if tensor.numel() and tensor.dtype != torch.bool:
        changed = tensor.clone()
        index = data.draw(st.integers(0, tensor.numel() * tensor.itemsize - 1))
        changed.reshape(-1).view(torch.uint8)[index] ^= 1 << data.draw(st.integers(0, 7))
        assert digest({"a": changed, "b": torch.tensor(0)}) != before


def test_a_snapshot_gives_its_state_back():
    state = {"weights": torch.ones(2), "step": 3}
    assert_same(Snapshot(3, *flatten(state)).state(), state)


@given(tensors=st.lists(any_tensor(), max_size=6))
def test_every_tensor_starts_where_a_reader_can_map_it(tensors):
    content = b"".join(encode({f"t{index}": tensor for index, tensor in enumerate(tensors)}))
    num_header_bytes = int.from_bytes(content[:8], "little")
    for name, entry in json.loads(content[8 : 8 + num_header_bytes]).items():
        start, end = entry["data_offsets"]
        tensor = tensors[int(name[1:])]
        assert (8 + num_header_bytes + start) % tensor.itemsize == 0
        assert list(content[8 + num_header_bytes :][start:end]) == bits(tensor)


def test_bytes_that_are_no_safetensors_file_are_refused():
    with pytest.raises(CheckpointError, match="not a safetensors file"):
        decode(b"\x80\x04 a pickle, for instance")
