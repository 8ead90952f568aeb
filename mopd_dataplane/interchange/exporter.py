"""Samples of a store as files for other tools; the plain format of the importer reads them back, field by field."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from mopd_dataplane.base.file_urls import Place, check_new, publish_new, scratch_beside
from mopd_dataplane.errors import InputError, UnknownNameError, nearest
from mopd_dataplane.interchange.formats import PLAIN_FIELDS, QUESTION_FIELDS, SAMPLE_FIELDS
from mopd_dataplane.records import Snapshot
from mopd_dataplane.store.dataset import Store
from mopd_dataplane.tables import SAMPLES, TOKENS

KINDS = ("parquet", "jsonl", "datasets")
_ROWS = 512
"""Samples in memory at once."""

_REWARD = pa.struct([("verifier", pa.string()), ("verifier_version", pa.string()), ("reward", pa.float64())])


def _type_of(name: str) -> pa.DataType:
    """Arrow type of a field of an exported row: the store's own."""
    stored = SAMPLES if name in SAMPLES.schema.names else TOKENS
    return stored.schema.field(name).type


PAYLOAD_FIELDS = ("domain", "iteration", "turns", "prompt_len", *PLAIN_FIELDS)
SCHEMA = pa.schema(
    [
        *((name, _type_of(name)) for name in SAMPLE_FIELDS),
        *((name, _type_of(name)) for name in PAYLOAD_FIELDS),
        ("prompt", pa.string()), ("answer", pa.string()),
        ("question_fields", pa.struct([(name, pa.string()) for name in QUESTION_FIELDS])),
        ("rewards", pa.list_(_REWARD)),
    ]
)  # fmt: skip
"""Columns of an exported row."""


def export_samples(
    store: Store,
    out: Place,
    kind: str,
    *,
    where: str | None = None,
    snapshot: Snapshot | None = None,
    progress: Callable[[int], None] = lambda samples: None,
) -> int:
    """Write samples with payload, prompt and rewards to a new file (parquet, jsonl) or folder (datasets); how many.

    out: a path or a URL; it appears when it is complete. where: a Lance predicate over `samples`, such as
    "domain = 'math'".
    Raises InputError when the place is taken or the kind needs a package that is missing, UnknownNameError when no
    sample fits.
    """
    if kind not in KINDS:
        raise InputError(f"no export kind {kind!r}: {nearest(kind, KINDS)}")
    check_new(out)
    if kind == "datasets":
        _require_datasets()
    pinned = snapshot or store.snapshot()
    rows = _chosen(store, where, pinned)
    if not len(rows):
        raise UnknownNameError(f"{store.uri}: no sample fits {where!r}" if where else f"{store.uri} has no samples")
    with scratch_beside(out) as scratch:
        staging = scratch / "rows.parquet"
        batches = _batches(store, rows, pinned, progress)
        if kind == "jsonl":
            staging = scratch / "rows.jsonl"
            _write_jsonl(staging, batches)
        else:
            _write_parquet(staging, batches)
        if kind == "datasets":
            staging = _as_dataset(staging, scratch)
        publish_new(staging, out)
    return len(rows)


def _chosen(store: Store, where: str | None, snapshot: Snapshot) -> np.ndarray:
    """[n] rows of `samples` that fit, in row order."""
    parts = list(store.scan_samples(["uid"], snapshot))
    rows = np.concatenate([np.empty(0, np.int64), *(rows for rows, _ in parts)])
    if where is None:
        return rows
    try:
        wanted = store.samples(["uid"], where, snapshot)["uid"]
    except (ValueError, OSError) as error:
        raise InputError(f"filter {where!r:.200} is no predicate over samples: {error!s:.300}") from None
    uids = pa.chunked_array([batch["uid"] for _, batch in parts], pa.string())
    chosen: np.ndarray = rows[pa.compute.is_in(uids, value_set=wanted.combine_chunks()).to_numpy()]
    return chosen


def _batches(
    store: Store, rows: np.ndarray, snapshot: Snapshot, progress: Callable[[int], None]
) -> Iterator[list[dict[str, Any]]]:
    prompts = {row["prompt_id"]: row for row in store.table("prompts", snapshot=snapshot).to_pylist()}
    rewards = _rewards(store, snapshot)
    for start in range(0, len(rows), _ROWS):
        some = rows[start : start + _ROWS]
        metadata = store.take_samples(some, None, snapshot).to_pylist()
        payload = store.read_tokens(some, snapshot=snapshot, verify=True).to_pylist()
        yield [
            _row(sample | heavy, prompts.get(sample["prompt_id"], {}), rewards.get(sample["uid"], []))
            for sample, heavy in zip(metadata, payload, strict=True)
        ]
        progress(start + len(some))


def _rewards(store: Store, snapshot: Snapshot) -> dict[str, list[dict[str, Any]]]:
    found: dict[str, list[dict[str, Any]]] = {}
    columns = ["uid", "verifier", "verifier_version", "reward"]
    for row in store.table("rewards", columns, snapshot=snapshot).to_pylist():
        found.setdefault(row.pop("uid"), []).append(row)
    return found


def _row(sample: dict[str, Any], prompt: dict[str, Any], rewards: list[dict[str, Any]]) -> dict[str, Any]:
    row = {name: sample[name] for name in SCHEMA.names if name in sample}
    question = {name: prompt.get(name) for name in QUESTION_FIELDS}
    return row | {
        "prompt": prompt.get("text"), "answer": prompt.get("answer"), "question_fields": question, "rewards": rewards
    }  # fmt: skip


def _write_parquet(file: Path, batches: Iterator[list[dict[str, Any]]]) -> None:
    import pyarrow.parquet as pq

    with pq.ParquetWriter(file, SCHEMA, compression="zstd") as writer:
        for batch in batches:
            writer.write_table(pa.Table.from_pylist(batch, SCHEMA))


def _write_jsonl(file: Path, batches: Iterator[list[dict[str, Any]]]) -> None:
    with file.open("w") as lines:
        for batch in batches:
            lines.writelines(json.dumps(row, allow_nan=False) + "\n" for row in batch)


def _require_datasets() -> None:
    try:
        import datasets  # noqa: F401
    except ImportError:
        raise InputError("a Hugging Face dataset needs the package: pip install 'mopd-dataplane[datasets]'") from None


def _as_dataset(parquet: Path, scratch: Path) -> Path:
    """The rows as a folder for `datasets.load_from_disk`; they pass through a cache on disk, not through memory."""
    import datasets

    datasets.disable_progress_bars()
    cached = datasets.Dataset.from_parquet(str(parquet), cache_dir=str(scratch / "cache"))
    folder = scratch / "dataset"
    cached.save_to_disk(str(folder))
    return folder
