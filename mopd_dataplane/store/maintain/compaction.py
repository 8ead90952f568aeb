"""Maintenance of a store: counts, merging of small files, dropping of old versions."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import lance

from mopd_dataplane.errors import ResourceError
from mopd_dataplane.store.commit.clean_up import CleanedUp, clean_up
from mopd_dataplane.store.commit.fragments import merge_small
from mopd_dataplane.store.commit.in_flight import commit_in_flight
from mopd_dataplane.store.commit.table import COMMIT_ATTEMPTS, Table
from mopd_dataplane.store.format.dataset_format import blob_columns
from mopd_dataplane.store.format.lance_errors import is_commit_conflict, is_missing, writing
from mopd_dataplane.store.location import StoreLocation
from mopd_dataplane.store.maintain.whole import file_sizes, require_whole
from mopd_dataplane.store.read.snapshot import tags_of
from mopd_dataplane.store.read.tags import tagged

LARGE_FILE = 1 << 30
"""Bytes above which a file is left unmerged."""


def describe(location: StoreLocation, tables: Mapping[str, Table]) -> dict[str, Any]:
    """Return counts of a store: per table rows, bytes on disk (all versions), files and version; pinned snapshots.

    freeable_bytes: data that neither the newest nor a tagged version names; upkeep drops it later.
    """
    report = {}
    for name, table in tables.items():
        dataset = table.open()
        sizes, named = file_sizes(dataset), _data_of(dataset, {dataset.version, *tagged(dataset).values()})
        report[name] = {
            "rows": dataset.count_rows(),
            "bytes": sum(sizes.values()),
            "freeable_bytes": sum(size for file, size in _data_sizes(sizes).items() if file not in named),
            "files": len(sizes),
            "fragments": len(dataset.get_fragments()),
            "version": dataset.version,
        }
    mark = location.read_json("store.json") or {}
    return {"uri": location.uri, **mark, "tables": report, "snapshots": tags_of(location)}


def _data_sizes(sizes: Mapping[str, int]) -> Counter[str]:
    """Return the bytes of each data file with its sidecars. sizes: from file_sizes."""
    totals: Counter[str] = Counter()
    for path, size in sizes.items():
        folder, _, name = path.partition("/")
        if folder == "data":
            totals[name.partition("/")[0].removesuffix(".lance")] += size
    return totals


def compact(location: StoreLocation, tables: Mapping[str, Table], *, now: bool = False) -> dict[str, dict[str, Any]]:
    """Merge small files, and drop old versions that no snapshot pins; see clean_up. Rows keep their ids.

    now: drop every version that no snapshot pins and no process of this machine has open, however young (in a folder;
    the readers of an object store cannot be known). Files of hidden states are not merged: that would rewrite every
    byte of them for nothing. Returns, per table, files_merged, versions_dropped, bytes_freed, bytes (left on disk), and
    kept: why data stays that the newest version does not need, and its bytes.
    Raises DamagedError, before anything is changed, when a table has changed since it was committed.
    """
    require_whole(tables, rows=True)
    return {name: dict(_tidy(location, table, now)) for name, table in tables.items()}


def _tidy(location: StoreLocation, table: Table, now: bool) -> Iterator[tuple[str, Any]]:
    with location.committing(table.name), writing(table.uri):
        merged, dataset = _merge(location, table)
        yield "files_merged", merged
        done = clean_up(
            location,
            table.name,
            dataset,
            table.acknowledged(),
            now=now and location.root is not None,
            wait=True,
        )
        yield "versions_dropped", done.versions
        yield "bytes_freed", done.bytes
        sizes = file_sizes(dataset)
        yield "bytes", sum(sizes.values())
        yield "kept", list(_reasons(location, dataset, done, sizes, now=now))


def _reasons(
    location: StoreLocation,
    dataset: lance.LanceDataset,
    done: CleanedUp,
    sizes: Mapping[str, int],
    *,
    now: bool,
) -> Iterator[dict[str, Any]]:
    """Yield the reasons for which data remains that the newest version does not need, each with its bytes."""
    needed, held_bytes = _data_of(dataset, {dataset.version}), _data_sizes(sizes)
    reasons: dict[str, set[int]] = {}
    for tag, version in tagged(dataset).items():
        reasons.setdefault(f"snapshot {tag}", set()).add(version)
    for version, who in done.readers.items():
        reasons.setdefault(f"read by {who}", set()).add(version)
    for why, versions in reasons.items():
        more = _data_of(dataset, versions) - needed
        needed |= more
        yield {"why": why, "bytes": sum(held_bytes[file] for file in more)}
    rest = held_bytes.keys() - needed
    if not rest:
        return
    left = "left by interrupted commits; it goes when it is a week old"
    if done.hindrance:
        left = f"not cleaned up, because {done.hindrance}; run the command again later"
    elif not now:
        left = "of recent versions, or left by interrupted commits; `--now` drops what nobody reads"
    elif location.root is None:
        left = "of versions of the last day: on an object store nobody can tell who reads them"
    yield {"why": left, "bytes": sum(held_bytes[file] for file in rest)}


def _data_of(dataset: lance.LanceDataset, versions: Iterable[int]) -> set[str]:
    """Return the data files of some versions, without their suffixes; none for a version that another clean-up
    drops."""
    paths: set[str] = set()
    for version in versions:
        try:
            fragments = dataset.checkout_version(version).get_fragments()
        except (ValueError, OSError) as error:
            if not is_missing(error, "_versions"):
                raise
        else:
            files = (file for fragment in fragments for file in fragment.data_files())
            paths.update(file.path.removesuffix(".lance") for file in files)
    return paths


def _merge(location: StoreLocation, table: Table) -> tuple[int, lance.LanceDataset]:
    """Merge the small files of a table, repeating a merge that a commit has overtaken.

    Returns the number of files merged, and the version with the result.
    """
    for _ in range(COMMIT_ATTEMPTS):
        dataset = table.open_to_write()
        if blob_columns(table.spec):
            return 0, dataset
        try:
            with commit_in_flight(location, table.name):
                merged = merge_small(dataset, LARGE_FILE, table.barrier)
        except OSError as error:
            if not is_commit_conflict(error):
                raise
            continue
        table.make_durable(dataset)
        return merged, table.open()
    raise ResourceError(
        f"{table.uri}: {COMMIT_ATTEMPTS} merges in a row conflicted with other writers; run fewer "
        "writers at a time, or retry"
    )
