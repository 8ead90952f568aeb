"""The copy of a token log on the object store: what another node needs to continue its samples.

    wal/<stage>/<writer>/shipped.json        epoch, and the files of the newest complete copy
    wal/<stage>/<writer>/<copy>/...          segments, and the keys and values a graceful stop saved
    wal/<stage>/<writer>/epoch/<n>.json      claims: only the node with the highest may copy its log

The copy of a later epoch replaces a local log, because another node continued from it. Samples are exactly once by uid
even if two nodes run at the same time; the claims only stop the older one early.
"""

import hashlib
import json
import shutil
import socket
import uuid
from pathlib import Path
from typing import Any

from mopd_dataplane.base.fault_points import fault_point
from mopd_dataplane.base.files import publish_folder
from mopd_dataplane.errors import DamagedError, ResourceError
from mopd_dataplane.rollout.log.recovery import epoch_folders
from mopd_dataplane.rollout.runner import SAVED
from mopd_dataplane.run.work_folder import Work
from mopd_dataplane.store.dataset import Store
from mopd_dataplane.store.remote.objects import ObjectFiles

_LISTING = "shipped.json"


def log_names(store: Store) -> list[str]:
    """Token logs of a store, wal/<stage>/<writer>."""
    children = store.location.children
    return [f"wal/{stage}/{writer}" for stage in children("wal") for writer in children(f"wal/{stage}")]


def has_unfinished(work: Work, stage: str) -> bool:
    """Whether a token log of a stage, here or in the store, holds samples that are not committed."""
    if any((work.root / "wal" / stage).glob("*/*/*.wal")):
        return True
    files = work.files
    writers = [] if files is None else files.children(f"wal/{stage}")
    return files is not None and any(StoredLog(files, f"wal/{stage}/{writer}").is_filled for writer in writers)


class StoredLog:
    """The rollout.log.wal.LogCopy of one writer's log in a store, by its name wal/<stage>/<writer>."""

    def __init__(self, files: ObjectFiles, name: str) -> None:
        self._files = files
        self._name = name

    def fetch(self, folder: Path) -> int:
        listing = self._listing()
        if listing["epoch"] > max(epoch_folders(folder), default=0) and listing["files"]:
            staging = folder / ".fetched"
            shutil.rmtree(staging, ignore_errors=True)
            for relative, digest in listing["files"].items():
                self._download(f"{listing['folder']}/{relative}", staging / relative, digest)
            fault_point("logcopy.fetched")
            for old in epoch_folders(folder).values():
                shutil.rmtree(old)
            for saved in folder.glob(f"{Path(SAVED).stem}.*"):
                saved.unlink()
            for part in sorted(staging.iterdir(), key=lambda path: path.is_dir()):  # the segments last: they decide
                publish_folder(part, folder / part.name) if part.is_dir() else part.rename(folder / part.name)
            shutil.rmtree(staging)
        return self._claimed()

    def claim(self, epoch: int) -> None:
        name = f"{self._name}/epoch/{epoch}.json"
        claim = json.dumps({"host": socket.gethostname(), "token": uuid.uuid4().hex}).encode()
        if not self._files.create(name, claim) and self._files.read(name) != claim:
            raise ResourceError(f"another node has just taken the log {self._name} in epoch {epoch}; run again")

    def ship(self, folder: Path, epoch: int) -> None:
        if (newest := self._claimed()) > epoch:
            raise ResourceError(
                f"another node took over the log {self._name} with epoch {newest}, this one has {epoch} and stops; "
                "what it has not committed is drawn again by the new owner, the same way"
            )
        before = self._listing()["folder"]
        copy = f"{self._name}/copy-{uuid.uuid4().hex[:8]}"
        listing: dict[str, Any] = {"epoch": epoch, "folder": copy, "files": {}}
        for file in [*sorted((folder / f"{epoch:08x}").glob("*.wal")), folder / SAVED]:
            if file.is_file():
                # Read once: the log may grow by a watermark meanwhile, and a log cut anywhere is a whole log.
                relative, content = file.relative_to(folder).as_posix(), file.read_bytes()
                self._files.write(f"{copy}/{relative}", content)
                listing["files"][relative] = hashlib.sha256(content).hexdigest()
        fault_point("logcopy.uploaded")
        self._files.write(f"{self._name}/{_LISTING}", json.dumps(listing).encode())
        fault_point("logcopy.listed")
        old = [f"{self._name}/epoch/{claimed}.json" for claimed in self._claims() if claimed < epoch]
        self._files.remove([*(self._files.under(before) if before else []), *old])

    @property
    def is_filled(self) -> bool:
        """Whether the newest copy holds any segment."""
        return bool(self._listing()["files"])

    def _listing(self) -> dict[str, Any]:
        content = self._files.read(f"{self._name}/{_LISTING}")
        return {"epoch": 0, "folder": "", "files": {}} if content is None else json.loads(content)

    def _claimed(self) -> int:
        return max(self._claims(), default=0)

    def _claims(self) -> list[int]:
        names = (name.removesuffix(".json") for name in self._files.children(f"{self._name}/epoch"))
        return [int(name) for name in names if name.isdigit()]

    def _download(self, name: str, file: Path, digest: str) -> None:
        content = self._files.read(name)
        if content is None or hashlib.sha256(content).hexdigest() != digest:
            raise DamagedError(
                f"{self._files.uri}/{name} is not what was shipped; delete {self._name}/{_LISTING} to draw its "
                "unfinished samples anew"
            )
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(content)
