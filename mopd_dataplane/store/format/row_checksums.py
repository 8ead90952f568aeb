"""A checksum over the content of each row of a metadata table, in its column `row_crc`.

It is over values, not bytes of files, so that it stays right when files are merged. It is the crc32c over, for the
columns that hold a value in that row, in the order of their names:

    names          joined by NUL, UTF-8
    numbers        8 bytes each, little-endian: integers and times as they are, floats by their bits; of text, of binary
                   and of a list the length in bytes
    texts, lists   their bytes; a list of text as JSON

A null, and a column that came into being after the row, have no part in it.
"""

import json
from collections.abc import Iterator
from itertools import pairwise

import google_crc32c
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from mopd_dataplane.base.checksum import crc32c
from mopd_dataplane.tables import ROW_CRC

CHUNK_BYTES = 16 << 20
"""Bytes of the rows that are summed at once, so that copies stay small."""
CHUNK_ROWS = 1 << 16

Crcs = NDArray[np.uint32]
_NOTHING = pa.scalar(b"", pa.large_binary())


def row_crcs(rows: pa.Table) -> Crcs:
    """Compute the checksum of each row over all its columns but `row_crc`: [n]."""
    content = rows.select(sorted(name for name in rows.column_names if name != ROW_CRC.name))
    step = max(1, min(CHUNK_ROWS, CHUNK_BYTES * content.num_rows // max(content.nbytes, 1)))
    parts = [_batch_crcs(batch) for batch in content.to_batches(max_chunksize=step)]
    return np.concatenate([np.empty(0, np.uint32), *parts])


def with_row_crcs(rows: pa.Table) -> pa.Table:
    """Return the rows with their checksums in `row_crc`, replacing old ones."""
    content = rows.drop_columns([ROW_CRC.name]) if ROW_CRC.name in rows.column_names else rows
    return content.append_column(ROW_CRC, pa.array(row_crcs(content)))


def wrong_rows(rows: pa.Table) -> Iterator[tuple[int, int, int]]:
    """Yield (index, computed checksum, committed checksum) of each row whose content has changed since its commit."""
    crcs, committed = row_crcs(rows), rows[ROW_CRC.name].to_numpy()
    for row in np.flatnonzero(crcs != committed).tolist():
        yield row, int(crcs[row]), int(committed[row])


def _batch_crcs(batch: pa.RecordBatch) -> Crcs:
    """Compute checksums, summing rows with nulls in the same columns together."""
    with_nulls = [index for index in range(batch.num_columns) if batch.column(index).null_count]
    if not with_nulls:
        return _full_crcs(batch)
    pattern = np.zeros(batch.num_rows, np.int64)
    for bit, index in enumerate(with_nulls):
        pattern |= batch.column(index).is_null().to_numpy(zero_copy_only=False).astype(np.int64) << bit
    crcs: Crcs = np.empty(batch.num_rows, np.uint32)
    for value in np.unique(pattern).tolist():
        chosen = pattern == value
        absent = {index for bit, index in enumerate(with_nulls) if value >> bit & 1}
        there = [index for index in range(batch.num_columns) if index not in absent]
        some = batch if chosen.all() else batch.filter(pa.array(chosen))
        crcs[chosen] = _full_crcs(some.select(there))
    return crcs


def _full_crcs(batch: pa.RecordBatch) -> Crcs:
    """Compute checksums of rows without a null."""
    count = batch.num_rows
    numbers = np.zeros((count, batch.num_columns), "<i8")
    contents: list[pa.LargeBinaryArray] = []
    for index, column in enumerate(batch.columns):
        if pa.types.is_primitive(column.type):
            numbers[:, index] = _numbers(column)
        else:
            content, ends = _content(column)
            numbers[:, index] = np.diff(ends)
            contents.append(_binary(ends, content))
    head = _binary(np.arange(count + 1, dtype=np.int64) * (8 * batch.num_columns), pa.py_buffer(numbers))
    whole = pc.binary_join_element_wise(head, *contents, _NOTHING)
    bounds = np.frombuffer(whole.buffers()[1], np.int64)[whole.offset : whole.offset + count + 1].tolist()
    data = whole.buffers()[2].to_pybytes()
    start, extend = crc32c("\0".join(batch.schema.names).encode()), google_crc32c.extend
    return np.fromiter((extend(start, data[low:high]) for low, high in pairwise(bounds)), np.uint32, count)


def _binary(ends: NDArray[np.int64], content: pa.Buffer | None) -> pa.LargeBinaryArray:
    return pa.LargeBinaryArray.from_buffers(pa.large_binary(), len(ends) - 1, [None, pa.py_buffer(ends), content])


def _numbers(column: pa.Array) -> NDArray[np.int64]:
    if pa.types.is_boolean(column.type):
        flags: NDArray[np.int64] = column.to_numpy(zero_copy_only=False).astype(np.int64)
        return flags
    width = column.type.bit_width // 8
    signed = not pa.types.is_unsigned_integer(column.type)
    values = np.frombuffer(column.buffers()[1], f"<{'i' if signed else 'u'}{width}")
    return values[column.offset : column.offset + len(column)].astype(np.int64)


def _content(column: pa.Array) -> tuple[pa.Buffer | None, NDArray[np.int64]]:
    """Return the bytes of all values, and [n + 1] their boundaries."""
    kind, part = column.type, slice(column.offset, column.offset + len(column) + 1)
    if pa.types.is_string(kind) or pa.types.is_binary(kind):
        _, ends, content = column.buffers()
        return content, np.frombuffer(ends, np.int32)[part].astype(np.int64)
    if pa.types.is_large_binary(kind):
        _, ends, content = column.buffers()
        return content, np.frombuffer(ends, np.int64)[part]
    if pa.types.is_list(kind) and pa.types.is_primitive(kind.value_type):
        values = np.ascontiguousarray(column.values.to_numpy(zero_copy_only=False))
        return pa.py_buffer(values), column.offsets.to_numpy().astype(np.int64) * values.itemsize
    texts = pa.array([json.dumps(value).encode() for value in column.to_pylist()], pa.large_binary())
    return _content(texts)
