"""Tags of a dataset, which keep versions from clean-up, while other processes set and delete tags too.

Lance lists a folder and then reads each file of it: a tag that is deleted between the two ends the call with an error,
whichever version it was for. Such a call is repeated.
"""

import contextlib
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, TypeVar
from urllib.parse import quote

import lance

from mopd_dataplane.store.format.lance_errors import is_missing

ATTEMPTS = 64
_OLDER_THAN_ANY = timedelta(days=36_500)
"""Age that no version has, even if a clock stood at 1970: Lance accepts no empty list of versions."""
T = TypeVar("T")


def tagged(dataset: lance.LanceDataset) -> dict[str, int]:
    """Return the version of each tag."""
    tags = _again(dataset.tags.list)
    return {tag: int(info["version"]) for tag, info in tags.items()}


def set_tag(dataset: lance.LanceDataset, tag: str, version: int) -> None:
    """Set a tag to a version, or move it there."""
    tags = _with_tags_inside(dataset).tags
    if tag in tagged(dataset):
        tags.update(tag, version)
    else:
        tags.create(tag, version)


def _with_tags_inside(dataset: lance.LanceDataset) -> lance.LanceDataset:
    """Reopen the dataset so that its tags are written in its own folder.

    Given a path with characters that a URL escapes, Lance creates the folder of the tags at the escaped path: an empty
    folder beside the store, or an error if the parent cannot be written. A path in the form of a URL avoids that.
    """
    if "://" in dataset.uri:
        return dataset
    return lance.dataset(f"file-object-store://{quote(dataset.uri)}", version=dataset.version)


def drop_tag(dataset: lance.LanceDataset, tag: str) -> None:
    """Delete a tag; does nothing when there is none, or another process was first."""
    if tag in tagged(dataset):
        with contextlib.suppress(ValueError, OSError):
            dataset.tags.delete(tag)
        if tag in tagged(dataset):
            dataset.tags.delete(tag)


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
