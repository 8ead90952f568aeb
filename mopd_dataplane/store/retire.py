"""Frees the bytes of hidden states (or of token_stats.py's lists) that are not needed any more, without moving a row.

    replace   every file of which no row is needed by one with the same rows and no states: one commit
    drop      the versions that still name the old files, but for those that are pinned or in use

Rows keep their ids: the new file's rows get those of the old file's. The codec of a freed row is FREED. After a kill
the same call does the rest.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Protocol

import lance
import numpy as np
import pyarrow as pa
from lance.fragment import FragmentMetadata, write_fragments
from numpy.typing import NDArray

from mopd_dataplane.base.fault_points import fault_point
from mopd_dataplane.store.dataset_format import FREED
from mopd_dataplane.store.lance_errors import writing
from mopd_dataplane.store.lock import committing
from mopd_dataplane.store.place import Place
from mopd_dataplane.store.row_ids import row_ids
from mopd_dataplane.store.signals import blob_column
from mopd_dataplane.store.table import Table
from mopd_dataplane.store.tags import drop_versions, tagged


@dataclass(frozen=True)
class Freed:
    """Result of a call that frees.

    Example: two commits of 512 samples: Freed(rows=1024, bytes=8_800_000_000).
    """

    rows: int
    """Rows that lost their states by this call."""
    bytes: int
    """Bytes that left the disk by this call; those a pinned snapshot needs stay until it is released."""


class Freeable(Protocol):
    """Bytes that can be freed in a table, file by file."""

    def served(self, dataset: lance.LanceDataset) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
        """[n] rows that have served, [n] rows that still hold something; in the order of the scan."""

    def emptied(self, table: Table, dataset: lance.LanceDataset, place: int) -> FragmentMetadata:
        """A new file with the rows of the one at `place`, without what can go."""


def free_hidden(place: Place, table: Table, payload_rows: NDArray[np.int64], in_use: Collection[int]) -> Freed:
    """Free these rows of signals/<teacher>/hidden, file by file: a file goes once all its rows have served.

    in_use: versions that readers still have open or will open. Tagged versions are always kept.
    """
    return free_files(place, table, _States(payload_rows), in_use)


def free_files(place: Place, table: Table, what: Freeable, in_use: Collection[int]) -> Freed:
    """Free what of a table has served; see free_hidden."""
    with committing(place, table.name), writing(table.uri):
        rows = _replace(table, what)
        fault_point("retire.replaced")
        return Freed(rows, _drop_versions(table.open(), in_use, table.acknowledged()))


def _replace(table: Table, what: Freeable) -> int:
    """Commit empty files in place of those that have served; how many rows were in them."""
    while True:
        dataset = table.open_to_write()
        held = [fragment.metadata for fragment in dataset.get_fragments()]
        fresh = {place: _emptied(table, dataset, place, what) for place in _served(dataset, what)}
        if not fresh:
            return 0
        if table.barrier is not None:
            table.barrier.sync_data(fresh.values())
        fault_point("retire.written")
        operation = lance.LanceOperation.Merge(
            [fresh.get(place, fragment) for place, fragment in enumerate(held)], dataset.lance_schema
        )
        if table.commit_at(dataset, operation):
            return sum(fragment.physical_rows for fragment in fresh.values())


def _served(dataset: lance.LanceDataset, what: Freeable) -> Iterator[int]:
    """Places of the files whose rows have all served, and that still hold something."""
    served, holds = what.served(dataset)
    first = 0
    for place, fragment in enumerate(dataset.get_fragments()):
        rows = slice(first, first + fragment.count_rows())
        if served[rows].all() and holds[rows].any():
            yield place
        first = rows.stop


def _emptied(table: Table, dataset: lance.LanceDataset, place: int, what: Freeable) -> FragmentMetadata:
    """A file with the rows of the one at `place`, without what can go, under its number and with their ids."""
    old = dataset.get_fragments()[place]
    fresh = what.emptied(table, dataset, place)
    fresh.id = old.fragment_id
    fresh.row_id_meta = old.metadata.row_id_meta
    return fresh


class _States:
    """Hidden states of some rows of signals/<teacher>/hidden."""

    def __init__(self, payload_rows: NDArray[np.int64]) -> None:
        self._payload_rows = payload_rows

    def served(self, dataset: lance.LanceDataset) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
        codecs = dataset.to_table(columns=["codec"])["codec"]
        served = np.zeros(len(codecs), dtype=bool)
        served[row_ids(dataset).offsets(self._payload_rows)] = True
        return served, np.asarray(pa.compute.not_equal(codecs, FREED))

    def emptied(self, table: Table, dataset: lance.LanceDataset, place: int) -> FragmentMetadata:
        kept = dataset.get_fragments()[place].to_table(columns=["uid", "rows"])
        count = kept.num_rows
        rows = pa.table(
            {
                "uid": kept["uid"],
                "codec": pa.repeat(FREED, count),
                "rows": kept["rows"],
                "row_bytes": pa.repeat(pa.scalar(0, pa.int32()), count),
                "hidden": blob_column([np.empty(0, np.uint8)] * count),
            },
            schema=table.schema,
        )
        [fresh] = write_fragments(rows, dataset, mode="append", data_storage_version=table.spec.storage)
        return fresh


def _drop_versions(dataset: lance.LanceDataset, in_use: Collection[int], acknowledged: int) -> int:
    """Drop versions before the acknowledged one, but those in use and those tagged; bytes that left the disk."""
    keep = {*tagged(dataset).values(), *in_use}
    versions = [entry["version"] for entry in dataset.versions()]
    old = [version for version in versions if version < acknowledged and version not in keep]
    if not old:
        return 0
    return drop_versions(dataset, versions=old)[1]
