"""Derived columns as arrays are those that the statement gives which the page shows."""

from __future__ import annotations

from itertools import combinations

import duckdb
import numpy as np
import pyarrow as pa
import pytest

from mopd_dataplane.store.rollouts.columns import READ, REPETITION, SPREAD, STATS, definition
from mopd_dataplane.store.rollouts.derived import Rows, derived_columns
from mopd_dataplane.tables import SAMPLES

TEACHERS = {"a": 50, "b": 1000, "silent": 7}
OPTIONAL = (SPREAD, STATS, REPETITION)


def _holed(noise: np.random.Generator, values: np.ndarray, share: float = 0.1) -> pa.Array:
    """Float32 with nulls and, among the others, NaN."""
    nan = np.where(noise.random(len(values)) < share, np.nan, values).astype(np.float32)
    return pa.array(nan, mask=noise.random(len(values)) < share)


def _tables(seed: int, count: int) -> dict[str, pa.Table]:
    """Samples of two stages, groups across them, with holes in their ids; rows of other tables in any order, several a
    sample, some of samples that are not there."""
    noise = np.random.default_rng(seed)
    ids = np.flatnonzero(noise.random(2 * count) < (1.0 if seed % 2 else 0.7))[:count] + 5
    count = len(ids)
    own = {name: pa.nulls(count, SAMPLES.schema.field(name).type) for name in SAMPLES.schema.names}
    words = {"stage": ["warm", "cold"], "domain": ["x", "y", "z"], "finish_reason": ["stop", "length"],
             "policy": ["p", "reference"], "group_id": [f"g{i}" for i in range(count // 4 + 1)]}  # fmt: skip
    own |= {name: pa.array(noise.choice(some, count)) for name, some in words.items()}
    own |= {name: pa.array(noise.integers(0, 3, count), SAMPLES.schema.field(name).type) for name in (
        "iteration", "policy_version_first", "policy_version_last", "interruptions", "loss_tokens")}  # fmt: skip
    own["mean_logprob"] = _holed(noise, -noise.exponential(1.0, count))
    own[REPETITION] = pa.array(noise.random(count), pa.float32(), mask=noise.random(count) < 0.2)
    own["sample_row"] = pa.array(ids)
    own["uid"] = pa.array([f"u{i}" for i in ids], pa.string())
    own["prompt_id"] = pa.array(noise.choice([f"p{i}" for i in range(9)], count), pa.string())
    rows = noise.choice(np.arange(2 * count + 9), 3 * count)
    std = np.where(noise.random(3 * count) < 0.7, 0.0, 1.0)
    names = noise.choice(["a", "b", "unknown"], 3 * count)
    kls = noise.normal(0.2, 1.0, 3 * count)
    said = np.nan_to_num(np.array(own["mean_logprob"].to_pylist(), np.float64))
    positions = np.clip(np.searchsorted(ids, rows), 0, count - 1)
    kls = np.where(noise.random(3 * count) < 0.4, said[positions] + np.where(names == "b", np.log(1000), 0), kls)
    return {
        "samples": pa.table(own),
        "rewards": pa.table({"sample_row": rows, "reward": _holed(noise, noise.integers(0, 3, 3 * count) / 2)}),
        "scores": pa.table({
            "sample_row": rows, "teacher": names, "mean_reverse_kl": _holed(noise, kls),
            "bytes": noise.integers(0, 1 << 40, 3 * count), "rows": pa.array(np.full(3 * count, 5), pa.int32()),
            SPREAD: _holed(noise, std),
        }),
        STATS: pa.table({
            "sample_row": rows, "step": pa.array(noise.permutation(3 * count) - 5, pa.int32()),
            **{name: _holed(noise, noise.exponential(0.2, 3 * count)) for name in READ[STATS][2:]},
        }),
        "labels": pa.table({
            "uid": noise.choice([*own["uid"].to_pylist(), "gone"], count + 1), "removed": noise.random(count + 1) < 0.3,
            "label": noise.choice(["odd", "good", "long one"], count + 1),
            "created_at": pa.array(noise.permutation(count + 1), pa.timestamp("us", "UTC")),
        }),
        "evals": pa.table({
            "prompt_id": noise.choice(["p0", "p1", "p2", "gone"], count),
            "reward": pa.array(noise.random(count), pa.float32(), mask=noise.random(count) < 0.2),
            "correct": pa.array(noise.random(count) < 0.5, mask=noise.random(count) < 0.2),
            "finish_reason": noise.choice(["stop", "benchmark"], count),
        }),
        "teachers": pa.table({"name": list(TEACHERS), "vocab_size": list(TEACHERS.values())}),
    }  # fmt: skip


def _made(tables: dict[str, pa.Table], has: tuple[str, ...]) -> dict[str, pa.Array]:
    """All derived columns; each part is given only what it says that it needs."""
    rows, columns, waiting = Rows(tables["samples"]["sample_row"].to_numpy()), {}, derived_columns(TEACHERS, has)
    while waiting:
        part = next(p for p in waiting if all(n in columns or n in tables["samples"].column_names for n in p.inputs))
        waiting.remove(part)
        own = {n: pa.chunked_array([columns[n]]) if n in columns else tables["samples"][n] for n in part.inputs}
        columns |= part.compute(
            rows, own, tables[part.table].select(list(part.table_columns)) if part.table else pa.table({})
        )
        assert set(part.outputs) <= columns.keys()
    return {n: a.combine_chunks() if isinstance(a, pa.ChunkedArray) else a for n, a in columns.items()}


@pytest.mark.parametrize("has", [some for size in range(4) for some in combinations(OPTIONAL, size)])
@pytest.mark.parametrize(("seed", "count"), [(0, 400), (1, 400), (2, 3), (3, 0)])
def test_derived_columns_are_those_of_the_statement(seed: int, count: int, has: tuple[str, ...]) -> None:
    tables = _tables(seed, count)
    with duckdb.connect() as connection:
        for name, table in tables.items():
            connection.register(name, table)
        query = f"select * from ({definition(sorted(TEACHERS), has=has, with_rows=True)}) order by sample_row"
        expected = connection.sql(query).to_arrow_table()
    columns = _made(tables, has)
    assert columns.keys() == set(expected.column_names) - set(tables["samples"].column_names)
    if count > 100:
        assert all(len(set(expected[name].to_pylist())) > 1 for name in columns if name != "kl_silent")
    for name, values in columns.items():
        same = expected[name]
        assert values.type == same.type, name
        assert values.is_null().to_pylist() == same.is_null().to_pylist(), name
        if name == "labels":
            assert values.to_pylist() == same.to_pylist()
            continue
        one, other = (np.array([v or 0 for v in some.to_pylist()], np.float32) for some in (values, same))
        np.testing.assert_array_almost_equal_nulp(one[~np.isnan(one)], other[~np.isnan(one)], nulp=1)
        np.testing.assert_array_equal(np.isnan(one), np.isnan(other), err_msg=name)
