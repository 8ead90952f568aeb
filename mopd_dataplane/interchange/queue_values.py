"""Values that a framework put into a queue, as numpy arrays and plain objects; no torch is loaded.

transferqueue/codec.py writes them: tensors raw, everything else as msgpack with extension types for tensors, numpy
arrays and tuples.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from mopd_dataplane.errors import DamagedError, InputError
from mopd_dataplane.store.queue.values import Value

try:
    import msgspec
except ImportError:
    raise InputError(
        "msgspec, which reads the values of a queue, is missing: pip install 'mopd-dataplane[transferqueue]'"
    ) from None

TENSOR, ARRAY, TUPLE = 1, 2, 3
"""Codes of the msgpack extensions."""


def plain_value(value: Value) -> Any:
    """Return a value: a tensor or array as a numpy array, bfloat16 as float32. Raises DamagedError."""
    try:
        if value.kind == "tensor":
            return array_of(value.dtype, value.shape, value.data)
        return msgspec.msgpack.decode(value.data, ext_hook=_from_extension, strict=False)
    except (msgspec.DecodeError, ValueError, LookupError, TypeError) as error:
        raise DamagedError(f"a {value.kind} of {len(value.data)} bytes cannot be decoded: {error}") from None


def array_of(dtype: str, shape: tuple[int, ...], data: bytes) -> NDArray[Any]:
    """Build the array of a tensor's bytes. Raises ValueError, TypeError for a dtype that numpy does not have."""
    if dtype == "bfloat16":  # the upper half of a float32
        return (np.frombuffer(data, np.uint16).astype(np.uint32) << 16).view(np.float32).reshape(shape)
    return np.frombuffer(data, np.dtype(dtype)).reshape(shape)


def _from_extension(code: int, data: memoryview) -> Any:
    content = msgspec.msgpack.decode(data, ext_hook=_from_extension, strict=False)
    if code == TENSOR:
        dtype, shape, raw = content
        return array_of(dtype, tuple(shape), raw)
    if code == ARRAY:
        (kind, shape, scalar), raw = content
        array = np.frombuffer(raw, np.dtype(kind)).reshape(shape)
        return array[()] if scalar else array
    if code == TUPLE:
        return tuple(content)
    raise ValueError(f"extension type {code} is unknown")
