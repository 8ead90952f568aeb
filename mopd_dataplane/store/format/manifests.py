"""Manifests of a local dataset, `_versions/<number>.manifest`: one a version, which Lance writes and does not sync.

Lance lists the folder to find the newest, so opening takes longer the more versions there are. Here a few look-ups are
enough: a commit takes the next number, and clean-up drops no version newer than the one acknowledged last.
"""

import json
import os
from pathlib import Path

from mopd_dataplane.base.checksum import crc32c
from mopd_dataplane.base.files import fsync
from mopd_dataplane.errors import DamagedError

_LAST_VERSION = (1 << 64) - 1
_MANIFEST_END = b"LANC"
_SECTOR = 512


def manifest(root: Path, version: int) -> Path:
    """Return the path of the manifest of a version of a local dataset."""
    return root / "_versions" / manifest_name(version)


def manifest_name(version: int) -> str:
    """Return Lance's file name for the manifest of a version: in order of name the newest comes first."""
    return f"{_LAST_VERSION - version:020d}.manifest"


def crc_of_manifest(root: Path, version: int) -> int:
    """Compute the crc32c of the manifest of a version of a local dataset. Raises OSError."""
    return crc32c(manifest(root, version).read_bytes())


def names_of_versions(root: Path, least: int = 0) -> list[int]:
    """Return the versions from `least` on that have manifests, newest first."""
    folder = root / "_versions"
    listed = os.listdir(folder) if folder.is_dir() else []
    last = manifest_name(least)
    names = [name.removesuffix(".manifest") for name in listed if name <= last and name.endswith(".manifest")]
    return sorted((_LAST_VERSION - int(name) for name in names if name.isdecimal()), reverse=True)


def newest_version(root: Path, last_version: int) -> int:
    """Return the newest version; 0 when there is none.

    last_version: one that was the newest, or was acknowledged. It may have been dropped since. If another program has
    dropped the versions after it, Lance's own note names a later one, although its next commit may not be in it yet.
    """
    version = max(last_version, _noted(root))
    if not manifest(root, version).exists():
        version = next(iter(names_of_versions(root)), 0)
    while manifest(root, version + 1).exists():
        version += 1
    return version


def _noted(root: Path) -> int:
    """Return the version that Lance noted beside the manifests; 0 when there is no note."""
    try:
        noted = int(json.loads((root / "_versions" / "latest_version_hint.json").read_bytes())["version"])
    except (OSError, ValueError, LookupError, TypeError, ArithmeticError):
        return 0
    return noted if noted <= _LAST_VERSION else 0


def torn_manifests(root: Path, acknowledged: int) -> tuple[dict[int, Path], int]:
    """(manifests that are to be set aside, by version; the newest version below them).

    Only a power cut between a commit and its sync leaves a file without its end, or with a sector of zeros. (Lance may
    read one with such a hole as a dataset with other columns.) Versions above a torn one were not acknowledged either,
    and go with it, so that no number is missing below the newest version. A manifest that is whole and does not parse
    is left to Lance, which refuses it. Raises DamagedError when the newest acknowledged version is gone, or not whole.
    """
    versions = names_of_versions(root, least=acknowledged)
    torn = [version for version in versions if _is_torn(manifest(root, version))]
    if torn and torn[-1] == acknowledged:
        raise DamagedError(
            f"{root}: version {acknowledged} was acknowledged, and its manifest {manifest_name(acknowledged)} is cut "
            "short or has holes; nothing was changed: restore the file from a copy"
        )
    above = {version: manifest(root, version) for version in versions if torn and version >= torn[-1]}
    if len(above) < len(versions):
        return above, versions[len(above)]
    if acknowledged:
        older = names_of_versions(root)[len(above) :]
        newest = f"the newest version there is {older[0]}" if older else "no version is there"
        raise DamagedError(
            f"{root}: version {acknowledged} was acknowledged, but {newest}; manifests were deleted or an older copy "
            "was put back: restore the folder `_versions` from a copy"
        )
    if above:
        raise DamagedError(f"{root}: no manifest is whole; restore the folder `_versions` from a copy")
    return {}, 0


def _is_torn(path: Path) -> bool:
    try:
        content = path.read_bytes()
    except FileNotFoundError:  # dropped by a clean-up since it was listed
        return False
    sectors = (content[start : start + _SECTOR] for start in range(0, len(content), _SECTOR))
    return not content.endswith(_MANIFEST_END) or any(not any(sector) for sector in sectors)


def set_aside(torn: Path) -> None:
    """Rename a torn manifest, so that its number can be used again."""
    torn.rename(torn.with_suffix(".torn"))
    fsync(torn.parent)
