"""crc32c over arrays: the checksum of payload in the store and of records in the token log."""

import google_crc32c
import numpy as np
from numpy.typing import NDArray


def crc32c(*buffers: bytes | NDArray[np.generic], start: int = 0) -> int:
    """Compute the crc32c (Castagnoli) of the concatenated buffers, continuing from `start`.

    >>> hex(crc32c(b"123456789"))
    '0xe3069283'
    """
    value = start
    for buffer in buffers:
        value = google_crc32c.extend(value, _readable(buffer))
    return int(value)


def payload_crc(*arrays: NDArray[np.generic] | None) -> int:
    """Compute the crc32c of a payload: each array preceded by its length in bytes, so that shifted boundaries differ.

    None (a null list) counts as length 2^64 - 1 without bytes.
    """
    value = 0
    for array in arrays:
        if array is None:
            value = crc32c(b"\xff" * 8, start=value)
        else:
            value = crc32c(array.nbytes.to_bytes(8, "little"), array, start=value)
    return value


def _readable(buffer: bytes | NDArray[np.generic]) -> bytes | NDArray[np.uint8]:
    """Return the buffer in a form that the C extension reads without a copy: bytes, or a contiguous uint8 array."""
    if isinstance(buffer, bytes):
        return buffer
    return np.ascontiguousarray(buffer).reshape(-1).view(np.uint8)
