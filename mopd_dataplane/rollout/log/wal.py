"""The token log of one engine replica: appended records survive the process that wrote them.

    log, recovered = TokenLog.open(folder, settings)     # takes the lock, recovers, starts a new epoch
    lsn = log.append(message)                            # `logged`: survives SIGKILL
    log.wait_durable(lsn)                                # `durable`: survives power loss
    log.append(Commit(handles))                          # `committed`: the log may forget them
    if log.full:
        log.rotate(ledger)                               # a new segment begins with a checkpoint; older ones go
    log.close()

Layout: `<folder>/LOCK`, `<folder>/epoch/<n>.json`, `<folder>/<epoch:08x>/<segment:016x>.wal`. Every segment begins with
a checkpoint of the samples that are not committed, so only the newest complete segment is ever needed.
"""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

from mopd_dataplane.base.fault_points import fault_point
from mopd_dataplane.base.log.filesystem import Level, Mount, mount_of
from mopd_dataplane.base.log.log_writer import LogWriter
from mopd_dataplane.errors import DeadlineError, InputError, MopdError, ResourceError
from mopd_dataplane.job import sections
from mopd_dataplane.rollout.log import log_records
from mopd_dataplane.rollout.log.ledger import Ledger
from mopd_dataplane.rollout.log.ownership import claim_epoch, claim_file, drop_claims, make_folder, take_lock
from mopd_dataplane.rollout.log.recovery import Recovered, epoch_folders, recover, segment_files


@contextmanager
def _named(folder: Path) -> Iterator[None]:
    """Turn errors of the operating system into a ResourceError that names the log."""
    try:
        yield
    except MopdError:
        raise
    except OSError as error:
        raise ResourceError(
            f"token log {folder}: {error}; every logged token is kept, run again to continue"
        ) from error


class LogCopy(Protocol):
    """A copy of one writer's log on an object store, from which another node can continue it."""

    def fetch(self, folder: Path) -> int:
        """Update a local log when the copy is of a later epoch. Returns the newest claimed epoch."""

    def claim(self, epoch: int) -> None:
        """Claim an epoch for this process. Raises ResourceError when another node claimed it first."""

    def ship(self, folder: Path, epoch: int) -> None:
        """Copy the local log as it is now. Raises ResourceError when another node has taken it over."""


class TokenLog(LogWriter):
    """Writer of one log, made by `open`."""

    def __init__(
        self,
        folder: Path,
        settings: sections.Wal,
        recovered: Recovered,
        *,
        epoch: int,
        lock: int,
        notice: Callable[[str], None],
        copy: LogCopy | None,
    ) -> None:
        self.folder = folder
        self.mount: Mount = mount_of(folder)
        self._settings = settings
        self._lock = lock
        self._copy = copy
        super().__init__(
            folder / f"{epoch:08x}", secrets.token_bytes(16), epoch=epoch, next_lsn=recovered.next_lsn,
            syncs=settings.durability == "durable", group_commit_s=settings.group_commit_ms / 1000,
            full_disk_wait_s=settings.full_disk_wait_s, notice=notice,
            words=("generation", "every logged token is kept"),
        )  # fmt: skip
        make_folder(self._segments)
        fault_point("wal.epoch")
        self._begin_segment(previous=0)
        try:
            self._log(recovered.fence)
            self._checkpoint(recovered.ledger)
        except BaseException:
            self._file.close()
            raise
        if self._syncs:
            self._flusher.start()

    @classmethod
    def open(
        cls,
        folder: Path,
        settings: sections.Wal,
        *,
        accept: Callable[[Ledger], None] = lambda ledger: None,
        notice: Callable[[str], None] = lambda text: None,
        copy: LogCopy | None = None,
        lock: int | None = None,
    ) -> tuple[TokenLog, Recovered]:
        """Become the writer of a log: lock, recover, start the next epoch with a fence and a checkpoint.

        accept: gets the recovered ledger and may refuse it by raising; the log is then left unchanged. notice: called
        with one line when the disk fills up, and when there is space again. copy: copy of the log elsewhere, from which
        a log that another node left is fetched first. lock: descriptor from take_lock, if the caller has locked the
        folder already; the log owns it from here on.

        Raises ResourceError when another process holds the log or the disk is full, DamagedError from recovery.
        """
        with _named(folder):
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            if lock is None:
                lock = take_lock(folder)
            try:
                # The claim comes before the reading, so that a writer that lost its lock deletes no segments.
                epoch = claim_epoch(folder, above=0 if copy is None else copy.fetch(folder))
                try:
                    recovered = recover(folder)
                    accept(recovered.ledger)
                except MopdError:
                    claim_file(folder, epoch).unlink()  # the log is left unchanged
                    raise
                if copy is not None:
                    copy.claim(epoch)
                log = cls(folder, settings, recovered, epoch=epoch, lock=lock, notice=notice, copy=copy)
                return log, recovered
            except BaseException:
                os.close(lock)
                raise

    @property
    def level(self) -> Level:
        """Highest acknowledgement level of this log, on its file system and with its settings."""
        return self.mount.level if self._syncs else "logged"

    @property
    def full(self) -> bool:
        """True if the segment has reached its size."""
        return self._file.size >= self._settings.segment_bytes

    def append(self, message: log_records.LogRecord) -> int:
        """Write one record and return its lsn: it is `logged`.

        A full disk pauses the call until there is space again. Raises ResourceError when that takes longer than
        `full_disk_wait_s`, or when the log is dead, since a dead log accepts no records.
        """
        with self._appending:
            self._flusher.check()
            fault_point("wal.append")
            lsn = self._log(message)
            fault_point("wal.appended")
        self._flusher.wrote(lsn)
        return lsn

    def rotate(self, ledger: Ledger) -> None:
        """End the segment, begin the next with a checkpoint of the ledger, and delete older segments."""
        with self._appending, self._flusher.paused():
            self._flusher.check()
            try:
                with _named(self.folder):
                    self._check_not_fenced()
                    self._end_segment()
                    self._begin_segment(previous=self._last_crc)
                    self._checkpoint(ledger)
            except ResourceError as failure:
                self._flusher.fail(failure)
                raise

    def ship(self) -> None:
        """Update the copy on the object store. A failure is reported, and the log continues without the copy.

        Raises ResourceError when another node has taken the log over.
        """
        if self._copy is None:
            return
        try:
            self._copy.ship(self.folder, self.epoch)
        except (DeadlineError, InputError) as failure:
            self._notice(f"the token log was not copied to the store, only this node can continue it: {failure}")

    def close(self, *, forget: bool = False) -> None:
        """End the log cleanly. forget: every sample is committed, so the segments are deleted too."""
        self._flusher.stop()
        try:
            self._flusher.check()
            with _named(self.folder):
                self._end_segment()
                fault_point("wal.closed")
                if forget:
                    shutil.rmtree(self._segments)
        finally:
            self.abort()

    def abort(self) -> None:
        """Release the log without writing another byte, as a dying process would."""
        self._flusher.stop()
        self._file.close()
        os.close(self._lock)

    def _checkpoint(self, ledger: Ledger) -> None:
        """Write the samples that are not committed into this segment, and delete older segments once that is
        durable."""
        for message in ledger.checkpoint():
            self._log(message)
        fault_point("wal.base")
        self._sync_whole()
        fault_point("wal.base.synced")
        self._log(log_records.Sync())
        self._check_not_fenced()
        self._retire()

    def _retire(self) -> None:
        for file in segment_files(self._segments):
            if file != self._file.path:
                file.unlink()
                fault_point("wal.retire")
        for epoch, folder in sorted(epoch_folders(self.folder).items()):
            if epoch < self.epoch:
                shutil.rmtree(folder)
                fault_point("wal.retire")
        drop_claims(self.folder, before=self.epoch)

    def _log(self, message: log_records.LogRecord) -> int:
        return self._write(message.kind, message.encode())

    def _check_not_fenced(self) -> None:
        """Check that no newer writer has fenced this one, which locks cannot always prevent. Raises ResourceError."""
        mine, next_one = claim_file(self.folder, self.epoch), claim_file(self.folder, self.epoch + 1)
        if next_one.exists() or not mine.exists():
            raise ResourceError(
                f"another process took over the log {self.folder} after epoch {self.epoch}; this one stops. "
                "Its unsynced tokens are drawn again by the new owner, the same way"
            )
