"""Records of the token log: one class per kind, each with its encoding.

A sample is named by a handle, a number that is unique in one writer's log. Text fields travel as JSON, per-token
fields as little-endian columns; log-probs as float32 bits, so what is read back is what was sampled, bit for bit.
"""

from __future__ import annotations

import json
import struct
import typing
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from typing import Any, ClassVar, Self

import numpy as np
from numpy.typing import NDArray

from mopd_dataplane.base.log.framing import CLOSE, SYNC
from mopd_dataplane.base.sampling_masks import SamplingMasks
from mopd_dataplane.errors import MismatchError
from mopd_dataplane.records import FORMAT_1_NAMES
from mopd_dataplane.rollout.partial_sample import SampleSpec
from mopd_dataplane.rollout.tools.sandbox import Call, Command, Result

_TEXT_FIELDS = tuple(name for name in SampleSpec.__slots__ if name != "prompt_ids")


def _values(record: Any) -> list[Any]:
    """Return the values of a record's fields, like dataclasses.astuple without its copies."""
    return [getattr(record, name) for name in record.__slots__]


class _Numbers:
    """Encoding of a record of numbers only, laid out by `layout`."""

    __slots__ = ()
    layout: ClassVar[str]

    def encode(self) -> bytes:
        return struct.pack(self.layout, *_values(self))

    @classmethod
    def decode(cls, body: bytes) -> Self:
        return cls(*struct.unpack(cls.layout, body))


class _NumbersAndText:
    """Encoding of a record of numbers, laid out by `layout`, followed by a text."""

    __slots__ = ()
    layout: ClassVar[str]

    def encode(self) -> bytes:
        *numbers, text = _values(self)
        return struct.pack(self.layout, *numbers) + str(text).encode()

    @classmethod
    def decode(cls, body: bytes) -> Self:
        fields = (*struct.unpack_from(cls.layout, body), body[struct.calcsize(cls.layout) :].decode())
        return cls(*fields)


def _packed(types: Iterable[str | np.dtype[Any]], *columns: NDArray[Any]) -> bytes:
    """Encode columns as values of these types, one column after the other."""
    return b"".join(np.ascontiguousarray(column, of).data for column, of in zip(columns, types, strict=True))


def _packed_rows(types: Iterable[str | np.dtype[Any]], *columns: NDArray[Any]) -> bytes:
    """Encode columns with one value per row. Raises MismatchError for other shapes, which would be read as other
    rows."""
    if columns[0].ndim != 1 or any(column.shape != columns[0].shape for column in columns):
        raise MismatchError(
            f"columns of shapes {[list(column.shape) for column in columns]} are no rows of a token log; one dimension "
            "and one length are needed; mend the engine or the environment, then run again to continue"
        )
    return _packed(types, *columns)


def _unpacked(types: Iterable[str | np.dtype[Any]], count: int, body: bytes, offset: int = 0) -> list[NDArray[Any]]:
    """Decode columns of `count` values each, from an offset on."""
    columns = []
    for of in types:
        columns.append(np.frombuffer(body, of, count=count, offset=offset))
        offset += columns[-1].nbytes
    return columns


@dataclass(frozen=True, slots=True)
class Open:
    """A sample is admitted, or carried into this segment by a checkpoint."""

    kind: ClassVar[int] = 1
    handle: int
    spec: SampleSpec
    interruptions: int = 0
    resume: str = "none"

    def encode(self) -> bytes:
        fields = {name: getattr(self.spec, name) for name in _TEXT_FIELDS}
        prompt = np.array(self.spec.prompt_ids, "<i4")
        fields |= {"interruptions": self.interruptions, "resume": self.resume}
        text = json.dumps(fields).encode()
        return struct.pack("<II", self.handle, len(text)) + text + prompt.tobytes()

    @classmethod
    def decode(cls, body: bytes) -> Open:
        handle, size = struct.unpack_from("<II", body)
        header = json.loads(body[8 : 8 + size])
        fields = {FORMAT_1_NAMES.get(name, name): value for name, value in header.items()}
        interruptions, resume = fields.pop("interruptions"), fields.pop("resume")
        fields["stop"] = tuple(fields["stop"])
        prompt = tuple(np.frombuffer(body, "<i4", offset=8 + size).tolist())
        return cls(handle, SampleSpec(**fields, prompt_ids=prompt), interruptions, resume)


@dataclass(frozen=True, slots=True)
class Step:
    """One decode step: a token of each of B samples, column by column."""

    kind: ClassVar[int] = 2
    types: ClassVar[list[np.dtype[Any]]] = [*map(np.dtype, ("<u4", "<u4", "<u4", "<f4", "u1"))]
    """As dtypes, because numpy would parse their names at every step."""
    row_bytes: ClassVar[int] = 17
    handles: NDArray[np.uint32]
    positions: NDArray[np.uint32]
    tokens: NDArray[np.uint32]
    logprobs: NDArray[np.float32]
    ended: NDArray[np.uint8]

    def encode(self) -> bytes:
        return _packed_rows(self.types, self.handles, self.positions, self.tokens, self.logprobs, self.ended)

    @classmethod
    def decode(cls, body: bytes) -> Step:
        count, more = divmod(len(body), cls.row_bytes)
        if more:
            raise ValueError(f"step body of {len(body)} bytes is not a multiple of {cls.row_bytes}")
        return cls(*_unpacked(cls.types, count, body))


_SUPPORT_IDS = 1 << 15
"""Number of token ids and rows of a SamplingMask record above which another one begins."""


@dataclass(frozen=True, slots=True)
class SamplingMask:
    """Sampling masks of tokens in a STEP or TOKENS record that follows; without that record they are ignored.

    ordinals: index of the token of each mask among its sample's own tokens (environment tokens do not count).
    """

    kind: ClassVar[int] = 14
    handles: NDArray[np.uint32]
    ordinals: NDArray[np.uint32]
    masks: SamplingMasks

    @classmethod
    def records(
        cls, handles: NDArray[np.uint32], ordinals: NDArray[np.uint32], masks: SamplingMasks
    ) -> Iterator[SamplingMask]:
        """Yield the rows [n] in as many records as their size needs; one row has at most 65,536 ids."""
        ends = np.cumsum(masks.sizes)
        parts = (ends + np.arange(len(ends))) // _SUPPORT_IDS
        for part in np.unique(parts):
            rows = np.flatnonzero(parts == part)
            begin = ends[rows[0]] - masks.sizes[rows[0]]
            own = SamplingMasks(masks.sizes[rows], masks.ids[begin : ends[rows[-1]]])
            yield cls(handles[rows], ordinals[rows], own)

    def encode(self) -> bytes:
        columns = (self.handles, self.ordinals, self.masks.sizes, self.masks.ids)
        return struct.pack("<I", len(self.handles)) + _packed(["<u4"] * 4, *columns)

    @classmethod
    def decode(cls, body: bytes) -> SamplingMask:
        (count,) = struct.unpack_from("<I", body)
        handles, ordinals, sizes = _unpacked(["<u4"] * 3, count, body, 4)
        ids = np.frombuffer(body, "<u4", offset=4 + 12 * count)
        if sizes.sum(dtype=np.int64) != len(ids):
            raise ValueError(f"sampling-mask body holds {len(ids)} ids, its sizes sum to {sizes.sum(dtype=np.int64)}")
        return cls(handles, ordinals, SamplingMasks(sizes.astype(np.int32), ids.astype(np.int32)))


_ROUTED_IDS = 1 << 17
"""Number of expert ids of a ROUTED record above which another one begins."""


@dataclass(frozen=True, slots=True)
class Routed:
    """Experts of n tokens, recorded when they were read; those of one sample are consecutive.

    The first record of a position counts; after a resume a repeated position is ignored.
    """

    kind: ClassVar[int] = 15
    handles: NDArray[np.uint32]
    positions: NDArray[np.uint32]
    """[n] absolute positions, counted from the first token of the prompt"""
    ids: NDArray[np.int16]
    """[n, W] expert ids over all layers"""

    @classmethod
    def records(
        cls, handles: NDArray[np.uint32], positions: NDArray[np.uint32], ids: NDArray[np.int16]
    ) -> Iterator[Routed]:
        """Yield the tokens [n] in as many records as their size needs."""
        step = max(1, _ROUTED_IDS // max(ids.shape[1], 1))
        for start in range(0, len(ids), step):
            part = slice(start, start + step)
            yield cls(handles[part], positions[part], ids[part])

    def encode(self) -> bytes:
        columns = _packed(("<u4", "<u4", "<i2"), self.handles, self.positions, self.ids)
        return struct.pack("<II", *self.ids.shape) + columns

    @classmethod
    def decode(cls, body: bytes) -> Routed:
        count, width = struct.unpack_from("<II", body)
        handles, positions = _unpacked(["<u4"] * 2, count, body, 8)
        return cls(handles, positions, np.frombuffer(body, "<i2", offset=8 + 8 * count).reshape(count, width))


@dataclass(frozen=True, slots=True)
class Span(_NumbersAndText):
    """From `position` on, tokens come from this policy version."""

    kind: ClassVar[int] = 3
    layout: ClassVar[str] = "<IIi"
    handle: int
    position: int
    version: int
    policy_digest: str


@dataclass(frozen=True, slots=True)
class Tokens:
    """A run of tokens of one sample: an environment's reply (mask 0), or a prefix carried by a checkpoint."""

    kind: ClassVar[int] = 4
    types: ClassVar[tuple[str, ...]] = ("<i4", "<f4", "u1")
    handle: int
    position: int
    tokens: NDArray[np.int32]
    logprobs: NDArray[np.float32]
    loss_mask: NDArray[np.uint8]
    ended: int = 0

    def encode(self) -> bytes:
        rows = _packed_rows(self.types, self.tokens, self.logprobs, self.loss_mask)
        return struct.pack("<IIIB3x", self.handle, self.position, len(self.tokens), self.ended) + rows

    @classmethod
    def decode(cls, body: bytes) -> Tokens:
        handle, position, count, ended = struct.unpack_from("<IIIB3x", body)
        tokens, logprobs, loss_mask = _unpacked(cls.types, count, body, 16)
        return cls(handle, position, tokens, logprobs, loss_mask, ended)


@dataclass(frozen=True, slots=True)
class Resume(_Numbers):
    """An interrupted sample continues; `drift` is max |new - logged log-prob| over the tokens scored again."""

    kind: ClassVar[int] = 5
    layout: ClassVar[str] = "<I?3xd"
    handle: int
    exact: bool
    drift: float


@dataclass(frozen=True, slots=True)
class Finish(_NumbersAndText):
    """The sample is complete: n tokens with this digest."""

    kind: ClassVar[int] = 6
    layout: ClassVar[str] = "<III"
    handle: int
    count: int
    digest: int
    reason: str


@dataclass(frozen=True, slots=True)
class Commit:
    """These samples are in the store and synced there; the log may forget them."""

    kind: ClassVar[int] = 7
    handles: tuple[int, ...]

    def encode(self) -> bytes:
        return np.array(self.handles, "<u4").tobytes()

    @classmethod
    def decode(cls, body: bytes) -> Commit:
        return cls(tuple(np.frombuffer(body, "<u4").tolist()))


ABANDON_REASONS = ("tool_in_doubt", "tool_diverged")
"""Reasons for which a sample may be abandoned. None depends on its content or length."""


@dataclass(frozen=True, slots=True)
class Abandon(_NumbersAndText):
    """The sample is abandoned; FINISH follows, and it is committed as abandoned."""

    kind: ClassVar[int] = 8
    layout: ClassVar[str] = "<I"
    handle: int
    reason: str


@dataclass(frozen=True, slots=True)
class Tool:
    """A tool call of the sample, by its ordinal: without a result the intent to run it, else its result."""

    kind: ClassVar[int] = 13
    handle: int
    ordinal: int
    call: Call

    def encode(self) -> bytes:
        return struct.pack("<II", self.handle, self.ordinal) + json.dumps(asdict(self.call)).encode()

    @classmethod
    def decode(cls, body: bytes) -> Tool:
        handle, ordinal = struct.unpack_from("<II", body)
        fields = json.loads(body[8:])
        command = Command(tuple(fields["command"]["argv"]), fields["command"]["timeout_s"])
        result = Result(**fields["result"]) if fields["result"] else None
        return cls(handle, ordinal, Call(fields["position"], command, result))


@dataclass(frozen=True, slots=True)
class Base(_Numbers):
    """The checkpoint is complete: earlier segments are no longer needed. `samples` are carried over."""

    kind: ClassVar[int] = 9
    layout: ClassVar[str] = "<II"
    samples: int
    next_handle: int


@dataclass(frozen=True, slots=True)
class Sync(_Numbers):
    """Carries the watermark when no other record does."""

    kind: ClassVar[int] = SYNC
    layout: ClassVar[str] = ""


@dataclass(frozen=True, slots=True)
class Fence(_Numbers):
    """First record of an epoch: the position where the log of earlier epochs ends. Bytes after that position are
    ignored.

    epoch 0 means that there was no log before.
    """

    kind: ClassVar[int] = 11
    layout: ClassVar[str] = "<QQQ"
    epoch: int
    segment: int
    offset: int


@dataclass(frozen=True, slots=True)
class Close(_Numbers):
    """Last record of a segment that was ended on purpose."""

    kind: ClassVar[int] = CLOSE
    layout: ClassVar[str] = ""


_Sample = Open | Step | SamplingMask | Routed | Span | Tokens | Resume | Finish | Commit | Abandon | Tool
LogRecord = _Sample | Base | Sync | Fence | Close
_KINDS: dict[int, type[LogRecord]] = {message.kind: message for message in typing.get_args(LogRecord)}


def decode(kind: int, body: bytes) -> LogRecord:
    """Decode the message of a record. Raises ValueError (also struct.error and KeyError) for bytes that no writer
    wrote."""
    try:
        return _KINDS[kind].decode(body)
    except (LookupError, TypeError, AttributeError, RecursionError, struct.error) as error:
        raise ValueError(f"record kind {kind}: {error!r}") from None
