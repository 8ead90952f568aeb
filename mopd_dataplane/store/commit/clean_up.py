"""Clean-up of old versions of a table, and of files that interrupted commits left.

What goes is older than the newest acknowledged version, has no tag, and, in a folder, is open in no process. There
nothing is deleted while a commit is in flight (in_flight.py), and the newest RECENT_VERSIONS stay for readers on other
machines, whose locks are not seen. An object store has no locks: versions of the last day stay, by the server's clock,
and a node whose clock differs deletes nothing.
"""

import gc
import re
import time
from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import lance

from mopd_dataplane.store.commit.in_flight import no_commit_in_flight
from mopd_dataplane.store.format.manifests import names_of_versions
from mopd_dataplane.store.location import StoreLocation
from mopd_dataplane.store.read.open_versions import free_versions
from mopd_dataplane.store.read.tags import drop_versions, remove_torn_tags, tagged

KEEP = timedelta(days=1)
"""Age up to which untagged versions on an object store are left alone."""
RECENT_VERSIONS = 8
"""Number of newest versions in a folder that clean-up does not remove."""
VERSIONS_PER_CLEAN_UP = 16
"""Number of versions beyond them at which a commit starts a clean-up, so that the cost is spread."""
STAGED_S = 600.0
"""How long a file that Lance began to write must be untouched before it is taken for that of a killed process."""
COMMITS_S = 10.0
"""How long an explicit clean-up waits for commits in flight, in seconds."""
CLOCK_TOLERANCE = timedelta(hours=1)
"""Largest difference between the clocks of a node and its object store at which the node still cleans up."""


@dataclass(frozen=True)
class CleanedUp:
    """Result of a clean-up of one table, for example two versions: CleanedUp(versions=2, bytes=1_048_576)."""

    versions: int = 0
    bytes: int = 0
    readers: dict[int, str] = field(default_factory=dict)
    """Version → processes that have it open."""
    hindrance: str = ""
    """Reason for which nothing was deleted; empty after a clean-up."""


def clean_up(
    location: StoreLocation,
    table: str,
    dataset: lance.LanceDataset,
    acknowledged: int,
    *,
    now: bool = False,
    needed: Collection[int] = (),
    readers_keep: bool = True,
    wait: bool = False,
) -> CleanedUp:
    """Drop the versions before the acknowledged one that are old enough and that nothing needs.

    now: however new they are. needed: versions that stay besides those that are tagged. readers_keep: versions that a
    process of this machine has open stay too. wait: wait for commits in flight.
    """
    if location.root is None:
        offset = location.clock_offset()
        if abs(offset) > CLOCK_TOLERANCE:
            return CleanedUp(hindrance=f"the clock of this machine is {abs(offset)} off that of the object store")
        old = _old_versions(location, table, dataset, acknowledged, needed, now=now)
        return CleanedUp(len(old), drop_versions(dataset, old))
    with no_commit_in_flight(location, table, COMMITS_S if wait else 0.0) as committers:
        if committers:
            return CleanedUp(hindrance=f"a commit is in flight: {', '.join(committers)}")
        _sweep_staged(location.root / table)
        remove_torn_tags(dataset, lambda tag: location.has(f"snapshots/{tag}.json"))
        old = _old_versions(location, table, dataset, acknowledged, needed, now=now)
        if not readers_keep:
            return CleanedUp(len(old), drop_versions(dataset, old))
        if wait:
            gc.collect()  # frees unreferenced handles, and so the versions that they hold
        with free_versions(location.root / table, old) as (free, readers):
            freed = drop_versions(dataset, free)
    return CleanedUp(len(free), freed, {version: ", ".join(names) for version, names in readers.items()})


def _sweep_staged(folder: Path) -> None:
    """Remove files that have the names under which Lance begins to write, and that nobody has written to for a while.

    No commit of this package may be in flight. Another program that uses Lance registers none, so what is written to
    stays; if clocks leap, its write fails and nothing that was acknowledged is lost.
    """
    until = time.time() - STAGED_S
    for file in folder.rglob("*"):
        if file.name.startswith(".tmp") or re.search(r"#\d+$", file.name):
            with suppress(FileNotFoundError):
                if file.stat().st_mtime < until:
                    file.unlink()


def _old_versions(
    location: StoreLocation,
    table: str,
    dataset: lance.LanceDataset,
    acknowledged: int,
    needed: Collection[int],
    *,
    now: bool,
) -> list[int]:
    if location.root is not None:
        versions = names_of_versions(location.root / table)[0 if now else RECENT_VERSIONS :]
    else:
        until = datetime.max if now else datetime.now() - KEEP
        entries: list[dict[str, Any]] = dataset.versions()  # type: ignore[assignment]
        versions = [entry["version"] for entry in entries if entry["timestamp"] < until]
    stays = {*tagged(dataset).values(), *needed}
    return [version for version in versions if version < acknowledged and version not in stays]
