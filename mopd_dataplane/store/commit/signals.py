"""Commits teachers' signals: payload into signals/<teacher>/<kind>, then one row of `scores`; samples do not change."""

from collections.abc import Sequence
from typing import Any

import lance
import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from mopd_dataplane.base.checksum import payload_crc
from mopd_dataplane.base.fault_points import fault_point
from mopd_dataplane.errors import EngineError, MismatchError
from mopd_dataplane.fields import ALIGNMENT, SIGNALS, Field, of_signal, value
from mopd_dataplane.models.token_chunks import chunk_problem
from mopd_dataplane.records import Signal, Teacher
from mopd_dataplane.store.commit.payload import place_payload
from mopd_dataplane.store.commit.table import Table
from mopd_dataplane.store.format.arrow_rows import list_column, to_rows
from mopd_dataplane.store.format.dataset_format import spec_of
from mopd_dataplane.store.format.row_ids import row_ids
from mopd_dataplane.store.format.sample_values import whole_numbers
from mopd_dataplane.store.format.shapes import check_length, check_width
from mopd_dataplane.store.read.row_reader import signal_crcs, take_offsets
from mopd_dataplane.tables import SCORES, signal_table


def _typed(signal: Signal, field: Field) -> NDArray[Any]:
    array = value(signal, field.name)
    assert array is not None  # check_signal has verified it
    return np.ascontiguousarray(array, field.dtype)


def check_signal(signal: Signal, kind: str, response_len: int, loss_tokens: int) -> None:
    """Check kind, shapes and values of a signal. Raises MismatchError for kind or shape, EngineError for an impossible
    value.

    Shapes: logprob [R]; topk_ids and topk_logprobs [M, K]; hidden [M, row_bytes] uint8; another package's kind [R];
    alignment: student_chunk_ends [R], teacher_tokens and teacher_chunk_ends [Q].
    """
    where = f"signal {signal.kind!r} of sample {signal.uid}"
    if signal.kind != kind:
        raise MismatchError(f"{where} was passed to commit_signals as {kind!r}; pass its own kind")
    places = {"response": (response_len, "response tokens"), "trained": (loss_tokens, "loss tokens")}
    columns = spec_of(signal_table("any", kind)).schema
    widths: dict[str, tuple[str, int]] = {}
    for field in of_signal(kind):
        array = value(signal, field.name)
        if not isinstance(array, np.ndarray):
            raise MismatchError(f"{where}: {field.name} is {array!r:.40}; a numpy array is needed")
        if field.axis == "teacher":
            places.setdefault("teacher", (len(np.atleast_1d(array)), "tokens of the teacher"))
        check_length(array, field, places[field.axis], where)
        _check_values(array, field, f"{where}: {field.name}")
        if field.width:
            check_width(array, field, columns.field(field.width).type, where)
            first, width = widths.setdefault(field.width, (field.name, array.shape[1]))
            if width != array.shape[1]:
                raise MismatchError(
                    f"{where}: {first} has {width} values a row and {field.name} {array.shape[1]}; both must have the "
                    "same number"
                )
    if kind == ALIGNMENT:
        ends = (_typed(signal, field) for field in of_signal(kind) if field.dtype == "|u1")
        if problem := chunk_problem(*ends):
            raise MismatchError(f"{where}: {problem}")


def _check_values(array: NDArray[Any], field: Field, what: str) -> None:
    """Check the values of a field. Raises MismatchError for another type, EngineError for a number outside the column's
    range."""
    if field.blob:
        if array.dtype != field.dtype:
            raise MismatchError(f"{what} is {array.dtype}, expected the codec's bytes as uint8")
    elif not field.is_float:
        most = np.iinfo(field.dtype)
        whole_numbers(array, *(field.values or (int(most.min), int(most.max))), what)
    elif array.dtype.kind not in "fiu":
        raise MismatchError(f"{what} holds {array.dtype} values; numbers are needed")
    elif array.size and not np.abs(array).max() <= np.finfo(field.dtype).max:  # also true for a NaN
        raise EngineError(
            f"{what} holds NaN, infinity or a number beyond {np.finfo(field.dtype).max:.3g}; check the teacher's "
            "weights and dtype"
        )


def payload_table(table: Table, signals: Sequence[Signal]) -> pa.Table:
    """Build the rows of signals/<teacher>/<kind>."""
    columns: dict[str, Any] = {}
    for field in of_signal(table.spec.name.removeprefix(SIGNALS)):
        own = [_typed(signal, field) for signal in signals]
        flat = [array.reshape(-1) for array in own]
        listed = table.spec.schema.field(field.column).type
        columns[field.column] = blob_column(flat) if field.blob else list_column(flat, listed)
        if field.width:
            columns[field.width] = [array.shape[1] for array in own]
        columns["rows"] = [len(array) for array in own]
    for name in set(table.schema.names) - columns.keys():
        columns[name] = [getattr(signal, name) for signal in signals]
    return pa.table({name: columns[name] for name in table.schema.names}, schema=table.schema)


def blob_column(payloads: Sequence[NDArray[np.uint8]]) -> pa.ChunkedArray:
    """Build a blob column from one contiguous uint8 array per row, without a copy: every row is a chunk of its own."""
    kind = lance.blob.BlobType()
    fields = list(kind.storage_type)
    nulls = [pa.nulls(1, field.type) for field in fields[1:]]
    rows = []
    for payload in payloads:
        offsets = pa.py_buffer(np.array([0, len(payload)], np.int64))
        data = pa.LargeBinaryArray.from_buffers(pa.large_binary(), 1, [None, offsets, pa.py_buffer(payload)])
        rows.append(pa.ExtensionArray.from_storage(kind, pa.StructArray.from_arrays([data, *nulls], fields=fields)))
    return pa.chunked_array(rows, type=kind)


def commit_signals(
    scores: Table, samples: Table, payload: Table, teacher: Teacher, kind: str, signals: Sequence[Signal]
) -> int:
    """Make signals visible and durable; see Store.commit_signals."""
    metadata = _samples_of(samples, signals)
    lengths = (metadata[name].to_pylist() for name in ("response_len", "loss_tokens"))
    for signal, response_len, loss_tokens in zip(signals, *lengths, strict=True):
        check_signal(signal, kind, response_len, loss_tokens)
    uids = pa.array([signal.uid for signal in signals], pa.string())
    keys = {"uid": uids, "teacher": pa.repeat(teacher.name, len(uids)), "kind": pa.repeat(kind, len(uids))}
    matches, _ = scores.find(pa.table(keys))
    absent = np.flatnonzero(matches < 0)
    if not len(absent):
        return 0
    fresh = [signals[i] for i in absent.tolist()]
    loss_tokens = metadata["loss_tokens"].to_numpy()[absent]
    crcs = [payload_crc(*(_typed(signal, field).reshape(-1) for field in of_signal(kind))) for signal in fresh]
    payload.create()
    places, dataset = place_payload(
        payload,
        [signal.uid for signal in fresh],
        lambda chosen: [crcs[i] for i in chosen],
        lambda chosen: payload_table(payload, [fresh[i] for i in chosen]),
        lambda version, rows: signal_crcs(version, kind, rows),
    )
    payload.make_durable(dataset)
    fault_point("signals.payload.durable")
    same = [name for name in SCORES.schema.names if name in Signal.__dataclass_fields__]
    rows = [
        {name: getattr(signal, name) for name in same}
        | {
            "teacher": teacher.name,
            "payload_row": payload_row,
            "payload_crc": crc,
            "rows": int(count),
            "bytes": sum(_typed(signal, field).nbytes for field in of_signal(kind)),
            "coverage": _coverage(signal),
            "teacher_digest": teacher.weights_digest,
        }
        for signal, crc, payload_row, count in zip(fresh, crcs, places.tolist(), loss_tokens.tolist(), strict=True)
    ]
    done = scores.insert(to_rows(SCORES, rows))
    scores.make_durable(done.dataset)
    fault_point("signals.metadata.durable")
    return int(done.is_new.sum())


def _samples_of(samples: Table, signals: Sequence[Signal]) -> pa.Table:
    """Return the metadata of the signals' samples, in order. Raises MismatchError when a row is another sample."""
    dataset = samples.open()
    offsets = row_ids(dataset).find([signal.sample_row for signal in signals])
    for signal, offset in zip(signals, offsets, strict=True):
        if offset < 0:
            raise MismatchError(
                f"signal of sample {signal.uid} names row {signal.sample_row}, which is none of those that "
                f"`samples` has: {dataset.count_rows()} rows, the last {row_ids(dataset).end - 1}"
            )
    metadata = take_offsets(dataset, offsets, ["uid", "response_len", "loss_tokens"])
    for signal, uid in zip(signals, metadata["uid"].to_pylist(), strict=True):
        if signal.uid != uid:
            raise MismatchError(f"signal of sample {signal.uid} names row {signal.sample_row}, which is sample {uid}")
    return metadata


def _coverage(signal: Signal) -> float:
    """Return the teacher's probability of the ids of a top-k, mean over loss tokens; 1 for the other kinds."""
    if signal.topk_logprobs is None or not len(signal.topk_logprobs):
        return 1.0
    return float(np.exp(signal.topk_logprobs, dtype=np.float64).sum(axis=1).mean())
