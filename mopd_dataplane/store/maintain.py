"""Counting and housekeeping: what a store holds, merging small files, dropping what nobody can see."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from mopd_dataplane.store.fragments import drop_old, merge_small
from mopd_dataplane.store.lance_errors import writing
from mopd_dataplane.store.layout import blob_columns
from mopd_dataplane.store.lock import committing
from mopd_dataplane.store.place import Place
from mopd_dataplane.store.table import Table

LARGE_FILE = 1 << 30
"""Bytes from which on a file is left as it is."""


def describe(place: Place, tables: Mapping[str, Table]) -> dict[str, Any]:
    """Counts of a store: per table rows, bytes on disk (all versions), files and version; pinned snapshots."""
    report = {}
    for name, table in tables.items():
        dataset = table.open()
        sizes = [size for batch in dataset.all_files() for size in batch["size_bytes"].to_pylist()]
        report[name] = {
            "rows": dataset.count_rows(),
            "bytes": sum(sizes),
            "files": len(sizes),
            "fragments": len(dataset.get_fragments()),
            "version": dataset.version,
        }
    mark = place.read_json("store.json") or {}
    snapshots = [name.removesuffix(".json") for name in place.children("snapshots") if name.endswith(".json")]
    return {"uri": place.uri, **mark, "tables": report, "snapshots": snapshots}


def compact(place: Place, tables: Mapping[str, Table]) -> dict[str, dict[str, int]]:
    """Merge the small files of every table but the hidden states, then drop unpinned old versions and leftovers.

    No row moves: rows keep their order, so row numbers stay valid. Hidden states are left as they are, because
    merging would rewrite every byte of them for nothing. Returns, per table, files merged and bytes freed.
    """
    return {name: dict(_tidy(place, table)) for name, table in tables.items()}


def _tidy(place: Place, table: Table) -> Iterator[tuple[str, int]]:
    with committing(place, table.name), writing(table.uri):
        dataset = table.open()
        if not blob_columns(table.spec):
            yield "files_merged", merge_small(dataset, LARGE_FILE, table.barrier)
            table.make_durable(dataset)
        versions, freed = drop_old(dataset)
        yield "versions_dropped", versions
        yield "bytes_freed", freed
