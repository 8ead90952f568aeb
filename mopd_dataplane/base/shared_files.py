"""Files of one folder under second names in another: hard links where the file system has them, else copies.

Both names mean the same bytes, so only a file that nobody rewrites in place may be shared: to replace it, write another
file and rename it.
"""

import os
from dataclasses import dataclass
from pathlib import Path

from mopd_dataplane.base.files import duplicate_file


@dataclass
class SharedFiles:
    """Shares files, and counts which were linked and which had to be copied."""

    linked: int = 0
    linked_bytes: int = 0
    copied: int = 0
    copied_bytes: int = 0
    reason: str = ""
    """Why the file system refused a link, in its words; empty where it refused none."""

    def share(self, file: Path, target: Path) -> None:
        """Give a file a second name; a target that exists is left alone. Raises FileNotFoundError."""
        if target.exists():
            return
        size = file.stat().st_size
        if reason := _link(file, target):
            self.copied, self.copied_bytes, self.reason = self.copied + 1, self.copied_bytes + size, reason
        else:
            self.linked, self.linked_bytes = self.linked + 1, self.linked_bytes + size

    def share_folder(self, folder: Path, target: Path) -> None:
        """Give every file of a folder a second name. Raises FileNotFoundError for a folder that is being removed."""
        for parent, _, names in os.walk(folder, onerror=_raise):
            for name in names:
                file = Path(parent) / name
                self.share(file, target / file.relative_to(folder))


def _link(file: Path, target: Path) -> str:
    """Give a file a second name, or copy it where the file system refuses; returns why it refused, else nothing."""
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        os.link(file, target)
    except FileNotFoundError:
        raise
    except OSError as error:
        duplicate_file(file, target)
        return error.strerror or type(error).__name__
    return ""


def _raise(error: OSError) -> None:
    raise error
