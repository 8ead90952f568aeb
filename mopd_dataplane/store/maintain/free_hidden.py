"""Frees the bytes of hidden states (or of token_stats.py's lists) that are no longer needed, without moving a row.

    replace   every file without a needed row by one with the same rows and no states: one commit
    drop      the versions that still name the old files, except those that are pinned or in use

Rows keep their ids, and the codec of a freed row is FREED. After a kill the same call does the rest.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import lance
import numpy as np
import pyarrow as pa
from lance.fragment import FragmentMetadata, write_fragments
from numpy.typing import NDArray

from mopd_dataplane.base.fault_points import fault_point
from mopd_dataplane.records import Snapshot
from mopd_dataplane.store.commit.clean_up import clean_up
from mopd_dataplane.store.commit.in_flight import commit_in_flight
from mopd_dataplane.store.commit.signals import blob_column
from mopd_dataplane.store.commit.table import Table
from mopd_dataplane.store.format.dataset_format import FREED
from mopd_dataplane.store.format.lance_errors import writing
from mopd_dataplane.store.format.row_ids import row_ids
from mopd_dataplane.store.location import StoreLocation


@dataclass(frozen=True)
class FreedSpace:
    """What a call freed. Example: two commits of 512 samples: FreedSpace(rows=1024, bytes=8_800_000_000)."""

    rows: int
    """Number of rows whose states this call freed."""
    bytes: int
    """Bytes that this call removed from the disk; those that a pinned snapshot needs stay until it is released."""


Served = Callable[[lance.LanceDataset], tuple[NDArray[np.bool_], NDArray[np.bool_]]]
"""Returns, in the order of the scan, [n] whether a row is no longer needed, and [n] whether it still holds
something."""
Emptied = Callable[[lance.LanceFragment], pa.Table]
"""Returns the rows of a file, without the values to be freed."""


def free_hidden(
    location: StoreLocation, table: Table, payload_rows: NDArray[np.int64], in_use: Iterable[Snapshot]
) -> FreedSpace:
    """See Store.free_hidden. in_use: snapshots that readers still have open or will open."""

    def served(dataset: lance.LanceDataset) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
        codecs = dataset.to_table(columns=["codec"])["codec"]
        freed = np.isin(np.arange(len(codecs)), row_ids(dataset).offsets(payload_rows))
        return freed, np.asarray(pa.compute.not_equal(codecs, FREED))

    def emptied(fragment: lance.LanceFragment) -> pa.Table:
        rows = fragment.to_table(columns=["uid", "rows"])
        count = rows.num_rows
        freed = {
            "uid": rows["uid"], "codec": [FREED] * count, "rows": rows["rows"], "row_bytes": [0] * count,
            "hidden": blob_column([np.empty(0, np.uint8)] * count),
        }  # fmt: skip
        return pa.table(freed, schema=table.schema)

    return free_files(location, table, served, emptied, in_use)


def free_files(
    location: StoreLocation, table: Table, served: Served, emptied: Emptied, in_use: Iterable[Snapshot]
) -> FreedSpace:
    """Free the rows of a table that are no longer needed; see free_hidden."""
    with location.committing(table.name), writing(table.uri):
        rows = _replace(location, table, served, emptied)
        fault_point("retire.replaced")
        needed = [snapshot.versions[table.name] for snapshot in in_use if table.name in snapshot.versions]
        done = clean_up(
            location,
            table.name,
            table.open(),
            table.acknowledged(),
            now=True,
            needed=needed,
            readers_keep=False,
            wait=True,
        )
        return FreedSpace(rows, done.bytes)


def _replace(location: StoreLocation, table: Table, served: Served, emptied: Emptied) -> int:
    """Commit empty files in place of those that are no longer needed. Returns how many rows were in them."""
    while True:
        with commit_in_flight(location, table.name):
            dataset = table.open_to_write()
            files = dataset.get_fragments()
            fresh = {index: _written(table, dataset, files[index], emptied) for index in _served(dataset, served)}
            if not fresh:
                return 0
            table.sync_data(fresh.values())
            fault_point("retire.written")
            fragments = [fresh.get(index, fragment.metadata) for index, fragment in enumerate(files)]
            operation = lance.LanceOperation.Merge(fragments, dataset.lance_schema)
            if table.commit_on(dataset, operation, fresh.values()):
                return sum(fragment.physical_rows for fragment in fresh.values())


def _served(dataset: lance.LanceDataset, served: Served) -> Iterator[int]:
    """Yield the indices of the files whose rows are all no longer needed and that still hold something."""
    done, holds = served(dataset)
    first = 0
    for index, fragment in enumerate(dataset.get_fragments()):
        rows = slice(first, first + fragment.count_rows())
        if done[rows].all() and holds[rows].any():
            yield index
        first = rows.stop


def _written(table: Table, dataset: lance.LanceDataset, old: lance.LanceFragment, emptied: Emptied) -> FragmentMetadata:
    """Write a file with the rows of another, without the values to be freed, under its number and with their ids."""
    rows = emptied(old)
    [fresh] = write_fragments(rows, dataset, mode="append", data_storage_version=table.spec.storage)
    fresh.id = old.fragment_id
    fresh.row_id_meta = old.metadata.row_id_meta
    return fresh
