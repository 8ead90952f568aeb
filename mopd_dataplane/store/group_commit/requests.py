"""Samples or signals of one writer as the bytes of a request, and the reply to it.

A request is a line of JSON, sealed with a checksum, and the bytes of all arrays one after another, with another
checksum in the line. Nothing in it is executed when it is read.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mopd_dataplane.base.checksum import crc32c
from mopd_dataplane.base.sealed_json import seal, seal_line, unseal
from mopd_dataplane.errors import DamagedError, MismatchError
from mopd_dataplane.records import Sample, Signal

FORMAT = 1
"""Format of requests and replies; a committer refuses others."""
_RECORDS: dict[str, type[Sample] | type[Signal]] = {"sample": Sample, "signal": Signal}
_PLAIN_KINDS = "biuf"
"""Kinds of numpy types that an array may have."""


@dataclass(frozen=True)
class Request:
    """A batch that a writer wants committed."""

    store: str
    """Id of the store that the writer opened."""
    samples: tuple[Sample, ...] = ()
    teacher: str = ""
    """Teacher of `signals`."""
    kind: str = ""
    """Kind of all `signals`."""
    signals: tuple[Signal, ...] = ()


@dataclass(frozen=True)
class Reply:
    """What became of a request, after it is durable."""

    rows: tuple[int, ...] = ()
    """Row id of each sample in `samples`; -1 for a deleted one."""
    dropped: tuple[int, ...] = ()
    """Positions of samples whose uid names other content in the store, or that were deleted. Not uids: a reply may
    outlive a deletion."""
    inserted: int = 0
    """Number of signals that were not in the store before."""
    error: str = ""
    """Name of the class of an error; nothing was committed then."""
    message: str = ""
    """Text of the error."""
    errno: int = 0
    """Number of an error of the operating system, by which a full disk is told from others; 0 for other errors."""


def encode_request(request: Request) -> bytes:
    """Return the bytes of a request. Raises MismatchError for an array of objects or text."""
    arrays: list[NDArray[Any]] = []
    described = {
        "format": FORMAT,
        "store": request.store,
        "teacher": request.teacher,
        "kind": request.kind,
        "samples": [_describe(sample, arrays) for sample in request.samples],
        "signals": [_describe(signal, arrays) for signal in request.signals],
    }
    payload = b"".join(array.tobytes() for array in arrays)
    return f"{seal_line({**described, 'payload_crc32c': crc32c(payload)})}\n".encode() + payload


def decode_request(content: bytes, where: str) -> Request:
    """Return the request that `encode_request` wrote. Raises DamagedError when the bytes are others, MismatchError for
    a request of another format. where: name of the file, for the error."""
    line, _, payload = content.partition(b"\n")
    described = unseal(line, where)
    if described.get("format") != FORMAT:
        raise MismatchError(
            f"{where} has format {described.get('format')!r}, this release reads {FORMAT}: run the same release in "
            "every process that writes to the store"
        )
    if described["payload_crc32c"] != crc32c(payload):
        raise DamagedError(f"{where} fails its checksum; nothing of it was committed: commit the same batch again")
    arrays = _Arrays(payload)
    return Request(
        store=described["store"],
        samples=tuple(_restore("sample", record, arrays) for record in described["samples"]),
        teacher=described["teacher"],
        kind=described["kind"],
        signals=tuple(_restore("signal", record, arrays) for record in described["signals"]),
    )


def encode_reply(reply: Reply) -> bytes:
    """Return the bytes of a reply."""
    return seal({"format": FORMAT, **{field.name: getattr(reply, field.name) for field in fields(Reply)}})


def decode_reply(content: bytes, where: str) -> Reply:
    """Return the reply that `encode_reply` wrote. Raises DamagedError when the bytes are others."""
    described = unseal(content, where)
    described.pop("format")
    values: dict[str, Any] = {n: tuple(value) if isinstance(value, list) else value for n, value in described.items()}
    return Reply(**values)


def _describe(record: Sample | Signal, arrays: list[NDArray[Any]]) -> dict[str, Any]:
    """Return the record as JSON; of an array dtype and shape, and the array is appended to `arrays`."""

    def described(value: Any, name: str) -> Any:
        if isinstance(value, dict):
            return {"fields": {inner: described(part, inner) for inner, part in value.items()}}
        if isinstance(value, np.ndarray):
            if value.dtype.kind not in _PLAIN_KINDS:
                raise MismatchError(
                    f"{record.uid}: {name} holds {value.dtype} values; give an array of numbers or booleans"
                )
            arrays.append(value)
            return {"dtype": value.dtype.str, "shape": value.shape}
        return value.item() if isinstance(value, np.generic) else value

    return {field.name: described(getattr(record, field.name), field.name) for field in fields(record)}


def _restore(kind: str, described: dict[str, Any], arrays: _Arrays) -> Any:
    def restored(value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        if "fields" in value:
            return {name: restored(part) for name, part in value["fields"].items()}
        return arrays.take(value["dtype"], value["shape"])

    return _RECORDS[kind](**{name: restored(value) for name, value in described.items()})


class _Arrays:
    """Arrays that lie one after another in a payload."""

    def __init__(self, payload: bytes) -> None:
        self._payload, self._offset = payload, 0

    def take(self, dtype: str, shape: Sequence[int]) -> NDArray[Any]:
        """Return the next array; read-only, without a copy."""
        count = math.prod(shape)
        array = np.frombuffer(self._payload, dtype, count, self._offset).reshape(shape)
        self._offset += array.nbytes
        return array
