"""The header of a safetensors file, checked against the file before anything of it is read or allocated.

A file is 8 bytes with the header's length, the header (JSON: dtype, shape and span of each tensor), and the tensors
without gaps. The safetensors package refuses a file that is not so; this names the tensor.
"""

import json
import math
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

from mopd_dataplane.errors import DamagedError

MAX_HEADER_BYTES = 100_000_000
"""Longest header, as in the safetensors package."""
METADATA = "__metadata__"
_BITS = {
    "BOOL": 8, "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6, "U8": 8, "I8": 8, "F8_E5M2": 8, "F8_E4M3": 8, "F8_E8M0": 8,
    "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8, "I16": 16, "U16": 16, "F16": 16, "BF16": 16, "I32": 32, "U32": 32, "F32": 32,
    "C64": 64, "F64": 64, "I64": 64, "U64": 64,
}  # fmt: skip
"""Bits of a number of each dtype."""


class TensorEntry(NamedTuple):
    """A tensor of a file."""

    dtype: str
    """Its name in the file: "BF16"."""
    shape: tuple[int, ...]
    start: int
    """Position of its first byte in the file."""
    end: int


class TensorHeader(NamedTuple):
    """The header of a file."""

    tensors: dict[str, TensorEntry]
    metadata: dict[str, str]


def read_tensor_header(file: Path) -> TensorHeader:
    """Read the header of a safetensors file. Raises DamagedError, naming file and tensor, when the two do not fit."""
    try:
        with file.open("rb") as stored:
            size = file.stat().st_size
            length = int.from_bytes(stored.read(8), "little")
            longest = min(size - 8, MAX_HEADER_BYTES)
            if not 2 <= length <= longest:
                raise _damage(
                    file, f"its first 8 bytes say that its header has {length:,} bytes; allowed are 2 to {longest:,}"
                )
            header = json.loads(stored.read(length))
            if not isinstance(header, dict):
                raise ValueError(f"{type(header).__name__} instead of an object")
            metadata = {str(name): str(value) for name, value in (header.pop(METADATA, None) or {}).items()}
    except DamagedError:
        raise
    except (OSError, ValueError, AttributeError, RecursionError) as error:
        raise _damage(file, f"its header cannot be read ({error!s:.200})") from None
    tensors = {name: _entry(file, name, entry, 8 + length) for name, entry in header.items()}
    _require_cover(file, tensors, 8 + length, size)
    return TensorHeader(tensors, metadata)


def check_tensor_files(folder: Path) -> None:
    """Check the header of every safetensors file of a folder. Raises DamagedError, naming file and tensor."""
    for file in sorted(folder.glob("*.safetensors")):
        read_tensor_header(file)


def _entry(file: Path, name: str, entry: object, first: int) -> TensorEntry:
    """A tensor as the header has it; first: position of the first tensor in the file."""
    try:
        dtype, shape, (start, end) = entry["dtype"], entry["shape"], entry["data_offsets"]  # type: ignore[index]
        numbers = [start, end, *shape]
    except (LookupError, TypeError, ValueError):
        raise _damage(
            file, f"tensor {name!r:.80} needs dtype, shape and two data_offsets, it has {entry!r:.80}"
        ) from None
    if not isinstance(dtype, str) or dtype not in _BITS:
        raise _damage(file, f"tensor {name!r:.80} has dtype {dtype!r:.40}, allowed are {', '.join(_BITS)}")
    if any(type(number) is not int or number < 0 for number in numbers):
        raise _damage(
            file,
            f"tensor {name!r:.80} has shape {shape!r:.80} and data_offsets {start!r:.20} to {end!r:.20}; whole numbers "
            "from 0 on are needed",
        )
    nbytes = -(-math.prod(shape) * _BITS[dtype] // 8)
    if end - start != nbytes:
        raise _damage(
            file, f"tensor {name!r:.80} lies in {end - start:,} bytes, {dtype} of shape {shape!r:.80} needs {nbytes:,}"
        )
    return TensorEntry(dtype, tuple(shape), first + start, first + end)


def _require_cover(file: Path, tensors: dict[str, TensorEntry], first: int, size: int) -> None:
    """Raise DamagedError unless the tensors lie one behind the other from `first` to the end of the file."""
    spans = sorted((entry.start, entry.end, name) for name, entry in tensors.items())
    for start, end, name in spans:
        if end > size:
            raise _damage(file, f"tensor {name!r:.80} lies in bytes {start:,} to {end:,}, but the file has {size:,}")
    for (_, before, other), (start, _, name) in pairwise([(0, first, ""), *spans]):
        if start != before:
            neighbour = f"tensor {other!r:.80}" if other else "the header"
            raise _damage(
                file, f"tensor {name!r:.80} begins at byte {start:,}, but {neighbour} ends at byte {before:,}"
            )
    end = spans[-1][1] if spans else first
    if end != size:
        raise _damage(file, f"its tensors end at byte {end:,}, but the file has {size:,} bytes")


def _damage(file: Path, problem: str) -> DamagedError:
    return DamagedError(f"{file}: {problem}; restore the file from a copy, or download it again")
