"""Figures of the write path: payload bytes per second beside the raw disk, and commit time by table size.

python -m mopd_dataplane.store.bench FOLDER --rows 10000 1000000 10000000
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from mopd_dataplane.records import Sample
from mopd_dataplane.store.dataset import Store
from mopd_dataplane.store.rows import PAYLOAD, sample_rows, token_rows
from mopd_dataplane.tables import SAMPLES

BATCH = 64
COMMITS = 30
RESPONSE = 16_384
PAYLOAD_COMMITS, PAYLOAD_BATCH = 4, 256
FILL = 250_000
"""Rows written at once while a table is filled up."""


def write_figures(folder: Path, rows: Sequence[int]) -> dict[str, Any]:
    """Measure in an empty folder; tables of the given sizes are filled up first, which is not timed.

    Returns payload_bytes_per_s (durable commits of 256 samples of 16,384 tokens), sequential_write_bytes_per_s (the
    same bytes into one file, synced as often) and commit_ms: {rows: median of durable commits of 64 short samples}.
    """
    starts = range(0, PAYLOAD_COMMITS * PAYLOAD_BATCH, PAYLOAD_BATCH)
    batches = [[_sample(i, RESPONSE) for i in range(start, start + PAYLOAD_BATCH)] for start in starts]
    size = sum(getattr(sample, name).nbytes for batch in batches for sample in batch for name in PAYLOAD)
    store = Store.create(folder / "payload")
    store.commit_samples([_sample(-1, RESPONSE)], writer="bench")
    started = time.perf_counter()
    for batch in batches:
        store.commit_samples(batch, writer="bench")
    committed = time.perf_counter() - started
    started = time.perf_counter()
    with (folder / "sequential").open("wb") as file:
        for batch in batches:
            for sample in batch:
                for name in PAYLOAD:
                    file.write(getattr(sample, name).data)
            file.flush()
            os.fsync(file.fileno())
    raw = time.perf_counter() - started
    return {
        "payload_bytes_per_s": size / committed,
        "sequential_write_bytes_per_s": size / raw,
        "commit_ms": {str(count): _commit_ms(folder / f"rows-{count}", count) for count in rows},
    }


def _commit_ms(folder: Path, count: int) -> float:
    """Median of durable commits into a store that has `count` samples; the first, which loads the keys, is not one."""
    store = Store.create(folder)
    _fill(store, count)
    times = []
    for start in range(0, (COMMITS + 1) * BATCH, BATCH):
        batch = [_sample(count + i, 64) for i in range(start, start + BATCH)]
        started = time.perf_counter()
        store.commit_samples(batch, writer="bench")
        times.append(time.perf_counter() - started)
    return round(1e3 * statistics.median(times[1:]), 2)


def _fill(store: Store, count: int) -> None:
    """Rows of `samples` and `tokens` that are all one sample but for the uid, written as large files."""
    one = _sample(0, 1)
    metadata, payload = sample_rows([one], np.zeros(1, np.int64), [0]), token_rows([one])
    for start in range(0, count, FILL):
        here = min(FILL, count - start)
        text = np.random.default_rng(start).bytes(16 * here).hex().encode()
        offsets = pa.py_buffer(np.arange(0, 32 * here + 1, 32, dtype=np.int32))
        uids = pa.StringArray.from_buffers(here, offsets, pa.py_buffer(text))
        rows = pa.array(np.zeros(here, np.int64))
        first = store._table("tokens").append(payload.take(rows).set_column(0, payload.schema.field(0), uids))[0]
        numbered = metadata.take(rows).set_column(0, metadata.schema.field(0), uids)
        place = SAMPLES.schema.get_field_index("payload_row")
        pointers = pa.array(np.arange(first, first + here))
        store._table("samples").append(numbered.set_column(place, SAMPLES.schema.field(place), pointers))


def _sample(number: int, response: int) -> Sample:
    rng = np.random.default_rng(number + 1)
    return Sample(
        uid=rng.bytes(16).hex(),
        prompt_id=f"p{number}",
        group_id=f"p{number}#0",
        group_index=0,
        generation=0,
        domain="bench",
        run="bench",
        writer="bench",
        writer_seq=number,
        policy="bench",
        temperature=1.0,
        top_p=1.0,
        top_k=0,
        prompt_len=16,
        tokens=rng.zipf(1.3, 16 + response).clip(max=150_000).astype(np.int32),
        logprobs=-rng.random(response, np.float32),
        loss_mask=np.ones(response, np.uint8),
        version_starts=np.zeros(1, np.int32),
        versions=np.zeros(1, np.int32),
        finish_reason="stop",
        tokenizer="bench",
    )


def main() -> None:
    """Print the figures as one JSON object."""
    parser = argparse.ArgumentParser(description="Measure the write path of the store.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--rows", type=int, nargs="+", default=[10_000, 1_000_000])
    options = parser.parse_args()
    print(json.dumps(write_figures(options.folder, options.rows)))


if __name__ == "__main__":
    main()
