"""Metadata of samples to plan: as tables of a store on disk, or made when they are read."""

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import pyarrow as pa

from mopd_dataplane.bench.small_samples import bench_sample
from mopd_dataplane.bench.synthetic import bench_teacher, lengths_of
from mopd_dataplane.bench.write import filled_samples
from mopd_dataplane.plan.columns import SAMPLE_COLUMNS
from mopd_dataplane.run.stage_rows import Rows
from mopd_dataplane.store.dataset import Store
from mopd_dataplane.store.format.arrow_rows import token_rows
from mopd_dataplane.tables import SAMPLES, TABLES

CAP = 32_768
TEACHERS = tuple(f"teacher-{number}" for number in range(10))
WRITERS = 8
DISORDER = 2_000
"""How far samples are from the order of their admission: they are stored as they finish."""


def make_metadata(folder: str, samples: int, judged: bool = False) -> None:
    """Make a store whose `samples` table has that many rows, in about the order in which they were admitted.

    judged: every sample has a reward, 0 or 1, and the divergence of its teacher.
    """
    store = Store.create(folder)
    for name in TEACHERS:
        store.add_teacher(bench_teacher(name, 8))
    lengths, admitted = lengths_of(samples, longest=CAP), _admission(samples, seed=1)

    def columns(rows: slice) -> dict[str, Any]:
        return _columns(admitted[rows], lengths[rows])

    def judge(rows: slice, uids: pa.Array) -> None:
        noise, count = np.random.default_rng((2, rows.start)), len(uids)
        identity = {"uid": uids, "sample_row": np.arange(rows.start, rows.stop)}
        rewards = noise.integers(0, 2, count).astype(np.float32)
        store.table_handle("rewards").append(_filled("rewards", count, {**identity, "reward": rewards}))
        teachers = pa.array(TEACHERS).take(pa.array(admitted[rows] % len(TEACHERS)))
        divergences = noise.exponential(0.5, count).astype(np.float32)
        scores = {**identity, "teacher": teachers, "mean_reverse_kl": divergences}
        store.table_handle("scores").append(_filled("scores", count, scores))

    filled_samples(store, samples, columns, before=judge if judged else None)
    store.table_handle("tokens").append(token_rows([bench_sample(0, 1)]))


def simulated_rows(first: int, count: int) -> Iterator[tuple[Rows, pa.RecordBatch]]:
    """Planner columns of rows `first` to `first + count` of a table that does not exist, as a scan gives them."""
    values = {
        **_columns(first + _admission(count, seed=(1, first)), lengths_of(count, longest=CAP, seed=(3, first))),
        "iteration": np.zeros(count, np.int32), "finish_reason": pa.repeat("stop", count),
        "policy_version_first": np.zeros(count, np.int32),
    }  # fmt: skip
    fields = [SAMPLES.schema.field(name) for name in SAMPLE_COLUMNS]
    arrays = [pa.array(values[field.name]).cast(field.type) for field in fields]
    yield np.arange(first, first + count), pa.RecordBatch.from_arrays(arrays, schema=pa.schema(fields))


def _admission(count: int, seed: int | tuple[int, int]) -> Rows:
    """Numbers of samples in the order in which they are stored."""
    noise = np.random.default_rng(seed).integers(0, DISORDER, count)
    return np.argsort(np.arange(count) + noise, kind="stable")


def _columns(ordinals: Rows, tokens: Rows) -> dict[str, Any]:
    """Columns of samples by the order of their admission and their length."""
    return {
        "domain": pa.array([f"domain-{number}" for number in range(len(TEACHERS))]).take(ordinals % len(TEACHERS)),
        "writer": pa.array([f"engine-{number}" for number in range(WRITERS)]).take(ordinals % WRITERS),
        "writer_seq": ordinals // WRITERS,
        "total_len": tokens,
        "prompt_len": tokens // 4,
        "response_len": tokens - tokens // 4,
        "loss_tokens": tokens - tokens // 4,
    }


def _filled(table: str, count: int, values: Mapping[str, Any]) -> pa.Table:
    """Rows of a table with these columns; the others are null, or empty where they may not be."""
    columns = []
    for field in TABLES[table].schema:
        if field.name in values:
            columns.append(pa.array(values[field.name]).cast(field.type))
        elif field.nullable:
            columns.append(pa.nulls(count, field.type))
        else:
            empty = "" if pa.types.is_string(field.type) else 0
            columns.append(pa.repeat(pa.scalar(empty).cast(field.type), count))
    return pa.table(columns, schema=TABLES[table].schema)
