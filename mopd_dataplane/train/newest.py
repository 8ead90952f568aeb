"""Names of a stage's checkpoints: the newest, and those at the end of a window. Needs no torch, because copying a store
must not need it."""

import json
import re
from dataclasses import dataclass
from pathlib import Path

from mopd_dataplane.base.file_checksums import read_recorded
from mopd_dataplane.base.files import publish_file
from mopd_dataplane.base.sealed_json import seal, unseal
from mopd_dataplane.errors import DamagedError

NAME = re.compile(r"step-\d{8,}")
LATEST = "latest"
"""File that names the newest complete checkpoint."""
BEST = "best.json"
"""File that names the policy versions whose checkpoints stay because they answered best."""
STATE = "state.json"
"""File of a checkpoint that holds its position."""
KEEP = 2
"""Number of checkpoints of a stage that stay, beside the trainer and in a store on an object store."""


@dataclass(frozen=True)
class WindowEnd:
    """A checkpoint between two windows, from which training can go on in another way.

    Example: behind 12 windows of 8 steps: WindowEnd("step-00000096", step=96).
    """

    name: str
    step: int
    """Optimizer steps of the stage before it."""


def window_ends(folder: Path) -> dict[int, WindowEnd]:
    """Checkpoints of a stage at the end of a window, by the policy version that they hold; damaged ones left out."""
    ends = {}
    for checkpoint in sorted(folder.glob("step-*")):
        if not NAME.fullmatch(checkpoint.name):
            continue
        try:
            position = json.loads(read_recorded(checkpoint, STATE))["position"]
            version, inside, step = (int(position[key]) for key in ("window", "window_step", "step"))
        except (DamagedError, OSError, ValueError, LookupError, TypeError):
            continue
        if not inside:
            ends[version] = WindowEnd(checkpoint.name, step)
    return ends


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
        raise DamagedError(
            f"{pointer} names {name!r:.80}, which is not the name of a checkpoint; write the name of a folder step-… "
            "into it"
        )
    return name


def name_newest(folder: Path, name: str) -> None:
    """Point `latest` at a complete checkpoint, durably."""
    publish_file(folder / LATEST, seal({"checkpoint": name}))


def best_versions(folder: Path) -> list[int]:
    """Read the policy versions whose checkpoints stay because they answered best; none where the file is missing or
    torn: it is written again after the next evaluation."""
    try:
        return [int(version) for version in json.loads((folder / BEST).read_bytes())["versions"]]
    except (OSError, ValueError, LookupError, TypeError):
        return []


def name_best(folder: Path, versions: list[int]) -> None:
    """Have the checkpoints of these policy versions stay, durably."""
    folder.mkdir(parents=True, exist_ok=True)
    publish_file(folder / BEST, json.dumps({"versions": versions}).encode())
