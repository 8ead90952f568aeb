"""Counting and housekeeping: what a store holds, merging small files, dropping what nobody can see."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import lance

from mopd_dataplane.errors import ResourceError
from mopd_dataplane.store.dataset_format import blob_columns
from mopd_dataplane.store.fragments import drop_old, merge_small
from mopd_dataplane.store.lance_errors import is_overtaken, writing
from mopd_dataplane.store.lock import committing
from mopd_dataplane.store.place import Place
from mopd_dataplane.store.table import ATTEMPTS, Table

LARGE_FILE = 1 << 30
"""Bytes from which on a file is left as it is."""


def describe(place: Place, tables: Mapping[str, Table]) -> dict[str, Any]:
    """Counts of a store: per table rows, bytes on disk (all versions), files and version; pinned snapshots.

    freeable_bytes: data that neither the newest nor a tagged version names; upkeep drops it a day later.
    """
    report = {}
    for name, table in tables.items():
        dataset = table.open()
        sizes = file_sizes(dataset)
        report[name] = {
            "rows": dataset.count_rows(),
            "bytes": sum(sizes.values()),
            "freeable_bytes": sum(sizes.values()) - _needed(dataset, sizes),
            "files": len(sizes),
            "fragments": len(dataset.get_fragments()),
            "version": dataset.version,
        }
    mark = place.read_json("store.json") or {}
    snapshots = [name.removesuffix(".json") for name in place.children("snapshots") if name.endswith(".json")]
    return {"uri": place.uri, **mark, "tables": report, "snapshots": snapshots}


def file_sizes(dataset: lance.LanceDataset) -> dict[str, int]:
    """Bytes of every file of a dataset, whichever version names it."""
    batches = [batch.select(["path", "size_bytes"]).to_pylist() for batch in dataset.all_files()]
    return {row["path"]: row["size_bytes"] for batch in batches for row in batch}


def _needed(dataset: lance.LanceDataset, sizes: Mapping[str, int]) -> int:
    """Bytes of the data files, with their sidecars, of the newest and every tagged version, and of what is no data."""
    versions = {dataset.version, *(tag["version"] for tag in dataset.tags.list().values())}
    named = {
        data_file.path.removesuffix(".lance")
        for version in versions
        for fragment in dataset.checkout_version(version).get_fragments()
        for data_file in fragment.data_files()
    }
    return sum(
        size
        for path, size in sizes.items()
        if not path.startswith("data/") or path.split("/")[1].removesuffix(".lance") in named
    )


def compact(place: Place, tables: Mapping[str, Table]) -> dict[str, dict[str, int]]:
    """Merge the small files of every table but the hidden states, then drop unpinned old versions and leftovers.

    Rows keep their ids, and what they say. Hidden states are left as they are, because
    merging would rewrite every byte of them for nothing. Returns, per table, files merged and bytes freed.
    """
    return {name: dict(_tidy(place, table)) for name, table in tables.items()}


def _tidy(place: Place, table: Table) -> Iterator[tuple[str, int]]:
    with committing(place, table.name), writing(table.uri):
        merged, dataset = _merge(table)
        yield "files_merged", merged
        versions, freed = drop_old(dataset)
        yield "versions_dropped", versions
        yield "bytes_freed", freed


def _merge(table: Table) -> tuple[int, lance.LanceDataset]:
    """(files merged, the version that has the result); a merge that a commit has overtaken is made again."""
    for _ in range(ATTEMPTS):
        dataset = table.open_to_write()
        if blob_columns(table.spec):
            return 0, dataset
        try:
            merged = merge_small(dataset, LARGE_FILE, table.barrier)
        except OSError as error:
            if not is_overtaken(error):
                raise
            continue
        table.make_durable(dataset)
        return merged, dataset
    raise ResourceError(f"{table.uri}: {ATTEMPTS} merges in a row were overtaken; stop the writers or retry")
