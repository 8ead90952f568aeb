"""The audit of pinned versions: each is what it was when it was pinned, and files that only it names are read too."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial

import lance

from mopd_dataplane.store.acknowledged import crc_of_manifest
from mopd_dataplane.store.place import Place
from mopd_dataplane.store.row_ids import fragment_ids
from mopd_dataplane.store.snapshot import tags_of
from mopd_dataplane.store.table import Table
from mopd_dataplane.store.tags import tagged
from mopd_dataplane.store.verify_report import Finding, met
from mopd_dataplane.store.verify_rows import audit_rows, files_of

Payload = Callable[[str, Mapping[str, lance.LanceDataset], set[int]], Iterator[Finding]]
"""Audits given rows of one payload table, at pinned versions of all tables."""


def audit_pins(
    place: Place, tables: Mapping[str, Table], read: dict[str, set[str]], payload: Payload
) -> Iterator[Finding]:
    """Every pinned version; read: data files of each table that were audited already, extended here."""
    for tag in tags_of(place):
        yield from met(f"snapshots/{tag}.json", partial(_audit_pin, place, tables, tag, read, payload))


def _audit_pin(
    place: Place, tables: Mapping[str, Table], tag: str, read: dict[str, set[str]], payload: Payload
) -> Iterator[Finding]:
    pinned = place.read_json(f"snapshots/{tag}.json") or {}
    opened: dict[str, lance.LanceDataset] = {}
    for name, version in pinned.get("versions", {}).items():
        known = pinned.get("manifests", {}).get(name)
        yield from met(name, partial(_open, place, tables, name, int(version), known, tag, opened))
    for name in opened:
        yield from met(name, partial(_audit_fresh, tables[name], opened, read, payload))


def _open(
    place: Place,
    tables: Mapping[str, Table],
    name: str,
    version: int,
    known: str | None,
    tag: str,
    opened: dict[str, lance.LanceDataset],
) -> Iterator[Finding]:
    """The pinned version of a table is there, its manifest is the one that was pinned, and the tag that keeps clean-up
    away is where the snapshot says."""
    if name not in tables:
        yield Finding(name, -1, "", f"version {version} of it is pinned, and it is not there")
        return
    if known is not None and place.root is not None:
        found = f"{crc_of_manifest(place.root / name, version):08x}"
        if found != known:
            yield Finding(name, -1, "", f"manifest of version {version} has crc32c {found}, {known} was pinned")
    opened[name] = tables[name].open(version)
    at = tagged(opened[name]).get(tag)
    if at != version:
        said = "is gone" if at is None else f"is at version {at}"
        yield Finding(name, -1, "", f"tag {tag!r} {said}, its snapshot pins version {version}")


def _audit_fresh(
    table: Table, opened: Mapping[str, lance.LanceDataset], read: dict[str, set[str]], payload: Payload
) -> Iterator[Finding]:
    """Rows of files that no version before has named."""
    seen, dataset = read.setdefault(table.name, set()), opened[table.name]
    fresh = [fragment for fragment in dataset.get_fragments() if not set(files_of(fragment)) <= seen]
    if not fresh:
        return
    if table.spec.heavy:
        rows = {int(row) for fragment in fresh for row in fragment_ids(fragment).tolist()}
        yield from payload(table.name, opened, rows)
    else:
        yield from audit_rows(table.name, dataset, table.spec.key, seen)
    seen.update(file for fragment in fresh for file in files_of(fragment))
