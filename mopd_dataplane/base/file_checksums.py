"""Checksums of folders whose files are never rewritten: policies, checkpoints, discriminators.

`checksums.json` beside the files holds the size in bytes and the crc32c of each; for weights also the sha256, from
which their digest is computed. It is written before the folder gets its final name.
"""

import hashlib
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NotRequired, TypedDict

import google_crc32c

from mopd_dataplane.base.sealed_json import seal, unseal
from mopd_dataplane.errors import DamagedError

CHECKSUMS = "checksums.json"
_PIECE = 4 << 20


class Recorded(TypedDict):
    """Size and checksums of a file."""

    bytes: int
    crc32c: str
    sha256: NotRequired[str]


def write_checksums(folder: Path, *, identities: bool = False, measured: Mapping[str, Recorded] | None = None) -> None:
    """Write `checksums.json` for every file of a finished folder, before it is published. Not yet durable.

    identities: also record the sha256 of weights. measured: records of files that were read already.
    """
    recorded = measured or {}
    files = {name: recorded.get(name) or measure_file(folder / name, identity=identities) for name in _names(folder)}
    (folder / CHECKSUMS).write_bytes(seal({"files": files}))


def measure_file(path: Path, *, identity: bool = False) -> Recorded:
    """Read a file and return its size and checksums. identity: include its sha256."""
    whole, crc, count = hashlib.sha256(), 0, 0
    with path.open("rb") as file:
        while piece := file.read(_PIECE):
            crc = google_crc32c.extend(crc, piece)
            count += len(piece)
            if identity:
                whole.update(piece)
    record: Recorded = {"bytes": count, "crc32c": f"{crc:08x}"}
    return {**record, "sha256": whole.hexdigest()} if identity else record


def read_checksums(folder: Path) -> dict[str, Recorded] | None:
    """Read the records of a folder's files. Returns None for a folder without records. Raises DamagedError."""
    try:
        content = (folder / CHECKSUMS).read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise DamagedError(
            f"{folder / CHECKSUMS} cannot be read ({error.strerror or error}); restore it from a copy"
        ) from None
    files: dict[str, Recorded] = unseal(content, str(folder / CHECKSUMS))["files"]
    return files


def read_recorded(folder: Path, name: str) -> bytes:
    """Read a small file of a recorded folder. Raises DamagedError when it differs from its record, or has none."""
    record = (read_checksums(folder) or {}).get(name)
    if record is None:
        raise DamagedError(f"{folder / name} has no checksum in {CHECKSUMS}; use another folder")
    if problem := file_damage(folder / name, record):
        raise DamagedError(f"{folder / name} {problem}; use another folder")
    return (folder / name).read_bytes()


def find_damage(folder: Path) -> Iterator[tuple[str, str]]:
    """Yield (file, description) for each file of a recorded folder that differs from its record; reads every byte."""
    try:
        recorded = read_checksums(folder)
    except DamagedError as error:
        yield CHECKSUMS, str(error)
        return
    for name, record in (recorded or {}).items():
        if problem := file_damage(folder / name, record):
            yield name, problem
    if recorded is not None:
        for name in set(_names(folder)) - set(recorded):
            yield name, f"was not there when {CHECKSUMS} was written"


_checked: dict[Path, Any] = {}
_lock = threading.Lock()


def check_folder(folder: str | Path) -> dict[str, Recorded] | None:
    """Check a folder's files against their records. Returns the records, or None for a folder without them.

    A folder is read once per process, and again when another one has taken its name.
    Raises DamagedError naming every file that differs.
    """
    root = Path(folder).resolve()
    try:
        stamp = (root / CHECKSUMS).stat()
    except OSError:
        return None
    key = (stamp.st_ino, stamp.st_mtime_ns, stamp.st_size)
    with _lock:
        if _checked.get(root) != key:
            if damage := list(find_damage(root)):
                said = "; ".join(f"{name} {problem}" for name, problem in damage)
                raise DamagedError(f"{root}: {said}; restore it from a copy, or delete the folder and train again")
            _checked[root] = key
    return read_checksums(root)


def _names(folder: Path) -> list[str]:
    paths = (path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
    return sorted(name for name in paths if name != CHECKSUMS)


def file_damage(path: Path, record: Recorded) -> str:
    """Describe how a file differs from its record; empty if it does not."""
    try:
        measured = measure_file(path)
    except OSError as error:
        return f"cannot be read ({error.strerror or error})"
    if measured["bytes"] != record["bytes"]:
        return f"has {measured['bytes']:,} bytes, but {record['bytes']:,} were written"
    if measured["crc32c"] != record["crc32c"]:
        return f"has crc32c {measured['crc32c']}, but {record['crc32c']} was recorded when it was written"
    return ""
