"""Samples of a store as files for other tools, in the form they read (export_forms.py)."""

import base64
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from mopd_dataplane.base.extras import require
from mopd_dataplane.base.file_urls import (
    PathOrUrl,
    check_new,
    is_url,
    local_path,
    publish_new,
    scratch_beside,
    suffix_of,
)
from mopd_dataplane.errors import InputError, UnknownNameError, require_known
from mopd_dataplane.fields import ALIGNMENT
from mopd_dataplane.interchange.export_forms import FORMS, Form
from mopd_dataplane.interchange.signal_entries import SignalsOut
from mopd_dataplane.interchange.teachers_in import head_beside, tokenizer_beside
from mopd_dataplane.records import Snapshot, Teacher
from mopd_dataplane.store.dataset import Store
from mopd_dataplane.store.read.decode import read_tokenizer
from mopd_dataplane.store.rollouts.conditions import Conditions, job_questions

KINDS = ("parquet", "jsonl", "arrow", "datasets")
_ROWS = 512
"""Number of samples in memory at once; fewer with hidden states."""
_ROWS_HIDDEN = 16


def kind_of(out: PathOrUrl) -> str:
    """Return the export kind for a path: that of its suffix, or `datasets` for a folder. Raises InputError for another
    suffix."""
    suffix = suffix_of(out).removeprefix(".")
    if suffix in KINDS[:-1]:
        return suffix
    if suffix:
        raise InputError(
            f"{out}: a name that ends in .{suffix} says no format; end it in .parquet, .jsonl or .arrow, leave the "
            "ending out for a folder of Hugging Face datasets, or give --format"
        )
    return "datasets"


def export_samples(
    store: Store,
    out: PathOrUrl,
    kind: str = "",
    *,
    form: str = "plain",
    signals: Sequence[str] = (),
    teachers: Sequence[str] = (),
    where: str | None = None,
    snapshot: Snapshot | None = None,
    progress: Callable[[int], None] = lambda samples: None,
) -> int:
    """Write samples to a new file (parquet, jsonl, arrow) or folder (datasets). Returns their number.

    out: a path or a URL; it appears when it is complete. kind: one of KINDS; by default that of the suffix of `out`.
    form: form of a row, one of export_forms.FORMS. signals: kinds of signals in the rows; for hidden states the heads
    of their teachers are written to the folder `<out>.heads`, for alignments the tokenizers to `<out>.tokenizers`.
    teachers: names of teachers; by default every teacher. where: a condition over the table of rollouts, such as
    "domain = 'math' and reward > 0".
    Raises InputError when `out` exists, the form does not support the kind, or the kind needs a package that is
    missing.
    Raises UnknownNameError when no sample matches or a teacher does not exist.
    """
    kind = kind or kind_of(out)
    require_known(kind, KINDS, "no export kind", InputError)
    require_known(form, FORMS, "no export form", InputError)
    check_new(out)
    if kind == "datasets":
        require(["datasets"])
    pinned = snapshot or store.snapshot()
    rows = _chosen(store, where, pinned)
    if not len(rows):
        raise UnknownNameError(f"{store.uri}: no sample fits {where!r}" if where else f"{store.uri} has no samples")
    said = SignalsOut(store, pinned, signals, teachers)
    writer = FORMS[form](store, said, kind)
    with scratch_beside(out) as scratch:
        staging = scratch / f"rows.{kind}"
        _write(staging, kind, _batches(store, rows, said, pinned, writer, progress), writer.schema)
        if kind == "datasets":
            staging = _as_dataset(staging, scratch)
        if "hidden" in signals:
            _publish_heads(store, said.teachers.values(), out, scratch)
        if ALIGNMENT in signals:
            _publish_tokenizers(store, said, out, scratch)
        publish_new(staging, out)
    return len(rows)


def _chosen(store: Store, where: str | None, snapshot: Snapshot) -> np.ndarray:
    """Return the rows [n] of `samples` that match, in row order."""
    rollouts = Conditions(store, snapshot, job_questions(store))
    return rollouts.sample_rows if where is None else rollouts.rows(where)


def _batches(
    store: Store, rows: np.ndarray, said: SignalsOut, snapshot: Snapshot, form: Form, progress: Callable[[int], None]
) -> Iterator[list[dict[str, Any]]]:
    prompts = {row["prompt_id"]: row for row in store.table("prompts", snapshot=snapshot).to_pylist()}
    rewards = _rewards(store, snapshot)
    size = _ROWS_HIDDEN if "hidden" in said.kinds else _ROWS
    for start in range(0, len(rows), size):
        some = rows[start : start + size]
        metadata = store.take_samples(some, None, snapshot).to_pylist()
        payload = store.read_tokens(some, snapshot=snapshot, verify=True).to_pylist()
        yield form.rows(
            [
                sample | tokens | {
                    "question": prompts.get(sample["prompt_id"], {}), "rewards": rewards.get(sample["uid"], []),
                    "signals": signals,
                }
                for sample, tokens, signals in zip(metadata, payload, said.of(some.tolist()), strict=True)
            ]
        )  # fmt: skip
        progress(start + len(some))


def _rewards(store: Store, snapshot: Snapshot) -> dict[str, list[dict[str, Any]]]:
    rewards_by_uid: dict[str, list[dict[str, Any]]] = {}
    columns = ["uid", "verifier", "verifier_version", "reward", "detail"]
    columns += ["correct"] if store.has_column("rewards", "correct", snapshot) else []
    for row in store.table("rewards", columns, snapshot=snapshot).to_pylist():
        rewards_by_uid.setdefault(row.pop("uid"), []).append(row)
    return rewards_by_uid


def _write(file: Path, kind: str, batches: Iterator[list[dict[str, Any]]], schema: pa.Schema | None) -> None:
    """Write rows as a JSONL or an Arrow file; for the other kinds as a Parquet file, from which datasets are made."""
    import pyarrow.parquet as pq

    if kind == "jsonl":
        with file.open("w") as lines:
            for row in chain.from_iterable(batches):
                lines.write(json.dumps(row, allow_nan=False, default=_as_text) + "\n")
        return
    assert schema is not None  # a form without columns refuses the kind
    with pa.OSFile(str(file), "wb") as content:
        columns = pa.ipc.new_file if kind == "arrow" else partial(pq.ParquetWriter, compression="zstd")
        with columns(content, schema) as writer:
            for batch in batches:
                writer.write_table(pa.Table.from_pylist(batch, schema))


def _as_text(value: bytes) -> str:
    """Encode bytes for JSON."""
    return base64.b64encode(value).decode()


def _publish_heads(store: Store, teachers: Iterable[Teacher], out: PathOrUrl, scratch: Path) -> None:
    """Copy the heads of teachers beside the export."""
    for teacher in teachers:
        if not teacher.head_file:
            continue
        head = scratch / f"{teacher.name}.safetensors"
        if store.files is not None:
            store.files.download(teacher.head_file, head)
        else:
            head.write_bytes(store.path(teacher.head_file).read_bytes())
        target = head_beside(out, teacher.name)
        if not is_url(target):
            local_path(target).parent.mkdir(exist_ok=True)
        publish_new(head, target)


def _publish_tokenizers(store: Store, said: SignalsOut, out: PathOrUrl, scratch: Path) -> None:
    """Copy the tokenizers of teachers with one of their own beside the export."""
    digests = {teacher.tokenizer_digest for name, teacher in said.teachers.items() if said.has(name, ALIGNMENT)}
    for digest in sorted(digests):
        file = scratch / f"{digest}.json"
        file.write_text(read_tokenizer(store.location, digest))
        target = tokenizer_beside(out, digest)
        if not is_url(target):
            local_path(target).parent.mkdir(exist_ok=True)
        publish_new(file, target)


def _as_dataset(parquet: Path, scratch: Path) -> Path:
    """Convert the rows to a folder for `datasets.load_from_disk`, through a cache on disk instead of memory."""
    import datasets

    datasets.disable_progress_bars()
    cached = datasets.Dataset.from_parquet(str(parquet), cache_dir=str(scratch / "cache"))
    folder = scratch / "dataset"
    cached.save_to_disk(str(folder))
    return folder
