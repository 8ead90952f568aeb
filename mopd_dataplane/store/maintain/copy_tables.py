"""Copies every table of a store unchanged, file by file: rows keep their ids and versions their numbers.

Lance names files relative to the table and never rewrites one. So the newest version of each table and the pinned ones
are copied as they are: data, sidecars and deletions first, then the manifests that name them. Plans, checkpoints and
the token log, which name rows and versions, stay valid. Other versions are not copied.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import lance

from mopd_dataplane.base.checksum import crc32c
from mopd_dataplane.base.fault_points import fault_point
from mopd_dataplane.errors import DamagedError, UnknownNameError
from mopd_dataplane.records import Snapshot
from mopd_dataplane.store.commit.table import Table
from mopd_dataplane.store.dataset import Store
from mopd_dataplane.store.format.manifests import manifest_name
from mopd_dataplane.store.location import StoreLocation
from mopd_dataplane.store.maintain.copy_files import copy_file
from mopd_dataplane.store.read import snapshot as snapshots


@dataclass(frozen=True)
class PinnedTables:
    """Open versions of every table of a store: clean-up leaves their files alone while they are copied."""

    datasets: dict[str, dict[int, lance.LanceDataset]]
    """Handles by table and version."""
    newest: dict[str, int]
    pins: dict[str, dict[str, int]]
    """Versions of each table by the tag of the snapshot that pins them."""


def pin_tables(source: Store) -> PinnedTables:
    """Open the newest version of every table, and those that snapshots pin.

    Raises DamagedError for a manifest that differs from the acknowledged or pinned one.
    """
    snapshot, handles = snapshots.take_snapshot(
        source.location, {name: source.table_handle(name) for name in table_names(source)}
    )
    datasets = {name: {opened.version: opened} for name, opened in zip(snapshot.versions, handles, strict=True)}
    pins = {}
    for tag, versions in _pins(source).items():
        try:
            for name, version in versions.items():
                if version not in datasets[name]:
                    datasets[name][version] = source.table_handle(name).open(version)
        except DamagedError:
            if tag in snapshots.tags_of(source.location):
                raise
            continue  # a deletion has released it meanwhile
        pins[tag] = versions
    return PinnedTables(datasets, dict(snapshot.versions), pins)


def copy_tables(source: Store, location: StoreLocation, pinned: PinnedTables) -> Iterator[str]:
    """Copy every table and snapshot, durable at the end; yields the name of each finished table.

    Raises DamagedError for a manifest that differs from the acknowledged one.
    """
    for name, newest in pinned.newest.items():
        versions = sorted({newest, *(pin[name] for pin in pinned.pins.values() if name in pin)})
        old = source.table_handle(name)
        if problem := old.manifest_damage():  # else its copy would be acknowledged
            raise DamagedError(f"{old.uri}: {problem}; nothing is copied of it, restore it from a copy")
        for version in versions:
            _copy_version(source, location, name, pinned.datasets[name][version])
            fault_point("whole_copy.version")
        table = Table(location, name)
        for version in versions:
            opened = table.open(version)
            if table.barrier is not None:
                table.barrier.sync_version(opened)
        table.make_durable(table.open())
        yield f"{name}: {table.open().count_rows():,}"
    tables = {name: Table(location, name) for name in pinned.newest}
    for tag, pin in pinned.pins.items():
        snapshots.pin(location, tables, tag, Snapshot(uri=location.uri, versions=pin))
    fault_point("whole_copy.pinned")
    yield f"snapshots: {len(pinned.pins):,}"


def table_names(source: Store) -> list[str]:
    """Return the names of all datasets of a store, queues included."""
    return [*source.names(), *_queues(source)]


def _queues(source: Store) -> list[str]:
    return [f"queues/{name}" for name in source.location.children("queues")]


def _pins(source: Store) -> dict[str, dict[str, int]]:
    """Return the version of each table by tag. Raises DamagedError for a manifest that differs from the pinned one."""
    pins = {}
    for tag in snapshots.tags_of(source.location):
        try:
            pins[tag] = snapshots.tagged(source, tag).versions
        except UnknownNameError:  # a deletion has released it meanwhile
            continue
        recorded = (source.read_json(f"snapshots/{tag}.json") or {}).get("manifests", {})
        for name, versions in recorded.items():
            content = source.location.read(f"{name}/_versions/{manifest_name(pins[tag][name])}")
            if content is not None and f"{crc32c(content):08x}" != versions:
                problem = f"version {pins[tag][name]}, which {tag} pins, has another manifest than it had"
                raise DamagedError(f"{source.uri}/{name}: {problem}; nothing is copied of it, restore it from a copy")
    return pins


def _copy_version(source: Store, location: StoreLocation, name: str, dataset: lance.LanceDataset) -> None:
    """Copy the files of one version of a table, its manifest last."""
    for fragment in dataset.get_fragments():
        for data_file in fragment.data_files():
            stem = data_file.path.removesuffix(".lance")
            for beside in source.location.children(f"{name}/data/{stem}"):
                copy_file(source, location, f"{name}/data/{stem}/{beside}")
            copy_file(source, location, f"{name}/data/{data_file.path}")
        deletions = fragment.metadata.deletion_file
        if deletions is not None:
            copy_file(source, location, f"{name}/{deletions.path(fragment.fragment_id)}")
    transaction = dataset.read_transaction(dataset.version)
    if transaction is not None:
        copy_file(source, location, f"{name}/_transactions/{transaction.read_version}-{transaction.uuid}.txn")
    copy_file(source, location, f"{name}/_versions/{manifest_name(dataset.version)}")
