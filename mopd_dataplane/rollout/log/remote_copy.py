"""What a token log asks of whoever keeps a copy of it on an object store, so that another node can continue it."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol


class LogCopy(Protocol):
    """The copy of one writer's log."""

    def fetch(self, folder: Path) -> int:
        """Bring a local log up to date when the copy is of a later epoch; the newest epoch claimed by anybody."""

    def claim(self, epoch: int) -> None:
        """Claim an epoch for this process. Raises ResourceError when another node was quicker."""

    def ship(self, folder: Path, epoch: int) -> None:
        """Copy the log as it lies there. Raises ResourceError when another node has taken it over."""


class NoCopy:
    """A log that stays on its node."""

    def fetch(self, folder: Path) -> int:
        """Nobody else has claimed anything."""
        return 0

    def claim(self, epoch: int) -> None:
        """Nobody else claims."""

    def ship(self, folder: Path, epoch: int) -> None:
        """Nowhere to copy it to."""
