"""Name of a stage's newest checkpoint. Needs no torch, because copying a store must not need it."""

import re
from pathlib import Path

from mopd_dataplane.base.files import publish_file
from mopd_dataplane.base.sealed_json import seal, unseal
from mopd_dataplane.errors import DamagedError

NAME = re.compile(r"step-\d{8,}")
LATEST = "latest"
"""File that names the newest complete checkpoint."""
KEEP = 2
"""Number of checkpoints of a stage that stay, beside the trainer and in a store on an object store."""


def newest_checkpoint(folder: Path) -> str:
    """Return the name of the newest complete checkpoint in a folder; empty when there is none. Raises DamagedError.

    The file may also hold a bare name without a checksum, so that a person can select another checkpoint.
    """
    pointer = folder / LATEST
    if not pointer.is_file():
        return ""
    content = pointer.read_bytes()
    name = content.decode(errors="backslashreplace").strip()
    if not NAME.fullmatch(name) and content[:1] == b"{":
        name = str(unseal(content, str(pointer)).get("checkpoint"))
    if not NAME.fullmatch(name):
        raise DamagedError(f"{pointer} names {name!r:.80}, not a checkpoint; write step-… into it")
    return name


def name_newest(folder: Path, name: str) -> None:
    """Point `latest` at a complete checkpoint, durably."""
    publish_file(folder / LATEST, seal({"checkpoint": name}))
