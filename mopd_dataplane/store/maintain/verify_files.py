"""The audit of the files beside the tables: JSON files, and folders of files that are never rewritten."""

import re
from collections.abc import Iterator

from mopd_dataplane.base.file_checksums import CHECKSUMS, find_damage
from mopd_dataplane.base.sealed_json import unseal
from mopd_dataplane.errors import DamagedError, InputError
from mopd_dataplane.store.linked.sources import FOLDER as SOURCES
from mopd_dataplane.store.location import MARK, StoreLocation
from mopd_dataplane.store.maintain.verify_report import damage
from mopd_dataplane.store.read.decode import KEPT
from mopd_dataplane.store.remote.artifacts import ArtifactStore

FOLDERS = {"policies": r"(merged-)?v\d+", "discriminators": r"v\d+", "checkpoints": r"step-\d+"}
"""Parent of recorded folders, below which each stage has one -> their names."""
JOB_FILES = ("job.json", "provenance.json")
"""Files that a job writes about itself: its settings, and its environment."""
INITIAL = "policies/init"
"""Recorded folder that belongs to no stage."""
_NEWEST, _METRICS = "latest", "metrics.jsonl"
"""Files of a stage's checkpoints beside their folders."""

Damage = tuple[str, str]
"""File, relative to the store, and description of its damage."""


def audit_files(location: StoreLocation, *, deep: bool) -> Iterator[Damage]:
    """Find damage of every file that is no part of a table; deep: also of those that hold tensors."""
    snapshots = [f"snapshots/{name}" for name in location.children("snapshots") if name.endswith(".json")]
    tokenizers = [f"{KEPT}/{name}" for name in location.children(KEPT)]
    sources = [f"{SOURCES}/{name}" for name in location.children(SOURCES)]
    for name in (MARK, *JOB_FILES, *snapshots, *tokenizers, *sources):
        yield from _sealed(location, name)
    for stage in location.children("checkpoints"):
        yield from _metrics(location, f"checkpoints/{stage}/{_METRICS}")
    yield from _published(location, deep) if location.root is None else _on_disk(location, deep)


def _on_disk(location: StoreLocation, deep: bool) -> Iterator[Damage]:
    if location.local(INITIAL).is_dir():
        yield from _folder(location, INITIAL, deep)
    for parent, name_pattern in FOLDERS.items():
        for stage in location.children(parent):
            names = [name for name in location.children(f"{parent}/{stage}") if re.fullmatch(name_pattern, name)]
            for name in names:
                yield from _folder(location, f"{parent}/{stage}/{name}", deep)
            if parent == "checkpoints":
                yield from _newest(location, f"{parent}/{stage}/{_NEWEST}", names)


def _sealed(location: StoreLocation, name: str) -> Iterator[Damage]:
    try:
        location.read_json(name)
    except (DamagedError, InputError, OSError) as error:
        yield name, damage(error)


def _folder(location: StoreLocation, name: str, deep: bool) -> Iterator[Damage]:
    folder = location.local(name)
    if not (folder / CHECKSUMS).is_file():
        yield name, f"lies without its {CHECKSUMS}"
    elif deep:
        for file, problem in find_damage(folder):
            yield f"{name}/{file}", problem
    else:
        yield from _sealed(location, f"{name}/{CHECKSUMS}")


def _newest(location: StoreLocation, name: str, there: list[str]) -> Iterator[Damage]:
    """Check the pointer to the newest checkpoint; a bare name in it was written by a person."""
    pointer = location.read(name)
    if pointer is None:
        return
    text = pointer.decode(errors="backslashreplace").strip()
    if not re.fullmatch(FOLDERS["checkpoints"], text):
        try:
            text = str(unseal(pointer, location.of(name)).get("checkpoint"))
        except DamagedError as error:
            yield name, str(error)
            return
    if text not in there:
        yield name, f"names {text!r:.80}, which is not there"


def _metrics(location: StoreLocation, name: str) -> Iterator[Damage]:
    """Check the checksum of each step's line."""
    for number, line in enumerate((location.read(name) or b"").split(b"\n")[:-1], start=1):
        try:
            unseal(line, f"line {number}")
        except DamagedError as error:
            yield name, str(error)


def _published(location: StoreLocation, deep: bool) -> Iterator[Damage]:
    """Check folders on an object store: each file named in its list, by sha256."""
    assert location.files is not None
    artifacts = ArtifactStore(location.files)
    for parent in FOLDERS:
        for name in artifacts.below(parent):
            yield from _listed(location, f"{name}.json", deep)


def _listed(location: StoreLocation, name: str, deep: bool) -> Iterator[Damage]:
    try:
        listing = location.read_json(name) or {}
    except (DamagedError, OSError) as error:
        yield name, damage(error)
        return
    for relative, record in listing["files"].items():
        file = f"{listing['folder']}/{relative}"
        try:
            digest = location.sha256(file) if deep else record["sha256"]
        except FileNotFoundError:
            yield file, "is missing"
            continue
        if digest != record["sha256"]:
            yield file, f"has sha256 {digest}, {record['sha256']} was published"
