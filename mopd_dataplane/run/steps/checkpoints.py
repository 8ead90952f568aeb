"""The checkpoints of a stage: on their way to an object store and back, and taken back to the beginning of a window."""

from collections.abc import Sequence
from pathlib import Path

from mopd_dataplane.job.job import Stage
from mopd_dataplane.run.context import Run
from mopd_dataplane.run.work_folder import Work
from mopd_dataplane.train.checkpoint import drop_inside, latest_checkpoint
from mopd_dataplane.train.metrics import FILE as METRICS
from mopd_dataplane.train.newest import KEEP, name_newest, newest_checkpoint


class StoredCheckpoints:
    """The checkpoints that the trainer writes to `folder`, on their way to an object store and back; nothing happens
    for a store in a folder."""

    def __init__(self, work: Work, stage: str) -> None:
        self._work = work
        self._name = f"checkpoints/{stage}"
        self.folder: Path = work.root / "checkpoints" / stage
        self._published = ""

    def fetch(self) -> None:
        """Have the newest checkpoint here, with the metrics up to it, when another node wrote it."""
        artifacts = self._work.artifacts
        newest = max(artifacts.names(self._name), default="") if artifacts is not None else ""
        if newest <= newest_checkpoint(self.folder):  # names sort by step
            return
        (self.folder / METRICS).unlink(missing_ok=True)
        self._work.fetch_file(f"{self._name}/{METRICS}")
        self._work.fetch(f"{self._name}/{newest}")
        name_newest(self.folder, newest)

    def publish(self) -> None:
        """Have the newest checkpoint in the store; one that is replaced meanwhile is left for the next call."""
        artifacts, newest = self._work.artifacts, newest_checkpoint(self.folder)
        if artifacts is None or newest in ("", self._published):
            return
        try:
            self._work.publish_file(f"{self._name}/{METRICS}")
            self._work.publish(f"{self._name}/{newest}")
        except FileNotFoundError:
            return
        self._published = newest
        for old in artifacts.names(self._name)[:-KEEP]:
            artifacts.drop(f"{self._name}/{old}")

    def drop(self, names: Sequence[str]) -> None:
        """Delete checkpoints of these names in the store too."""
        if (artifacts := self._work.artifacts) is not None:
            for name in names:
                artifacts.drop(f"{self._name}/{name}")

    def checkpointed_window_count(self) -> int:
        """Number of windows before the newest checkpoint's position; no kill can make this stage train them again."""
        newest = latest_checkpoint(self.folder)
        return newest[0].window if newest else 0


def windows_done(run: Run, stage: Stage) -> int:
    """Windows that no kill can make a stage train again, by the newest checkpoint, here or in the store."""
    checkpoints = StoredCheckpoints(run.work, stage.name)
    checkpoints.fetch()
    return checkpoints.checkpointed_window_count()


def rewind(run: Run, stage: Stage, window: int) -> None:
    """Remove the checkpoints inside a window, so that training takes it again from its beginning.

    Raises MismatchError when the checkpoint at its beginning is not kept any more.
    """
    checkpoints = StoredCheckpoints(run.work, stage.name)
    checkpoints.fetch()
    checkpoints.drop(drop_inside(checkpoints.folder, window))
