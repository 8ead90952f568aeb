"""Removes rows from a table: every file with one of them is replaced by one without it, in a single commit.

The remaining rows keep their ids, and removed ids are never used again. Old files stay on disk until the versions that
name them are dropped. With concurrent writers, Lance refuses the commit when an insert or a merge came in between, and
it is repeated; a concurrent append does not disturb it.
"""

from collections.abc import Callable, Iterator

import lance
import numpy as np
import pyarrow as pa
from lance.fragment import FragmentMetadata, RowIdSequence, write_fragments
from numpy.typing import NDArray

from mopd_dataplane.base.fault_points import fault_point
from mopd_dataplane.errors import DamagedError
from mopd_dataplane.store.commit.in_flight import commit_in_flight
from mopd_dataplane.store.commit.merge_check import check_kept, rows_at_once
from mopd_dataplane.store.commit.table import Table
from mopd_dataplane.store.format.lance_errors import writing
from mopd_dataplane.store.format.row_ids import fragment_ids
from mopd_dataplane.store.location import StoreLocation

Blobs = Callable[[lance.LanceDataset, NDArray[np.int64]], Iterator[pa.RecordBatch]]
"""Returns rows of a table of blobs, by id, with their bytes."""
_ONE_FILE = (1 << 31) - 1


def remove_rows(location: StoreLocation, table: Table, gone: NDArray[np.int64], blobs: Blobs | None = None) -> int:
    """Remove the rows with these ids, durable on return. Returns how many existed.

    blobs: reads columns that a scan of the table does not return. Raises DamagedError when a remaining row cannot be
    read, or was not copied right; nothing has changed then.
    """
    while True:
        with location.committing(table.name), commit_in_flight(location, table.name), writing(table.uri):
            dataset = table.open_to_write()
            touched = [(fragment, ids) for fragment in dataset.get_fragments()
                       if np.isin(ids := fragment_ids(fragment), gone).any()]  # fmt: skip
            if not touched:
                return 0
            fresh = [_without(table, dataset, fragment, ids, gone, blobs) for fragment, ids in touched]
            left = [file for file in fresh if file is not None]
            table.sync_data(left)
            fault_point("delete.written")
            operation = lance.LanceOperation.Update(
                removed_fragment_ids=[fragment.fragment_id for fragment, _ in touched], new_fragments=left
            )
            if not table.commit_on(dataset, operation, left):
                continue
        fault_point("delete.removed")
        return int(sum(np.isin(ids, gone).sum() for _, ids in touched))


def _without(
    table: Table,
    dataset: lance.LanceDataset,
    fragment: lance.LanceFragment,
    ids: NDArray[np.int64],
    gone: NDArray[np.int64],
    blobs: Blobs | None,
) -> FragmentMetadata | None:
    """Write a file with the remaining rows of another, and their ids. Returns None when none remains."""
    stays = ~np.isin(ids, gone)
    if not stays.any():
        return None
    batches = _kept(fragment, stays) if blobs is None else blobs(dataset, ids[stays])
    schema = dataset.schema if blobs is None else table.schema
    [fresh] = write_fragments(
        pa.RecordBatchReader.from_batches(schema, batches),
        dataset,
        mode="append",
        max_rows_per_file=_ONE_FILE,
        max_bytes_per_file=1 << 62,
        data_storage_version=table.spec.storage,
    )
    if fresh.physical_rows != stays.sum():
        raise DamagedError(f"{table.uri}: {fresh.physical_rows} of {stays.sum()} rows that stay were copied; run again")
    if blobs is None:
        check_kept(dataset, _kept(fragment, stays), [fresh])
    kept_ids: pa.Array = pa.array(ids[stays].astype(np.uint64))
    fresh.row_id_meta = RowIdSequence(kept_ids).to_inline_metadata()
    return fresh


def _kept(fragment: lance.LanceFragment, stays: NDArray[np.bool_]) -> Iterator[pa.RecordBatch]:
    """Read the remaining rows of a file, in order."""
    first = 0
    for batch in fragment.to_batches(batch_size=rows_at_once([fragment.metadata])):
        part = stays[first : first + batch.num_rows]
        first += batch.num_rows
        if part.any():
            yield batch if part.all() else batch.filter(pa.array(part))
    if first != len(stays):
        raise DamagedError(f"fragment {fragment.fragment_id}: {first} of its {len(stays)} rows can be read")
