"""Figures of the write path: payload bytes per second beside the raw disk, and commit time by table size."""

import os
import shutil
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from mopd_dataplane.bench.calls import seconds
from mopd_dataplane.bench.small_samples import bench_sample
from mopd_dataplane.bench.synthetic import bench_teacher
from mopd_dataplane.fields import PAYLOAD, column_names
from mopd_dataplane.records import Sample, Signal
from mopd_dataplane.store.dataset import Store
from mopd_dataplane.store.format.arrow_rows import sample_rows, token_rows
from mopd_dataplane.tables import SAMPLES

BATCH = 64
COMMITS = 30
ROUNDS = 5
"""Payload is committed and written raw in turn, so that a disturbance of the machine meets both."""
RESPONSE, HIDDEN_ROW, HIDDEN_BATCH = 2_048, 8_192, 8
"""Tokens of a sample, bytes of one bf16 state of 4,096 values, samples of one commit: 128 MiB."""
TOKEN_RESPONSE, TOKEN_BATCH = 16_384, 256
FILL = 250_000
"""Rows written at once while a table is filled up."""
FIGURES = ("payload_bytes_per_s", "sequential_write_bytes_per_s", "commit_ms")
"""Names of the figures that scripts read; the others explain them."""


def write_figures(folder: Path, rows: Sequence[int]) -> dict[str, Any]:
    """Measure in an empty folder; tables of the given sizes are filled up first, which is not timed.

    Returns payload_bytes_per_s (durable commits of hidden states, 128 MiB each), sequential_write_bytes_per_s (the same
    bytes into one file, synced as often), commit_ms: {rows: median of durable commits of 64 short samples}; then the
    ratio of the first two, and both figures for tokens with their log-probs. Speeds are medians.
    """
    hidden, raw = _hidden_speed(folder)
    tokens, raw_tokens = _token_speed(folder)
    return {
        "payload_bytes_per_s": hidden,
        "sequential_write_bytes_per_s": raw,
        "commit_ms": _commit_ms(folder, rows),
        "ratio": hidden / raw,
        "tokens: payload_bytes_per_s": tokens,
        "tokens: sequential_write_bytes_per_s": raw_tokens,
    }


def _hidden_speed(folder: Path) -> tuple[float, float]:
    """(committed, raw) bytes per second of hidden states."""
    store = Store.create(folder / "hidden")
    store.add_teacher(bench_teacher("bench", HIDDEN_ROW // 2))
    samples = [bench_sample(i, RESPONSE) for i in range((ROUNDS + 1) * HIDDEN_BATCH)]
    places = store.commit_samples(samples).rows.tolist()
    noise = np.random.default_rng(0)

    def batch(number: int) -> list[Signal]:
        here = slice(number * HIDDEN_BATCH, (number + 1) * HIDDEN_BATCH)
        return [
            Signal(
                uid=sample.uid, sample_row=row, kind="hidden", codec="bf16",
                hidden=noise.integers(0, 256, (RESPONSE, HIDDEN_ROW), dtype=np.uint8),
            )
            for sample, row in zip(samples[here], places[here], strict=True)
        ]  # fmt: skip

    def states(signals: list[Signal]) -> Iterator[NDArray[Any]]:
        return (signal.hidden for signal in signals if signal.hidden is not None)

    speeds = _in_turn(folder, batch, lambda signals: store.commit_signals("bench", "hidden", signals), states)
    shutil.rmtree(folder / "hidden")
    return speeds


def _token_speed(folder: Path) -> tuple[float, float]:
    """(committed, raw) bytes per second of tokens, log-probs and masks."""
    store = Store.create(folder / "tokens")

    def batch(number: int) -> list[Sample]:
        return [bench_sample(i, TOKEN_RESPONSE) for i in range(number * TOKEN_BATCH, (number + 1) * TOKEN_BATCH)]

    def arrays(samples: list[Sample]) -> Iterator[NDArray[Any]]:
        return (getattr(sample, name) for sample in samples for name in column_names(PAYLOAD))

    speeds = _in_turn(folder, batch, store.commit_samples, arrays)
    shutil.rmtree(folder / "tokens")
    return speeds


def _in_turn(
    folder: Path,
    batch: Callable[[int], Any],
    commit: Callable[[Any], object],
    arrays: Callable[[Any], Iterator[NDArray[Any]]],
) -> tuple[float, float]:
    """Median (committed, raw) bytes per second; the first commit, which loads the keys, is not counted."""
    commit(batch(0))
    committed, raw = [], []
    with (folder / "sequential").open("wb", buffering=0) as file:
        for number in range(1, ROUNDS + 1):
            records = batch(number)
            size = sum(array.nbytes for array in arrays(records))
            started = time.perf_counter()
            for array in arrays(records):
                file.write(array.data)
            os.fsync(file.fileno())
            between = time.perf_counter()
            commit(records)
            raw.append(size / (between - started))
            committed.append(size / (time.perf_counter() - between))
    (folder / "sequential").unlink()
    return statistics.median(committed), statistics.median(raw)


def _commit_ms(folder: Path, counts: Sequence[int]) -> dict[str, float]:
    """Median of durable commits into stores that have so many samples; the first, which loads the keys, is not one.

    The stores take turns, so that a disturbance of the machine meets all sizes.
    """
    stores = {count: Store.create(folder / f"rows-{count}") for count in counts}
    times: dict[int, list[float]] = {count: [] for count in counts}
    for count, store in stores.items():
        filled_tokens(store, count)
    for start in range(0, (COMMITS + 1) * BATCH, BATCH):
        for count, store in stores.items():
            batch = [bench_sample(count + i, 64) for i in range(start, start + BATCH)]
            times[count].append(seconds(partial(store.commit_samples, batch)))
    return {str(count): round(1e3 * statistics.median(taken[1:]), 2) for count, taken in times.items()}


def filled_tokens(store: Store, count: int) -> None:
    """Rows of `samples` and `tokens` that are all one sample of 17 tokens but for the uid, written as large files."""
    payload = token_rows([bench_sample(0, 1)])
    places = np.empty(0, np.int64)

    def write_tokens(rows: slice, uids: pa.Array) -> None:
        nonlocal places
        same = payload.take(pa.array(np.zeros(len(uids), np.int64)))
        places = store.table_handle("tokens").append(same.set_column(0, payload.schema.field(0), uids))[0]

    def pointers(rows: slice) -> dict[str, Any]:
        return {"payload_row": places}

    filled_samples(store, count, pointers, before=write_tokens)


def filled_samples(
    store: Store,
    count: int,
    columns: Callable[[slice], dict[str, Any]],
    *,
    before: Callable[[slice, pa.Array], None] | None = None,
) -> None:
    """Add `count` rows to `samples` in large files, without payload: one short sample over and over but for its uid
    and the given columns. columns: [rows] arrays by name, for a slice of all rows; `before` sees slice and uids first.
    """
    one = sample_rows([bench_sample(0, 1)])
    for start in range(0, count, FILL):
        rows = slice(start, min(start + FILL, count))
        uids = _uids(start, rows.stop - rows.start)
        if before is not None:
            before(rows, uids)
        table = one.take(pa.array(np.zeros(len(uids), np.int64)))
        for name, values in {"uid": uids, "group_id": uids, **columns(rows)}.items():
            index = SAMPLES.schema.get_field_index(name)
            field = SAMPLES.schema.field(index)
            table = table.set_column(index, field, pa.array(values).cast(field.type))
        store.table_handle("samples").append(table)


def _uids(seed: int, count: int) -> pa.Array:
    text = np.random.default_rng(seed).bytes(16 * count).hex().encode()
    return pa.StringArray.from_buffers(
        count, pa.py_buffer(np.arange(0, 32 * count + 1, 32, dtype=np.int32)), pa.py_buffer(text)
    )
