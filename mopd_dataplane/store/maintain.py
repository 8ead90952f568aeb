"""Counting and housekeeping: what a store holds, merging small files, dropping what nobody can see."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from datetime import timedelta
from typing import Any

from mopd_dataplane.store.lock import committing
from mopd_dataplane.store.place import Place
from mopd_dataplane.store.table import Table, lance_errors

KEEP_VERSIONS = timedelta(hours=1)
"""Untagged versions and files of interrupted commits younger than this are left alone: a reader or a committer may
still be at work on them."""
ROWS_PER_FILE = 1 << 20


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
    with committing(place, table.name), lance_errors(table.uri):
        dataset = table.open()
        if not table.name.endswith("/hidden"):
            merged = dataset.optimize.compact_files(target_rows_per_fragment=ROWS_PER_FILE)
            table.make_durable(dataset)
            yield "fragments_merged", merged.fragments_removed
        freed = dataset.cleanup_old_versions(older_than=KEEP_VERSIONS, error_if_tagged_old_versions=False)
        yield "versions_dropped", freed.old_versions
        yield "bytes_freed", freed.bytes_removed
