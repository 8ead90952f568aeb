"""The protocol of a copy of a token log on an object store, from which another node can continue it."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol


class LogCopy(Protocol):
    """The copy of one writer's log."""

    def fetch(self, folder: Path) -> int:
        """Bring a local log up to date when the copy is of a later epoch; returns the newest claimed epoch."""

    def claim(self, epoch: int) -> None:
        """Claim an epoch for this process. Raises ResourceError when another node was quicker."""

    def ship(self, folder: Path, epoch: int) -> None:
        """Copy the log as it lies there. Raises ResourceError when another node has taken it over."""
