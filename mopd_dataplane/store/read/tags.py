"""Tags of a dataset, which keep versions from clean-up, while other processes set and delete tags too.

Lance lists a folder and then reads each file of it: a tag that is deleted between the two ends the call, whichever
version it was for. Such a call is repeated.

Lance syncs no tag. In a folder a tag is durable when `set_tag` returns. A tag that a power cut tore before is no tag:
nobody was told of it, and clean-up deletes its file.
"""

import contextlib
import json
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import quote

import lance

from mopd_dataplane.base.files import fsync
from mopd_dataplane.errors import DamagedError
from mopd_dataplane.store.format.lance_errors import is_missing, writing

ATTEMPTS = 64
_OLDER_THAN_ANY = timedelta(days=36_500)
"""Age that no version has, even if a clock stood at 1970: Lance accepts no empty list of versions."""
T = TypeVar("T")


def tag_file(tag: str) -> str:
    """File of a tag in the folder of its dataset, which Lance writes."""
    return f"_refs/tags/{tag}.json"


def tagged(dataset: lance.LanceDataset) -> dict[str, int]:
    """Return the version of each tag."""
    try:
        tags = _again(dataset.tags.list)
    except (RuntimeError, ValueError, OSError):
        if not (torn := _torn_tags(dataset)):
            raise
        names = [file.stem for file in _tag_files(dataset) if file not in torn]
        return {tag: int(dataset.tags.get_version(tag)) for tag in names}
    return {tag: int(info["version"]) for tag, info in tags.items()}


def set_tag(dataset: lance.LanceDataset, tag: str, version: int) -> None:
    """Set a tag to a version, or move it there; durable on return."""
    for file in _torn_tags(dataset):
        if file.stem == tag:
            file.unlink(missing_ok=True)
    tags = _with_tags_inside(dataset).tags
    if tag in tagged(dataset):
        tags.update(tag, version)
    else:
        tags.create(tag, version)
    if (folder := _tag_folder(dataset)) is not None:
        with writing(dataset.uri):
            for path in (folder / f"{tag}.json", folder, folder.parent, folder.parent.parent):
                fsync(path)


def remove_torn_tags(dataset: lance.LanceDataset, is_recorded: Callable[[str], bool]) -> None:
    """Delete the tags that a power cut tore; with one of them Lance cleans up nothing.

    is_recorded: whether somebody was told of a tag. Raises DamagedError for one that was recorded: its file is damaged.
    """
    for file in _torn_tags(dataset):
        if is_recorded(file.stem):
            raise DamagedError(
                f"{file} is no tag of Lance any more, and snapshot {file.stem} needs it; nothing was cleaned up: "
                "restore the file from a copy"
            )
        file.unlink(missing_ok=True)


def _tag_folder(dataset: lance.LanceDataset) -> Path | None:
    """Folder of a local dataset's tags; None on an object store, which takes only whole files."""
    return None if "://" in dataset.uri else Path(dataset.uri) / "_refs" / "tags"


def _tag_files(dataset: lance.LanceDataset) -> list[Path]:
    folder = _tag_folder(dataset)
    return sorted(folder.glob("*.json")) if folder is not None else []


def _torn_tags(dataset: lance.LanceDataset) -> list[Path]:
    """Files of tags that are not JSON."""
    torn = []
    for file in _tag_files(dataset):
        with contextlib.suppress(FileNotFoundError):  # deleted meanwhile
            try:
                json.loads(file.read_bytes())
            except ValueError:
                torn.append(file)
    return torn


def _with_tags_inside(dataset: lance.LanceDataset) -> lance.LanceDataset:
    """Reopen the dataset so that its tags are written in its own folder.

    Given a path with characters that a URL escapes, Lance creates the folder of the tags at the escaped path: an empty
    folder beside the store, or an error if the parent cannot be written. A path in the form of a URL avoids that.
    """
    if "://" in dataset.uri:
        return dataset
    return lance.dataset(f"file-object-store://{quote(dataset.uri)}", version=dataset.version)


def drop_tag(dataset: lance.LanceDataset, tag: str) -> None:
    """Delete a tag, durably; nothing happens when there is none, or another process was first."""
    if tag not in tagged(dataset):
        return
    with contextlib.suppress(ValueError, OSError):
        dataset.tags.delete(tag)
    if tag in tagged(dataset):
        dataset.tags.delete(tag)
    if (folder := _tag_folder(dataset)) is not None:
        with writing(dataset.uri):
            fsync(folder)


def drop_versions(dataset: lance.LanceDataset, versions: Sequence[int]) -> int:
    """Drop these versions, unless tagged, and week-old files that no version names. Returns the bytes freed."""
    selection: dict[str, Any] = {"versions": list(versions)} if versions else {"older_than": _OLDER_THAN_ANY}
    freed = _again(lambda: dataset.cleanup_old_versions(**selection, error_if_tagged_old_versions=False))
    return int(freed.bytes_removed)


def _again(work: Callable[[], T]) -> T:
    """Repeat a call until no tag was deleted during it. Returns its result."""
    for _ in range(ATTEMPTS):
        try:
            return work()
        except (ValueError, OSError) as error:
            if not is_missing(error, "_refs/tags"):
                raise
    return work()
