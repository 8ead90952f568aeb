"""Pinned versions: one number per table, tagged so that clean-up leaves their files alone."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING

import lance

from mopd_dataplane.errors import InputError, MismatchError, UnknownNameError, nearest
from mopd_dataplane.records import Snapshot
from mopd_dataplane.store.commit.table import Table
from mopd_dataplane.store.format.manifests import crc_of_manifest
from mopd_dataplane.store.location import StoreLocation
from mopd_dataplane.store.read.tags import drop_tag, set_tag

if TYPE_CHECKING:
    from mopd_dataplane.store.open_store import OpenStore

TAG = re.compile(r"[a-zA-Z0-9][a-zA-Z0-9_.-]{0,127}")


def take_snapshot(location: StoreLocation, tables: Mapping[str, Table]) -> tuple[Snapshot, list[lance.LanceDataset]]:
    """Return the newest version of every table, such that every visible row has its payload, and handles of them.

    Rewards and scores are opened first, then samples, then payload, so that the targets of references exist.
    """
    order = sorted(tables, key=lambda name: (name == "tokens" or name.startswith("signals/"), name == "samples"))
    opened = {name: tables[name].open() for name in order}
    versions = {name: dataset.version for name, dataset in opened.items()}
    return Snapshot(uri=location.uri, versions=versions), list(opened.values())


@contextmanager
def newest(store: OpenStore) -> Iterator[Snapshot]:
    """Hold the newest version of every table for as long as the block, for reads that must agree."""
    tables = {name: store.table_handle(name) for name in store.names()}
    snapshot, handles = take_snapshot(store.location, tables)
    yield snapshot
    del handles


MakeCheck = Callable[[], Callable[[Snapshot], bool]]
"""Called before a snapshot is taken. Returns a function to call once the snapshot has its tags: True if a deletion has
since removed rows of the snapshot."""


def pin(
    location: StoreLocation,
    tables: Mapping[str, Table],
    tag: str,
    target: Snapshot | None = None,
    *,
    make_check: MakeCheck = lambda: lambda snapshot: False,
) -> Snapshot:
    """Return the snapshot under this tag; without one, `target` gets it, or a snapshot taken now.

    Safe to repeat after a crash at any point. A snapshot that a deletion has overtaken is taken again. Raises
    DamagedError when clean-up has dropped a version of `target`, MismatchError when a deletion has overtaken it.
    """
    if not TAG.fullmatch(tag):
        raise InputError(f"snapshot tag {tag!r:.140}: allowed are up to 128 letters, digits, '_', '.', '-'")
    if (pinned_snapshot := _held(location, tag)) is not None:
        return pinned_snapshot
    while True:
        is_overtaken = make_check()
        snapshot, handles = take_snapshot(location, tables) if target is None else (target, [])
        _set_tags(tables, tag, snapshot)
        del handles  # held until the tags were set
        if not is_overtaken(snapshot):
            break
        if target is not None:
            release(location, tables, tag)
            raise MismatchError(
                f"{location.uri}: samples of the snapshot that {tag!r} would pin were deleted meanwhile; run the same "
                "command again, which takes a new one"
            )
    record = {"versions": snapshot.versions, "manifests": _manifests(location, snapshot)}
    if not location.create_json(_file(tag), record) and (first := _held(location, tag)) is not None:
        _set_tags(tables, tag, first)  # another process pinned its own snapshot meanwhile, whose tags this call moved
        return first
    return snapshot


def _set_tags(tables: Mapping[str, Table], tag: str, snapshot: Snapshot) -> None:
    """Tag the versions of a snapshot. One that a dying writer did not make durable is made so: a power cut would take
    it, and its number would go to another version."""
    for name, version in snapshot.versions.items():
        dataset = tables[name].open(version)
        if tables[name].acknowledged() < version:
            tables[name].make_durable(dataset)
        set_tag(dataset, tag, version)


def tags_of(location: StoreLocation) -> list[str]:
    """Return the tags of the pinned snapshots, sorted."""
    return [name.removesuffix(".json") for name in location.children("snapshots") if name.endswith(".json")]


def tags(store: OpenStore) -> list[str]:
    """Return the tags of the snapshots that a store has pinned, sorted."""
    return tags_of(store.location)


def tagged(store: OpenStore, tag: str) -> Snapshot:
    """Return the snapshot under a tag; unlike Store.snapshot it never pins one. Raises UnknownNameError."""
    snapshot = _held(store.location, tag) if TAG.fullmatch(tag) else None
    if snapshot is None:
        raise UnknownNameError(f"{store.uri} has no snapshot {tag!r:.140}: {nearest(tag, tags(store))}")
    return snapshot


def release(location: StoreLocation, tables: Mapping[str, Table], tag: str) -> None:
    """Release a pinned snapshot; no error when there is none."""
    location.remove(_file(tag))
    for table in tables.values():
        drop_tag(table.open(), tag)


def _held(location: StoreLocation, tag: str) -> Snapshot | None:
    content = location.read_json(_file(tag))
    if content is None:
        return None
    return Snapshot(uri=location.uri, versions={name: int(version) for name, version in content["versions"].items()})


def _manifests(location: StoreLocation, snapshot: Snapshot) -> dict[str, str]:
    """Return the crc32c of the manifest of each table's version; empty on an object store, which has checksums of its
    own."""
    if location.root is None:
        return {}
    return {name: f"{crc_of_manifest(location.root / name, v):08x}" for name, v in snapshot.versions.items()}


def _file(tag: str) -> str:
    return f"snapshots/{tag}.json"
