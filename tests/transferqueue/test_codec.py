"""Values come back as they were; what cannot is refused by name."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from advice import advises
from hypothesis import given, settings
from hypothesis import strategies as st

from mopd_dataplane.errors import DamagedError, InputError
from mopd_dataplane.store.queue.values import Value
from mopd_dataplane.transferqueue.codec import decode, encode

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.int32, torch.uint8, torch.bool,
          torch.float64, torch.float8_e4m3fn]  # fmt: skip
plain = (
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats(allow_nan=False) | st.text() | st.binary()
)
keys = st.text() | st.integers(-(2**63), 2**63 - 1)
nested = st.recursive(
    plain,
    lambda inner: st.lists(inner) | st.dictionaries(keys, inner) | st.lists(inner).map(tuple),
    max_leaves=20,
)


@settings(max_examples=300, deadline=None)
@given(value=nested)
def test_plain_values_come_back_with_their_types(value: Any) -> None:
    decoded_value = decode(encode(value))
    assert decoded_value == value
    assert repr(decoded_value) == repr(value)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (0,), (5,), (2, 3, 4), (0, 3)], ids=str)
def test_tensors_come_back_bit_by_bit(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    value = torch.randint(0, 2, shape).to(dtype)
    for tensor in (decode(encode(value)), decode(encode({"a": [value]}))["a"][0]):
        assert (tensor.dtype, tensor.shape) == (value.dtype, value.shape)
        assert torch.equal(tensor.view(torch.uint8), value.view(torch.uint8)) if shape else tensor == value
        tensor.zero_()  # it owns its memory


def test_a_part_of_a_tensor_is_stored_alone() -> None:
    value = torch.arange(1000.0).reshape(10, 100).t()[3]
    stored = encode(value)
    assert len(stored.data) == 40
    assert torch.equal(decode(stored), value)


def test_arrays_and_scalars() -> None:
    array = np.arange(6, dtype=">i2").reshape(2, 3)
    scalars = [np.float64(0.5), np.str_("é"), np.bytes_(b"ab"), np.bool_(True)]
    for scalar in scalars:
        assert type(decode(encode(scalar))) is type(scalar)
        assert decode(encode(scalar)) == scalar
    fields = decode(encode({"a": array, "b": np.float32(1.5)}))
    assert (fields["a"].dtype, fields["a"].tolist()) == (array.dtype, array.tolist())
    assert isinstance(fields["b"], np.float32)


@pytest.mark.parametrize("value", [object(), {"a": [print]}, np.array([object()]), {1, 2}], ids=repr)
def test_other_objects_are_refused(value: Any) -> None:
    with pytest.raises(InputError, match=r"cannot be stored"):
        encode(value)


def test_what_is_advised_in_place_of_other_objects_is_taken() -> None:
    with advises(" cannot be stored; give tensors, arrays, numbers, "):
        encode(object())
    for value in (torch.ones(2), np.ones(2), 1, 0.5, "a", b"a", [1], (1, 2), {"a": 1}):
        decode(encode(value))
    with advises(" cannot be stored; give numbers, strings or lists"):
        encode(np.array([object()]))
    for array in (np.array([1]), np.array(["a"]), []):
        decode(encode(array))


@pytest.mark.parametrize(
    "value",
    [
        Value("tensor", b"abc", "float32", (1,)),
        Value("tensor", b"abcd", "load", (1,)),
        Value("msgpack", b"\xc1"),
        Value("msgpack", b"\xc7\x00\x63"),
    ],
    ids=str,
)
def test_nonsense_is_damage(value: Value) -> None:
    with pytest.raises(DamagedError):
        decode(value)
