"""Values of a queue as bytes, and back: tensors raw, everything else as msgpack. Nothing is pickled.

msgpack carries None, bool, int, float, str, bytes, lists and dicts; extension types carry tensors, numpy arrays and
scalars, and tuples, at any depth.
"""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import torch

from mopd_dataplane.errors import DamagedError, InputError
from mopd_dataplane.interchange.queue_values import ARRAY, TENSOR, TUPLE
from mopd_dataplane.store.queue.values import Value


def encode(value: Any) -> Value:
    """Raises InputError naming the type of a value that cannot be stored."""
    if isinstance(value, torch.Tensor):
        if value.is_nested or value.is_sparse:
            raise InputError("a nested or sparse tensor cannot be stored; put each row as the value of a sample")
        return Value("tensor", _bytes_of(value), str(value.dtype).removeprefix("torch."), tuple(value.shape))
    return Value("msgpack", msgspec.msgpack.encode(_plain(value)))


def decode(value: Value) -> Any:
    """The value that was encoded; a tensor owns its memory and lies on the CPU. Raises DamagedError."""
    try:
        if value.kind == "tensor":
            return _tensor(value.dtype, value.shape, value.data)
        return msgspec.msgpack.decode(value.data, ext_hook=_from_extension, strict=False)
    except (msgspec.DecodeError, ValueError, RuntimeError, LookupError, TypeError) as error:
        raise DamagedError(f"a {value.kind} of {len(value.data)} bytes cannot be decoded: {error}") from None


def _plain(value: Any) -> Any:
    if isinstance(value, np.generic | np.ndarray):
        if value.dtype.hasobject:
            raise InputError(f"a numpy array of {value.dtype} cannot be stored; give numbers, strings or lists")
        header = [value.dtype.str, list(value.shape), isinstance(value, np.generic)]
        return _extension(ARRAY, [header, np.ascontiguousarray(value).tobytes()])
    # After numpy, some of whose scalars are strings, bytes or floats too.
    if value is None or isinstance(value, bool | int | float | str | bytes):
        return value
    if isinstance(value, torch.Tensor):
        stored = encode(value)
        return _extension(TENSOR, [stored.dtype, list(stored.shape), stored.data])
    if isinstance(value, tuple):
        return _extension(TUPLE, [_plain(item) for item in value])
    if isinstance(value, list):
        return [_plain(item) for item in value]
    if isinstance(value, dict):
        return {_plain(key): _plain(item) for key, item in value.items()}
    raise InputError(
        f"a {type(value).__module__}.{type(value).__qualname__} cannot be stored; give tensors, arrays, numbers, "
        "strings, bytes, and lists, tuples or dicts of these"
    )


def _extension(code: int, content: Any) -> msgspec.msgpack.Ext:
    return msgspec.msgpack.Ext(code, msgspec.msgpack.encode(content))


def _from_extension(code: int, data: memoryview) -> Any:
    content = msgspec.msgpack.decode(data, ext_hook=_from_extension, strict=False)
    if code == TENSOR:
        dtype, shape, raw = content
        return _tensor(dtype, tuple(shape), raw)
    if code == ARRAY:
        (kind, shape, scalar), raw = content
        array = np.frombuffer(raw, np.dtype(kind)).reshape(shape).copy()
        return array[()] if scalar else array
    if code == TUPLE:
        return tuple(content)
    raise ValueError(f"extension type {code} is unknown")


def _bytes_of(tensor: torch.Tensor) -> bytes:
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""


def _tensor(name: str, shape: tuple[int, ...], data: bytes) -> torch.Tensor:
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"no torch dtype {name!r}")
    if not data:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(bytearray(data), dtype=dtype).reshape(shape)
