"""Tags of a dataset, which keep versions from clean-up, while other processes set and delete tags too.

Lance lists a folder and then reads each file of it: a tag that is deleted between the two ends the call, whichever
version it was for. Such a call is repeated.
"""

import contextlib
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, TypeVar

import lance

from mopd_dataplane.store.format.lance_errors import is_missing

ATTEMPTS = 64
T = TypeVar("T")


def tagged(dataset: lance.LanceDataset) -> dict[str, int]:
    """Version by tag."""
    tags = _again(dataset.tags.list)
    return {tag: int(info["version"]) for tag, info in tags.items()}


def set_tag(dataset: lance.LanceDataset, tag: str, version: int) -> None:
    """Set a tag to a version, or move it there."""
    if tag in tagged(dataset):
        dataset.tags.update(tag, version)
    else:
        dataset.tags.create(tag, version)


def drop_tag(dataset: lance.LanceDataset, tag: str) -> None:
    """Delete a tag; nothing happens when there is none, or another process was first."""
    if tag in tagged(dataset):
        with contextlib.suppress(ValueError, OSError):
            dataset.tags.delete(tag)
        if tag in tagged(dataset):
            dataset.tags.delete(tag)


def drop_versions(
    dataset: lance.LanceDataset, *, versions: Sequence[int] | None = None, older_than: timedelta | None = None
) -> tuple[int, int]:
    """Drop given versions, or those older than an age, that no tag keeps; returns (versions, bytes) dropped."""
    selection: dict[str, Any] = {"older_than": older_than} if versions is None else {"versions": list(versions)}
    freed = _again(lambda: dataset.cleanup_old_versions(**selection, error_if_tagged_old_versions=False))
    return int(freed.old_versions), int(freed.bytes_removed)


def _again(work: Callable[[], T]) -> T:
    """Repeat a call until no tag was deleted during it; returns its result."""
    for _ in range(ATTEMPTS):
        try:
            return work()
        except (ValueError, OSError) as error:
            if not is_missing(error, "_refs/tags"):
                raise
    return work()
