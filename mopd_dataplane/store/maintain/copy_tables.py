"""Copies every table of a store unchanged, file by file: rows keep their ids and versions their numbers.

Lance names files relative to the table and never rewrites one. So the newest version of each table and the pinned ones
are copied as they are: data, sidecars and deletions first, then the manifests that name them. Plans, checkpoints and
the token log, which name rows and versions, stay valid. Other versions are not copied.
"""

from collections.abc import Collection, Iterator
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
from mopd_dataplane.store.queue.logged import LoggedQueue
from mopd_dataplane.store.queue.queue_log import LOGS
from mopd_dataplane.store.read import snapshot as snapshots


@dataclass(frozen=True)
class PinnedTables:
    """Open versions of every table of a store: clean-up leaves their files alone while they are copied."""

    datasets: dict[str, dict[int, lance.LanceDataset]]
    """Handles by table and version."""
    newest: dict[str, int]
    pins: dict[str, dict[str, int]]
    """Versions of each table by the tag of the snapshot that pins them."""


def pin_tables(source: Store, tags: Collection[str] | None = None) -> PinnedTables:
    """Open the newest version of every table, and those that snapshots of these tags pin (None: all snapshots).

    What queues have in logs alone is folded first. Raises DamagedError for a manifest that is not the one that was
    acknowledged, or pinned.
    """
    if source.root is not None:
        for name in source.location.children(LOGS):
            LoggedQueue(source.root, name, starts_folding=False).fold()
    snapshot, handles = snapshots.take_snapshot(
        source.location, {name: source.table_handle(name) for name in table_names(source)}
    )
    datasets = {name: {opened.version: opened} for name, opened in zip(snapshot.versions, handles, strict=True)}
    pins = {}
    for tag, versions in _pins(source, tags).items():
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
            for file in version_files(source.location, name, pinned.datasets[name][version]):
                copy_file(source, location, file)
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


def _pins(source: Store, tags: Collection[str] | None) -> dict[str, dict[str, int]]:
    """Return the version of each table by tag. Raises DamagedError for a manifest that differs from the pinned one."""
    pins = {}
    for tag in snapshots.tags_of(source.location):
        if tags is not None and tag not in tags:
            continue
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


def version_files(location: StoreLocation, name: str, dataset: lance.LanceDataset) -> Iterator[str]:
    """Files of one version of a table, by their names in the store: those that a manifest names, then the manifest."""
    for fragment in dataset.get_fragments():
        for data_file in fragment.data_files():
            stem = data_file.path.removesuffix(".lance")
            for beside in location.children(f"{name}/data/{stem}"):
                yield f"{name}/data/{stem}/{beside}"
            yield f"{name}/data/{data_file.path}"
        deletions = fragment.metadata.deletion_file
        if deletions is not None:
            yield f"{name}/{deletions.path(fragment.fragment_id)}"
    transaction = dataset.read_transaction(dataset.version)
    if transaction is not None:
        yield f"{name}/_transactions/{transaction.read_version}-{transaction.uuid}.txn"
    yield f"{name}/_versions/{manifest_name(dataset.version)}"
