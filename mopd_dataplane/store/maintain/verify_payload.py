"""The audit of payload: checks that the bytes are as committed, and that lists have the lengths of their sample."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import lance
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from mopd_dataplane.base.checksum import payload_crc
from mopd_dataplane.fields import PAYLOAD, RECORDED, Field, of_signal
from mopd_dataplane.records import PER_TOKEN_STATS
from mopd_dataplane.store.format.arrow_rows import tokens_crc
from mopd_dataplane.store.format.row_ids import row_ids
from mopd_dataplane.store.maintain.verify_report import Finding, damage, left_out
from mopd_dataplane.store.read.row_reader import checked_columns, signal_arrays, token_arrays

CHUNK = 512
"""Number of payload rows read at once."""
UNKNOWN = -1
"""Length that the metadata does not record: any is right."""
ABSENT = -2
"""Length of a list that must be null."""
LENGTHS = ("prompt_len", "response_len", "total_len", "loss_tokens")
"""Columns of `samples` with P, R, L and M."""

Arrays = Sequence[NDArray[Any] | None]
Lengths = NDArray[np.int64]


@dataclass(frozen=True)
class Payload:
    """A payload table under audit: reads the arrays of rows, one for each field, and the checksum over them."""

    fields: Sequence[Field]
    arrays_at: Callable[[Sequence[int]], Sequence[Arrays]]
    crc: Callable[[Arrays], int]


def token_payload(tokens: lance.LanceDataset) -> Payload:
    """Return the payload of samples."""
    names = checked_columns(tokens)
    fields = [field for field in (*PAYLOAD, *RECORDED) if field.column in names]
    return Payload(fields, partial(token_arrays, tokens), tokens_crc)


def signal_payload(signals: lance.LanceDataset, kind: str) -> Payload:
    """Return the payload of signals."""
    return Payload(of_signal(kind), partial(signal_arrays, signals, kind), lambda arrays: payload_crc(*arrays))


def length_columns(samples: lance.LanceDataset) -> list[str]:
    """Return the columns of a version of `samples` with the lengths of the lists of its payload."""
    recorded = (name for field in RECORDED for name in (field.width, field.count) if name)
    names = dict.fromkeys((*LENGTHS, "version_spans", *recorded))
    return [name for name in names if name in samples.schema.names]


def token_lengths(fields: Sequence[Field], samples: pa.Table) -> Lengths:
    """Return the length of each list of `tokens`, [fields, n], from the columns of length_columns."""
    response, total, trained = (_numbers(samples, name) for name in LENGTHS[1:])
    of_axis = {"token": total, "read": np.maximum(total - 1, 0), "response": response, "trained": trained}
    lengths = []
    for field in fields:
        if field.axis == "span":
            lengths.append(_numbers(samples, "version_spans"))
        elif field.axis == "ragged":
            lengths.append(_numbers(samples, field.count, missing=ABSENT))
        elif field.width:
            width = _numbers(samples, field.width, missing=ABSENT)
            lengths.append(np.where(width == ABSENT, ABSENT, of_axis[field.axis] * width))
        else:
            lengths.append(of_axis[field.axis])
    return np.stack(lengths)


def signal_lengths(kind: str, scores: pa.Table, response: Lengths, trained: Lengths) -> Lengths:
    """Return the length of each list of a signal: [fields, n]. response, trained: [n] R and M of its sample, or
    UNKNOWN."""
    fields, nbytes = of_signal(kind), scores["bytes"].to_numpy()
    wide = sum(np.dtype(field.dtype).itemsize for field in fields if field.width)
    bytes_of = {
        axis: sum(np.dtype(field.dtype).itemsize for field in fields if field.axis == axis)
        for axis in ("response", "teacher")
    }
    rest = nbytes - bytes_of["response"] * response
    of_axis = {"response": response, "trained": trained}
    if bytes_of["teacher"]:
        of_axis["teacher"] = np.where(response == UNKNOWN, UNKNOWN, rest // bytes_of["teacher"])
    return np.stack([nbytes // wide if field.width else of_axis[field.axis] for field in fields])


def audit_payload(
    name: str, metadata: pa.Table, sound: NDArray[np.int64], payload: Payload, lengths: Lengths
) -> Iterator[Finding]:
    """Check the payload to which some rows of metadata point; a chunk that cannot be read is read row by row.

    sound: indices of these rows in `metadata`. lengths: [fields, n] from token_lengths.
    """
    points, stored = metadata["payload_row"].to_numpy(), metadata["payload_crc"].to_numpy()
    for start in range(0, len(sound), CHUNK):
        chunk = sound[start : start + CHUNK]
        first = int(points[chunk[0]])
        if why := left_out(name, "payload", first):
            yield Finding(name, first, metadata["uid"][int(chunk[0])].as_py(), f"{len(chunk)} rows from here on: {why}")
            continue
        for row, arrays in zip(chunk.tolist(), readable(payload.arrays_at, points[chunk].tolist()), strict=True):
            if problem := _problem(payload, arrays, int(stored[row]), lengths[:, row].tolist()):
                yield Finding(name, int(points[row]), metadata["uid"][row].as_py(), problem)


def audit_token_stats(stats: lance.LanceDataset, samples: lance.LanceDataset) -> Iterator[Finding]:
    """Find rows of `token_stats` whose lists differ in length from their sample's loss tokens."""
    columns = ["uid", "sample_row", "tokens", *PER_TOKEN_STATS]
    ids, trained = row_ids(samples), _numbers(samples.to_table(columns=["loss_tokens"]), "loss_tokens")
    for batch in stats.to_batches(columns=columns, with_row_id=True):
        tokens, offsets = batch["tokens"].to_numpy(), ids.find(batch["sample_row"].to_numpy())
        expected = np.where(offsets >= 0, trained[np.maximum(offsets, 0)], tokens) if len(trained) else tokens
        for name in ("tokens", *PER_TOKEN_STATS):
            column = batch[name] if name == "tokens" else pc.list_value_length(batch[name])
            counts = pc.fill_null(column, UNKNOWN).to_numpy(zero_copy_only=False)
            for row in np.flatnonzero((counts != UNKNOWN) & (counts != expected)).tolist():
                said = f"says {counts[row]} tokens" if name == "tokens" else f"{name} has {counts[row]} values"
                problem = f"{said}, the sample has {expected[row]} loss tokens"
                yield Finding("token_stats", batch["_rowid"][row].as_py(), batch["uid"][row].as_py(), problem)


def _problem(payload: Payload, arrays: Arrays | str, stored: int, lengths: list[int]) -> str:
    """Describe the problem of one row; empty without one. arrays: or the reader's message if it cannot be read."""
    if isinstance(arrays, str):
        return f"{arrays}, {stored:08x} was committed"
    if (crc := payload.crc(arrays)) != stored:
        return f"crc32c {crc:08x}, {stored:08x} was committed"
    for field, array, length in zip(payload.fields, arrays, lengths, strict=True):
        count = ABSENT if array is None else len(array)
        fits = count == length or length == UNKNOWN or (array is None and field.null)
        if not fits:
            said = {ABSENT: "no list"}
            counts = (said.get(number, f"{number} values") for number in (count, length))
            return "{} has {}, the metadata of its sample asks for {}".format(field.column, *counts)
    return ""


def readable(arrays_at: Callable[[Sequence[int]], Sequence[Arrays]], rows: list[int]) -> list[Arrays | str]:
    """Return the arrays of rows, or for a row that cannot be read the reader's message."""
    try:
        return [*arrays_at(rows)]
    except BaseException as error:
        problem = damage(error)
        if len(rows) == 1:
            return [f"cannot be read ({problem})"]
    return [arrays for row in rows for arrays in readable(arrays_at, [row])]


def _numbers(rows: pa.Table, name: str, *, missing: int = UNKNOWN) -> Lengths:
    """Return a column of integers; `missing` for a null, or if the version has no such column."""
    if name not in rows.column_names:
        return np.full(rows.num_rows, missing, np.int64)
    filled = pc.fill_null(rows[name].cast(pa.int64()), missing)
    return np.asarray(filled.to_numpy(), np.int64)
