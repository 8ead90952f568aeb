"""Per-token statistics of scoring and training for each trained token, in the table `token_stats`.

They are for analysis only: nothing is trained from them, and a store without them is complete. Statistics that an
interrupted run did not write are not computed again.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import lance
import numpy as np
import pyarrow as pa
from numpy.typing import ArrayLike, NDArray

from mopd_dataplane.errors import MismatchError, require_known
from mopd_dataplane.records import PER_TOKEN_STATS
from mopd_dataplane.store.format.arrow_rows import list_column, list_views
from mopd_dataplane.store.format.row_checksums import with_row_crcs
from mopd_dataplane.store.maintain.free_hidden import FreedSpace, free_files
from mopd_dataplane.tables import TOKEN_STATS

if TYPE_CHECKING:
    from mopd_dataplane.records import Snapshot
    from mopd_dataplane.store.dataset import Store

MEANS = {
    "mean_abs_gap": "logprob_gap", "mean_student_entropy": "student_entropy", "mean_teacher_entropy": "teacher_entropy"
}  # fmt: skip
"""Column of a row -> the list of which it is the mean (of |values| for `abs`)."""
ROWS = 4096
"""Number of rows in one commit."""


@dataclass(frozen=True, kw_only=True)
class TokenStats:
    """Statistics of one sample: values [M] by the names of PER_TOKEN_STATS, as far as they were computed.

    Example: TokenStats(sample_row=7, stage="student", teacher="math", values={"teacher_entropy": entropies}).
    """

    sample_row: int
    stage: str
    teacher: str = ""
    step: int = -1
    """Optimizer step; -1 for scoring."""
    policy_version: int = -1
    values: Mapping[str, NDArray[Any]] = field(default_factory=dict)


def write_token_stats(store: Store, stats: Sequence[TokenStats]) -> int:
    """Add rows of `token_stats`, except those in the store and those of deleted samples. Returns how many are new.

    Raises MismatchError for a name that is no statistic, and for a count that is not the sample's loss tokens.
    """
    table = store.table_handle(TOKEN_STATS.name)
    if stats and not table.exists():
        table.create()
    added = 0
    for start in range(0, len(stats), ROWS):
        with store._committing(TOKEN_STATS.name):
            deleted = set(store.deletions.rows().tolist())
            part = [stat for stat in stats[start : start + ROWS] if stat.sample_row not in deleted]
            if not part:
                continue
            done = table.insert(_rows(store, part))
            table.make_durable(done.dataset)
        added += int(done.is_new.sum())
    return added


def read_token_stats(store: Store, uid: str, snapshot: Snapshot | None = None) -> list[dict[str, Any]]:
    """Return the rows of one sample, by step; lists as float32 [M], None for missing or freed ones."""
    if TOKEN_STATS.name not in (store.names() if snapshot is None else snapshot.versions):
        return []
    rows = store.table(TOKEN_STATS.name, filter=f"uid = '{uid}'", snapshot=snapshot)
    plain = rows.drop_columns(list(PER_TOKEN_STATS)).to_pylist()
    for name in PER_TOKEN_STATS:
        for row, values in zip(plain, list_views(rows[name]), strict=True):
            row[name] = None if values is None else values.astype(np.float32)
    return sorted(plain, key=lambda row: (row["step"], row["stage"], row["teacher"]))


def free_token_stats(store: Store, sample_rows: ArrayLike, *, in_use: Iterable[Snapshot] = ()) -> FreedSpace:
    """Free the lists of these rows of `samples`, file by file: a file is freed once none of its rows is needed.

    The rows stay, with their means. in_use: snapshots that readers will still open; tagged ones always stay.
    """
    table = store.table_handle(TOKEN_STATS.name)
    if not table.exists():
        return FreedSpace(0, 0)

    def served(dataset: lance.LanceDataset) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
        rows = dataset.to_table(columns=["sample_row", "bytes"])
        return np.isin(rows["sample_row"].to_numpy(), np.asarray(sample_rows)), rows["bytes"].to_numpy() > 0

    return free_files(store.location, table, served, _without_lists, in_use)


def _without_lists(fragment: lance.LanceFragment) -> pa.Table:
    rows = fragment.to_table()
    for at, column in enumerate(rows.schema):
        if column.name in PER_TOKEN_STATS:
            rows = rows.set_column(at, column, pa.nulls(rows.num_rows, column.type))
        elif column.name == "bytes":
            rows = rows.set_column(at, column, pa.array(np.zeros(rows.num_rows, np.int64)))
    return with_row_crcs(rows).select(rows.schema.names)


def _rows(store: Store, stats: Sequence[TokenStats]) -> pa.Table:
    samples = store.take_samples([one.sample_row for one in stats], ["uid", "loss_tokens"])
    tokens = samples["loss_tokens"].to_pylist()
    for one, uid, count in zip(stats, samples["uid"].to_pylist(), tokens, strict=True):
        for name, values in one.values.items():
            require_known(name, PER_TOKEN_STATS, "no statistic", MismatchError)
            if not isinstance(values, np.ndarray) or values.dtype.kind not in "fiu":
                raise MismatchError(f"{name} of sample {uid} is {values!r:.40}; a numpy array of numbers is needed")
            if values.shape != (count,):
                shape = list(values.shape)
                raise MismatchError(
                    f"{name} of sample {uid} has shape {shape}; a value for each of {count} loss tokens"
                )
    now = datetime.now(UTC)
    columns: dict[str, Any] = {
        "uid": samples["uid"],
        "stage": [one.stage for one in stats],
        "step": [one.step for one in stats],
        "teacher": [one.teacher for one in stats],
        "sample_row": [one.sample_row for one in stats],
        "policy_version": [one.policy_version for one in stats],
        "tokens": tokens,
        "bytes": [2 * sum(len(values) for values in one.values.values()) for one in stats],
        "created_at": [now] * len(stats),
    }
    for mean, name in MEANS.items():
        columns[mean] = [_mean(one.values.get(name)) for one in stats]
    halves = [{name: _half(values) for name, values in one.values.items()} for one in stats]
    for name in PER_TOKEN_STATS:
        columns[name] = list_column([of.get(name) for of in halves], TOKEN_STATS.schema.field(name).type)
    return pa.table({name: columns[name] for name in TOKEN_STATS.schema.names}, schema=TOKEN_STATS.schema)


def _mean(values: NDArray[Any] | None) -> float | None:
    magnitudes = None if values is None else np.abs(values[np.isfinite(values)].astype(np.float64))
    return None if magnitudes is None or not len(magnitudes) else float(magnitudes.mean())


def _half(values: NDArray[Any]) -> NDArray[np.float16]:
    """Convert to float16; values beyond its range become its largest number."""
    largest = float(np.finfo(np.float16).max)
    halves: NDArray[np.float16] = np.clip(values, -largest, largest).astype(np.float16)
    return halves
